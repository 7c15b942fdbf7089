# RUN: %python %s | %filecheck %s
"""Each atomic operation calls the template of its name with its type, scope and semantics."""

import tilelang.language as T

import tileweave as tw
from tileweave import language as W


@T.prim_func
def operations(S: T.Tensor((16,), "int64"), Y: T.Tensor((16,), "int64")):
    with T.Kernel(1, threads=32):
        Y[0] = W.atom_add(S[0], 5, scope="sys", sem="acquire")
        Y[1] = W.atom_min(S[1], 5, scope="sys", sem="acquire")
        Y[2] = W.atom_max(S[2], 5, scope="sys", sem="acquire")
        Y[3] = W.atom_and(S[3], 5, scope="sys", sem="acquire")
        Y[4] = W.atom_or(S[4], 5, scope="sys", sem="acquire")
        Y[5] = W.atom_xor(S[5], 5, scope="sys", sem="acquire")
        Y[6] = W.atom_exch(S[6], 5, scope="sys", sem="acquire")
        Y[7] = W.atom_cas(S[7], 1, 2)
        W.red_add(S[8], 7, scope="cta")
        W.red_min(S[9], 7, scope="cta")
        W.red_max(S[10], 7, scope="cta")
        W.red_and(S[11], 7, scope="cta")
        W.red_or(S[12], 7, scope="cta")
        W.red_xor(S[13], 7, scope="cta")


# CHECK: Y[0] = tw::atom_add<tw::Type::s64, tw::Scope::sys, tw::Sem::acquire>((&(S[0])), (int64_t)5);
# CHECK: Y[1] = tw::atom_min<tw::Type::s64, tw::Scope::sys, tw::Sem::acquire>((&(S[1])), (int64_t)5);
# CHECK: Y[2] = tw::atom_max<tw::Type::s64, tw::Scope::sys, tw::Sem::acquire>((&(S[2])), (int64_t)5);
# CHECK: Y[3] = tw::atom_and<tw::Type::s64, tw::Scope::sys, tw::Sem::acquire>((&(S[3])), (int64_t)5);
# CHECK: Y[4] = tw::atom_or<tw::Type::s64, tw::Scope::sys, tw::Sem::acquire>((&(S[4])), (int64_t)5);
# CHECK: Y[5] = tw::atom_xor<tw::Type::s64, tw::Scope::sys, tw::Sem::acquire>((&(S[5])), (int64_t)5);
# CHECK: Y[6] = tw::atom_exch<tw::Type::s64, tw::Scope::sys, tw::Sem::acquire>((&(S[6])), (int64_t)5);
# CHECK: Y[7] = tw::atom_cas<tw::Type::s64, tw::Scope::gpu, tw::Sem::relaxed>((&(S[7])), (int64_t)1, (int64_t)2);
# CHECK: tw::red_add<tw::Type::s64, tw::Scope::cta, tw::Sem::relaxed>((&(S[8])), {{.*}}7);
# CHECK: tw::red_min<tw::Type::s64, tw::Scope::cta, tw::Sem::relaxed>((&(S[9])), {{.*}}7);
# CHECK: tw::red_max<tw::Type::s64, tw::Scope::cta, tw::Sem::relaxed>((&(S[10])), {{.*}}7);
# CHECK: tw::red_and<tw::Type::s64, tw::Scope::cta, tw::Sem::relaxed>((&(S[11])), {{.*}}7);
# CHECK: tw::red_or<tw::Type::s64, tw::Scope::cta, tw::Sem::relaxed>((&(S[12])), {{.*}}7);
# CHECK: tw::red_xor<tw::Type::s64, tw::Scope::cta, tw::Sem::relaxed>((&(S[13])), {{.*}}7);
print(tw.emit(operations))
