"""Order a plan of which no line says so: its copies announce themselves to the kernel beside them.

A plan that copies into a symmetric tensor which a kernel of it reads gets three things. The kernel
knows the copies of all ranks and waits for them, as for writes of its own (``passes/infer_sync``).
Each copy is followed by another one, to its flags: the number of the call, from device memory, so
that a CUDA graph finds the right one. And before the first copy a kernel of one block counts the
call, tells the peers that it has begun here, and waits until it has begun there: then nobody reads
any more what the copies overwrite, be it the call before or what its caller did since. The other
kernel starts beside it, if that is sure to leave it an SM.

Before a copy of what the kernel brings, in another stream, that stream waits until it is there: the
kernel beside it counts that up in a word, which is then set back to 0. What the host enqueues later
in other streams may stand behind it, since streams share queues of the GPU. So it waits by itself
(``WaitValue``) where all that it waits for is enqueued before. Elsewhere, and in CUDA graphs, where
nothing orders the branches, a kernel of one block waits, which keeps nothing back.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cache, lru_cache

import tilelang.language as T
from tilelang import tvm
from tvm import tirx

from ... import passes
from ...builtins import language as W
from ...builtins.errors import TileWeaveError
from ...passes.ir.implicit import Implicit, implicit_of
from ...passes.ir.sizes import named
from ...passes.sync.infer.epochs import CALL, EPOCH
from ...passes.sync.infer.infer_sync import Explanation, explained, is_explicit
from ...passes.sync.regions.accesses import Kind
from ...passes.sync.regions.copies import COPIES, with_copies
from ...passes.sync.regions.copies import Copy as KnownCopy
from .parameters import Parameter
from .regions import Region
from .steps import Copy, CopyValue, Launch, Step, WaitStream, WaitValue, WriteValue

_STRIDE = 1 << 40
GUARD = "guard"
"""The stream of the kernel that runs before the copies, if others make them: beside what the
launching stream does, and first where an SM becomes free."""
BEGIN = -1
"""The number of its step."""
WAIT = BEGIN - 1
"""The number of the steps that wait before a copy."""


@dataclass(frozen=True)
class PlanSync:
    """What a plan's calls get for one world size and one set of shapes.

    Attributes:
        original: the kernel as the plan launches it.
        kernel: the same, knowing the copies.
        hidden: the memory that the kernel and the copies share.
        copies: what it knows of them.
        copied: names of the plan's tensors that they take.
        leaves_room: whether the kernel is sure to leave the guard an SM.
        flags: by rank and number of a copy, the flags it sets.
        awaited: by the same, the flags it waits for, with their values.
    """

    original: tirx.PrimFunc
    kernel: tirx.PrimFunc
    implicit: tuple[Implicit, ...]
    copies: tuple[KnownCopy, ...]
    copied: frozenset[str]
    leaves_room: bool
    flags: Mapping[tuple[int, int], list[tuple]]
    awaited: Mapping[tuple[int, int], list[tuple]]

    def apply(
        self, rank: int, world_size: int, steps: Sequence[Step],
        with_options: Callable[[tirx.PrimFunc], tirx.PrimFunc], recorded: bool,
    ) -> list[Step]:  # fmt: skip
        """The steps of one call on one rank, with what orders them.

        Args:
            with_options: a program -> the same with the plan's options.
            recorded: whether a CUDA graph records them.

        Raises:
            TileWeaveError: the copies are others than in the call that was looked at.
        """
        regions = {h.name: region_of(self.kernel, h, world_size) for h in self.implicit}
        found = _launches_of(self.original, self.copied, steps)
        launch = _only(self.original, self.copied, rank, found, self.copies[0].line)
        made = _copies(rank, launch, steps)
        expected = [c for c in self.copies if c.rank == rank]
        require_same_copies(
            [_place(c) for c, _ in made], [_place(c) for c in expected], f"{launch.name}: "
        )
        numbers = {id(step): c.number for c, step in made}
        guarded = {
            c.number for c in expected
            if c.kind == "write" and (not c.before or (rank, c.number) in self.flags)
        }  # fmt: skip
        sides = {s.stream for c, s in made if c.number in guarded} - {launch.stream}
        guard = GUARD if sides else launch.stream

        def after_guard(stream: str | None) -> list[Step]:
            return [] if stream == guard else [WaitStream(stream, launch.loc, 0, other=guard)]

        out: list[Step] = []
        if self.flags:
            loc = (made[0][1] if made else launch).loc
            begin = self._begin(loc, regions, world_size, guard)
            begin = replace(begin, program=with_options(begin.program))
            out += [*_fork(guard, launch), begin]
        waited: set[str | None] = set()
        begun: set[int] = set()
        for place, step in enumerate(steps):
            number = numbers.get(id(step), -1)
            if step is launch:
                if self.flags and not self.leaves_room:
                    out += after_guard(launch.stream)
                step = replace(launch, program=self.kernel)
            elif number in guarded and step.stream not in waited:
                waited.add(step.stream)
                out += after_guard(step.stream)
            together = [] if number in begun else self._together(rank, numbers, steps[place:])
            begun.update(together)
            awaited = [f for other in together for f in self.awaited.get((rank, other), ())]
            by_itself = not recorded and self._by_itself(rank, numbers, launch, steps[place:])
            for name, index, value in awaited:
                out += _wait(step, regions[name], rank, index[1], value, by_itself, with_options)
            out.append(step)
            for name, to, run in self.flags.get((rank, number), ()):
                flags = regions[name][to, run]
                calls = regions[EPOCH][CALL : CALL + run.stop - run.start]
                out.append(CopyValue(step.stream, step.loc, step.number, dst=flags, src=calls))
        return out

    def _by_itself(
        self, rank: int, numbers: Mapping[int, int], launch: Launch, steps: Sequence[Step]
    ) -> bool:
        """Whether the stream of the first of ``steps`` may wait by itself: the kernel, and copies
        that others wait for, are enqueued before, or behind it in the same stream."""
        streams = {s.stream for s in steps if (rank, numbers.get(id(s), -1)) in self.flags}
        return streams <= {steps[0].stream} and all(s is not launch for s in steps)

    def _together(self, rank: int, numbers: Mapping[int, int], steps: Sequence[Step]) -> list[int]:
        """The first of ``steps``, if it waits, with those directly behind it that begin when all of
        them can: between a kernel that waits and a copy pass 10 us, or 6 where the stream waits by
        itself, between copies 3.

        One copy from each rank, in one stream, that no other rank waits for: what is behind them in
        the stream comes no later than it would.
        """
        first, stream = numbers.get(id(steps[0]), -1), steps[0].stream
        found: dict[int | None, int] = {}
        """By the rank from which they copy."""
        for step in steps:
            copy = rank, numbers.get(id(step), -1)
            fetches = isinstance(step, Copy) and self.awaited.get(copy) and copy not in self.flags
            if not fetches or step.stream != stream or step.src.rank in found:
                break
            found[step.src.rank] = copy[1]
        return list(found.values()) or [first]

    def _begin(
        self, loc: str, regions: Mapping[str, Region], world_size: int, stream: str | None
    ) -> Launch:
        waits = "started" in regions
        kernel = _begin(world_size if waits else 0, regions[EPOCH].whole[0] - CALL)
        given = {"launches": regions[EPOCH]}
        if waits:
            given = {"started": regions["started"], **given}
        return Launch(stream, loc, BEGIN, kernel=kernel, program=kernel, arguments=given)


def _wait(
    step: Step, made: Region, rank: int, at: int, value: int, by_itself: bool,
    with_options: Callable[[tirx.PrimFunc], tirx.PrimFunc],
) -> list[Step]:  # fmt: skip
    """What waits before ``step`` until the word ``at`` of ``rank`` has reached ``value``, and sets
    it back to 0: its stream by itself, or a kernel."""
    place = step.stream, step.loc, WAIT
    if by_itself:
        word = made[rank, at]
        return [WaitValue(*place, flag=word, value=value), WriteValue(*place, dst=word, value=0)]
    kernel = with_options(_wait_and_clear(made.whole[1]))
    return [Launch(*place, kernel, kernel, {"made": made, "at": at, "value": value})]


def _fork(guard: str | None, launch: Launch) -> list[Step]:
    return [] if guard is None else [WaitStream(guard, launch.loc, 0, other=None)]


def sync_of(traces: Sequence[Sequence[Step]]) -> PlanSync | None:
    """What the calls of a plan need, whose steps on each rank are ``traces``; None if they order
    themselves, or have nothing to order.

    Raises:
        LanguageError: the kernel's reads of what is copied cannot be ordered.
    """
    if any(isinstance(s, (WriteValue, CopyValue, WaitValue)) for s in itertools.chain(*traces)):
        return None
    found: dict[int, tirx.PrimFunc] = {}
    copied: set[str] = set()
    for rank, steps in enumerate(traces):
        for launch in (s for s in steps if isinstance(s, Launch)):
            made = _copies(rank, launch, steps)
            if made and not is_explicit(launch.program):
                found[id(launch.program)] = launch.program
                copied |= {launch.arguments[c.tensor].parameter.name for c, _ in made}
    if not found:
        return None
    if len(found) > 1:
        names = " and ".join(str(f.attrs["global_symbol"]) for f in found.values())
        raise TileWeaveError(
            f"{names} read what the plan copies; expected one kernel, or flags and waits written "
            "by hand"
        )
    (original,) = found.values()
    every = [_launches_of(original, copied, steps) for steps in traces]
    made = [
        of_copy
        for rank, (launches, steps) in enumerate(zip(every, traces, strict=True))
        for launch in launches[:1]
        for of_copy in _copies(rank, launch, steps)
    ]
    copies = tuple(c for c, _ in made)
    reads_only = all(c.kind == "read" for c in copies)
    if reads_only and _ordered(original, copies, frozenset(copied), len(traces)) is None:
        return None  # nothing in this call brings what they read
    by_rank = [
        _only(original, copied, rank, launches, copies[0].line)
        for rank, launches in enumerate(every)
    ]
    sync = _ordered(original, copies, frozenset(copied), len(traces))
    if sync is not None:
        _refuse_behind(sync, by_rank, made)
    return sync


@lru_cache(maxsize=64)
def _ordered(
    original: tirx.PrimFunc, copies: tuple[KnownCopy, ...], copied: frozenset[str], world_size: int
) -> PlanSync | None:
    """What orders a kernel and copies; None if they need nothing. Calls that differ in scalars only
    ask again."""
    kernel = with_copies(original, copies)
    program, explanation = _inferred(kernel, world_size)
    flags, awaited = explanation.signals_of_copies, explanation.waits_of_copies
    if not flags and not awaited:
        return None
    implicit, room = tuple(implicit_of(program)), explanation.leaves_room
    return PlanSync(original, kernel, implicit, copies, copied, room, flags, awaited)


@lru_cache(maxsize=64)
def _inferred(kernel: tirx.PrimFunc, world_size: int) -> tuple[tirx.PrimFunc, Explanation]:
    name = str(kernel.attrs["global_symbol"])
    mod = tvm.IRModule({name: kernel})
    mod = passes.run_group(mod, world_size, _STRIDE, passes.PREPARE_PASSES)
    return explained(mod[name], world_size, _STRIDE)


def _launches_of(kernel: tirx.PrimFunc, copied: Set[str], steps: Sequence[Step]) -> list[Launch]:
    """The launches of a kernel that take what the plan copies."""
    return [
        s for s in steps
        if isinstance(s, Launch) and s.program is kernel
        and any(isinstance(v, Region) and v.parameter.name in copied for v in s.arguments.values())
    ]  # fmt: skip


def _only(
    kernel: tirx.PrimFunc, copied: Set[str], rank: int, launches: Sequence[Launch], line: str
) -> Launch:
    """The only one of the launches on a rank; refuses several, and none, at ``line`` of a copy."""
    if len(launches) != 1:
        at = "".join(f"\n p.launch --> {s.loc}" for s in launches) or f"\n p.copy --> {line}"
        raise TileWeaveError(
            f"{named(kernel)} takes what the plan copies ({', '.join(sorted(copied))}), and rank "
            f"{rank} launches it {len(launches)} times; expected once on every rank in every call, "
            f"or flags and waits written by hand{at}"
        )
    return launches[0]


def _refuse_behind(
    sync: PlanSync, launches: Sequence[Launch], copies: Sequence[tuple[KnownCopy, Copy]]
) -> None:
    """Refuse copies that a kernel waits for and that come after it in its stream, and such as wait
    for it and come before it."""
    for c, step in copies:
        copy, launch, at = (c.rank, c.number), launches[c.rank], f"\n --> {c.line}"
        if step.stream != launch.stream:
            continue
        if copy in sync.flags and not c.before:
            raise TileWeaveError(
                f"{launch.name} waits for a copy to {step.dst}, which comes after it in "
                f"{step.where}; expected another stream, or the copy first{at}"
            )
        if copy in sync.awaited and c.before:
            raise TileWeaveError(
                f"p.copy waits for {launch.name} to bring {step.src}, which comes after it in "
                f"{step.where}; expected another stream, or the kernel first{at}"
            )


def require_same_copies(found: list[tuple], expected: list[tuple], who: str = "") -> None:
    """Refuse that a call copies something else than the one that was looked at."""
    if found != expected:
        raise TileWeaveError(
            f"{who}the plan's copies are {found}, in an earlier call {expected}; expected the same "
            "in every call, or flags and waits written by hand"
        )


def behind(first: Step, trace: Sequence[Step]) -> set[int]:
    """``id`` of each step that streams order behind ``first``."""
    streams: set[str | None] = set()
    found: set[int] = set()
    for step in trace:
        if step is first or (isinstance(step, WaitStream) and step.other in streams):
            streams.add(step.stream)
        elif step.stream in streams:
            found.add(id(step))
    return found


def refuse_beside_itself(traces: Sequence[Sequence[Step]]) -> None:
    """Refuse launches of a kernel beside each other that share its counters."""
    for steps in traces:
        launches = [s for s in steps if isinstance(s, Launch)]
        for one, other in itertools.combinations(launches, 2):
            if one.program is not other.program or id(other) in behind(one, steps):
                continue
            if not is_explicit(one.program) and implicit_of(_inferred(one.program, len(traces))[0]):
                at = f"\n p.launch --> {one.loc}\n p.launch --> {other.loc}"
                raise TileWeaveError(
                    f"{one.name} in {one.where} and in {other.where}, whose counters both use; "
                    f"expected one stream, a p.wait_stream in between, or two kernels{at}"
                )


def refuse_pushes(traces: Sequence[Sequence[Step]]) -> None:
    """Refuse copies to peers in a call that nothing orders, where other calls are ordered."""
    for rank, steps in enumerate(traces):
        for step in (s for s in steps if isinstance(s, Copy) and s.dst.rank not in (None, rank)):
            at = f"\n --> {step.loc}"
            raise TileWeaveError(
                f"p.copy writes {step.dst}, which nothing reads in this call, unlike in an "
                "earlier one; expected the same copies and readers in every call, or flags and "
                f"waits written by hand{at}"
            )


def implicit_name(kernel: tirx.PrimFunc, implicit: str) -> str:
    """By what name steps of a plan mean a hidden parameter of a kernel. They mean those of a kernel
    that the plan has given copies or memory; another may have the same name."""
    is_meant = COPIES in (kernel.attrs or {}) or implicit_of(kernel)
    return f"{'' if is_meant else 'another '}{named(kernel)}.{implicit}"


def region_of(program: tirx.PrimFunc, implicit: Implicit, world_size: int) -> Region:
    """A hidden parameter of a kernel, as steps of a plan mean it."""
    parameter = Parameter(
        implicit_name(program, implicit.name), implicit.dtype, implicit.shape, implicit.symmetric
    )
    return Region.of(parameter, parameter.across(implicit.shape, world_size))


def _copies(rank: int, launch: Launch, steps: Sequence[Step]) -> list[tuple[KnownCopy, Copy]]:
    """The copies into symmetric tensors that ``launch`` takes, and out of them such as its stream
    does not order, under its names for them."""
    names = {
        value.parameter.name: name
        for name, value in launch.arguments.items()
        if isinstance(value, Region) and value.parameter.symmetric
    }
    before = {id(s) for s in itertools.takewhile(lambda s: s is not launch, steps)}
    made: list[tuple[KnownCopy, Copy]] = []
    for number, step in enumerate(s for s in steps if isinstance(s, Copy)):
        beside = step.stream != launch.stream
        sides: list[tuple[Kind, Region]] = [("write", step.dst)]
        foreign = step.src.rank not in (None, rank)
        sides.extend([("read", step.src)] if beside or foreign else [])
        made += [
            (
                KnownCopy(
                    rank, number, kind, names[side.parameter.name], side.start, side.extent,
                    step.loc, step.stream, before=not beside and id(step) in before,
                ),
                step,
            )
            for kind, side in sides
            if side.parameter.name in names
        ]  # fmt: skip
    return made


def _place(copy: KnownCopy) -> tuple:
    return copy.kind, copy.tensor, copy.start, copy.extent, copy.stream, copy.before


@cache
def _begin(ranks: int, words: int) -> tirx.PrimFunc:
    """The kernel that runs before the copies of a call: meets ``ranks - 1`` peers, if any."""
    return entry_barrier(ranks, words) if ranks else _count(words)


def _count(words: int) -> tirx.PrimFunc:
    one = tirx.const(1, "uint32")

    @T.prim_func
    def begin(launches: T.Tensor((CALL + words,), "uint32")):
        with T.Kernel(1, threads=32) as _:
            if T.get_thread_binding() == 0:
                for word in T.serial(CALL, CALL + words):
                    W.st(launches[word], W.ld(launches[word], sem="relaxed") + one)

    return begin


def entry_barrier(ranks: int, words: int = 1) -> tirx.PrimFunc:
    """The kernel that counts a call, in so many words, and returns when ``ranks - 1`` peers have
    begun it, too. A thread for each peer: releases of one thread wait for each other."""

    @T.prim_func
    def begin(
        started: W.Symmetric((ranks,), "uint32"), launches: T.Tensor((CALL + words,), "uint32")
    ):
        with T.Kernel(1, threads=32) as _:
            call = T.alloc_var("uint32")
            call = W.ld(launches[CALL], sem="relaxed") + tirx.const(1, "uint32")
            me, thread = W.rank(), T.get_thread_binding()
            peer = (me + 1 + thread) % ranks
            if thread < ranks - 1:
                W.signal(started[peer, me])
                W.wait_reached(started[me, peer], call, peer=peer)
            if thread == 0:
                for word in T.serial(CALL, CALL + words):
                    W.st(launches[word], call)

    return begin


@cache
def _wait_and_clear(words: int) -> tirx.PrimFunc:
    """The kernel that waits until an own word has a value, and sets it back to 0."""

    @T.prim_func
    def wait(made: W.Symmetric((words,), "uint32"), at: T.int32, value: T.uint32):
        with T.Kernel(1, threads=32) as _:
            T.assume(tirx.LT(at, words))
            if T.get_thread_binding() == 0:
                W.wait_reached(made[W.rank(), at], value)
                W.st(made[W.rank(), at], tirx.const(0, "uint32"))

    return wait
