"""An installed wheel has the files of the checkout."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import tileweave
from tileweave.builtins.versions import (
    SUPPORTED_PYTHON,
    SUPPORTED_TILELANG,
    SUPPORTED_TORCH,
    numbers_of,
    unsupported_torch,
)

CHECKOUT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def project() -> dict:
    if sys.version_info < (3, 11):
        import tomli as tomllib
    else:
        import tomllib
    return tomllib.loads((CHECKOUT / "pyproject.toml").read_text())


def test_every_package_folder_is_in_the_wheel(project):
    folders = {"examples", *(p.parent.name for p in CHECKOUT.glob("*/__init__.py"))}
    mapped = project["tool"]["scikit-build"]["wheel"]["packages"]
    assert mapped == {
        "tileweave" if f == "tileweave" else f"tileweave/{f}": f for f in sorted(folders)
    }


def test_versions_agree(project):
    assert project["project"]["version"] == tileweave.__version__
    assert f"VERSION {tileweave.__version__} " in (CHECKOUT / "CMakeLists.txt").read_text()
    assert f"## {tileweave.__version__}" in (CHECKOUT / "CHANGELOG.md").read_text()


def test_tilelang_pins_agree(project):
    oldest, newest = SUPPORTED_TILELANG[0], SUPPORTED_TILELANG[-1]
    *series, last = numbers_of(newest)
    bounds = f"tilelang>={oldest},<{'.'.join(map(str, (*series, last + 1)))}"
    assert [d for d in project["project"]["dependencies"] if d.startswith("tilelang")] == [bounds]
    assert f"tilelang=={newest}" in (CHECKOUT / "requirements.txt").read_text().splitlines()


def test_torch_bounds_agree(project):
    (low, high), after = SUPPORTED_TORCH, SUPPORTED_TORCH[1][1] + 1
    bounds = [f"torch>={low[0]}.{low[1]}{pre},<{high[0]}.{after}" for pre in ("", "a0")]
    assert [d for d in project["project"]["dependencies"] if d.startswith("torch")] == bounds[:1]
    assert bounds[1] in (CHECKOUT / "requirements.txt").read_text().splitlines()
    pins = (CHECKOUT / "constraints.txt").read_text().splitlines()
    (pin,) = [p.removeprefix("torch==") for p in pins if p.startswith("torch==")]
    assert not unsupported_torch(pin)


def test_python_bounds_agree(project):
    (major, oldest), (_, newest) = SUPPORTED_PYTHON
    assert project["project"]["requires-python"] == f">={major}.{oldest},<{major}.{newest + 1}"
    named = [c.rpartition(" :: ")[2] for c in project["project"]["classifiers"] if "3." in c]
    assert named == [f"{major}.{minor}" for minor in range(oldest, newest + 1)]
