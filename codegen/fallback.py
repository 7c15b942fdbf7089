"""Lower copies without the TMA where TileLang fails to lower them by the TMA."""

from __future__ import annotations

from collections.abc import Callable

from tvm import IRModule, tirx
from tvm.target import Target

from .. import passes
from ..builtins.errors import LanguageError
from ..passes.tile.require_arch import TMA_SM, sm_of
from ..passes.workarounds.verify_lowering import MisloweredError, lines_of_parts, without_tma_at


def lower_with_fallback(
    lower: Callable[[IRModule, Target], IRModule], mod: IRModule, target: Target
) -> IRModule:
    """Return the result of ``lower``, in which some copies do not use the TMA.

    TileLang copies a part of a tile by one bulk copy, although other elements are between its rows;
    for other parts it fails with an internal error. Without the TMA, threads copy these parts.

    Raises:
        Exception: ``lower`` also fails without the TMA.
    """
    lines: set[str] = set()
    while True:
        try:
            return lower(_without_tma(mod, lines), target)
        except MisloweredError as error:
            added = (error.lines or _lines_of_parts(mod)) - lines
            if not added or sm_of(target) < TMA_SM:
                raise
        except LanguageError:
            raise
        except Exception:
            added = _lines_of_parts(mod) - lines
            if not added or sm_of(target) < TMA_SM:
                raise
        lines |= added


def _without_tma(mod: IRModule, lines: set[str]) -> IRModule:
    if not lines:
        return mod
    rule = passes.Pass(without_tma_at, "first: all passes see how copies are lowered")
    return passes.run([rule], mod, lines, all_functions=True)


def _lines_of_parts(mod: IRModule) -> set[str]:
    functions = (f for f in mod.functions.values() if isinstance(f, tirx.PrimFunc))
    return set().union(*map(lines_of_parts, functions))
