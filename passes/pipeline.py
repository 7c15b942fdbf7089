"""The passes, in the order in which they run, each with the reason for its place."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from tvm import IRModule, tirx

from .device import (
    complete_bulk_stores,
    dismiss_idle_warps,
    drop_readonly,
    end_by_producer,
    fence_after_wait,
    guard_loads,
    keep_to_block,
    sync_branches,
    verify_pipelined,
    wait_once,
    widen_atomics,
)
from .group import drop_unordered, insert_delays, lift_symmetric, specialize_group
from .ir.walk import uses_tileweave
from .sync.infer import infer_sync
from .sync.verify import verify_sync
from .tile import (
    bind_runtime,
    compare_unsigned,
    defer_initializations,
    elect_leader,
    fold_axes,
    free_async_tiles,
    hoist_waits,
    linear_bulk_tiles,
    order_releases,
    pin_pipelined,
    predicate_loads,
    require_arch,
    stage_waits,
    verify_barriers,
    verify_indices,
)


@dataclass(frozen=True)
class Pass:
    """One pass over a function and why it stands where it does."""

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
        lift_symmetric.lift_symmetric,
        "first: its tensors are specialised like those of the program",
    ),
    Pass(
        specialize_group.specialize_group,
        "shapes and strides must be constants before anything reads them",
    ),
)
"""Make a program that of one group."""

VERIFY_PASSES = (
    Pass(verify_sync.verify_sync, "judges what the program itself orders, before delays are added"),
)
"""Change nothing; what is left out of the inference they judge."""

FINISH_PASSES = (
    Pass(drop_unordered.drop_unordered, "behind those that heed its marks"),
    Pass(insert_delays.insert_delays, "sees the signals and waits that were inferred"),
)
"""Follow the inference."""

GROUP_PASSES = (
    *PREPARE_PASSES,
    Pass(infer_sync.infer_sync, "needs the number of ranks; adds builtins for all later passes"),
    *VERIFY_PASSES,
    *FINISH_PASSES,
)
"""Run by ``tw.compile`` and ``tw.emit``, with the group, before TileLang sees the program."""

SIMULATED_PASSES = tuple(p for p in GROUP_PASSES if p not in VERIFY_PASSES)
"""The same for the simulator, which itself reports what a program does not order, unless
``tileweave.verify`` is given."""

TARGET_PASSES = (
    Pass(require_arch.require_arch, "first: names the program's own lines, before passes add any"),
    Pass(fold_axes.fold_axes, "before predicate_loads, whose indices it could not fold"),
    Pass(
        predicate_loads.predicate_loads,
        "needs the target; before those that look for loads of pipelined loops",
    ),
)
"""Run with the target before the tile passes, for every kernel that uses a builtin."""

SYNC_PASSES = (
    Pass(
        drop_unordered.drop_unordered,
        "first: a program that was not compiled for a group has its marks still",
    ),
    Pass(verify_indices.verify_indices, "early: judges the program as it was written"),
    Pass(
        verify_barriers.verify_barriers,
        "early, too: names the program's own lines; needs the number of ranks",
    ),
    Pass(
        elect_leader.elect_leader,
        "decides who runs a builtin while the program still has its own shape",
    ),
    Pass(order_releases.order_releases, "needs the barriers that electing a leader placed"),
    Pass(pin_pipelined.pin_pipelined, "needs the placeholders that order_releases placed"),
    Pass(hoist_waits.hoist_waits, "needs the marks of pin_pipelined, and the statements it added"),
    Pass(stage_waits.stage_waits, "counts the statements of a loop, so all of them are in place"),
    Pass(linear_bulk_tiles.linear_bulk_tiles, "names tiles, which free_async_tiles then hides"),
    Pass(free_async_tiles.free_async_tiles, "sees each bulk copy in its final place"),
)
"""What a program means: run on tile-level IR, also for the simulator."""

HOST_PASSES = (
    Pass(
        bind_runtime.bind_runtime,
        "behind the passes that add operands, which the host must bind",
    ),
    Pass(compare_unsigned.compare_unsigned, "last: sees the conditions that passes added, too"),
)
"""Tie a program to the runtime that launches it on a GPU."""

TILE_PASSES = SYNC_PASSES + HOST_PASSES
"""Run on tile-level IR before TileLang's pipeline, for every kernel that uses a builtin."""

SPECIALIZED_PASSES = (
    Pass(
        defer_initializations.defer_initializations,
        "last before TileLang: sees all statements before a pipelined loop in their final order",
    ),
)
"""Run with the target on tile-level IR just before TileLang's pipeline, for every kernel of a
program that uses a builtin or a symmetric tensor: prevent what warp specialization would change."""

BARRIER_PASSES = (
    Pass(sync_branches.sync_branches, "before those below, which then see every barrier"),
)
"""Run on lowered device functions after TileLang's pipeline, for every kernel of a program that
uses a builtin, whether one is left in it or not."""

ATOMIC_PASSES = (
    Pass(
        widen_atomics.widen_atomics,
        "after TileLang's pipeline, which makes elements and vectors of tiles",
    ),
)
"""Run with the names of the symmetric tensors on lowered device functions after TileLang's
pipeline, for every kernel of a program that uses a builtin or a symmetric tensor."""

DEVICE_PASSES = (
    Pass(guard_loads.guard_loads, "first: what follows sees where loads happen"),
    Pass(verify_pipelined.verify_pipelined, "reads what TileLang made of the loops"),
    Pass(keep_to_block.keep_to_block, "before those that follow conditions on the thread index"),
    Pass(end_by_producer.end_by_producer, "before idle warps of the producer leave"),
    Pass(dismiss_idle_warps.dismiss_idle_warps, "sees what TileLang lets a producer do"),
    Pass(complete_bulk_stores.complete_bulk_stores, "sees which copies became bulk stores"),
    Pass(wait_once.wait_once, "sees the final loops; fences follow the waits that stay"),
    Pass(fence_after_wait.fence_after_wait, "sees which copies became bulk loads"),
    Pass(drop_readonly.drop_readonly, "last: only attributes, no code"),
)
"""Run on lowered device functions after TileLang's pipeline, for every kernel that uses a
builtin."""


def run_group(
    mod: IRModule, world_size: int, heap_stride: int, passes: Iterable[Pass] = GROUP_PASSES
) -> IRModule:
    """``mod`` compiled for a group: every function, since a symmetric tensor needs no builtin."""
    functions = {}
    for name, func in mod.functions.items():
        for p in passes if isinstance(func, tirx.PrimFunc) else ():
            func = p.run(func, world_size, heap_stride)
        functions[name] = func
    return IRModule(functions, attrs=mod.attrs)


def run(passes: Iterable[Pass], mod: IRModule, *arguments: Any, every: bool = False) -> IRModule:
    """``mod`` with the functions that use a builtin, or ``every`` one, put through ``passes``; the
    others untouched."""
    functions = {}
    for name, func in mod.functions.items():
        if isinstance(func, tirx.PrimFunc) and (every or uses_tileweave(func)):
            for p in passes:
                func = p.run(func, *arguments)
        functions[name] = func
    return IRModule(functions, attrs=mod.attrs)
