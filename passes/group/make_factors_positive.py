"""Write quotients and remainders of negative multiples with positive factors."""

from __future__ import annotations

from tvm import tirx

from ..ir.factors import with_positive_factors


def make_factors_positive(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Change quotients and remainders to which the passes for a group would give other values.

    Before: ``x[(8 - j // 4) % 8]``; ``x[(16 - j * 2) // 4]``
    After:  ``x[j // 4 * 7 % 8]``; ``x[(j * 2 + 16) // 4 - j]``
    """
    return with_positive_factors(func)
