"""The passes in their order. Each has the reason for its position."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from tvm import IRModule, tirx

from .debug.instrument import instrument
from .device.assign_producers import assign_producers
from .device.complete_bulk_stores import complete_bulk_stores
from .device.delay_launch_count import delay_launch_count
from .device.divide_waits import divide_waits
from .device.elect_once import elect_once
from .device.exclude_producer_threads import exclude_producer_threads
from .device.guard_loads import guard_loads
from .device.hoist_divisions import hoist_divisions
from .device.insert_proxy_fences import insert_proxy_fences
from .device.make_coherent import make_coherent
from .device.record_events import record_events
from .device.skip_repeated_waits import skip_repeated_waits
from .device.sync_shared_memory import sync_shared_memory
from .device.verify_locals import verify_locals
from .device.verify_pipelined import verify_pipelined
from .device.verify_threads import verify_threads
from .device.verify_tiles import verify_tiles
from .device.verify_waits import verify_waits
from .device.wait_before_loop import wait_before_loop
from .entry.bind_runtime import bind_runtime
from .entry.defer_initializations import defer_initializations
from .entry.index_elements import index_elements
from .entry.number_builtins import number_builtins
from .entry.protect_expressions import protect_expressions
from .flat.keep_indices import keep_indices
from .group.lift_symmetric import lift_symmetric
from .group.lower_multimem import lower_multimem
from .group.make_factors_positive import make_factors_positive
from .group.specialize_group import specialize_group
from .ir.releases import upgrade_ir
from .ir.walk import map_functions, uses_tileweave
from .layout.mark_statements import mark_statements
from .layout.verify_layouts import verify_layouts
from .lower.verify_lowering import verify_lowering
from .sync.infer.infer_sync import infer_sync
from .sync.verify.verify_sync import verify_sync
from .target.avoid_tma import avoid_tma
from .target.fold_axes import fold_axes
from .target.order_loads import order_loads
from .target.predicate_loads import predicate_loads
from .target.require_arch import require_arch
from .target.verify_loop_tiles import verify_loop_tiles
from .target.verify_operators import verify_operators
from .tile.drop_unordered import drop_unordered
from .tile.elect_leader import elect_leader
from .tile.hoist_waits import hoist_waits
from .tile.isolate_bulk_copies import isolate_bulk_copies
from .tile.order_releases import order_releases
from .tile.pin_pipelined import pin_pipelined
from .tile.stage_waits import stage_waits
from .tile.verify_barriers import verify_barriers
from .tile.verify_indices import verify_indices
from .tile.verify_thread_axes import verify_thread_axes
from .warp.restrict_threads import restrict_threads
from .warp.verify_thread_values import verify_thread_values

STAGES = {
    "group": "specialize a program for a group of ranks",
    "sync": "infer the synchronization between ranks",
    "verify": "verify a program that the inference skips; the simulator reports races itself",
    "debug": "insert what an option asks for",
    "target": "refuse and avoid what the target lacks, or TileLang compiles wrongly for it",
    "tile": "complete the synchronization within a block; the last stage of the simulator",
    "entry": "bind run-time values, and give the program a form that TileLang compiles rightly",
    "warp": "inside TileLang, after it has divided the warps of a block",
    "layout": "inside TileLang, after it has chosen layouts, before it lowers tiles by them",
    "lower": "inside TileLang, after it has lowered tiles to elements",
    "flat": "inside TileLang, before it flattens the indices of elements",
    "device": "on device functions, after TileLang's pipeline",
}
"""The stages in the order in which they run, and what their passes do."""

FOR_GROUP = ("group", "sync", "verify", "debug")
"""Stages that ``tw.compile`` and ``tw.emit`` run for a group, before TileLang is called."""

_HOST = 1
"""``calling_conv`` of a function of the host, beside the device functions that it launches."""

_ON_TILES = frozenset({"group", "tile", "target", "warp", "layout"})
"""Stages that see the form of one release, see ``upgrade_ir``."""


@dataclass(frozen=True)
class Pass:
    """One pass, and the reason for its position.

    Attributes:
        stage: one of ``STAGES``.
        scope: ``builtins``: functions that use a builtin; ``all``: also those that only have a
            group or symmetric tensors; ``module``: the pass changes a module.
        needs: arguments of the pass beside the function, by name; see ``run``.
        until: for a fault of TileLang or TVM: the first release without it, or ``open``.
    """

    run: Callable[..., Any]
    stage: str
    reason: str
    scope: str = "builtins"
    needs: tuple[str, ...] = ()
    until: str = ""

    @property
    def name(self) -> str:
        return self.run.__name__

    def applies_to(self, func: tirx.PrimFunc) -> bool:
        """Return whether the pass sees ``func``."""
        if self.stage == "device" and int(func.attrs.get("calling_conv", 0)) == _HOST:
            return False
        return self.scope == "all" or uses_tileweave(func)

    @property
    def summary(self) -> str:
        """Purpose of the pass: the first sentence of its module's docstring."""
        doc = sys.modules[self.run.__module__].__doc__ or ""
        summary = " ".join(doc.split("\n\n")[0].split()).rstrip(".")
        return summary[:1].lower() + summary[1:]


_GROUP = ("world_size", "heap_stride")

PIPELINE = (
    Pass(
        make_factors_positive, "group",
        "before all passes that simplify expressions, which would get another value",
        scope="all", until="open",
    ),
    Pass(
        lift_symmetric, "group",
        "before specialize_group: its tensors are specialized like those of the program",
        scope="all", needs=("world_size",),
    ),
    Pass(
        specialize_group, "group",
        "before all passes that read shapes and strides, which must be constants",
        scope="all", needs=_GROUP,
    ),
    Pass(
        lower_multimem, "group",
        "after specialize_group, because it unrolls loops over the ranks; before the inference, "
        "which sees an access to each copy",
        scope="all", needs=("world_size",),
    ),
    Pass(
        infer_sync, "sync",
        "after the number of ranks is known; later passes see its builtins",
        scope="all", needs=_GROUP,
    ),
    Pass(
        verify_sync, "verify", "before delays: it verifies the program's own synchronization",
        scope="all", needs=("world_size",),
    ),
    Pass(
        instrument, "debug", "after the inference, whose signals and waits it delays", scope="all"
    ),
    Pass(
        avoid_tma, "target", "first: all passes see how copies are lowered",
        scope="all", needs=("target", "is_retry"), until="open",
    ),
    Pass(
        require_arch, "target", "early: its errors name lines of the program", needs=("target",)
    ),
    Pass(
        fold_axes, "target", "before predicate_loads, whose indices it cannot fold",
        needs=("target",),
    ),
    Pass(
        predicate_loads, "target", "before the passes that look for loads of pipelined loops",
        needs=("target",),
    ),
    Pass(
        verify_operators, "target", "after the passes that choose which loads use the TMA",
        scope="all", needs=("target",), until="open",
    ),
    Pass(
        verify_loop_tiles, "target",
        "after the passes that choose which loads use the TMA; before passes that add statements",
        scope="all", needs=("target",), until="open",
    ),
    Pass(
        order_loads, "target",
        "after verify_loop_tiles, which sees the statements of the program; before passes that "
        "mark statements of pipelined loops",
        scope="all", needs=("target",), until="open",
    ),
    Pass(drop_unordered, "tile", "first: only passes for a group read these marks", scope="all"),
    Pass(verify_indices, "tile", "early: it verifies the program as written"),
    Pass(
        verify_barriers, "tile",
        "early: its errors name lines of the program; after the number of ranks is known",
    ),
    Pass(
        verify_thread_axes, "tile",
        "before elect_leader, which gives builtins to one thread of the block", until="open",
    ),
    Pass(
        elect_leader, "tile",
        "before passes that move builtins: it chooses threads by the conditions of the program",
    ),
    Pass(order_releases, "tile", "after elect_leader, whose barriers it uses"),
    Pass(pin_pipelined, "tile", "after order_releases, whose placeholders it uses"),
    Pass(hoist_waits, "tile", "after pin_pipelined, whose marks and statements it uses"),
    Pass(stage_waits, "tile", "after all passes that add statements to loops: it counts them"),
    Pass(isolate_bulk_copies, "tile", "last: every bulk copy is in its final position"),
    Pass(
        bind_runtime, "entry", "after the passes that add operands, which the host must bind"
    ),
    Pass(
        defer_initializations, "entry",
        "after the passes that add or move statements before pipelined loops",
        scope="all", needs=("target",), until="open",
    ),
    Pass(
        index_elements, "entry", "after the passes that read or move vectors",
        scope="all", until="open",
    ),
    Pass(
        protect_expressions, "entry", "late: it also changes what passes added",
        scope="all", until="open",
    ),
    Pass(
        number_builtins, "entry", "last: every builtin is in its final position",
        scope="module", needs=("calls",),
    ),
    Pass(
        restrict_threads, "warp",
        "after TileLang divides the warps, and before it chooses layouts for their threads",
        scope="all", until="open",
    ),
    Pass(
        verify_thread_values, "warp",
        "after restrict_threads, whose statements for the consumers have the other index",
        scope="all", until="open",
    ),
    Pass(verify_layouts, "layout", "as soon as all layouts are known", scope="all", until="open"),
    Pass(
        mark_statements, "layout", "last: verify_lowering compares with what TileLang lowers",
        scope="all",
    ),
    Pass(
        verify_lowering, "lower", "first: no other pass has changed the lowered statements",
        scope="all", needs=("tiles",), until="open",
    ),
    Pass(
        keep_indices, "flat", "after TileLang lowers tiles to elements by their layouts",
        scope="all", until="open",
    ),
    Pass(
        elect_once, "device", "early: later passes see the thread that issues a TMA operation",
        scope="all", until="open",
    ),
    Pass(
        divide_waits, "device", "before sync_shared_memory, which counts groups", scope="all",
        until="open",
    ),
    Pass(
        sync_shared_memory, "device", "after elect_once; later passes see every barrier",
        scope="all", needs=("load_lines", "row_sizes"), until="open",
    ),
    Pass(
        verify_waits, "device", "after sync_shared_memory, which adds barriers", scope="all",
        needs=("mbarriers",),
    ),
    Pass(
        make_coherent, "device", "after lowering, which divides tiles into elements and vectors",
        scope="all", needs=("symmetric",),
    ),
    Pass(guard_loads, "device", "early: later passes see the conditions of loads"),
    Pass(
        verify_pipelined, "device", "early: it verifies the loops as TileLang lowers them"
    ),
    Pass(
        verify_tiles, "device", "after lowering, which places tiles in shared memory",
        until="open",
    ),
    Pass(
        verify_locals, "device", "early: it verifies the warps as TileLang divides them",
        until="open",
    ),
    Pass(
        exclude_producer_threads, "device",
        "before passes that follow conditions on the thread index",
    ),
    Pass(
        assign_producers, "device",
        "after the passes that choose the thread of a load, by which it finds the loading warp",
    ),
    Pass(
        wait_before_loop, "device", "before delay_launch_count, which adds to the loads",
        until="open",
    ),
    Pass(
        delay_launch_count, "device", "after the passes that expect only warp groups in their part"
    ),
    Pass(complete_bulk_stores, "device", "after lowering, which chooses bulk stores"),
    Pass(
        skip_repeated_waits, "device",
        "before insert_proxy_fences, which adds a fence to each remaining wait",
    ),
    Pass(
        insert_proxy_fences, "device",
        "after skip_repeated_waits, for the remaining waits; its fences may follow all barriers",
        scope="all", needs=("symmetric",), until="open",
    ),
    Pass(
        record_events, "device", "after all passes that move waits and signals",
        scope="module", needs=("calls", "program", "symmetric"),
    ),
    Pass(
        verify_threads, "device", "late: it removes the marks of number_builtins",
        scope="module", needs=("calls", "program"),
    ),
    Pass(
        hoist_divisions, "device", "last: other passes compare indices", scope="all"
    ),
)  # fmt: skip
"""All passes, in the order in which they run."""


def run(stages: str | Iterable[str], mod: IRModule, **known: Any) -> IRModule:
    """Run the passes of ``stages`` on ``mod``.

    Args:
        known: what the passes need, by name: ``world_size`` and ``heap_stride`` of the group, the
            ``target``, whether TileLang has failed for an earlier form (``is_retry``), the names of
            the ``symmetric`` tensors, the ``calls`` of builtins by number, the module before
            TileLang's pipeline (``program``), a function that returns the lines of its loads of
            tiles (``load_lines``), the sizes of the rows of tiles (``row_sizes``), the names of the
            mbarriers of programs (``mbarriers``), the module before TileLang lowers it (``tiles``).
    """
    stages = {stages} if isinstance(stages, str) else {*stages}
    if stages & _ON_TILES:
        mod = map_functions(upgrade_ir, mod)
    for p in PIPELINE:
        if p.stage in stages:
            mod = _run_pass(p, mod, {name: known[name] for name in p.needs})
    return mod


def run_group(
    mod: IRModule, world_size: int, heap_stride: int, stages: Iterable[str] = FOR_GROUP
) -> IRModule:
    """Run stages for a group."""
    return run(stages, mod, world_size=world_size, heap_stride=heap_stride)


def for_group(
    func: tirx.PrimFunc, world_size: int, heap_stride: int, stages: Iterable[str] = FOR_GROUP
) -> tirx.PrimFunc:
    """Return a program after stages for a group."""
    mod = IRModule({str(func.attrs["global_symbol"]): func})
    (program,) = run_group(mod, world_size, heap_stride, stages).functions.values()
    return program


def _run_pass(p: Pass, mod: IRModule, arguments: dict[str, Any]) -> IRModule:
    if p.scope == "module":
        return p.run(mod, **arguments)
    functions = {}
    for variable, func in mod.functions.items():
        if isinstance(func, tirx.PrimFunc) and p.applies_to(func):
            own = {n: v[variable] if isinstance(v, IRModule) else v for n, v in arguments.items()}
            func = p.run(func, **own)
        functions[variable] = func
    return IRModule(functions, attrs=mod.attrs)
