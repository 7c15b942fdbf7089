# RUN: %python %s | %filecheck %s
"""A wait in a loop is skipped if the previous iteration waited for the same counter."""

import tilelang.language as T

import tileweave as tw
from tileweave import language as W

M, N, B = 64, 64, 16


def show(program, **options):
    print("TEST:", program.attrs["global_symbol"])
    print(tw.emit(program, world_size=4, pass_configs=options))


@T.prim_func
def inferred(X: T.Tensor((M, N), "float32"), Y: T.Tensor((4 * M, N), "float32")):
    with T.Kernel(1, threads=32):
        S = W.alloc_symmetric((4, M, N), "float32")
        whole = T.alloc_shared((M, N), "float32")
        tile = T.alloc_shared((B, N), "float32")
        me = W.rank()
        T.copy(X[0, 0], whole)
        for owner in T.serial(4):
            T.copy(whole, S[owner, me, 0, 0])
        for step in T.serial(4 * M // B):
            T.copy(S[me, step * B // M, step * B % M, 0], tile)
            T.copy(tile, Y[step * B, 0])


# Four iterations read the granule of one counter. Threads load it, so no proxy fence follows.
# CHECK-LABEL: TEST: inferred
# CHECK: waited = -2147483648;
# CHECK-NEXT: for (int step = 0; step < 16;
# CHECK: if (waited != ((int)(((int64_t)step) >> (int64_t)2))) {
# CHECK-NEXT: tw::wait_reached<{{.*}}S_arrived[
# CHECK-NEXT: waited = ((int)(((int64_t)step) >> (int64_t)2));
# CHECK-NEXT: }
show(inferred)


@T.prim_func
def explicit(F: W.Symmetric((8,), "uint32"), Y: T.Tensor((16,), "uint32")):
    with T.Kernel(1, threads=32):
        for step in T.serial(16):
            W.wait_reached(F[W.rank(), step // 4], 1)
            Y[step] = W.ld(F[W.rank(), step // 4])


# Explicit waits are not skipped, because the program's counters may decrease.
# CHECK-LABEL: TEST: explicit
# CHECK-NOT: waited
# CHECK: tw::wait_reached
# CHECK: TEST: end
show(explicit, **{"tileweave.verify": "off"})
print("TEST: end")
