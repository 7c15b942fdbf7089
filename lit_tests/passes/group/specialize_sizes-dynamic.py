# RUN: %python %s | %filecheck %s
"""Dynamic extents that the inference depends on become constants; others stay dynamic."""

import tilelang.language as T

from tests.verdicts import show
from tileweave import language as W

M, N, B = T.dynamic("M"), 64, 16


@T.prim_func
def shift(X: T.Tensor((M, N), "float32"), S: W.Symmetric((M, N), "float32")):
    with T.Kernel(T.ceildiv(M, B), threads=32) as row:
        tile = T.alloc_shared((B, N), "float32")
        T.copy(X[row * B, 0], tile)
        T.copy(tile, S[(W.rank() + 1) % 4, row * B, 0])
        T.copy(S[W.rank(), row * B, 0], tile)
        T.copy(tile, X[row * B, 0])


# The tail of 4 rows counts a quarter of a whole tile.
# CHECK-LABEL: TEST: shift
# CHECK: X = T.match_buffer(X_handle, (20, 64)
# CHECK: S = T.match_buffer(S_handle, (4, 20, 64)
# CHECK: S_arrived = T.match_buffer({{.*}}, (4, 2), "uint32"
# CHECK: for bx in T.thread_binding(2, thread="blockIdx.x")
# CHECK: T.tileweave.signal(T.access_ptr(S_arrived[(rank + 1) % 4, bx], 1, 3), T.Cast("uint32", T.min(16, 20 - bx * 16) {{.*}}, "u32", "add"
# CHECK: T.tileweave.wait_reached(T.access_ptr(S_arrived[rank, bx]
show(shift, sizes={"M": 20}, stage="tile", world_size=4)

# Another size has another number of counters.
# CHECK-LABEL: TEST: shift
# CHECK: S_arrived = T.match_buffer({{.*}}, (4, 64), "uint32"
show(shift, sizes={"M": 1024}, stage="tile", world_size=4)


@T.prim_func
def scratch(X: T.Tensor((M, N), "float32")):
    with T.Kernel(1, threads=32):
        S = W.alloc_symmetric((2 * M, N), "float32")
        T.copy(X[0:4, 0:N], S[(W.rank() + 1) % 4, 0:4, 0:N])
        T.copy(S[W.rank(), 0:4, 0:N], X[0:4, 0:N])


# The program's own memory may depend on them.
# CHECK-LABEL: TEST: scratch
# CHECK: S = T.match_buffer({{.*}}, (4, 48, 64)
show(scratch, sizes={"M": 24}, stage="tile", world_size=4)


@T.prim_func
def explicit(
    X: T.Tensor((M, N), "float32"),
    S: W.Symmetric((M, N), "float32"),
    ready: W.Symmetric((1,), "uint32"),
):
    with T.Kernel(1, threads=32):
        T.copy(X[0:4, 0:N], S[(W.rank() + 1) % 4, 0:4, 0:N])
        W.signal(ready[(W.rank() + 1) % 4, 0], T.uint32(1))


# A program with explicit synchronization keeps its dynamic extents. So does a program if no access
# to a symmetric tensor depends on them.
# CHECK-LABEL: TEST: explicit
# CHECK: M = T.int32()
# CHECK: X = T.match_buffer(X_handle, (M, 64)
# CHECK: S = T.match_buffer(S_handle, (4, M, 64)
show(explicit, stage="tile", world_size=4)


@T.prim_func
def elsewhere(X: T.Tensor((M, N), "float32"), S: W.Symmetric((4, N), "float32")):
    with T.Kernel(1, threads=32):
        T.copy(X[0:4, 0:N], S[(W.rank() + 1) % 4, 0:4, 0:N])
        T.copy(S[W.rank(), 0:4, 0:N], X[M - 4 : M, 0:N])


# CHECK-LABEL: TEST: elsewhere
# CHECK: X = T.match_buffer(X_handle, (M, 64)
# CHECK: T.tileweave.signal(
# CHECK: T.tileweave.wait_reached(
show(elsewhere, stage="tile", world_size=4)
