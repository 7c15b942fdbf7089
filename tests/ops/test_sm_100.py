"""Operators without a GEMM are not refused on sm_100, and nvcc assembles all their kernels for it.

No such GPU has run them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

import tileweave as tw
from tests.ops.collectives.exchanges import EXCHANGES
from tests.ops.decode.test_programs import LATENT, LLAMA, MLA, QUANTIZED, SMALL
from tileweave.ops.collectives.collective import Collective, checked_problem
from tileweave.ops.core import strategy
from tileweave.ops.core.registry import OPERATORS, operators_of
from tileweave.ops.decode.decode_attention import program as decode_program
from tileweave.ops.decode.kernels.config import DecodeConfig
from tileweave.ops.moe.combine import Combine
from tileweave.ops.moe.dispatch import Dispatch
from tileweave.ops.moe.kernels.quantize import quantize_program
from tileweave.ops.moe.kernels.routing import RoutingConfig, routing_program
from tileweave.ops.moe.row_exchange import RowExchange
from tileweave.ops.moe.row_problem import RowProblem
from tileweave.ops.norm.all_reduce_rms_norm import OWN as NORM_STRATEGIES
from tileweave.ops.norm.all_reduce_rms_norm import AllReduceRmsNorm
from tileweave.ops.norm.problem import NormProblem
from tileweave.runtime import Plan
from tileweave.runtime.host.group import Group

RANKS = 4
ARCH = "sm_100a"
GPU = torch.device("cuda", 0)
Built = tuple[Any, int]
"""A program or plan, and its number of ranks."""


def collective(op: str, transport: str) -> Built:
    options = EXCHANGES[op].options
    x = torch.empty(512, 64 * RANKS, dtype=torch.bfloat16, device="meta")
    if transport == "ll":
        x = x[: 4 * RANKS]
    problem = checked_problem(op, x, None, RANKS, options)
    assert OPERATORS[op].obstacle(problem, transport) is None
    return OPERATORS[op].steps(problem, transport), RANKS


def norm(name: str, quant: str | None, ranks: int = RANKS) -> Built:
    problem = NormProblem("", 16, 4096, ranks, torch.bfloat16, 1e-6, True, quant)
    return AllReduceRmsNorm.program(problem, name), ranks


def decode(config: DecodeConfig) -> Built:
    return decode_program(config), config.ranks


def rows(operator: type[RowExchange]) -> Built:
    return operator.program(RowProblem("", 128, 8, 1024, 7168, RANKS, torch.bfloat16)), RANKS


def routing(tokens: int) -> Built:
    return routing_program(RoutingConfig(RANKS, tokens, 8, 32, 4 * tokens, "int32")), RANKS


PROGRAMS: dict[str, Callable[[], Built]] = {
    **{
        f"{op} by {transport}": partial(collective, op, transport)
        for op, kind in operators_of(Collective).items()
        for transport in kind.transports()
    },
    **{
        f"all_reduce_rms_norm by {name}, {quant}": partial(norm, name, quant)
        for name in NORM_STRATEGIES
        for quant in (None, "fp8", "fp8_1x128")
    },
    "all_reduce_rms_norm of one rank": partial(norm, "", "fp8_1x128", 1),
    "decode_attention small": partial(decode, SMALL),
    "decode_attention fp8": partial(decode, QUANTIZED),
    "decode_attention latent": partial(decode, LATENT),
    "decode_attention large": partial(decode, LLAMA),
    "decode_attention MLA": partial(decode, MLA),
    "dispatch": partial(rows, Dispatch),
    "combine": partial(rows, Combine),
    "routing by one block": partial(routing, 16),
    "routing by several blocks": partial(routing, 2048),
    "quantization": lambda: (quantize_program(7168, 32, "bfloat16", 1e-4, 132), 1),
}
FAST = ("all_reduce by ldst", "dispatch")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in FAST else pytest.mark.long) for n in PROGRAMS]
)
def test_kernels_assemble(ptxas, name):
    steps, ranks = PROGRAMS[name]()
    for kernel in steps.kernels(ranks) if isinstance(steps, Plan) else [steps]:
        ptx = tw.emit(kernel, "ptx", ARCH, ranks)
        assert "wgmma" not in ptx and "tcgen05" not in ptx
        ptxas(ptx, ARCH)


def test_decode_attention_multiplies_by_mma():
    """TileLang chooses the instruction."""
    source = tw.emit(decode_program(LLAMA), "cuda", ARCH, LLAMA.ranks)
    assert "mma_sync" in source and "wgmma" not in source and "tcgen05" not in source


@pytest.mark.parametrize(
    ("capability", "uses_wgmma", "reason"),
    [
        ((9, 0), False, None),
        ((9, 0), True, None),
        ((10, 0), False, None),
        ((10, 0), True, "cuda:0 is sm_100; expected sm_90"),
        ((8, 0), False, "cuda:0 is sm_80; expected sm_90 or sm_100"),
        ((10, 3), False, "cuda:0 is sm_103; expected sm_90 or sm_100"),
    ],
)
def test_what_is_refused(monkeypatch, capability, uses_wgmma, reason):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    group = Group(0, 2, 0, GPU, None, None)
    assert strategy.obstacle_of_ranks(GPU, group, uses_wgmma) == reason
