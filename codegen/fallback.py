"""Lower copies of parts of tiles without the TMA if TileLang fails to lower them by the TMA."""

from __future__ import annotations

from collections.abc import Callable

from tvm import IRModule
from tvm.target import Target

from .. import passes
from ..builtins.errors import LanguageError
from ..passes.tile.require_arch import TMA_SM, sm_of
from ..passes.workarounds.verify_lowering import MisloweredError


def lower_with_fallback(
    lower: Callable[[IRModule, Target], IRModule], mod: IRModule, target: Target
) -> IRModule:
    """Return the result of ``lower``, if necessary with some copies by threads.

    TileLang copies a part of a tile by one bulk copy, although other elements are between its rows;
    for other parts it fails with an internal error. Threads can copy these parts.

    Raises:
        Exception: ``lower`` also fails without the TMA, or no copy of a part uses the TMA.
    """
    try:
        return lower(mod, target)
    except Exception as error:
        if isinstance(error, LanguageError) and not isinstance(error, MisloweredError):
            raise
        by_threads = passes.run(passes.FALLBACK_PASSES, mod, all_functions=True)
        if sm_of(target) < TMA_SM or by_threads.same_as(mod):
            raise
    return lower(by_threads, target)
