"""Programs of ``examples/`` with inputs for the simulator."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


class Instance(NamedTuple):
    """A program, its number of ranks, and the inputs of all ranks; None for random inputs."""

    program: Any
    ranks: int
    inputs: list[dict[str, Any]] | None


@cache
def example(path: str, ranks: int | None = None) -> Any:
    """Run a file of ``examples/``, with ``ranks`` in place of its constant ``RANKS``, if any."""
    file = EXAMPLES / path
    source = file.read_text()
    if ranks is not None:
        source = re.sub(r"^(RANKS\b.*?= )\d+", rf"\g<1>{ranks}", source, flags=re.M)
    module = ModuleType(file.stem)
    module.__file__ = str(file)
    exec(compile(source, file, "exec", dont_inherit=True), vars(module))
    return module


def _matrices(ranks: int, more: dict[str, Any], **shapes: tuple[int, int]) -> list[dict[str, Any]]:
    """Return the inputs of all ranks: random matrices, and ``more``."""
    rng = np.random.default_rng(ranks)
    return [
        {n: rng.standard_normal(s).astype(ml_dtypes.bfloat16) for n, s in shapes.items()} | more
        for _ in range(ranks)
    ]


def gemm_reduce_scatter(ranks: int, M: int, N: int, K: int, *block: int) -> Instance:
    """K is that of one rank."""
    program = example("gemm_reduce_scatter.py").gemm_reduce_scatter(M, N, K, ranks, *block)
    tiles = M // ranks // block[0] * (N // block[1])
    flags = {"arrived": np.zeros((2, tiles), np.uint32), "state": np.zeros(2, np.uint32)}
    return Instance(program, ranks, _matrices(ranks, flags, A=(M, K), B=(N, K)))


def all_gather_gemm(ranks: int, M: int, N: int, K: int, *block: int) -> Instance:
    plan, _ = example("all_gather_gemm.py").all_gather_gemm(M, N, K, ranks, *block)
    flags = {"ready": np.zeros((2, ranks), np.uint32), "epoch": lambda epoch: epoch}
    return Instance(plan, ranks, _matrices(ranks, flags, A=(M // ranks, K), B=(N, K)))


def inferred(name: str, ranks: int, M: int, N: int, K: int, *block: int) -> Instance:
    program = getattr(example("inferred.py"), name)(M, N, K, ranks, *block)
    rows = M // ranks if name == "all_gather_gemm" else M
    return Instance(program, ranks, _matrices(ranks, {}, A=(rows, K), B=(N, K)))


def ping_pong(iterations: int) -> Instance:
    start = lambda epoch: iterations * epoch  # noqa: E731
    inputs = {"flags": np.zeros(1, np.uint32), "start": start, "iterations": iterations}
    return Instance(example("signal_ping_pong.py").ping_pong, 2, [inputs] * 2)


def bulk_copy(name: str, size: int, blocks: int) -> Instance:
    """``small_ring`` has 4 stages of 64 bytes."""
    module = example("bulk_copy.py")
    program = module.bulk_copy_with(4, 64, 2) if name == "small_ring" else getattr(module, name)
    rng, dst = np.random.default_rng(size), np.zeros(size, np.uint8)
    src = rng.integers(0, 256, size).astype(np.uint8)
    if name == "multicast_program":
        src, dst = rng.standard_normal(size).astype(np.float32), dst.astype(np.float32)
    return Instance(program, 1, [{"src": src, "dst": dst, "blocks": blocks}])
