"""Collectives in ``tileweave bench``: ours by each transport, NCCL, and copies without kernels."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from math import gcd, prod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .. import ops
from ..builtins.errors import TileWeaveError
from ..ops.collectives.collective import Collective, checked_problem
from ..ops.collectives.transport import OWN, Transport, obstacle
from ..ops.core import nccl
from ..ops.core.collective_problem import CollectiveProblem
from ..ops.core.compiled import op_cache_of
from ..ops.core.registry import OPERATORS
from ..runtime import Plan
from ..runtime.host.group import Group
from .case import (
    EXCHANGE,
    NCCL,
    OURS,
    TRANSPORT,
    Buffers,
    Case,
    Constructor,
    Family,
    Implementation,
    Missing,
    by_copies,
    by_reference,
)
from .results import Size

if TYPE_CHECKING:
    from .selection import BenchOptions

SIZES = 1, 16, 64, 256
"""Default sizes of a rank's input, in MiB."""
_PART = 8
"""Parts of ranks are multiples of this number of elements: 16 bytes, for the TMA."""
_COLUMNS = 1024
"""Most elements of a row."""


def cases(collective: type[Collective], options: BenchOptions, ranks: int) -> list[Case]:
    """Return a case for each size of the command line."""
    if options.shapes:
        raise TileWeaveError(
            f"bench: --shapes {','.join(options.shapes)} of {collective.op}; expected --sizes only"
        )
    op, sizes = collective.op, [size_of(mebibytes, ranks) for mebibytes in options.sizes or SIZES]
    return [
        Case(
            op,
            size,
            FAMILY,
            operations=size.bytes,
            symmetric_bytes=symmetric_bytes(op, size),
            gathered_bytes=gathered_bytes(op, size),
            implementations=IMPLEMENTATIONS,
        )
        for size in sizes
    ]


def size_of(mebibytes: int, ranks: int) -> Size:
    """Return the least size, from ``mebibytes`` on, that divides among the ranks."""
    unit = 2 * _PART * ranks
    return Size(-(-(mebibytes << 20) // unit) * unit, ranks)


def problem_of(op: str, size: Size, dtype: torch.dtype) -> CollectiveProblem:
    """Return the problem of a matrix, whose rows divide among the ranks. Integer arguments are
    0."""
    elements = size.bytes // dtype.itemsize
    columns = gcd(elements // size.ranks, _COLUMNS)
    x = torch.empty(elements // columns, columns, dtype=dtype, device="meta")
    return checked_problem(op, x, None, size.ranks, [0] * len(OPERATORS[op].options))


def plan_of_copies(problem: CollectiveProblem) -> Plan | None:
    """Return the plan that only copies; None if copies alone do not compute the collective."""
    elements = prod(problem.result) // problem.ranks
    return OPERATORS[problem.op].copies(
        elements, problem.ranks, problem.tile_dtype, *problem.options
    )


def gathered_bytes(op: str, size: Size) -> int:
    """Return the bytes that the implementation by copies writes to each rank."""
    problem = problem_of(op, size, torch.bfloat16)
    return 0 if plan_of_copies(problem) is None else 2 * prod(problem.result)


def symmetric_bytes(op: str, size: Size) -> int:
    """Return the symmetric memory of our collective on each rank, by all transports and once more
    by ``auto``, without counters and tails."""
    collective, problem = OPERATORS[op], problem_of(op, size, torch.bfloat16)
    possible = [name for name in OWN if collective.obstacle(problem, name) is None]
    by_transport = [collective.symmetric_bytes(problem, name) for name in possible]
    return sum(by_transport) + max(by_transport)


@dataclass(frozen=True)
class Inputs:
    """Input of one rank, and the expected result."""

    x: Tensor
    result: Tensor

    @staticmethod
    def random(problem: CollectiveProblem, group: Group) -> Iterator[Inputs]:
        """Yield new inputs: integers whose sums are exact in any order. Collective."""
        generator = torch.Generator(group.device).manual_seed(group.rank)
        expected = OPERATORS[problem.op].expected
        while True:
            shape, device = problem.shape, group.device
            x = torch.randint(-8, 9, shape, generator=generator, device=device).to(problem.dtype)
            all_inputs = nccl.all_gather(x[None], group)
            yield Inputs(x, expected(all_inputs, group.rank, *problem.options))


def stage(problem: CollectiveProblem, group: Group) -> tuple[dict[str, Tensor], Iterator[Inputs]]:
    """Return memory for the result, and inputs, as in ``Family``."""
    result = torch.empty(problem.result, dtype=problem.dtype, device=group.device)
    return {"result": result}, Inputs.random(problem, group)


def programs(problem: CollectiveProblem, group: Group) -> list[Any]:
    """Return the programs and plans that our implementations launch, as in ``Family``."""
    collective = OPERATORS[problem.op]
    names = [name for name in OWN if not obstacle(name, problem, group.device, group, collective)]
    return [collective.steps(problem, name) for name in names]


def choice(problem: CollectiveProblem, inputs: Inputs) -> Transport:
    """Return the transport of our collective, and the reason."""
    return ops.transport_of(problem.op, inputs.x, *problem.options)


def _ours(buffers: Buffers) -> Implementation:
    operator, options = getattr(ops, buffers.problem.op), buffers.problem.options
    return buffers.into("result", lambda inputs, out: operator(inputs.x, *options, out=out))


def _by_transport(buffers: Buffers, name: str) -> Implementation:
    problem, group = buffers.problem, buffers.group
    collective = OPERATORS[problem.op]
    if reason := obstacle(name, problem, group.device, group, collective):
        raise Missing(reason)
    # The cache does not hold it, so ``close`` frees it.
    compiled = op_cache_of(group).create(problem, name, collective)
    buffers.compiled.append(compiled)
    return buffers.into("result", lambda inputs, out: compiled(inputs.x, out))


def _nccl(buffers: Buffers) -> Implementation:
    problem = buffers.problem
    return by_reference(buffers, OPERATORS[problem.op], lambda inputs: inputs.x, *problem.options)


def _copies(buffers: Buffers) -> Implementation:
    return by_copies(
        buffers,
        plan_of_copies(buffers.problem),
        sent=lambda inputs: inputs.x,
        expected=lambda inputs: inputs.result.view(-1),
    )


IMPLEMENTATIONS: dict[str, Constructor] = {
    OURS: _ours,
    **{f"{TRANSPORT}{name}": partial(_by_transport, name=name) for name in OWN},
    NCCL: _nccl,
    f"{EXCHANGE}copies": _copies,
}


FAMILY = Family(
    base=Collective,
    kind=Size,
    name="collectives",
    example="--sizes 1",
    cases=cases,
    problem=lambda op, size, ranks, dtype: problem_of(op, size, dtype),
    stage=stage,
    programs=programs,
    choice=choice,
    arguments=lambda problem, inputs: ((inputs.x, *problem.options), {}),
)
