"""State that the steps of the inference share."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from tvm import tirx

from ....builtins.symmetric import packed_strides
from ...ir.implicit import Implicit, heap_buffer, parameter_names, unused_name
from ...ir.leaves import leaves_with_builtins
from ...ir.walk import format_expr, line_of
from ..ll.protocol import Protocol
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
class InsertedOperation:
    """One inserted operation, or one that is unnecessary because another covers it.

    Attributes:
        kind: ``signal``, ``wait``, ``barrier``, ``fence`` or ``bulk_wait``; or ``unordered`` for
            an access in ``W.unordered``.
        tensor: name of the tensor that it orders.
        line: ``file:line`` of the access that needs it.
        reason: explanation for the user.
        granule: size of the box that one counter covers, in elements, or a text such as ``all``.
        amount: number of units that a signal adds, or that have arrived in a launch when a wait
            ends.
        unit: elements of one unit, 0 if it counts launches.
        flag: name of the counters.
        stmts: the inserted statements, empty if another operation covers this one.
    """

    kind: str
    tensor: str
    line: str
    reason: str
    granule: str = ""
    amount: str = ""
    unit: int = 0
    flag: str = ""
    stmts: tuple[tirx.Stmt, ...] = field(default=(), compare=False, repr=False)


def by_rank(rank: tirx.PrimExpr, values: Sequence[int], *, one_form: bool = False) -> tirx.PrimExpr:
    """Select the value for ``rank``, in one form for all values if that is asked for."""
    if len(set(values)) == 1 and not one_form:
        return tirx.const(values[0], "uint32")
    out: tirx.PrimExpr = tirx.const(values[-1], "uint32")
    for number in reversed(range(len(values) - 1)):
        constant = tirx.const(values[number], "uint32")
        out = tirx.Select(rank.equal(number), constant, out)
    return out


def _runs(numbers: Sequence[int]) -> list[slice]:
    """Split ascending numbers into slices of consecutive numbers."""
    cuts = [0, *(np.flatnonzero(np.diff(numbers) != 1) + 1), len(numbers)]
    return [slice(numbers[a], numbers[b - 1] + 1) for a, b in itertools.pairwise(cuts)]


def copies_with_granules(
    counter: Counter, footprints: Footprints
) -> Iterator[tuple[Copy, int, int]]:
    """Yield each of a plan's copies in order, with the owner and number of a granule it touches.

    Args:
        footprints: the footprints of the copies.
    """
    copies, owners = footprints.access.copies, footprints.owner
    granules = counter.granules.numbers_of_copies(footprints)
    for copy, owner, numbers in zip(copies, owners, granules, strict=True):
        for granule in numbers:
            yield copy, int(owner), int(granule)


@dataclass(eq=False)
class SyncContext:
    """A program and the synchronization that is inferred for it.

    Attributes:
        tensor_accesses: the accesses to each tensor that must be synchronized.
        protocols: the protocol of each of these tensors.
        buffers: number of buffers of each tensor that launches use in turn.
        implicit: implicit parameters for counters.
        implicit_buffers: buffers of these parameters.
        reuse: tensor -> why the next launch may reuse its memory.
        epoch: number of this launch, a variable of the kernel.
        credit_flags: flags of ``started`` and ``finished``, if used, and the (waiting rank, awaited
            rank) pairs.
        at_end: statements that one thread of the last block of a launch executes.
    """

    program: Program
    world_size: int
    heap_stride: int
    options: Options
    symbols: Symbols
    tensor_accesses: list[TensorAccesses] = field(default_factory=list)
    counters: list[Counter] = field(default_factory=list)
    protocols: Mapping[tirx.Buffer, Protocol] = field(default_factory=dict)
    buffers: dict[tirx.Buffer, int] = field(default_factory=dict)
    implicit: list[Implicit] = field(default_factory=list)
    implicit_buffers: list[tirx.Buffer] = field(default_factory=list)
    inserted: list[InsertedOperation] = field(default_factory=list)
    reuse: dict[str, str] = field(default_factory=dict)
    placement: Placement = field(default_factory=Placement)
    epoch: tirx.Var = field(default_factory=lambda: tirx.Var("epoch", "uint32"))
    credit_flags: dict[str, tuple[tirx.Buffer, set[tuple[int, int]]]] = field(default_factory=dict)
    at_end: list[tirx.Stmt] = field(default_factory=list)
    _all_buffers: dict[tirx.Buffer, tirx.Buffer] = field(default_factory=dict)

    @property
    def has_copies(self) -> bool:
        """True if the program is the kernel of a plan with copies. Another kernel, the entry
        barrier, begins the calls of such a plan: it signals to the peers, and the copies wait until
        no rank reads the memory that they overwrite."""
        return any(t.copies is not None for t in self.tensor_accesses)

    def is_ll(self, tensor: tirx.Buffer) -> bool:
        """Return whether words with flags hold ``tensor``, so that no counter is signalled."""
        return tensor in self.protocols and self.protocols[tensor].is_ll

    @property
    def signalled_counters(self) -> list[Counter]:
        """Counters that signals change and waits read."""
        return [c for c in self.counters if not self.is_ll(c.accesses.tensor)]

    @property
    def grid(self) -> tirx.PrimExpr:
        """Number of blocks of a launch."""
        total: tirx.PrimExpr = tirx.IntImm("int32", 1)
        for loop in self.program.grid:
            total = total * loop.extent
        return self.program.inline_bindings(total)

    @property
    def block(self) -> tirx.PrimExpr:
        """Index of the block, in launch order."""
        number: tirx.PrimExpr = tirx.IntImm("int32", 0)
        for loop in reversed(self.program.grid):
            number = number * loop.extent + loop.var
        return self.program.inline_bindings(number)

    def epochs_of(self, tensor: tirx.Buffer) -> tirx.PrimExpr:
        """Return how many launches have used the current buffer of ``tensor``, this launch
        included."""
        count = tirx.const(self.buffers[tensor], "uint32")
        if self.buffers[tensor] == 1:
            return self.epoch
        return (self.epoch + count - tirx.const(1, "uint32")) // count

    def guard(self, stmt: tirx.Stmt, footprints: Footprints, exited: Sequence[Loop]) -> tirx.Stmt:
        """Guard ``stmt`` by the conditions of an access, and by the end of the tensor if the box of
        the access may start after it. A row of a ragged tensor that is data may: nothing is stored
        there, and no counter counts it.

        Args:
            exited: loops around the access that ``stmt`` was moved out of.
        """
        access, symbols = footprints.access, self.symbols
        conditions = [symbols.in_first_iteration(c, exited) for c in footprints.inner_conditions]
        for axis in footprints.outside:
            start = symbols.box_start(footprints, 1 + axis, [*exited, *access.inner])
            conditions.append(tirx.LT(start, access.tensor.shape[1 + axis]))
        for condition in conditions:
            stmt = tirx.IfThenElse(symbols.inserted(condition, access), stmt, None)
        if access.ragged is not None and access.ragged.axis in footprints.runtime_axes:
            rows = tirx.Cast("uint32", access.tensor.shape[access.ragged.axis])
            row = tirx.Cast("uint32", footprints.runtime_axes[access.ragged.axis])
            stmt = tirx.IfThenElse(tirx.LT(row, rows), stmt, None)
        return stmt

    def buffer_index(self, tensor: tirx.Buffer) -> list[tirx.PrimExpr]:
        """Return the index of the buffer that this launch uses, or no index if there is only one
        buffer."""
        buffers = self.buffers[tensor]
        return (
            [tirx.Cast("int32", self.epoch % tirx.const(buffers, "uint32"))] if buffers > 1 else []
        )

    def all_buffers_of(self, tensor: tirx.Buffer) -> tirx.Buffer:
        """Return the tensor that replaces ``tensor``: with an axis for its buffers after the rank
        axis, if launches use several in turn."""
        if self.buffers[tensor] == 1:
            return tensor
        if tensor not in self._all_buffers:
            shape = (self.buffers[tensor], *(int(e) for e in tensor.shape[1:]))
            self._all_buffers[tensor] = self.heap_buffer(tensor.name, shape, str(tensor.dtype))
        return self._all_buffers[tensor]

    def flag(
        self, counter: Counter, waiter: tirx.PrimExpr, owner: tirx.PrimExpr, granule: tirx.PrimExpr
    ) -> tirx.BufferLoad:
        """Return the counter at rank ``waiter`` of a granule of the copy that ``owner`` owns."""
        assert counter.flags is not None
        if counter.pulled:
            granule = owner * counter.granules.total + granule
        accesses = counter.accesses
        buffer = [] if accesses.is_ragged else self.buffer_index(accesses.tensor)
        indices = [waiter, *buffer, granule]
        return tirx.BufferLoad(counter.flags, indices)

    def signal_to(
        self, counter: Counter, footprints: Footprints, owner: tirx.PrimExpr,
        granule: tirx.PrimExpr, value: tirx.PrimExpr,
    ) -> tirx.Stmt:  # fmt: skip
        """Signal to all ranks that wait for a granule of the copy that ``owner`` owns."""
        if not counter.pulled:
            return builtin_calls.signal(
                self.flag(counter, owner, owner, granule), value, footprints.access, counter.scope
            )
        pairs = footprints.ranks_and_owners()
        return self.for_each_rank(
            lambda peer: builtin_calls.signal(
                self.flag(counter, peer, owner, granule), value, footprints.access
            ),
            counter.waiting, owner, pairs,
            include_own=any(counter.waiting[other] >> rank & 1 for rank, other in pairs),
        )  # fmt: skip

    def signals_of_copies(self) -> dict[tuple[int, int], list[tuple]]:
        """Return the flags that each copy of the plan signals: (flag tensor, rank, slice of its
        flags), by rank and number of the copy."""
        flags: dict[tuple[int, int], dict[tuple[str, int], list[int]]] = {}
        for counter in self.counters:
            footprints = counter.accesses.copies
            if footprints is None or counter.flags is None:
                continue
            for copy, owner, granule in copies_with_granules(counter, footprints):
                if counter.own and copy.before and copy.rank == owner:
                    continue
                index = granule + owner * counter.granules.total * counter.pulled
                signalled = flags.setdefault((copy.rank, copy.number), {})
                for rank in (r for r in range(self.world_size) if counter.waiting[owner] >> r & 1):
                    signalled.setdefault((counter.flags.name, rank), []).append(index)
        return {
            copy: [(*flag, run) for flag, indices in signalled.items() for run in _runs(indices)]
            for copy, signalled in flags.items()
        }

    @property
    def flags_per_copy(self) -> int:
        """Maximum number of consecutive flags that one copy of the plan signals; 1 if no copy
        signals."""
        signals = itertools.chain(*self.signals_of_copies().values())
        return max((run.stop - run.start for *_, run in signals), default=1)

    def waits_of_copies(self) -> dict[tuple[int, int], list[tuple]]:
        """Return the flags that each copy of the plan waits for: (flag tensor, index, value), by
        rank and number of the copy."""
        out: dict[tuple[int, int], list[tuple]] = {}
        for counter in self.counters:
            footprints = counter.accesses.copies_out
            if not counter.by_copies or footprints is None or counter.flags is None:
                continue
            waited: set[tuple[int, int]] = set()
            for copy, owner, granule in copies_with_granules(counter, footprints):
                index = copy.rank, granule + owner * counter.granules.total * counter.pulled
                if index not in waited:  # the stream resets a flag after its wait
                    waited.add(index)
                    wait = counter.flags.name, index, int(counter.arrivals[owner, granule])
                    out.setdefault((copy.rank, copy.number), []).append(wait)
        return out

    def for_each_rank(
        self, stmt_of: Callable[[tirx.PrimExpr], tirx.Stmt], peers: Sequence[int],
        key: tirx.PrimExpr, pairs: Iterable[tuple[int, int]], *, include_own: bool = False,
    ) -> tirx.Stmt:  # fmt: skip
        """Build a loop of ``stmt_of(peer)`` over ranks, from the right neighbor to this rank.

        Args:
            stmt_of: returns the statement for a peer.
            peers: bit mask of the ranks, by ``key``.
            pairs: all (rank, key) that occur.
            include_own: whether the loop includes this rank.
        """
        step = tirx.Var("step", "int32")
        peer = tirx.floormod(self.symbols.rank_call + 1 + step, self.world_size)
        body = stmt_of(peer)
        all_ranks = (1 << self.world_size) - 1
        is_shared = self.program.is_shared
        some = any(peers[k] | (0 if include_own else 1 << r) != all_ranks for r, k in pairs)
        if some or is_shared:
            one = tirx.const(1, "uint32")
            mask = by_rank(key, peers, one_form=is_shared)
            bit = tirx.bitwise_and(tirx.shift_right(mask, tirx.Cast("uint32", peer)), one)
            body = tirx.IfThenElse(tirx.NE(bit, tirx.const(0, "uint32")), body, None)
        ranks = self.world_size if include_own else self.world_size - 1
        return tirx.For(step, 0, ranks, tirx.ForKind.SERIAL, body)

    def credits(self, started: bool, pairs: set[tuple[int, int]]) -> tirx.Buffer:
        """Return flags that count at each rank the launches of each rank that have started, or
        finished.

        Args:
            pairs: (waiting rank, awaited rank).
        """
        name = "started" if started else "finished"
        if name not in self.credit_flags:
            flags = self.add_implicit(name, (self.world_size,), "uint32", symmetric=True)
            self.credit_flags[name] = flags, set()
        flags, all_pairs = self.credit_flags[name]
        all_pairs |= pairs
        return flags

    def add_implicit(self, name: str, shape: tuple[int, ...], dtype: str, *, symmetric: bool):
        """Add an implicit parameter and return its buffer. A symmetric one has the rank as first
        axis. The name of the buffer differs from ``name`` if a parameter has it."""
        assert self.program.func is not None
        taken = parameter_names(self.program.func)
        name = unused_name(name, [*taken, *(p.name for p in self.implicit)])
        if symmetric:
            buffer = self.heap_buffer(name, shape, dtype)
        else:
            buffer = tirx.decl_buffer(shape, dtype, name, strides=packed_strides(shape))
        self.implicit.append(Implicit(name, symmetric, shape, dtype))
        self.implicit_buffers.append(buffer)
        return buffer

    def heap_buffer(self, name: str, shape: tuple[int, ...], dtype: str) -> tirx.Buffer:
        """Declare a symmetric tensor of the group, with ``shape`` on each rank."""
        return heap_buffer(name, shape, dtype, self.world_size, self.heap_stride)

    def record(
        self, kind: str, access: Access | None, tensor: str, reason: str,
        stmt: tirx.Stmt | None = None, **fields: Any,
    ) -> None:  # fmt: skip
        """Record why ``stmt`` is inserted or, without ``stmt``, why none is necessary.

        Args:
            access: the access that needs it; None if the whole kernel does.
        """
        line = access.line if access is not None else ""
        if not line and self.program.kernel is not None:
            line = line_of(self.program.kernel)
        stmts = () if stmt is None else tuple(leaves_with_builtins(stmt))
        self.inserted.append(InsertedOperation(kind, tensor, line, reason, stmts=stmts, **fields))

    def record_counter_op(
        self, kind: str, access: Access, counter: Counter, reason: str, stmt: tirx.Stmt,
        amount: tirx.PrimExpr, granule: str = "",
    ) -> None:  # fmt: skip
        """Record why ``stmt``, an operation on a counter, is inserted."""
        assert counter.flags is not None
        self.record(
            kind, access, counter.accesses.tensor.name, reason, stmt, amount=format_expr(amount),
            granule=granule or counter.granules.text, flag=counter.flags.name,
            unit=0 if counter.is_of_copies else counter.unit,
        )  # fmt: skip
