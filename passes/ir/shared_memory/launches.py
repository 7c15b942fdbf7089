"""Block indices and scalars of the launches that are followed in place of all launches."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import prod

from tvm import tirx

from ..walk import headers_of, nodes_in, variables_in

_MOST = 64
"""Most launches that are followed."""
_FEW = 16
"""Number of blocks on an axis up to which each is followed."""

Launch = dict[tirx.Var, int]


def launches_of(func: tirx.PrimFunc) -> list[Launch]:
    """Return values of the block indices and scalars that conditions, iterations and bindings of a
    device function depend on; an empty list if there are too many.

    The values are all of a few blocks; else the smallest ones, the last block, and those next to
    each constant: comparisons with constants have each result for one of them.
    """
    exprs = [bind.value for bind in nodes_in(func.body, tirx.Bind)]
    for stmt in nodes_in(func.body, tirx.For, tirx.IfThenElse, tirx.While):
        exprs += headers_of(stmt)
    used = set().union(*map(variables_in, exprs))
    constants = {int(n) for expr in exprs for n in nodes_in(expr, tirx.IntImm)}
    near = {0, 1, 2, 3, *(n + d for n in constants for d in (-1, 0, 1) if n + d >= 0)}
    values: dict[tirx.Var, Sequence[int]] = {n: sorted(near) for n in scalars_of(func) if n in used}
    for block, extent in blocks_of(func).items():
        if block not in used:
            continue
        if extent is None:
            values[block] = sorted(near)
        elif extent <= _FEW:
            values[block] = range(extent)
        else:
            values[block] = sorted(n for n in {*near, extent - 1} if n < extent)
    if prod(map(len, values.values())) > _MOST:
        return []
    return [dict(zip(values, numbers, strict=True)) for numbers in product(*values.values())]


def scalars_of(func: tirx.PrimFunc) -> list[tirx.Var]:
    """Return the integer parameters of a device function."""
    return [param for param in func.params if str(param.dtype).startswith(("int", "uint"))]


def blocks_of(func: tirx.PrimFunc) -> dict[tirx.Var, int | None]:
    """Return the block indices of a device function with their numbers of values, if known."""
    blocks: dict[tirx.Var, int | None] = {}
    for attr in nodes_in(func.body, tirx.AttrStmt):
        if attr.attr_key == "thread_extent" and attr.node.thread_tag.startswith("blockIdx."):
            is_known = isinstance(attr.value, tirx.IntImm)
            blocks[attr.node.var] = int(attr.value) if is_known else None
    return blocks
