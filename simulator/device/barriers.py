"""Barriers of a device function: block barriers, mbarriers, and fences between proxies."""

from __future__ import annotations

from typing import Any

import numpy as np
from tvm import tirx

from ...builtins.spec import BUILTINS
from ...passes.ir.hold import HOLD
from ..frontend.expressions import Expr
from ..machine.block import Frame, Mask
from ..machine.steps import Step, Waiting, WaitTarget
from ..memory.threads import WARP
from ..report.errors import SimulationError
from .block import NamedBarrier, TransactionBarrier
from .statements import DeviceStatements, uniform


def sync_threads(c: DeviceStatements, call: tirx.Call, loc: str) -> Step:
    """``bar.sync``: of all threads, or of a number of threads on a named barrier."""
    if call.args[0].value not in ("shared", "shared.dyn", "global"):
        return sync_warp(c, call, loc)
    number = int(call.args[1]) if len(call.args) > 1 else 0
    count = int(call.args[2]) if len(call.args) > 2 else None

    def run(frame):
        yield None
        expected = len(frame.mask.on) if count is None else count
        barrier = frame.block.named.setdefault(number, NamedBarrier())
        for warp in _warps(frame.mask):
            barrier.arrived.append(warp)
            barrier.count += WARP if count is not None else warp.count
            if barrier.count >= expected:
                _complete(frame, barrier)
        if not barrier.arrived:
            return
        completed = barrier.completed

        def text() -> str:
            return (
                f"{frame.block.name()} in launch {frame.block.epoch} waits at barrier {number}: "
                f"{barrier.count} of {expected} threads have arrived --> {loc}"
            )

        target = WaitTarget(f"barrier {number}", loc, wanted=f"{expected} threads")
        yield Waiting(lambda: barrier.completed > completed, text, targets=lambda: [target])

    return Step(run, True)


def _warps(mask: Mask) -> list[Mask]:
    numbers = np.arange(len(mask.on)) // WARP
    return [mask.where(numbers == n) for n in np.unique(numbers[mask.on])]


def _complete(frame: Frame, barrier: NamedBarrier) -> None:
    """Order all that the arrived threads did before what they do next."""
    on = np.logical_or.reduce([mask.on for mask in barrier.arrived])
    groups = Mask(on, frame.mask.group_of).thread_groups
    frame.block.order.barrier(groups)
    frame.block.agents.join_fences(groups)
    barrier.arrived, barrier.count = [], 0
    barrier.completed += 1


def meet(frame: Frame, count: int | None, loc: str) -> None:
    """Execute a block barrier inside of an operation that all of its threads execute together."""
    expected = len(frame.mask.on) if count is None else count
    if frame.mask.count != expected:
        raise SimulationError(
            "deadlock",
            f"{frame.mask.count} threads of {frame.block.name()} in launch {frame.block.epoch} "
            f"reach a barrier of {expected}\n --> {loc}",
        )
    frame.block.order.barrier(frame.mask.thread_groups)
    frame.block.agents.join_fences(frame.mask.thread_groups)


def sync_warp(c: DeviceStatements, call: tirx.Call, loc: str) -> Step:
    def run(frame):
        for warp in _warps(frame.mask):
            frame.block.order.barrier(warp.thread_groups)
            frame.block.agents.join_fences(warp.thread_groups)

    return Step(run)


def fence_proxy(c: DeviceStatements, call: tirx.Call, loc: str) -> Step:
    def run(frame):
        frame.block.agents.fence_proxy(frame.mask.thread_groups)
        frame.block.show_barriers(frame.mask.overlapping)

    return Step(run)


def fence_initialization(c: DeviceStatements, call: tirx.Call, loc: str) -> Step:
    """``fence.mbarrier_init``."""
    return Step(lambda frame: frame.block.show_barriers(frame.mask.overlapping))


def barrier_at(c: DeviceStatements, load: Any, loc: str):
    """Return a function from a frame to the mbarrier that a BufferLoad names."""
    slot = c.barriers[load.buffer.data]
    index = c.indices(load.indices, load.buffer.name, loc)

    def barrier(frame) -> TransactionBarrier:
        return frame.block.transactions[slot][uniform(index(frame)[0], frame, loc)]

    return barrier


def initialize(c: DeviceStatements, call: tirx.Call, loc: str) -> Step:
    barrier, count = barrier_at(c, call.args[0], loc), int(call.args[1])

    def run(frame):
        found, (g,) = barrier(frame), frame.mask.thread_groups
        found.count, found.initialized = count, (g, frame.block.order.time[g], loc)
        found.visible = False

    return Step(run)


def require_initialized(frame: Frame, barrier: TransactionBarrier, loc: str) -> None:
    """Refuse an operation on an mbarrier that is not ordered after its initialization."""
    if barrier.initialized is None:
        raise SimulationError(
            "poison",
            f"mbarrier {barrier.number} is not initialized, in {frame.block.name()} in launch "
            f"{frame.block.epoch}\n --> {loc}",
        )
    g, time, before = barrier.initialized
    known = frame.block.agents.known()
    for group in frame.mask.overlapping:
        if known[group, g] < time:
            raise SimulationError(
                "race",
                f"mbarrier {barrier.number} is used by {frame.block.name_of_agent(group)} in "
                f"launch {frame.block.epoch} --> {loc}\nis not ordered after its initialization"
                f" by {frame.block.name_of_agent(g)} --> {before}",
            )


def require_visible(frame: Frame, barrier: TransactionBarrier, loc: str) -> None:
    """Refuse an asynchronous copy that may not observe the initialization of its mbarrier."""
    require_initialized(frame, barrier, loc)
    if not barrier.visible:
        raise SimulationError(
            "race",
            f"an asynchronous copy completes on mbarrier {barrier.number} of "
            f"{frame.block.name()} in launch {frame.block.epoch}, and no fence.mbarrier_init is "
            f"after its initialization --> {barrier.initialized[2]}\n --> {loc}",
        )


def _release(frame: Frame, barrier: TransactionBarrier) -> None:
    block = frame.block
    for g in frame.mask.thread_groups:
        (clock,) = block.order.release(g, 1).values()
        barrier.clock = clock if barrier.clock is None else barrier.clock.joined(clock)
        fenced = block.agents.clocks[g]
        barrier.fenced = fenced if barrier.fenced is None else barrier.fenced.joined(fenced)


def arrive(c: DeviceStatements, call: tirx.Call, loc: str) -> Step:
    """Arrive; with a second operand also expect this number of bytes."""
    barrier = barrier_at(c, call.args[0], loc)
    size = c.indices([call.args[1]], "mbarrier", loc) if len(call.args) > 1 else None

    def run(frame):
        found = barrier(frame)
        require_initialized(frame, found, loc)
        _release(frame, found)
        if size is not None:
            found.bytes += uniform(size(frame)[0], frame, loc) * frame.mask.count
        found.arrived += frame.mask.count
        if found.arrived > found.count:
            raise SimulationError(
                "arrival",
                f"{found.arrived} arrivals at an mbarrier initialized for {found.count}, in "
                f"{frame.block.name()} in launch {frame.block.epoch}\n --> {loc}",
            )
        found.settle()

    return Step(run)


def expect(c: DeviceStatements, call: tirx.Call, loc: str) -> Step:
    barrier = barrier_at(c, call.args[0], loc)
    size = c.indices([call.args[1]], "mbarrier", loc)

    def run(frame):
        found = barrier(frame)
        require_initialized(frame, found, loc)
        found.bytes += uniform(size(frame)[0], frame, loc) * frame.mask.count

    return Step(run)


def wait_parity(c: DeviceStatements, call: tirx.Call, loc: str) -> Step:
    barrier, parity = barrier_at(c, call.args[0], loc), c.indices([call.args[1]], "mbarrier", loc)

    def run(frame):
        found, block = barrier(frame), frame.block
        require_initialized(frame, found, loc)
        wanted = uniform(parity(frame)[0], frame, loc)

        def ready() -> bool:
            return found.phase % 2 != wanted

        def text() -> str:
            return (
                f"{block.name()} in launch {block.epoch} waits at mbarrier {found.number}: phase "
                f"{found.phase}, parity waited for {wanted}, {found.arrived} of {found.count} "
                f"arrived, {found.bytes} bytes missing --> {loc}"
            )

        target = WaitTarget("mbarrier wait", loc, wanted=f"parity {wanted}")
        while not ready():
            yield Waiting(ready, text, targets=lambda: [target])
        groups = frame.mask.thread_groups
        block.complete(groups, found.number, found.loaded)
        if found.clock is not None:
            block.order.join(groups, found.clock)
        if found.fenced is not None:
            for g in groups:
                block.agents.join_fences((g,), found.fenced)

    return Step(run, True)


def nothing(c: DeviceStatements, call: tirx.Call, loc: str) -> Step:
    return Step(lambda frame: None)


def elect(c: DeviceStatements, call: tirx.Call, loc: str) -> Expr:
    """Elect one thread of each group of this many threads; 0: one of the block.

    ``elect.sync`` may elect any lane of the first warp. It is the last lane here, so that programs
    that expect the first lane are reported.
    """
    total = c.threads[0] * c.threads[1] * c.threads[2]
    every, lane = int(call.args[0]) or total, WARP - 1
    c.thread_cuts.update(t for first in range(lane, total, every) for t in (first, first + 1))
    chosen = np.arange(total) % every == lane

    def value(frame):
        return bool(chosen[frame.mask.single]) if frame.mask.single is not None else chosen

    return Expr(value)


def register(c: DeviceStatements) -> None:
    """Register barriers and fences."""
    for name in ("tl.set_max_nreg", "tl.no_set_max_nreg",
                 "tl.prefetch_tma_descriptor", "tl.warpgroup_fence_operand"):  # fmt: skip
        c.steps[name] = nothing
    c.steps[HOLD] = nothing
    for spec in BUILTINS.values():
        if spec.proxy_fence and not spec.waits:
            c.steps[spec.op_name] = fence_proxy
    c.calls["tl.tl_shuffle_elect"] = elect
    c.steps |= {
        "tirx.tvm_storage_sync": sync_threads,
        "tl.sync_warp": sync_warp,
        "tl.fence_proxy_async": fence_proxy,
        "tl.ptx_fence_barrier_init": fence_initialization,
        "tirx.ptx_init_barrier_thread_count": initialize,
        "tirx.ptx_arrive_barrier": arrive,
        "tl.ptx_arrive_barrier": arrive,
        "tirx.ptx_arrive_barrier_expect_tx": arrive,
        "tl.mbarrier_expect_tx": expect,
        "tl.mbarrier_wait_parity": wait_parity,
    }
