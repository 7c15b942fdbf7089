# REQUIRES: since-0.1.13
# RUN: %python %s | %filecheck %s
"""The inference inserts statements at the right accesses, for the right ranks, outside of loops."""

import tilelang.language as T

import tileweave as tw
from tileweave import language as W


def show(program, stage="tile", **options):
    print("TEST:", program.attrs["global_symbol"])
    print(tw.emit(program, stage=stage, world_size=4, pass_configs=options))


M, N, B = 64, 64, 16


@T.prim_func
def shift(
    X: T.Tensor((M, N), "float32"),
    S: W.Symmetric((M, N), "float32"),
    Y: T.Tensor((M, N), "float32"),
):
    with T.Kernel(M // B, threads=32) as row:
        tile = T.alloc_shared((B, N), "float32")
        T.copy(X[row * B, 0], tile)
        T.copy(tile, S[(W.rank() + 1) % 4, row * B, 0])
        T.copy(S[W.rank(), row * B, 0], tile)
        T.copy(tile, Y[row * B, 0])


# The caller reads S between launches: writers wait until its owner has started the next one.
# CHECK-LABEL: TEST: shift
# CHECK: epoch: T.uint32 = T.tileweave.ld(T.access_ptr(launches[0]
# CHECK-NEXT: T.tileweave.complete_bulk_stores()
# CHECK-NEXT: T.tvm_storage_sync("shared")
# CHECK-NEXT: if tx == 31
# CHECK-NEXT: counted: T.uint32 = T.tileweave.atom_add(T.access_ptr(launches[1]
# CHECK: T.tileweave.st(T.access_ptr(launches[0], 1, 2), epoch
# CHECK-NEXT: if bx == 0:
# CHECK-NEXT: T.tileweave.complete_bulk_stores()
# CHECK-NEXT: T.tvm_storage_sync("shared")
# CHECK-NEXT: for step in range(3):
# CHECK-NEXT: if T.bitwise_and(
# CHECK: T.tileweave.signal(T.access_ptr(started[(rank + 1 + step) % 4, rank]
# CHECK: T.copy(T.region(X[
# CHECK-NEXT: T.tileweave.wait_reached(T.access_ptr(started[rank, (rank + 1) % 4], 1, 1), epoch
# CHECK-NEXT: T.copy({{.*}}T.region(S[(rank + 1) % 4, bx * 16, 0]
# CHECK-NEXT: T.tileweave.complete_bulk_stores()
# CHECK-NEXT: T.tvm_storage_sync("shared")
# CHECK-NEXT: if tx == 0
# CHECK-NEXT: T.tileweave.signal(T.access_ptr(S_arrived[(rank + 1) % 4, bx], 1, 3), T.uint32(1), "u32", "add", "sys", "release")
# CHECK-NEXT: T.tileweave.wait_reached(T.access_ptr(S_arrived[rank, bx], 1, 1), epoch,
# CHECK-NEXT: T.copy(T.region(S[rank, bx * 16, 0]
# CHECK-NEXT: T.copy(T.region(tile
# CHECK-NOT: T.tileweave.
show(shift)

# CHECK-LABEL: TEST: shift
# CHECK: tw::wait_reached<
# CHECK-NOT: tl::tma_store(
# CHECK: tl::fence_proxy_async();
# CHECK: tl::tma_store(
# CHECK: tw::complete_bulk_stores();
# CHECK-NEXT: __syncthreads();
# CHECK: tw::signal<
# CHECK: tw::wait_reached<
show(shift, "cuda")


@T.prim_func
def staged(X: T.Tensor((4 * B, N), "float32"), Y: T.Tensor((B, N), "float32")):
    with T.Kernel(4, threads=32) as block:
        parts = W.alloc_symmetric((4 * B, N), "float32")
        tile = T.alloc_shared((B, N), "float32")
        total = T.alloc_fragment((B, N), "float32")
        me = W.rank()
        owner = (me + 1 + block) % 4
        T.copy(X[owner * B, 0], tile)
        if owner != me:
            T.copy(tile, parts[owner, me * B, 0])
        else:
            T.copy(tile, total)
            for step in T.serial(3):
                source = (me + 1 + step) % 4
                T.copy(parts[me, source * B, 0], tile)
                for i, j in T.Parallel(B, N):
                    total[i, j] += tile[i, j]
            T.copy(total, Y)


# All ranks wait for all ranks, so two buffers in turn need no wait before a write. A wait that leaves
# no loop uses the expression of the program: source.
# CHECK-LABEL: TEST: staged
# CHECK: parts = T.match_buffer({{.*}}, (4, 2, 64, 64)
# CHECK: parts_arrived = T.match_buffer({{.*}}, (4, 2, 4), "uint32"
# CHECK-NOT: started
# CHECK: if owner != me:
# CHECK-NEXT: T.copy({{.*}}T.region(parts[owner, T.Cast("int32", epoch % T.uint32(2)), me * 16, 0]
# CHECK: T.tileweave.signal(T.access_ptr(parts_arrived[{{.*}}T.Cast("int32", epoch % T.uint32(2)), me]
# CHECK: for step in range(3):
# CHECK-NEXT: source
# CHECK-NEXT: T.tileweave.wait_reached(T.access_ptr(parts_arrived[rank, T.Cast("int32", epoch % T.uint32(2)), source]
# CHECK-SAME: (epoch + T.uint32(2) - T.uint32(1)) // T.uint32(2)
# CHECK-NEXT: T.copy(T.region(parts[me,
show(staged)

# With credits: a reader signals to the writers at the end of the launch.
# CHECK-LABEL: TEST: staged
# CHECK: parts = T.match_buffer({{.*}}, (4, 64, 64)
# CHECK: if owner != me:
# CHECK-NEXT: T.tileweave.wait_reached(T.access_ptr(finished[rank, {{.*}}], 1, 1), epoch - T.uint32(1)
# CHECK-NEXT: T.copy(
# CHECK: T.tileweave.atom_add(T.access_ptr(launches[1]
# CHECK: T.tileweave.signal(T.access_ptr(finished[(rank + 1 + step) % 4, rank]
show(staged, **{"tileweave.reuse": "credit"})


@T.prim_func
def reduce_add(X: T.Tensor((4, 24, 40), "float32"), Y: W.Symmetric((24, 40), "float32")):
    with T.Kernel(3, 2, threads=32) as (bx, by):
        tile = T.alloc_shared((16, 16), "float32")
        T.clear(tile)
        T.copy(tile, Y[W.rank(), by * 16, bx * 16])
        for step in T.serial(4):
            T.copy(
                X[(W.rank() + 1 + step) % 4, by * 16 : by * 16 + 16, bx * 16 : bx * 16 + 16], tile
            )
            T.atomic_add(Y[(W.rank() + 1 + step) % 4, by * 16, bx * 16], tile, use_tma=True)


# All ranks observe the clearing; tails count fewer elements; the last block waits for all of them.
# CHECK-LABEL: TEST: reduce_add
# CHECK: T.copy({{.*}}T.region(Y[rank, by * 16, bx * 16]
# CHECK: for step in range(4):
# CHECK: T.tileweave.signal(T.access_ptr(Y_cleared[(rank + 1 + step) % 4, rank * 6 + (by * 3 + bx)], 1, 3), T.Cast("uint32", T.min(16, 24 - by * 16) * T.min(16, 40 - bx * 16) // 64), "u32", "add"
# CHECK: for step in range(4):
# CHECK: T.tileweave.wait_reached(T.access_ptr(Y_cleared[rank,
# CHECK-NEXT: T.atomicadd(
# CHECK: T.tileweave.signal(T.access_ptr(Y_complete[(rank + step + 1) % 4, 0]
# CHECK: if
# CHECK-NEXT: T.tileweave.wait_reached(T.access_ptr(Y_complete[rank, 0], 1, 1), epoch * T.uint32(
show(reduce_add)


@T.prim_func
def pulled(X: T.Tensor((B, N), "float32"), Y: T.Tensor((4, B, N), "float32")):
    with T.Kernel(1, threads=32) as _:
        shared = W.alloc_symmetric((B, N), "float32")
        tile = T.alloc_shared((B, N), "float32")
        T.copy(X, tile)
        T.copy(tile, shared[W.rank(), 0, 0])
        for step in T.serial(3):
            source = (W.rank() + 1 + step) % 4
            T.copy(shared[source, 0, 0], tile)
            T.copy(tile, Y[source, 0, 0])


# Each rank that loads it is signalled by its own counter. The owner does not load it.
# CHECK-LABEL: TEST: pulled
# CHECK: shared_arrived = T.match_buffer({{.*}}, (4, 2, 4), "uint32"
# A launch of one block counts no blocks.
# CHECK: T.tvm_storage_sync("shared")
# CHECK-NEXT: if tx == 31
# CHECK-NEXT: T.tileweave.st(T.access_ptr(launches[0], 1, 2), epoch
# CHECK: for step in range(3):
# CHECK: T.tileweave.signal(T.access_ptr(shared_arrived[(rank + 1 + step) % 4, T.Cast("int32", epoch % T.uint32(2)), rank]
# CHECK: for step in range(3):
# CHECK: T.tileweave.wait_reached(T.access_ptr(shared_arrived[rank, T.Cast("int32", epoch % T.uint32(2)),
# CHECK-NEXT: T.copy(T.region(shared[
# CHECK-NOT: atom_add
show(pulled)


@T.prim_func
def in_branches(X: T.Tensor((B, N), "float32"), Y: T.Tensor((4, B, N), "float32")):
    with T.Kernel(2, threads=32) as block:
        S = W.alloc_symmetric((2, B, N), "float32")
        tile = T.alloc_shared((B, N), "float32")
        me = W.rank()
        if block == 0:
            T.copy(X, tile)
            T.copy(tile, S[(me + 1) % 4, 0, 0, 0])
            T.copy(tile, S[(me + 1) % 4, 1, 0, 0])
        for turn in T.serial(4):
            chosen = block + me % 2
            if chosen == 1:
                T.copy(S[me, 0, 0, 0], tile)
            elif turn % 2 == 1:
                T.copy(S[me, 1, 0, 0], tile)
            T.copy(tile, Y[turn, 0, 0])


# A wait leaves the loop with the branches around it if they are the same in each iteration.
# CHECK-LABEL: TEST: in_branches
# CHECK: if bx + me % 2 == 1:
# CHECK-NEXT: T.tileweave.wait_reached(T.access_ptr(S_arrived[rank, 0]
# CHECK-NEXT: for turn in range(4):
# CHECK: if chosen == 1:
# CHECK-NEXT: T.copy(T.region(S[
# CHECK-NEXT: else:
# CHECK-NEXT: if turn % 2 == 1:
# CHECK-NEXT: T.tileweave.wait_reached(T.access_ptr(S_arrived[rank, 1]
# CHECK-NEXT: T.copy(T.region(S[
show(in_branches)


@T.prim_func
def local(X: T.Tensor((M, N), "float32"), Y: T.Tensor((M, N), "float32")):
    with T.Kernel(M // B, threads=32) as row:
        tile = T.alloc_shared((B, N), "float32")
        T.copy(X[row * B, 0], tile)
        T.copy(tile, Y[row * B, 0])


# The body of a kernel that accesses no other rank stays unchanged.
# CHECK-LABEL: TEST: local
# CHECK-NOT: T.tileweave
# CHECK: T.copy(
# CHECK-NOT: T.tileweave
show(local)
