"""IR-to-IR passes that order memory accesses between ranks. Each file contains one pass."""

from .device.record_events import record_events
from .device.verify_builtins import verify_builtins
from .group.specialize_group import heap_tensors
from .group.specialize_sizes import dynamic_sizes, needs_sizes, specialize_sizes, with_sizes
from .group.upgrade_ir import downgrade_ir, upgrade_ir
from .pipeline import (
    ATOMIC_PASSES,
    BARRIER_PASSES,
    DEVICE_PASSES,
    FALLBACK_PASSES,
    FENCE_PASSES,
    FINISH_PASSES,
    FLAT_PASSES,
    GROUP_PASSES,
    HOST_PASSES,
    INDEX_PASSES,
    LAYOUT_PASSES,
    MARK_PASSES,
    PREPARE_PASSES,
    RELEASE_PASSES,
    SIMULATED_PASSES,
    SPECIALIZED_PASSES,
    SYNC_PASSES,
    TARGET_PASSES,
    TILE_PASSES,
    WARP_PASSES,
    Pass,
    run,
    run_group,
)
from .sync.infer.options import is_chosen, split_options, with_options, with_trace
from .tile.number_builtins import number_builtins
from .workarounds.verify_lowering import verify_lowering

__all__ = [
    "ATOMIC_PASSES",
    "BARRIER_PASSES",
    "DEVICE_PASSES",
    "FALLBACK_PASSES",
    "FENCE_PASSES",
    "FINISH_PASSES",
    "FLAT_PASSES",
    "GROUP_PASSES",
    "HOST_PASSES",
    "INDEX_PASSES",
    "LAYOUT_PASSES",
    "MARK_PASSES",
    "PREPARE_PASSES",
    "RELEASE_PASSES",
    "SIMULATED_PASSES",
    "SPECIALIZED_PASSES",
    "SYNC_PASSES",
    "TARGET_PASSES",
    "TILE_PASSES",
    "WARP_PASSES",
    "Pass",
    "downgrade_ir",
    "dynamic_sizes",
    "heap_tensors",
    "is_chosen",
    "needs_sizes",
    "number_builtins",
    "record_events",
    "run",
    "run_group",
    "specialize_sizes",
    "split_options",
    "upgrade_ir",
    "verify_builtins",
    "verify_lowering",
    "with_options",
    "with_sizes",
    "with_trace",
]
