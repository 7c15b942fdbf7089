"""Refuse waits for mbarriers that may never end, and loads without a wait."""

from __future__ import annotations

from collections.abc import Collection

from tvm import tirx

from ...builtins.errors import LanguageError
from ..ir.shared_memory.waits import wait_fault
from ..ir.walk import arrows


def verify_waits(func: tirx.PrimFunc, mbarriers: Collection[str]) -> tirx.PrimFunc:
    """Refuse a wait for a phase of an mbarrier that may never be complete, or that may be over
    before the threads look at the mbarrier, and a load that may end after the block.

    Before: ``mbarrier_wait_parity(new[0], 0)`` before the first arrival at ``new[0]``, which
    follows it
    After:  LanguageError; legal kernels stay unchanged

    Args:
        mbarriers: names of those of the program; TileLang's own have its protocol.

    Raises:
        LanguageError: names the mbarrier, the parity, and the lines of all waits that block.
    """
    fault = wait_fault(func, mbarriers)
    if fault is None:
        return func
    lines = arrows(("wait", line) for line in fault.lines)
    raise LanguageError(f"{fault.op}: {fault.what}; expected {fault.legal}{lines}")
