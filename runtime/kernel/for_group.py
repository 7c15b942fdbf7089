"""Programs for a group, with their synchronization, which is inferred once for each."""

from __future__ import annotations

from functools import lru_cache

from tvm import tirx

from ... import passes
from ...passes.ir.group import with_heap_stride
from ...passes.sync.infer.inference import Explanation, infer_and_explain

_STRIDE = 1 << 40
"""Bytes between two ranks' heaps during the inference, which does not depend on them."""
_AFTER_SYNC = [stage for stage in passes.FOR_GROUP if stage not in ("group", "sync")]


@lru_cache(maxsize=256)
def inferred(func: tirx.PrimFunc, world_size: int) -> tuple[tirx.PrimFunc, Explanation]:
    """Return ``func`` for a group of this size with its synchronization, and what was inserted.

    Raises:
        LanguageError: accesses cannot be ordered.
    """
    program = passes.for_group(func, world_size, _STRIDE, ["group"])
    return infer_and_explain(program, world_size, _STRIDE)


@lru_cache(maxsize=256)
def for_group(func: tirx.PrimFunc, world_size: int, heap_stride: int) -> tirx.PrimFunc:
    """Return the program that TileLang compiles: ``func`` with the group's size, the heap's stride
    and the inferred synchronization.

    Raises:
        LanguageError: accesses cannot be ordered.
    """
    program, _ = inferred(func, world_size)
    program = passes.for_group(program, world_size, _STRIDE, _AFTER_SYNC)
    return with_heap_stride(program, heap_stride)
