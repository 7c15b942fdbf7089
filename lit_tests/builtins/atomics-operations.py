# RUN: %python %s | %filecheck %s
"""Each atomic operation calls the template of its name with its type, scope and semantics."""

import tilelang.language as T

import tileweave as tw
from tileweave import language as W

OPERATIONS = ("add", "min", "max", "and", "or", "xor", "exch")


@T.prim_func
def operations(S: T.Tensor((16,), "int64"), Y: T.Tensor((16,), "int64")):
    with T.Kernel(1, threads=32):
        for index, name in enumerate(OPERATIONS):
            Y[index] = getattr(W, f"atom_{name}")(S[index], 5, scope="sys", sem="acquire")
        Y[7] = W.atom_cas(S[7], 1, 2)
        for index, name in enumerate(OPERATIONS[:6]):
            getattr(W, f"red_{name}")(S[8 + index], 7, scope="cta")


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
