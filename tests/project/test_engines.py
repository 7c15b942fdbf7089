"""TileWeave's requirements and those of engines can be satisfied together.

``engines.json`` has the published metadata of the engines. pip's resolver does not run.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

from tileweave.builtins.versions import SUPPORTED_FFI, SUPPORTED_TILELANG, SUPPORTED_TORCH

ROOT = Path(__file__).resolve().parents[2]
METADATA = json.loads(Path(__file__).with_name("engines.json").read_text())["distributions"]
ENGINES = ("vllm==0.33.0", "sglang==0.5.23", "torchtitan==0.3.0")
CANDIDATES = {
    "torch": [f"2.{minor}.{patch}" for minor in range(9, 17) for patch in (0, 1)],
    "tilelang": [f"0.1.{patch}" for patch in range(9, 18)],
    "apache-tvm-ffi": [f"0.1.{patch}" for patch in range(8, 15)],
    "tqdm": ["4.67.1"],
    "cuda-bindings": ["12.9.4", "13.0.3"],
    "nvidia-ml-py": ["13.580.82"],
}
"""Releases of the packages that TileWeave needs. The names that others need are theirs to solve."""


def own_requirements() -> list[str]:
    """Return the dependencies of pyproject.toml, with the extra ``gpu``."""
    text = (ROOT / "pyproject.toml").read_text()
    blocks = [
        re.search(rf"^{name} = \[(.*?)\]", text, re.S | re.M) for name in ("dependencies", "gpu")
    ]
    return [r for block in blocks for r in re.findall(r'"([^"]+)"', block[1])]


def combined(requirements: list[str]) -> dict[str, SpecifierSet]:
    """Return the specifiers of each package of ``CANDIDATES`` on Linux."""
    specifiers = dict.fromkeys(CANDIDATES, SpecifierSet())
    for requirement in map(Requirement, requirements):
        name = canonicalize_name(requirement.name)
        holds = requirement.marker is None or requirement.marker.evaluate(
            {"platform_system": "Linux", "sys_platform": "linux", "python_version": "3.12"}
        )
        if name in specifiers and holds:
            specifiers[name] &= requirement.specifier
    return specifiers


def solution(requirements: list[str]) -> dict[str, str] | None:
    """Return the newest releases that satisfy all requirements, or None if there are none.

    A TileLang has requirements of its own: they decide among the releases of the others.
    """
    for tilelang in reversed(CANDIDATES["tilelang"]):
        own = METADATA.get(f"tilelang=={tilelang}", {}).get("requires", [])
        specifiers = combined([*requirements, *own, f"tilelang=={tilelang}"])
        found = {
            name: next((r for r in reversed(CANDIDATES[name]) if spec.contains(r)), None)
            for name, spec in specifiers.items()
        }
        if all(found.values()):
            return found
    return None


@pytest.mark.parametrize("engine", ENGINES)
def test_an_engine_and_tileweave(engine):
    found = solution([*METADATA[engine]["requires"], *own_requirements()])
    assert found is not None
    assert found["tilelang"] in SUPPORTED_TILELANG
    assert found["apache-tvm-ffi"] in SUPPORTED_FFI
    low, high = SUPPORTED_TORCH
    assert low <= Version(found["torch"]).release[:2] <= high
    assert SpecifierSet(METADATA[engine]["requires_python"]).contains("3.12")


def test_what_cannot_be_satisfied_is_found():
    vllm = METADATA["vllm==0.33.0"]["requires"]
    assert solution([*vllm, "torch<2.14"]) is None
    assert solution([*vllm, "tilelang==0.1.15"]) is None
    assert solution(["tilelang==0.1.12", "apache-tvm-ffi==0.1.12"]) is None


def test_the_table_of_the_page():
    page = (ROOT / "docs" / "guides" / "versions.md").read_text()
    for engine in ENGINES:
        needed = combined(METADATA[engine]["requires"])
        cells = [str(needed[n]) or "any" for n in ("torch", "tilelang", "apache-tvm-ffi")]
        assert f"| `{engine}` | {' | '.join(cells)} |\n" in page


def test_pyproject_has_the_supported_releases():
    needed = combined(own_requirements())
    for name, supported in (("tilelang", SUPPORTED_TILELANG), ("apache-tvm-ffi", SUPPORTED_FFI)):
        assert [r for r in CANDIDATES[name] if needed[name].contains(r)] == list(supported)
    low, high = SUPPORTED_TORCH
    legal = [r for r in CANDIDATES["torch"] if needed["torch"].contains(r)]
    assert [Version(legal[0]).release[:2], Version(legal[-1]).release[:2]] == [low, high]
