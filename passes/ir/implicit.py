"""Implicit parameters: passes add them to a program. The runtime supplies them, zeroed once."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Container, Sequence
from dataclasses import dataclass

from tvm import tirx

from ...builtins.symmetric import itemsize, packed_strides

IMPLICIT = "tileweave.implicit"
"""Attribute of a program that holds its implicit parameters, which follow its own, as JSON."""


@dataclass(frozen=True)
class Implicit:
    """One parameter that passes add.

    Attributes:
        symmetric: whether all ranks can access every rank's copy.
        shape: shape of one rank's copy.
        scratch: whether it holds data of ``W.alloc_symmetric`` or of versions of a tensor.
            Otherwise it holds counters.
        segments, segment: if it holds the rows of a ragged tensor, the extents of the axes that
            select a segment, the source last, and the shape of a segment, rows first. Before them,
            ``shape`` may have an axis for buffers.
        tile: rows of a segment that readers wait for at once; 0 before the inference.
        flagged: whether it holds words with flags, which must be zero before the first launch.
    """

    name: str
    symmetric: bool
    shape: tuple[int, ...]
    dtype: str
    scratch: bool = False
    segments: tuple[int, ...] = ()
    segment: tuple[int, ...] = ()
    tile: int = 0
    flagged: bool = False


def implicit_of(func: tirx.PrimFunc) -> list[Implicit]:
    """Return the implicit parameters of ``func``, in order."""
    if not func.attrs or IMPLICIT not in func.attrs:
        return []
    fields = json.loads(func.attrs[IMPLICIT].value)
    shapes = ("shape", "segments", "segment")
    return [Implicit(**{**f, **{name: tuple(f[name]) for name in shapes}}) for f in fields]


def heap_buffer(
    name: str, shape: Sequence[int], dtype: str, world_size: int, heap_stride: int
) -> tirx.Buffer:
    """Declare a symmetric tensor of a group, with ``shape`` on each rank."""
    stride = tirx.IntImm("int64", heap_stride // itemsize(dtype))
    strides = [stride, *packed_strides(shape)]
    return tirx.decl_buffer([world_size, *shape], dtype, name, strides=strides)


def unused_name(name: str, taken: Container[str]) -> str:
    """Return ``name``, with underscores after it if it is one of ``taken``."""
    while name in taken:
        name += "_"
    return name


def parameter_names(func: tirx.PrimFunc) -> list[str]:
    """Return the names of the parameters of ``func``: of its scalars and of its tensors."""
    return [(func.buffer_map[p] if p in func.buffer_map else p).name for p in func.params]


def with_implicit(
    func: tirx.PrimFunc, implicit: Sequence[Implicit], buffers: Sequence[tirx.Buffer]
) -> tirx.PrimFunc:
    """Return ``func`` with more implicit parameters, after its existing ones."""
    params, buffer_map = list(func.params), dict(func.buffer_map.items())
    for parameter, buffer in zip(implicit, buffers, strict=True):
        param = tirx.Var(f"{parameter.name}_handle", "handle")
        params.append(param)
        buffer_map[param] = buffer
    new = tirx.PrimFunc(params, func.body, func.ret_type, buffer_map, func.attrs, func.span)
    return set_implicit(new, [*implicit_of(func), *implicit])


def set_implicit(func: tirx.PrimFunc, implicit: Sequence[Implicit]) -> tirx.PrimFunc:
    """Return ``func`` with an attribute which states that its last parameters are ``implicit``."""
    listed = json.dumps([dataclasses.asdict(p) for p in implicit])
    return func.with_attr(IMPLICIT, tirx.StringImm(listed))
