# RUN: %python %s | %filecheck %s
"""A branch on an unsigned value around a pipelined loop compiles with TileLang's schedule."""

import tilelang.language as T

from tests.verdicts import show
from tileweave import language as W


def program(condition, name, dtype="uint32"):
    @T.prim_func
    def program(
        A: T.Tensor((512, 512), "float16"),
        counts: T.Tensor((8,), dtype),
        C: T.Tensor((512, 512), "float16"),
    ):
        with T.Kernel(4, threads=128) as bx:
            tile = T.alloc_shared((128, 64), "float16")
            total = T.alloc_fragment((128, 64), "float16")
            if T.get_thread_binding() == 0:
                before = W.atom_add(counts[bx], 1)
                if condition(before):
                    W.st(counts[bx], 0)
            T.clear(total)
            for k in T.Pipelined(8, num_stages=2):
                T.copy(A[bx * 128, k * 64], tile)
                for i, j in T.Parallel(128, 64):
                    total[i, j] += tile[i, j]
            T.copy(total, C[bx * 128, 0])

    return program.with_attr("global_symbol", name)


# CHECK-LABEL: TEST: equal
# CHECK: if (({{before|tw::atom_add.*}} | (uint)0) == (uint)15) {
# CHECK-NEXT: tw::st
show(program(lambda before: before == 15, "equal"), arch="sm_80")

# CHECK-LABEL: TEST: above
# CHECK: if ((uint64_t)15 < ({{before|tw::atom_add.*}} | (uint64_t)0)) {
show(program(lambda before: before > 15, "above", "uint64"), arch="sm_80")

# Signed values, and conditions that the solver skips, do not change.
# CHECK-LABEL: TEST: signed
# CHECK: if ({{before|tw::atom_add.*}} == 15) {
show(program(lambda before: before == 15, "signed", "int32"), arch="sm_80")

# CHECK-LABEL: TEST: masked
# CHECK: if (({{before|tw::atom_add.*}} & (uint)7) == (uint)3) {
show(program(lambda before: before & 7 == 3, "masked"), arch="sm_80")
