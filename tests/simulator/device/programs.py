"""A GEMM with every asynchronous operation, and edits of its device function."""

from functools import cache, partial

import ml_dtypes
import numpy as np
import tilelang.language as T
from tilelang import tvm
from tvm import tirx
from tvm.tirx.stmt_functor import ir_transform

import tileweave as tw
from tileweave import language as W
from tileweave.simulator.device.lowering import DeviceFunctions, lowered
from tileweave.simulator.device.program import DeviceProgram
from tileweave.simulator.machine.executable import Executable

RANKS, M, N, K, BLOCK_K = 2, 128, 64, 256, 32


def gemm_reduce_scatter(threads: int):
    """Multiply in two stages and send tiles by TMA: 64 rows for each 128 threads."""
    rows = threads // 2

    @T.prim_func
    def program(
        A: T.Tensor((RANKS * rows, K), "bfloat16"),
        B: T.Tensor((N, K), "bfloat16"),
        C: T.Tensor((rows, N), "bfloat16"),
    ):
        with T.Kernel(RANKS, threads=threads) as block:
            parts = W.alloc_symmetric((RANKS, rows, N), "bfloat16")
            A_tile = T.alloc_shared((rows, BLOCK_K), "bfloat16")
            B_tile = T.alloc_shared((N, BLOCK_K), "bfloat16")
            C_tile = T.alloc_shared((rows, N), "bfloat16")
            total = T.alloc_fragment((rows, N), "float32")
            me = W.rank()
            owner, tile = W.swizzle_ranks(block, 1, me, RANKS)
            T.clear(total)
            for k in T.Pipelined(K // BLOCK_K, num_stages=2):
                T.copy(A[owner * rows, k * BLOCK_K], A_tile)
                T.copy(B[0, k * BLOCK_K], B_tile)
                T.gemm(A_tile, B_tile, total, transpose_B=True)
            if owner != me:
                T.copy(total, C_tile)
                T.copy(C_tile, parts[owner, me, tile * rows, 0])
            else:
                T.copy(parts[me, 1 - me, tile * rows, 0], C_tile)
                for i, j in T.Parallel(rows, N):
                    total[i, j] += C_tile[i, j]
                T.copy(total, C_tile)
                T.copy(C_tile, C[tile * rows, 0])

    return program


def inputs(threads: int) -> list[dict[str, np.ndarray]]:
    rng, rows = np.random.default_rng(0), threads // 2

    def numbers(*shape: int) -> np.ndarray:
        return rng.integers(-2, 3, shape).astype(ml_dtypes.bfloat16)

    return [{"A": numbers(RANKS * rows, K), "B": numbers(N, K)} for _ in range(RANKS)]


@cache
def below(threads: int, arch: str) -> tuple[tirx.PrimFunc, DeviceFunctions]:
    """Return the program and its device functions, which all changes start from."""
    program = gemm_reduce_scatter(threads)
    return program, lowered(program, RANKS, arch)


def run(threads: int = 128, arch: str = "sm_90a", change=lambda kernel: kernel, **options):
    """Simulate the device function after ``change``; return C of all ranks in float32."""
    program, functions = below(threads, arch)
    make = partial(DeviceProgram, arch=arch, change=change, below=functions)
    executable = Executable(program, RANKS, make)
    outputs = tw.simulate(executable, RANKS, inputs(threads), epochs=2, **options)
    return np.concatenate([o["C"] for o in outputs]).astype(np.float32)


def expected(threads: int) -> np.ndarray:
    """C, with the sum that a rank receives rounded to bfloat16 before it is added."""
    rows = threads // 2
    products = [i["A"].astype(np.float32) @ i["B"].astype(np.float32).T for i in inputs(threads)]
    parts = []
    for owner in range(RANKS):
        mine = slice(owner * rows, (owner + 1) * rows)
        received = products[1 - owner][mine].astype(ml_dtypes.bfloat16).astype(np.float32)
        parts.append((products[owner][mine] + received).astype(ml_dtypes.bfloat16))
    return np.concatenate(parts).astype(np.float32)


def edited(name: str, edit, place: int | None = None):
    """Return a change of a device function: ``edit`` of the calls of an operation.

    Args:
        name: operation, such as ``tl.tma_store_wait``.
        edit: returns the new call, or None to drop the statement.
        place: number of the call; None for all of them.
    """

    def change(kernel: tirx.PrimFunc) -> tirx.PrimFunc:
        seen = 0

        def replace(stmt: tirx.Stmt):
            nonlocal seen
            call = stmt.value
            if not isinstance(call, tirx.Call) or call.op.name != name:
                return None
            seen += 1
            if place is not None and seen - 1 != place:
                return None
            new = edit(call)
            return tirx.Evaluate(tirx.IntImm("int32", 0) if new is None else new)

        body = ir_transform(kernel.body, None, replace, ["tirx.Evaluate"])
        assert seen, f"{name} is not in the device function"
        return kernel.with_body(body)

    return change


def dropped(name: str, place: int | None = None):
    """Return a change that drops the calls of an operation."""
    return edited(name, lambda call: None, place)


def with_argument(number: int, value: tvm.tirx.PrimExpr):
    """Return an edit that replaces an argument of a call."""

    def edit(call: tirx.Call) -> tirx.Call:
        arguments = [value if n == number else a for n, a in enumerate(call.args)]
        return tirx.Call(call.dtype, call.op, arguments)

    return edit
