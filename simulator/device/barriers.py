"""Barriers of a device function: block barriers, mbarriers, and fences between proxies."""

from __future__ import annotations

from tvm import tirx

from ...builtins.spec import BUILTINS
from ...passes.ir.operators import HOLD
from ..frontend.accesses import uniform
from ..frontend.block_ops import EXITS, elect, meet_at_barrier, sync_warp
from ..frontend.statements import nothing
from ..machine.block import Frame
from ..machine.steps import Step, Waiting, WaitTarget
from ..memory.order import CTA
from ..report.errors import SimulationError
from .block import COPIES, TransactionBarrier
from .statements import DeviceStatements


def meet(frame: Frame, count: int | None, loc: str) -> None:
    """Execute a block barrier inside of an operation that all of its threads execute together."""
    expected = len(frame.mask.on) if count is None else count
    if frame.mask.count != expected:
        raise SimulationError(
            "deadlock",
            f"{frame.mask.count} threads of {frame.block.place} "
            f"reach a barrier of {expected}\n --> {loc}",
        )
    frame.block.barrier(frame.mask.thread_groups)


def fence_proxy(c: DeviceStatements, call: tirx.Call, loc: str) -> Step:
    def run(frame: Frame):
        frame.block.agents.fence_proxy(frame.mask.thread_groups)
        frame.block.show_barriers(frame.mask.overlapping)

    return Step(run)


def fence_initialization(c: DeviceStatements, call: tirx.Call, loc: str) -> Step:
    """``fence.mbarrier_init``."""
    return Step(lambda frame: frame.block.show_barriers(frame.mask.overlapping))


def initialize(c: DeviceStatements, call: tirx.Call, loc: str) -> Step:
    barrier, count = c.mbarrier(call.args[0], loc), int(call.args[1])

    def run(frame: Frame):
        mbarrier, (g,) = barrier(frame), frame.mask.thread_groups
        mbarrier.count, mbarrier.initialized = count, (g, frame.block.order.time[g], loc)
        mbarrier.visible = False

    return Step(run)


def require_initialized(frame: Frame, barrier: TransactionBarrier, loc: str) -> None:
    """Refuse an operation on an mbarrier that is not ordered after its initialization."""
    if barrier.initialized is None:
        raise SimulationError(
            "poison",
            f"mbarrier {barrier.name} is not initialized, in {frame.block.place}\n --> {loc}",
        )
    g, time, before = barrier.initialized
    ordered = frame.block.agents.known()
    for group in frame.mask.overlapping:
        if ordered[group, g] < time:
            raise SimulationError(
                "race",
                f"mbarrier {barrier.name} is used by {frame.block.name_of_agent(group)} in "
                f"launch {frame.block.epoch} --> {loc}\nis not ordered after its initialization"
                f" by {frame.block.name_of_agent(g)} --> {before}",
            )


def require_visible(frame: Frame, barrier: TransactionBarrier, loc: str) -> None:
    """Refuse an asynchronous copy that may not observe the initialization of its mbarrier."""
    require_initialized(frame, barrier, loc)
    if not barrier.visible:
        raise SimulationError(
            "race",
            f"an asynchronous copy completes on mbarrier {barrier.name} of "
            f"{frame.block.place}, and no fence.mbarrier_init is "
            f"after its initialization --> {barrier.initialized[2]}\n --> {loc}",
        )


def _release(frame: Frame, barrier: TransactionBarrier) -> None:
    block = frame.block
    barrier.clock = block.order.published(frame.mask.thread_groups, CTA, barrier.clock)
    for g in frame.mask.thread_groups:
        fenced = block.agents.clocks[g]
        barrier.fenced = fenced if barrier.fenced is None else barrier.fenced.joined(fenced)


def arrive(c: DeviceStatements, call: tirx.Call, loc: str, arrives: bool = True) -> Step:
    """Compile an arrival. A second operand is a number of bytes to expect, also without arrival."""
    barrier = c.mbarrier(call.args[0], loc)
    size = c.indices([call.args[1]], "mbarrier", loc) if len(call.args) > 1 else None

    def run(frame: Frame):
        mbarrier = barrier(frame)
        require_initialized(frame, mbarrier, loc)
        if arrives:
            _release(frame, mbarrier)
        if size is not None:
            mbarrier.bytes += uniform(size(frame)[0], frame, loc) * frame.mask.count
        if arrives:
            mbarrier.arrive(frame, loc)

    return Step(run)


def arrive_after_copies(c: DeviceStatements, call: tirx.Call, loc: str) -> Step:
    """``cp.async.mbarrier.arrive.noinc``: an arrival after the earlier copies of each thread."""
    arrival, barrier = arrive(c, call, loc), c.mbarrier(call.args[0], loc)

    def run(frame: Frame):
        block = frame.block
        loads = [block.loads_of(COPIES, g) for g in frame.mask.overlapping]
        barrier(frame).deliveries += [(number, block.order.last_load(number)) for number in loads]
        arrival.run(frame)

    return Step(run)


def expect(c: DeviceStatements, call: tirx.Call, loc: str) -> Step:
    return arrive(c, call, loc, arrives=False)


def wait_parity(c: DeviceStatements, call: tirx.Call, loc: str) -> Step:
    barrier, parity = c.mbarrier(call.args[0], loc), c.indices([call.args[1]], "mbarrier", loc)

    def run(frame: Frame):
        mbarrier, block = barrier(frame), frame.block
        require_initialized(frame, mbarrier, loc)
        expected = uniform(parity(frame)[0], frame, loc)

        def ready() -> bool:
            return mbarrier.phase % 2 != expected

        def text() -> str:
            return f"{block.place} waits at {mbarrier.state(expected)} --> {loc}"

        target = WaitTarget("mbarrier wait", loc, wanted=f"parity {expected}")
        while not ready():
            yield Waiting(ready, text, targets=lambda: [target])
        groups = frame.mask.thread_groups
        mbarrier.awaited = mbarrier.loaded
        block.order.complete_loads(groups, mbarrier.number, mbarrier.loaded)
        newest = dict(mbarrier.landed)
        mbarrier.landed = list(newest.items())
        for number, time in newest.items():
            block.order.complete_loads(groups, number, time)
        if mbarrier.clock is not None:
            block.order.join(groups, mbarrier.clock)
        if mbarrier.fenced is not None:
            for g in groups:
                block.agents.join_fences((g,), mbarrier.fenced)

    return Step(run, True)


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
        "tirx.tvm_storage_sync": meet_at_barrier,
        "tl.sync_warp": sync_warp,
        "tl.fence_proxy_async": fence_proxy,
        "tl.ptx_fence_barrier_init": fence_initialization,
        "tirx.ptx_init_barrier_thread_count": initialize,
        "tirx.ptx_arrive_barrier": arrive,
        "tl.ptx_arrive_barrier": arrive,
        "tirx.ptx_arrive_barrier_expect_tx": arrive,
        "tl.mbarrier_expect_tx": expect,
        "tl.ptx_cp_async_barrier_noinc": arrive_after_copies,
        "tl.mbarrier_wait_parity": wait_parity,
        **EXITS,
    }
