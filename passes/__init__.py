"""IR-to-IR passes that make the order of memory between ranks right. One pass a file."""

from .inference.options import is_chosen, split_options
from .specialize_sizes import dynamic_sizes, needs_sizes, specialize_sizes, with_sizes
from .table import (
    BARRIER_PASSES,
    DEVICE_PASSES,
    FINISH_PASSES,
    GROUP_PASSES,
    HOST_PASSES,
    PREPARE_PASSES,
    SIMULATED_PASSES,
    SYNC_PASSES,
    TARGET_PASSES,
    TILE_PASSES,
    Pass,
    run,
    run_group,
)

__all__ = [
    "BARRIER_PASSES",
    "DEVICE_PASSES",
    "FINISH_PASSES",
    "GROUP_PASSES",
    "HOST_PASSES",
    "PREPARE_PASSES",
    "SIMULATED_PASSES",
    "SYNC_PASSES",
    "TARGET_PASSES",
    "TILE_PASSES",
    "Pass",
    "dynamic_sizes",
    "is_chosen",
    "needs_sizes",
    "run",
    "run_group",
    "specialize_sizes",
    "split_options",
    "with_sizes",
]
