"""Hook into TileLang: wrap its CUDA pipeline, its cache key, its call of nvcc and the frontend's
record of lines, and filter its log; nothing else."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import tilelang
import tvm_ffi
from tilelang import tvm
from tilelang.cache.kernel_cache import KernelCache
from tilelang.contrib import nvcc
from tilelang.language import copy_op
from tilelang.language.eager.builder import Builder
from tilelang.transform import PassConfigKey
from tvm import IRModule, tirx
from tvm.ir.instrument import pass_instrument
from tvm.target import Target

from .. import passes
from ..builtins.errors import LanguageError, TileWeaveError, reject, shows_frames
from ..builtins.spec import BUILTINS, builtin_of
from ..passes.device.widen_atomics import SYSTEM_ATOMIC
from ..passes.group.specialize_group import GROUP_SIZE
from ..passes.ir.hold import HOLD
from ..passes.ir.walk import builtins_in, format_expr, uses_tileweave
from ..passes.tile.order_releases import COMPLETE
from .backends import Lower, lower_of_cuda, replace_lower_of_cuda
from .compile import filter_logs
from .fallback import lower_with_fallback
from .headers import include_headers, stamp
from .limits import limits, with_config
from .lower import lowered_call
from .refusals import lower_or_refuse
from .reserved_names import rename_reserved
from .stderr import without_fatal_text
from .toolchain import ToolchainError, diagnosed

_lock = threading.Lock()
_LOWER_TILES = "tl.LowerTileOp"
"""TileLang's pass that lowers tiles to elements."""


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
        _name_lines_of_programs()
        _name_shapes_of_copies()
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
        return registered(_map_functions(passes.downgrade_ir, mod), target)

    def lower(mod: IRModule, target: Target) -> IRModule:
        if not any(_uses_extension(f) for f in mod.functions.values()):
            return stock(mod, target)
        with limits(mod, target):
            try:
                return lower_with_fallback(extended, mod, target)
            except TileWeaveError:
                raise
            except Exception:
                return extended(mod, target, explains=True)

    def extended(mod: IRModule, target: Target, explains: bool = False) -> IRModule:
        symmetric = _symmetric_names(mod)
        mod = _run_target_passes(mod, target)
        mod = passes.run(passes.TILE_PASSES, mod)
        mod = passes.run(passes.SPECIALIZED_PASSES, mod, target, all_functions=True)
        mod = passes.run(passes.INDEX_PASSES, mod, all_functions=True)
        tile, calls = passes.number_builtins(mod)
        lower_tiles = functools.partial(_lower_tiles, stock, target)
        mod = lower_or_refuse(lower_tiles, tile, target) if explains else lower_tiles(tile)
        mod = passes.run(passes.BARRIER_PASSES, mod, all_functions=True)
        mod = passes.run(passes.ATOMIC_PASSES, mod, symmetric, all_functions=True)
        mod = passes.run(passes.DEVICE_PASSES, mod)
        mod = passes.run(passes.FENCE_PASSES, mod, symmetric)
        mod = passes.record_events(mod, calls, tile, symmetric)
        mod = passes.verify_builtins(mod, calls, tile)
        return include_headers(rename_reserved(mod))

    replace_lower_of_cuda(lower)


def _lower_tiles(stock: Lower, target: Target, mod: IRModule) -> IRModule:
    with _without_shared_reuse(mod), _inner_passes(), without_fatal_text():
        return stock(mod, target)


def _run_target_passes(mod: IRModule, target: Target) -> IRModule:
    """Run the first passes, which need the target."""
    mod = passes.run(passes.RELEASE_PASSES, mod, target, all_functions=True)
    return passes.run(passes.TARGET_PASSES, mod, target)


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
            _run_target_passes(IRModule({str(func.attrs["global_symbol"]): func}), target)
    except LanguageError as error:
        return error
    return None


@pass_instrument
class _Inner:
    """Runs passes between those of TileLang, and keeps their error."""

    error: LanguageError | None = None

    def run_after_pass(self, mod: IRModule, info: Any) -> None:
        if info.name == "tl.ProducerConsumerWarpSpecialized":
            self._change(passes.WARP_PASSES, mod)
        if info.name == "tl.LayoutInference":
            self._run(passes.LAYOUT_PASSES, mod)
        if info.name == _LOWER_TILES:
            self._check(mod)

    def run_before_pass(self, mod: IRModule, info: Any) -> None:
        if info.name == _LOWER_TILES:
            self._change(passes.MARK_PASSES, mod)
            self._tiles = _map_functions(passes.upgrade_ir, mod)
        if info.name == "tl.FlattenBuffer":
            self._change(passes.FLAT_PASSES, mod)

    def _check(self, mod: IRModule) -> None:
        """Compare the lowered functions with those before."""
        for variable, func in list(mod.functions.items()):
            if isinstance(func, tirx.PrimFunc):
                try:
                    func = passes.verify_lowering(func, self._tiles[variable])
                except LanguageError as error:
                    self.error = error
                    raise
                mod.update_func(variable, func)

    def _change(self, table: tuple[passes.Pass, ...], mod: IRModule) -> None:
        """Run the passes of ``table`` in place."""
        for variable, func in self._run(table, mod).functions.items():
            mod.update_func(variable, func)

    def _run(self, table: tuple[passes.Pass, ...], mod: IRModule) -> IRModule:
        try:
            return passes.run(table, mod, all_functions=True)
        except LanguageError as error:
            self.error = error
            raise


@contextlib.contextmanager
def _inner_passes() -> Iterator[None]:
    """Let TileLang lower inside. TVM raises an error of an inner pass with another type."""
    inner = _Inner()
    try:
        with with_config({}, [inner]):
            yield
    except Exception:
        if inner.error is not None:
            raise inner.error from None
        raise


def _map_functions(change: Callable[[tirx.PrimFunc], tirx.PrimFunc], mod: IRModule) -> IRModule:
    functions = {
        n: change(f) if isinstance(f, tirx.PrimFunc) else f for n, f in mod.functions.items()
    }
    return IRModule(functions, attrs=mod.attrs)


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
            sides = (
                f"{' x '.join(map(format_expr, b.shape))} elements of {b.name}" for b in (src, dst)
            )
            raise reject(
                "T.copy", f"copies {' to '.join(sides)}", "equal extents on both sides"
            ) from error

    copy_op._normalize_copy_regions = normalize_copy_regions


def _is_logged(record: logging.LogRecord) -> bool:
    """Return whether TileLang's frontend logs ``record``. For any error it logs the Python code
    that it generates for the program, which explains no error of TileWeave."""
    is_refusal = isinstance(sys.exc_info()[1], TileWeaveError) and not shows_frames()
    return not (is_refusal and record.levelno == logging.CRITICAL)


def _wrap_nvcc() -> None:
    """Diagnose nvcc when it fails. TVM raises the error of a callback with its own type if that is
    registered."""
    if not hasattr(nvcc.compile_cuda, "__wrapped__"):
        nvcc.compile_cuda = diagnosed(nvcc.compile_cuda)
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
