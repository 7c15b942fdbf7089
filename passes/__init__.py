"""IR-to-IR passes that order memory accesses between ranks. Each file of a stage contains one."""

from .group.specialize_sizes import dynamic_sizes, needs_sizes, specialize_sizes, with_sizes
from .ir.group import heap_tensors
from .ir.releases import upgrade_ir
from .pipeline import FOR_GROUP, PIPELINE, STAGES, Pass, for_group, run, run_group
from .sync.infer.options import is_chosen, split_options, with_options, with_trace

__all__ = [
    "FOR_GROUP",
    "PIPELINE",
    "STAGES",
    "Pass",
    "dynamic_sizes",
    "for_group",
    "heap_tensors",
    "is_chosen",
    "needs_sizes",
    "run",
    "run_group",
    "specialize_sizes",
    "split_options",
    "upgrade_ir",
    "with_options",
    "with_sizes",
    "with_trace",
]
