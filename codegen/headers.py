"""Device headers: the include line of a kernel, and the stamp that recompiles it after an edit."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

from tvm import IRModule, tirx

from ..passes.ir.walk import uses_tileweave

_ROOT = Path(__file__).resolve().parent
INCLUDE_DIR = _ROOT / "include"
"""Include path for nvcc, for direct use: ``#include <tileweave/tileweave.cuh>``."""


def include_headers(mod: IRModule) -> IRModule:
    """Add the include line of the headers to every device function that calls a builtin.

    Before: the function's body
    After:  the same body in a ``pragma_import_c``, which TileLang prints above the kernel
    """
    functions = {}
    for name, func in mod.functions.items():
        if isinstance(func, tirx.PrimFunc) and uses_tileweave(func) and is_device(func):
            line = f'#include "{INCLUDE_DIR / "tileweave" / "tileweave.cuh"}" // {stamp()}\n'
            body = tirx.AttrStmt(
                tirx.StringImm("tileweave"), "pragma_import_c", tirx.StringImm(line), func.body
            )
            func = func.with_body(body)
        functions[name] = func
    return IRModule(functions, attrs=mod.attrs)


def stamp() -> str:
    """Return a hash of all files that affect a kernel: headers, builtins, passes and codegen."""
    files = [*INCLUDE_DIR.rglob("*.cuh")]
    for package in ("builtins", "passes", "codegen"):
        files += (_ROOT.parent / package).rglob("*.py")
    return _hash(tuple(sorted((str(f), f.stat().st_mtime_ns, f.stat().st_size) for f in files)))


@cache
def _hash(files: tuple[tuple[str, int, int], ...]) -> str:
    digest = hashlib.sha256()
    for path, _, _ in files:
        digest.update(Path(path).read_bytes())
    return digest.hexdigest()[:16]


def is_device(func: tirx.PrimFunc) -> bool:
    return "calling_conv" in func.attrs and int(func.attrs["calling_conv"]) == 2
