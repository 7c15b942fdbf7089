"""Hook into TileLang: wrap its CUDA pipeline, its cache key, its call of nvcc, and the frontend's
transform of functions, record of lines, check of copies and errors, and filter its log; nothing
else."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from functools import partial
from types import CellType, CodeType, FunctionType
from typing import Any

import tilelang
import tvm_ffi
from tilelang import language, tvm
from tilelang.cache.kernel_cache import KernelCache
from tilelang.contrib import nvcc
from tilelang.language import copy_op
from tilelang.language.eager import builder
from tilelang.language.eager.builder import Builder
from tilelang.language.eager.utils import get_func_nonlocals
from tilelang.transform import PassConfigKey
from tvm import IRModule, tirx
from tvm.ir.instrument import pass_instrument
from tvm.target import Target

from .. import passes
from ..builtins.errors import (
    LanguageError,
    MisloweredError,
    TileWeaveError,
    brief_errors,
    reject,
    shows_frames,
)
from ..builtins.spec import BUILTINS, builtin_of
from ..passes.ir.group import GROUP_SIZE
from ..passes.ir.marks import NumberedCall
from ..passes.ir.operators import COMPLETE, HOLD, SYSTEM_ATOMIC
from ..passes.ir.pipelined_loops import load_lines
from ..passes.ir.releases import downgrade_ir
from ..passes.ir.shared_memory.footprints import row_sizes
from ..passes.ir.shared_memory.waits import mbarriers_of
from ..passes.ir.walk import builtins_in, map_functions, uses_tileweave
from .backends import Lower, lower_of_cuda, replace_lower_of_cuda
from .compile import filter_logs
from .headers import include_headers, stamp
from .limits import with_config, work_around_limits
from .lower import lowered_call
from .refusals import explain_failure, unequal_copy
from .reserved_names import rename_reserved
from .stderr import without_fatal_text
from .toolchain import ToolchainError, diagnose_failures

_lock = threading.Lock()
_lowers_tiles: ContextVar[bool] = ContextVar("lowers_tiles", default=False)
_ENTRY = ("target", "tile", "entry")
"""Stages before TileLang's pipeline."""
_MAX_TRANSFORMS = 1024
"""Maximum number of transformed functions that are kept."""
_PLACES = {
    "warp": ("after", "tl.ProducerConsumerWarpSpecialized"),
    "layout": ("before", "tl.LowerTileOp"),
    "lower": ("after", "tl.LowerTileOp"),
    "flat": ("before", "tl.FlattenBuffer"),
}
"""Place of each stage inside TileLang's pipeline: before or after one of its passes."""


def activate() -> None:
    """Register the builtins and the pipeline with TileLang. Further calls have no effect."""
    with _lock:
        for name in BUILTINS:
            _register_lowering(name, lowered_call)
        _register_lowering(
            COMPLETE,
            lambda call: tirx.call_extern(call.dtype, "tw::complete_bulk_stores"),
        )
        _register_lowering(
            SYSTEM_ATOMIC,
            lambda call: tirx.call_extern(call.dtype, call.args[0].value, *call.args[1:]),
        )
        _register_lowering(HOLD, lambda call: tirx.IntImm("int32", 0))
        _wrap_pipeline()
        _wrap_cache_key()
        _transform_once()
        _name_lines_of_programs()
        _name_shapes_of_copies()
        _shorten_errors()
        logging.getLogger(Builder.__module__).addFilter(_is_logged)
        _wrap_nvcc()
        filter_logs()


def _register_lowering(name: str, lowering: Callable[[tirx.Call], tirx.PrimExpr]) -> None:
    if tvm.ir.Op.get(name).get_attr("cuda.FLowerIntrinsic") is None:
        tvm.ir.register_intrin_lowering(name, "cuda", f=lowering)


def _wrap_pipeline() -> None:
    registered = lower_of_cuda()
    if _is_wrapper(registered):
        return

    def stock(mod: IRModule, target: Target) -> IRModule:
        return registered(map_functions(downgrade_ir, mod), target)

    def lower(mod: IRModule, target: Target) -> IRModule:
        if not any(_uses_extension(f) for f in mod.functions.values()):
            return stock(mod, target)
        with work_around_limits(mod, target):
            return _lower_with_stages(stock, mod, target)

    replace_lower_of_cuda(lower)


def _lower_with_stages(stock: Lower, mod: IRModule, target: Target) -> IRModule:
    """Return the result of all stages after those for a group, and of TileLang's pipeline.

    Raises:
        LanguageError: a pass refuses the program, or TileLang fails. For such a failure the error
            names the statement that is responsible.
    """

    def lower_tiles(program: IRModule) -> IRModule:
        token = _lowers_tiles.set(True)
        try:
            with _without_shared_reuse(program), _inner_stages(), without_fatal_text():
                return stock(program, target)
        finally:
            _lowers_tiles.reset(token)

    known = {"target": target, "symmetric": _symmetric_names(mod)}
    first: tuple[Exception, IRModule] | None = None
    for is_retry in (False, True):
        calls: dict[int, NumberedCall] = {}
        program = passes.run(_ENTRY, mod, is_retry=is_retry, calls=calls, **known)
        if first is not None and tvm.ir.structural_equal(program, first[1]):
            break
        try:
            lowered = lower_tiles(program)
        except Exception as error:
            if isinstance(error, TileWeaveError) and not isinstance(error, MisloweredError):
                raise
            first = first or (error, program)
            continue
        known |= {"calls": calls, "program": program, "load_lines": partial(load_lines, program)}
        known |= {"row_sizes": row_sizes(program), "mbarriers": mbarriers_of(program)}
        lowered = passes.run("device", lowered, **known)
        return include_headers(rename_reserved(lowered))
    assert first is not None
    cause, program = first
    if isinstance(cause, MisloweredError):
        raise cause
    raise explain_failure(cause, program, lower_tiles, target) from cause


def refusal(func: tirx.PrimFunc, target: Target) -> LanguageError | None:
    """Return the error with which a pass that needs the target refuses ``func``, or None.

    Args:
        func: a program that is specialized for a group.
    """
    if not _uses_extension(func):
        return None
    func, stock = passes.split_options(func, {})
    try:
        with target, tvm.transform.PassContext(config=dict(stock)):
            mod = IRModule({str(func.attrs["global_symbol"]): func})
            passes.run("target", mod, target=target, is_retry=False)
    except LanguageError as error:
        return error
    return None


@pass_instrument
class _Inner:
    """Runs stages between the passes of TileLang, and keeps their error.

    Attributes:
        tiles: the module after the latest stage.
    """

    error: LanguageError | None = None
    tiles: IRModule | None = None

    def run_before_pass(self, mod: IRModule, info: Any) -> None:
        self._run(("before", info.name), mod)

    def run_after_pass(self, mod: IRModule, info: Any) -> None:
        self._run(("after", info.name), mod)

    def _run(self, place: tuple[str, str], mod: IRModule) -> None:
        """Run the stages of ``place`` on ``mod``, in place."""
        for stage in [stage for stage, other in _PLACES.items() if other == place]:
            try:
                self.tiles = passes.run(stage, mod, tiles=self.tiles)
            except LanguageError as error:
                self.error = error
                raise
            for variable, func in map_functions(downgrade_ir, self.tiles).functions.items():
                mod.update_func(variable, func)


@contextlib.contextmanager
def _inner_stages() -> Iterator[None]:
    """Let TileLang lower inside. TVM raises an error of an inner stage with another type."""
    inner = _Inner()
    try:
        with with_config({}, [inner]):
            yield
    except Exception:
        if inner.error is not None:
            raise inner.error from None
        raise


def _without_shared_reuse(mod: IRModule) -> contextlib.AbstractContextManager:
    """Return a context in which no two tiles share memory, if ``mod`` has asynchronous stores.

    TileLang considers a tile free after the call that starts a store, although the store may still
    read it.
    """
    calls = [call for f in mod.functions.values() for call in builtins_in(f.body)]
    if not any(builtin_of(call).is_async_store for call in calls):
        return contextlib.nullcontext()
    return with_config({PassConfigKey.TL_DISABLE_SHARED_MEMORY_REUSE: True})


def _wrap_cache_key() -> None:
    """Add the headers and passes to TileLang's cache key, which covers the program and options."""
    stock = KernelCache._generate_key
    if _is_wrapper(stock):
        return

    def generate_key(self, func, *args, **kwargs) -> str:
        key = stock(self, func, *args, **kwargs)
        if not _uses_extension(func):
            return key
        return hashlib.sha256(f"{key}{stamp()}".encode()).hexdigest()

    KernelCache._generate_key = generate_key


def _transform_once() -> None:
    """Let the frontend transform a function once for all values of the variables that it captures.

    A program for another size is the same function with other values. Its transform takes longer
    than its trace.
    """
    stock = builder.mutate
    if _is_wrapper(stock):
        return
    transforms: dict[tuple[Any, ...], tuple[CodeType, Any]] = {}

    def mutate(func: Callable[..., Any]) -> Any:
        captured = get_func_nonlocals(func)
        key = id(func.__code__), *captured
        _, transform = transforms.get(key, (None, None))
        if transform is None:
            transform = stock(func)
            # Types of arguments that the body declares are evaluated with the captured values.
            if transform.extra_type_hints:
                return transform
            if len(transforms) >= _MAX_TRANSFORMS:
                transforms.clear()
            # It keeps the code, so that no other code has its id.
            transforms[key] = func.__code__, transform
        code = transform.gen.__code__
        cells = tuple(CellType(captured[name]) for name in code.co_freevars)
        function = FunctionType(code, func.__globals__, code.co_name, None, cells)
        return dataclasses.replace(transform, gen=function)

    builder.mutate = mutate


def _name_lines_of_programs() -> None:
    """Attribute the statements of TileLang's own macros, such as those of ``T.reduce_sum``, to the
    line of the program that calls them."""
    stock = Builder.set_fileline
    if _is_wrapper(stock):
        return
    package = os.path.join(os.path.dirname(tilelang.__file__), "")

    def set_fileline(self: Builder, filename: str, *args: Any) -> None:
        if not filename.startswith(package):
            stock(self, filename, *args)

    Builder.set_fileline = set_fileline


def _name_shapes_of_copies() -> None:
    """Refuse a copy between tiles of different shapes with both shapes and its line."""
    stock = copy_op._normalize_copy_regions
    if _is_wrapper(stock):
        return

    def normalize_copy_regions(src: Any, dst: Any) -> Any:
        try:
            return stock(src, dst)
        except ValueError as error:
            if not (isinstance(src, tirx.Buffer) and isinstance(dst, tirx.Buffer)):
                raise
            sides = [(side.shape, side.name) for side in (src, dst)]
            raise reject("T.copy", *unequal_copy(sides)) from error

    copy_op._normalize_copy_regions = normalize_copy_regions


def _shorten_errors() -> None:
    """Let errors in ``T.prim_func`` show the frames of the program and the message only. TileLang
    compares decorators with ``language.eager.prim_func``."""
    if not hasattr(language.prim_func, "__wrapped__"):
        language.prim_func = language.eager.prim_func = brief_errors(language.prim_func)


def _is_logged(record: logging.LogRecord) -> bool:
    """Return whether TileLang's frontend logs ``record``. For any error it logs the Python code
    that it generates for the program or for one of its tile operations, which explains no error
    of TileWeave."""
    is_refusal = isinstance(sys.exc_info()[1], TileWeaveError) or _lowers_tiles.get()
    return not (is_refusal and record.levelno == logging.CRITICAL and not shows_frames())


def _wrap_nvcc() -> None:
    """Diagnose nvcc when it fails. TVM raises the error of a callback with its own type if that is
    registered."""
    if not hasattr(nvcc.compile_cuda, "__wrapped__"):
        nvcc.compile_cuda = diagnose_failures(nvcc.compile_cuda)
        tvm_ffi.register_error(ToolchainError)


def _is_wrapper(function: Callable[..., Any]) -> bool:
    """Return whether this module defines ``function``, also if it was reloaded since."""
    return function.__module__ == __name__


def _uses_extension(func) -> bool:
    """Return whether ``func`` is compiled for a group, uses a builtin, or a symmetric tensor."""
    return isinstance(func, tirx.PrimFunc) and bool(
        GROUP_SIZE in func.attrs or uses_tileweave(func) or passes.heap_tensors(func)
    )


def _symmetric_names(mod: IRModule) -> set[str]:
    """Return the names of the parameters that are symmetric tensors."""
    functions = [f for f in mod.functions.values() if isinstance(f, tirx.PrimFunc)]
    return {tensor.data.name for f in functions for tensor in passes.heap_tensors(f)}
