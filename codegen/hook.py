"""The one place where TileWeave touches TileLang: around its CUDA pipeline, and its cache key."""

from __future__ import annotations

import dataclasses
import hashlib
import threading

from tilelang.backend import module as tilelang_backends
from tilelang.backend.pass_pipeline import PassPipeline
from tilelang.cache.kernel_cache import KernelCache
from tvm import IRModule, tirx
from tvm.target import Target

from .. import passes
from ..builtins.declare import BUILTINS, lowered_call
from ..passes.walk import uses_tileweave
from .include import include_headers, stamp

_lock = threading.Lock()
_active = False


def activate() -> None:
    """Teach the TileLang in this process our builtins. Calling it again does nothing."""
    global _active
    with _lock:
        if _active:
            return
        _register_lowerings()
        _wrap_pipeline()
        _wrap_cache_key()
        _active = True


def _register_lowerings() -> None:
    from tilelang import tvm

    for name in BUILTINS:
        tvm.ir.register_intrin_lowering(name, "cuda", f=lowered_call)
    tvm.ir.register_intrin_lowering(
        "tileweave.complete_bulk_stores",
        "cuda",
        f=lambda call: tirx.call_extern(call.dtype, "tw::complete_bulk_stores"),
    )


def _wrap_pipeline() -> None:
    stock = tilelang_backends._BACKENDS["cuda"]
    stock_pipeline = stock.pipelines["cuda"]

    def lower(mod: IRModule, target: Target) -> IRModule:
        if not any(_ours(f) for f in mod.functions.values()):
            return stock_pipeline._lower(mod, target)
        mod = passes.run(passes.TARGET_PASSES, mod, target)
        mod = passes.run(passes.TILE_PASSES, mod)
        mod = stock_pipeline._lower(mod, target)
        mod = passes.run(passes.DEVICE_PASSES, mod)
        return include_headers(mod)

    pipelines = {**stock.pipelines, "cuda": PassPipeline(stock_pipeline.name, lower)}
    tilelang_backends._BACKENDS["cuda"] = dataclasses.replace(stock, pipelines=pipelines)


def _wrap_cache_key() -> None:
    """TileLang's kernel cache sees the program and its options: add our headers and passes."""
    stock = KernelCache._generate_key

    def key(self, func, *args, **kwargs) -> str:
        found = stock(self, func, *args, **kwargs)
        return hashlib.sha256(f"{found}{stamp()}".encode()).hexdigest() if _ours(func) else found

    KernelCache._generate_key = key


def _ours(func) -> bool:
    return isinstance(func, tirx.PrimFunc) and uses_tileweave(func)
