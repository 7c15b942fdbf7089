"""What the steps of the inference share."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from tvm import tirx

from ....builtins.symmetric import packed_strides
from ...ir.implicit import Implicit, heap_buffer
from ...ir.leaves import leaves_with_builtins
from ...ir.walk import format_expr, line_of
from ..regions.accesses import Access, Program
from ..regions.copies import Copy
from ..regions.footprints import Footprints
from ..regions.granules import Counter
from ..regions.space import Loop
from ..regions.symbols import Symbols
from ..regions.tensor_accesses import TensorAccesses
from . import builtin_calls
from .edits import Placement
from .options import Options


@dataclass(frozen=True)
class Inserted:
    """One operation that was put in, or was not because another serves for it, too.

    Attributes:
        kind: ``signal``, ``wait``, ``barrier``, ``fence`` or ``bulk_wait``; or ``unordered``, of
            an access that the program itself takes out.
        tensor: whose data it orders.
        line: ``file:line`` of the access it is for.
        reason: why it is there, in words.
        granule: what one counter stands for, in elements, or in words.
        each: how many units a signal adds, or have arrived in a launch when a wait ends.
        unit: elements that one unit is, 0 where launches are counted.
        flag: name of the counters.
        stmts: the operation, once or in several places; none where another serves.
    """

    kind: str
    tensor: str
    line: str
    reason: str
    granule: str = ""
    each: str = ""
    unit: int = 0
    flag: str = ""
    stmts: tuple[tirx.Stmt, ...] = field(default=(), compare=False, repr=False)


def by_rank(rank: tirx.PrimExpr, values: Sequence[int]) -> tirx.PrimExpr:
    """The value for ``rank``."""
    if len(set(values)) == 1:
        return tirx.const(values[0], "uint32")
    out: tirx.PrimExpr = tirx.const(values[-1], "uint32")
    for number in reversed(range(len(values) - 1)):
        this = tirx.const(values[number], "uint32")
        out = tirx.Select(rank.equal(number), this, out)
    return out


def _runs(numbers: Sequence[int]) -> list[slice]:
    """Ascending numbers as slices of consecutive ones."""
    cuts = [0, *(np.flatnonzero(np.diff(numbers) != 1) + 1), len(numbers)]
    return [slice(numbers[a], numbers[b - 1] + 1) for a, b in itertools.pairwise(cuts)]


def copies_with_granules(
    counter: Counter, footprints: Footprints
) -> Iterator[tuple[Copy, int, int]]:
    """The copies of a plan that ``footprints`` are, each with the owner and number of a granule that it
    touches, in their order."""
    granules = counter.granules.of_copies(footprints)
    for copy, home, numbers in zip(footprints.access.each, footprints.owner, granules, strict=True):
        for granule in numbers:
            yield copy, int(home), int(granule)


@dataclass(eq=False)
class SyncContext:
    """A program whose synchronisation is being inferred.

    Attributes:
        epoch: the number of this launch, a variable of the kernel.
        buffers: copies of each tensor that launches take in turn.
    """

    program: Program
    world_size: int
    heap_stride: int
    options: Options
    symbols: Symbols
    traffic: list[TensorAccesses] = field(default_factory=list)
    counters: list[Counter] = field(default_factory=list)
    buffers: dict[tirx.Buffer, int] = field(default_factory=dict)
    implicit: list[Implicit] = field(default_factory=list)
    hidden_buffers: list[tirx.Buffer] = field(default_factory=list)
    inserted: list[Inserted] = field(default_factory=list)
    reuse: dict[str, str] = field(default_factory=dict)
    placement: Placement = field(default_factory=Placement)
    epoch: tirx.Var = field(default_factory=lambda: tirx.Var("epoch", "uint32"))
    credit_flags: dict[str, tuple[tirx.Buffer, set[tuple[int, int]]]] = field(default_factory=dict)
    """``started`` and ``finished``, if used: their flags, and (who waits, for whom)."""
    at_end: list[tirx.Stmt] = field(default_factory=list)
    """What the last block of a launch does, by one thread."""

    @property
    def is_called(self) -> bool:
        """Whether it is the kernel of a plan with copies, whose calls another kernel begins: that
        one tells the peers, and lets the copies wait until nobody reads what they overwrite."""
        return any(t.copies is not None for t in self.traffic)

    @property
    def grid(self) -> tirx.PrimExpr:
        """Blocks of a launch."""
        total: tirx.PrimExpr = tirx.IntImm("int32", 1)
        for loop in self.program.grid:
            total = total * loop.extent
        return self.symbols.inlined(total)

    @property
    def block(self) -> tirx.PrimExpr:
        """Number of the block, in launch order."""
        number: tirx.PrimExpr = tirx.IntImm("int32", 0)
        for loop in reversed(self.program.grid):
            number = number * loop.extent + loop.var
        return self.symbols.inlined(number)

    def epochs_of(self, tensor: tirx.Buffer) -> tirx.PrimExpr:
        """How many launches have used the same of the tensor's buffers, this one included."""
        count = tirx.const(self.buffers[tensor], "uint32")
        if self.buffers[tensor] == 1:
            return self.epoch
        return (self.epoch + count - tirx.const(1, "uint32")) // count

    def guarded(
        self, stmt: tirx.Stmt, footprints: Footprints, simple: Callable[[tirx.PrimExpr], tirx.PrimExpr],
        left: Sequence[Loop],
    ) -> tirx.Stmt:  # fmt: skip
        """``stmt`` where conditions leave some of an access, and its box does not lie wholly behind
        the end of the tensor.

        Args:
            left: loops that ``stmt`` has left.
        """
        access = footprints.access
        for condition in footprints.asked:
            stmt = tirx.IfThenElse(simple(self.symbols.at_start(condition, left)), stmt, None)
        for axis in footprints.outside:
            start = self.symbols.start(footprints, 1 + axis, [*left, *access.inner])
            extent = footprints.access.tensor.shape[1 + axis]
            stmt = tirx.IfThenElse(simple(tirx.LT(start, extent)), stmt, None)
        return stmt

    def half(self, tensor: tirx.Buffer) -> list[tirx.PrimExpr]:
        """The index of the buffer that this launch uses, if there are several."""
        buffers = self.buffers[tensor]
        return (
            [tirx.Cast("int32", self.epoch % tirx.const(buffers, "uint32"))] if buffers > 1 else []
        )

    def flag(
        self, counter: Counter, waiter: tirx.PrimExpr, home: tirx.PrimExpr, granule: tirx.PrimExpr
    ) -> tirx.BufferLoad:
        """The counter at rank ``waiter`` of a granule of the copy of ``home``."""
        assert counter.flags is not None
        if counter.pulled:
            granule = home * counter.granules.total + granule
        indices = [waiter, *self.half(counter.traffic.tensor), granule]
        return tirx.BufferLoad(counter.flags, indices)

    def signal_to(
        self, counter: Counter, footprints: Footprints, home: tirx.PrimExpr, granule: tirx.PrimExpr,
        value: tirx.PrimExpr,
    ) -> tirx.Stmt:  # fmt: skip
        """A signal to all who wait for a granule of the copy of ``home``."""
        if not counter.pulled:
            return builtin_calls.signal(
                self.flag(counter, home, home, granule), value, footprints.access
            )
        known = footprints.ranks_and_owners()
        return self.for_each_rank(
            lambda peer: builtin_calls.signal(
                self.flag(counter, peer, home, granule), value, footprints.access
            ),
            counter.waiting, home, known, own=any(counter.waiting[h] >> r & 1 for r, h in known),
        )  # fmt: skip

    def copied(self) -> dict[tuple[int, int], list[tuple]]:
        """By rank and number of a plan's copy: (flag tensor, rank, its flags) of what it announces;
        the flags as a slice."""
        flags: dict[tuple[int, int], dict[tuple[str, int], list[int]]] = {}
        for counter in self.counters:
            footprints = counter.traffic.copies
            if footprints is None or counter.flags is None:
                continue
            for copy, home, granule in copies_with_granules(counter, footprints):
                if counter.own and copy.before and copy.rank == home:
                    continue
                at = granule + home * counter.granules.total * counter.pulled
                told = flags.setdefault((copy.rank, copy.number), {})
                for rank in (r for r in range(self.world_size) if counter.waiting[home] >> r & 1):
                    told.setdefault((counter.flags.name, rank), []).append(at)
        return {
            copy: [(*where, run) for where, numbers in told.items() for run in _runs(numbers)]
            for copy, told in flags.items()
        }

    @property
    def told_at_once(self) -> int:
        """How many flags one behind the other a copy of a plan announces at most; 1 of none."""
        each = itertools.chain(*self.copied().values())
        return max((run.stop - run.start for *_, run in each), default=1)

    def awaited(self) -> dict[tuple[int, int], list[tuple]]:
        """By rank and number of a plan's copy: (flag tensor, index, value) of what it waits for."""
        out: dict[tuple[int, int], list[tuple]] = {}
        for counter in self.counters:
            footprints = counter.traffic.copies_out
            if not counter.by_copies or footprints is None or counter.flags is None:
                continue
            known: set[tuple[int, int]] = set()
            for copy, home, granule in copies_with_granules(counter, footprints):
                index = copy.rank, granule + home * counter.granules.total * counter.pulled
                if index not in known:  # the stream has waited for it, and set it back
                    known.add(index)
                    wait = counter.flags.name, index, int(counter.arrivals[home, granule])
                    out.setdefault((copy.rank, copy.number), []).append(wait)
        return out

    def for_each_rank(
        self, of: Callable[[tirx.PrimExpr], tirx.Stmt], whom: Sequence[int], key: tirx.PrimExpr,
        known: Iterable[tuple[int, int]], *, own: bool = False,
    ) -> tirx.Stmt:  # fmt: skip
        """``of(peer)`` for some ranks, the right neighbour first and the own rank last.

        Args:
            whom: the ranks by ``key``, a bit each.
            known: (rank, key) as they occur.
            own: whether the own rank may be among them, or is left out.
        """
        step = tirx.Var("step", "int32")
        peer = tirx.floormod(self.symbols.rank + 1 + step, self.world_size)
        body = of(peer)
        everyone = (1 << self.world_size) - 1
        if any(whom[k] | (0 if own else 1 << r) != everyone for r, k in known):
            one = tirx.const(1, "uint32")
            bit = tirx.bitwise_and(
                tirx.shift_right(by_rank(key, whom), tirx.Cast("uint32", peer)), one
            )
            body = tirx.IfThenElse(tirx.NE(bit, tirx.const(0, "uint32")), body, None)
        ranks = self.world_size if own else self.world_size - 1
        return tirx.For(step, 0, ranks, tirx.ForKind.SERIAL, body)

    def credits(self, started: bool, pairs: set[tuple[int, int]]) -> tirx.Buffer:
        """At each rank, how many launches of each rank have started, or finished.

        Args:
            pairs: (who waits, for whom).
        """
        name = "started" if started else "finished"
        if name not in self.credit_flags:
            flags = self.add_hidden(name, (self.world_size,), "uint32", symmetric=True)
            self.credit_flags[name] = flags, set()
        flags, known = self.credit_flags[name]
        known |= pairs
        return flags

    def add_hidden(self, name: str, shape: tuple[int, ...], dtype: str, *, symmetric: bool):
        """A new hidden parameter's buffer; a symmetric one has the rank axis in front."""
        if symmetric:
            buffer = self.heap_buffer(name, shape, dtype)
        else:
            buffer = tirx.decl_buffer(shape, dtype, name, strides=packed_strides(shape))
        self.implicit.append(Implicit(name, symmetric, shape, dtype))
        self.hidden_buffers.append(buffer)
        return buffer

    def heap_buffer(self, name: str, shape: tuple[int, ...], dtype: str) -> tirx.Buffer:
        """A symmetric tensor of the group, ``shape`` on each rank."""
        return heap_buffer(name, shape, dtype, self.world_size, self.heap_stride)

    def note(
        self, kind: str, access: Access | None, tensor: str, reason: str,
        stmt: tirx.Stmt | None = None, **more: Any,
    ) -> None:  # fmt: skip
        """Say what ``stmt`` is there for; without one, what stands elsewhere and serves.

        Args:
            access: that it is for; None for what belongs to the whole kernel.
        """
        line = access.line if access is not None else ""
        if not line and self.program.kernel is not None:
            line = line_of(self.program.kernel)
        stmts = () if stmt is None else tuple(leaves_with_builtins(stmt))
        self.inserted.append(Inserted(kind, tensor, line, reason, stmts=stmts, **more))

    def note_of(
        self, kind: str, access: Access, counter: Counter, reason: str, stmt: tirx.Stmt,
        each: tirx.PrimExpr, granule: str = "",
    ) -> None:  # fmt: skip
        """``note`` about an operation on a counter."""
        assert counter.flags is not None
        self.note(
            kind, access, counter.traffic.tensor.name, reason, stmt, each=format_expr(each),
            granule=granule or counter.granules.text, flag=counter.flags.name,
            unit=0 if counter.is_of_copies else counter.unit,
        )  # fmt: skip
