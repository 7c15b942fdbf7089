"""Operations that passes after the inference add to order memory, and the operations they serve."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from tilelang.ir import get_stmt_span
from tvm import tirx

from ...builtins.memory import fence_proxy_async
from ...builtins.spec import declaration_of
from ..pipeline import DEVICE_PASSES, SYNC_PASSES, Pass
from ..tile.order_releases import is_placeholder
from .block_barrier import is_sync_threads
from .leaves import Leaf, leaves_of, tensor_of
from .memory_order import acquires, releases
from .walk import effects_in, op_name

_FENCES = ("tl.fence_proxy_async", declaration_of(fence_proxy_async).op_name)


@dataclass(frozen=True)
class Added:
    """One operation.

    Attributes:
        kind: ``barrier``, ``fence`` or ``bulk_wait``.
        place: file and line of the operation that it serves.
        flag: name of the tensor which that operation is on.
        reason: the summary of the pass.
        times: how often a block runs it at most, or None.
    """

    kind: str
    place: tuple[str, int]
    flag: str
    reason: str
    times: int | None


def add_by_table(func: tirx.PrimFunc) -> tuple[tirx.PrimFunc, list[Added]]:
    """Return ``func`` after the passes on tile-level IR, and the barriers and fences they have
    added.

    Args:
        func: specialised for the group, with its signals and waits.
    """
    found: dict[tirx.Stmt, Added] = {}
    for one in SYNC_PASSES:
        before = {leaf.stmt for leaf in leaves_of(func.body)}
        func = one.run(func)
        leaves = leaves_of(func.body)
        for at, leaf in enumerate(leaves):
            kind = _kind(leaf)
            if kind and leaf.stmt not in before:
                served = _neighbour(leaves, at)
                found[leaf.stmt] = _added(kind, served, one, leaf.times)
    left = {leaf.stmt for leaf in leaves_of(func.body)}
    return func, [added for stmt, added in found.items() if stmt in left]


def added_on_device(func: tirx.PrimFunc, kernels: Iterable[tirx.PrimFunc]) -> list[Added]:
    """Return the operations that the device passes have kept or added in lowered ``kernels`` of
    ``func``.

    TileLang may have made several of one operation, for warps with different tasks; it is reported
    once.

    Args:
        func: after the passes on tile-level IR.
    """
    known = {
        (one.place, _flag(one)): one
        for one in leaves_of(func.body)
        if _does(releases, one) or _does(acquires, one)
    }
    passes = {p.name: p for p in DEVICE_PASSES}
    found: dict[Added, None] = {}
    for kernel in kernels:
        leaves = leaves_of(kernel.body)
        for at, leaf in enumerate(leaves):
            if is_placeholder(leaf.stmt):
                kind, by = "bulk_wait", "complete_bulk_stores"
                served = next((one for one in leaves[at:] if _does(releases, one)), None)
            elif _kind(leaf) == "fence" and _is_ours(leaf):
                kind, by = "fence", "fence_after_wait"
                before = reversed(leaves[:at])
                served = next((one for one in before if _does(acquires, one)), None)
            else:
                continue
            if served is not None:
                tile = known.get((served.place, _flag(served))) or _by_flag(known, served)
                found[_added(kind, tile or served, passes[by], leaf.times)] = None
    return list(found)


def _by_flag(known: dict, leaf: Leaf) -> Leaf | None:
    """Return the operation on the same flag, where TileLang has lost the line."""
    same = [tile for (_, flag), tile in known.items() if flag == _flag(leaf)]
    return same[0] if same else None


def _added(kind: str, served: Leaf, by: Pass, times: int | None) -> Added:
    return Added(kind, served.place, _flag(served), by.summary, times)


def _kind(leaf: Leaf) -> str:
    if is_sync_threads(leaf.stmt):
        return "barrier"
    is_fence = isinstance(leaf.stmt, tirx.Evaluate) and op_name(leaf.stmt.value) in _FENCES
    return "fence" if is_fence else ""


def _is_ours(leaf: Leaf) -> bool:
    """Return whether a pass inserted a fence on the device: such a fence has no line of its own,
    and TileLang's own has another name."""
    return get_stmt_span(leaf.stmt) is None and op_name(leaf.stmt.value).startswith("tileweave.")


def _neighbour(leaves: list[Leaf], at: int) -> Leaf:
    """Return the operation that the one at ``at`` serves: the next one, else the previous one."""
    others = [leaf for leaf in leaves[at + 1 :] if not _is_between(leaf)][:1]
    others += [leaf for leaf in reversed(leaves[:at]) if not _is_between(leaf)][:1]
    return next((leaf for leaf in others if leaf.builtins), leaves[at])


def _is_between(leaf: Leaf) -> bool:
    """Return true for statements that need no order: synchronization itself, and conditions."""
    is_condition = leaf.node is not leaf.stmt and not effects_in(leaf.node)
    return bool(_kind(leaf)) or is_placeholder(leaf.stmt) or is_condition


def _does(what: Callable[[tirx.Call], bool], leaf: Leaf) -> bool:
    return any(map(what, leaf.builtins))


def _flag(leaf: Leaf) -> str:
    return next(filter(None, map(tensor_of, leaf.builtins)), "")
