"""Functions that test_event_order.py runs: operators on a mesh whose steps are recorded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

import torch

from tests.ops.collectives.exchanges import EXCHANGES
from tests.ops.event_order import Recorder, Trace
from tests.ops.meshes import Nodes, in_order, mesh_of
from tileweave import ops
from tileweave.builtins.errors import TileWeaveError
from tileweave.ops.attention import sp_attention
from tileweave.ops.attention.problem import checked_attention
from tileweave.ops.collectives import all_gather, all_to_all
from tileweave.ops.collectives.collective import Collective, checked_problem
from tileweave.ops.core import call as calls
from tileweave.ops.core import library, nccl
from tileweave.ops.core.across_nodes import Mesh, pieces_of_nodes
from tileweave.ops.core.groups import TwoLevels, ranks_of
from tileweave.ops.core.operator import Operator
from tileweave.ops.core.problem import checked_problem as checked_product
from tileweave.ops.core.registry import operators_of
from tileweave.ops.gemm import all_gather_matmul

MASKS = {
    "causal": (True, "contiguous"), "zigzag": (True, "zigzag"), "full": (False, "contiguous")
}  # fmt: skip
ROWS = "all_gather_matmul and rows"
EVERY = [*operators_of(Collective), *operators_of(Operator), *MASKS]


def inputs_of(name: str, ranks: int) -> list[torch.Tensor]:
    """Return the inputs of a rank."""
    if name in MASKS:
        return [torch.ones(1, 8, 2, 16)] * 3
    if name in operators_of(Operator):
        rows = 16 if name == "all_gather_matmul" else 16 * ranks
        return [torch.ones(rows, 16, dtype=torch.float16), torch.ones(16, 16, dtype=torch.float16)]
    return [torch.ones(4 * ranks, 24)]


def options_of(name: str, ranks: int) -> tuple[int, ...]:
    """Return the options of a collective; the root of a broadcast is the last rank."""
    return (ranks - 1,) if name == "broadcast" else EXCHANGES[name].options


def problem_of(name: str, ranks: int):
    name = name.partition(" ")[0]
    inputs = inputs_of(name, ranks)
    if name in MASKS:
        causal, layout = MASKS[name]
        return checked_attention(*inputs, ranks, causal=causal, layout=layout)
    if name in operators_of(Operator):
        return checked_product(name, *inputs, ranks)
    return checked_problem(name, *inputs, None, ranks, options_of(name, ranks))


def recorded(name: str, nodes: Nodes) -> Trace:
    """Record a call of a public function with ``torch.distributed`` at both levels."""
    (_, count), mesh, recorder = in_order(nodes), mesh_of(nodes), Recorder()
    call = public(name, count, mesh)
    call()  # the ranks compare the first call with other shapes
    with ExitStack() as patches:
        for patch in patches_of(recorder):
            patches.enter_context(patch)
        with recorder.recording() as trace:
            call()
    return trace


def public(name: str, ranks: int, mesh) -> Callable[[], object]:
    inputs = inputs_of(name.partition(" ")[0], ranks)
    if name in MASKS:
        causal, layout = MASKS[name]
        return lambda: ops.sp_attention(*inputs, causal=causal, layout=layout, group=mesh)
    if name == ROWS:
        return lambda: ops.all_gather_matmul(*inputs, mesh, return_gathered=True)
    options = () if name in operators_of(Operator) else options_of(name, ranks)
    return lambda: getattr(ops, name)(*inputs, *options, mesh)


def patches_of(recorder: Recorder) -> Iterator[mock._patch]:
    """Yield the patches that record calls within the node and transfers."""
    of, in_node, multiply_of = Mesh.of, Collective.in_node, calls._in_node
    attend, computed = sp_attention._attend_in_node, all_gather_matmul._compute_with_rows

    @contextmanager
    def recorded_mesh(*args):
        with of(*args) as mesh:
            yield recorder.mesh(mesh)

    def computed_in_node(a, b, out, group, *options):
        if isinstance(ranks_of(group), TwoLevels):
            return computed(a, b, out, group, *options)
        named = recorder.call(lambda _, a, b, out: computed(a, b, out, group, *options), out=3)
        return named(all_gather_matmul.AllGatherMatmul, a, b, out)

    # The dispatch mode then sees what operators do, and not only the operators.
    yield mock.patch.object(library, "needs_dispatcher", lambda args: False)
    yield mock.patch.object(Mesh, "of", recorded_mesh)
    yield mock.patch.object(
        Collective, "in_node", staticmethod(lambda *args: recorder.call(in_node(*args), out=2))
    )
    yield mock.patch.object(
        calls, "_in_node", lambda *args: recorder.call(multiply_of(*args), out=3)
    )
    yield mock.patch.object(sp_attention, "_attend_in_node", recorder.call(attend))
    yield mock.patch.object(all_gather_matmul, "_compute_with_rows", computed_in_node)


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
            ("naming_peers", lambda *args: log.append(args) or run(*args)),
        ):
            patches.enter_context(mock.patch.object(nccl, function, value))
        try:
            call()
        except TileWeaveError as error:
            return str(error), len(log)
    return "", len(log)


_STARTS = nccl.start_exchanges, nccl.naming_peers


def recorded_with_early_waits(name: str, nodes: Nodes) -> Trace:
    """Record an operator that waits for all pieces before it uses its own."""

    def pieces(*args):
        yield from [*pieces_of_nodes(*args)]

    with ExitStack() as patches:
        for module in (all_gather, all_gather_matmul, all_to_all):
            patches.enter_context(mock.patch.object(module, "pieces_of_nodes", pieces))
        return recorded(name, nodes)
