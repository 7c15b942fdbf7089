# RUN: %python %s | %filecheck %s
"""TileLang keeps barriers in branches on announced rows, whose operands do not name the thread.

Branches on W.rank_uniform and W.ld: tests/simulator/device/test_validate.py.
"""

import tilelang.language as T

import tileweave as tw
from tileweave import language as W


@T.prim_func
def program(
    X: T.Tensor((8, 16), "float32"), num: T.Tensor((2,), "int32"), Y: T.Tensor((8, 16), "float32")
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
                if step * 4 < W.announced(inbox[me, 0, 0, 0]):
                    for i, j in T.Parallel(8, 16):
                        tile[i, j] = X[i, j]
                    for i, j in T.Parallel(8, 16):
                        Y[i, j] = tile[7 - i, 15 - j]
                else:
                    for i, j in T.Parallel(8, 16):
                        Y[i, j] = 0


# CHECK: if ((step * 4) < ((int)inbox_announced
# CHECK: tile[((int)threadIdx.x)] =
# CHECK-NEXT: __syncthreads();
# CHECK-NEXT: = tile[
print(tw.emit(program, world_size=2))
