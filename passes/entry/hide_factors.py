"""Hide large factors of the index of a scalar load, which TileLang takes for a number of lanes."""

from __future__ import annotations

from tvm import tirx
from tvm.arith import Analyzer
from tvm.tirx.stmt_functor import ir_transform

from ...builtins.symmetric import packed_strides
from ..ir.walk import has_loads, nodes_in, op_name, variables_in

_ADDRESSES = frozenset({"tl.region", "tl.access_ptr", "tirx.address_of"})
_LANES = 1 << 16
"""TVM stores a number of lanes modulo this."""


def hide_factors(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Change the index of a scalar load of global memory if all its values have a large factor.

    TileLang's ``StorageRewrite`` takes the largest common factor of a flat index for the number of
    lanes of a vector type, of which TVM stores 16 bits with a sign. It fails for the factors 32768
    to 65535, for 98304 to 131071 and so on ("Can't fetch the lanes of a scalable vector at a
    compile time"). In ``x[row, 0]`` the factor is the length of a row. In ``S[me, 1 - me, 0]``, on
    two ranks, it is the distance of the heaps minus that of ``S[0, 0]`` and ``S[0, 1]``.

    The pass adds a difference that is 0. nvcc removes it, but TVM cannot simplify it.

    Before: ``x[row, 0]``, with 40000 columns
    After:  ``x[row, T.bitwise_or(row, 0) - row]``
    """
    analyzer = Analyzer()
    for bind in nodes_in(func.body, tirx.Bind):
        if not has_loads(bind.value):
            analyzer.bind(bind.var, bind.value)

    def skip(node: tirx.Call) -> tirx.Call | None:
        return node if op_name(node) in _ADDRESSES else None

    def change(node: tirx.BufferLoad | tirx.Call) -> tirx.BufferLoad | None:
        if not isinstance(node, tirx.BufferLoad) or not _has_large_factor(node, analyzer):
            return None
        *outer, last = node.indices
        variable = variables_in(node)[0]
        zero = tirx.bitwise_or(variable, tirx.const(0, variable.dtype)) - variable
        return tirx.BufferLoad(node.buffer, [*outer, last + tirx.Cast(str(last.dtype), zero)])

    body = ir_transform(func.body, skip, change, ["tirx.BufferLoad", "tirx.Call"])
    return func.with_body(body)


def _has_large_factor(load: tirx.BufferLoad, analyzer: Analyzer) -> bool:
    buffer = load.buffer
    if buffer.scope() != "global" or load.dtype != buffer.dtype or not load.indices:
        return False
    strides = buffer.strides or packed_strides(buffer.shape)
    index = analyzer.simplify(sum(i * s for i, s in zip(load.indices, strides, strict=True)))
    return analyzer.modular_set(index).coeff % _LANES >= _LANES // 2
