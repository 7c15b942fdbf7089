"""Insert the block barriers that accesses of shared memory need, and refuse what none can order."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress

from tvm import tirx

from ...builtins.errors import LanguageError
from ..ir.block_barrier import sync_threads
from ..ir.shared_memory.barriers import NUMBERS
from ..ir.shared_memory.findings import Frame, MisplacedBarrier, Missing, Path
from ..ir.shared_memory.launches import Launch, launches_of, scalars_of
from ..ir.shared_memory.values import WARP
from ..ir.shared_memory.walk import Walk
from ..ir.uniformity import jumps_in
from ..ir.walk import (
    Rewrite,
    arrows,
    flatten,
    line_of,
    nodes_in,
    rewrite_children,
    statements_of,
    with_span_of,
)
from ..ir.warp_roles import roles_of

_ATTEMPTS = 3
"""Number of barriers after which two accesses that are still unordered are refused."""

_ITERATIONS = 4
"""Most iterations, if they depend on a scalar, where stages of mbarriers depend on their number."""
_INSERTED = "shared.dyn"
"""Scope of barriers that the program does not contain; also of those that TileLang inserts."""


def sync_shared_memory(
    func: tirx.PrimFunc, load_lines: Callable[[], Mapping[str, str]], row_sizes: Mapping[str, int]
) -> tirx.PrimFunc:  # fmt: skip
    """Insert a barrier between accesses of shared memory that nothing orders.

    TileLang inserts barriers as if both cases of a branch ran one after the other, every loop ran
    at least once, and each barrier were one of all threads. It also omits barriers between two
    writes. So two threads may access one place, one of them to write it, without a barrier that
    both pass.

    The pass follows all threads of the block through the function, and each access by address: with
    tiles that share memory, in each warp role, through loops and both cases of a branch. Before an
    access that is unordered it inserts a barrier where all threads pass that make both accesses:
    of the block, or of the warps of a specialized part. It moves no access, but divides a branch
    that makes both. A barrier of TileLang that only a part of its threads would pass, such as one
    after a ``break`` of single threads, is removed first.

    In a kernel with specialized warps it also orders accesses of global memory by producers before
    what consumers publish, and accesses of one tensor before and in the specialized part: a thread
    of the program is in another warp in the second. A named barrier counts the warps that arrive,
    so two sets of warps with one number are ordered, too.

    Before: ``a[tx] = 0; if tx < 240: a[tx + 16] = x[tx]``
    After:  ``a[tx] = 0; sync(); if tx < 240: a[tx + 16] = x[tx]``

    Args:
        load_lines: returns what ``pipelined_loops.load_lines`` does, for a refusal.
        row_sizes: what ``footprints.row_sizes`` returns.

    Raises:
        LanguageError: names two accesses that no barrier can order, or a barrier where threads may
            wait forever, with the lines.
    """
    try:
        func, is_vague = _synchronized(func, load_lines, row_sizes, [{}])
    except LanguageError as error:
        launches = launches_of(func)
        if len(launches) < 2:
            raise
        with suppress(LanguageError):
            return _synchronized(func, load_lines, row_sizes, launches)[0]
        raise error
    if not is_vague or roles_of(func) is not None:
        return func
    scalars = scalars_of(func)
    few = [e for e in launches_of(func) if all(e.get(n, 0) <= _ITERATIONS for n in scalars)]
    return _synchronized(func, load_lines, row_sizes, few)[0]


def _synchronized(
    func: tirx.PrimFunc, load_lines: Callable[[], Mapping[str, str]],
    row_sizes: Mapping[str, int], launches: list[Launch],
) -> tuple[tirx.PrimFunc, bool]:  # fmt: skip
    """Insert the barriers that these launches need. Return also whether it is unknown for which
    phases of mbarriers some threads wait."""
    attempts: dict[tuple[int, int], int] = {}
    while True:
        is_vague = False
        for launch in launches:
            walk = Walk(func, row_sizes, launch)
            finding = walk.finding()
            if finding is not None:
                break
            is_vague |= walk.is_vague
        else:
            return func, is_vague
        if isinstance(finding, MisplacedBarrier):
            func = _without(func, finding)
            continue
        pair = hash(finding.before[-1].stmt), hash(finding.after[-1].stmt)
        attempts[pair] = attempts.get(pair, 0) + 1
        may_help = finding.is_awaited and attempts[pair] <= _ATTEMPTS
        changed = _with_barrier(func, finding, walk) if may_help else None
        if changed is None:
            raise _refusal(finding, load_lines())
        func = changed


def _without(func: tirx.PrimFunc, finding: MisplacedBarrier) -> tirx.PrimFunc:
    """Remove a barrier that TileLang or this pass inserted. The next walk finds what it ordered."""
    if finding.op:
        lines = arrows((label, _line(path)) for label, path in finding.places)
        raise LanguageError(f"{finding.op}: {finding.what}; expected {finding.legal}{lines}")
    path, (*_, barrier) = finding.path, finding.path
    if not isinstance(barrier.parent, tirx.SeqStmt):
        empty = tirx.Evaluate(tirx.IntImm("int32", 0))
        return _replace_at(func, path, len(path) - 1, lambda _: empty)
    rest = [stmt for at, stmt in enumerate(barrier.parent.seq) if at != barrier.index]
    return _replace_at(func, path, len(path) - 2, lambda _: flatten(rest))


def _with_barrier(func: tirx.PrimFunc, finding: Missing, walk: Walk) -> tirx.PrimFunc | None:
    """Insert a barrier between two accesses, where all threads that make them pass; None if there
    is no such place."""
    before, after = finding.before, finding.after
    shared = 0
    for a, b in zip(before, after, strict=False):
        if not a.parent.same_as(b.parent) or a.index != b.index:
            break
        shared += 1
    level = min(shared, len(after) - 1)
    if finding.publishes and _are_of_both_roles(func, before, after, level):
        return _join_roles(func, after, level)
    places = [at for at in range(level, -1, -1) if _may_meet(after[at], finding.warps)]
    if level not in places:
        if level < len(before) and _may_meet(before[level], finding.warps):
            if next(jumps_in(before[level].stmt), None) is None:
                barrier = _barrier(before[level], walk)
                return _replace_at(func, before, level, lambda stmt: flatten([stmt, barrier]))
        divided = _with_divided_branch(func, finding, level, walk)
        if divided is not None or not places:
            return divided
    barrier = _barrier(after[places[0]], walk)
    return _replace_at(func, after, places[0], lambda stmt: flatten([barrier, stmt]))


def _may_meet(frame: Frame, warps: int) -> bool:
    """Return whether all threads of these warps, and of no part of a warp, reach a place if one of
    them does."""
    is_whole = frame.is_whole_block or frame.threads == WARP * frame.whole_warps.bit_count()
    return frame.is_exact and is_whole and warps & ~frame.whole_warps == 0


def _with_divided_branch(
    func: tirx.PrimFunc, finding: Missing, level: int, walk: Walk
) -> tirx.PrimFunc | None:
    """Divide the branch that makes both accesses, with the barrier between its parts; None if the
    threads of the branch are not known, or a part depends on the other one.

    Before: ``if tx < 100: a[tx] = 0; a[99 - tx] = 1``
    After:  ``if tx < 100: a[tx] = 0``, ``sync()``, ``if tx < 100: a[99 - tx] = 1``
    """
    before, after = finding.before, finding.after
    if not 2 <= level < len(before) or before[level].index >= after[level].index:
        return None
    body, branch, around = after[level].parent, after[level - 1].parent, after[level - 2]
    if not isinstance(body, tirx.SeqStmt) or not isinstance(branch, tirx.IfThenElse):
        return None
    first, second = body.seq[: after[level].index], body.seq[after[level].index :]
    depends = nodes_in(branch.condition, tirx.BufferLoad, tirx.Call) or any(
        isinstance(stmt, tirx.Bind) for stmt in first
    )
    if depends or branch.else_case is not None or not after[level].is_exact:
        return None
    if not _may_meet(around, finding.warps):
        return None
    parts = [
        with_span_of(branch, tirx.IfThenElse(branch.condition, flatten([*part]), None))
        for part in (first, second)
    ]
    new = flatten([parts[0], _barrier(around, walk), parts[1]])
    return _replace_at(func, after, level - 2, lambda _: new)


def _are_of_both_roles(func: tirx.PrimFunc, before: Path, after: Path, level: int) -> bool:
    """Return whether the accesses are in the two cases of a branch of producers and consumers."""
    roles = roles_of(func)
    return (
        roles is not None
        and level < len(before)
        and roles.is_split(after[level].parent)
        and before[level].parent.same_as(after[level].parent)
        and (before[level].index, after[level].index) == (0, 1)
    )


def _join_roles(func: tirx.PrimFunc, after: Path, level: int) -> tirx.PrimFunc | None:
    """Let producers and consumers meet: at the end of the producers, and before what the consumers
    publish. Producers never wait for what consumers do after it."""
    branch = after[level].parent
    statements = statements_of(branch.else_case)
    inner = after[level + 1]
    at = inner.index if inner.parent.same_as(branch.else_case) else 0
    if any(map(Walk.arrives, statements[at:])):
        return None
    consumers = flatten([*statements[:at], sync_threads(_INSERTED), *statements[at:]])
    producers = flatten([branch.then_case, sync_threads(_INSERTED)])
    new = with_span_of(branch, tirx.IfThenElse(branch.condition, producers, consumers))
    return _replace_at(func, after, level - 1, lambda _: new)


def _barrier(frame: Frame, walk: Walk) -> tirx.Stmt:
    """Return a barrier of all threads that reach a place."""
    if frame.is_whole_block:
        return sync_threads(_INSERTED)
    number = walk.number_for(frame.whole_warps)
    if number is None:
        raise LanguageError(
            "T.Kernel: its groups of threads synchronize by all named barriers; expected at most "
            f"{len(NUMBERS) - 1} groups"
        )
    (barrier,) = statements_of(sync_threads(_INSERTED))
    call = barrier.value
    arguments = [*call.args, number, frame.threads]
    return tirx.Evaluate(tirx.call_intrin("int32", call.op, *arguments))


def _replace_at(func: tirx.PrimFunc, path: Path, at: int, change: Rewrite) -> tirx.PrimFunc:
    """Replace the statement at ``path[at]`` by the result of ``change``."""

    def visit(stmt: tirx.Stmt, depth: int) -> tirx.Stmt:
        frame, position = path[depth], -1

        def child(inner: tirx.Stmt) -> tirx.Stmt:
            nonlocal position
            position += 1
            if position != frame.index:
                return inner
            return change(inner) if depth == at else visit(inner, depth + 1)

        return rewrite_children(stmt, child)

    return func.with_body(visit(func.body, 0))


def _refusal(finding: Missing, load_lines: Mapping[str, str]) -> LanguageError:
    legal = "both under conditions that all threads share, or in the same threads"
    why = "and no place between both is reached by all threads that make them, in whole warps"
    what = f"{finding.what} is not ordered by a barrier, {why}"
    if _waits_before_arrival(finding):
        legal = (
            "the branch that arrives at the mbarrier before the one that waits for it: accesses "
            f"are followed in the order of the text; or {legal}"
        )
    if not finding.is_awaited:
        legal = (
            "a wait between both, or T.serial; T.Pipelined waits before a statement of the same "
            f"iteration that reads {finding.tile}"
        )
        what = f"{finding.what} that may not have ended"
    lost = load_lines.get(finding.tile, "")
    places = [("before", _line(finding.before) or lost), ("after", _line(finding.after) or lost)]
    if finding.returned is not None and _line(finding.returned):
        what += ", because the wait between both may return at once"
        legal = "the other parity: a wait for parity 1 of a new mbarrier returns at once"
        places.insert(1, ("wait", _line(finding.returned)))
    lines = arrows(places)
    if finding.number is not None:
        return LanguageError(
            f"{finding.what}: different warps may be at barrier {finding.number} at the same time; "
            f"expected a number of its own for each set of warps{lines}"
        )
    return LanguageError(f"shared memory: {what}; expected {legal}{lines}")


def _waits_before_arrival(finding: Missing) -> bool:
    """Return whether threads of the first access wait for an mbarrier, at which those of the second
    one arrive later in the text."""
    for a, b in zip(finding.before, finding.after, strict=False):
        if a.index != b.index:
            return Walk.awaits(a.stmt) and Walk.arrives(b.stmt)
    return False


def _line(path: Path) -> str:
    """Return the source line of the innermost statement of ``path`` that has one, or ""."""
    return next((line for frame in reversed(path) if (line := line_of(frame.stmt))), "")
