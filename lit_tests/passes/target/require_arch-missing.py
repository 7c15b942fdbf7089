# RUN: %python %s | %filecheck %s
"""Builtins that the target lacks are refused with their line, by type if types differ."""

import tilelang.language as T

import tileweave as tw
from tileweave import language as W


def show(program, arch):
    print("TEST:", program.attrs["global_symbol"], arch)
    try:
        print(tw.emit(program, arch=arch))
    except tw.LanguageError as error:
        print(error)


@T.prim_func
def pairs(P: T.Tensor((8,), "bfloat16x2"), H: T.Tensor((8,), "float16x2")):
    with T.Kernel(1, threads=32):
        W.red_add(H[0], 1.0)
        if T.get_thread_binding() == 0:
            W.red_add(P[0], 1.0)


@T.prim_func
def fence():
    with T.Kernel(1, threads=32):
        W.fence_proxy_async()


@T.prim_func
def tma_sum(X: T.Tensor((16, 16), "float32"), Y: W.Symmetric((16, 16), "float32")):
    with T.Kernel(1, threads=32):
        tile = T.alloc_shared((16, 16), "float32")
        T.copy(X, tile)
        T.atomic_add(Y[W.rank(), 0, 0], tile, use_tma=True)


@T.prim_func
def plain_sum(X: T.Tensor((16, 16), "float32"), Y: W.Symmetric((16, 16), "float32")):
    with T.Kernel(1, threads=32):
        tile = T.alloc_shared((16, 16), "float32")
        T.copy(X, tile)
        T.atomic_add(Y[W.rank(), 0, 0], tile)


# CHECK-LABEL: TEST: pairs sm_80
# SINCE_0_1_13: CHECK-NEXT: red_add of bf16x2: compiled for sm_80; expected sm_90 or later
# LINE: CHECK-NEXT: --> {{.*}}require_arch-missing.py:23
show(pairs, "sm_80")

# CHECK-LABEL: TEST: pairs sm_90a
# SINCE_0_1_13: CHECK-NOT: expected
# SINCE_0_1_13: CHECK: tw::red_add<tw::Type::bf16x2,
show(pairs, "sm_90a")

# CHECK-LABEL: TEST: fence sm_80
# CHECK-NEXT: fence_proxy_async: compiled for sm_80; expected sm_90 or later
show(fence, "sm_80")

# CHECK-LABEL: TEST: fence sm_100a
# CHECK: tw::fence_proxy_async();
show(fence, "sm_100a")

# CHECK-LABEL: TEST: tma_sum sm_80
# CHECK-NEXT: atomic_add with use_tma=True: compiled for sm_80, which has no TMA; expected sm_90 or later, or use_tma=False
# LINE: CHECK-NEXT: --> {{.*}}require_arch-missing.py:37
show(tma_sum, "sm_80")

# CHECK-LABEL: TEST: tma_sum sm_90a
# CHECK: tl::tma_store_add
show(tma_sum, "sm_90a")

# CHECK-LABEL: TEST: plain_sum sm_80
# CHECK-NOT: expected
# CHECK: {{[aA]}}tomic
show(plain_sum, "sm_80")
