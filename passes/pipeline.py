"""The passes in their order. Each has the reason for its position."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from tvm import IRModule, tirx

from .device import (
    complete_bulk_stores,
    delay_launch_count,
    drop_readonly,
    exclude_producer_threads,
    fence_after_wait,
    fence_before_wgmma,
    guard_loads,
    mask_idle_warps,
    move_final_waits,
    skip_repeated_waits,
    sync_shared_memory,
    verify_locals,
    verify_pipelined,
    verify_tiles,
    widen_atomics,
)
from .group import (
    begin_trace,
    drop_unordered,
    insert_delays,
    lift_ragged,
    lift_symmetric,
    lower_multimem,
    specialize_group,
    upgrade_ir,
)
from .ir.walk import uses_tileweave
from .sync.infer import infer_sync
from .sync.verify import verify_sync
from .tile import (
    bind_runtime,
    compare_unsigned,
    elect_leader,
    fold_axes,
    hide_bulk_copies,
    hoist_waits,
    index_elements,
    linear_bulk_tiles,
    order_releases,
    pin_pipelined,
    predicate_loads,
    require_arch,
    stage_waits,
    verify_barriers,
    verify_indices,
)
from .workarounds import (
    align_tma,
    copy_parts_by_threads,
    defer_initializations,
    elect_once,
    hide_factors,
    keep_indices,
    keep_strides,
    keep_to_consumers,
    keep_writes_to_block,
    make_factors_positive,
    verify_layouts,
    verify_lowering,
    verify_overwrites,
    verify_preludes,
    verify_products,
    verify_reduced_parts,
    verify_reductions,
    verify_thread_axes,
    verify_thread_values,
    verify_versions,
    wait_before_loop,
)


@dataclass(frozen=True)
class Pass:
    """One pass over a function, and the reason for its position."""

    run: Callable[..., tirx.PrimFunc]
    reason: str

    @property
    def name(self) -> str:
        return self.run.__name__

    @property
    def summary(self) -> str:
        """Purpose of the pass: the first sentence of its module's docstring."""
        doc = sys.modules[self.run.__module__].__doc__ or ""
        summary = " ".join(doc.split("\n\n")[0].split()).rstrip(".")
        return summary[:1].lower() + summary[1:]


PREPARE_PASSES = (
    Pass(
        upgrade_ir.upgrade_ir,
        "first: all other passes and the simulator see the form of one release",
    ),
    Pass(
        make_factors_positive.make_factors_positive,
        "before all passes that simplify expressions, which would get another value",
    ),
    Pass(
        lift_ragged.lift_ragged,
        "before lift_symmetric, which lifts the tensors that it allocates",
    ),
    Pass(
        lift_symmetric.lift_symmetric,
        "before specialize_group: its tensors are specialized like those of the program",
    ),
    Pass(
        specialize_group.specialize_group,
        "before all passes that read shapes and strides, which must be constants",
    ),
    Pass(
        lower_multimem.lower_multimem,
        "after specialize_group, because it unrolls loops over the ranks; before the inference, "
        "which sees an access to each copy",
    ),
)
"""Specialize a program for one group."""

VERIFY_PASSES = (
    Pass(verify_sync.verify_sync, "before delays: it verifies the program's own synchronization"),
)
"""Verify programs that the inference skips. They change nothing."""

FINISH_PASSES = (
    Pass(drop_unordered.drop_unordered, "after the passes that read its marks"),
    Pass(insert_delays.insert_delays, "after the inference, whose signals and waits it delays"),
    Pass(begin_trace.begin_trace, "last: a block begins before all that other passes insert"),
)
"""Run after inference and verification."""

GROUP_PASSES = (
    *PREPARE_PASSES,
    Pass(
        infer_sync.infer_sync, "after the number of ranks is known; later passes see its builtins"
    ),
    *VERIFY_PASSES,
    *FINISH_PASSES,
)
"""Passes that ``tw.compile`` and ``tw.emit`` run for a group, before TileLang's pipeline."""

SIMULATED_PASSES = tuple(p for p in GROUP_PASSES if p not in VERIFY_PASSES)
"""Group passes of the simulator, which itself reports races. With ``tileweave.verify`` it runs
``VERIFY_PASSES``, too."""

RELEASE_PASSES = (
    Pass(
        upgrade_ir.upgrade_ir,
        "first: a program that is not compiled for a group still has the form of its release",
    ),
    Pass(
        keep_strides.keep_strides,
        "before the passes that look for copies by the TMA, which it may disable",
    ),
    Pass(align_tma.align_tma, "like keep_strides"),
    Pass(verify_products.verify_products, "anywhere before TileLang's pipeline"),
    Pass(verify_reduced_parts.verify_reduced_parts, "like verify_products"),
)
"""Passes for faults of TileLang, and differences between its releases. They need the target, and
run first, for every kernel of a program with a builtin or a symmetric tensor."""

TARGET_PASSES = (
    Pass(require_arch.require_arch, "first: its errors name lines of the unchanged program"),
    Pass(fold_axes.fold_axes, "before predicate_loads, whose indices it cannot fold"),
    Pass(
        predicate_loads.predicate_loads,
        "before the passes that look for loads of pipelined loops",
    ),
    Pass(
        verify_versions.verify_versions,
        "after the passes that choose which loads use the TMA; before passes that add statements",
    ),
    Pass(
        verify_preludes.verify_preludes,
        "after verify_versions, which explains uses of tiles with several versions",
    ),
)
"""Passes that need the target. They run before the tile passes, for kernels with builtins."""

SYNC_PASSES = (
    Pass(
        drop_unordered.drop_unordered,
        "first: a program that is not compiled for a group still has its marks",
    ),
    Pass(verify_indices.verify_indices, "early: it verifies the program as written"),
    Pass(verify_overwrites.verify_overwrites, "like verify_indices"),
    Pass(
        verify_barriers.verify_barriers,
        "early: its errors name lines of the program; after the number of ranks is known",
    ),
    Pass(
        verify_thread_axes.verify_thread_axes,
        "before elect_leader, which gives builtins to one thread of the block",
    ),
    Pass(
        elect_leader.elect_leader,
        "before passes that move builtins: it chooses threads by the conditions of the program",
    ),
    Pass(order_releases.order_releases, "after elect_leader, whose barriers it uses"),
    Pass(pin_pipelined.pin_pipelined, "after order_releases, whose placeholders it uses"),
    Pass(hoist_waits.hoist_waits, "after pin_pipelined, whose marks and statements it uses"),
    Pass(stage_waits.stage_waits, "after all passes that add statements to loops: it counts them"),
    Pass(linear_bulk_tiles.linear_bulk_tiles, "before hide_bulk_copies, which hides its tiles"),
    Pass(hide_bulk_copies.hide_bulk_copies, "last: every bulk copy is in its final position"),
)
"""Passes that complete the synchronization on tile-level IR, also for the simulator."""

HOST_PASSES = (
    Pass(
        bind_runtime.bind_runtime,
        "after the passes that add operands, which the host must bind",
    ),
    Pass(compare_unsigned.compare_unsigned, "last: it also changes conditions that passes added"),
)
"""Passes that connect a program to the runtime that launches it on a GPU."""

TILE_PASSES = SYNC_PASSES + HOST_PASSES
"""Passes on tile-level IR before TileLang's pipeline, for kernels with builtins."""

SPECIALIZED_PASSES = (
    Pass(
        defer_initializations.defer_initializations,
        "after the passes that add or move statements before pipelined loops",
    ),
)
"""Passes that protect a program from warp specialization. They need the target, and run on
tile-level IR for every kernel of a program with a builtin or a symmetric tensor."""

INDEX_PASSES = (
    Pass(index_elements.index_elements, "after the passes that read or move vectors"),
    Pass(
        make_factors_positive.make_factors_positive,
        "late: it also changes indices that passes added",
    ),
    Pass(hide_factors.hide_factors, "last before TileLang, like make_factors_positive"),
)
"""Passes that protect indices from TileLang's layouts and from TVM's simplification. They run on
tile-level IR for every kernel of a program with a builtin or a symmetric tensor."""

FLAT_PASSES = (
    Pass(keep_indices.keep_indices, "after TileLang lowers tiles to elements by their layouts"),
)
"""Passes that protect indices of elements. They run inside TileLang's pipeline, before it flattens
indices, for every kernel of a program with a builtin or a symmetric tensor."""

WARP_PASSES = (
    Pass(upgrade_ir.upgrade_ir, "first: TileLang's pipeline has the form of its release"),
    Pass(
        keep_to_consumers.keep_to_consumers,
        "after TileLang divides the warps, and before it chooses layouts for their threads",
    ),
    Pass(
        keep_writes_to_block.keep_writes_to_block,
        "after keep_to_consumers, whose statements other threads execute",
    ),
    Pass(
        verify_thread_values.verify_thread_values,
        "after keep_to_consumers, whose statements have the other index",
    ),
    Pass(upgrade_ir.downgrade_ir, "last: TileLang continues with the result"),
)
"""Passes on tile-level IR with the roles of warps. They run inside TileLang's pipeline, for every
kernel of a program with a builtin or a symmetric tensor."""

LAYOUT_PASSES = (
    Pass(upgrade_ir.upgrade_ir, "first: TileLang's pipeline has the form of its release"),
    Pass(
        verify_layouts.verify_layouts,
        "after TileLang chooses layouts, and before it lowers tiles to elements by them",
    ),
)
"""Passes on tile-level IR with the layouts of all tiles. They run inside TileLang's pipeline, for
every kernel of a program with a builtin or a symmetric tensor."""

FALLBACK_PASSES = (
    Pass(
        copy_parts_by_threads.copy_parts_by_threads,
        "first: all passes see how copies are lowered",
    ),
)
"""Passes for a program that TileLang fails to lower, or lowers wrongly, before its second try."""

MARK_PASSES = (Pass(verify_lowering.mark_statements, "before TileLang lowers tiles to elements"),)
"""Passes on tile-level IR with the layouts of all tiles, immediately before TileLang lowers tiles.
They run inside TileLang's pipeline, for every kernel of a program with a builtin or a symmetric
tensor."""

BARRIER_PASSES = (
    Pass(
        verify_reductions.verify_reductions,
        "after lowering, which chooses the threads of a reduction",
    ),
    Pass(elect_once.elect_once, "first: later passes see the thread that issues a TMA operation"),
    Pass(
        sync_shared_memory.sync_shared_memory,
        "after elect_once; before the device passes, which then see every barrier",
    ),
    Pass(
        fence_before_wgmma.fence_before_wgmma,
        "after lowering, which chooses cp.async; its fences may follow all barriers",
    ),
)
"""Passes on lowered device functions, for every kernel of a program with builtins, even for a
kernel without one."""

ATOMIC_PASSES = (
    Pass(
        widen_atomics.widen_atomics,
        "after TileLang's pipeline, which divides tiles into elements and vectors",
    ),
)
"""Passes on lowered device functions that need the names of the symmetric tensors. They run for
every kernel of a program with a builtin or a symmetric tensor."""

DEVICE_PASSES = (
    Pass(guard_loads.guard_loads, "first: later passes see the conditions of loads"),
    Pass(verify_pipelined.verify_pipelined, "early: it verifies the loops as TileLang lowers them"),
    Pass(verify_tiles.verify_tiles, "after lowering, which places tiles in shared memory"),
    Pass(verify_locals.verify_locals, "early: it verifies the warps as TileLang divides them"),
    Pass(
        exclude_producer_threads.exclude_producer_threads,
        "before passes that follow conditions on the thread index",
    ),
    Pass(move_final_waits.move_final_waits, "before idle producer warps skip their code"),
    Pass(mask_idle_warps.mask_idle_warps, "after move_final_waits, which adds to producers"),
    Pass(wait_before_loop.wait_before_loop, "before delay_launch_count, which adds to the loads"),
    Pass(
        delay_launch_count.delay_launch_count,
        "after the passes that expect only warp groups in their part",
    ),
    Pass(complete_bulk_stores.complete_bulk_stores, "after lowering, which chooses bulk stores"),
    Pass(
        skip_repeated_waits.skip_repeated_waits,
        "before fence_after_wait, which adds a fence to each remaining wait",
    ),
    Pass(drop_readonly.drop_readonly, "last: it changes only attributes"),
)
"""Passes on lowered device functions after TileLang's pipeline, for kernels with builtins."""

FENCE_PASSES = (
    Pass(fence_after_wait.fence_after_wait, "after skip_repeated_waits, for the remaining waits"),
)
"""Passes like ``DEVICE_PASSES``, after these, that need the names of the symmetric tensors."""


def run_group(
    mod: IRModule, world_size: int, heap_stride: int, passes: Iterable[Pass] = GROUP_PASSES
) -> IRModule:
    """Run ``passes`` for a group on all functions of ``mod``, also those without builtins."""
    functions = {}
    for name, func in mod.functions.items():
        for p in passes if isinstance(func, tirx.PrimFunc) else ():
            func = p.run(func, world_size, heap_stride)
        functions[name] = func
    return IRModule(functions, attrs=mod.attrs)


def run(
    passes: Iterable[Pass], mod: IRModule, *arguments: Any, all_functions: bool = False
) -> IRModule:
    """Run ``passes`` on the functions of ``mod`` that use a builtin, or on all functions."""
    functions = {}
    for name, func in mod.functions.items():
        if isinstance(func, tirx.PrimFunc) and (all_functions or uses_tileweave(func)):
            for p in passes:
                func = p.run(func, *arguments)
        functions[name] = func
    return IRModule(functions, attrs=mod.attrs)
