"""Load the programs of a Python file."""

from __future__ import annotations

import argparse
import importlib.util
import json
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from tilelang import tvm
from tilelang.jit import JITImpl, JITKernel

from ..builtins.errors import TileWeaveError
from ..interpreter import interpret
from ..runtime import Plan
from ..runtime.kernel.configured import program_of
from .builders import builders_in

PrimFunc = tvm.tirx.PrimFunc
PLANS_AND_KERNELS = Plan, PrimFunc
_KINDS = {PrimFunc: "T.prim_func", Plan: "tw.plan"}


def add_program(parser: argparse.ArgumentParser, kinds: tuple[type, ...] = (PrimFunc,)) -> None:
    """Add the argument that selects the programs of a file."""
    names = " and ".join(f"{_KINDS[kind]}s" for kind in kinds)
    parser.add_argument(
        "program",
        metavar="FILE[:NAME]",
        help=f"all module-level {names} of FILE, or only NAME",
    )


def load_programs(
    options: argparse.Namespace, kinds: tuple[type, ...] = (PrimFunc,)
) -> dict[str, Any]:
    """Return the module-level programs of ``FILE``, or only ``FILE:NAME``.

    A kernel of TileLang, and a function of ``tilelang.jit`` with the arguments of ``--set``, become
    T.prim_funcs; the functions only if they are named, or if there are no other programs.
    ``options.module`` becomes the module; ``inputs_of`` calls its function ``inputs``.

    Args:
        kinds: accepted types. The programs are returned in this order.
    """
    path, name = split_location(options.program)
    if not os.path.isfile(path):  # Path.is_file raises an error for a name that is too long
        raise TileWeaveError(
            f"{options.command}: there is no file {path}; expected FILE or FILE:NAME"
        )
    with interpret():  # kernels are not compiled
        options.module = load_module(options.command, path)
    programs = _programs_in(options.module, kinds) or _functions_in(options.module)
    function = getattr(options.module, name or "", None)
    if isinstance(function, JITImpl):
        programs = {name: function}
    if not programs or (name and name not in programs):
        legal_kinds = " or ".join(_KINDS[kind] for kind in kinds)
        missing = f"{path} has no {legal_kinds}{f' {name}' if name else ''}"
        raise TileWeaveError(
            f"{options.command}: {missing}; expected {_legal(path, name, programs)}"
        )
    programs = {name: programs[name]} if name else programs
    return {name: _program(program, options) for name, program in programs.items()}


def _program(program: Any, options: argparse.Namespace) -> Any:
    """Return the program of a kernel or a function. ``--set`` loses the function's arguments."""
    arguments = {}
    if isinstance(program, JITImpl):
        pairs = [pair.partition("=")[::2] for pair in getattr(options, "set", [])]
        tensors = program.func.tensor_args
        names = dict(pairs) if tensors else program.signature.parameters
        arguments = {name: json_or_text(value) for name, value in pairs if name in names}
        options.set = [f"{name}={value}" for name, value in pairs if name not in names]
    return program_of(options.command, program, arguments)


def json_or_text(value: str) -> Any:
    """Return a value of the command line, which is JSON or plain text."""
    try:
        return json.loads(value)
    except json.JSONDecodeError:
        return value


def split_location(location: str) -> tuple[Path, str]:
    """Split ``FILE[:NAME]`` into the path and the name, which may be empty."""
    if os.path.isfile(location):
        return Path(location), ""
    file, _, name = location.rpartition(":")
    return (Path(file), name) if file else (Path(location), "")


def _programs_in(module: ModuleType, kinds: tuple[type, ...]) -> dict[str, Any]:
    """Return the programs of a module by name, without aliases."""
    programs: dict[str, Any] = {}
    for kind in kinds:
        for name, value in vars(module).items():
            is_alias = any(value is program for program in programs.values())
            is_kernel = kind is PrimFunc and isinstance(value, JITKernel)
            if (isinstance(value, kind) or is_kernel) and not is_alias:
                programs[name] = value
    return programs


def _functions_in(module: ModuleType) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if isinstance(value, JITImpl)}


def _legal(path: Path, name: str, programs: dict[str, Any]) -> str:
    """Return the legal choices: programs, or results of functions that build them."""
    builders = builders_in(path)
    if name in builders:
        return f"the result of this function at module level: example = {name}(...)"
    if programs:
        return " or ".join(programs)
    if not builders:
        return "one at module level"
    calls = " or ".join(f"example = {builder}(...)" for builder in builders)
    return f"one at module level, so that a builder must be called there: {calls}"


def load_function(option: str, location: str) -> Callable[..., Any]:
    """Return the function of a file, given as ``FILE:FUNCTION``."""
    path, name = split_location(location)
    function = getattr(load_module(option, path), name, None) if os.path.isfile(path) else None
    if not callable(function):
        raise TileWeaveError(f"{option} {location}; expected FILE:FUNCTION")
    return function


def load_module(command: str, path: Path) -> ModuleType:
    """Run a Python file as a module that can import its neighbors."""
    spec = importlib.util.spec_from_file_location(path.stem.replace("-", "_"), path)
    if spec is None or spec.loader is None:
        raise TileWeaveError(
            f"{command}: {path} is no Python file; expected a name that ends in .py"
        )
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(spec.name, module)
    sys.path.insert(0, str(path.resolve().parent))
    # TileLang logs the Python code that it generates for a program it cannot trace. The error that
    # follows contains what the user needs.
    logging.getLogger("tilelang.language.eager.builder").disabled = True
    spec.loader.exec_module(module)
    return module
