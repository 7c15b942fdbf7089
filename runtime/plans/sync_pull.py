r"""Order the copies of a plan that contains no explicit synchronization and pulls from peers.

This module handles plans with copies that read what other copies write: from a peer's part of a
symmetric tensor into which that peer's calls copy, or from this rank's part into which peers or
other streams copy. ``PullSync.apply`` adds three things to such a plan:

1. An entry barrier, before all other steps: a kernel of one block that counts the call and waits
   until all ranks have begun it. After it no copy of the previous call reads what this call
   overwrites.
2. Flags. After each copy that others read, another copy writes the number of the call to the flag
   of each rank that reads it. The number is read from device memory, so that a CUDA graph uses the
   right one at each replay.
3. Waits. Before a copy that reads what another rank or another stream writes, a kernel of one block
   waits in its stream for that flag. It is ordered after the earlier copies of the plan that peers
   wait for, in all streams: in a CUDA graph the waiting kernel could delay them.

Rank 1 pulls what rank 0 copies into its own part (``S[r]`` and ``flag[r]`` are in the memory of
rank r; ``n`` is the number of the call)::

    time -->
    rank 0  caller's stream  - entry barrier - copy X to S[0] - flag[1] = n ----------------------
                                \ /                                         \
                                 X                                           \
                                / \                                           \
    rank 1  caller's stream  - entry barrier -*..................................................*
                                              |                                 \                |
            stream "pull"                     *--------------- wait flag[1] == n - copy S[0] to Y *

``*`` is a fork or join of streams, dots are idle time.
"""

import itertools
import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cache, lru_cache
from graphlib import CycleError, TopologicalSorter

import tilelang.language as T
from tvm import tirx

from ...builtins import language as W
from ...builtins.errors import TileWeaveError
from ...passes.ir.accesses import written_tensors
from ...passes.ir.implicit import Implicit, implicit_of, set_implicit
from ...passes.sync.infer.epochs import CALL
from ...passes.sync.infer.inference import is_explicit
from .regions import Region
from .steps import Copy, CopyValue, Launch, Step, WaitStream, WaitValue, WriteValue
from .sync_push import (
    ENTRY_BARRIER,
    WAIT,
    entry_barrier,
    of_all_plans,
    region_of,
    require_same_copies,
    steps_after,
)

CopyId = tuple[int, int]
"""Identifies a copy by its rank and the number of its step."""
REUSE = "copies wait until all ranks have begun the same call"
"""Reason why copies may overwrite the memory of the previous call."""


@dataclass(frozen=True)
class PullSync:
    """Synchronization of a plan's calls for one world size and one set of shapes.

    Attributes:
        loc: ``file:line`` of a copy.
        copies: the copies of each rank, as the plan appends them.
        signalled: copy -> number of its flag, and the ranks that wait for it.
        awaited: copy -> the copies it waits for.
    """

    loc: str
    copies: Mapping[int, list[tuple]]
    signalled: Mapping[CopyId, tuple[int, list[int]]]
    awaited: Mapping[CopyId, list[CopyId]]

    def apply(
        self, rank: int, world_size: int, steps: Sequence[Step], recorded: bool
    ) -> list[Step]:
        """Return the steps of one call on one rank, with those that order them.

        Args:
            recorded: whether a CUDA graph records the steps. It makes no difference: kernels wait,
                because the value that a flag must reach is in device memory, where driver
                operations cannot read it.

        Raises:
            TileWeaveError: the copies differ from those of the call that was analyzed.
        """
        require_same_copies(_places(steps), self.copies[rank])
        barrier = _entry_kernel(world_size)
        wait = _wait_kernel(len(self.signalled))
        _, launches = (region_of(barrier, p, world_size) for p in implicit_of(barrier))
        (arrived,) = (region_of(wait, p, world_size) for p in implicit_of(wait))
        ordered: list[Step] = [Launch(None, self.loc, ENTRY_BARRIER, barrier, barrier, {})]
        streams = {s.stream for s in steps}
        observed: set[tuple[str | None, CopyId]] = set()
        unordered: dict[str | None, set[str | None]] = {}
        """By stream, the streams with copies that peers wait for and that it does not follow."""
        for step in steps:
            for copy in self.awaited.get((rank, step.number), ()):
                if (step.stream, copy) in observed:
                    continue
                observed.add((step.stream, copy))
                for other in sorted(unordered.pop(step.stream, ()), key=str):
                    ordered.append(WaitStream(step.stream, step.loc, 0, other=other))
                arguments = {
                    "launches": launches, "flag": self.signalled[copy][0], "peer": copy[0],
                }  # fmt: skip
                ordered.append(Launch(step.stream, step.loc, WAIT, wait, wait, arguments))
            ordered.append(step)
            flag, readers = self.signalled.get((rank, step.number), (0, []))
            if readers:
                for stream in streams - {step.stream}:
                    unordered.setdefault(stream, set()).add(step.stream)
            ordered += [
                CopyValue(
                    step.stream, step.loc, step.number,
                    dst=arrived[reader, flag], src=launches[CALL],
                )
                for reader in readers
            ]  # fmt: skip
        return ordered


def pull_sync_of(traces: Sequence[Sequence[Step]]) -> PullSync | None:
    """Return the synchronization of a plan whose steps on each rank are ``traces``; None if
    no copy reads another rank's memory or what other copies write, if copies only read what a
    concurrent kernel writes, or if the plan synchronizes explicitly.

    Raises:
        TileWeaveError: copies write what a copy reads only in part or twice; or copies wait for
            each other.
    """
    steps = [(rank, s) for rank, trace in enumerate(traces) for s in trace]
    copies = [(rank, s) for rank, s in steps if isinstance(s, Copy)]
    into: dict[str, list[tuple[int, Copy]]] = {}
    for rank, step in copies:
        into.setdefault(step.dst.parameter.name, []).append((rank, step))
    pulls = {
        s.src.parameter.name: s for r, s in copies
        if s.src.rank not in (None, r)
        or _is_pushed(r, s, into.get(s.src.parameter.name, ()), traces[r])
    }  # fmt: skip
    if not pulls or any(_is_explicit(s) for _, s in steps):
        return None
    launches = [s for _, s in steps if isinstance(s, Launch)]
    from_kernels = set().union(*(_written(launch) for launch in launches)) & pulls.keys()
    from_kernels |= {s.src.parameter.name for r, s in copies if _is_concurrent(s, traces[r])}
    if from_kernels:
        _refuse_others(from_kernels, [s for n, s in pulls.items() if n not in from_kernels])
        return None  # ``sync_push`` orders these copies and the kernel
    written = {s.dst.parameter.name for _, s in copies if s.dst.parameter.symmetric}
    for launch in launches:
        _refuse_launch(launch, pulls.keys() | written)
    copies = [
        c for c in copies if not pulls.keys().isdisjoint(
            (c[1].src.parameter.name, c[1].dst.parameter.name)
        )
    ]  # fmt: skip
    awaited = _awaited(copies, pulls.keys())
    places = {rank: _places(trace) for rank, trace in enumerate(traces)}
    sync = PullSync(copies[0][1].loc, places, _signalled(awaited), awaited)
    ranks = range(len(traces))
    ordered = [sync.apply(r, len(traces), traces[r], recorded=False) for r in ranks]
    _refuse_cycle(ordered, awaited)
    return sync


def _awaited(copies: Sequence[tuple[int, Copy]], pulled: Set[str]) -> dict[CopyId, list[CopyId]]:
    """Return the copies that each copy out of the tensors ``pulled`` waits for."""
    streams = {(rank, s.number): s.stream for rank, s in copies}
    writers = {
        (rank, s.number): _writers(rank, s, copies)
        for rank, s in copies if s.src.parameter.name in pulled
    }  # fmt: skip
    return {
        reader: [w for w in writers_of_reader if not _is_before(w, reader, streams)]
        for reader, writers_of_reader in writers.items()
    }


def _signalled(awaited: Mapping[CopyId, list[CopyId]]) -> dict[CopyId, tuple[int, list[int]]]:
    """Return the number of the flag of each copy that others wait for, and their ranks."""
    readers: dict[CopyId, set[int]] = {}
    for (rank, _), writers in awaited.items():
        for writer in writers:
            readers.setdefault(writer, set()).add(rank)
    return {w: (n, sorted(readers[w])) for n, w in enumerate(sorted(readers))}


def _is_explicit(step: Step) -> bool:
    """Return whether a step synchronizes explicitly."""
    if isinstance(step, Launch):
        return is_explicit(step.program)
    return isinstance(step, (WriteValue, CopyValue, WaitValue))


def _written(launch: Launch) -> set[str]:
    """Return the names of the plan's tensors that the kernel writes."""
    arguments = launch.arguments
    written = _written_by(launch.program) & arguments.keys()
    return {arguments[name].parameter.name for name in written}


@lru_cache(maxsize=64)
def _written_by(program: tirx.PrimFunc) -> set[str]:
    """Return the names of the parameters that ``program`` writes."""
    written = written_tensors(program.body)
    return {str(b.name) for b in program.buffer_map.values() if b.data in written}


def _refuse_others(from_kernels: set[str], pulls: Sequence[Copy]) -> None:
    """Refuse reads of what copies write, in a plan whose copies read what a kernel writes."""
    for step in pulls:
        raise TileWeaveError(
            f"p.copy reads {step.src}, which copies write, in a plan whose copies wait for what a "
            f"kernel writes ({', '.join(sorted(from_kernels))}); expected two plans, or explicit "
            f"flags and waits{_at(step)}"
        )


def _is_pushed(
    rank: int, copy: Copy, copies: Sequence[tuple[int, Copy]], trace: Sequence[Step]
) -> bool:
    """Return whether ``copy`` reads own memory that copies write which no stream orders with it:
    copies of other ranks, and own copies in another stream.

    A kernel that waits for them and comes before ``copy`` in its stream orders them. Own copies
    count, because a plan for any number of ranks has no other copies on one rank.

    Args:
        copies: the copies of all ranks into the tensor that ``copy`` reads.
    """
    name = copy.src.parameter.name
    if not copy.src.parameter.symmetric:
        return False
    return any(
        s.dst.overlaps(copy.src) and (r != rank or _are_unordered(s, copy, trace))
        for r, s in copies
    ) and not any(
        id(copy) in steps_after(s, trace)
        for s in trace
        if isinstance(s, Launch) and name in _accessed(s)
    )


def _is_concurrent(copy: Copy, trace: Sequence[Step]) -> bool:
    """Return whether a kernel of the same rank writes what ``copy`` reads, and no stream orders
    them."""
    name, symmetric = copy.src.parameter.name, copy.src.parameter.symmetric
    return symmetric and any(
        _are_unordered(s, copy, trace)
        for s in trace if isinstance(s, Launch) and name in _written(s)
    )  # fmt: skip


def _are_unordered(a: Step, b: Step, trace: Sequence[Step]) -> bool:
    """Return whether no stream orders two steps of one rank."""
    return id(b) not in steps_after(a, trace) and id(a) not in steps_after(b, trace)


def _accessed(launch: Launch) -> set[str]:
    """Return the names of the plan's tensors that are arguments of a launch."""
    return {v.parameter.name for v in launch.arguments.values() if isinstance(v, Region)}


def _refuse_launch(launch: Launch, copied: Set[str]) -> None:
    """Refuse a kernel that accesses a tensor which the copies write or read."""
    for value in launch.arguments.values():
        if isinstance(value, Region) and value.parameter.name in copied:
            raise TileWeaveError(
                f"{launch.name} accesses {value.parameter.name}, in a plan whose copies read from "
                "peers, or what peers write; expected that only copies access it, or explicit "
                f"flags and waits{_at(launch)}"
            )


def _writers(rank: int, copy: Copy, copies: Sequence[tuple[int, Copy]]) -> list[CopyId]:
    """Return the copies that write what ``copy`` reads."""
    writers = [(r, s) for r, s in copies if s.dst.overlaps(copy.src)]
    written = sum(math.prod(_common(s.dst, copy.src)) for _, s in writers)
    overlap = any(a.dst.overlaps(b.dst) for (_, a), (_, b) in itertools.combinations(writers, 2))
    if overlap or written != math.prod(copy.src.extent):
        coverage = "only partly, or twice," if writers else "by no copy"
        raise TileWeaveError(
            f"p.copy reads {copy.src} on rank {rank}, which is written {coverage} in this call; "
            f"expected each element written by one p.copy of the same plan, or explicit flags and "
            f"waits{_at(copy)}"
        )
    return [(r, s.number) for r, s in writers]


def _at(step: Step) -> str:
    return f"\n --> {step.loc}"


def _common(first: Region, second: Region) -> list[int]:
    """Return the extents of the intersection of two regions that overlap."""
    sides = zip(first.start, first.extent, second.start, second.extent, strict=True)
    return [min(a + n, b + m) - max(a, b) for a, n, b, m in sides]


def _is_before(writer: CopyId, reader: CopyId, streams: Mapping[CopyId, str | None]) -> bool:
    """Return whether a stream orders ``writer`` before ``reader``."""
    same_stream = writer[0] == reader[0] and streams[writer] == streams[reader]
    return same_stream and writer[1] < reader[1]


def _refuse_cycle(
    traces: Sequence[Sequence[Step]], awaited: Mapping[CopyId, Sequence[CopyId]]
) -> None:
    """Refuse copies that wait for each other, or for a later step of their stream."""
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
            f"p.copy waits for itself, through other ranks; expected an order in which each copy "
            f"can begin{lines}"
        ) from None


def _places(steps: Sequence[Step]) -> list[tuple]:
    """Return number, stream and regions of each copy."""
    return [(s.number, s.stream, str(s.dst), str(s.src)) for s in steps if isinstance(s, Copy)]


@cache
def _entry_kernel(ranks: int) -> tirx.PrimFunc:
    """Return the kernel of the entry barrier, which declares its counters."""
    started = Implicit("started", True, (ranks,), "uint32")
    launches = Implicit("launches", False, (CALL + 1,), "uint32")
    return of_all_plans(set_implicit(entry_barrier(ranks), [started, launches]))


@cache
def _wait_kernel(flags: int) -> tirx.PrimFunc:
    """Return the kernel that waits until the copy of a flag is complete in this call; it declares
    the flags of all copies."""

    @T.prim_func
    def await_copy(
        launches: T.Tensor((CALL + 1,), "uint32"), flag: T.int32, peer: T.int32,
        arrived: W.Symmetric((flags,), "uint32"),
    ):  # fmt: skip
        with T.Kernel(1, threads=32) as _:
            call = W.ld(launches[CALL], sem="relaxed")
            W.wait_reached(arrived[W.rank(), flag], call, peer=peer)

    of_copies = Implicit("arrived", True, (flags,), "uint32")
    return of_all_plans(set_implicit(await_copy, [of_copies]))
