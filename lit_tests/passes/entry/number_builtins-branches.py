# RUN: %python %s | %filecheck %s
"""TileLang keeps barriers in branches on loads, whose operands do not name the thread."""

import tilelang.language as T

import tileweave as tw
from tileweave import language as W


def emit(name, load):
    print("TEST:", name)

    @T.prim_func
    def program(
        X: T.Tensor((8, 16), "float32"),
        num: T.Tensor((2,), "int32"),
        Y: T.Tensor((8, 16), "float32"),
    ):
        with T.Kernel(2, threads=128) as block:
            inbox = W.alloc_ragged((), rows=8, row=16, dtype="float32")
            tile = T.alloc_shared((8, 16), "float32")
            me = W.rank()
            if block == 0:
                for peer in T.serial(2):
                    W.announce(inbox[peer, me, 0, 0], num[peer])
            else:
                for step in T.serial(2):
                    if step * 4 < load(inbox, me, num):
                        for i, j in T.Parallel(8, 16):
                            tile[i, j] = X[i, j]
                        for i, j in T.Parallel(8, 16):
                            Y[i, j] = tile[7 - i, 15 - j]
                    else:
                        for i, j in T.Parallel(8, 16):
                            Y[i, j] = 0

    print(tw.emit(program, world_size=2))


# CHECK-LABEL: TEST: rank_uniform
# CHECK: if ((step * 4) < tw::rank_uniform(num[0])
# CHECK: tile[((int)threadIdx.x)] =
# CHECK-NEXT: __syncthreads();
# CHECK-NEXT: = tile[
emit("rank_uniform", lambda inbox, me, num: W.rank_uniform(num[0]))


# CHECK-LABEL: TEST: ld
# CHECK: if ((step * 4) < tw::ld
# CHECK: tile[((int)threadIdx.x)] =
# CHECK-NEXT: __syncthreads();
# CHECK-NEXT: = tile[
emit("ld", lambda inbox, me, num: W.ld(num[0]))

# CHECK-LABEL: TEST: announced
# CHECK: if ((step * 4) < ((int)inbox_announced
# CHECK: tile[((int)threadIdx.x)] =
# CHECK-NEXT: __syncthreads();
# CHECK-NEXT: = tile[
emit("announced", lambda inbox, me, num: W.announced(inbox[me, 0, 0, 0]))
