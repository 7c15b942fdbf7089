"""Diagnosis of nvcc: compile an empty kernel, and name the packages that do not fit."""

from __future__ import annotations

import functools
import shlex
import sys
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from tilelang.contrib import nvcc

from ..builtins.errors import TileWeaveError

NVCC = "nvidia-cuda-nvcc"
PACKAGES = (NVCC, "nvidia-nvvm", "nvidia-cuda-crt", "nvidia-cuda-runtime", "nvidia-cuda-cccl")
"""Packages of a CUDA compiler. Those that nvcc needs are not pinned by its wheel, and TileLang's
headers need the last one."""
DEFAULT_RELEASE = "13.0"
_EMPTY_KERNEL = '#include <cuda/std/cstdint>\nextern "C" __global__ void empty() {}\n'
_ARCH = "sm_80"
_MAX_COLUMNS = 300


class ToolchainError(TileWeaveError):
    """nvcc cannot compile any kernel. The message names what to install."""


@functools.cache
def obstacle(compile_cuda: Callable[..., Any] = nvcc.compile_cuda) -> str:
    """Return why the nvcc that TileLang calls compiles no kernel, with what repairs it; "" if it
    does. An empty kernel is compiled once per process."""
    try:
        compile_cuda(_EMPTY_KERNEL, "cubin", _ARCH, options=nvcc.default_compile_options())
    except Exception as error:
        return f"{nvcc.get_nvcc_compiler()} compiles no kernel ({_reason(error)}){_remedy()}"
    return ""


def diagnose_failures(compile_cuda: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap TileLang's call of nvcc: if it fails for an empty kernel, too, the error says what to
    install."""

    @functools.wraps(compile_cuda)
    def compile_or_diagnose(*args: Any, **kwargs: Any) -> Any:
        try:
            return compile_cuda(*args, **kwargs)
        except Exception:
            if nvcc.CUDA_HOME and (text := obstacle(compile_cuda)):
                raise ToolchainError(f"nvcc: {text}") from None
            raise

    return compile_or_diagnose


def pip_command(release: str = "", packages: Sequence[str] = PACKAGES) -> str:
    """Return the command that installs packages of a CUDA release.

    Args:
        release: such as 13.0; "" for that of torch.
    """
    release = release or _release_of_torch() or DEFAULT_RELEASE
    pins = (shlex.quote(f"{package}=={release}.*") for package in packages)
    return f"{sys.executable} -m pip install {' '.join(pins)}"


def _remedy() -> str:
    """Return what does not fit and what is expected: packages of one CUDA release, if the compiler
    is such a package."""
    if not _is_package():
        return f"; expected a complete CUDA toolkit in {nvcc.CUDA_HOME} and a C++ compiler for it"
    installed = {package: _version_of(package) for package in PACKAGES}
    release, owner = _release(installed[NVCC]), f"{NVCC} {installed[NVCC]}"
    torch_release = _release_of_torch()
    if torch_release.partition(".")[0] == release.partition(".")[0]:
        release, owner = torch_release, "torch"  # which pins its runtime
    others = {p: v for p, v in installed.items() if _release(v) != release}
    if not others:
        return "; expected a C++ compiler that it supports"
    versions = ", ".join(f"{package} is {v or 'not installed'}" for package, v in others.items())
    command = pip_command(release, tuple(others))
    return f": {versions}; expected {release}.* as {owner}: {command}"


def _is_package() -> bool:
    """Return whether TileLang's nvcc is that of the package."""
    try:
        files = metadata.files(NVCC) or ()
    except metadata.PackageNotFoundError:
        return False
    compiler = Path(nvcc.get_nvcc_compiler()).resolve()
    return any(Path(str(f.locate())).resolve() == compiler for f in files if f.name == "nvcc")


def _version_of(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _release(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _release_of_torch() -> str:
    """Return the CUDA release of torch if there is a package of nvcc for it, else ""."""
    import torch

    release = torch.version.cuda or "0"
    return release if int(release.partition(".")[0]) >= 13 else ""


def _reason(error: Exception) -> str:
    """Return the first line of nvcc's output that states an error."""
    _, _, output = str(error).partition("Compilation error:")
    lines = [line.strip() for line in (output or str(error)).splitlines() if line.strip()]
    stated = [line for line in lines if "error" in line or "fatal" in line] or lines
    return stated[0][:_MAX_COLUMNS] if stated else type(error).__name__
