"""Calls of all operators on a mesh of nodes and ranks of a node."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from unittest import mock

import torch

from tests.ops.collectives.exchanges import COMPOSED, EXCHANGES
from tests.ops.meshes import Nodes, in_order, mesh_of
from tileweave import ops
from tileweave.builtins.errors import TileWeaveError
from tileweave.ops.core import nccl
from tileweave.ops.core.registry import operators_of
from tileweave.ops.gemm.gemm_operator import GemmOperator

MASKS = {
    "causal": (True, "contiguous"), "zigzag": (True, "zigzag"), "full": (False, "contiguous")
}  # fmt: skip
ROWS = "all_gather_matmul and rows"
EVERY = [*COMPOSED, *operators_of(GemmOperator), *MASKS]


def inputs_of(name: str, ranks: int) -> list[torch.Tensor]:
    """Return the inputs of a rank."""
    if name in MASKS:
        return [torch.ones(1, 8, 2, 16)] * 3
    if name in operators_of(GemmOperator):
        rows = 16 if name == "all_gather_matmul" else 16 * ranks
        return [torch.ones(rows, 16, dtype=torch.float16), torch.ones(16, 16, dtype=torch.float16)]
    return [torch.ones(4 * ranks, 24)]


def options_of(name: str, ranks: int) -> tuple[int, ...]:
    """Return the options of a collective; the root of a broadcast is the last rank."""
    return (ranks - 1,) if name == "broadcast" else EXCHANGES[name].options


def public(name: str, ranks: int, mesh) -> Callable[[], object]:
    inputs = inputs_of(name.partition(" ")[0], ranks)
    if name in MASKS:
        causal, layout = MASKS[name]
        return lambda: ops.sp_attention(*inputs, causal=causal, layout=layout, group=mesh)
    if name == ROWS:
        return lambda: ops.all_gather_matmul(*inputs, mesh, return_gathered=True)
    options = () if name in operators_of(GemmOperator) else options_of(name, ranks)
    return lambda: getattr(ops, name)(*inputs, *options, mesh)


def while_capturing(name: str, nodes: Nodes, uses_gloo: bool) -> tuple[str, int]:
    """Return the error of a call while a CUDA graph seems to be captured, and the number of
    transfers and collectives that began.

    Args:
        uses_gloo: whether the groups seem to use gloo, instead of NCCL.
    """
    call, log, start, run = public(name, in_order(nodes)[1], mesh_of(nodes)), [], *_STARTS
    call()
    with ExitStack() as patches:
        for function, value in (
            ("capturing", lambda: True),
            ("uses_gloo", lambda *_: uses_gloo),
            ("start_exchanges", lambda *args: log.append(args) or start(*args)),
            ("NamedPeers", lambda *args: log.append(args) or run(*args)),
        ):
            patches.enter_context(mock.patch.object(nccl, function, value))
        try:
            call()
        except TileWeaveError as error:
            return str(error), len(log)
    return "", len(log)


_STARTS = nccl.start_exchanges, nccl.NamedPeers
