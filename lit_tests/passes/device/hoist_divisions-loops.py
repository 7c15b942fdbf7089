# RUN: %python %s | %filecheck %s
"""A block divides by a size before the outermost loop that does not change the quotient."""

import tilelang.language as T

import tileweave as tw
from tileweave import language as W


@T.prim_func
def divided(
    S: W.Symmetric((8, 64), "float32"), sizes: T.Tensor((8,), "int32"), C: T.Tensor((64,), "float32"),
    size: T.int32,
):  # fmt: skip
    with T.Kernel(8, threads=32) as block:
        for wave in T.serial(4):
            for k in T.serial(16):
                C[k] = S[W.rank(), block // size, k] + S[W.rank(), (block + wave) % size, k]
                C[k + 16] = S[W.rank(), 0, k // size] + S[W.rank(), 1, block // sizes[0]]
                C[k + 32] = S[W.rank(), block // 3, k]


# CHECK: hoisted_1 = {{.*}} ? rdiv_1 :
# CHECK-NEXT: for (int wave = 0;
# CHECK: hoisted_3 = {{.*}} ? rmod_4 :
# CHECK-NEXT: for (int k = 0;
# CHECK: S[(hoisted_1 + ((int64_t)k))]
# CHECK: S[(hoisted_3 + ((int64_t)k))]
# CHECK: (k / size)
# CHECK: (((int)blockIdx.x) / sizes[0])
# CHECK-NOT: hoisted_4
print(tw.emit(divided, world_size=2))
