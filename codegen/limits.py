"""Work around faults of TileLang releases, or refuse the programs that they affect."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterable, Iterator
from importlib.metadata import version

from tilelang import tvm
from tilelang.transform import PassConfigKey
from tvm import IRModule, tirx
from tvm.ir.instrument import PassInstrument
from tvm.target import Target

from ..builtins.errors import LanguageError
from ..builtins.spec import builtin_of
from ..builtins.versions import installed_tilelang
from ..passes.ir.tma import may_have_producer
from ..passes.ir.walk import builtins_in, is_parallel, nodes_in

FIRST_WITH_NESTED_SPECIALIZATION = (0, 1, 13)
"""First release that specializes warps of a ``T.Pipelined`` in another loop. Before it, TileLang
fails: its pass finds the loop, but does not replace it (``ReplacePipelineLoopInStmt``)."""

FIRST_WITH_VECTOR_ADDRESSES = (0, 1, 13)
"""First release that takes the address of an element of a tensor whose elements are vectors."""

BROKEN_SLICE_RACE_CHECK = (0, 1, 13)
"""Release whose check for races in ``T.Parallel`` fails for slices (``VerifyParallelLoop``)."""


@contextlib.contextmanager
def work_around_limits(mod: IRModule, target: Target) -> Iterator[None]:
    """Set, inside a ``with`` statement, the pass options that ``mod`` needs on this release.

    Raises:
        LanguageError: the release cannot compile ``mod`` with any options.
    """
    functions = {
        str(n.name_hint): f for n, f in mod.functions.items() if isinstance(f, tirx.PrimFunc)
    }
    if installed_tilelang() < FIRST_WITH_VECTOR_ADDRESSES:
        _refuse_vectors(functions.values())
    names = [name for name, func in functions.items() if _has_nested_pipeline(func)]
    config: dict[str, bool] = {}
    can_specialize = installed_tilelang() >= FIRST_WITH_NESTED_SPECIALIZATION
    if names and not can_specialize and may_have_producer(target):
        config[PassConfigKey.TL_DISABLE_WARP_SPECIALIZED] = True
        warnings.warn(
            f"{', '.join(names)}: TileLang {version('tilelang')} cannot specialize warps for a "
            "T.Pipelined in another loop; compiled without specialization, which is slower "
            f"(tilelang=={'.'.join(map(str, FIRST_WITH_NESTED_SPECIALIZATION))} can)",
            stacklevel=2,
        )
    if installed_tilelang() == BROKEN_SLICE_RACE_CHECK:
        if any(map(_has_parallel_slices, functions.values())):
            config[PassConfigKey.TL_DISABLE_DATA_RACE_CHECK] = True
    with with_config(config) if config else contextlib.nullcontext():
        yield


def _refuse_vectors(functions: Iterable[tirx.PrimFunc]) -> None:
    """Refuse builtins that operate on a tensor of vectors: the CUDA would not compile."""
    for func in functions:
        for call in builtins_in(func.body):
            for load in nodes_in(call, tirx.BufferLoad):
                dtype = str(load.buffer.dtype)
                if load.buffer.scope() == "global" and tvm.DataType(dtype).lanes > 1:
                    raise LanguageError(
                        f"{builtin_of(call).name}: {load.buffer.name} has type {dtype}, whose "
                        f"elements have no address in TileLang {version('tilelang')}; expected a "
                        "tensor of scalars, or "
                        f"tilelang=={'.'.join(map(str, FIRST_WITH_VECTOR_ADDRESSES))}"
                    )


def with_config(
    config: dict[str, bool], instruments: Iterable[PassInstrument] = ()
) -> tvm.transform.PassContext:
    """Return the current context of passes with more options and instruments."""
    context = tvm.transform.PassContext.current()
    return tvm.transform.PassContext(
        opt_level=context.opt_level,
        required_pass=context.required_pass,
        disabled_pass=context.disabled_pass,
        instruments=[*context.instruments, *instruments],
        config={**context.config, **config},
    )


def _has_nested_pipeline(func: tirx.PrimFunc) -> bool:
    """Return whether a pipelined loop is in another loop of a kernel."""
    # Unlike ``is_pipelined``: without stages, a loop with an explicit schedule has no producer.
    return any(
        int(inner.annotations.get("num_stages", 0)) > 0
        for loop in nodes_in(func.body, tirx.For, tirx.While)
        if isinstance(loop, tirx.While) or loop.thread_binding is None
        for inner in nodes_in(loop.body, tirx.For)
    )


def _has_parallel_slices(func: tirx.PrimFunc) -> bool:
    """Return whether a parallel loop stores to several elements by one statement."""
    loops = filter(is_parallel, nodes_in(func.body, tirx.For))
    stores = [store for loop in loops for store in nodes_in(loop.body, tirx.BufferStore)]
    return any(isinstance(index, tirx.Ramp) for store in stores for index in store.indices)
