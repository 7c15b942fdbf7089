"""A persistent GEMM + reduce-scatter, whose signals sink past the next main loop or do not.

    torchrun --nproc-per-node=4 benchmarks/persistent_reduce_scatter.py [--shape M N K] [--runs 20]
        [--blocks 132] [--variants 0 1 2 3 4 5 6 7]

Blocks walk over the tiles; no line of the program says a word of synchronisation. It is timed with
``tileweave.sink_signals`` off and on, beside the program of examples/inferred.py, which has a block
for each tile, and cuBLAS + NCCL: medians of the slowest rank, interleaved, with fresh inputs; each
result is compared with the sum in fp32. Without a GPU the kernels are assembled, and small ones run
in the simulator.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import tilelang.language as T
import torch
import torch.distributed as dist
from tilelang.env import CUTLASS_INCLUDE_DIR, TILELANG_TEMPLATE_PATH

import tileweave as tw
from tileweave import language as W

sys.path.append(str(Path(__file__).resolve().parent.parent / "examples"))

import inferred
from gemm_reduce_scatter import reference

SHAPES = [(2048, 8192, 28672), (4096, 8192, 28672), (8192, 8192, 28672)]
BLOCK_M, BLOCK_N = 128, 256
HEAP_BYTES = 4 << 30
"""Nine programs hold two buffers of M x N each."""
BAR = 1e-2
"""The relative error of a right result; bf16 partial sums make about 2e-3."""


class Variant(NamedTuple):
    """A way to run the persistent program.

    Attributes:
        stages: of the main loop. A power of two makes ring indices cheap; with 4 of 128 x 256 x 64
            shared memory has room for half a tile of results.
        store_rows: rows of a tile that are stored at a time.
        sink: ``tileweave.sink_signals``.
        tma_copy: whether the store leaves the wait for the read of shared memory to the signal.
        registers: whether the warps that multiply take 240 registers each, at the start of every
            tile; TileLang does that of its own accord only for a main loop that is in no loop.
    """

    stages: int
    store_rows: int
    sink: bool
    tma_copy: bool = False
    registers: bool = False

    def __str__(self) -> str:
        more = ", signals sink" * self.sink + ", T.tma_copy" * self.tma_copy
        more += ", 240 registers" * self.registers
        return f"persistent, {self.stages} stages{more}"

    @property
    def configs(self) -> dict:
        granule = {"parts": (BLOCK_M, BLOCK_N)}  # of a whole tile, however many stores bring it
        return {"tileweave.sink_signals": self.sink, "tileweave.granule": granule}


VARIANTS = (
    Variant(3, BLOCK_M, False),
    Variant(3, BLOCK_M, True),
    Variant(3, BLOCK_M, True, tma_copy=True),
    Variant(3, BLOCK_M, False, registers=True),
    Variant(3, BLOCK_M, True, registers=True),
    Variant(3, BLOCK_M, True, tma_copy=True, registers=True),
    Variant(4, BLOCK_M // 2, False, registers=True),
    Variant(4, BLOCK_M // 2, True, registers=True),
)


def persistent_reduce_scatter(
    M, N, K, ranks, variant, blocks=132, block_M=BLOCK_M, block_N=BLOCK_N, block_K=64
):
    """C (M / ranks, N): this rank's rows of the sum over ranks of A B^T; K is a rank's share."""
    share = M // ranks
    rows, columns = share // block_M, N // block_N
    tiles, store_M = rows * columns, variant.store_rows
    put = T.tma_copy if variant.tma_copy else T.copy

    @T.prim_func
    def reduce_scatter(
        A: T.Tensor((M, K), "bfloat16"),
        B: T.Tensor((N, K), "bfloat16"),
        C: T.Tensor((share, N), "bfloat16"),
    ):
        with T.Kernel(blocks, threads=256) as block:
            parts = W.alloc_symmetric((M, N), "bfloat16")
            A_tile = T.alloc_shared((block_M, block_K), "bfloat16")
            B_tile = T.alloc_shared((block_N, block_K), "bfloat16")
            C_tile = T.alloc_shared((store_M, block_N), "bfloat16")
            total = T.alloc_fragment((block_M, block_N), "float32")

            if variant.registers:
                T.annotate_producer_reg_dealloc(24)
                T.annotate_consumer_reg_alloc(240)
            me = W.rank()
            for turn in T.serial(T.ceildiv(tiles * ranks, blocks)):
                number = turn * blocks + block
                if number < tiles * ranks:
                    owner, tile = W.own_last(number, tiles, me, ranks)
                    row, column = W.swizzle_2d(tile, rows, columns)

                    T.clear(total)
                    for k in T.Pipelined(K // block_K, num_stages=variant.stages):
                        T.copy(A[owner * share + row * block_M, k * block_K], A_tile)
                        T.copy(B[column * block_N, k * block_K], B_tile)
                        T.gemm(A_tile, B_tile, total, transpose_B=True)

                    if owner != me:
                        for part in T.unroll(block_M // store_M):
                            first, at = part * store_M, row * block_M + part * store_M
                            T.copy(total[first : first + store_M, :], C_tile)
                            put(C_tile, parts[owner, me * share + at, column * block_N])
                    else:
                        for part in T.unroll(block_M // store_M):
                            first, at = part * store_M, row * block_M + part * store_M
                            for step in T.serial(ranks - 1):
                                source = (me + 1 + step) % ranks
                                T.copy(parts[me, source * share + at, column * block_N], C_tile)
                                for i, j in T.Parallel(store_M, block_N):
                                    total[first + i, j] += C_tile[i, j]
                            T.copy(total[first : first + store_M, :], C_tile)
                            T.copy(C_tile, C[at, column * block_N])

    return reduce_scatter


def compare(M: int, N: int, K_total: int, options: argparse.Namespace) -> bool:
    """Time and check all variants of one shape; prints a row of each."""
    ranks = tw.world_size()
    K = K_total // ranks
    kernels = {"block a tile": tw.compile(inferred.gemm_reduce_scatter(M, N, K, ranks))}
    for variant in options.variants:
        program = persistent_reduce_scatter(M, N, K, ranks, variant, options.blocks)
        kernels[str(variant)] = tw.compile(program, pass_configs=variant.configs)
    out = {name: torch.empty(M // ranks, N, device="cuda", dtype=torch.bfloat16)
           for name in [*kernels, "cuBLAS + NCCL"]}  # fmt: skip

    def nccl(A, B):
        product = A @ B.t()
        if ranks > 1:
            dist.reduce_scatter_tensor(out["cuBLAS + NCCL"], product)
        else:
            out["cuBLAS + NCCL"].copy_(product)

    operators = {name: _of(kernel, out[name]) for name, kernel in kernels.items()}
    operators["cuBLAS + NCCL"] = nccl
    drawn: list = []

    def inputs():
        drawn[:] = inferred.randoms(M, N, K=K)
        for result in out.values():
            result.fill_(float("nan"))
        return drawn

    times = inferred.timed(operators, inputs, options.runs)
    right = reference(*drawn)
    errors = {name: error_of(result, right) for name, result in out.items()}
    for kernel in kernels.values():
        kernel.free()
    if tw.rank() == 0:
        for name, ms in times.items():
            ratio = times["block a tile"] / ms
            print(
                f"| {M} x {N} x {K_total} | {name} | {ms:.3f} | {ratio:.3f} | {errors[name]:.1e} |"
            )
    return all(error <= BAR for error in errors.values())


def _of(kernel, C: torch.Tensor):
    return lambda A, B: kernel(A, B, C)


def error_of(found: torch.Tensor, right: torch.Tensor) -> float:
    """Relative error on the rank where it is largest; 9 where an element was not written."""
    error = ((found.float() - right).norm() / right.norm()).nan_to_num(nan=9.0)
    if tw.world_size() > 1:
        dist.all_reduce(error, op=dist.ReduceOp.MAX)
    return error.item()


def simulated(ranks: int, variant: Variant, schedules: int = 5) -> float:
    """Relative error of a small one on simulated ranks; faults raise."""
    import ml_dtypes
    import numpy as np

    M, N, K, b = 64 * ranks, 96, 64, 32
    variant = variant._replace(store_rows=variant.store_rows * b // BLOCK_M)
    configs = {**variant.configs, "tileweave.granule": {"parts": (b, b)}}
    program = persistent_reduce_scatter(M, N, K, ranks, variant, 4, b, b, b)
    rng = np.random.default_rng(ranks)
    inputs = [
        {n: rng.standard_normal((rows, K)).astype(ml_dtypes.bfloat16)
         for n, rows in (("A", M), ("B", N))}
        for _ in range(ranks)
    ]  # fmt: skip
    out = tw.simulate(program, ranks, inputs, schedules=schedules, pass_configs=configs)
    found = np.concatenate([o["C"].astype(np.float32) for o in out])
    right = sum(i["A"].astype(np.float32) @ i["B"].astype(np.float32).T for i in inputs)
    return float(np.linalg.norm(found - right) / np.linalg.norm(right))


def assembled(M: int, N: int, K: int, ranks: int, variant: Variant, blocks: int) -> str:
    """What ptxas says of a kernel for sm_90a: registers, spills, and serialised wgmma."""
    program = persistent_reduce_scatter(M, N, K, ranks, variant, blocks)
    cuda = tw.emit(program, world_size=ranks, pass_configs=variant.configs)
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.cu"
        source.write_text(cuda)
        include = [f"-I{p}" for p in (TILELANG_TEMPLATE_PATH, CUTLASS_INCLUDE_DIR)]
        command = ["nvcc", "-cubin", "-arch=sm_90a", "-std=c++17", "-O3", "-Xptxas=-v",
                   "-DENABLE_BF16", *include, "-o", f"{folder}/kernel.cubin", source]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"nvcc: {done.stderr}")
    wanted = ("registers", "spill", "wgmma", "C75")
    lines = [line.strip() for line in done.stderr.splitlines() if any(w in line for w in wanted)]
    return "; ".join(lines)


def sunk_in(M: int, N: int, K: int, ranks: int, variant: Variant) -> bool:
    """Whether the inference lets a signal of the program sink."""
    program = persistent_reduce_scatter(M, N, K, ranks, variant)
    found = tw.explain(program, ranks, pass_configs=variant.configs)
    return any("sunk past" in op.reason for op in found.ops)


def without_gpu(options: argparse.Namespace) -> bool:
    """Assemble and simulate the variants for 4 ranks."""
    print("no GPU: nothing was timed; the kernels are assembled and small ones simulated")
    (M, N, K), errors = options.shape[0], []
    for variant in options.variants:
        assert sunk_in(M, N, K // 4, 4, variant) == variant.sink, variant
        print(f"{variant}: {assembled(M, N, K // 4, 4, variant, options.blocks)}")
        errors += [simulated(ranks, variant) for ranks in (1, 2, 4)]
        print(f"{variant}: on 1, 2, 4 simulated ranks relative errors up to {max(errors):.1e}")
    return all(error <= BAR for error in errors)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shape", type=int, nargs=3, action="append", metavar=("M", "N", "K"))
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--blocks", type=int, default=132)
    every = range(len(VARIANTS))
    parser.add_argument("--variants", type=int, nargs="+", default=[*every], choices=every)
    options = parser.parse_args()
    options.shape = options.shape or SHAPES
    options.variants = [VARIANTS[n] for n in options.variants]
    if not torch.cuda.is_available():
        ok = without_gpu(options)
    else:
        tw.init(heap_bytes=HEAP_BYTES)
        if tw.rank() == 0:
            print("| M x N x K | variant | ms | speed to block a tile | relative error |")
            print("|---|---|---|---|---|")
        ok = all([compare(*shape, options) for shape in options.shape])
        if tw.rank() == 0:
            print("right" if ok else f"wrong: relative error above {BAR}")
        tw.finalize()
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
