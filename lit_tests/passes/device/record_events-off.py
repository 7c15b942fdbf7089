# RUN: %python %s | %filecheck %s
"""Without a trace not one instruction is added."""

import tilelang.language as T

import tileweave as tw
from tileweave import language as W
from tileweave.passes import pipeline

M, N, K = 128, 128, 128
OFF = {"tileweave.verify": "off"}


@T.prim_func
def gemm(
    A: T.Tensor((M, K), "float16"),
    B: T.Tensor((N, K), "float16"),
    S: W.Symmetric((M, N), "float16"),
    F: W.Symmetric((1,), "uint32"),
):
    with T.Kernel(1, threads=128):
        A_tile = T.alloc_shared((M, 32), "float16")
        B_tile = T.alloc_shared((N, 32), "float16")
        C_tile = T.alloc_shared((M, N), "float16")
        total = T.alloc_fragment((M, N), "float32")
        T.clear(total)
        for step in T.Pipelined(K // 32, num_stages=2):
            T.copy(A[0, step * 32], A_tile)
            T.copy(B[0, step * 32], B_tile)
            T.gemm(A_tile, B_tile, total, transpose_B=True)
        T.copy(total, C_tile)
        T.copy(C_tile, S[1 - W.rank(), 0, 0])
        W.signal(F[1 - W.rank(), 0])
        W.wait_reached(F[W.rank(), 0], 1)


def emitted(**configs):
    return tw.emit(gemm, world_size=2, pass_configs={**OFF, **configs})


# CHECK: begin
# CHECK-NOT: record<
# CHECK-NOT: globaltimer
# CHECK-NOT: tileweave_launch
# CHECK: end
off = emitted()
print("begin", off, "end", sep="\n")

# The passes for traces change nothing then: without them the code is the same, and with the option
# False too. The option True gives other code.
# CHECK: without the passes: same
# CHECK-NEXT: trace False: same
# CHECK-NEXT: trace True: differs
stock = pipeline.PIPELINE
pipeline.PIPELINE = [p for p in stock if p.name not in ("instrument", "record_events")]
assert len(pipeline.PIPELINE) == len(stock) - 2
print("without the passes:", "same" if emitted() == off else "differs")
pipeline.PIPELINE = stock
for value in (False, True):
    same = emitted(**{"tileweave.trace": value}) == off
    print(f"trace {value}:", "same" if same else "differs")
