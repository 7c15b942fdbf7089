"""Operations inside a block: barriers, mbarriers, waits for bulk stores, thread indices, and exits
of loops."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from tvm import tirx

from ...passes.ir.operators import COMPLETE, HOLD
from ...passes.ir.walk import base_of
from ..machine.block import Block, Frame, Mask, NamedBarrier
from ..machine.steps import Step, Waiting, WaitTarget
from ..memory.order import CTA
from ..memory.threads import WARP
from ..report.errors import SimulationError, unsupported
from .accesses import uniform
from .expressions import Expr
from .statements import Statements, nothing

_OF_BLOCK = ("shared", "shared.dyn", "global")
"""Scopes of barriers of the block."""


def sync_threads(c: Statements, call: tirx.Call, loc: str) -> Step:
    if len(call.args) > 1 or call.args[0].value not in _OF_BLOCK:
        return meet_at_barrier(c, call, loc)

    def run(frame: Frame):
        mask = frame.mask
        if not mask.full and mask.count % 32:
            raise SimulationError(
                "deadlock",
                f"T.sync_threads is reached by {mask.count} of {len(mask.on)} threads of "
                f"{frame.block.place}\n --> {loc}",
            )
        frame.block.barrier(mask.thread_groups)

    return Step(run)


def meet_at_barrier(c: Statements, call: tirx.Call, loc: str) -> Step:
    """``bar.sync``: of all threads, or of a number of threads on a named barrier."""
    if call.args[0].value not in _OF_BLOCK:
        return sync_warp(c, call, loc)
    if not all(isinstance(operand, tirx.IntImm) for operand in call.args[1:]):
        raise unsupported("T.sync_threads with a number that is not a constant", loc)
    number = int(call.args[1]) if len(call.args) > 1 else 0
    count = int(call.args[2]) if len(call.args) > 2 else None

    def run(frame: Frame):
        yield None
        expected = len(frame.mask.on) if count is None else count
        barrier = frame.block.named[number]
        for warp in frame.mask.warps:
            barrier.arrived.append(warp)
            barrier.count += WARP if count is not None else warp.count
            if barrier.count >= expected:
                _complete(frame, barrier)
        if not barrier.arrived:
            return
        completed = barrier.completed

        def text() -> str:
            return (
                f"{frame.block.place} waits at barrier {number}: "
                f"{barrier.count} of {expected} threads have arrived --> {loc}"
            )

        target = WaitTarget(f"barrier {number}", loc, wanted=f"{expected} threads")
        yield Waiting(lambda: barrier.completed > completed, text, targets=lambda: [target])

    return Step(run, True)


def _complete(frame: Frame, barrier: NamedBarrier) -> None:
    """Order all that the arrived threads did before what they do next."""
    active = np.logical_or.reduce([mask.on for mask in barrier.arrived])
    frame.block.barrier(Mask(active, frame.mask.group_of).thread_groups)
    barrier.arrived, barrier.count = [], 0
    barrier.completed += 1


def sync_warp(c: Statements, call: tirx.Call, loc: str) -> Step:
    def run(frame: Frame):
        for warp in frame.mask.warps:
            frame.block.barrier(warp.thread_groups)

    return Step(run)


def sync_grid(c: Statements, call: tirx.Call, loc: str) -> Step:
    def run(frame: Frame):
        block, thread_groups = frame.block, frame.mask.thread_groups
        yield None
        block.order.barrier(thread_groups)
        yield from block.machine.barrier("grid", None, block).arrive_and_wait(
            frame, "T.sync_grid", loc
        )
        block.order.barrier(thread_groups)

    return Step(run, True)


def complete_bulk_stores(c: Statements, call: tirx.Call, loc: str) -> Step:
    """Compile the placeholder of ``order_releases``: commit all bulk stores and wait for them."""

    def run(frame: Frame) -> None:
        frame.block.commit(frame.mask)
        frame.block.wait_groups(frame.mask, 0, read=False)

    return Step(run)


def wait_loads(c: Statements, call: tirx.Call, loc: str) -> Step:
    """T.ptx_wait_group(n): wait for all T.async_copy but the last n."""
    max_pending = int(call.args[0])

    def run(frame: Frame):
        block = frame.block
        while len(block.loads) > max_pending:
            block.loaded, deliver = block.loads.pop(0)
            deliver()
        block.order.complete_loads(frame.mask.thread_groups, 0, block.loaded)

    return Step(run)


def wait_stores(c: Statements, call: tirx.Call, loc: str) -> Step:
    groups = int(call.args[0]) if len(call.args) else 0
    read = bool(int(call.args[1])) if len(call.args) > 1 else True
    return Step(lambda frame: frame.block.wait_groups(frame.mask, groups, read))


def commit_stores(c: Statements, call: tirx.Call, loc: str) -> Step:
    return Step(lambda frame: frame.block.commit(frame.mask))


def copy_async(c: Statements, call: tirx.Call, loc: str) -> Step:
    """T.ptx_cp_async(destination, source, elements, [predicate]): a copy of each thread. It is
    complete at once, since the threads of a block are not checked in shared memory."""
    count = int(call.args[2])

    def vector(pointer: tirx.Call) -> tuple[tirx.Buffer, list[tirx.PrimExpr]]:
        buffer, (*outer, last) = c.pointee(pointer, loc)
        return buffer, [*outer, tirx.Ramp(base_of(last), 1, count)]

    (dst, place), (src, index) = map(vector, call.args[:2])
    stmt: tirx.Stmt = tirx.BufferStore(dst, tirx.BufferLoad(src, index), place)
    if len(call.args) > 3:
        stmt = tirx.IfThenElse(call.args[3], stmt, None)
    return c.statement(stmt, loc)


def arrive(c: Statements, call: tirx.Call, loc: str) -> Step:
    barrier = c.mbarrier(call.args[0], loc)

    def run(frame: Frame):
        found, order = barrier(frame), frame.block.order
        found.clock = order.published(frame.mask.thread_groups, CTA, found.clock)
        frame.block.machine.note_sync(frame.block.name_of(found), True, found.phase)
        found.arrive(frame, loc)

    return Step(run)


def arrive_after_copies(c: Statements, call: tirx.Call, loc: str) -> Step:
    """T.cp_async_barrier_noinc: an arrival after all T.async_copy before it."""
    arrival, barrier = arrive(c, call, loc), c.mbarrier(call.args[0], loc)

    def run(frame: Frame):
        block, mbarrier = frame.block, barrier(frame)
        mbarrier.deliveries += [partial(_land, block, load) for load in block.loads]
        mbarrier.copies = block.order.last_load(0)
        arrival.run(frame)

    return Step(run)


def _land(block: Block, load: tuple[int, Callable[[], Any]]) -> None:
    """Store the data of a T.async_copy, unless T.ptx_wait_group has done so."""
    if load in block.loads:
        block.loads.remove(load)
        load[1]()


def wait_parity(c: Statements, call: tirx.Call, loc: str) -> Step:
    barrier, parity = c.mbarrier(call.args[0], loc), c.indices([call.args[1]], "mbarrier", loc)

    def run(frame: Frame):
        mbarrier = barrier(frame)
        expected = uniform(parity(frame)[0], frame, loc)

        def ready() -> bool:
            return mbarrier.phase % 2 != expected

        def text() -> str:
            return f"{frame.block.place} waits at {mbarrier.state(expected)} --> {loc}"

        target = WaitTarget("T.mbarrier_wait_parity", loc, wanted=f"parity {expected}")
        waiting = Waiting(
            ready, text, targets=lambda: [target], holds=lambda phase: phase % 2 != expected
        )
        machine = frame.block.machine
        if machine.pauses_at_waits:
            yield waiting
        while not ready():
            yield waiting
        machine.note_sync(frame.block.name_of(mbarrier), False, mbarrier.phase)
        mbarrier.land()
        order, groups = frame.block.order, frame.mask.thread_groups
        order.complete_loads(groups, mbarrier.number, mbarrier.loaded)
        order.complete_loads(groups, 0, mbarrier.copied)
        if mbarrier.clock is not None:
            order.join(groups, mbarrier.clock)

    return Step(run, True)


def elect(c: Statements, call: tirx.Call, loc: str) -> Expr:
    """Elect one thread of each group of this many threads; 0: one of the block.

    ``elect.sync`` may elect any lane of the first warp. It is the last lane here, so that programs
    that expect the first lane are reported.
    """
    every, lane = int(call.args[0]) or 1024, WARP - 1
    c.thread_cuts.update(t for last in range(lane, 1024, every) for t in (last, last + 1))

    def value(frame: Frame):
        total = frame.block.kernel.threads_in_block
        chosen = np.arange(total) % every == min(lane, total - 1)
        return bool(chosen[frame.mask.single]) if frame.mask.single is not None else chosen

    return Expr(value)


def _group_index(threads: int, remainder: bool = False):
    """Return the number of a thread's warp or warp group, or of the thread in it."""

    def compile(c: Statements, call: tirx.Call, loc: str) -> Expr:
        if not remainder:
            c.thread_cuts.update(range(0, 1024, threads))

        def value(frame: Frame):
            threads_of_block = np.arange(frame.block.kernel.threads_in_block, dtype=np.int32)
            number = threads_of_block % threads if remainder else threads_of_block // threads
            return number if frame.mask.single is None else number[frame.mask.single]

        return Expr(value)

    return compile


def _exit(name: str, ends_loop: bool):
    """Return the compiler of a statement that leaves the innermost loop, or its iteration."""

    def compile(c: Statements, call: tirx.Call, loc: str) -> Step:
        if c.loop is None:
            raise unsupported(f"{name} outside of a loop", loc)
        if ends_loop and c.loop == "T.Parallel":
            raise unsupported(f"{name} of a T.Parallel, whose points have no order,", loc)
        return Step(lambda frame: frame.leave_iteration(ends_loop))

    return compile


EXITS = {
    "tl.loop_break": _exit("T.loop_break", ends_loop=True),
    "tirx.break_loop": _exit("break", ends_loop=True),
    "tirx.continue_loop": _exit("continue", ends_loop=False),
}
"""Compilers of the statements that leave loops, by operator."""
_WITHOUT_EFFECT = (
    "tirx.assume", "tl.fence_proxy_async", "tl.ptx_fence_barrier_init",
    "tl.set_max_nreg", "tl.no_set_max_nreg", "tl.annotate_producer_reg_dealloc",
    "tl.annotate_consumer_reg_alloc", "tl.pdl_trigger", "tl.pdl_sync", "tl.mbarrier_expect_tx",
    "tl.wait_wgmma", "tl.warpgroup_arrive", "tl.warpgroup_commit_batch", "tl.warpgroup_wait",
    "tl.conflict_hint", "tirx.ptx_commit_group",
)  # fmt: skip
"""Operations that affect only performance, or that the model does not distinguish."""


def register(c: Statements) -> None:
    """Register the operations inside a block."""
    for name in _WITHOUT_EFFECT:
        c.steps[name] = nothing
    c.calls["tl.tl_shuffle_elect"] = elect
    c.calls["tl.get_warp_idx"] = c.calls["tl.get_warp_idx_sync"] = _group_index(32)
    c.calls["tl.get_warp_group_idx"] = _group_index(128)
    c.calls["tl.get_lane_idx"] = _group_index(32, remainder=True)
    c.steps |= {
        "tirx.tvm_storage_sync": sync_threads,
        "tl.sync_warp": sync_warp,
        "tl.sync_grid": sync_grid,
        "tirx.ptx_wait_group": wait_loads,
        COMPLETE: complete_bulk_stores,
        HOLD: nothing,  # it only prevents reordering of statements
        "tl.tma_store_wait": wait_stores,
        "tl.tma_store_arrive": commit_stores,
        "tl.ptx_cp_async": copy_async,
        "tl.ptx_cp_async_barrier_noinc": arrive_after_copies,
        "tirx.ptx_arrive_barrier": arrive,
        "tl.ptx_arrive_barrier": arrive,
        "tl.mbarrier_wait_parity": wait_parity,
        **EXITS,
    }
