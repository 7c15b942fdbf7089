"""Replacement of TileLang's CUDA pipeline, whose registry differs between releases."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from tilelang.backend.pass_pipeline import PassPipeline
from tvm import IRModule
from tvm.target import Target

Lower = Callable[[IRModule, Target], IRModule]

try:  # TileLang 0.1.14 and later
    from tilelang.backend.module import _BACKENDS
except ImportError:
    from tilelang.backend.pass_pipeline import get_pipeline, register_pipeline

    def lower_of_cuda() -> Lower:
        """Return the function that lowers modules for CUDA."""
        return get_pipeline("cuda")._lower

    def replace_lower_of_cuda(lower: Lower) -> None:
        """Let TileLang lower modules for CUDA by ``lower``."""
        register_pipeline(PassPipeline("cuda", lower))

else:

    def lower_of_cuda() -> Lower:
        """Return the function that lowers modules for CUDA."""
        return _BACKENDS["cuda"].pipelines["cuda"]._lower

    def replace_lower_of_cuda(lower: Lower) -> None:
        """Let TileLang lower modules for CUDA by ``lower``."""
        stock = _BACKENDS["cuda"]
        pipelines = {**stock.pipelines, "cuda": PassPipeline("cuda", lower)}
        _BACKENDS["cuda"] = dataclasses.replace(stock, pipelines=pipelines)
