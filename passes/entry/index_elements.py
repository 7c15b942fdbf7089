"""Index shared tiles by elements where TileLang may permute them."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, field

from tvm import tirx
from tvm.tirx.stmt_functor import ir_transform

from ..ir.walk import calls_in, flatten, is_leaf, op_name, rewrite_and_allocate, with_span_of

_SHARED = "shared", "shared.dyn"
_CONDITIONAL = "tirx.if_then_else"

Access = tirx.BufferLoad | tirx.BufferStore


def index_elements(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Replace vectors of a shared tile by loops over their elements, if TileLang may permute the
    tile: it lowers an index of a permuted tile only if that is one element.

    The loops are vectorized, so TileLang makes vectors of them when it knows the layout. Tiles that
    may be permuted are operands of products, and those that the TMA stores.

    Before: ``tile[i, 4 * j : 4 * j + 4] = T.tileweave.ll_ld(...)``
    After:  ``vector[0:4] = T.tileweave.ll_ld(...)``
            ``for k in T.vectorized(4): tile[i, 4 * j + k] = vector[k]``
    """
    tiles = _permutable_tiles(func.body)
    return func.with_body(_Rewriter(tiles).visit(func.body)) if tiles else func


def _permutable_tiles(body: tirx.Stmt) -> set[tirx.Var]:
    """Return the shared tiles for which a tile operator may choose another order of elements."""
    tiles: set[tirx.Var] = set()
    for call in calls_in(body, lambda c: op_name(c).startswith("tl.tileop.")):
        buffers = [arg.args[0].buffer for arg in call.args if op_name(arg) == "tl.region"]
        if op_name(call) == "tl.tileop.copy":
            buffers = buffers[:-1] if buffers and buffers[-1].scope() == "global" else []
        tiles.update(buffer.data for buffer in buffers if buffer.scope() in _SHARED)
    return tiles


@dataclass
class _Rewriter:
    """Rewriting of one program.

    Attributes:
        tiles: tiles that may be permuted.
        vectors: buffers for the elements of a vector, not yet in a block.
    """

    tiles: Container[tirx.Var]
    vectors: list[tirx.Buffer] = field(default_factory=list)

    def visit(self, stmt: tirx.Stmt) -> tirx.Stmt:
        if is_leaf(stmt):
            return self._leaf(stmt)
        return rewrite_and_allocate(stmt, self.visit, self.vectors)

    def _leaf(self, stmt: tirx.Stmt) -> tirx.Stmt:
        before: list[tirx.Stmt] = []
        after: list[tirx.Stmt] = []

        def load(node: tirx.BufferLoad) -> tirx.BufferLoad | None:
            if not self._is_vector(node):
                return None
            vector = self._vector(node)
            before.append(_copy_elements(node, vector))
            return vector

        # The elements that a condition excludes may be outside of the tile.
        has_condition = calls_in(stmt, lambda c: op_name(c) == _CONDITIONAL)
        new = stmt if has_condition else ir_transform(stmt, None, load, ["tirx.BufferLoad"])
        if isinstance(new, tirx.BufferStore) and self._is_vector(new):
            vector = self._vector(new)
            after.append(_copy_elements(vector, new))
            new = tirx.BufferStore(vector.buffer, new.value, vector.indices)
        if new.same_as(stmt):
            return stmt
        return flatten([with_span_of(stmt, s) for s in (*before, new, *after)])

    def _is_vector(self, node: Access) -> bool:
        last = node.indices[-1]
        return isinstance(last, tirx.Ramp) and node.buffer.data in self.tiles

    def _vector(self, node: Access) -> tirx.BufferLoad:
        """Return new registers for the elements of a vector."""
        lanes = int(node.indices[-1].lanes)
        vector = tirx.decl_buffer([lanes], node.buffer.dtype, "vector", scope="local")
        self.vectors.append(vector)
        return tirx.BufferLoad(vector, [tirx.Ramp(tirx.IntImm("int32", 0), 1, lanes)])


def _copy_elements(source: Access, target: Access) -> tirx.Stmt:
    """Return a loop that copies the elements of a vector."""
    lane = tirx.Var("lane", "int32")

    def at(vector: Access) -> list[tirx.PrimExpr]:
        *outer, last = vector.indices
        return [*outer, last.base + lane * last.stride]

    load = tirx.BufferLoad(source.buffer, at(source))
    store = tirx.BufferStore(target.buffer, load, at(target))
    return tirx.For(lane, 0, source.indices[-1].lanes, tirx.ForKind.VECTORIZED, store)
