# RUN: %python %s | %filecheck %s
"""In a persistent kernel a signal and the completion of its store sink past the next main loop."""

import tilelang.language as T

import tileweave as tw
from tileweave import language as W

SHARE, N, K, BLOCKS = 256, 512, 512, 4
ROWS, COLUMNS = SHARE // 128, N // 256
TILES = 4 * ROWS * COLUMNS


@T.prim_func
def persistent(
    A: T.Tensor((4 * SHARE, K), "bfloat16"),
    B: T.Tensor((N, K), "bfloat16"),
    C: T.Tensor((SHARE, N), "bfloat16"),
):
    with T.Kernel(BLOCKS, threads=256) as block:
        parts = W.alloc_symmetric((4 * SHARE, N), "bfloat16")
        A_tile = T.alloc_shared((128, 64), "bfloat16")
        B_tile = T.alloc_shared((256, 64), "bfloat16")
        C_tile = T.alloc_shared((128, 256), "bfloat16")
        total = T.alloc_fragment((128, 256), "float32")
        me = W.rank()
        for turn in T.serial(T.ceildiv(TILES, BLOCKS)):
            number = turn * BLOCKS + block
            if number < TILES:
                owner, tile = W.own_last(number, ROWS * COLUMNS, me, 4)
                row, column = tile // COLUMNS * 128, tile % COLUMNS * 256
                T.clear(total)
                for k in T.Pipelined(K // 64, num_stages=3):
                    T.copy(A[owner * SHARE + row, k * 64], A_tile)
                    T.copy(B[column, k * 64], B_tile)
                    T.gemm(A_tile, B_tile, total, transpose_B=True)
                if owner != me:
                    T.copy(total, C_tile)
                    T.copy(C_tile, parts[owner, me * SHARE + row, column])
                else:
                    for step in T.serial(3):
                        source = (me + 1 + step) % 4
                        T.copy(parts[me, source * SHARE + row, column], C_tile)
                        for i, j in T.Parallel(128, 256):
                            total[i, j] += C_tile[i, j]
                    T.copy(total, C_tile)
                    T.copy(C_tile, C[row, column])


def show(stage="cuda", **options):
    print("TEST:", options)
    configs = {f"tileweave.{name}": value for name, value in options.items()}
    print(tw.emit(persistent, stage=stage, world_size=4, pass_configs=configs))


# The last round is that of own tiles, so every signal has a round to sink to.
# CHECK-LABEL: TEST: {'sink_signals': True}
# CHECK: for turn in range(4):
# CHECK: for k in
# CHECK: T.gemm(
# CHECK-NEXT: if 0 < turn and (rank + turn) % 4 != rank:
# CHECK-NEXT: T.tileweave.complete_bulk_stores()
# CHECK-NEXT: T.tvm_storage_sync("shared")
# CHECK-NEXT: if tx == 0
# CHECK-NEXT: T.tileweave.signal(T.access_ptr(parts_arrived[(rank + turn) % 4
# CHECK-NEXT: if owner != me:
# CHECK: T.copy({{.*}}T.region(parts[owner
# CHECK-NOT: T.tileweave.signal
# CHECK: else:
show("tile", sink_signals=True)

# The wait for the read of shared memory stays behind the store.
# CHECK-LABEL: TEST: {'sink_signals': True}
# CHECK: for (int turn = 0;
# CHECK: tl::wgmma_ss<
# CHECK: tw::complete_bulk_stores();
# CHECK-NEXT: tl::__sync_thread_partial(
# CHECK-NEXT: if (((int)threadIdx.x) == 128) {
# CHECK-NEXT: tw::signal<
# CHECK: tl::tma_store(parts_desc
# CHECK: tl::tma_store_wait<0, true>();
# CHECK-NOT: tw::complete_bulk_stores
# CHECK-NOT: tw::signal<
# CHECK: tw::wait_reached<
show(sink_signals=True)

# Without the option each follows its store.
# CHECK-LABEL: TEST: {}
# CHECK: tl::wgmma_ss<
# CHECK-NOT: tw::signal<
# CHECK: tl::tma_store(parts_desc
# CHECK: tl::tma_store_wait<0, true>();
# CHECK-NEXT: }
# CHECK-NEXT: tw::complete_bulk_stores();
# CHECK-NEXT: tl::__sync_thread_partial(
# CHECK: tw::signal<
# CHECK: tw::wait_reached<
show()

# nvcc takes it.
# CHECK-LABEL: TEST: {'sink_signals': True}
# CHECK: wgmma.mma_async
# CHECK: cp.async.bulk.wait_group 0;
# CHECK: red.release.sys
# CHECK: cp.async.bulk.tensor.{{.*}}global.shared
show("ptx", sink_signals=True)
