"""``make`` uses a CUDA build of torch that its Python has, also in another environment.

No package is downloaded: pip has no index here.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]
CUDA, CPU = "2.13.0+cu130", "2.13.0+cpu"
NVCC = "def get_nvcc_compiler(): return __file__\n"
WHAT = "import torch, editable; print(torch.__version__, torch.__file__, editable.here)"


@pytest.fixture(scope="module")
def parent(tmp_path_factory) -> Path:
    """Create an environment with TileLang and a package that is installed as editable."""
    folder = tmp_path_factory.mktemp("parent")
    venv.create(folder / "env", symlinks=True, with_pip=False)
    install(folder / "env", "tilelang", "0.1.15", {"contrib/nvcc.py": NVCC})
    (folder / "editable").mkdir()
    (folder / "editable" / "editable.py").write_text("here = True\n")
    (packages(folder / "env") / "editable.pth").write_text(f"{folder / 'editable'}\n")
    return folder / "env"


@pytest.fixture
def checkout(tmp_path) -> Path:
    """Copy the files that create the environment, and a package that can be imported."""
    for name in ("Makefile", "constraints.txt", "requirements.txt", "requirements-nvcc.txt"):
        shutil.copy(CHECKOUT / name, tmp_path)
    for name in ("tools/make_venv.py", "builtins/versions.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        if (CHECKOUT / name).exists():
            shutil.copy(CHECKOUT / name, tmp_path / name)
    (tmp_path / "tileweave").mkdir()
    (tmp_path / "tileweave" / "__init__.py").touch()
    return tmp_path


def packages(environment: Path) -> Path:
    return environment / "lib" / "python{}.{}".format(*sys.version_info) / "site-packages"


def install(environment: Path, name: str, release: str, files: dict[str, str]) -> None:
    """Put a package into an environment, as pip leaves it."""
    info = packages(environment) / f"{name}-{release}.dist-info"
    shutil.rmtree(info, ignore_errors=True)
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {release}\n")
    for file, text in {"__init__.py": f"__version__ = {release!r}\n", **files}.items():
        path = packages(environment) / name / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def install_torch(environment: Path, release: str) -> None:
    for info in packages(environment).glob("torch-*.dist-info"):
        shutil.rmtree(info)
    shutil.rmtree(packages(environment) / "torch", ignore_errors=True)
    cuda = "13.0" if "+cu" in release else None
    text = f"__version__ = {release!r}\nfrom . import version\n"
    install(environment, "torch", release, {"__init__.py": text, "version.py": f"cuda = {cuda!r}"})


def run(*command: object, at: Path) -> subprocess.CompletedProcess:
    environment = os.environ | {"PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull}
    environment.pop("PYTHONPATH", None)
    return subprocess.run(
        [*map(str, command)], cwd=at, env=environment, capture_output=True, text=True
    )


def test_torch_of_the_parent_is_used_and_stays(parent, checkout):
    install_torch(parent, CUDA)
    made = run(
        "make", "--no-print-directory", ".venv/ready", f"PYTHON={parent}/bin/python", at=checkout
    )
    assert made.returncode == 0, made.stderr
    assert made.stdout == f"using torch {CUDA} of {parent}\n"
    seen = run(".venv/bin/python", "-c", WHAT, at=checkout)
    torch = packages(parent) / "torch" / "__init__.py"
    assert seen.stdout == f"{CUDA} {torch} True\n", seen.stderr
    pip = (".venv/bin/python", "-m", "pip", "install", "-c", ".venv/constraints.txt")
    bound = next(
        line for line in (checkout / "requirements.txt").read_text().split() if "torch>" in line
    )
    kept = run(*pip, bound, "tilelang==0.1.15", at=checkout)
    assert kept.returncode == 0 and "already satisfied: torch" in kept.stdout, kept.stderr
    newer = run(*pip, "--upgrade", "torch>2.13.1", at=checkout)
    assert newer.returncode != 0 and f"constraint) torch=={CUDA}" in newer.stdout


@pytest.mark.long
def test_a_torch_for_the_cpu_is_not_used(parent, checkout):
    install_torch(parent, CPU)
    made = run(parent / "bin" / "python", "tools/make_venv.py", ".venv", at=checkout)
    assert (made.returncode, made.stdout) == (0, ""), made.stderr
    constraints = (checkout / ".venv" / "constraints.txt").read_text()
    assert constraints == (checkout / "constraints.txt").read_text()
    assert run(".venv/bin/python", "-c", "import torch", at=checkout).returncode != 0


@pytest.mark.parametrize("release", ["2.10.0+cu128", "2.16.0+cu132"])
def test_a_torch_that_is_not_supported_is_not_used(parent, checkout, release):
    install_torch(parent, release)
    ask = "import make_venv; print([make_venv.cuda_torch()])"
    completed = run(parent / "bin" / "python", "-c", ask, at=checkout / "tools")
    why = f"torch is {release}; expected 2.11 to 2.15"
    assert completed.stdout == f"not using this Python's torch: {why}\n['']\n", completed.stderr
