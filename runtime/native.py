"""The native part: all operations of a call enqueued by one call of C++, ``src/enqueue.cc``.

It is compiled once a machine, beside TileLang's kernels. Where it cannot be, which a warning says,
or where ``TILEWEAVE_NATIVE`` is 0, Python does the same, which takes the host longer.
"""

from __future__ import annotations

import hashlib
import numbers
import os
import shlex
import shutil
import subprocess
import tempfile
import warnings
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
import tvm_ffi
from tilelang import env

from ..builtins.errors import TileWeaveError
from .operations import KernelLaunch, Operation, Place, RowsCopy

DRIVER = "libcuda.so.1"
SOURCE = Path(__file__).parent / "src" / "enqueue.cc"
_VARIABLE = "TILEWEAVE_NATIVE"


def enqueuer(
    operations: Sequence[Operation], given: Sequence[torch.Tensor]
) -> Callable[..., int] | None:
    """What enqueues ``operations``, given the addresses of a call's tensors; None if only Python
    can. It returns 0, or ``(number of the operation that failed, from 1) << 32 | status``.

    Args:
        given: the tensors of such a call; other calls bring others of their kind.
    """
    launches = [o for o in operations if isinstance(o, KernelLaunch)]
    if not all(isinstance(o.kernel.launch, tvm_ffi.Function) for o in launches):
        return None
    if not _wanted() or (module := _library()) is None:
        return None
    tensors: list[torch.Tensor] = []
    return module.ready(DRIVER, [_encoded(o, given, tensors) for o in operations], *tensors)


def _encoded(
    operation: Operation, given: Sequence[torch.Tensor], tensors: list[torch.Tensor]
) -> tuple:
    """As ``enqueue.cc`` takes it; what it refers to is added to ``tensors``."""
    if isinstance(operation, RowsCopy):
        rows = operation.rows
        return (operation.name, operation.dst, operation.src, rows.count, rows.width,
                rows.dst_pitch, rows.src_pitch, operation.on)  # fmt: skip
    if not isinstance(operation, KernelLaunch):
        return operation.name, *operation.args
    args: list[Any] = []
    for a in operation.args:
        if isinstance(a, (Place, torch.Tensor)):
            index = a.index if isinstance(a, Place) else -1
            args.append((len(tensors), index))
            tensors.append(given[index] if isinstance(a, Place) else a)
        else:
            args.append(int(a) if isinstance(a, numbers.Integral) else float(a))
    return (
        "launch",
        operation.kernel.launch,
        operation.on.cuda_stream,
        operation.on.device.index,
        *args,
    )


def _wanted() -> bool:
    value = os.environ.get(_VARIABLE, "1")
    if value not in ("0", "1"):
        raise TileWeaveError(f"{_VARIABLE}={value!r}; expected 0 or 1")
    return value == "1"


@cache
def _library() -> tvm_ffi.Module | None:
    """The compiled module; None, with a warning, if it cannot be compiled."""
    try:
        return tvm_ffi.load_module(str(built()))
    except (OSError, RuntimeError, TileWeaveError) as error:
        warnings.warn(
            f"tileweave: calls of plans are enqueued from Python, which takes the host longer: "
            f"{error}; expected a C++17 compiler as c++ or in CXX ({_VARIABLE}=0 says that it is "
            "meant so)",
            stacklevel=2,
        )
        return None


def built() -> Path:
    """The compiled library, which is compiled if it is not yet.

    Raises:
        TileWeaveError: there is no compiler, or it refuses.
    """
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        raise TileWeaveError("no C++ compiler")
    lib = Path(tvm_ffi.libinfo.find_libtvm_ffi()).parent
    includes = {tvm_ffi.libinfo.find_include_path(), tvm_ffi.libinfo.find_dlpack_include_path()}
    flags = ["-std=c++17", "-O2", "-shared", "-fPIC", *(f"-I{i}" for i in sorted(includes))]
    # nodelete: what it made may outlive the module, as the end of Python has no order.
    link = [f"-L{lib}", f"-Wl,-rpath,{lib},-z,nodelete", "-ltvm_ffi", "-ldl"]
    command = [*shlex.split(compiler), *flags, str(SOURCE), *link]
    said = "\0".join([*command, tvm_ffi.__version__, SOURCE.read_text()])
    stamp = hashlib.sha256(said.encode()).hexdigest()[:16]
    library = Path(str(env.TILELANG_CACHE_DIR)) / "tileweave" / f"enqueue-{stamp}.so"
    if not library.exists():
        library.parent.mkdir(parents=True, exist_ok=True)
        # Several ranks may do so at once: each its own, the last one stays.
        with tempfile.TemporaryDirectory(dir=library.parent) as folder:
            made = Path(folder) / library.name
            done = subprocess.run([*command, "-o", str(made)], capture_output=True, text=True)
            if done.returncode != 0:
                raise TileWeaveError(f"{compiler} refuses {SOURCE.name}: {done.stderr[:2000]}")
            made.replace(library)
    return library
