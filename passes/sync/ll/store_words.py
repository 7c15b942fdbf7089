"""Replace accesses to tensors by accesses to words that hold data and the number of the launch."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass, field

from tilelang import tvm
from tvm import tirx
from tvm.tirx.stmt_functor import ir_transform

from ....builtins.declaration.operands import WORD_DATA_BITS
from ....builtins.ll import WORD
from ...ir.implicit import heap_buffer, implicit_of, set_implicit
from ...ir.walk import calls_in, is_leaf, line_of, nodes_in, op_name, rewrite_children
from ..infer import builtin_calls
from ..infer.context import InsertedOperation, SyncContext
from ..infer.edits import at_line_of
from ..regions.symbols import Symbols
from .word_copies import Side, consecutive, is_vectorizable, parallel, sides_of


@dataclass(frozen=True)
class _Words:
    """Words that hold the elements of a tensor.

    Attributes:
        tensor: the tensor, with the axis for the buffers that launches use in turn.
        buffer: its words, which have the same axes.
        elements: number of elements in a word.
        clipped: axes, counted from the last one, along which copies extend past the end.
    """

    tensor: tirx.Buffer
    buffer: tirx.Buffer
    elements: int
    clipped: frozenset[int]

    @property
    def dtype(self) -> tvm.DataType:
        return tvm.DataType(str(self.tensor.dtype))

    @property
    def lanes(self) -> int:
        """Number of elements that one access of two words moves; 0 if words are not full."""
        lanes = 2 * WORD_DATA_BITS // self.dtype.bits
        return lanes if lanes == 2 * self.elements else 0

    def at(self, indices: list[tirx.PrimExpr]) -> tirx.BufferLoad:
        """Return the word of the element with these indices."""
        last = indices[-1]
        if self.elements > 1:
            last = tvm.arith.Analyzer().simplify(tirx.floordiv(last, self.elements))
        return tirx.BufferLoad(self.buffer, [*indices[:-1], last])


@dataclass
class _Rewriter:
    """Rewriting of one program.

    Attributes:
        words: words by the data pointer of their tensors.
        inserted: the statements that access words, for ``tw.explain``.
    """

    words: Mapping[tirx.Var, _Words]
    epoch: tirx.PrimExpr
    symbols: Symbols
    inserted: list[InsertedOperation] = field(default_factory=list)

    def visit(self, stmt: tirx.Stmt) -> tirx.Stmt:
        if not is_leaf(stmt):
            return rewrite_children(stmt, self.visit)
        accesses = nodes_in(stmt, tirx.BufferLoad, tirx.BufferStore)
        if not any(node.buffer.data in self.words for node in accesses):
            return stmt
        new = self._copy(stmt) if self._is_copy(stmt) else self._elements(stmt)
        return at_line_of(stmt, new)

    @staticmethod
    def _is_copy(stmt: tirx.Stmt) -> bool:
        return isinstance(stmt, tirx.Evaluate) and op_name(stmt.value) == "tl.tileop.copy"

    def _elements(self, stmt: tirx.Stmt) -> tirx.Stmt:
        """Replace the loads and the store of a statement."""
        line, names = line_of(stmt), []

        def change(node):
            words = self.words.get(node.buffer.data)
            if words is None:
                return None
            names.append(words.tensor.name)
            return self._load(words, list(node.indices), 1, line)

        new = ir_transform(stmt, None, change, ["tirx.BufferLoad"])
        words = self.words.get(stmt.buffer.data) if isinstance(stmt, tirx.BufferStore) else None
        if words is not None:
            new = self._store(words, list(new.indices), new.value, "a store", line)
        for name in names:
            self._record("ll_load", name, line, "a load", new)
        return new

    def _copy(self, stmt: tirx.Evaluate) -> tirx.Stmt:
        """Replace a copy by a loop over its elements, or over vectors for two words."""
        source, target = sides_of(stmt.value)
        line = line_of(stmt)
        read, written = (self.words.get(side.buffer.data) for side in (source, target))
        words = read or written
        lanes = 1
        if words is not None and words.lanes:
            if is_vectorizable(stmt.value, words.tensor, words.lanes, self.symbols):
                lanes = words.lanes

        zero = tirx.const(0, str(source.buffer.dtype))
        zero = tirx.Broadcast(zero, lanes) if lanes > 1 else zero

        def stored(offsets: list[tirx.PrimExpr], value: tirx.PrimExpr) -> tirx.Stmt:
            if str(source.buffer.dtype) != str(target.buffer.dtype):
                value = tirx.Cast(str(target.buffer.dtype), value)
            indices = target.at(offsets)
            if written is not None:
                return self._store(written, indices, value, "T.copy", line)
            return tirx.BufferStore(target.buffer, value, consecutive(indices, lanes))

        def body(offsets: list[tirx.PrimExpr]) -> tirx.Stmt:
            indices, inside = source.at(offsets), _inside(source, read, offsets)
            if read is not None:
                new = at_line_of(stmt, stored(offsets, self._load(read, indices, lanes, line)))
                self._record("ll_load", read.tensor.name, line, "T.copy", new)
                if inside is not None:
                    new = tirx.IfThenElse(inside, new, stored(offsets, zero))
            else:
                load = tirx.BufferLoad(source.buffer, consecutive(indices, lanes))
                if inside is not None:
                    load = tirx.if_then_else(inside, load, zero)
                new = at_line_of(stmt, stored(offsets, load))
            inside = _inside(target, written, offsets)
            return new if inside is None else tirx.IfThenElse(inside, new, None)

        return parallel(target, lanes, body)

    def _load(
        self, words: _Words, indices: list[tirx.PrimExpr], lanes: int, line: str
    ) -> tirx.PrimExpr:
        """Return the poll of ``lanes`` consecutive elements from ``indices`` on."""
        word, dtype = words.at(indices), str(words.tensor.dtype)
        if lanes > 1:
            return builtin_calls.ll_load(word, self.epoch, f"{dtype}x{lanes}", 2, line)
        if words.dtype.bits == WORD_DATA_BITS:
            return builtin_calls.ll_load(word, self.epoch, dtype, 1, line)
        data = builtin_calls.ll_load(word, self.epoch, f"uint{WORD_DATA_BITS}", 1, line)
        return _with_type(dtype, data)

    def _store(
        self, words: _Words, indices: list[tirx.PrimExpr], value: tirx.PrimExpr, op: str, line: str
    ) -> tirx.Stmt:
        """Return the store of an element, or of a vector that fills two words."""
        dtype = tvm.DataType(str(value.dtype))
        if dtype.bits * dtype.lanes < WORD_DATA_BITS:
            value = tirx.Cast(f"uint{WORD_DATA_BITS}", _as_bits(value))
        new = builtin_calls.ll_store(words.at(indices), value, self.epoch, words.tensor.name)
        self._record("ll_store", words.tensor.name, line, op, new)
        return new

    def _record(self, kind: str, tensor: str, line: str, op: str, stmt: tirx.Stmt) -> None:
        reason = {
            "ll_store": f"{op} writes data and the number of the launch in each word",
            "ll_load": f"{op} reads words, and polls until they have the number of the launch",
        }[kind]
        self.inserted.append(InsertedOperation(kind, tensor, line, reason, "a word", stmts=(stmt,)))


def _as_bits(value: tirx.PrimExpr) -> tirx.PrimExpr:
    """Return a value as an unsigned integer of its size."""
    dtype = f"uint{tvm.DataType(str(value.dtype)).bits}"
    return value if str(value.dtype) == dtype else tirx.reinterpret(dtype, value)


def _with_type(dtype: str, data: tirx.PrimExpr) -> tirx.PrimExpr:
    """Return the low bits of ``data`` as an element of ``dtype``."""
    unsigned = f"uint{tvm.DataType(dtype).bits}"
    bits = tirx.Cast(unsigned, data)
    return bits if dtype == unsigned else tirx.reinterpret(dtype, bits)


def _inside(side: Side, words: _Words | None, offsets: list[tirx.PrimExpr]) -> tirx.PrimExpr | None:
    """Return the condition that an element of a copy is inside the tensor; None if all are."""
    shape, indices = side.buffer.shape, side.at(offsets)
    axes = range(-len(shape), 0) if words is None else sorted(words.clipped)
    if side.buffer.scope() != "global":
        return None
    conditions = [
        tirx.LT(indices[axis], shape[axis])
        for axis in axes
        if words is not None or not _ends_inside(side, axis)
    ]
    return functools.reduce(tirx.And, conditions) if conditions else None


def _ends_inside(side: Side, axis: int) -> bool:
    start, shape = side.start.indices[axis], side.buffer.shape[axis]
    if int(side.extents[axis]) == 1:
        return True
    return tvm.arith.Analyzer().can_prove(start + side.extents[axis] <= shape)


def store_words(context: SyncContext, func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Replace the accesses to tensors with the protocol LL by accesses to words.

    Before: ``T.copy(tile, S[dst, row, 0]); S_arrived[dst, row] += n``
    After:  ``for i in T.Parallel(n): T.tileweave.ll_st(S[dst, row, i], tile[i], epoch)``
    """
    protocols = {t.name: p for t, p in context.protocols.items() if p.is_ll}
    if not protocols:
        return func
    buffers, implicit, words = dict(func.buffer_map.items()), implicit_of(func), {}
    for param, tensor in func.buffer_map.items():
        protocol = protocols.get(tensor.name)
        if protocol is None:
            continue
        index = next(i for i, p in enumerate(implicit) if p.name == tensor.name)
        *outer, last = implicit[index].shape
        shape = (*outer, -(-last // protocol.elements))
        implicit[index] = dataclasses.replace(
            implicit[index], shape=shape, dtype=WORD, flagged=True
        )
        new = heap_buffer(tensor.name, shape, WORD, context.world_size, context.heap_stride)
        buffers[param] = new
        words[tensor.data] = _Words(tensor, new, protocol.elements, protocol.clipped)
    rewriter = _Rewriter(words, context.epoch, context.symbols)
    body = rewriter.visit(func.body)
    _require_no_access(body, words)
    context.inserted += rewriter.inserted
    func = tirx.PrimFunc(func.params, body, func.ret_type, buffers, func.attrs, func.span)
    return set_implicit(func, implicit)


def _require_no_access(body: tirx.Stmt, words: Mapping[tirx.Var, _Words]) -> None:
    """Fail if an access to a replaced tensor is left, which ``choose_protocols`` must refuse."""
    left = [n for n in nodes_in(body, tirx.BufferLoad, tirx.BufferStore) if n.buffer.data in words]
    left += calls_in(body, lambda c: any(a in words for a in c.args if isinstance(a, tirx.Var)))
    assert not left, f"store_words: {left[0]} still accesses a tensor whose words are stored"
