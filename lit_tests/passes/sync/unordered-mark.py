# RUN: %python %s | %filecheck %s
"""``W.unordered`` emits no code, and nothing is inferred for the marked access."""

import tilelang
import tilelang.language as T
from tilelang import tvm

import tileweave as tw
from tests.verdicts import show
from tileweave import language as W


def scatter(marked):
    def let(region):
        return W.unordered(region, reason="the caller orders it") if marked else region

    @T.prim_func
    def program(X: T.Tensor((64,), "float32"), Y: W.Symmetric((64,), "float32")):
        with T.Kernel(1, threads=64):
            tile = T.alloc_shared((64,), "float32")
            T.copy(X, tile)
            T.copy(tile, let(Y[(W.rank() + 1) % W.world_size(), 0]))
            for i in T.Parallel(64):
                X[i] = let(Y[W.rank(), i]) + 1.0

    return program


# CHECK-LABEL: TEST: inferred
# CHECK: T.tileweave.signal(
# CHECK: T.tileweave.wait_reached(
show(scatter(False), "inferred", stage="tile")

# CHECK-LABEL: TEST: marked
# CHECK-NOT: tileweave.{{signal|wait|unordered}}
# CHECK: T.copy(
show(scatter(True), "marked", stage="tile")

# CHECK-LABEL: TEST: cuda
# CHECK: as without marks: True
print("TEST: cuda")
off = {"tileweave.verify": "off"}
print("as without marks:", tw.emit(scatter(True)) == tw.emit(scatter(False), pass_configs=off))

# CHECK-LABEL: TEST: stock
# CHECK: as without marks: True
print("TEST: stock")
with tvm.target.Target({"kind": "cuda", "arch": "sm_90a"}):
    sources = [tilelang.lower(scatter(marked)).kernel_source for marked in (True, False)]
print("as without marks:", sources[0] == sources[1])
