"""Collectives in ``tileweave bench``: ours by each transport, NCCL, and copies without kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor

from .. import ops
from ..ops.collectives.collective import Collective, checked
from ..ops.collectives.transport import OWN, Transport, obstacle
from ..ops.core import nccl
from ..ops.core.cache import prepared
from ..ops.core.collective_problem import CollectiveProblem
from ..ops.core.registry import OPERATORS
from ..runtime import SymmetricTensor
from ..runtime.host.group import Group
from .implementations import EXCHANGE, NCCL, OURS, TRANSPORT, Implementation, Missing, by_copies
from .programs import all_gather_plan, all_to_all_plan
from .results import Size

COLLECTIVES: dict[str, tuple[int, ...]] = {
    "all_gather": (),
    "reduce_scatter": (),
    "all_reduce": (),
    "all_to_all": (0, 0),
}
"""Collectives by name, with the axes of those that have such arguments."""
_NCCL: dict[str, Callable[[Tensor, Tensor, Group], None]] = {
    "all_gather": nccl.all_gather_into,
    "reduce_scatter": nccl.reduce_scatter,
    "all_reduce": lambda _, out, group: nccl.all_reduce(out, group),
    "all_to_all": nccl.all_to_all,
}
_COPIES = {"all_gather": all_gather_plan, "all_to_all": all_to_all_plan}
_PART = 8
"""Parts of ranks are multiples of this number of elements: 16 bytes, for the TMA."""


def size_of(mebibytes: int, ranks: int) -> Size:
    """Return the least size, from ``mebibytes`` on, that divides among the ranks."""
    unit = 2 * _PART * ranks
    return Size(-(-(mebibytes << 20) // unit) * unit, ranks)


def problem_of(op: str, size: Size, dtype: torch.dtype) -> CollectiveProblem:
    """Return the problem of one axis of 2-byte values."""
    x = torch.empty(size.bytes // dtype.itemsize, dtype=dtype, device="meta")
    return checked(op, x, None, size.ranks, COLLECTIVES[op])


def gathered_bytes(op: str, size: Size) -> int:
    """Return the bytes that the implementation by copies writes to each rank."""
    return {"all_gather": size.ranks * size.bytes, "all_to_all": size.bytes}.get(op, 0)


def symmetric_bytes(op: str, size: Size) -> int:
    """Return the symmetric memory of our collective on each rank, by all transports and once more
    by ``auto``, without counters and tails."""
    engine, tiles = {
        "all_gather": (size.ranks, 2 * size.ranks),
        "reduce_scatter": (1, 2),
        "all_reduce": (2, 4),
        "all_to_all": (1, 2),
    }[op]
    return size.bytes * (engine + 2 * tiles + max(engine, tiles))


@dataclass(frozen=True)
class Inputs:
    """Input of one rank, and the expected result."""

    x: Tensor
    result: Tensor

    @staticmethod
    def random(problem: CollectiveProblem, group: Group) -> Iterator[Inputs]:
        """Yield new inputs: integers whose sums are exact in any order. Collective."""
        generator = torch.Generator(group.device).manual_seed(group.rank)
        while True:
            shape, device = problem.shape, group.device
            x = torch.randint(-8, 9, shape, generator=generator, device=device).to(problem.dtype)
            yield Inputs(x, right_of(problem, x, group))


def right_of(problem: CollectiveProblem, x: Tensor, group: Group) -> Tensor:
    """Return the expected result of a rank, from an all-gather. Collective."""
    every = nccl.all_gather(x, group).view(problem.ranks, problem.ranks, -1)  # by rank and part
    if problem.op == "all_gather":
        return every.view(-1)
    if problem.op != "all_reduce":
        every = every[:, group.rank]
    if OPERATORS[problem.op].reduces:
        every = every.sum(0, dtype=torch.float32).to(x.dtype)
    return every.flatten()


@dataclass
class Buffers:
    """Problem with the memory in which the implementations compute it.

    Attributes:
        gathered: symmetric memory for the implementation by copies; None if it does not fit.
        out: memory of a rank's result.
        made: operators that ``close`` frees.
    """

    problem: CollectiveProblem
    group: Group
    gathered: SymmetricTensor | None
    out: Tensor = field(init=False)
    made: list[Collective] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        self.out = torch.empty(
            self.problem.result, dtype=self.problem.dtype, device=self.group.device
        )

    def into_out(self, call: Callable[[Tensor, Tensor], Any]) -> Implementation:
        """Return the implementation of a call that writes its result to ``out``, which is filled
        with NaN before."""
        return Implementation(
            lambda inputs: call(inputs.x, self.out),
            found=lambda _: self.out,
            prepare=lambda _: self.out.fill_(torch.nan),
        )

    def close(self) -> None:
        """Free the operators of this case. Collective."""
        for exchange in self.made:
            exchange.free()
        self.made.clear()


def _ours(buffers: Buffers) -> Implementation:
    operator = getattr(ops, buffers.problem.op)
    return buffers.into_out(lambda x, out: operator(x, *buffers.problem.options, out=out))


def _by_transport(buffers: Buffers, name: str) -> Implementation:
    problem, group = buffers.problem, buffers.group
    collective = OPERATORS[problem.op]
    if reason := obstacle(name, problem, group.device, group, collective):
        raise Missing(reason)
    # The cache does not hold it, so ``close`` frees it.
    buffers.made.append(prepared(group).made(problem, name, collective))
    return buffers.into_out(buffers.made[-1])


def _nccl(buffers: Buffers) -> Implementation:
    call, group, out = _NCCL[buffers.problem.op], buffers.group, buffers.out
    if buffers.problem.op != "all_reduce":
        return buffers.into_out(lambda x, out: call(x, out, group))
    return Implementation(
        lambda inputs: call(inputs.x, out, group),
        found=lambda _: out,
        prepare=lambda inputs: out.copy_(inputs.x),  # it adds in place
    )


def _copies(buffers: Buffers) -> Implementation:
    problem = buffers.problem
    if problem.op not in _COPIES:
        raise Missing("copy engines do not add")
    elements = prod(problem.result) // problem.ranks
    shape = (elements,) if problem.op == "all_gather" else (problem.ranks, elements)
    return by_copies(
        buffers.gathered, buffers.group, _COPIES[problem.op], elements,
        sent=lambda inputs: inputs.x.view(shape), right=lambda inputs: inputs.result,
    )  # fmt: skip


MAKERS: dict[str, Callable[[Buffers], Implementation]] = {
    OURS: _ours,
    **{f"{TRANSPORT}{name}": partial(_by_transport, name=name) for name in OWN},
    NCCL: _nccl,
    f"{EXCHANGE}copies": _copies,
}


def programs(problem: CollectiveProblem, group: Group) -> list[Any]:
    """Return the programs and plans that our implementations launch."""
    collective = OPERATORS[problem.op]
    can = [name for name in OWN if not obstacle(name, problem, group.device, group, collective)]
    return [collective.steps(problem, name) for name in can]


def transport_of(problem: CollectiveProblem, x: Tensor) -> Transport:
    """Return the transport of our collective, and the reason."""
    return ops.transport_of(getattr(ops, problem.op), x, *problem.options)
