"""Programs without TileWeave.

``stock_programs.py [tileweave]`` prints the CUDA source of each program and architecture as JSON;
the argument imports TileWeave first.
"""

import importlib
import json
import sys

if "tileweave" in sys.argv[1:]:
    importlib.import_module("tileweave")

import tilelang
import tilelang.language as T
from tilelang import tvm


@T.prim_func
def gemm(
    A: T.Tensor((512, 512), "bfloat16"),
    B: T.Tensor((512, 512), "bfloat16"),
    C: T.Tensor((512, 512), "bfloat16"),
):
    with T.Kernel(4, 4, threads=256) as (bx, by):
        A_shared = T.alloc_shared((128, 64), "bfloat16")
        B_shared = T.alloc_shared((64, 128), "bfloat16")
        C_local = T.alloc_fragment((128, 128), "float32")
        T.clear(C_local)
        for k in T.Pipelined(8, num_stages=3):
            T.copy(A[by * 128, k * 64], A_shared)
            T.copy(B[k * 64, bx * 128], B_shared)
            T.gemm(A_shared, B_shared, C_local)
        T.copy(C_local, C[by * 128, bx * 128])


@T.prim_func
def elementwise(A: T.Tensor((1024, 1024), "float32"), B: T.Tensor((1024, 1024), "float32")):
    with T.Kernel(8, 8, threads=128) as (bx, by):
        for i, j in T.Parallel(128, 128):
            B[by * 128 + i, bx * 128 + j] = A[by * 128 + i, bx * 128 + j] * 2.0 + 1.0


@T.prim_func
def reduction(A: T.Tensor((256, 512), "float32"), B: T.Tensor((256,), "float32")):
    with T.Kernel(4, threads=128) as bx:
        rows = T.alloc_fragment((64, 512), "float32")
        sums = T.alloc_fragment((64,), "float32")
        T.copy(A[bx * 64, 0], rows)
        T.reduce_sum(rows, sums, dim=1)
        T.copy(sums, B[bx * 64])


def source_of(program: tvm.tirx.PrimFunc, arch: str) -> str:
    target = tvm.target.Target({"kind": "cuda", "arch": arch})
    with target:
        return tilelang.lower(program, target=target).kernel_source


if __name__ == "__main__":
    assert ("tileweave" in sys.modules) == ("tileweave" in sys.argv[1:])
    programs = {"gemm": gemm, "elementwise": elementwise, "reduction": reduction}
    arches = ("sm_80", "sm_90a")
    print(json.dumps({f"{n} {a}": source_of(p, a) for n, p in programs.items() for a in arches}))
