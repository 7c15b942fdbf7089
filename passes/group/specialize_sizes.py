"""Replace dynamic sizes by constants in a program whose synchronization depends on them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache, lru_cache

from tilelang import tvm
from tvm import tirx
from tvm.tirx.stmt_functor import substitute

from ...builtins.errors import LanguageError, TileWeaveError
from ...builtins.symmetric import WORLD_SIZE, is_symmetric
from ..ir.scratch import scratch_of, with_buffers
from ..ir.sizes import LARGEST, set_sizes
from ..ir.walk import with_span_of
from ..sync.infer.inference import is_explicit
from ..sync.infer.options import options_of
from ..sync.regions.accesses import Access, collect_accesses


def with_sizes(func: tirx.PrimFunc, sizes: Mapping[str, int]) -> tirx.PrimFunc:
    """Specialize ``func`` for ``sizes`` if its synchronization depends on them.

    Raises:
        TileWeaveError: a size is missing, or the program does not have it.
    """
    names = dynamic_sizes(func)
    if not isinstance(sizes, Mapping):
        raise TileWeaveError(
            f"{func.attrs['global_symbol']}: sizes={sizes!r}; expected a dict, extent -> size"
        )
    for size in sizes:
        if size not in names:
            legal = " or ".join(names) or "no sizes: it has no dynamic extent"
            raise TileWeaveError(
                f"{func.attrs['global_symbol']}: size {size}={sizes[size]}; expected {legal}"
            )
    return specialize_sizes(func, sizes) if needs_sizes(func) else func


def specialize_sizes(func: tirx.PrimFunc, sizes: Mapping[str, int]) -> tirx.PrimFunc:
    """Replace the dynamic extents of ``func`` by constants. Equal sizes return the same object.

    A loop over a dynamic extent has an unknown number of iterations, and a tensor with one has an
    unknown number of counters. So the inference proves a program for given sizes only.

    Args:
        sizes: size of every dynamic extent, by name.

    Raises:
        TileWeaveError: an extent has no size, or a size is not positive.

    Before: ``S: (world_size, M, N)``, ``T.Kernel(T.ceildiv(M, 8))``
    After:  ``S: (world_size, 20, N)``, ``T.Kernel(3)``
    """
    name, names = func.attrs["global_symbol"], dynamic_sizes(func)
    for size, value in sizes.items():
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= LARGEST:
            raise TileWeaveError(
                f"{name}: size {size}={value!r}; expected an integer from 1 to {LARGEST}"
            )
    missing = [n for n in names if n not in sizes]
    if missing:
        raise TileWeaveError(
            f"{name}: no size for {', '.join(missing)}, on which its synchronization depends; "
            f"expected sizes={{{', '.join(f'{n!r}: ...' for n in missing)}}} "
            f"({' '.join(f'--set {n}=...' for n in missing)} on the command line)"
        )
    return _with_sizes(func, tuple((n, sizes[n]) for n in names))


@cache
def _with_sizes(func: tirx.PrimFunc, sizes: tuple[tuple[str, int], ...]) -> tirx.PrimFunc:
    size_of = dict(sizes)
    values = {v: tirx.IntImm(v.dtype, size_of[v.name]) for v in _extents(func)}
    params = [*func.params, *values]  # TVM specializes parameters only
    body = _with_scratch_shapes(func.body, values)
    func = tirx.PrimFunc(params, body, func.ret_type, func.buffer_map, func.attrs, func.span)
    return set_sizes(func.specialize(values), size_of)


def _with_scratch_shapes(body: tirx.Stmt, values: Mapping[tirx.Var, tirx.IntImm]) -> tirx.Stmt:
    """Insert ``values`` into the shapes of ``W.alloc_symmetric``, which TVM does not specialize."""
    scratch = [a.buffer for a in scratch_of(body)]
    buffers = {
        b.data: tirx.decl_buffer(
            [substitute(e, values) for e in b.shape], b.dtype, b.name, data=b.data, scope=b.scope()
        )
        for b in scratch
    }

    def replace(old: tirx.AllocBuffer) -> tirx.Stmt:
        return with_span_of(old, tirx.AllocBuffer(buffers[old.buffer.data], old.annotations))

    return with_buffers(body, buffers, replace) if buffers else body


def dynamic_sizes(func: tirx.PrimFunc) -> tuple[str, ...]:
    """Return the names of the dynamic extents of a program's tensors, in parameter order."""
    return tuple(dict.fromkeys(v.name for v in _extents(func)))


@lru_cache(maxsize=256)
def needs_sizes(func: tirx.PrimFunc) -> bool:
    """Return whether an access to a symmetric tensor depends on a dynamic extent.

    The synchronization of such a program can only be inferred for given sizes. Programs with
    explicit synchronization keep their dynamic extents.

    Args:
        func: a program not yet compiled for a group.
    """
    extents = set(_extents(func))
    if not extents or options_of(func).verify == "off" or is_explicit(func):
        return False
    scratch = [allocation.buffer for allocation in scratch_of(func.body)]
    tensors = [b for b in func.buffer_map.values() if is_symmetric(b)] + scratch
    try:
        program = collect_accesses(func, tensors)
    except LanguageError:
        return False  # infer_sync reports the error
    exprs = [e for buffer in scratch for e in buffer.shape]
    exprs += [e for access in program.accesses for e in _exprs(access)]
    return not extents.isdisjoint(program.dependencies(map(tvm.runtime.convert, exprs)))


def _extents(func: tirx.PrimFunc) -> list[tirx.Var]:
    """Return the variables that are extents of tensors, except the number of ranks."""
    shapes = [func.buffer_map[p].shape for p in func.params if p in func.buffer_map]
    extents = [e for shape in shapes for e in shape if isinstance(e, tirx.Var)]
    return list(dict.fromkeys(e for e in extents if not e.same_as(WORLD_SIZE)))


def _exprs(access: Access) -> Iterable[tirx.PrimExpr]:
    """Return the expressions that determine where and how often an access happens."""
    yield from (*access.starts, *access.extents, *access.conditions, *access.tensor.shape)
    for loop in (*access.loops, *access.inner):
        yield from (loop.min, loop.extent)
