"""The native part, ``src``: all operations of a call enqueued by one call of C++, and what programs
ask their host for at each launch.

It is compiled once a machine, beside TileLang's kernels. Where it cannot be, which a warning says,
or where ``TILEWEAVE_NATIVE`` is 0, Python does the same, which takes the host longer.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import subprocess
import tempfile
import warnings
from functools import cache
from pathlib import Path

import tvm_ffi
from tilelang import env

from ...builtins.errors import TileWeaveError

SOURCES = sorted((Path(__file__).parents[1] / "src").glob("*.cc"))
_VARIABLE = "TILEWEAVE_NATIVE"
_DIGEST_BYTES = hashlib.sha256().digest_size


def library() -> tvm_ffi.Module | None:
    """The native part; None where Python does what it does."""
    return _library() if wanted() else None


def wanted() -> bool:
    """Whether it is to be used at all.

    Raises:
        TileWeaveError: the variable says neither.
    """
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
            "tileweave: calls of plans and operators are enqueued from Python, which takes longer: "
            f"{error}; expected a C++17 compiler as c++ or in CXX ({_VARIABLE}=0 says that it is "
            "meant so)",
            stacklevel=2,
        )
        return None


def built() -> Path:
    """Return the compiled library; compile it if the cache holds none, or a damaged one.

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
    try:
        words = shlex.split(compiler)
    except ValueError as error:
        raise TileWeaveError(f"CXX={compiler!r}: {error}") from None
    command = [*words, *flags, *map(str, SOURCES), *link]
    said = "\0".join([*command, tvm_ffi.__version__, *(source.read_text() for source in SOURCES)])
    stamp = hashlib.sha256(said.encode()).hexdigest()[:16]
    path = Path(str(env.TILELANG_CACHE_DIR)) / "tileweave" / f"native-{stamp}.so"
    if not is_intact(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        # Several ranks may do so at once: each its own, the last one stays.
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            made = Path(folder) / path.name
            done = subprocess.run([*command, "-o", str(made)], capture_output=True, text=True)
            if done.returncode != 0:
                raise TileWeaveError(f"{compiler} refuses the native part: {done.stderr[:2000]}")
            _seal(made)
            made.replace(path)
    return path


def is_intact(path: Path) -> bool:
    """Return whether a library exists and ends with the digest that `_seal` appended.

    Loading a truncated library ends the process with SIGBUS instead of an error.
    """
    try:
        data = path.read_bytes()
    except OSError:
        return False
    return hashlib.sha256(data[:-_DIGEST_BYTES]).digest() == data[-_DIGEST_BYTES:]


def _seal(path: Path) -> None:
    """Append the digest of a library to it, where the loader ignores it.

    In a file of its own it could belong to the library of another rank that compiles now.
    """
    digest = hashlib.sha256(path.read_bytes()).digest()
    with path.open("ab") as file:
        file.write(digest)
