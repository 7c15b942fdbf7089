# RUN: %python %s | %filecheck %s
"""Ragged tensors: a signal after each write adds its elements; a read waits for the announcement,
then for the announced total of its tile of rows."""

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
def rows(X: T.Tensor((4, 16), F32), at: T.Tensor((4,), "int32"), Y: T.Tensor((RANKS, 8, 16), F32)):
    with T.Kernel(1, threads=32):
        inbox = W.alloc_ragged((), rows=8, row=16)
        tile = T.alloc_shared((1, 16), F32)
        me = W.rank()
        for peer in T.serial(RANKS):
            W.announce(inbox[peer, me, 0, 0], at[peer])
        for t in T.serial(4):
            T.copy(X[t, 0], tile)
            T.copy(tile, inbox[at[t], me, t, 0])
        for source in T.serial(RANKS):
            for i in T.serial(W.announced(inbox[me, source, 0, 0])):
                T.copy(inbox[me, source, i, 0], tile)
                T.copy(tile, Y[source, i, 0])


# The unit is a row. The rows have two buffers and one counter; the announcements have two counters.
# CHECK-LABEL: TEST: rows
# CHECK: inbox_announced_posted = T.match_buffer({{.*}}, (2, 2, 2), "uint32"
# CHECK: inbox_arrived = T.match_buffer({{.*}}, (2, 2), "uint32"
# CHECK: for peer in range(2):
# CHECK-NEXT: T.tileweave.announce(T.access_ptr(inbox_announced[peer, {{.*}}, me, 0], 2, 2), at[peer], T.access_ptr(inbox_total[peer, 0], 1, 3), 8, 1, 8,
# CHECK-NEXT: T.tileweave.signal(T.access_ptr(inbox_announced_posted[peer, {{.*}}, me], 1, 3), T.uint32(1),
# CHECK: T.copy(T.region(tile[0, 0], 1, 1, 16), T.region(inbox[at[t], {{.*}}, me, t, 0], 2,
# CHECK-NEXT: T.tileweave.signal(T.access_ptr(inbox_arrived[at[t], me], 1, 3), T.uint32(1),
# CHECK: for source in range(2):
# CHECK-NEXT: T.tileweave.wait_reached(T.access_ptr(inbox_announced_posted[T.tileweave.rank(), {{.*}}, source], 1, 1), (epoch + T.uint32(2) - T.uint32(1)) // T.uint32(2),
# CHECK: if 0 < T.Cast("int32", inbox_announced[{{.*}}, source, 0]):
# CHECK-NEXT: T.tileweave.wait_reached(T.access_ptr(inbox_arrived[T.tileweave.rank(), source], 1, 1), inbox_announced[me, {{.*}}, source, 1],
# CHECK: for i in range(T.Cast("int32", inbox_announced[me, {{.*}}, source, 0])):
# CHECK-NOT: wait_reached
# CHECK-NOT: check_row
show(rows)


@T.prim_func
def halves(X: T.Tensor((4, 16), F32), at: T.Tensor((4,), "int32"), Y: T.Tensor((RANKS, 16), F32)):
    with T.Kernel(2, threads=32) as half:
        inbox = W.alloc_ragged((), rows=8, row=16)
        me = W.rank()
        if half == 0:
            for peer in T.serial(RANKS):
                W.announce(inbox[peer, me, 0, 0], at[peer])
        if at[3] >= 0:
            for j in T.Parallel(8):
                inbox[at[3], me, at[2], half * 8 + j] = X[0, half * 8 + j]
        for source in T.serial(RANKS):
            for j in T.Parallel(16):
                Y[source, j] = inbox[me, source, 0, j]


# A row has two units. Without credits, the writer waits for the owner, which data decides.
# CHECK-LABEL: TEST: halves
# CHECK: T.tileweave.announce({{.*}}, at[peer], {{.*}}, 8, 2, 8,
# CHECK: if at[3] >= 0:
# CHECK-NEXT: if {{.*}}at[3]{{.*}}T.tileweave.rank(){{.*}}:
# CHECK-NEXT: T.tileweave.wait_reached(T.access_ptr(finished[T.tileweave.rank(), at[3]], 1, 1), epoch - T.uint32(1),
# CHECK: inbox[at[3], me, at[2], bx * 8 + j] = X
# CHECK-NEXT: T.tileweave.signal(T.access_ptr(inbox_arrived[at[3], me], 1, 3), T.uint32(1),
# CHECK: T.tileweave.wait_reached(T.access_ptr(inbox_announced_posted[T.tileweave.rank(), source], 1, 1), epoch,
# CHECK-NEXT: T.tileweave.wait_reached(T.access_ptr(inbox_arrived[T.tileweave.rank(), source], 1, 1), inbox_announced[me, source, 1],
show(halves, reuse="credit")


@T.prim_func
def consecutive(
    X: T.Tensor((8, 16), F32), at: T.Tensor((4,), "int32"), Y: T.Tensor((RANKS, 16), F32)
):
    with T.Kernel(1, threads=32):
        inbox = W.alloc_ragged((), rows=8, row=16)
        tile = T.alloc_shared((1, 16), F32)
        me = W.rank()
        for peer in T.serial(RANKS):
            W.announce(inbox[peer, me, 0, 0], at[peer])
            for i in T.serial(at[peer]):
                T.copy(X[i, 0], tile)
                T.copy(tile, inbox[peer, me, i, 0])
        for source in T.serial(RANKS):
            for j in T.Parallel(16):
                Y[source, j] = inbox[me, source, 0, j]


# One signal follows all rows of a segment.
# CHECK-LABEL: TEST: consecutive
# CHECK: for i in range(at[peer]):
# CHECK: T.copy({{.*}}T.region(inbox[peer, {{.*}}, me, i, 0], 2,
# CHECK-NEXT: T.tileweave.signal(T.access_ptr(inbox_arrived[peer, me], 1, 3), T.Cast("uint32", T.max(at[peer], 0)),
show(consecutive)


# CHECK-LABEL: TEST: rows
# CHECK: T.tileweave.check_row(T.access_ptr(inbox[at[t], {{.*}}, me, t, 0], 1, 1), T.access_ptr(inbox_rows[at[t], 0], 1, 3), T.access_ptr(inbox_written[at[t]], 1, 3), t, 1, 8, 1, 1, epoch,
# CHECK-NEXT: T.copy({{.*}}T.region(inbox[at[t],
# CHECK: for segment_0 in range(2):
# CHECK-NEXT: T.tileweave.check_amount(T.access_ptr(inbox[segment_0, {{.*}}, T.tileweave.rank(), 0, 0], 1, 1), T.access_ptr(inbox_written[segment_0], 1, 1), T.access_ptr(inbox_total[segment_0, 0], 1, 1), 1,
show(rows, check_rows=True)


@T.prim_func
def tiles(X: T.Tensor((4, 16), F32), at: T.Tensor((4,), "int32"), Y: T.Tensor((RANKS, 6, 16), F32)):
    with T.Kernel(1, threads=32):
        inbox = W.alloc_ragged((), rows=6, row=16)
        row = T.alloc_shared((1, 16), F32)
        tile = T.alloc_shared((4, 16), F32)
        me = W.rank()
        for peer in T.serial(RANKS):
            W.announce(inbox[peer, me, 0, 0], at[peer])
        for t in T.serial(4):
            T.copy(X[t, 0], row)
            T.copy(row, inbox[at[t], me, at[t], 0])
        for source in T.serial(RANKS):
            n = W.announced(inbox[me, source, 0, 0])
            for t in T.serial(T.ceildiv(n, 4)):
                T.copy(inbox[me, source, t * 4, 0], tile)
                T.copy(tile, Y[source, t * 4, 0])


# Two tiles of 4 and 2 rows: an announcement has two totals, and each tile has a counter. A row
# outside of the segment is not stored and not counted.
# CHECK-LABEL: TEST: tiles
# CHECK: inbox_total = T.match_buffer({{.*}}, (2, 2), "uint32"
# CHECK: inbox_announced = T.match_buffer({{.*}}, (2, 2, 2, 3), "uint32"
# CHECK: inbox_arrived = T.match_buffer({{.*}}, (2, 4), "uint32"
# CHECK: T.tileweave.announce(T.access_ptr(inbox_announced[peer, {{.*}}, me, 0], 3, 2), at[peer], T.access_ptr(inbox_total[peer, 0], 2, 3), 6, 1, 4,
# CHECK: T.copy({{.*}}T.region(inbox[at[t], {{.*}}, me, at[t], 0], 2,
# CHECK-NEXT: if T.Cast("uint32", at[t]) < T.Cast("uint32", 6):
# CHECK-NEXT: T.tileweave.signal(T.access_ptr(inbox_arrived[at[t], me * 2 + at[t] // 4], 1, 3), T.uint32(1),
# CHECK: for t in range((n + 3) // 4):
# CHECK: T.tileweave.wait_reached(T.access_ptr(inbox_arrived[T.tileweave.rank(), source * 2 + t], 1, 1), inbox_announced[me, {{.*}}, source, t + 1],
# CHECK-NEXT: T.copy(T.region(inbox[
show(tiles)


@T.prim_func
def results(at: T.Tensor((2,), "int32"), Y: T.Tensor((RANKS, 16), F32)):
    with T.Kernel(1, threads=32):
        inbox = W.alloc_ragged((), rows=8, row=16)
        tile = T.alloc_shared((4, 16), F32)
        me = W.rank()
        T.clear(tile)
        for peer in T.serial(RANKS):
            n = at[peer]
            W.announce(inbox[peer, me, 0, 0], n)
            for t in T.serial(T.ceildiv(n, 4)):
                for i in T.serial(T.min(4, n - t * 4)):
                    for j in T.Parallel(16):
                        inbox[peer, me, t * 4 + i, j] = tile[i, j]
        for source in T.serial(RANKS):
            for j in T.Parallel(16):
                Y[source, j] = inbox[me, source, at[source], j]


# The rows of a tile that one loop writes have one signal. Reads of rows, which are data, wait for
# the tiles of the user's choice.
# CHECK-LABEL: TEST: results
# CHECK: for i in range(T.min(4, n - t * 4)):
# CHECK: inbox[peer, {{.*}}, me, t * 4 + i, j] = tile[i, j]
# CHECK: T.tileweave.signal(T.access_ptr(inbox_arrived[peer, me * 2 + t], 1, 3), T.Cast("uint32", T.max(T.min(4, n - t * 4), 0)),
# CHECK: if T.Cast("uint32", at[source]) < T.Cast("uint32", 8):
# CHECK-NEXT: T.tileweave.wait_reached(T.access_ptr(inbox_arrived[T.tileweave.rank(), source * 2 + at[source] // 4], 1, 1), inbox_announced[{{.*}}, source, at[source] // 4 + 1],
show(results, granule={"inbox": [1, 4, 16]})


@T.prim_func
def columns(X: T.Tensor((4, 16), F32), at: T.Tensor((4,), "int32"), Y: T.Tensor((RANKS, 16), F32)):
    with T.Kernel(1, threads=32):
        inbox = W.alloc_ragged((), rows=8, row=16)
        me = W.rank()
        for peer in T.serial(RANKS):
            W.announce(inbox[peer, me, 0, 0], at[peer])
        for t in T.serial(4):
            for j in T.Parallel(8):
                inbox[t % 2, me, at[2], at[t] % 2 * 8 + j] = X[0, j]
        for source in T.serial(RANKS):
            for j in T.Parallel(16):
                Y[source, j] = inbox[me, source, 0, j]


# Columns may be data if they are inside of the row for all data. Each half of a row is a unit.
# CHECK-LABEL: TEST: columns
# CHECK: T.tileweave.announce({{.*}}, at[peer], {{.*}}, 8, 2, 8,
# CHECK: inbox[t % 2, {{.*}}, me, at[2], at[t] % 2 * 8 + j] = X
# CHECK: T.tileweave.signal(T.access_ptr(inbox_arrived[t % 2, me], 1, 3), T.uint32(1),
show(columns)


@T.prim_func
def of_rank(at: T.Tensor((2,), "int32"), Y: T.Tensor((RANKS, 4, 16), F32)):
    with T.Kernel(1, threads=32):
        inbox = W.alloc_ragged((), rows=8, row=16)
        tile = T.alloc_shared((4, 16), F32)
        T.clear(tile)
        for peer in T.serial(RANKS):
            W.announce(inbox[peer, W.rank(), 0, 0], 8)
            for i in T.serial(T.min(at[peer], 4)):
                for j in T.Parallel(16):
                    inbox[peer, W.rank(), W.rank() * 4 + i, j] = tile[0, j]
        for source in T.serial(RANKS):
            T.copy(inbox[W.rank(), source, source * 4, 0], tile)
            T.copy(tile, Y[source, 0, 0])


# The rank selects the tile.
# CHECK-LABEL: TEST: of_rank
# CHECK: for i in range(T.min(at[peer], 4)):
# CHECK: T.tileweave.signal(T.access_ptr(inbox_arrived[peer, T.tileweave.rank() * 3], 1, 3),
# CHECK: T.tileweave.wait_reached(T.access_ptr(inbox_arrived[T.tileweave.rank(), source * 3], 1, 1), inbox_announced[T.tileweave.rank(), {{.*}}, source, source + 1],
show(of_rank)


@T.prim_func
def parts(
    X: T.Tensor((4, 16), F32),
    at: T.Tensor((4,), "int32"),
    half: T.Tensor((2,), "int32"),
    Y: T.Tensor((RANKS, 8, 16), F32),
):
    with T.Kernel(1, threads=32):
        inbox = W.alloc_ragged((), rows=8, row=16)
        part = T.alloc_shared((1, 4), F32)
        tile = T.alloc_shared((1, 16), F32)
        me = W.rank()
        for peer in T.serial(RANKS):
            W.announce(inbox[peer, me, 0, 0], at[peer])
        for t in T.serial(4):
            for h in T.serial(2):
                for j in T.serial(2):
                    T.copy(X[t, half[h] % 2 * 8 + j * 4], part)
                    T.copy(part, inbox[at[t], me, t, half[h] % 2 * 8 + j * 4])
        for source in T.serial(RANKS):
            for i in T.serial(W.announced(inbox[me, source, 0, 0])):
                T.copy(inbox[me, source, i, 0], tile)
                T.copy(tile, Y[source, i, 0])


# Data and loops around the write choose columns that are inside of the row. One signal follows all.
# CHECK-LABEL: TEST: parts
# CHECK: T.copy(T.region(part[0, 0], 1, 1, 4), T.region(inbox[at[t], {{.*}}, me, t, half[h] % 2 * 8 + j * 4], 2,
# CHECK-NEXT: T.tileweave.signal(T.access_ptr(inbox_arrived[at[t], me], 1, 3), T.uint32(4),
show(parts)
