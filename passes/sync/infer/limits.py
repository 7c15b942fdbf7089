"""Accesses that depend on a limit, a number that is loaded and equal on all ranks."""

from __future__ import annotations

import numpy as np
from tvm import tirx
from tvm.ir import structural_equal

from ....builtins.errors import LanguageError
from ...ir.walk import arrows
from ..regions.footprints import Footprints
from ..regions.granules import Counter
from .context import SyncContext


def clear_limited(context: SyncContext, scratch: set[tirx.Buffer]) -> None:
    """Verify accesses that depend on a limit, and clear their counters at the end of a launch.

    All accesses to a granule happen for the same values of the limit. So its counter receives in a
    launch either all units, for which its readers wait, or none. Writers of the next launch wait
    for a credit, which the last block signals after it has cleared the counters.

    Args:
        scratch: tensors that only the program accesses.

    Raises:
        LanguageError: some accesses to a granule depend on another limit than others.

    After:  ``for g in T.serial(n): S_arrived[me, g] = 0`` in the last block
    """
    for counter in context.signalled_counters:
        traffic = counter.traffic
        if not traffic.is_limited:
            continue
        first = next(b for b in traffic.in_kernel("write", "add") if b.limit is not None)
        if traffic.tensor not in scratch:
            raise first.refused(
                "depends on W.uniform, and the caller accesses the tensor", "W.alloc_symmetric"
            )
        _verify(counter, first)
        assert counter.flags is not None
        number = tirx.Var("granule", "int32")
        indices = [context.symbols.rank, number]
        clear = tirx.BufferStore(counter.flags, tirx.const(0, "uint32"), indices)
        total = counter.flags.shape[-1]
        context.at_end.append(tirx.For(number, 0, total, tirx.ForKind.SERIAL, clear))


def _verify(counter: Counter, first: Footprints) -> None:
    """Refuse accesses to a granule that do not all happen for the same values of the limit."""
    shape = counter.traffic.world_size, counter.granules.total
    low, high = np.full(shape, np.iinfo(np.int64).max), np.full(shape, -1)
    assert first.limit is not None
    for footprints in [*counter.traffic.in_kernel(counter.kind), *counter.users]:
        limit = footprints.limit
        if limit is None or not structural_equal(limit.value, first.limit.value):
            raise _differs(first, footprints)
        numbers = counter.granules.numbers_of(footprints)
        owner, number, index = footprints.distinct(footprints.owner, numbers, footprints.limited)
        np.minimum.at(low, (owner, number), index)
        np.maximum.at(high, (owner, number), index)
        if np.any(low[owner, number] != high[owner, number]):
            raise _differs(first, footprints)


def _differs(first: Footprints, other: Footprints) -> LanguageError:
    accesses = [first.access, other.access]
    return LanguageError(
        f"{accesses[0].text} under a condition on W.uniform, and {accesses[1].text} under another "
        "condition, or a granule contains elements of several; expected one condition "
        "index < W.uniform(...) for all accesses to a granule, in an if around each"
        f"{arrows((a.kind, a.line) for a in accesses)}"
    )
