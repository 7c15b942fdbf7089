"""The wheel that ``pip wheel .`` builds: its files, metadata and entry point."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from configparser import ConfigParser
from email.message import Message
from email.parser import HeaderParser
from importlib.metadata import EntryPoint
from pathlib import Path
from zipfile import ZipFile

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import tileweave
from tileweave.integrations import engines

CHECKOUT = Path(__file__).resolve().parents[2]
PACKAGES = ("builtins", "codegen", "examples", "ops", "passes", "runtime", "simulator", "tileweave")
INFO = f"tileweave-{tileweave.__version__}.dist-info"
BUILD_BACKEND = "scikit-build-core"
DISTRIBUTIONS = {"tvm_ffi": "apache-tvm-ffi", "cuda": "cuda-bindings", "pynvml": "nvidia-ml-py"}
"""Modules whose distribution has another name."""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Iterator[ZipFile]:
    """Build the wheel in an environment of its own, as users do."""
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--no-deps"]
    command = [*pip, "--wheel-dir", str(folder), str(CHECKOUT)]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    built = subprocess.run(command, capture_output=True, text=True, env=environment)
    if f"No matching distribution found for {BUILD_BACKEND}" in built.stderr:
        pytest.skip(f"pip cannot download {BUILD_BACKEND}: no wheel was built")
    assert built.returncode == 0, built.stderr
    (path,) = folder.iterdir()
    assert path.name == f"tileweave-{tileweave.__version__}-py3-none-any.whl"
    with ZipFile(path) as file:
        yield file


@pytest.fixture(scope="module")
def metadata(wheel) -> Message:
    return HeaderParser().parsestr(wheel.read(f"{INFO}/METADATA").decode())


def installed_name(path: Path) -> str:
    """Return the name that a file of the checkout has in the wheel."""
    relative = path.relative_to(CHECKOUT).as_posix()
    return relative if relative.startswith("tileweave/") else f"tileweave/{relative}"


def test_files_of_the_wheel_are_those_of_the_packages(wheel):
    sources = {
        installed_name(path)
        for package in PACKAGES
        for path in (CHECKOUT / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    of_pip = {f"{INFO}/{name}" for name in ("METADATA", "WHEEL", "RECORD", "entry_points.txt")}
    assert set(wheel.namelist()) == sources | of_pip | {f"{INFO}/licenses/LICENSE"}


def test_the_wheel_has_what_is_no_module(wheel):
    names = wheel.namelist()
    assert "tileweave/py.typed" in names
    assert len([n for n in names if re.fullmatch(r"tileweave/codegen/include/.*\.cuh", n)]) > 10
    assert {"tileweave/runtime/src/bind.cc", "tileweave/runtime/src/enqueue.cc"} <= {*names}
    assert "tileweave/runtime/trace/page.html" in names
    assert [n for n in names if re.search(r"(^|/)(lit_)?tests?(/|_)|\.so$|\.pyc$", n)] == []


def test_entry_points_exist(wheel):
    parser = ConfigParser()
    parser.read_string(wheel.read(f"{INFO}/entry_points.txt").decode())
    loaded = {
        group: EntryPoint("tileweave", parser[group]["tileweave"], group).load()
        for group in parser.sections()
    }
    assert loaded == {
        "console_scripts": tileweave.cli.main.main,
        "vllm.general_plugins": engines.vllm,
        "sglang.srt.plugins": engines.sglang,
    }


def test_metadata_is_complete(metadata):
    assert metadata["Version"] == tileweave.__version__
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert metadata.get_payload().strip() == (CHECKOUT / "README.md").read_text().strip()
    assert all(metadata[field] for field in ("Summary", "Author", "Keywords", "Requires-Python"))
    assert "Typing :: Typed" in metadata.get_all("Classifier")
    assert set(metadata.get_all("Provides-Extra")) == {"docs", "gpu", "plot"}


def imported(source: str) -> set[str]:
    """Return the top-level names of the absolute imports of a module."""
    nodes = list(ast.walk(ast.parse(source)))
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module for node in nodes if isinstance(node, ast.ImportFrom) and not node.level]
    return {name.partition(".")[0] for name in names}


def test_each_imported_package_is_a_requirement(wheel, metadata):
    sources = [wheel.read(name).decode() for name in wheel.namelist() if name.endswith(".py")]
    own = {"tileweave", "tvm", *(path.stem for path in (CHECKOUT / "examples").glob("*.py"))}
    users = {"transformers", "torchtitan", "vllm", "sglang"}  # of TileWeave, not requirements
    modules = set().union(*map(imported, sources)) - {*sys.stdlib_module_names} - own - users
    assert {"tilelang", "torch", "cuda", "matplotlib"} <= modules
    requirements = map(Requirement, metadata.get_all("Requires-Dist"))
    needed = {canonicalize_name(requirement.name) for requirement in requirements}
    assert {canonicalize_name(DISTRIBUTIONS.get(m, m)) for m in modules} - needed == set()
