"""Order a plan of which no line says so: its copies read what copies of other ranks bring.

A plan that copies from a peer's part of a symmetric tensor, into which that peer's calls copy, or
from the own part, into which peers or other streams copy, gets three things. Before all else a
kernel of one block counts the call and meets the peers: nobody copies before what the call before
copied has been read. Each copy that others read is followed by its flags: the number of the call,
copied from device memory, so that a CUDA graph finds the right one. And before a copy that reads
what another rank, or another stream, has brought, a kernel of one block waits in its stream for
that flag. It comes behind the copies before it in the plan that peers wait for: in a CUDA graph
what waits might else hold them up.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from graphlib import CycleError, TopologicalSorter

import tilelang.language as T
from tvm import tirx

from ...builtins import language as W
from ...builtins.errors import TileWeaveError
from ...passes.ir.implicit import Implicit, implicit_of, set_implicit
from ...passes.ir.walk import written_tensors
from ...passes.sync.infer.epochs import CALL
from ...passes.sync.infer.infer_sync import is_explicit
from .regions import Region
from .steps import Copy, CopyValue, Launch, Step, WaitStream, WaitValue, WriteValue
from .sync_push import BEGIN, WAIT, behind, entry_barrier, region_of, require_same_copies

Made = tuple[int, int]
"""A copy: its rank, and its step's number there."""
REUSE = "copies wait until all ranks have begun the same call"
"""Why what copies overwrite may be written again."""


@dataclass(frozen=True)
class PullSync:
    """What a plan's calls get for one world size and one set of shapes.

    Attributes:
        site: of a copy.
        copies: of each rank, as the plan says them.
        told: by copy, its flag, and which ranks wait for it.
        awaited: by copy, those it waits for.
    """

    loc: str
    copies: Mapping[int, list[tuple]]
    told: Mapping[Made, tuple[int, list[int]]]
    awaited: Mapping[Made, list[Made]]

    def apply(
        self, rank: int, world_size: int, steps: Sequence[Step],
        with_options: Callable[[tirx.PrimFunc], tirx.PrimFunc], recorded: bool,
    ) -> list[Step]:  # fmt: skip
        """The steps of one call on one rank, with what orders them.

        Args:
            with_options: a program -> the same with the plan's options.
            recorded: whether a CUDA graph records them, which changes nothing: the number that a
                flag must reach stands in device memory, where streams do not look.

        Raises:
            TileWeaveError: the copies are others than in the call that was looked at.
        """
        require_same_copies(_places(steps), self.copies[rank])
        begin, wait = with_options(_begin(world_size)), with_options(_wait(len(self.told)))
        _, launches = (region_of(begin, h, world_size) for h in implicit_of(begin))
        (arrived,) = (region_of(wait, h, world_size) for h in implicit_of(wait))
        out: list[Step] = [Launch(None, self.loc, BEGIN, begin, begin, {})]
        streams = {s.stream for s in steps}
        heard: set[tuple[str | None, Made]] = set()
        behind: dict[str | None, set[str | None]] = {}
        """By stream, those in which it would not come behind what peers wait for."""
        for step in steps:
            for made in self.awaited.get((rank, step.number), ()):
                if (step.stream, made) in heard:
                    continue
                heard.add((step.stream, made))
                for other in sorted(behind.pop(step.stream, ()), key=str):
                    out.append(WaitStream(step.stream, step.loc, 0, other=other))
                given = {"launches": launches, "flag": self.told[made][0], "peer": made[0]}
                out.append(Launch(step.stream, step.loc, WAIT, wait, wait, given))
            out.append(step)
            flag, readers = self.told.get((rank, step.number), (0, []))
            if readers:
                for stream in streams - {step.stream}:
                    behind.setdefault(stream, set()).add(step.stream)
            out += [
                CopyValue(
                    step.stream, step.loc, step.number,
                    dst=arrived[reader, flag], src=launches[CALL],
                )
                for reader in readers
            ]  # fmt: skip
        return out


def pulls_of(traces: Sequence[Sequence[Step]]) -> PullSync | None:
    """What the calls of a plan need, whose steps on each rank are ``traces``; None if no copy reads
    another rank's memory, or what others bring, or only what a kernel beside it writes, or they
    order themselves.

    Raises:
        TileWeaveError: what a copy reads is not what copies bring, all of it and once; or copies
            wait for each other.
    """
    every = [(rank, s) for rank, trace in enumerate(traces) for s in trace]
    copies = [(rank, s) for rank, s in every if isinstance(s, Copy)]
    pulls = {
        s.src.parameter.name: s for r, s in copies
        if s.src.rank not in (None, r) or _is_pushed(r, s, copies, traces[r])
    }  # fmt: skip
    if not pulls or any(_by_hand(s) for _, s in every):
        return None
    pulled = set(pulls)
    brought = {s.dst.parameter.name for _, s in copies if s.dst.parameter.symmetric}
    launches = [s for _, s in every if isinstance(s, Launch)]
    made = set().union(*(_written(launch) for launch in launches)) & pulled
    made |= {s.src.parameter.name for r, s in copies if _is_beside(s, traces[r])}
    if made:
        _refuse_others(made, [s for name, s in pulls.items() if name not in made])
        return None  # the kernel tells the copies itself
    for launch in launches:
        _refuse_launch(launch, pulled | brought)
    copies = [c for c in copies if {c[1].src.parameter.name, c[1].dst.parameter.name} & pulled]
    awaited = {
        (rank, s.number): _writers(rank, s, copies)
        for rank, s in copies if s.src.parameter.name in pulled
    }  # fmt: skip
    by_stream = {(rank, s.number): s.stream for rank, s in copies}
    awaited = {
        reader: [w for w in writers if not _is_before(w, reader, by_stream)]
        for reader, writers in awaited.items()
    }
    readers: dict[Made, list[int]] = {}
    for (rank, _), writers in awaited.items():
        for writer in writers:
            readers.setdefault(writer, []).append(rank)
    told = {w: (n, sorted({*readers[w]})) for n, w in enumerate(sorted(readers))}
    places = {rank: _places(trace) for rank, trace in enumerate(traces)}
    sync = PullSync(copies[0][1].loc, places, told, awaited)
    ranks = range(len(traces))
    ordered = [sync.apply(r, len(traces), traces[r], lambda p: p, recorded=False) for r in ranks]
    _refuse_cycle(ordered, awaited)
    return sync


def _by_hand(step: Step) -> bool:
    if isinstance(step, Launch):
        return is_explicit(step.program)
    return isinstance(step, (WriteValue, CopyValue, WaitValue))


def _written(launch: Launch) -> set[str]:
    """Names of the tensors that the kernel writes."""
    given = launch.arguments
    written = (given[name] for name in _written_by(launch.program) & given.keys())
    return {value.parameter.name for value in written}


@lru_cache(maxsize=64)
def _written_by(program: tirx.PrimFunc) -> set[str]:
    """Names of the parameters that ``program`` writes."""
    written = written_tensors(program.body)
    return {str(b.name) for b in program.buffer_map.values() if b.data in written}


def _refuse_others(made: set[str], pulls: Sequence[Copy]) -> None:
    """Refuse reads of what copies bring, in a plan that reads what a kernel brings."""
    for step in pulls:
        raise TileWeaveError(
            f"p.copy reads {step.src}, which copies bring, in a plan whose copies wait for what a "
            f"kernel writes ({', '.join(sorted(made))}); expected two plans, or flags and waits "
            f"written by hand{_at(step)}"
        )


def _is_pushed(
    rank: int, copy: Copy, copies: Sequence[tuple[int, Copy]], trace: Sequence[Step]
) -> bool:
    """Return whether ``copy`` reads own memory that copies bring which no stream orders with it:
    those of other ranks, and own ones in another stream. A kernel that has waited for them and
    comes before it in its stream orders them.

    Own copies count, because a plan for any number of ranks has no others with one rank.
    """
    name = copy.src.parameter.name
    if not copy.src.parameter.symmetric:
        return False
    return any(
        s.dst.overlaps(copy.src) and (r != rank or _are_unordered(s, copy, trace))
        for r, s in copies
    ) and not any(
        id(copy) in behind(s, trace) for s in trace if isinstance(s, Launch) and name in _taken(s)
    )


def _is_beside(copy: Copy, trace: Sequence[Step]) -> bool:
    """Whether a kernel of the same rank writes what ``copy`` reads, and no stream orders them."""
    name, symmetric = copy.src.parameter.name, copy.src.parameter.symmetric
    return symmetric and any(
        _are_unordered(s, copy, trace)
        for s in trace if isinstance(s, Launch) and name in _written(s)
    )  # fmt: skip


def _are_unordered(one: Step, other: Step, trace: Sequence[Step]) -> bool:
    """Return whether no stream orders two steps of one rank."""
    return id(other) not in behind(one, trace) and id(one) not in behind(other, trace)


def _taken(launch: Launch) -> set[str]:
    return {v.parameter.name for v in launch.arguments.values() if isinstance(v, Region)}


def _refuse_launch(launch: Launch, copied: set[str]) -> None:
    for value in launch.arguments.values():
        if isinstance(value, Region) and value.parameter.name in copied:
            raise TileWeaveError(
                f"{launch.name} takes {value.parameter.name}, in a plan whose copies read from "
                "peers, or what peers bring; expected that copies alone take it, or flags and "
                f"waits written by hand{_at(launch)}"
            )


def _writers(rank: int, copy: Copy, copies: Sequence[tuple[int, Copy]]) -> list[Made]:
    """The copies that bring what ``copy`` reads."""
    found = [(r, s) for r, s in copies if s.dst.overlaps(copy.src)]
    brought = sum(math.prod(_common(s.dst, copy.src)) for _, s in found)
    twice = any(a.dst.overlaps(b.dst) for (_, a), (_, b) in itertools.combinations(found, 2))
    if twice or brought != math.prod(copy.src.extent):
        what = "only partly, or twice," if found else "by no copy"
        raise TileWeaveError(
            f"p.copy reads {copy.src} on rank {rank}, which is written {what} in this call; "
            f"expected each element written by one p.copy of the same plan, or flags and waits "
            f"written by hand{_at(copy)}"
        )
    return [(r, s.number) for r, s in found]


def _at(step: Step) -> str:
    return f"\n --> {step.loc}"


def _common(one: Region, other: Region) -> list[int]:
    """Extents of what two regions that overlap have in common."""
    sides = zip(one.start, one.extent, other.start, other.extent, strict=True)
    return [min(a + n, b + m) - max(a, b) for a, n, b, m in sides]


def _is_before(writer: Made, reader: Made, streams: Mapping[Made, str | None]) -> bool:
    """Whether the stream orders them."""
    same = writer[0] == reader[0] and streams[writer] == streams[reader]
    return same and writer[1] < reader[1]


def _refuse_cycle(traces: Sequence[Sequence[Step]], awaited: Mapping[Made, Sequence[Made]]) -> None:
    """Refuse copies that wait for each other, or for what stands behind them in their stream."""
    order: TopologicalSorter[tuple[int, int]] = TopologicalSorter()
    for rank, trace in enumerate(traces):
        last: dict[str | None, tuple[int, int]] = {}
        for i, step in enumerate(trace):
            before = [last[step.stream]] if step.stream in last else []
            if isinstance(step, WaitStream) and step.other in last:
                before.append(last[step.other])
            if isinstance(step, Copy):
                before += [
                    (r, next(j for j, s in enumerate(traces[r]) if s.number == n))
                    for r, n in awaited.get((rank, step.number), ())
                ]
            last[step.stream] = (rank, i)
            order.add((rank, i), *before)
    try:
        order.prepare()
    except CycleError as error:
        steps = dict.fromkeys((s.op, s.loc) for s in (traces[r][i] for r, i in error.args[1]))
        lines = "".join(f"\n {op} --> {loc}" for op, loc in steps)
        raise TileWeaveError(
            f"p.copy waits for itself, by way of other ranks; expected an order in which each can "
            f"be made{lines}"
        ) from None


def _places(steps: Sequence[Step]) -> list[tuple]:
    return [(s.number, s.stream, str(s.dst), str(s.src)) for s in steps if isinstance(s, Copy)]


@cache
def _begin(ranks: int) -> tirx.PrimFunc:
    """Counts a call, and meets the peers; it has the memory for both."""
    started = Implicit("started", True, (ranks,), "uint32")
    launches = Implicit("launches", False, (CALL + 1,), "uint32")
    return set_implicit(entry_barrier(ranks), [started, launches])


@cache
def _wait(flags: int) -> tirx.PrimFunc:
    """Waits until the copy of a flag has been made in this call; has the memory for flags."""

    @T.prim_func
    def await_copy(
        launches: T.Tensor((CALL + 1,), "uint32"), flag: T.int32, peer: T.int32,
        arrived: W.Symmetric((flags,), "uint32"),
    ):  # fmt: skip
        with T.Kernel(1, threads=32) as _:
            call = W.ld(launches[CALL], sem="relaxed")
            W.wait_reached(arrived[W.rank(), flag], call, peer=peer)

    return set_implicit(await_copy, [Implicit("arrived", True, (flags,), "uint32")])
