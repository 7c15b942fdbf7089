# RUN: %python %s | %filecheck %s
"""Type, scope and semantics of atomics reach the template; the block synchronizes before a release."""

import tilelang.language as T

from tests.verdicts import show
from tileweave import language as W


@T.prim_func
def old_value(U: T.Tensor((8,), "uint32"), L: T.Tensor((8,), "int64")):
    with T.Kernel(1, threads=32):
        old = W.atom_add(U[0], 1)
        U[1] = old + W.atom_max(U[2], 7, scope="sys")
        L[1] = W.atom_exch(L[0], -1)
        U[3] = W.atom_cas(U[4], 0, -1, sem="acquire")


# A negative constant wraps to the unsigned element.
# CHECK-LABEL: TEST: old_value
# CHECK: uint [[OLD:old]] = tw::atom_add<tw::Type::u32, tw::Scope::gpu, tw::Sem::relaxed>((&(U[0])), (uint)1);
# CHECK: U[1] = ([[OLD]] + tw::atom_max<tw::Type::u32, tw::Scope::sys, tw::Sem::relaxed>((&(U[2])), (uint)7));
# CHECK: L[1] = tw::atom_exch<tw::Type::s64, tw::Scope::gpu, tw::Sem::relaxed>((&(L[0])), {{.*}}-1);
# CHECK: U[3] = tw::atom_cas<tw::Type::u32, tw::Scope::gpu, tw::Sem::acquire>((&(U[4])), (uint)0, (uint)4294967295);
show(old_value)


@T.prim_func
def no_value(
    U: T.Tensor((8,), "uint32"), F: T.Tensor((8,), "float32"), D: T.Tensor((8,), "float64")
):
    with T.Kernel(1, threads=32):
        W.red_and(U[0], 6)
        W.red_add(F[0], 2)
        W.red_add(D[0], F[1], scope="cta")


# CHECK-LABEL: TEST: no_value
# CHECK-NOT: __syncthreads
# CHECK: tw::red_and<tw::Type::u32, tw::Scope::gpu, tw::Sem::relaxed>((&(U[0])), (uint)6);
# CHECK: tw::red_add<tw::Type::f32, tw::Scope::gpu, tw::Sem::relaxed>((&(F[0])), 0x1p+1f{{.*}});
# CHECK: tw::red_add<tw::Type::f64, tw::Scope::cta, tw::Sem::relaxed>((&(D[0])), ((double)F[1]));
show(no_value)


@T.prim_func
def releases(S: W.Symmetric((64,), "float32"), U: W.Symmetric((8,), "uint32")):
    with T.Kernel(1, threads=32):
        S[1, T.get_thread_binding()] = 1.0
        W.red_add(U[1, 0], 1, scope="sys", sem="release")
        W.atom_add(U[1, 1], 1, scope="sys", sem="acq_rel")


# CHECK-LABEL: TEST: releases
# CHECK: S[{{.*}}] = 0x1p+0f
# CHECK-NEXT: __syncthreads();
# CHECK-NEXT: tw::red_add<tw::Type::u32, tw::Scope::sys, tw::Sem::release>(
# CHECK-NEXT: __syncthreads();
# CHECK-NEXT: tw::atom_add<tw::Type::u32, tw::Scope::sys, tw::Sem::acq_rel>(
show(releases)
