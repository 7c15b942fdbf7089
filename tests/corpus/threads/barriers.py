"""Accesses of threads whose block meets at no barrier, or only in part."""

import tilelang.language as T

from tileweave import language as W

from .case import THREADS, N, clean, race


@race
def reversed_reads(faulty, data: T.Tensor((N,), "int32"), out: T.Tensor((N,), "int32")):
    with T.Kernel(1, threads=THREADS) as _:
        for i in T.Parallel(N):
            data[i] = i  # FAULT
        if not faulty:
            T.sync_threads()
        for i in T.Parallel(N):
            out[i] = data[N - 1 - i]  # FAULT


@race
def shifted_in_place(faulty, data: T.Tensor((N,), "int32"), out: T.Tensor((N,), "int32")):
    with T.Kernel(1, threads=THREADS) as _:
        for i in T.Parallel(N - 1):
            if faulty:
                data[i] = data[i + 1]  # FAULT
            else:
                out[i] = data[i + 1]


@race
def transposed_reads(faulty, data: T.Tensor((16, 16), "int32"), out: T.Tensor((16, 16), "int32")):
    with T.Kernel(1, threads=THREADS) as _:
        for i, j in T.Parallel(16, 16):
            data[i, j] = i - j  # FAULT
        for i, j in T.Parallel(16, 16):
            if faulty:
                out[i, j] = data[j, i]  # FAULT
            else:
                out[i, j] = data[i, j]


@race
def read_by_another_loop_shape(
    faulty, data: T.Tensor((16, 16), "int32"), out: T.Tensor((16,), "int32")
):
    with T.Kernel(1, threads=THREADS) as _:
        for i, j in T.Parallel(16, 16):
            data[i, j] = i - j  # FAULT
        if not faulty:
            T.sync_threads()
        for i in T.Parallel(16):
            out[i] = data[i, 15]  # FAULT


@race
def neighbour_thread(faulty, data: T.Tensor((N,), "int32"), out: T.Tensor((N,), "int32")):
    with T.Kernel(1, threads=THREADS) as _:
        tx = T.get_thread_binding()
        data[tx] = tx  # FAULT
        if faulty:
            T.sync_warp()
        else:
            T.sync_threads()
        out[tx] = data[(tx + 1) % THREADS]  # FAULT


@race
def neighbour_lane(faulty, data: T.Tensor((N,), "int32"), out: T.Tensor((N,), "int32")):
    with T.Kernel(1, threads=THREADS) as _:
        tx = T.get_thread_binding()
        data[tx] = tx  # FAULT
        if not faulty:
            T.sync_warp()
        out[tx] = data[tx ^ 1]  # FAULT


@race
def thread_writes_for_parallel(faulty, data: T.Tensor((N,), "int32"), out: T.Tensor((N,), "int32")):
    with T.Kernel(1, threads=THREADS) as _:
        tx = T.get_thread_binding()
        data[tx + 128] = tx  # FAULT
        if not faulty:
            T.sync_threads()
        for i in T.Parallel(N):
            out[i] = data[N - 1 - i]  # FAULT


@race
def counter_of_all_threads(faulty, data: T.Tensor((1,), "int32"), out: T.Tensor((N,), "int32")):
    """Each thread reads an element that all threads then write."""
    with T.Kernel(1, threads=THREADS) as _:
        before = T.alloc_var("int32")
        before = data[0]  # FAULT
        if not faulty:
            T.sync_threads()
        data[0] = before + 1  # FAULT


@race
def overwritten_too_early(faulty, data: T.Tensor((N,), "int32"), out: T.Tensor((2, N), "int32")):
    """Two loops read an element, the second one by other threads, before it is overwritten."""
    with T.Kernel(1, threads=THREADS) as _:
        for i in T.Parallel(N):
            out[0, i] = data[N - 1 - i]  # FAULT
        if not faulty:
            T.sync_threads()
        for i in T.Parallel(N):
            out[1, i] = data[i]
        for i in T.Parallel(N):
            data[i] = i  # FAULT


@race
def two_warps_put(faulty, data: T.Tensor((N,), "int32"), out: T.Tensor((N,), "int32")):
    with T.Kernel(1, threads=THREADS) as _:
        tx = T.get_thread_binding()
        if tx // 32 == 1:
            W.put_warp(data[0], out[0], 64)  # FAULT
        if tx // 32 == 2:
            W.put_warp(data[64], out[32 if faulty else 64], 64)  # FAULT


@race
def put_twice(faulty, data: T.Tensor((N,), "int32"), out: T.Tensor((2, N), "int32")):
    """The second copy reads what the first one writes, two elements further."""
    with T.Kernel(1, threads=THREADS) as _:
        W.put_block(data[0], out[0, 0], N)  # FAULT
        if not faulty:
            T.sync_threads()
        W.put_block(out[0, 8], out[1, 0], N - 8)  # FAULT


@race
def put_twice_to_one_place(faulty, data: T.Tensor((N,), "int32"), out: T.Tensor((2, N), "int32")):
    with T.Kernel(1, threads=THREADS) as _:
        W.put_block(data[0], out[0, 0], 64)  # FAULT
        if not faulty:
            T.sync_threads()
        W.put_block(data[64], out[0, 16], 64)  # FAULT


@race
def copy_then_transposed_reads(
    faulty, data: T.Tensor((16, 16), "int32"), out: T.Tensor((2, 16, 16), "int32")
):
    with T.Kernel(1, threads=THREADS) as _:
        T.copy(data[0:16, 0:16], out[0, 0:16, 0:16])  # FAULT
        for i, j in T.Parallel(16, 16):
            if faulty:
                out[1, i, j] = out[0, j, i]  # FAULT
            else:
                out[1, i, j] = out[0, i, j]


@race
def part_of_the_block_meets(faulty, data: T.Tensor((N,), "int32"), out: T.Tensor((N,), "int32")):
    with T.Kernel(1, threads=THREADS) as _:
        tx = T.get_thread_binding()
        data[tx] = tx  # FAULT
        if tx < 64:
            T.sync_threads(1, 64)
            if faulty:
                out[tx] = data[tx + 64]  # FAULT
            else:
                out[tx] = data[63 - tx]


@race
def signal_between_threads(
    faulty,
    data: T.Tensor((N,), "int32"),
    ready: T.Tensor((1,), "int32"),
    out: T.Tensor((N,), "int32"),
):
    """Each thread publishes its element; the faulty program reads it with a relaxed load."""
    sem = "relaxed" if faulty else "acquire"
    with T.Kernel(1, threads=THREADS) as _:
        tx = T.get_thread_binding()
        if tx == 64:
            data[0] = 5  # FAULT
            W.st(ready[0], 1, sem="release", scope="gpu")
        if tx == 3:
            while W.ld(ready[0], sem=sem, scope="gpu") != 1:
                pass
            out[0] = data[0]  # FAULT


@clean
def same_points_again(data: T.Tensor((16, 16), "float16"), out: T.Tensor((16, 16), "float32")):
    with T.Kernel(1, threads=THREADS) as _:
        for i, j in T.Parallel(16, 16):
            data[i, j] = 1
        for k in T.serial(3):
            for i, j in T.Parallel(16, 16):
                data[i, j] = data[i, j] + k
        for i, j in T.Parallel(16, 16):
            out[i, j] = data[i, j]


@clean
def each_thread_its_own_elements(data: T.Tensor((N,), "int32"), out: T.Tensor((N,), "int32")):
    """Vectors of 2 elements per thread: T.Parallel may give a thread exactly these."""
    with T.Kernel(1, threads=THREADS) as _:
        tx = T.get_thread_binding()
        for k in T.serial(2):
            data[tx * 2 + k] = k
        for i in T.Parallel(N):
            out[i] = data[i]


@clean
def one_thread_after_the_same_element(data: T.Tensor((THREADS,), "int32")):
    """Thread 0 executes point 0 of a loop with one point per thread."""
    with T.Kernel(1, threads=THREADS) as _:
        for i in T.Parallel(THREADS):
            data[i] = i
        if T.get_thread_binding() == 0:
            data[0] = data[0] + 1


@clean
def all_threads_write_one_value(data: T.Tensor((1,), "int32"), out: T.Tensor((N,), "int32")):
    with T.Kernel(1, threads=THREADS) as _:
        data[0] = 3
        out[T.get_thread_binding()] = data[0]


@clean
def a_barrier_for_shared_memory(data: T.Tensor((N,), "int32"), out: T.Tensor((N,), "int32")):
    """TileLang inserts a barrier between the threads that exchange the tile."""
    with T.Kernel(1, threads=THREADS) as _:
        tile = T.alloc_shared((N,), "int32")
        for i in T.Parallel(N):
            data[i] = i
            tile[i] = i
        for i in T.Parallel(N):
            out[i] = data[N - 1 - i] + tile[N - 1 - i]


@clean
def fragments(data: T.Tensor((16, 16), "float32"), out: T.Tensor((16, 16), "float32")):
    """The layout of a fragment decides which thread executes which point."""
    with T.Kernel(1, threads=THREADS) as _:
        part = T.alloc_fragment((16, 16), "float32")
        T.copy(data, part)
        T.copy(part, out)
        T.copy(out, part)
        for i, j in T.Parallel(16, 16):
            out[i, j] = part[i, j] + out[i, j]


@clean
def atomic_additions(data: T.Tensor((N,), "int32"), out: T.Tensor((1,), "int32")):
    with T.Kernel(1, threads=THREADS) as _:
        for i in T.Parallel(N):
            T.atomic_add(data[N - 1 - i], 1)
        for i in T.Parallel(N):
            T.atomic_add(data[i], 1)
        T.atomic_add(out[0], 1)


@clean
def puts_of_equal_shares(data: T.Tensor((N,), "int32"), out: T.Tensor((2, N), "int32")):
    """Both copies give a thread the same elements."""
    with T.Kernel(1, threads=THREADS) as _:
        W.put_block(data[0], out[0, 0], N)
        W.put_block(out[0, 0], out[1, 0], N)
