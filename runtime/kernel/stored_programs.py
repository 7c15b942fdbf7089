"""Programs of compiled kernels on disk, by form, so that a new process finds these kernels.

TileLang's cache finds a kernel by the text of its program. The text of a shared program depends on
the sizes for which it was created. A new process reads this text instead of inferring programs of
similar sizes until it has the text again.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Hashable, Iterable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import tilelang
from tvm_ffi.serialization import from_json_graph_str, to_json_graph_str

from ...builtins.errors import TileWeaveError
from ...codegen.compile import target
from ...codegen.headers import stamp
from ..host.cache_folder import cache_folder, require_private_cache, writable_folder
from . import shared_program
from .shared_program import SharedProgram


def key_of(form: Hashable) -> str:
    """Return the identity on disk of a form, for this version of TileLang and this GPU."""
    return _digest(repr((form, _environment())))


@cache
def _environment() -> tuple[Any, ...]:
    """Return what programs and their kernels depend on besides the form, sources included."""
    source = Path(shared_program.__file__).read_text()
    with suppress(ValueError):  # no GPU
        return tilelang.__version__, target(), stamp(), source
    return tilelang.__version__, stamp(), source


def save(key: str, program: SharedProgram) -> None:
    """Store the program of a compiled kernel. A cache that cannot be written stays as it is."""
    lifted = to_json_graph_str(program.program)
    text = json.dumps({"program": lifted, "integers": program.integers, "places": program.places})
    with suppress(OSError, TileWeaveError):
        with tempfile.TemporaryDirectory(dir=writable_folder()) as folder:
            written = Path(folder) / "program.json"
            written.write_text(text)
            written.replace(cache_folder() / f"{_name(key, text)}.json")


def load(keys: Iterable[str]) -> dict[str, dict[str, SharedProgram]]:
    """Return the stored programs of forms, by key and name; equal names mean equal programs.

    Ignored are files with other content than ``save`` has written, and a cache that every user may
    write.
    """
    programs: dict[str, dict[str, SharedProgram]] = {key: {} for key in keys}
    with suppress(OSError, TileWeaveError):
        require_private_cache()
        for path in sorted(cache_folder().glob("program-*-*.json")):
            key = path.stem.split("-")[1]
            if key in programs:
                with suppress(Exception):
                    text = path.read_text()
                    if path.stem == _name(key, text):
                        programs[key][path.stem] = _program(**json.loads(text))
    return programs


def note(name: str) -> None:
    """Note for later processes that all kernels of a name are compiled. A cache that cannot be
    written stays as it is."""
    with suppress(OSError, TileWeaveError):
        writable_folder()
        _noted(name).touch()


def is_noted(name: str) -> bool:
    """Return whether a process has noted a name."""
    with suppress(OSError, TileWeaveError):
        require_private_cache()
        return _noted(name).exists()
    return False


def _noted(name: str) -> Path:
    return cache_folder() / f"noted-{key_of(name)}"


def _program(program: str, integers: list[int], places: list[list[int]]) -> SharedProgram:
    return SharedProgram(from_json_graph_str(program), tuple(integers), tuple(map(tuple, places)))


def _name(key: str, text: str) -> str:
    return f"program-{key}-{_digest(text)}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]
