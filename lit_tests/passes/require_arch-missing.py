# RUN: %python %s | %filecheck %s
"""require_arch: what the target lacks is refused at its line, by type where types differ."""

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


# CHECK-LABEL: TEST: pairs sm_80
# CHECK-NEXT: red_add of bf16x2: compiled for sm_80; expected sm_90 or later
# CHECK-NEXT: --> {{.*}}require_arch-missing.py:23
show(pairs, "sm_80")

# CHECK-LABEL: TEST: pairs sm_90a
# CHECK-NOT: expected
# CHECK: tw::red_add<tw::Type::bf16x2,
show(pairs, "sm_90a")

# CHECK-LABEL: TEST: fence sm_80
# CHECK-NEXT: fence_proxy_async: compiled for sm_80; expected sm_90 or later
show(fence, "sm_80")

# CHECK-LABEL: TEST: fence sm_100a
# CHECK: tw::fence_proxy_async();
show(fence, "sm_100a")
