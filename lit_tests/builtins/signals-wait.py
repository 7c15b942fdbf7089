# RUN: %python %s | %filecheck %s
"""Every thread that reaches a wait polls; the call has the peer, the context and the location."""

import tilelang.language as T

from tests.verdicts import show_unordered as show
from tileweave import language as W


@T.prim_func
def waits(F: W.Symmetric((8,), "uint32"), G: T.Tensor((8,), "int64"), n: T.int32):
    with T.Kernel(1, threads=128):
        W.wait_eq(F[W.rank(), 0], n)
        W.wait_ne(F[W.rank(), 1], 3, peer=2)
        W.wait_ge(G[2], n)
        W.wait_gt(G[3], n, scope="gpu")
        W.wait_le(G[4], -1)
        W.wait_lt(G[5], n, sem="relaxed")
        W.wait_reached(F[W.rank(), 6], n)


# CHECK-LABEL: TEST: waits
# CHECK: waits_kernel(uint* [[F:F]], int64_t* [[G:G]], int n, int rank, int64_t [[CONTEXT:[a-z_]+]])
# CHECK: tw::wait_eq<tw::Type::u32, tw::Scope::sys, tw::Sem::acquire>((&([[F]][(((int64_t)rank) * (int64_t)268435456)])), ((uint)n), -1, [[CONTEXT]], [[SITE:[0-9]+]]);
# CHECK: tw::wait_ne<tw::Type::u32, tw::Scope::sys, tw::Sem::acquire>({{.*}}, (uint)3, 2, [[CONTEXT]],
# CHECK: tw::wait_ge<tw::Type::s64, tw::Scope::sys, tw::Sem::acquire>((&([[G]][2])), n, -1,
# CHECK: tw::wait_gt<tw::Type::s64, tw::Scope::gpu, tw::Sem::acquire>(
# CHECK: tw::wait_le<tw::Type::s64, tw::Scope::sys, tw::Sem::acquire>((&([[G]][4])), -1,
# CHECK: tw::wait_lt<tw::Type::s64, tw::Scope::sys, tw::Sem::relaxed>(
# CHECK: tw::wait_reached<tw::Type::u32, tw::Scope::sys, tw::Sem::acquire>(
show(waits)


@T.prim_func
def instructions(F: W.Symmetric((8,), "uint32")):
    with T.Kernel(1, threads=32):
        W.signal(F[1, 0])
        W.signal(F[1, 0], op="set", scope="gpu")
        W.wait_reached(F[W.rank(), 0], 1)


# CHECK-LABEL: TEST: instructions
# CHECK: red.release.sys.global.add.u32
# CHECK: st.release.gpu.global.b32
# CHECK: ld.acquire.sys.global.b32
show(instructions, stage="ptx")
