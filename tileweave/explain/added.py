"""Barriers, fences and waits that passes after the inference add, and the operations they serve."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from tvm import tirx

from ..builtins.memory import fence_proxy_async
from ..builtins.spec import declaration_of
from ..passes.ir.block_barrier import is_sync_threads
from ..passes.ir.leaves import Leaf, leaves_of, tensor_of
from ..passes.ir.memory_order import acquires, releases
from ..passes.ir.operators import is_placeholder
from ..passes.ir.spans import get_stmt_span
from ..passes.ir.walk import effects_in, op_name
from ..passes.pipeline import PIPELINE, Pass

_FENCES = ("tl.fence_proxy_async", declaration_of(fence_proxy_async).op_name)


@dataclass(frozen=True)
class AddedOperation:
    """One added operation.

    Attributes:
        kind: ``barrier``, ``fence`` or ``bulk_wait``.
        loc: file and line of the operation that it serves.
        flag: name of the tensor that the served operation accesses.
        reason: the summary of the pass.
        times: maximum number of executions by a block, or None if it is unknown.
    """

    kind: str
    loc: tuple[str, int]
    flag: str
    reason: str
    times: int | None


def add_in_stage(func: tirx.PrimFunc) -> tuple[tirx.PrimFunc, list[AddedOperation]]:
    """Run the passes on tile-level IR; return ``func`` and the barriers and fences that they added.

    Args:
        func: a program specialized for the group, with its signals and waits.
    """
    added: dict[tirx.Stmt, AddedOperation] = {}
    for step in PIPELINE:
        if step.stage != "tile":
            continue
        before = {leaf.stmt for leaf in leaves_of(func.body)}
        func = step.run(func)
        leaves = leaves_of(func.body)
        for index, leaf in enumerate(leaves):
            kind = _kind(leaf)
            if kind and leaf.stmt not in before:
                served = _served_by(leaves, index)
                added[leaf.stmt] = _added(kind, served, step, leaf.times)
    remaining = {leaf.stmt for leaf in leaves_of(func.body)}
    return func, [op for stmt, op in added.items() if stmt in remaining]


def added_on_device(func: tirx.PrimFunc, kernels: Iterable[tirx.PrimFunc]) -> list[AddedOperation]:
    """Return the operations that the device passes kept or added in the lowered ``kernels``.

    TileLang may have copied an operation for warps with different roles; it is reported once.

    Args:
        func: the program after the passes on tile-level IR.
    """
    tile_leaves = {
        (leaf.loc, _flag(leaf)): leaf
        for leaf in leaves_of(func.body)
        if _has(releases, leaf) or _has(acquires, leaf)
    }
    passes = {p.name: p for p in PIPELINE}
    added: dict[AddedOperation, None] = {}
    for kernel in kernels:
        leaves = leaves_of(kernel.body)
        for index, leaf in enumerate(leaves):
            if is_placeholder(leaf.stmt):
                kind, pass_name = "bulk_wait", "complete_bulk_stores"
                served = _first(leaves[index:], releases)
            elif _kind(leaf) == "fence" and _is_inserted(leaf):
                kind, pass_name = "fence", "insert_proxy_fences"
                served = _first(reversed(leaves[:index]), acquires)
            else:
                continue
            if served is not None:
                key = served.loc, _flag(served)
                tile_leaf = tile_leaves.get(key) or _by_flag(tile_leaves, served)
                added[_added(kind, tile_leaf or served, passes[pass_name], leaf.times)] = None
    return list(added)


def _first(leaves: Iterable[Leaf], effect: Callable[[tirx.Call], bool]) -> Leaf | None:
    return next((leaf for leaf in leaves if _has(effect, leaf)), None)


def _by_flag(tile_leaves: dict, leaf: Leaf) -> Leaf | None:
    """Return the operation on the same flag; used if TileLang has lost the line."""
    matches = [tile_leaf for (_, flag), tile_leaf in tile_leaves.items() if flag == _flag(leaf)]
    return matches[0] if matches else None


def _added(kind: str, served: Leaf, step: Pass, times: int | None) -> AddedOperation:
    return AddedOperation(kind, served.loc, _flag(served), step.summary, times)


def _kind(leaf: Leaf) -> str:
    if is_sync_threads(leaf.stmt):
        return "barrier"
    is_fence = isinstance(leaf.stmt, tirx.Evaluate) and op_name(leaf.stmt.value) in _FENCES
    return "fence" if is_fence else ""


def _is_inserted(leaf: Leaf) -> bool:
    """Return whether a device pass inserted a fence.

    Such a fence has no line, and fences that TileLang inserts have another name.
    """
    return get_stmt_span(leaf.stmt) is None and op_name(leaf.stmt.value).startswith("tileweave.")


def _served_by(leaves: list[Leaf], index: int) -> Leaf:
    """Return the operation that ``leaves[index]`` serves: the next one, else the previous one."""
    others = [leaf for leaf in leaves[index + 1 :] if not _is_between(leaf)][:1]
    others += [leaf for leaf in reversed(leaves[:index]) if not _is_between(leaf)][:1]
    return next((leaf for leaf in others if leaf.builtins), leaves[index])


def _is_between(leaf: Leaf) -> bool:
    """Return true for statements that need no order: synchronization itself, and conditions."""
    is_condition = leaf.node is not leaf.stmt and not effects_in(leaf.node)
    return bool(_kind(leaf)) or is_placeholder(leaf.stmt) or is_condition


def _has(effect: Callable[[tirx.Call], bool], leaf: Leaf) -> bool:
    return any(map(effect, leaf.builtins))


def _flag(leaf: Leaf) -> str:
    return next(filter(None, map(tensor_of, leaf.builtins)), "")
