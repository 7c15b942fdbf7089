"""Test the compiler of requirements-nvcc.txt on a machine that has its own: ``make test-nvcc``.

The packages are installed into a folder of their own. No directory with another nvcc is on PATH,
and CUDA_HOME is not set. The demo then compiles to PTX, and one kernel to a cubin.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parent.parent
REQUIREMENTS = ROOT / "requirements-nvcc.txt"
PATH_OF_NVCC = "from tilelang.contrib.nvcc import get_nvcc_compiler as f; print(f())"
EMIT_CUBIN = """
from tilelang.contrib import nvcc
import tileweave as tw
from tileweave.examples.gemm_reduce_scatter import example
options = nvcc.default_compile_options()
print(len(nvcc.compile_cuda(tw.emit(example), "cubin", "sm_90a", options)), "bytes")
"""


def main() -> None:
    with TemporaryDirectory() as name:
        folder = Path(name)
        packages = folder / "packages"
        install(packages)
        env = without_nvcc(packages)
        path = Path(run([sys.executable, "-c", PATH_OF_NVCC], env).strip())
        if not path.is_relative_to(packages):
            raise SystemExit(f"test-nvcc: TileLang uses {path}; expected nvcc in {packages}")
        print(f"test-nvcc: TileLang uses {path.relative_to(folder)}", flush=True)
        run([sys.executable, "-m", "tileweave", "demo", "--out", str(folder)], env)
        (ptx,) = folder.glob("*.ptx")
        print(f"test-nvcc: the demo compiled {ptx.name}", flush=True)
        print(f"test-nvcc: a cubin of {run([sys.executable, '-c', EMIT_CUBIN], env)}", end="")


def install(packages: Path) -> None:
    """Install the requirements into a folder, bounded by nothing but their own pins."""
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-compile"]
    settings = {"PIP_CONSTRAINT": os.devnull, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    run([*pip, "--target", str(packages), "-r", str(REQUIREMENTS)], os.environ | settings)
    require_pins(packages)


def require_pins(packages: Path) -> None:
    """Exit unless exactly the pins of requirements-nvcc.txt are installed: what nvcc needs, its
    wheel accepts in any version."""
    lines = (line.partition("#")[0].strip() for line in REQUIREMENTS.read_text().splitlines())
    pins = {line for line in lines if line}
    installed = {
        f"{d.metadata['Name']}=={d.version}" for d in metadata.distributions(path=[str(packages)])
    }
    if pins != installed:
        names = " ".join(sorted(installed - pins)) or "too few packages"
        raise SystemExit(f"test-nvcc: pip installed {names}; expected the pins of {REQUIREMENTS}")


def without_nvcc(packages: Path) -> dict[str, str]:
    """Return environment variables in which only the nvcc in ``packages`` is found."""
    hidden = ("CUDA_HOME", "CUDA_PATH")
    env = {name: value for name, value in os.environ.items() if name not in hidden}
    folders = os.environ["PATH"].split(os.pathsep)
    env["PATH"] = os.pathsep.join(f for f in folders if shutil.which("nvcc", path=f) is None)
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(packages)])
    return env


def run(command: list[str], env: dict[str, str]) -> str:
    """Return what a command prints; exit with it if it fails."""
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    if done.returncode:
        what = " ".join(command[1:3])
        raise SystemExit(f"test-nvcc: {what} failed:\n{(done.stdout + done.stderr)[-3000:]}")
    return done.stdout


if __name__ == "__main__":
    main()
