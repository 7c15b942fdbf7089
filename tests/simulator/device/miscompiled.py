"""Small programs that TileLang miscompiles unless a pass of TileWeave corrects the result."""

import tilelang.language as T

from tests.factory import factory
from tileweave import language as W

BF16 = "bfloat16"


def pipelined_in_a_loop():
    """The accumulator is cleared once, before the outer loop."""
    rows, dim, count, steps = 64, 32, 128, 2

    @T.prim_func
    def program(
        Q: T.Tensor((rows, dim), BF16),
        K: T.Tensor((steps, count, dim), BF16),
        V: T.Tensor((steps, count, dim), BF16),
        Out: T.Tensor((rows, dim), BF16),
    ):
        with T.Kernel(1, threads=128):
            Q_tile = T.alloc_shared((rows, dim), BF16)
            K_tile = T.alloc_shared((rows, dim), BF16)
            V_tile = T.alloc_shared((rows, dim), BF16)
            Out_tile = T.alloc_shared((rows, dim), BF16)
            scores = T.alloc_fragment((rows, rows), "float32")
            weights = T.alloc_fragment((rows, rows), BF16)
            total = T.alloc_fragment((rows, dim), "float32")
            W.fence("gpu")
            T.copy(Q, Q_tile)
            T.clear(total)
            for step in T.serial(steps):
                for j in T.Pipelined(count // rows, num_stages=2):
                    T.copy(K[step, j * rows, 0], K_tile)
                    T.copy(V[step, j * rows, 0], V_tile)
                    T.gemm(Q_tile, K_tile, scores, transpose_B=True, clear_accum=True)
                    T.copy(scores, weights)
                    T.gemm(weights, V_tile, total)
            T.copy(total, Out_tile)
            T.copy(Out_tile, Out)

    return program


@factory
def past_a_loop(x: T.Tensor((256,), "float32"), y: T.Tensor((2, 256), "float32")):
    """On rank 0 the loop does not run, and only its barriers order ``first``."""
    with T.Kernel(1, threads=256):
        first = T.alloc_shared((256,), "float32")
        second = T.alloc_shared((256,), "float32")
        W.fence("gpu")
        for i in T.Parallel(256):
            first[i] = x[i]
        for _ in T.serial(W.rank()):
            for i in T.Parallel(256):
                second[i] = x[i]
            for i in T.Parallel(256):
                y[0, i] = second[255 - i]
        for i in T.Parallel(256):
            y[1, i] = first[255 - i]


@factory
def changes_for_fewer_threads(
    counts: T.Tensor((2,), "uint32"), x: T.Tensor((64,), "float32"), y: T.Tensor((64,), "float32")
):
    """All threads read ``tile``, then half of them change it, in a loop."""
    with T.Kernel(1, threads=128):
        tile = T.alloc_shared((64,), "float32")
        total = T.alloc_fragment((64,), "float32")
        next_count = W.ld(counts[0], scope="gpu", sem="relaxed") + T.uint32(1)
        if T.get_thread_binding() == 0:
            counts[1] = next_count
        T.copy(x, tile)
        T.clear(total)
        for i in T.Parallel(64):
            total[i] = total[i] + tile[i]
        for _ in T.serial(2):
            for i in T.Parallel(64):
                tile[i] = tile[i] * 2
        T.copy(total, y)


@factory
def reads_before_warps(
    A: T.Tensor((64, 64), "float16"),
    B: T.Tensor((64, 64), "float16"),
    C: T.Tensor((64, 64), "float32"),
    X: T.Tensor((128,), "float32"),
    Y: T.Tensor((128,), "float32"),
):
    """Threads of the producer read ``S``, whose reuse the program's threads release."""
    with T.Kernel(2, threads=128) as block:
        S = W.alloc_symmetric((128,), "float32")
        A_tile = T.alloc_shared((64, 32), "float16")
        B_tile = T.alloc_shared((64, 32), "float16")
        total = T.alloc_fragment((64, 64), "float32")
        me = W.rank()
        if block == 1:
            for i in T.Parallel(128):
                S[(me + 1) % 2, i] = X[i]
        for i in T.Parallel(128):
            if block == 0:
                Y[i] = S[me, i]
        T.clear(total)
        for k in T.Pipelined(2, num_stages=2):
            T.copy(A[0, k * 32], A_tile)
            T.copy(B[0, k * 32], B_tile)
            T.gemm(A_tile, B_tile, total, transpose_B=True)
        if block == 0:
            T.copy(total, C)


@factory
def reads_in_conditions(
    A: T.Tensor((64, 64), "float16"),
    B: T.Tensor((64, 64), "float16"),
    C: T.Tensor((64, 64), "float32"),
    X: T.Tensor((2,), "int32"),
):
    """Threads of the producer read ``S``, in conditions, whose reuse the program's threads
    release."""
    with T.Kernel(1, threads=128):
        S = W.alloc_symmetric((2,), "int32")
        A_tile = T.alloc_shared((64, 32), "float16")
        B_tile = T.alloc_shared((64, 32), "float16")
        total = T.alloc_fragment((64, 64), "float32")
        me = W.rank()
        for i in T.Parallel(2):
            S[(me + 1) % 2, i] = X[i]
        for step in T.serial(2):
            if S[me, step] > 0:
                T.clear(total)
                for k in T.Pipelined(2, num_stages=2):
                    T.copy(A[0, k * 32], A_tile)
                    T.copy(B[0, k * 32], B_tile)
                    T.gemm(A_tile, B_tile, total, transpose_B=True)
                T.copy(total, C)


@factory
def waits_before_warps(
    num: T.Tensor((1,), "int32"),
    X: T.Tensor((64, 64), "float16"),
    B: T.Tensor((64, 64), "float16"),
    Y: T.Tensor((2, 64, 64), "float32"),
):
    """Threads of the producer wait for flags that the last block clears."""
    with T.Kernel(2, threads=128) as block:
        S = W.alloc_symmetric((2, 64, 64), "float16")
        A_tile = T.alloc_shared((32, 32), "float16")
        B_tile = T.alloc_shared((64, 32), "float16")
        total = T.alloc_fragment((32, 64), "float32")
        me, m = W.rank(), block * 32
        if m < W.rank_uniform(num[0]):
            for peer in T.serial(2):
                T.copy(X[m : m + 32, 0:64], S[peer, me, m : m + 32, 0:64])
        for source in T.serial(2):
            if m < W.rank_uniform(num[0]):
                T.clear(total)
                for k in T.Pipelined(2, num_stages=2):
                    T.copy(S[me, source, m, k * 32], A_tile)
                    T.copy(B[0, k * 32], B_tile)
                    T.gemm(A_tile, B_tile, total, transpose_B=True)
                T.copy(total, Y[source, m, 0])
            else:
                for i, j in T.Parallel(32, 64):
                    Y[source, m + i, j] = 0


def sends_before_warps(dtype="float32"):
    """Each rank sends a fragment, and adds those of all ranks to it in a pipelined loop."""

    @T.prim_func
    def program(X: T.Tensor((32, 32), dtype), Y: T.Tensor((32, 32), dtype)):
        with T.Kernel(1, threads=128):
            S = W.alloc_symmetric((2, 32, 32), dtype)
            own = T.alloc_shared((32, 32), dtype)
            tile = T.alloc_shared((32, 32), dtype)
            total = T.alloc_fragment((32, 32), dtype)
            T.copy(X, total)
            for peer in T.serial(2):
                T.copy(total, own)
                T.copy(own, S[peer, W.rank(), 0, 0])
            for source in T.Pipelined(2, num_stages=2):
                T.copy(S[W.rank(), source, 0, 0], tile)
                for i, j in T.Parallel(32, 32):
                    total[i, j] += tile[i, j]
            T.copy(total, Y)

    return program


@factory
def reuses_tile_in_waves(
    A: T.Tensor((8, 15), "float16"),
    B: T.Tensor((2, 8, 8), "float16"),
    Y: T.Tensor((2, 8, 8), "float16"),
    *,
    ends_with_barrier=True,
):
    """Each wave loads a tile, adds to it in a pipelined loop, and stores it from the same memory.

    Args:
        ends_with_barrier: whether a wave ends with a barrier, which consumers execute.
    """
    with T.Kernel(1, threads=64):
        tile = T.alloc_shared((8, 8), "float16")
        added = T.alloc_shared((8, 8), "float16")
        total = T.alloc_fragment((8, 8), "float16")
        W.fence("gpu")
        for wave in T.serial(2):
            T.copy(A[0, wave * 7], tile)
            T.copy(tile, total)
            for s in T.Pipelined(2, num_stages=2):
                T.copy(B[s, 0, 0], added)
                for i, j in T.Parallel(8, 8):
                    total[i, j] += added[i, j]
            T.copy(total, tile)
            T.copy(tile, Y[wave, 0, 0])
            if ends_with_barrier:
                T.sync_threads()


@factory
def writes_before_warps(
    X: T.Tensor((256,), "float32"),
    A: T.Tensor((2, 32, 32), "float32"),
    count: T.Tensor((1,), "int32"),
    Y: T.Tensor((256,), "float32"),
    Z: T.Tensor((2, 32, 32), "float32"),
):
    """Each thread writes before a pipelined loop, which has additional threads for its loads."""
    with T.Kernel(2, threads=128) as block:
        tile = T.alloc_shared((32, 32), "float32")
        total = T.alloc_fragment((32, 32), "float32")
        thread = T.get_thread_binding()
        W.fence("gpu")
        T.atomic_add(count[0], 1)
        Y[block * 128 + thread] = X[block * 128 + thread] + 1
        T.clear(total)
        for k in T.Pipelined(2, num_stages=2):
            T.copy(A[k, 0, 0], tile)
            for i, j in T.Parallel(32, 32):
                total[i, j] += tile[i, j]
        T.copy(total, Z[block, 0, 0])


@factory
def tile_in_a_uniform_branch(
    num: T.Tensor((1,), "int32"), X: T.Tensor((64, 64), "float16"), Y: T.Tensor((64, 64), "float16")
):
    """One thread stores a tile of all threads, in a branch on a number that is equal on all
    ranks."""
    with T.Kernel(2, threads=128) as block:
        tile = T.alloc_shared((32, 64), "float16")
        n = W.rank_uniform(num[0])
        if block * 32 < n:
            T.copy(X[block * 32, 0], tile)
            T.copy(tile, Y[block * 32, 0])


@factory
def tile_in_a_branch_on(
    load,
    limit: T.Tensor((1,), "int32"),
    X: T.Tensor((64, 64), "float32"),
    Y: T.Tensor((64, 64), "float32"),
):
    """A tile is written and read in a branch on memory.

    Args:
        load: function that loads the limit of the branch, from a parameter or from what another
            rank has written.
    """
    with T.Kernel(1, threads=128):
        S = W.alloc_symmetric((1,), "int32")
        tile = T.alloc_shared((64, 64), "float32")
        me = W.rank()
        if T.get_thread_binding() == 0:
            S[1 - me, 0] = limit[0]
        for m in T.serial(2):
            if m < load(limit[0], S[me, 0]):
                for i, j in T.Parallel(64, 64):
                    tile[i, j] = X[i, j]
                for i, j in T.Parallel(64, 64):
                    Y[i, j] = tile[63 - i, 63 - j]
            else:
                for i, j in T.Parallel(64, 64):
                    Y[i, j] = 0


@factory
def reads_in_bounds(
    place,
    X: T.Tensor((16, 32), "float16"),
    B: T.Tensor((32, 32), "float16"),
    Y: T.Tensor((16, 32), "float32"),
):
    """A producer reads the bound of its loop, or a condition in it, after its last load.

    Args:
        place: "bound", "first" or "condition", where the number of loads is read.
    """
    with T.Kernel(1, threads=128):
        S = W.alloc_symmetric((3,), "int32")
        X_tile = T.alloc_shared((16, 16), "float16")
        B_tile = T.alloc_shared((16, 32), "float16")
        total = T.alloc_fragment((16, 32), "float32")
        me = W.rank()
        for i in T.Parallel(3):
            S[1 - me, i] = i
        T.clear(total)
        first = S[me, 0] if place == "first" else 0
        last = S[me, 2] if place == "bound" else 2
        for k in T.Pipelined(first, last, num_stages=2):
            if k < (S[me, 2] if place == "condition" else 2):
                T.copy(X[0, k * 16], X_tile)
                T.copy(B[k * 16, 0], B_tile)
                T.gemm(X_tile, B_tile, total)
        T.copy(total, Y)


def reads_in_producers():
    """A producer reads how many rows it loads, and the program's threads release the number."""
    capacity, N = 4, 32

    @T.prim_func
    def program(
        X: T.Tensor((capacity, N), "float32"),
        count: T.Tensor((1,), "int32"),
        Y: T.Tensor((capacity, N), "float32"),
    ):
        with T.Kernel(2, threads=128) as block:
            inbox = W.alloc_ragged((), rows=capacity, row=N)
            sent = T.alloc_shared((1, N), "float32")
            tile = T.alloc_shared((1, N), "float32")
            me = W.rank()
            peer = 1 - me
            if block == 0:
                W.announce(inbox[peer, me, 0, 0], count[0])
                for i in T.serial(count[0]):
                    T.copy(X[i, 0], sent)
                    T.copy(sent, inbox[peer, me, i, 0])
            else:
                n = W.announced(inbox[me, peer, 0, 0])
                for i in T.Pipelined(capacity, num_stages=2):
                    if i < n:
                        T.copy(inbox[me, peer, i, 0], tile)
                        for j in T.Parallel(N):
                            Y[i, j] = tile[0, j]

    return program


@factory
def adds_at_the_peer(S: W.Symmetric((128,), "int32")):
    """Both ranks add to the same elements."""
    with T.Kernel(1, threads=128):
        tx = T.get_thread_binding()
        W.sync_ranks()
        T.atomic_add(S[0, tx], 1)
        W.sync_ranks()


@factory
def counts_in_a_loop(
    X: T.Tensor((64, 64), BF16), Y: T.Tensor((2, 64, 64), "float32"), count: T.Tensor((1,), "int32")
):
    """Each of the program's threads adds 1 in each iteration, before the specialized part."""
    with T.Kernel(1, threads=128):
        A_tile = T.alloc_shared((64, 32), BF16)
        B_tile = T.alloc_shared((32, 64), BF16)
        total = T.alloc_fragment((64, 64), "float32")
        for u in T.serial(2):
            W.red_add(count[0], 1)
            T.clear(total)
            for k in T.Pipelined(2, num_stages=2):
                T.copy(X[0, k * 32], A_tile)
                T.copy(X[k * 32, 0], B_tile)
                T.gemm(A_tile, B_tile, total)
            T.copy(total, Y[u, 0, 0])


@factory
def loads_what_threads_stored(
    S: W.Symmetric((64, 64), BF16),
    F: W.Symmetric((1,), "uint32"),
    B: T.Tensor((64, 64), BF16),
    Y: T.Tensor((64, 64), "float32"),
):
    """Threads of the peer store by generic stores; the TMA loads after the wait."""
    with T.Kernel(1, threads=128):
        A_tile = T.alloc_shared((64, 32), BF16)
        B_tile = T.alloc_shared((32, 64), BF16)
        total = T.alloc_fragment((64, 64), "float32")
        me = W.rank()
        for i, j in T.Parallel(64, 64):
            S[1 - me, i, j] = T.Cast(BF16, i)
        W.signal(F[1 - me, 0])
        W.wait_reached(F[me, 0], 1)
        T.clear(total)
        for k in T.Pipelined(2, num_stages=2):
            T.copy(S[me, 0, k * 32], A_tile)
            T.copy(B[k * 32, 0], B_tile)
            T.gemm(A_tile, B_tile, total)
        T.copy(total, Y)


@factory
def counts_backward(x: T.Tensor((4,), "float32"), y: T.Tensor((4,), "float32")):
    """A loop variable has a negative factor in a dividend."""
    with T.Kernel(1, threads=32):
        for i in T.serial(4):
            y[i] = x[(W.rank() + 3 - i) % 4]


@factory
def small_stages(x: T.Tensor((4, 8, 16), "float32"), y: T.Tensor((4, 2, 8), "float32")):
    """The tile of the second stage begins 64 bytes after that of the first one."""
    with T.Kernel(1, threads=128):
        tile = T.alloc_shared((2, 8), "float32")
        W.fence("gpu")
        for i in T.Pipelined(4, num_stages=2):
            T.copy(x[i, 3, 0], tile)
            for r, j in T.Parallel(2, 8):
                y[i, r, j] = tile[r, j]


def words_beside_a_pipeline():
    """Block 1 has no pipelined loop, so TileLang divides its loops among all 256 threads."""
    rows, columns, steps = 4, 132, 4

    @T.prim_func
    def program(
        X: T.Tensor((steps, 64, 64), "float16"),
        V: T.Tensor((rows, columns), "float32"),
        Y: T.Tensor((64, 64), "float32"),
        Z: T.Tensor((2, rows, columns), "float32"),
    ):
        with T.Kernel(2, threads=128) as block:
            S = W.alloc_symmetric((2, rows, columns), "float32")
            tile = T.alloc_shared((64, 64), "float16")
            total = T.alloc_fragment((64, 64), "float32")
            part = T.alloc_shared((rows, columns), "float32")
            parts = T.alloc_shared((2, rows, columns), "float32")
            me = W.rank()
            if block == 0:
                T.clear(total)
                for k in T.Pipelined(steps, num_stages=2):
                    T.copy(X[k, 0, 0], tile)
                    for i, j in T.Parallel(64, 64):
                        total[i, j] += tile[i, j]
                T.copy(total, Y)
            else:
                for i, j in T.Parallel(rows, columns):
                    part[i, j] = V[i, j] + 1
                for step in T.serial(2):
                    T.copy(part, S[(me + 1 + step) % 2, me, 0, 0])
                T.copy(S[me, 0:2, 0:rows, 0:columns], parts)
                for s, i, j in T.Parallel(2, rows, columns):
                    Z[s, i, j] = parts[s, i, j] * 2

    return program


@factory
def adds_in_two_axes(X: T.Tensor((16, 32), "float32"), S: W.Symmetric((16, 32), "float32")):
    """TileLang chooses the thread that issues a TMA operation by its first index alone."""
    with T.Kernel(1, threads=(32, 4)):
        tile = T.alloc_shared((16, 32), "float32")
        me = W.rank()
        T.clear(tile)
        T.copy(tile, S[me, 0, 0])
        T.copy(X, tile)
        T.atomic_add(S[(me + 1) % 2, 0, 0], tile, use_tma=True)


@factory
def row_of_a_tile(
    A: T.Tensor((64, 64), "float16"),
    B: T.Tensor((64, 64), "float16"),
    C: T.Tensor((64, 64), "float32"),
    Y: T.Tensor((64,), "float16"),
):
    """A row is copied from a tile that is swizzled for tensor cores."""
    with T.Kernel(1, threads=128):
        A_tile = T.alloc_shared((64, 64), "float16")
        B_tile = T.alloc_shared((64, 64), "float16")
        total = T.alloc_fragment((64, 64), "float32")
        row = T.alloc_fragment((64,), "float16")
        W.fence("gpu")
        T.clear(total)
        T.copy(A, A_tile)
        T.copy(B, B_tile)
        T.gemm(A_tile, B_tile, total, transpose_B=True)
        T.copy(total, C)
        T.copy(A_tile[3, 0], row)
        T.copy(row, Y)


@factory
def half_of_a_fragment(
    use,
    A: T.Tensor((64, 64), "float16"),
    B: T.Tensor((128, 64), "float16"),
    Y: T.Tensor((64, 64), "float16"),
    Z: T.Tensor((64,), "float32"),
):
    """Half of a fragment goes to another one, and from there to shared memory or to a reduction."""
    with T.Kernel(1, threads=128):
        A_tile = T.alloc_shared((64, 64), "float16")
        B_tile = T.alloc_shared((128, 64), "float16")
        Y_tile = T.alloc_shared((64, 64), "float16")
        total = T.alloc_fragment((64, 128), "float32")
        left = T.alloc_fragment((64, 64), "float32")
        row = T.alloc_fragment((64,), "float32")
        W.fence("gpu")
        T.clear(total)
        T.copy(A, A_tile)
        T.copy(B, B_tile)
        T.gemm(A_tile, B_tile, total, transpose_B=True)
        T.copy(total[:, :64], left)
        if use == "copy":
            T.copy(left, Y_tile)
            T.copy(Y_tile, Y)
        else:
            T.reduce_max(left, row, dim=1)
            T.copy(row, Z)
