"""Accesses to one place by threads that no barrier orders."""

import tilelang.language as T

from tileweave import language as W

from .case import THREADS, N, clean, race


@race
def all_threads_store_to_one_place(faulty, out: T.Tensor((N,), "int32")):
    with T.Kernel(1, threads=THREADS) as _:
        tx = T.get_thread_binding()
        out[0] = tx if faulty else 7  # FAULT


@race
def warps_store_to_the_same_places(faulty, out: T.Tensor((N,), "int32")):
    """The twin stores equal values."""
    with T.Kernel(1, threads=THREADS) as _:
        tx = T.get_thread_binding()
        out[tx % 32] = tx if faulty else tx % 32 + 1  # FAULT


@race
def points_store_to_one_place(faulty, out: T.Tensor((N,), "int32")):
    with T.Kernel(1, threads=THREADS) as _:
        for i in T.Parallel(N):
            out[i % 16] = i if faulty else i % 16  # FAULT


@race
def one_point_stores(faulty, out: T.Tensor((N,), "int32")):
    """The twin stores the value of point 3, although other points follow it."""
    with T.Kernel(1, threads=THREADS) as _:
        for i in T.Parallel(N):
            if i == 3 or (faulty and i == 200):
                out[0] = i  # FAULT


@race
def scatter_by_data(faulty, data: T.Tensor((N,), "int32"), out: T.Tensor((N,), "int32")):
    with T.Kernel(1, threads=THREADS) as _:
        for i in T.Parallel(N):
            out[data[i] % (8 if faulty else N)] = i  # FAULT


@race
def fragment_stored_to_one_place(
    faulty, data: T.Tensor((N,), "int32"), out: T.Tensor((N,), "int32")
):
    with T.Kernel(1, threads=THREADS) as _:
        part = T.alloc_fragment((N,), "int32")
        T.copy(data, part)
        for i in T.Parallel(N):
            out[i // (4 if faulty else 1)] = part[i]  # FAULT


@race
def shared_place(faulty, out: T.Tensor((N,), "int32")):
    with T.Kernel(1, threads=THREADS) as _:
        tile = T.alloc_shared((N,), "int32")
        tx = T.get_thread_binding()
        tile[tx // (2 if faulty else 1)] = tx  # FAULT
        T.sync_threads()
        out[tx] = tile[tx // 2]


@race
def overlapping_fragments(faulty, data: T.Tensor((N,), "int32"), out: T.Tensor((N,), "int32")):
    with T.Kernel(1, threads=THREADS) as _:
        a = T.alloc_fragment((128,), "int32")
        b = T.alloc_fragment((128,), "int32")
        T.copy(data[0:128], a)
        T.copy(data[128:256], b)
        T.copy(a, out[0:128])  # FAULT
        if not faulty:
            T.sync_threads()
        T.copy(b, out[64:192])  # FAULT


@race
def overlapping_loops_over_a_fragment(
    faulty, data: T.Tensor((N,), "int32"), out: T.Tensor((N,), "int32")
):
    with T.Kernel(1, threads=THREADS) as _:
        part = T.alloc_fragment((N,), "int32")
        T.copy(data, part)
        for i in T.Parallel(N):
            out[i] = part[i]  # FAULT
        for i in T.Parallel(64):
            out[(0 if faulty else 64) + i] = part[64 + i] + 1  # FAULT


@race
def transposed_through_scratch(
    faulty, data: T.Tensor((64, 64), "int32"), out: T.Tensor((2, 64, 64), "int32")
):
    with T.Kernel(1, threads=THREADS) as _:
        a = T.alloc_fragment((64, 64), "int32")
        b = T.alloc_fragment((64, 64), "int32")
        T.copy(data, a)
        T.copy(a, out[0, 0:64, 0:64])  # FAULT
        if not faulty:
            T.sync_threads()
        for i, j in T.Parallel(64, 64):
            b[i, j] = out[0, j, i]  # FAULT
        T.copy(b, out[1, 0:64, 0:64])


@race
def quarter_through_scratch(
    faulty, data: T.Tensor((64, 64), "int32"), out: T.Tensor((2, 64, 64), "int32")
):
    with T.Kernel(1, threads=THREADS) as _:
        a = T.alloc_fragment((64, 64), "int32")
        b = T.alloc_fragment((32, 32), "int32")
        T.copy(data, a)
        T.copy(a, out[0, 0:64, 0:64])  # FAULT
        if not faulty:
            T.sync_threads()
        T.copy(out[0, 0:32, 32:64], b)  # FAULT
        T.copy(b, out[1, 0:32, 0:32])


@race
def added_then_read(faulty, data: T.Tensor((N,), "int32"), out: T.Tensor((N,), "int32")):
    with T.Kernel(1, threads=THREADS) as _:
        for i in T.Parallel(N):
            T.atomic_add(data[i], 1)  # FAULT
        if not faulty:
            T.sync_threads()
        for i in T.Parallel(N):
            out[i] = data[N - 1 - i]  # FAULT


@race
def cleared_then_added(faulty, data: T.Tensor((N,), "int32")):
    with T.Kernel(1, threads=THREADS) as _:
        for i in T.Parallel(N):
            data[i] = 0  # FAULT
        if not faulty:
            T.sync_threads()
        for i in T.Parallel(N):
            T.atomic_add(data[N - 1 - i], 1)  # FAULT


@race
def tile_added_then_read(faulty, data: T.Tensor((N,), "int32"), out: T.Tensor((2, N), "int32")):
    with T.Kernel(1, threads=THREADS) as _:
        part = T.alloc_fragment((N,), "int32")
        T.copy(data, part)
        T.atomic_add(out[0, 0:N], part)  # FAULT
        if not faulty:
            T.sync_threads()
        for i in T.Parallel(N):
            out[1, i] = out[0, N - 1 - i]  # FAULT


@race
def one_of_several_adders_reads(
    faulty, data: T.Tensor((N,), "int32"), out: T.Tensor((N,), "int32")
):
    """Threads 2 and 3 add to one element; both are among the 'other threads' of the clocks."""
    with T.Kernel(1, threads=THREADS) as _:
        tx = T.get_thread_binding()
        if tx >= 32:
            W.red_add(data[tx // 2], 1, scope="gpu")  # FAULT
            if not faulty:
                T.sync_warp()
            out[tx] = data[tx // 2]  # FAULT


@clean
def equal_values_in_one_place(data: T.Tensor((N,), "int32"), out: T.Tensor((N,), "int32")):
    with T.Kernel(1, threads=THREADS) as _:
        seen = T.alloc_shared((8,), "int32")
        for i in T.Parallel(N):
            seen[i % 8] = 1
        for i in T.Parallel(N):
            out[data[i] % 8] = seen[data[i] % 8]


@clean
def parts_of_one_fragment(data: T.Tensor((N,), "int32"), out: T.Tensor((2, N), "int32")):
    """A part of a fragment has the threads that the whole fragment has there."""
    with T.Kernel(1, threads=THREADS) as _:
        part = T.alloc_fragment((N,), "int32")
        T.copy(data, part)
        for i in T.Parallel(64):
            out[0, 64 + i] = part[64 + i]
        for i in T.Parallel(N):
            if i >= 64 and i < 128:
                out[1, i] = out[0, i] + part[i]
        T.copy(part[64:128], out[0, 64:128])


@clean
def tiles_side_by_side(data: T.Tensor((64, 64), "int32"), out: T.Tensor((64, 64), "int32")):
    with T.Kernel(1, threads=THREADS) as _:
        for row, column in T.grid(2, 2):
            part = T.alloc_fragment((32, 32), "int32")
            T.copy(data[row * 32, column * 32], part)
            T.copy(part, out[row * 32, column * 32])


@clean
def accumulated_in_place(data: T.Tensor((64, 64), "float32"), out: T.Tensor((64, 64), "float32")):
    with T.Kernel(1, threads=THREADS) as _:
        a = T.alloc_shared((64, 64), "float32")
        total = T.alloc_fragment((64, 64), "float32")
        T.copy(data, a)
        T.clear(total)
        T.gemm(a, a, total)
        for i, j in T.Parallel(64, 64):
            out[i, j] = out[i, j] + total[i, j]
        for i, j in T.Parallel(64, 64):
            out[i, j] = out[i, j] * 2.0 + total[i, j]


@clean
def added_by_all_and_read_by_the_last(data: T.Tensor((N,), "int32"), out: T.Tensor((N,), "int32")):
    """The thread that adds last has acquired what the others have released."""
    with T.Kernel(1, threads=THREADS) as _:
        tx = T.get_thread_binding()
        before = T.alloc_var("int32")
        data[tx] = tx
        if tx < 4:
            before = W.atom_add(out[0], 1, scope="gpu", sem="acq_rel")
            if before == 3:
                out[1] = data[0] + data[1] + data[2] + data[3]
