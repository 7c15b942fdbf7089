"""``tileweave demo``: run GEMM + reduce-scatter on the GPUs of this machine, or simulate it."""

from __future__ import annotations

import argparse
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import torch

from ..builtins.errors import TileWeaveError
from ..emit import emit
from ..runtime.host.out_file import write_out
from .doctor import find_nvcc
from .program_files import load_module

EXAMPLES = "tileweave.examples"
"""The folder ``examples/`` of the checkout, which the wheel contains."""
PROGRAM = "gemm_reduce_scatter"
RANKS = 4


def add_parser(commands: argparse._SubParsersAction) -> argparse.ArgumentParser:
    """Declare the arguments."""
    parser = commands.add_parser(
        "demo",
        help="run GEMM + reduce-scatter on all visible GPUs; without one, compile and simulate it",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("tileweave-demo"),
        metavar="DIR",
        help="folder of the code and the drawings that are written without a GPU; default: "
        "%(default)s",
    )
    return parser


def run(options: argparse.Namespace) -> None:
    """Check GEMM + reduce-scatter against torch on all visible GPUs.

    Without a GPU, compile it to PTX, simulate it, and simulate it without its signal.
    """
    gpus = torch.cuda.device_count()
    if (on_gpus(gpus) if gpus else without_gpu(options.out)) != 0:
        raise SystemExit(1)


def on_gpus(gpus: int) -> int:
    """Start one rank on each GPU and return the exit status."""
    if not find_nvcc().path:
        raise TileWeaveError("demo: no nvcc; expected one on PATH or in CUDA_HOME")
    devices = f"{gpus} GPU{'s' if gpus > 1 else ''}"
    print(f"demo: GEMM + reduce-scatter on {devices}, checked against torch", flush=True)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    program = [f"--nproc-per-node={gpus}", "-m", f"{EXAMPLES}.{PROGRAM}"]
    shape = ["--shape", str(1024 * gpus), "8192", str(7168 * gpus)]
    return subprocess.run([*torchrun, *program, *shape]).returncode


def without_gpu(out: Path) -> int:
    """Compile and simulate the program, and return the exit status."""
    make_folder(out)
    stage, suffix = ("ptx", "ptx") if find_nvcc().path else ("cuda", "cu")
    example = load_module("demo", example_file(f"{PROGRAM}.py")).example
    code = emit(example, stage, world_size=RANKS)
    file = out / f"{PROGRAM}.{suffix}"
    write_out("demo: --out", file, code)
    lines = len(code.splitlines())
    print(f"demo: GEMM + reduce-scatter for {RANKS} ranks compiled to {file} ({lines} lines)")
    if stage == "cuda":
        print("demo: NOT COMPILED TO PTX: there is no nvcc on PATH or in CUDA_HOME")
    print("demo: NOT RUN ON GPUs: torch sees none here; the simulator runs it instead", flush=True)
    simulation = load_module("demo", example_file("without_gpu.py"))
    return simulation.main(["--timeline", str(out / PROGRAM)])


def example_file(name: str) -> Path:
    """Return the path of an example, in the checkout or in the installed package."""
    return Path(str(files(EXAMPLES) / name))


def make_folder(folder: Path) -> None:
    """Create the folder of the results; git ignores a new one.

    Raises:
        TileWeaveError: the system cannot create it.
    """
    try:
        is_new = not folder.is_dir()
        folder.mkdir(parents=True, exist_ok=True)
        if is_new:
            (folder / ".gitignore").write_text("*\n")
    except OSError as error:
        raise TileWeaveError(
            f"demo: --out {folder}: {error.strerror}; expected a folder that can be written"
        ) from None
