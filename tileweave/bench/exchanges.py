"""What ``tileweave bench`` measures of collectives: ours by each transport, NCCL, copies alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor

from .. import ops
from ..ops.collectives.collective import EXCHANGES, Collective, checked
from ..ops.collectives.transport import OWN, Transport, obstacle
from ..ops.core import nccl
from ..ops.core.cache import prepared
from ..ops.core.collective_problem import CollectiveProblem
from ..runtime import SymmetricTensor
from ..runtime.host.group import Group
from .contenders import EXCHANGE, NCCL, OURS, TRANSPORT, Implementation, Missing, by_copies
from .programs import all_gather_plan, all_to_all_plan
from .results import Size

COLLECTIVES: dict[str, tuple[int, ...]] = {
    "all_gather": (),
    "reduce_scatter": (),
    "all_reduce": (),
    "all_to_all": (0, 0),
}
"""By name, with the axes of those that have some."""
_NCCL: dict[str, Callable[[Tensor, Tensor, Group], None]] = {
    "all_gather": nccl.all_gather_into,
    "reduce_scatter": nccl.reduce_scatter,
    "all_reduce": lambda _, out, group: nccl.all_reduce(out, group),
    "all_to_all": nccl.all_to_all,
}
_COPIES = {"all_gather": all_gather_plan, "all_to_all": all_to_all_plan}
_PART = 8
"""A part of each rank is a multiple of so many elements: 16 bytes, for the TMA."""


def size_of(mebibytes: int, ranks: int) -> Size:
    """Of what a rank gives: the least that ranks can share out, from ``mebibytes`` on."""
    unit = 2 * _PART * ranks
    return Size(-(-(mebibytes << 20) // unit) * unit, ranks)


def problem_of(op: str, size: Size, dtype: torch.dtype) -> CollectiveProblem:
    """One axis, of 2-byte numbers."""
    x = torch.empty(size.bytes // dtype.itemsize, dtype=dtype, device="meta")
    return checked(op, x, None, size.ranks, COLLECTIVES[op])


def gathered_bytes(op: str, size: Size) -> int:
    """What copies alone bring to each rank."""
    return {"all_gather": size.ranks * size.bytes, "all_to_all": size.bytes}.get(op, 0)


def symmetric_bytes(op: str, size: Size) -> int:
    """What ours takes on each rank, by all transports and once more by ``auto``, without counters
    and tails."""
    engine, tiles = {
        "all_gather": (size.ranks, 2 * size.ranks),
        "reduce_scatter": (1, 2),
        "all_reduce": (2, 4),
        "all_to_all": (1, 2),
    }[op]
    return size.bytes * (engine + 2 * tiles + max(engine, tiles))


@dataclass(frozen=True)
class Inputs:
    """What one rank gives, and should get."""

    x: Tensor
    result: Tensor

    @staticmethod
    def random(problem: CollectiveProblem, group: Group) -> Iterator[Inputs]:
        """Fresh ones: integers whose sums are exact, in any order. Collective."""
        generator = torch.Generator(group.device).manual_seed(group.rank)
        while True:
            shape, device = problem.shape, group.device
            x = torch.randint(-8, 9, shape, generator=generator, device=device).to(problem.dtype)
            yield Inputs(x, right_of(problem, x, group))


def right_of(problem: CollectiveProblem, x: Tensor, group: Group) -> Tensor:
    """What a rank should get, by no more than an all-gather. Collective."""
    every = nccl.all_gather(x, group).view(problem.ranks, problem.ranks, -1)  # by rank and part
    if problem.op == "all_gather":
        return every.view(-1)
    if problem.op != "all_reduce":
        every = every[:, group.rank]
    if EXCHANGES[problem.op].reduces:
        every = every.sum(0, dtype=torch.float32).to(x.dtype)
    return every.flatten()


@dataclass
class Buffers:
    """One problem, and the memory in which contenders compute it.

    Attributes:
        gathered: room for what copies alone bring, on each rank; None if there is none.
        out: what a rank gets.
        made: what ``close`` frees.
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
        """What writes its result there, which holds no number before."""
        return Implementation(
            lambda given: call(given.x, self.out),
            found=lambda _: self.out,
            prepare=lambda _: self.out.fill_(torch.nan),
        )

    def close(self) -> None:
        """Free what was made for this problem alone. Collective."""
        for exchange in self.made:
            exchange.free()
        self.made.clear()


def _ours(arena: Buffers) -> Implementation:
    operator = getattr(ops, arena.problem.op)
    return arena.into_out(lambda x, out: operator(x, *arena.problem.options, out=out))


def _by_transport(arena: Buffers, name: str) -> Implementation:
    problem, group = arena.problem, arena.group
    made = EXCHANGES[problem.op]
    if found := obstacle(name, problem, group.device, group, made):
        raise Missing(found)
    # Nothing else makes room for it again, as what ``prepared`` keeps.
    arena.made.append(prepared(group).made(problem, name, made))
    return arena.into_out(arena.made[-1])


def _nccl(arena: Buffers) -> Implementation:
    call, group, out = _NCCL[arena.problem.op], arena.group, arena.out
    if arena.problem.op != "all_reduce":
        return arena.into_out(lambda x, out: call(x, out, group))
    return Implementation(
        lambda given: call(given.x, out, group),
        found=lambda _: out,
        prepare=lambda given: out.copy_(given.x),  # it adds in place
    )


def _copies(arena: Buffers) -> Implementation:
    problem = arena.problem
    if problem.op not in _COPIES:
        raise Missing("copy engines do not add")
    elements = prod(problem.result) // problem.ranks
    shape = (elements,) if problem.op == "all_gather" else (problem.ranks, elements)
    return by_copies(
        arena.gathered, arena.group, _COPIES[problem.op], elements,
        given=lambda inputs: inputs.x.view(shape), right=lambda inputs: inputs.result,
    )  # fmt: skip


MAKERS: dict[str, Callable[[Buffers], Implementation]] = {
    OURS: _ours,
    **{f"{TRANSPORT}{name}": partial(_by_transport, name=name) for name in OWN},
    NCCL: _nccl,
    f"{EXCHANGE}copies": _copies,
}


def programs(problem: CollectiveProblem, group: Group) -> list[Any]:
    """What our contenders for a problem launch."""
    made = EXCHANGES[problem.op]
    can = [name for name in OWN if not obstacle(name, problem, group.device, group, made)]
    return [made.steps(problem, name) for name in can]


def transport_of(problem: CollectiveProblem, x: Tensor) -> Transport:
    """How ``ours`` moves its data, and why."""
    return ops.transport_of(getattr(ops, problem.op), x, *problem.options)
