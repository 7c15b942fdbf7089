"""``tw.emit``: compile a program to the text of a compilation stage, without a GPU."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any, Literal

import tilelang
from tilelang import tvm
from tilelang.contrib import nvcc
from tilelang.jit import JITImpl
from tvm import tirx

from . import passes
from .builtins.errors import TileWeaveError, brief_errors, not_a_program
from .codegen.names import names_kept
from .passes.ir.marks import without_marks
from .passes.ir.origin import without_origins
from .passes.ir.sizes import MAX_RANKS
from .runtime.kernel.configured import program_of

Stage = Literal["tile", "device", "cuda", "ptx"]
STAGES = ("tile", "device", "cuda", "ptx")
EMIT_HEAP_STRIDE = 1 << 30


@brief_errors
def emit(
    func: Any,
    stage: Stage = "cuda",
    arch: str = "sm_90a",
    world_size: int = 4,
    pass_configs: Mapping[str, Any] | None = None,
    sizes: Mapping[str, int] | None = None,
) -> str:
    """Return the code that ``func`` is compiled to. Needs no GPU; ``ptx`` needs nvcc.

    Args:
        func: a ``@T.prim_func``, a kernel of TileLang, or a function of ``tilelang.jit``.
        stage: ``tile`` (after the tile passes of TileWeave), ``device`` (after TileLang's pipeline
            and the device passes of TileWeave), ``cuda`` (the input of nvcc) or ``ptx``.
        arch: ``sm_80``, ``sm_90a``, ``sm_100a``, ...
        world_size: ranks of the group.
        pass_configs: options of TileLang and TileWeave; see ``tw.compile``.
        sizes: sizes of the dynamic extents by name, for a program that is compiled separately for
            each set of sizes; or the arguments of a function of ``tilelang.jit``.

    Raises:
        TileWeaveError: ``func`` is no PrimFunc; the stage, the architecture or a size is unknown; a
            size is missing; or there is no nvcc.
    """
    if stage not in STAGES:
        raise TileWeaveError(f"emit: stage={stage!r}; expected {' or '.join(map(repr, STAGES))}")
    arguments, extents = (sizes, None) if isinstance(func, JITImpl) else (None, sizes)
    program = program_of("emit", func, arguments)
    if not isinstance(program, tirx.PrimFunc):
        raise not_a_program("emit", func)
    require_group("emit", world_size, arch)
    if stage == "ptx":
        _require_nvcc()
    func, stock = passes.split_options(program, pass_configs or {})
    func = passes.with_sizes(func, extents or {})
    mod = tvm.IRModule({func.attrs["global_symbol"]: func})
    mod = passes.run_group(mod, world_size, EMIT_HEAP_STRIDE)
    if stage == "tile":
        return _script(passes.run(("tile", "entry"), mod, target=_target(arch), calls={}))
    (program,) = mod.functions.values()
    artifact = lowered(program, arch, stock)
    if stage == "device":
        return _script(artifact.device_mod)
    if stage == "cuda":
        return artifact.kernel_source
    with _target(arch):
        return nvcc.get_ptx_from_source(artifact.kernel_source)


def _script(mod: tvm.IRModule) -> str:
    functions = {
        name: _printed(func) if isinstance(func, tirx.PrimFunc) else func
        for name, func in mod.functions.items()
    }
    return tvm.IRModule(functions, attrs=mod.attrs).script()


def _printed(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Return ``func`` without what only passes read."""
    return without_origins(func.with_body(without_marks(func.body)))


def lowered(func: tirx.PrimFunc, arch: str, configs: Mapping[str, Any]) -> Any:
    """Lower ``func`` with TileLang and the device passes, without nvcc.

    Args:
        configs: ``pass_configs`` of TileLang, without those of TileWeave.
    """
    target = _target(arch)
    context = tvm.transform.PassContext(config=dict(configs)) if configs else nullcontext()
    with target, context, names_kept(func):
        return tilelang.lower(func, target=target)


def _target(arch: str) -> Any:
    return tvm.target.Target({"kind": "cuda", "arch": arch})


def require_group(op: str, world_size: int, arch: str) -> None:
    """Check the group that ``op`` compiles for.

    Raises:
        TileWeaveError: the number of ranks is unsupported, or the architecture is unknown.
    """
    if type(world_size) is not int or not 1 <= world_size <= MAX_RANKS:
        raise TileWeaveError(
            f"{op}: world_size={world_size!r}; expected at least 1, and at most {MAX_RANKS}"
        )
    if not isinstance(arch, str) or not re.fullmatch(r"sm_\d{2,3}[af]?", arch):
        raise TileWeaveError(f"{op}: arch={arch!r}; expected 'sm_80', 'sm_90a', 'sm_100a', ...")


def _require_nvcc() -> None:
    compiler = nvcc.CUDA_HOME and shutil.which(nvcc.get_nvcc_compiler())
    if not compiler:
        place = f"CUDA_HOME={nvcc.CUDA_HOME}" if nvcc.CUDA_HOME else "PATH"
        raise TileWeaveError(f"emit: no nvcc in {place}; expected one for stage='ptx'")
