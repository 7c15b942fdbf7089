"""TileWeave: TileLang kernels that compute and communicate across GPUs.

``import tileweave as tw`` activates the plugin in the installed TileLang. It changes no file, and a
kernel without TileWeave builtins compiles as before.
"""

from __future__ import annotations

import os as _os
from importlib import import_module as _import_module
from pathlib import Path as _Path
from typing import TYPE_CHECKING as _TYPE_CHECKING
from warnings import warn as _warn

# A checkout needs only PYTHONPATH=.: its sibling folders become tileweave.builtins and so on.
_checkout = _Path(__file__).resolve().parent.parent
if (_checkout / "pyproject.toml").is_file() and (_checkout / "builtins").is_dir():
    __path__.append(str(_checkout))

from . import language  # noqa: E402
from .builtins.errors import LanguageError, SyncWarning, TileWeaveError  # noqa: E402
from .builtins.versions import __version__ as __version__  # noqa: E402
from .codegen.hook import activate as _activate  # noqa: E402
from .emit import emit  # noqa: E402
from .explain.explain import explain  # noqa: E402
from .explain.explanation import Explanation  # noqa: E402
from .jit import jit  # noqa: E402
from .runtime import (  # noqa: E402
    DeadlockError,
    Plan,
    PlanBuilder,
    SymmetricTensor,
    barrier,
    compile,
    finalize,
    init,
    plan,
    rank,
    stats,
    symmetric,
    world_size,
)

if _TYPE_CHECKING:  # at run time __getattr__ imports them
    from .interpreter import interpret
    from .ops import prepare, tune
    from .runtime.trace.recording import trace
    from .simulator import (
        Debugger,
        SimulationError,
        SimulationWarning,
        mutate,
        simulate,
        stand_in,
        validate,
    )

_activate()

__all__ = [
    "DeadlockError",
    "Debugger",
    "Explanation",
    "LanguageError",
    "Plan",
    "PlanBuilder",
    "SimulationError",
    "SimulationWarning",
    "SymmetricTensor",
    "SyncWarning",
    "TileWeaveError",
    "barrier",
    "compile",
    "emit",
    "explain",
    "finalize",
    "init",
    "interpret",
    "jit",
    "language",
    "mutate",
    "plan",
    "prepare",
    "rank",
    "simulate",
    "stand_in",
    "stats",
    "symmetric",
    "trace",
    "tune",
    "validate",
    "world_size",
]


_LAZY = {
    "Debugger": ".simulator",
    "SimulationError": ".simulator",
    "SimulationWarning": ".simulator",
    "interpret": ".interpreter",
    "mutate": ".simulator",
    "prepare": ".ops",
    "simulate": ".simulator",
    "stand_in": ".simulator",
    "trace": ".runtime.trace.recording",
    "tune": ".ops",
    "validate": ".simulator",
}
"""Names whose modules are slow to import -> the module."""


_RENAMED = {"Steps": "PlanBuilder"}
"""Former names, which work until the next release."""
_REMOVED = dict.fromkeys(
    ("MeshBuilder", "MeshPlan", "mesh_plan"), "a tw.plan for each group, see Plan.on"
)
"""Names that no longer exist -> what to use instead."""


def __getattr__(name: str):
    """Import the simulator, the recorder or the operators when one of their names is used."""
    if name in _RENAMED:
        message = f"tileweave.{name} is deprecated; use tileweave.{_RENAMED[name]}"
        _warn(message, DeprecationWarning, stacklevel=2)
        return globals()[_RENAMED[name]]
    if name in _LAZY:
        return getattr(_import_module(_LAZY[name], __name__), name)
    instead = f"; expected {_REMOVED[name]}" if name in _REMOVED else ""
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}{instead}")


def __dir__() -> list[str]:
    """List all names, including lazy ones before their first use."""
    return sorted({*globals(), *_LAZY})


if _os.environ.get("TILEWEAVE_INTERPRET", "0") != "0":
    _import_module(".cpu_devices", __name__).interpret_process()
