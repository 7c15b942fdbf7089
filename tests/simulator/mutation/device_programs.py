"""Programs whose device functions are mutated, each with its architecture and smallest inputs.

``device_programs.equivalent.json`` explains the mutants that change nothing.
"""

from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import tilelang.language as T

import tileweave as tw
from tileweave import language as W
from tileweave.simulator import Mutant

BF16 = "bfloat16"
SCHEDULES = 4
N = 64


def gemm(M: int, N: int, steps: int, block_K: int, threads: int):
    """A pipelined GEMM of one tile: ``cp.async`` and ``mma``, or TMA and ``wgmma``."""
    K = steps * block_K

    @T.prim_func
    def program(A: T.Tensor((M, K), BF16), B: T.Tensor((N, K), BF16), C: T.Tensor((M, N), BF16)):
        with T.Kernel(1, threads=threads):
            A_tile = T.alloc_shared((M, block_K), BF16)
            B_tile = T.alloc_shared((N, block_K), BF16)
            C_tile = T.alloc_shared((M, N), BF16)
            total = T.alloc_fragment((M, N), "float32")
            T.clear(total)
            for k in T.Pipelined(steps, num_stages=2):
                T.copy(A[0, k * block_K], A_tile)
                T.copy(B[0, k * block_K], B_tile)
                T.gemm(A_tile, B_tile, total, transpose_B=True)
            T.copy(total, C_tile)
            T.copy(C_tile, C)

    return program


def exchange(redundant: bool = False):
    """Store a tile to the peer by TMA, signal it, and load what the peer has sent.

    Args:
        redundant: end with two barriers that order nothing.
    """

    @T.prim_func
    def program(
        src: T.Tensor((N, N), BF16),
        mail: W.Symmetric((2, N, N), BF16),
        flags: W.Symmetric((1,), "uint32"),
        out: T.Tensor((N, N), BF16),
        epoch: T.uint32,
    ):
        with T.Kernel(1, threads=128):
            me = W.rank()
            half = T.Cast("int32", epoch % T.uint32(2))
            tile = T.alloc_shared((N, N), BF16)
            received = T.alloc_shared((N, N), BF16)
            for i, j in T.Parallel(N, N):
                tile[i, j] = src[i, j] + src[i, j]
            T.copy(tile, mail[1 - me, half, 0, 0])
            W.signal(flags[1 - me, 0])
            W.wait_reached(flags[me, 0], epoch + T.uint32(1))
            T.copy(mail[me, half, 0, 0], received)
            T.copy(received, out)
            if redundant:
                T.sync_threads()
                T.sync_threads()

    return program


class Instance(NamedTuple):
    """A program with its architecture, number of ranks and inputs."""

    program: Any
    arch: str
    ranks: int
    inputs: list[dict[str, Any]]

    def mutants(self, **options: Any) -> list[Mutant]:
        return tw.mutate(
            self.program, self.ranks, self.inputs, SCHEDULES, level="device", arch=self.arch,
            **options,
        )  # fmt: skip


def instance(name: str) -> Instance:
    """Return the instance of a name in ``NAMES``."""
    if name == "exchange":
        return Instance(exchange(), "sm_90a", 2, exchanged())
    shape = (16, 32, 3, 16, 64) if name == "gemm sm_80" else (64, 64, 4, 32, 128)
    rows, columns, steps, block_K, _ = shape
    inputs = matrices(rows, columns, steps * block_K)
    return Instance(gemm(*shape), name.partition(" ")[2], 1, [inputs])


NAMES = "gemm sm_80", "gemm sm_90a", "exchange"


def matrices(M: int, N: int, K: int) -> dict[str, np.ndarray]:
    """Return inputs of the GEMM."""
    rng = np.random.default_rng(0)
    shapes = {"A": (M, K), "B": (N, K)}
    return {n: rng.integers(-2, 3, shape).astype(ml_dtypes.bfloat16) for n, shape in shapes.items()}


def exchanged() -> list[dict[str, Any]]:
    """Return inputs of the exchange for two ranks."""
    rng = np.random.default_rng(0)
    return [
        {
            "src": rng.integers(-9, 10, (N, N)).astype(ml_dtypes.bfloat16),
            "flags": np.zeros(1, np.uint32),
            "epoch": lambda epoch: epoch,
        }
        for _ in range(2)
    ]
