"""Find asynchronous accesses of shared memory without a proxy fence after writes by threads."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from tvm import tirx

from ....builtins.spec import builtin_of
from ..uniformity import Divergence, ThreadControl
from ..walk import calls_in, children_of, headers_of, is_leaf, op_name
from .effects import (
    ATOMIC,
    BULK,
    COPY,
    LOAD,
    PRODUCT,
    WRITE,
    Access,
    Arrive,
    Await,
    Barrier,
    Complete,
    Describe,
    Effect,
    Exit,
    effects_of,
    mbarrier_of,
)
from .footprints import Footprints, Tile
from .values import ThreadValues

_PRODUCT_BEGIN = "tl.warpgroup_arrive"
"""First operation of each product by wgmma."""
_FENCE = "tl.fence_proxy_async"

_Tiles = frozenset[Tile]


def unfenced_accesses(func: tirx.PrimFunc) -> set[tirx.Stmt]:
    """Return the leaf statements of a device function that need a proxy fence before them.

    Stores and ``cp.async`` write shared memory by the generic proxy. By the async proxy, bulk
    stores and wgmma read it, and bulk loads overwrite it. The threads that write may execute the
    fence, before a barrier or an arrival, or those that start the asynchronous access, after a
    barrier or a wait. Threads that wait for an mbarrier know what those that arrive at it have
    written, in any order of the text; so do those that meet at a barrier under a condition on the
    thread. A bulk load needs no fence after reads by threads, because their values have arrived.
    """
    return _Proxies(func).unfenced()


class _Proxies:
    """Tiles whose writes some threads know of, and no fence has ordered, along all paths."""

    def __init__(self, func: tirx.PrimFunc) -> None:
        self._func = func
        self._control = ThreadControl(func)
        self._footprints = Footprints(ThreadValues.of_launch(func, {}), func.body, {})
        self._effects: dict[Any, list[Effect]] = {}
        self._published: dict[Any, _Tiles] = defaultdict(frozenset)
        """Tiles at the arrivals at each mbarrier and barrier."""
        self._repeated: dict[tirx.Stmt, _Tiles] = defaultdict(frozenset)
        """Tiles at the ends of the iterations of each loop."""
        self._loops: list[tirx.Stmt] = []
        self._copied: _Tiles = frozenset()
        self._tiles: _Tiles = frozenset()
        self._product: tirx.Stmt | None = None
        self._unfenced: set[tirx.Stmt] = set()

    def unfenced(self) -> set[tirx.Stmt]:
        before = None
        while before != (before := ({**self._published}, {**self._repeated}, self._copied)):
            self._tiles = frozenset()
            self._follow(self._func.body, False)
        return self._unfenced

    def _follow(self, stmt: tirx.Stmt, varies: bool) -> None:
        """Follow a statement.

        Args:
            varies: whether a condition around it depends on the thread.
        """
        varies |= self._control.enter(stmt) is not Divergence.UNIFORM
        for node in [stmt] if is_leaf(stmt) else headers_of(stmt):
            self._apply(node, varies)
        if isinstance(stmt, tirx.Bind):
            self._control.bind(stmt)
        if isinstance(stmt, tirx.IfThenElse):
            before, self._tiles = self._tiles, self._case(stmt.then_case, varies)
            then_tiles, self._tiles = self._tiles, before
            other = before if stmt.else_case is None else self._case(stmt.else_case, varies)
            self._tiles = then_tiles | other
        elif isinstance(stmt, tirx.For | tirx.While):
            self._loops.append(stmt)
            self._tiles |= self._repeated[stmt]
            self._repeated[stmt] |= self._case(stmt.body, varies)
            self._tiles |= self._repeated[self._loops.pop()]
        else:
            for child in children_of(stmt):
                self._follow(child, varies)

    def _case(self, stmt: tirx.Stmt, varies: bool) -> _Tiles:
        """Return the tiles after a statement."""
        before = self._tiles
        self._follow(stmt, varies)
        after, self._tiles = self._tiles, before
        return after

    def _apply(self, node: Any, varies: bool) -> None:
        if node not in self._effects:
            self._effects[node] = effects_of(node, set())
        if op_name(getattr(node, "value", None)) == _PRODUCT_BEGIN:
            self._product = node
        for effect in self._effects[node]:
            match effect:
                case Describe():
                    self._footprints.describe(effect)
                case Access():
                    self._access(effect, node)
                case Complete(kind=kind) if kind == COPY:
                    self._tiles |= self._copied
                case Arrive():
                    self._published[mbarrier_of(effect.barrier)[0]] |= self._tiles
                case Await():
                    self._tiles |= self._published[mbarrier_of(effect.barrier)[0]]
                case Barrier() if varies:
                    self._published[effect.number] |= self._tiles
                    self._tiles |= self._published[effect.number]
                case Exit() if self._loops:
                    self._repeated[self._loops[-1]] |= self._tiles
        if calls_in(node, _fences):
            self._tiles = frozenset()

    def _access(self, access: Access, node: Any) -> None:
        tile = self._footprints.tile(access)
        if access.end in (BULK, LOAD, PRODUCT):
            if any(tile.overlaps(other) for other in self._tiles):
                self._unfenced.add(self._product if access.end == PRODUCT else node)
                self._tiles = frozenset()
        elif access.end == COPY:
            self._copied |= {tile}
        elif not access.end and access.mode & (WRITE | ATOMIC):
            self._tiles |= {tile}


def _fences(call: tirx.Call) -> bool:
    spec = builtin_of(call)
    return op_name(call) == _FENCE or (spec is not None and spec.proxy_fence)
