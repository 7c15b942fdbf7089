# RUN: %python %s | %filecheck %s
"""Packed rows: a signal after each write adds its elements, padding counts as arrived, and a read
waits for all elements of its tile."""

import tilelang.language as T
from tilelang import tvm

from tileweave import language as W
from tileweave import passes

RANKS, F32 = 2, "float32"


def show(program, **options):
    print("TEST:", program.attrs["global_symbol"])
    func, _ = passes.split_options(program, {f"tileweave.{k}": v for k, v in options.items()})
    mod = passes.run_group(tvm.IRModule({"program": func}), RANKS, 1 << 30)
    print(mod["program"].script())


@T.prim_func
def packed(X: T.Tensor((4, 16), F32), at: T.Tensor((4,), "int32"), Y: T.Tensor((7, 16), F32)):
    with T.Kernel(1, threads=32):
        inbox = W.alloc_packed(rows=7, row=16)
        row = T.alloc_shared((1, 16), F32)
        tile = T.alloc_shared((2, 16), F32)
        me = W.rank()
        for t in T.serial(2):
            T.copy(X[t, 0], row)
            T.copy(row, inbox[at[t], at[t + 2], 0])
        W.pad(inbox[me, at[0], 0], at[1])
        for step in T.serial(4):
            T.copy(inbox[me, step * 2, 0], tile)
            T.copy(tile, Y[step * 2, 0])


# The unit is a row. The last tile has one row. No other exchange proves that two buffers suffice,
# and no row waits for the writer itself. A row beyond the capacity is not counted.
# CHECK-LABEL: TEST: packed
# CHECK: inbox = T.match_buffer({{.*}}, (2, 7, 16), strides=
# CHECK: inbox_arrived = T.match_buffer({{.*}}, (2, 4), "uint32"
# CHECK: T.tileweave.wait_reached(T.access_ptr(finished[T.tileweave.rank(), at[t]], 1, 1), epoch - T.uint32(1),
# CHECK: T.copy(T.region(row[0, 0], 1, 1, 16), T.region(inbox[at[t], at[t + 2], 0], 2,
# CHECK-NEXT: if T.Cast("uint32", at[t + 2]) < T.Cast("uint32", 7):
# CHECK-NEXT: T.tileweave.signal(T.access_ptr(inbox_arrived[at[t], at[t + 2] // 2], 1, 3), T.uint32(1),
# CHECK: T.tileweave.pad(T.access_ptr(inbox_arrived[T.tileweave.rank(), 0], 4, 3), at[1], T.access_ptr(inbox[me, at[0], 0], 1, 2), T.Cast("int32", at[0]), 7, 1, 2,
# CHECK: for step in range(4):
# CHECK-NEXT: T.tileweave.wait_reached(T.access_ptr(inbox_arrived[T.tileweave.rank(), step], 1, 1), epoch * T.Cast("uint32", 16 * T.min(2, 7 - {{.*}}) // 16),
# CHECK: T.copy(T.region(inbox[me, step * 2, 0], 1,
show(packed)


@T.prim_func
def after_numbers(
    X: T.Tensor((4, 16), F32), at: T.Tensor((4,), "int32"), Y: T.Tensor((7, 16), F32)
):
    with T.Kernel(1, threads=32):
        numbers = W.alloc_symmetric((RANKS,), "int32")
        inbox = W.alloc_packed(rows=7, row=16)
        row = T.alloc_shared((1, 16), F32)
        first = T.alloc_local((1,), "int32")
        me = W.rank()
        for peer in T.serial(RANKS):
            numbers[peer, me] = at[peer]
        first[0] = 0
        for source in T.serial(RANKS):
            first[0] += numbers[me, source]
        T.copy(X[0, 0], row)
        T.copy(row, inbox[at[0], first[0], 0])
        W.pad(inbox[me, first[0], 0], 7 - first[0])
        for i in T.serial(7):
            T.copy(inbox[me, i, 0], row)
            T.copy(row, Y[i, 0])


# Single rows: the tile is the whole copy. Both tensors have two buffers, with counters of their own.
# CHECK-LABEL: TEST: after_numbers
# CHECK: inbox_arrived = T.match_buffer({{.*}}, (2, 2, 1), "uint32"
# CHECK-NOT: finished
# CHECK: T.tileweave.pad(T.access_ptr(inbox_arrived[T.tileweave.rank(), {{.*}}epoch % T.uint32(2){{.*}}, 0], 1, 3), 7 - first[0], {{.*}}T.Cast("int32", first[0]), 7, 1, 7,
# CHECK: T.tileweave.wait_reached(T.access_ptr(inbox_arrived[T.tileweave.rank(), {{.*}}epoch % T.uint32(2){{.*}}, 0], 1, 1), (epoch + T.uint32(2) - T.uint32(1)) // T.uint32(2) * T.uint32(7),
show(after_numbers)


@T.prim_func
def before_others(X: T.Tensor((16,), F32), at: T.Tensor((2,), "int32"), Y: T.Tensor((16,), F32)):
    with T.Kernel(1, threads=32):
        inbox = W.alloc_packed(rows=1, row=16)
        S = W.alloc_symmetric((16,), F32)
        me = W.rank()
        for j in T.Parallel(16):
            inbox[at[0], 0, j] = X[j]
        for j in T.Parallel(16):
            S[1 - me, j] = inbox[me, 0, j]
        for j in T.Parallel(16):
            Y[j] = S[me, j]


# Rank 1 may have written no row of the tile. So the wait for the tile does not prove that the peer
# has started this launch.
# CHECK-LABEL: TEST: before_others
# CHECK: T.tileweave.wait_reached(T.access_ptr(inbox_arrived[
# CHECK: T.tileweave.wait_reached(T.access_ptr(finished[T.tileweave.rank(), 1 - T.tileweave.rank()], 1, 1), epoch - T.uint32(1),
# CHECK: S[1 - me, j] = inbox[
show(before_others, reuse="credit")
