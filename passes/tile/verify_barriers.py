"""Verify that a barrier has all its 32-bit words, and that nothing else changes them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from tilelang import tvm
from tvm import tirx
from tvm.tirx.stmt_functor import substitute

from ...builtins.barriers import words_of
from ...builtins.errors import LanguageError
from ...builtins.spec import Builtin, builtin_of
from ...builtins.symmetric import is_symmetric, packed_strides
from ..ir.accesses import REGIONS, WRITES, mode_of, name_of
from ..ir.group import heap_tensors
from ..ir.walk import arrows, calls_in, children_of, format_expr, line_of, op_name


def verify_barriers(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Refuse barriers with too few words, and words that another barrier or statement changes.

    Only indices that are constants, except for the rank, are verified; the simulator reports the
    other faults. Barriers that begin at the same word may share it, one after another.

    Raises:
        LanguageError: names the barrier, its words and the lines.

    Before: ``W.sync_ranks(B[W.rank(), 2])`` of ``B: W.Symmetric((5,), "uint32")``, two ranks
    After:  LanguageError, because 3 of 4 words are left; legal programs stay unchanged
    """
    uses = _Uses(func)
    uses.visit(func.body, 0)
    for use in uses.barriers:
        if use.count > use.words_left:
            raise _count_error(use)
    for first, second in itertools.combinations(uses.barriers, 2):
        if first.buffer.data.same_as(second.buffer.data) and first.overlaps(second):
            raise _overlap_error(first, second)
    for change, barrier in itertools.product(uses.changes, uses.barriers):
        if change.kernel == barrier.kernel and change.touches(barrier):
            raise _change_error(change, barrier)
    return func


@dataclass(frozen=True)
class _Words:
    """32-bit words of one barrier.

    Attributes:
        text: the barrier's first word as text.
        own: shape of the tensor, or of one rank's copy.
        first: flat index of the first word; a lower bound unless ``is_exact``.
        count: number of words that the barrier needs.
        kernel: number of the kernel that calls the barrier.
    """

    op: str
    text: str
    buffer: tirx.Buffer
    own: tuple[int, ...]
    first: int
    is_exact: bool
    count: int
    kernel: int
    line: str

    @property
    def words_left(self) -> int:
        """Number of words from the first one to the end of the tensor."""
        return math.prod(self.own) - self.first

    def overlaps(self, other: _Words) -> bool:
        if not (self.is_exact and other.is_exact) or self.first == other.first:
            return False
        low, high = sorted((self, other), key=lambda words: words.first)
        return high.first < low.first + low.count

    def indices(self) -> Iterator[tuple[int, ...]]:
        """Yield the index of each word in its rank's copy."""
        for flat in range(self.first, self.first + self.count if self.is_exact else self.first):
            yield tuple(
                flat // stride % extent
                for stride, extent in zip(packed_strides(self.own), self.own, strict=True)
            )


@dataclass(frozen=True)
class _Change:
    """A box at a constant place, without the rank axis, that a statement writes."""

    op: str
    text: str
    buffer: tirx.Buffer
    starts: tuple[int, ...]
    extents: tuple[int, ...]
    kernel: int
    line: str

    def touches(self, words: _Words) -> bool:
        if not self.buffer.same_as(words.buffer):
            return False
        return any(
            all(s <= i < s + e for i, s, e in zip(index, self.starts, self.extents, strict=True))
            for index in words.indices()
        )


class _Uses:
    """Uses of barrier words in a program, as far as their indices are constants."""

    def __init__(self, func: tirx.PrimFunc) -> None:
        self.barriers: list[_Words] = []
        self.changes: list[_Change] = []
        self._heap = {tensor.data for tensor in heap_tensors(func)}
        self._analyzer = tvm.arith.Analyzer()
        self._values: dict[tirx.Var, tirx.PrimExpr] = {}
        self._kernels = 0

    def visit(self, stmt: tirx.Stmt, kernel: int) -> None:
        """Record the barriers and writes of ``stmt`` in the kernel with this number."""
        if isinstance(stmt, tirx.SBlockRealize) and stmt.block.name_hint == "tilelang_root":
            self._kernels += 1
            kernel = self._kernels
        if isinstance(stmt, tirx.Bind):
            self._values[stmt.var] = self._simplify(stmt.value)
        if isinstance(stmt, tirx.For):
            bounds = tvm.ir.Range.from_min_extent(stmt.min, stmt.extent)
            self._analyzer.bind(stmt.loop_var, bounds, allow_override=True)
        children = children_of(stmt)
        for child in children:
            self.visit(child, kernel)
        if not children:
            self._record(stmt, kernel)

    def _record(self, stmt: tirx.Stmt, kernel: int) -> None:
        line = line_of(stmt)
        if isinstance(stmt, tirx.BufferStore):
            self._change(stmt.buffer, stmt.indices, (), stmt, kernel)
        for call in calls_in(stmt, lambda c: op_name(c) in REGIONS or _counts(c)):
            if _counts(call):
                load = call.args[0].args[0]
                self.barriers.append(self._words(builtin_of(call), load, kernel, line))
            elif not any(call.same_as(c.args[0]) for c in calls_in(stmt, _counts)):
                load = call.args[0]
                extents = call.args[2:] if op_name(call) == "tl.region" else ()
                if mode_of(call) & WRITES:
                    self._change(load.buffer, load.indices, extents, stmt, kernel)

    def _words(self, spec: Builtin, load: tirx.BufferLoad, kernel: int, line: str) -> _Words:
        buffer, axes = load.buffer, self._axes(load.buffer)
        own = tuple(int(e) if isinstance(e, tirx.IntImm) else 1 << 31 for e in buffer.shape[axes:])
        ranks = buffer.shape[0]
        indices = [self._simplify(i) for i in load.indices[axes:]]
        bounds = [self._analyzer.const_int_bound(i) for i in indices]
        strides = packed_strides(own)
        return _Words(
            spec.name, f"{buffer.name}[{', '.join(map(format_expr, load.indices))}]", buffer, own,
            first=sum(max(0, b.min_value) * s for b, s in zip(bounds, strides, strict=True)),
            is_exact=all(b.min_value == b.max_value >= 0 for b in bounds),
            count=words_of(spec.participants, int(ranks) if isinstance(ranks, tirx.IntImm) else 1),
            kernel=kernel, line=line,
        )  # fmt: skip

    def _change(self, buffer, indices, extents, stmt: tirx.Stmt, kernel: int) -> None:
        """Record a write if its place is constant."""
        axes = self._axes(buffer)
        starts = [self._simplify(i) for i in list(indices)[axes:]]
        sizes = [self._simplify(e) for e in list(extents)[axes:]] or [1] * len(starts)
        if all(isinstance(n, (int, tirx.IntImm)) for n in (*starts, *sizes)):
            text = f"{buffer.name}[{', '.join(map(format_expr, indices))}]"
            self.changes.append(_Change(
                name_of(stmt), text, buffer, tuple(map(int, starts)), tuple(map(int, sizes)),
                kernel, line_of(stmt),
            ))  # fmt: skip

    def _axes(self, buffer: tirx.Buffer) -> int:
        """Return the number of rank axes of ``buffer``, 0 or 1."""
        return int(buffer.data in self._heap or is_symmetric(buffer))

    def _simplify(self, expr: tirx.PrimExpr) -> tirx.PrimExpr:
        return self._analyzer.simplify(substitute(expr, self._values))


def _counts(call: tirx.Call) -> bool:
    """Return whether ``call`` is a barrier with the program's own words."""
    spec = builtin_of(call)
    return spec is not None and bool(spec.participants) and op_name(call.args[0]) == "tl.access_ptr"


def _count_error(use: _Words) -> LanguageError:
    return LanguageError(
        f"{use.op}: barrier={use.text} has {max(0, use.words_left)} words up to the end of "
        f"{use.buffer.name}; expected {use.count}{arrows([('barrier', use.line)])}"
    )


def _overlap_error(first: _Words, second: _Words) -> LanguageError:
    return LanguageError(
        f"{second.op}: barrier={_text_with_count(second)} overlaps the words of {first.op}, "
        f"{_text_with_count(first)}; "
        "expected separate words, or the same first word"
        f"{arrows([('barrier', second.line), ('other barrier', first.line)])}"
    )


def _change_error(change: _Change, barrier: _Words) -> LanguageError:
    return LanguageError(
        f"{change.op}: writes {change.text}, a word of {barrier.op} with "
        f"barrier={_text_with_count(barrier)}; expected only barriers to change it in this kernel"
        f"{arrows([('write', change.line), ('barrier', barrier.line)])}"
    )


def _text_with_count(use: _Words) -> str:
    return f"{use.text} ({use.count} word{'s' if use.count > 1 else ''})"
