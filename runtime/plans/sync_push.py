r"""Order the copies and the kernel of a plan that contains no explicit synchronization.

This module handles plans that copy into a symmetric tensor which a kernel of the plan reads, or out
of one which it writes. ``PushSync.apply`` adds three things to such a plan:

1. An entry barrier, before the first copy that overwrites memory: a kernel of one block that counts
   the call, signals to the peers that the call has begun on this rank, and waits until it has begun
   on them. After it no rank reads what the copies overwrite: neither the previous call nor work
   that its caller enqueued since then. The plan's kernel runs concurrently with the barrier if it
   is sure to leave an SM free; otherwise it starts after the barrier.
2. Flags. After each copy another copy writes the number of the call to the flags of that copy. The
   number is read from device memory, so that a CUDA graph uses the right one at each replay. The
   kernel waits for these flags as for signals of other kernels (``passes/sync/infer``).
3. Waits, before a copy that reads what the kernel writes, if another stream makes that copy. The
   kernel counts its writes in a word; the wait ends when the word has its final value, and resets
   the word to 0.

Each rank copies into its peer (``S[r]`` and ``flag[r]`` are in the memory of rank r; ``n`` is the
number of the call)::

    time -->
    rank 0  caller's stream  *-- kernel: tiles of own rows ---------- wait flag[0] == n - tiles -*
            entry stream     *- signal rank 1 - wait -+
            stream "copies"  *........................*- copy X to S[1] - flag[1] = n -----------*
                                             \ /                              \ /
                                              X                                X
                                             / \                              / \
    rank 1  caller's stream  *-- kernel: tiles of own rows ---------- wait flag[1] == n - tiles -*
            entry stream     *- signal rank 0 - wait -+
            stream "copies"  *........................*- copy X to S[0] - flag[0] = n -----------*

Rank 0 copies what its kernel writes (``made`` counts the kernel's writes, here two)::

    time -->
    rank 0  caller's stream  * kernel: write Y, made += 1 - write Y, made += 1 --------------------*
                                                                              |
            stream "copies"  *...... wait made == 2 --------------------------+ made = 0 - copy Y -*

``*`` is a fork or join of streams, dots are idle time.

A stream waits with a driver operation (``WaitValue``) where the host enqueues all that the wait
depends on earlier: streams share hardware queues, and an operation that is enqueued later in
another stream may be queued after the wait. In all other cases, and in CUDA graphs, where no edge
orders the branches, a kernel of one block waits, which blocks no queue.
"""

import itertools
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cache, lru_cache

import tilelang.language as T
from tvm import tirx

from ...builtins import language as W
from ...builtins.errors import TileWeaveError
from ...passes.ir.implicit import Implicit, implicit_of
from ...passes.ir.releases import upgrade_ir
from ...passes.ir.sizes import named
from ...passes.sync.infer.epochs import CALL, EPOCH
from ...passes.sync.infer.inference import is_explicit
from ...passes.sync.infer.options import with_options
from ...passes.sync.regions.accesses import Kind
from ...passes.sync.regions.copies import COPIES, with_copies
from ...passes.sync.regions.copies import Copy as KnownCopy
from ..kernel.for_group import inferred
from .parameters import Parameter
from .regions import Region
from .steps import Copy, CopyValue, Launch, Step, WaitStream, WaitValue, WriteValue

ENTRY_STREAM = "entry barrier"
"""Stream of the entry barrier, if side streams make the copies. It runs concurrently with the
caller's stream, and its priority gives the barrier the first SM that becomes free."""
ENTRY_BARRIER = -1
"""Number of the step that launches the entry barrier."""
WAIT = ENTRY_BARRIER - 1
"""Number of the steps that wait before a copy."""


@dataclass(frozen=True)
class PushSync:
    """Synchronization of a plan's calls for one world size and one set of shapes.

    Attributes:
        original: the kernel as the plan launches it.
        kernel: the kernel with the copies as annotations.
        implicit: the memory that the kernel and the copies share.
        copies: the copies that the kernel knows.
        copied: names of the plan's tensors that the copies access.
        leaves_room: whether the kernel is sure to leave an SM to the entry barrier.
        flags: (rank, number of a copy) -> the flags that the copy sets.
        awaited: (rank, number of a copy) -> the words that the copy waits for, with their values.
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
        self, rank: int, world_size: int, steps: Sequence[Step], recorded: bool
    ) -> list[Step]:
        """Return the steps of one call on one rank, with those that order them.

        Args:
            recorded: whether a CUDA graph records the steps.

        Raises:
            TileWeaveError: the copies differ from those of the call that was analyzed.
        """
        return _OrderedCall(self, rank, world_size, steps, recorded).ordered()


class _OrderedCall:
    """One call on one rank: its steps, and those that order them."""

    def __init__(
        self, sync: PushSync, rank: int, world_size: int, steps: Sequence[Step], recorded: bool
    ) -> None:
        launches = _launches_of(sync.original, sync.copied, steps)
        launch = _only_launch(sync.original, sync.copied, rank, launches, sync.copies[0].line)
        copies = _copies(rank, launch, steps)
        expected = [c for c in sync.copies if c.rank == rank]
        require_same_copies(
            [_place(c) for c, _ in copies], [_place(c) for c in expected], f"{launch.name}: "
        )
        overwriting = {
            c.number for c in expected
            if c.kind == "write" and (not c.before or (rank, c.number) in sync.flags)
        }  # fmt: skip
        sides = {s.stream for c, s in copies if c.number in overwriting} - {launch.stream}
        self._sync, self._rank, self._world_size = sync, rank, world_size
        self._steps, self._launch = steps, launch
        self._recorded = recorded
        self._regions = {p.name: region_of(sync.kernel, p, world_size) for p in sync.implicit}
        self._numbers = {id(step): c.number for c, step in copies}
        """Number of each copy, by the ``id`` of its step."""
        self._overwriting = overwriting
        """Numbers of the copies that need the entry barrier."""
        self._loc = (copies[0][1] if copies else launch).loc
        self._entry_stream = ENTRY_STREAM if sides else launch.stream
        self._after_entry: set[str | None] = set()
        """Streams whose copies are ordered after the entry barrier."""
        self._ready: set[int] = set()
        """Numbers of the copies whose waits are enqueued."""

    def ordered(self) -> list[Step]:
        """Return the steps, with those that order them."""
        ordered = self._entry_barrier() if self._sync.flags else []
        for index, step in enumerate(self._steps):
            ordered += [*self._waits_for_entry(step), *self._waits_for_kernel(index)]
            is_kernel = step is self._launch
            ordered.append(replace(step, program=self._sync.kernel) if is_kernel else step)
            ordered += self._signals(step)
        return ordered

    def _number(self, step: Step) -> int:
        return self._numbers.get(id(step), -1)

    def _entry_barrier(self) -> list[Step]:
        """Return the launch of the entry barrier, and the fork of its stream before it."""
        counts, has_peers = self._regions[EPOCH], "started" in self._regions
        kernel = _entry_kernel(self._world_size if has_peers else 0, counts.whole[0] - CALL)
        arguments = {"launches": counts}
        if has_peers:
            arguments = {"started": self._regions["started"], **arguments}
        place = self._entry_stream, self._loc, ENTRY_BARRIER
        barrier = Launch(*place, kernel, kernel, arguments)
        if self._entry_stream is None:
            return [barrier]
        return [WaitStream(self._entry_stream, self._launch.loc, 0, other=None), barrier]

    def _waits_for_entry(self, step: Step) -> list[Step]:
        """Return what orders the stream of ``step`` after the entry barrier, if it must be."""
        if step is self._launch:
            is_needed = bool(self._sync.flags) and not self._sync.leaves_room
        else:
            is_needed = (
                self._number(step) in self._overwriting and step.stream not in self._after_entry
            )
            self._after_entry.update([step.stream] if is_needed else [])
        if not is_needed or step.stream == self._entry_stream:
            return []
        return [WaitStream(step.stream, self._launch.loc, 0, other=self._entry_stream)]

    def _waits_for_kernel(self, index: int) -> list[Step]:
        """Return the waits of the ``index``-th step and of those that may begin with it."""
        steps = self._steps[index:]
        if self._number(steps[0]) in self._ready:
            return []
        numbers = self._copies_sharing_wait(steps)
        self._ready.update(numbers)
        by_stream = not self._recorded and self._is_enqueued_before(steps)
        return [
            wait
            for number in numbers
            for name, place, value in self._sync.awaited.get((self._rank, number), ())
            for wait in self._wait(steps[0], self._regions[name], place[1], value, by_stream)
        ]

    def _wait(
        self, step: Step, flags: Region, index: int, value: int, by_stream: bool
    ) -> list[Step]:
        """Return the steps that wait before ``step`` until an own word has reached ``value``, and
        reset it to 0.

        Args:
            flags: the counters of all ranks.
            index: index of the word among this rank's counters.
            by_stream: whether the stream waits with a driver operation, instead of a kernel.
        """
        place = step.stream, step.loc, WAIT
        if by_stream:
            flag = flags[self._rank, index]
            return [
                WaitValue(*place, flag=flag, value=value),
                WriteValue(*place, dst=flag, value=0),
            ]
        kernel = _wait_and_clear(flags.whole[1])
        return [Launch(*place, kernel, kernel, {"flags": flags, "index": index, "value": value})]

    def _is_enqueued_before(self, steps: Sequence[Step]) -> bool:
        """Return whether the host enqueues all that the first of ``steps`` depends on earlier: the
        kernel, and copies that set flags, except for later ones in the same stream."""
        streams = {s.stream for s in steps if (self._rank, self._number(s)) in self._sync.flags}
        return streams <= {steps[0].stream} and all(s is not self._launch for s in steps)

    def _copies_sharing_wait(self, steps: Sequence[Step]) -> list[int]:
        """Return the numbers of the first of ``steps`` and of the copies that begin when all of
        them can, if the first one waits.

        These are the copies directly after it in its stream, one from each rank, for which no rank
        waits: later operations of the stream are not delayed. Between a kernel that waits and a
        copy 10 us pass, between a driver operation that waits and a copy 6 us, between copies 3 us.
        """
        first, stream = self._number(steps[0]), steps[0].stream
        numbers: dict[int | None, int] = {}
        """Number of a copy, by the rank that it reads from."""
        for step in steps:
            copy = self._rank, self._number(step)
            waits = isinstance(step, Copy) and self._sync.awaited.get(copy)
            if not waits or copy in self._sync.flags:
                break
            if step.stream != stream or step.src.rank in numbers:
                break
            numbers[step.src.rank] = copy[1]
        return list(numbers.values()) or [first]

    def _signals(self, step: Step) -> list[Step]:
        """Return the copies of the call's number to the flags of ``step``."""
        signals: list[Step] = []
        for name, rank, run in self._sync.flags.get((self._rank, self._number(step)), ()):
            flags = self._regions[name][rank, run]
            calls = self._regions[EPOCH][CALL : CALL + run.stop - run.start]
            signals.append(CopyValue(step.stream, step.loc, step.number, dst=flags, src=calls))
        return signals


def sync_of(traces: Sequence[Sequence[Step]]) -> PushSync | None:
    """Return the synchronization of a plan whose steps on each rank are ``traces``; None if the
    plan synchronizes explicitly, or needs no synchronization.

    Raises:
        LanguageError: the kernel's reads of copied memory cannot be ordered.
    """
    if any(isinstance(s, (WriteValue, CopyValue, WaitValue)) for s in itertools.chain(*traces)):
        return None
    original, copied = _reader_of_copies(traces)
    if original is None:
        return None
    launches_by_rank = [_launches_of(original, copied, steps) for steps in traces]
    copies_and_steps = [
        pair
        for rank, (launches, steps) in enumerate(zip(launches_by_rank, traces, strict=True))
        for launch in launches[:1]
        for pair in _copies(rank, launch, steps)
    ]
    copies = tuple(c for c, _ in copies_and_steps)
    reads_only = all(c.kind == "read" for c in copies)
    if reads_only and _ordered(original, copies, copied, len(traces)) is None:
        return None  # no kernel of this call writes what they read
    launches = [
        _only_launch(original, copied, rank, launches, copies[0].line)
        for rank, launches in enumerate(launches_by_rank)
    ]
    sync = _ordered(original, copies, copied, len(traces))
    if sync is not None:
        _refuse_reverse_order(sync, launches, copies_and_steps)
    return sync


def _reader_of_copies(
    traces: Sequence[Sequence[Step]],
) -> tuple[tirx.PrimFunc | None, frozenset[str]]:
    """Return the kernel whose tensors the plan copies, or None, and the names of these tensors.

    Raises:
        TileWeaveError: there are several such kernels.
    """
    kernels: dict[int, tirx.PrimFunc] = {}
    copied: set[str] = set()
    for rank, steps in enumerate(traces):
        for launch in (s for s in steps if isinstance(s, Launch)):
            copies = _copies(rank, launch, steps)
            if copies and not is_explicit(launch.program):
                kernels[id(launch.program)] = launch.program
                copied |= {launch.arguments[c.tensor].parameter.name for c, _ in copies}
    if len(kernels) > 1:
        names = " and ".join(str(f.attrs["global_symbol"]) for f in kernels.values())
        raise TileWeaveError(
            f"{names} read what the plan copies; expected one kernel, or explicit flags and waits"
        )
    return next(iter(kernels.values()), None), frozenset(copied)


@lru_cache(maxsize=64)
def _ordered(
    original: tirx.PrimFunc, copies: tuple[KnownCopy, ...], copied: frozenset[str], world_size: int
) -> PushSync | None:
    """Return the synchronization of a kernel and copies; None if they need none. Cached, because
    calls that differ only in scalars need the same."""
    kernel = with_copies(original, copies)
    program, explanation = inferred(kernel, world_size)
    flags, awaited = explanation.signals_of_copies, explanation.waits_of_copies
    if not flags and not awaited:
        return None
    implicit, room = tuple(implicit_of(program)), explanation.leaves_room
    return PushSync(original, kernel, implicit, copies, copied, room, flags, awaited)


def _launches_of(kernel: tirx.PrimFunc, copied: Set[str], steps: Sequence[Step]) -> list[Launch]:
    """Return the launches of a kernel that have a tensor as argument which the plan copies."""
    return [
        s for s in steps
        if isinstance(s, Launch) and s.program is kernel
        and any(isinstance(v, Region) and v.parameter.name in copied for v in s.arguments.values())
    ]  # fmt: skip


def _only_launch(
    kernel: tirx.PrimFunc, copied: Set[str], rank: int, launches: Sequence[Launch], line: str
) -> Launch:
    """Return the only launch on a rank.

    Args:
        line: line of a copy, which the error shows if there is no launch.

    Raises:
        TileWeaveError: there are several launches, or none.
    """
    if len(launches) != 1:
        lines = "".join(f"\n p.launch --> {s.loc}" for s in launches) or f"\n p.copy --> {line}"
        raise TileWeaveError(
            f"{named(kernel)} accesses what the plan copies ({', '.join(sorted(copied))}), and "
            f"rank {rank} launches it {len(launches)} times; expected once on every rank in every "
            f"call, or explicit flags and waits{lines}"
        )
    return launches[0]


def _refuse_reverse_order(
    sync: PushSync, launches: Sequence[Launch], copies: Sequence[tuple[KnownCopy, Copy]]
) -> None:
    """Refuse a copy that the kernel waits for and that comes after it in its stream, and a copy
    that waits for the kernel and comes before it."""
    for c, step in copies:
        copy, launch, line = (c.rank, c.number), launches[c.rank], f"\n --> {c.line}"
        if step.stream != launch.stream:
            continue
        if copy in sync.flags and not c.before:
            raise TileWeaveError(
                f"{launch.name} waits for a copy to {step.dst}, which comes after it in "
                f"{step.where}; expected another stream, or the copy first{line}"
            )
        if copy in sync.awaited and c.before:
            raise TileWeaveError(
                f"p.copy waits for {launch.name} to write {step.src}, which comes after it in "
                f"{step.where}; expected another stream, or the kernel first{line}"
            )


def require_same_copies(copies: list[tuple], expected: list[tuple], prefix: str = "") -> None:
    """Refuse a call whose copies differ from those of the call that was analyzed."""
    if copies != expected:
        raise TileWeaveError(
            f"{prefix}the plan's copies are {copies}, in an earlier call {expected}; expected the "
            "same in every call, or explicit flags and waits"
        )


def steps_after(first: Step, trace: Sequence[Step]) -> set[int]:
    """Return the ``id`` of each step that streams order after ``first``."""
    streams: set[str | None] = set()
    after: set[int] = set()
    for step in trace:
        if step is first or (isinstance(step, WaitStream) and step.other in streams):
            streams.add(step.stream)
        elif step.stream in streams:
            after.add(id(step))
    return after


def refuse_beside_itself(traces: Sequence[Sequence[Step]]) -> None:
    """Refuse concurrent launches of a kernel that has counters, because they share them."""
    for steps in traces:
        launches = [s for s in steps if isinstance(s, Launch)]
        for first, second in itertools.combinations(launches, 2):
            if first.program is not second.program or id(second) in steps_after(first, steps):
                continue
            if not is_explicit(first.program) and implicit_of(
                inferred(first.program, len(traces))[0]
            ):
                lines = f"\n p.launch --> {first.loc}\n p.launch --> {second.loc}"
                raise TileWeaveError(
                    f"{first.name} in {first.where} and in {second.where}, whose counters both "
                    f"use; expected one stream, a p.wait_stream in between, or two kernels{lines}"
                )


def refuse_pushes(traces: Sequence[Sequence[Step]]) -> None:
    """Refuse copies to peers in a call without synchronization, if other calls of the plan have
    it."""
    for rank, steps in enumerate(traces):
        for step in (s for s in steps if isinstance(s, Copy) and s.dst.rank not in (None, rank)):
            line = f"\n --> {step.loc}"
            raise TileWeaveError(
                f"p.copy writes {step.dst}, which nothing reads in this call, unlike in an "
                "earlier one; expected the same copies and readers in every call, or explicit "
                f"flags and waits{line}"
            )


def implicit_name(kernel: tirx.PrimFunc, implicit: str) -> str:
    """Return the name of a kernel's implicit parameter in the steps of a plan.

    The plain name belongs to the kernel that the plan synchronizes; another kernel may have the
    same name.
    """
    is_synchronized = COPIES in (kernel.attrs or {}) or implicit_of(kernel)
    return f"{'' if is_synchronized else 'another '}{named(kernel)}.{implicit}"


def region_of(program: tirx.PrimFunc, implicit: Implicit, world_size: int) -> Region:
    """Return the region of an implicit parameter of a kernel, for steps of a plan."""
    parameter = Parameter(
        implicit_name(program, implicit.name), implicit.dtype, implicit.shape, implicit.symmetric
    )
    return Region.of(parameter, parameter.across(implicit.shape, world_size))


def _copies(rank: int, launch: Launch, steps: Sequence[Step]) -> list[tuple[KnownCopy, Copy]]:
    """Return the copies that access symmetric arguments of ``launch``, by the names of the kernel's
    parameters: all copies into them, and the copies out of them that its stream does not order."""
    names = {
        value.parameter.name: name
        for name, value in launch.arguments.items()
        if isinstance(value, Region) and value.parameter.symmetric
    }
    before = {id(s) for s in itertools.takewhile(lambda s: s is not launch, steps)}
    copies: list[tuple[KnownCopy, Copy]] = []
    for number, step in enumerate(s for s in steps if isinstance(s, Copy)):
        is_concurrent = step.stream != launch.stream
        sides: list[tuple[Kind, Region]] = [("write", step.dst)]
        foreign = step.src.rank not in (None, rank)
        sides.extend([("read", step.src)] if is_concurrent or foreign else [])
        copies += [
            (
                KnownCopy(
                    rank, number, kind, names[side.parameter.name], side.start, side.extent,
                    step.loc, step.stream, before=not is_concurrent and id(step) in before,
                ),
                step,
            )
            for kind, side in sides
            if side.parameter.name in names
        ]  # fmt: skip
    return copies


def _place(copy: KnownCopy) -> tuple:
    return copy.kind, copy.tensor, copy.start, copy.extent, copy.stream, copy.before


@cache
def _entry_kernel(ranks: int, num_words: int) -> tirx.PrimFunc:
    """Return the kernel of the entry barrier; without ranks it only counts the call."""
    return of_all_plans(entry_barrier(ranks, num_words) if ranks else _count(num_words))


def of_all_plans(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Let a program that orders the steps of a plan share its kernel with that of other plans,
    which have other numbers of counters."""
    return with_options(upgrade_ir(func), {"tileweave.share": named(func)})


def _count(num_words: int) -> tirx.PrimFunc:
    """Return the kernel that counts a call in each of ``num_words`` words."""
    one = tirx.const(1, "uint32")

    @T.prim_func
    def begin(launches: T.Tensor((CALL + num_words,), "uint32")):
        with T.Kernel(1, threads=32) as _:
            if T.get_thread_binding() == 0:
                for word in T.serial(CALL, CALL + num_words):
                    W.st(launches[word], W.ld(launches[word], sem="relaxed") + one)

    return begin


def entry_barrier(ranks: int, num_words: int = 1) -> tirx.PrimFunc:
    """Return the kernel that counts a call, in each of ``num_words`` words, and ends when
    ``ranks - 1`` peers have begun it, too.

    Each peer has its own thread, because the releases of one thread wait for each other.
    """

    @T.prim_func
    def begin(
        started: W.Symmetric((ranks,), "uint32"), launches: T.Tensor((CALL + num_words,), "uint32")
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
                for word in T.serial(CALL, CALL + num_words):
                    W.st(launches[word], call)

    return begin


@cache
def _wait_and_clear(num_words: int) -> tirx.PrimFunc:
    """Return the kernel that waits until an own word has reached a value, and resets it to 0."""

    @T.prim_func
    def wait(flags: W.Symmetric((num_words,), "uint32"), index: T.int32, value: T.uint32):
        with T.Kernel(1, threads=32) as _:
            T.assume(tirx.LT(index, num_words))
            if T.get_thread_binding() == 0:
                W.wait_reached(flags[W.rank(), index], value)
                W.st(flags[W.rank(), index], tirx.const(0, "uint32"))

    return of_all_plans(wait)
