"""Create the environment of `make`: ``python tools/make_venv.py .venv``.

A CUDA build of torch that this Python imports is used, not installed a second time. The environment
then sees all packages of this Python: a ``.pth`` file names its site directories, because
``python -m venv --system-site-packages`` from the Python of an environment names only those of the
Python under it. ``constraints.txt`` in the environment always bounds torch.
"""

from __future__ import annotations

import runpy
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SITE_DIRECTORIES = ("site-packages", "dist-packages")


def main(folder: str) -> None:
    torch = cuda_torch()
    venv.create(folder, clear=True, symlinks=True, with_pip=True)
    constraints = (ROOT / "constraints.txt").read_text()
    if torch:
        print(f"using torch {torch} of {sys.prefix}")
        constraints = with_torch(constraints, torch)
        release = "python{}.{}".format(*sys.version_info)
        packages = Path(folder, "lib", release, "site-packages")
        # addsitedir also reads the .pth files there: packages installed with `pip install -e`.
        lines = [f"import site; site.addsitedir({path!r})\n" for path in site_directories()]
        (packages / "parent.pth").write_text("".join(lines))
    Path(folder, "constraints.txt").write_text(constraints)


def cuda_torch() -> str:
    """Return the release of this Python's torch, if it is a supported one for CUDA."""
    try:
        import torch
    except Exception:  # also one whose libraries are missing is of no use
        return ""
    if torch.version.cuda is None:
        return ""
    unsupported_torch = runpy.run_path(str(ROOT / "builtins/versions.py"))["unsupported_torch"]
    if reason := unsupported_torch(torch.__version__):
        print(f"not using this Python's torch: {reason}")
        return ""
    return str(torch.__version__)


def site_directories() -> list[str]:
    """Return the directories of this Python's installed packages, in the order of its search."""
    return [path for path in sys.path if Path(path).name in SITE_DIRECTORIES]


def with_torch(constraints: str, release: str) -> str:
    """Replace the pin of torch, so that pip neither replaces nor updates what is used."""
    others = [line for line in constraints.splitlines() if not line.startswith("torch==")]
    return "\n".join([*others, f"torch=={release}", ""])


if __name__ == "__main__":
    main(sys.argv[1])
