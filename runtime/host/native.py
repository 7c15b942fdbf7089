"""Build and load the native part, ``src``: it enqueues all operations of a call in one C++ call,
and binds the values of the session at each launch.

It is compiled once per machine, next to TileLang's kernels. If it cannot be compiled, which a
warning reports, or if ``TILEWEAVE_NATIVE`` is 0, Python does the same work, which is slower.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import subprocess
import tempfile
import warnings
from contextlib import suppress
from functools import cache
from pathlib import Path
from threading import Thread

import tvm_ffi

from ...builtins.errors import TileWeaveError
from .cache_folder import cache_folder, locked, require_private, writable_folder

SOURCES = sorted((Path(__file__).parents[1] / "src").glob("*.cc"))
_VARIABLE = "TILEWEAVE_NATIVE"
_DIGEST_BYTES = hashlib.sha256().digest_size


def library() -> tvm_ffi.Module | None:
    """Return the native part; None if Python does its work."""
    return _library() if wanted() else None


def wanted() -> bool:
    """Return whether the environment allows the native part.

    Raises:
        TileWeaveError: the variable is neither 0 nor 1.
    """
    value = os.environ.get(_VARIABLE, "1")
    if value not in ("0", "1"):
        raise TileWeaveError(f"{_VARIABLE}={value!r}; expected 0 or 1")
    return value == "1"


def build_ahead() -> None:
    """Compile the native part while this thread goes on, if it is wanted and not loaded yet.
    ``library`` waits for it, and reports what fails."""
    if wanted() and not _library.cache_info().currsize:
        Thread(target=_try_to_build).start()


def _try_to_build() -> None:
    with suppress(OSError, TileWeaveError):
        built()


@cache
def _library() -> tvm_ffi.Module | None:
    """Return the compiled module; None, with a warning, if it cannot be compiled."""
    try:
        return tvm_ffi.load_module(str(built()))
    except (OSError, RuntimeError, TileWeaveError) as error:
        warnings.warn(
            "tileweave: calls of plans and operators are enqueued from Python, which is slower: "
            f"{error} ({_VARIABLE}=0 silences this warning)",
            stacklevel=2,
        )
        return None


def built() -> Path:
    """Return the compiled library; compile it if the cache contains none, or a damaged one.

    Raises:
        OSError: the cache cannot be written.
        TileWeaveError: there is no compiler, compiling fails, or every user may write the cache.
    """
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        raise TileWeaveError("no C++ compiler; expected one of C++17 as c++ or in CXX")
    lib = Path(tvm_ffi.libinfo.find_libtvm_ffi()).parent
    includes = {tvm_ffi.libinfo.find_include_path(), tvm_ffi.libinfo.find_dlpack_include_path()}
    flags = ["-std=c++17", "-O2", "-shared", "-fPIC", *(f"-I{i}" for i in sorted(includes))]
    # nodelete: functions may outlive the module, as Python destroys objects in no fixed order.
    link = [f"-L{lib}", f"-Wl,-rpath,{lib},-z,nodelete", "-ltvm_ffi", "-ldl"]
    try:
        arguments = shlex.split(compiler)
    except ValueError as error:
        raise TileWeaveError(f"CXX={compiler!r}: {error}") from None
    command = [*arguments, *flags, *map(str, SOURCES), *link]
    inputs = "\0".join([*command, tvm_ffi.__version__, *(source.read_text() for source in SOURCES)])
    stamp = hashlib.sha256(inputs.encode()).hexdigest()[:16]
    path = cache_folder() / f"native-{stamp}.so"
    require_private(path.parent.parent)
    require_private(path.parent)
    if not is_intact(path):
        folder = writable_folder()
        with locked(folder), tempfile.TemporaryDirectory(dir=folder) as temporary:
            if is_intact(path):  # another process has compiled it meanwhile
                return path
            output = Path(temporary) / path.name
            result = subprocess.run([*command, "-o", str(output)], capture_output=True, text=True)
            if result.returncode != 0:
                raise TileWeaveError(
                    f"{compiler} refuses the native part: {result.stderr[:2000]}; expected a C++17 "
                    "compiler as c++ or in CXX"
                )
            _seal(output)
            output.replace(path)
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
    """Append the digest of a library to it, where the loader ignores it."""
    digest = hashlib.sha256(path.read_bytes()).digest()
    with path.open("ab") as file:
        file.write(digest)
