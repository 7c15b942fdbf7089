# RUN: %python %s | %filecheck %s
"""A ragged tensor has announcements on each rank, and totals of the writer."""

import tilelang.language as T

from tileweave import language as W
from tileweave.passes.group.lift_symmetric import lift_symmetric


def show(program):
    print("TEST:", program.attrs["global_symbol"])
    print(lift_symmetric(program, 4).script())


@T.prim_func
def ragged(n: T.Tensor((4,), "int32"), found: T.Tensor((4,), "int32")):
    with T.Kernel(1, threads=32):
        inbox = W.alloc_ragged(3, rows=8, row=(2, 16), dtype="bfloat16")
        me = W.rank()
        W.announce(inbox[1, 2, me, 0, 0, 0], n[0])
        found[0] = W.announced(inbox[me, 2, 1, 0, 0, 0])


# CHECK-LABEL: TEST: ragged
# CHECK: inbox_total = T.match_buffer({{.*}}, (4, 3, 1), "uint32"
# CHECK: inbox_announced = T.match_buffer({{.*}}, (world_size, 3, 4, 2), "uint32"
# CHECK: inbox = T.match_buffer({{.*}}, (world_size, 3, 4, 8, 2, 16), "bfloat16"
# CHECK: T.tileweave.announce(T.access_ptr(inbox_announced[1, 2, me, 0], 2, 2), n[0], T.access_ptr(inbox_total[1, 2, 0], 1, 3), 8, 32, 8,
# CHECK: found[0] = T.Cast("int32", inbox_announced[me, 2, 1, 0])
show(ragged)


@T.prim_func
def dense(found: T.Tensor((4,), "int32")):
    with T.Kernel(1, threads=32):
        inbox = W.alloc_symmetric((4,), "int32")
        found[0] = inbox[W.rank(), 0]


# CHECK-LABEL: TEST: dense
# CHECK-NOT: inbox_announced
show(dense)
