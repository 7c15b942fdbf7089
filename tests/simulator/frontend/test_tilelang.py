"""The TileLang a kernel author uses, in the simulator, against NumPy; and what is refused."""

import inspect
import re

import ml_dtypes
import numpy as np
import pytest
import tilelang
import tilelang.language as T

import tileweave as tw

rng = np.random.default_rng(11)
N = 64


def normal(*shape, dtype="float32"):
    return rng.standard_normal(shape).astype(getattr(ml_dtypes, dtype, dtype))


def integers(*shape, dtype="int32"):
    return rng.integers(-20, 20, shape).astype(dtype)


def run(program, schedules=3, **tensors):
    """The tensors of the only rank after one launch."""
    return tw.simulate(program, 1, [tensors], epochs=1, schedules=schedules)[0]


def fault(program, **tensors):
    with pytest.raises(tw.SimulationError) as error:
        run(program, **tensors)
    return error.value


# Threads of a warp and of a block.


@T.prim_func
def shuffles(A: T.Tensor((N,), "float32"), B: T.Tensor((5, N), "float32")):
    with T.Kernel(1, threads=N) as _:
        t = T.get_thread_binding()
        B[0, t] = T.shfl_xor(A[t], 5)
        B[1, t] = T.shfl_down(A[t], 2)
        B[2, t] = T.shfl_up(A[t], 3)
        B[3, t] = T.shfl_sync(A[t], 7)
        B[4, t] = T.shfl_xor(A[t], 1, width=8)


def test_shuffles():
    A, t = normal(N), np.arange(N)
    lane, first = t % 32, t - t % 32
    right = [
        A[t ^ 5], A[np.where(lane + 2 < 32, t + 2, t)], A[np.where(lane >= 3, t - 3, t)],
        A[first + 7], A[t ^ 1],
    ]  # fmt: skip
    assert (run(shuffles, A=A)["B"] == right).all()


def test_a_lane_that_is_not_there_gives_poison():
    @T.prim_func
    def program(A: T.Tensor((N,), "float32")):
        with T.Kernel(1, threads=N) as _:
            t = T.get_thread_binding()
            if t < 16:
                A[t] = T.shfl_down(A[t], 8)

    assert fault(program, A=normal(N)).kind == "poison"


@T.prim_func
def warp_reductions(A: T.Tensor((N,), "float32"), B: T.Tensor((3, N), "float32"),
                    K: T.Tensor((N,), "int32"), J: T.Tensor((2, N), "int32")):  # fmt: skip
    with T.Kernel(1, threads=N) as _:
        t = T.get_thread_binding()
        B[0, t] = T.warp_reduce_sum(A[t])
        B[1, t] = T.warp_reduce_max(A[t])
        B[2, t] = T.warp_reduce_min(A[t])
        J[0, t] = T.warp_reduce_bitand(K[t])
        J[1, t] = T.warp_reduce_bitor(K[t])


def test_warp_reductions():
    A, K = normal(N), integers(N)
    out = run(warp_reductions, A=A, K=K)
    warps = A.reshape(2, 32)
    right = [f(warps, axis=1).repeat(32) for f in (np.sum, np.max, np.min)]
    np.testing.assert_allclose(out["B"], right, rtol=1e-4, atol=1e-5)
    bits = [f.reduce(K.reshape(2, 32), axis=1).repeat(32) for f in (np.bitwise_and, np.bitwise_or)]
    assert (out["J"] == bits).all()


@T.prim_func
def votes(A: T.Tensor((N,), "int32"), B: T.Tensor((7, N), "int32"), C: T.Tensor((2, N), "uint64")):
    with T.Kernel(1, threads=N) as _:
        t = T.get_thread_binding()
        B[0, t] = T.any_sync(A[t] > 10)
        B[1, t] = T.all_sync(A[t] > -10)
        B[2, t] = T.syncthreads_count(A[t] > 0)
        B[3, t] = T.syncthreads_and(A[t] > -30)
        B[4, t] = T.syncthreads_or(A[t] > 30)
        B[5, t] = T.Cast("int32", T.match_any_sync(A[t]) == T.uint32(1) << (t % 32))
        B[6, t] = T.popcount(T.Cast("int32", T.ballot_sync(A[t] > 0)))
        C[0, t] = T.ballot(A[t] > 0)
        C[1, t] = T.activemask()


def test_votes():
    A = integers(N)
    out = run(votes, A=A)
    warps = A.reshape(2, 32)
    alone = [(np.equal(w, w[:, None]).sum(1) == 1) for w in warps]
    right = [
        (warps > 10).any(1).repeat(32), (warps > -10).all(1).repeat(32),
        np.full(N, (A > 0).sum()), np.ones(N), np.zeros(N), np.concatenate(alone),
        (warps > 0).sum(1).repeat(32),
    ]  # fmt: skip
    assert (out["B"] == right).all()
    ballot = ((warps > 0) << np.arange(32)).sum(1).repeat(32)
    assert (out["C"] == [ballot, np.full(N, 2**32 - 1)]).all()


@T.prim_func
def specialised(A: T.Tensor((N,), "float32"), B: T.Tensor((N,), "float32")):
    with T.Kernel(1, threads=256) as _:
        tile = T.alloc_shared((N,), "float32")
        full = T.alloc_barrier(128)
        T.annotate_layout({tile: tilelang.layout.Layout((N,), lambda i: i)})
        T.use_swizzle(10)
        T.disable_warp_group_reg_alloc()
        with T.ws(0):
            T.barrier_wait(full[0], 0)
            for i in T.Parallel(N):
                B[i] = tile[i] * 2
        with T.ws(1):
            for i in T.Parallel(N):
                tile[i] = A[i]
            T.barrier_arrive(full[0])


def test_warp_groups_do_not_wait_for_the_text():
    A = normal(N)
    assert (run(specialised, A=A)["B"] == A * 2).all()


@T.prim_func
def grid(A: T.Tensor((4,), "int32"), B: T.Tensor((4,), "int32")):
    with T.Kernel(4, threads=32) as block:
        if T.get_thread_binding() == 0:
            A[block] = block
        T.sync_grid()
        if T.get_thread_binding() == 0:
            B[block] = A[3 - block]


def test_a_grid_meets():
    assert run(grid, schedules=10)["B"].tolist() == [3, 2, 1, 0]


def test_a_grid_that_does_not_fit_is_a_deadlock():
    with pytest.raises(tw.SimulationError, match=r"T\.sync_grid") as error:
        tw.simulate(grid, 1, resident_blocks=3)
    assert error.value.kind == "deadlock"


# Loops.


@T.prim_func
def loops_of_threads(B: T.Tensor((N,), "int32")):
    with T.Kernel(1, threads=N) as _:
        t = T.get_thread_binding()
        x = T.alloc_var("int32")
        x = 0
        for k in T.serial(t):
            x += k
        for k in T.serial(t, N, 3):
            if k > 50:
                T.loop_break()
            x += k
        B[t] = x


def test_loops_may_differ_between_threads():
    right = [sum(range(t)) + sum(k for k in range(t, N, 3) if k <= 50) for t in range(N)]
    assert run(loops_of_threads)["B"].tolist() == right


@T.prim_func
def tiles_of_persistent_blocks(B: T.Tensor((8, 4), "int32")):
    with T.Kernel(3, threads=32) as block:
        for i, j in T.Persistent([8, 4], 3, block):
            if T.get_thread_binding() == 0:
                B[i, j] = i * 10 + j


def test_persistent():
    i, j = np.indices((8, 4))
    assert (run(tiles_of_persistent_blocks)["B"] == i * 10 + j).all()


@T.prim_func
def waits_of_points(F: T.Tensor((2, 4), "int32"), B: T.Tensor((4,), "int32")):
    with T.Kernel(2, threads=32) as block:
        if block == 0:
            for i in T.Parallel(4):
                tw.language.wait_ge(F[0, i], i)
                B[i] = i
        else:
            for i in T.Parallel(4):
                tw.language.red_add(F[0, i], i)


def test_waits_in_parallel():
    F = np.zeros((2, 4), np.int32)
    assert run(waits_of_points, schedules=20, F=F)["B"].tolist() == [0, 1, 2, 3]


# Tiles.


@T.prim_func
def reducers(A: T.Tensor((32, N), "float32"), B: T.Tensor((2, 32), "float32")):
    with T.Kernel(1, threads=N) as _:
        x = T.alloc_fragment((32, N), "float32")
        y = T.alloc_fragment((32,), "float32")
        total = T.alloc_reducer((32,), "float32", op="sum")
        most = T.alloc_reducer((32,), "float32", op="max")
        T.copy(A, x)
        T.reducer_init(total, 100.0)
        T.reducer_init(most)
        for i, j in T.Parallel(32, N):
            T.reducer_update(total[i], x[i, j])
            T.reducer_update(most[i], x[i, j])
        T.finalize_reducer(total, y)
        T.copy(y, B[0, 0])
        T.finalize_reducer(most, y)
        T.copy(y, B[1, 0])


def test_reducers():
    A = normal(32, N)
    right = [A.sum(1) + 100, A.max(1)]
    np.testing.assert_allclose(run(reducers, A=A)["B"], right, rtol=1e-4)


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [(kind, "int32") for kind in ("bitand", "bitor", "bitxor", "sum", "max", "min")]
    + [(kind, "float16") for kind in ("sum", "max", "min")],
)
def test_reduce_onto_what_is_there(kind, dtype):
    @T.prim_func
    def program(A: T.Tensor((8, 16), dtype), B: T.Tensor((8,), dtype)):
        with T.Kernel(1, threads=32) as _:
            x = T.alloc_fragment((8, 16), dtype)
            y = T.alloc_fragment((8,), dtype)
            T.copy(A, x)
            T.fill(y, 5)
            getattr(T, f"reduce_{kind}")(x, y, dim=1, clear=False)
            T.copy(y, B)

    A = integers(8, 16, dtype=dtype)
    f = {"bitand": np.bitwise_and, "bitor": np.bitwise_or, "bitxor": np.bitwise_xor,
         "max": np.maximum, "min": np.minimum}.get(kind, np.add)  # fmt: skip
    right = f(f.reduce(A, axis=1), np.array(5, dtype))
    assert (run(program, A=A)["B"] == right).all()


@T.prim_func
def scans(A: T.Tensor((8, 16), "float32"), B: T.Tensor((4, 8, 16), "float32")):
    with T.Kernel(1, threads=32) as _:
        x = T.alloc_shared((8, 16), "float32")
        y = T.alloc_shared((8, 16), "float32")
        T.copy(A, x)
        T.cumsum(x, y, dim=0)
        T.copy(y, B[0, 0, 0])
        T.cumsum(x, y, dim=1, reverse=True)
        T.copy(y, B[1, 0, 0])
        T.cumsum(x, y, dim=0, reverse=True)
        T.copy(y, B[2, 0, 0])
        T.cummax(x, y, dim=1)
        T.copy(y, B[3, 0, 0])


def test_scans():
    A = normal(8, 16)
    right = [A.cumsum(0), A[:, ::-1].cumsum(1)[:, ::-1], A[::-1].cumsum(0)[::-1],
             np.maximum.accumulate(A, 1)]  # fmt: skip
    np.testing.assert_allclose(run(scans, A=A)["B"], right, rtol=1e-4, atol=1e-5)


@T.prim_func
def casts(A: T.Tensor((50, 30), "float32"), B: T.Tensor((50, 30), "bfloat16"),
          C: T.Tensor((50, 30), "float8_e4m3fn"), D: T.Tensor((50, 30), "float16")):  # fmt: skip
    with T.Kernel(2, 2, threads=128) as (bx, by):
        x = T.alloc_shared((32, 16), "bfloat16")
        y = T.alloc_fragment((32, 16), "float8_e4m3fn")
        T.copy(A[bx * 32, by * 16], x)
        T.copy(x, B[bx * 32, by * 16])
        T.copy(A[bx * 32, by * 16], y)
        T.copy(y, C[bx * 32, by * 16])
        for i, j in T.Parallel(32, 16):
            D[bx * 32 + i, by * 16 + j] = T.Cast("float16", A[bx * 32 + i, by * 16 + j])


def test_copies_round_and_clip():
    A = normal(50, 30)
    out = run(casts, A=A)
    assert (out["B"] == A.astype(ml_dtypes.bfloat16)).all()
    assert (out["C"] == A.astype(ml_dtypes.float8_e4m3fn)).all()
    assert (out["D"] == A.astype(np.float16)).all()


@T.prim_func
def fills(B: T.Tensor((32, 32), "float32"), C: T.Tensor((32, 16), "float32")):
    with T.Kernel(1, threads=128) as _:
        x = T.alloc_shared((32, 32), "float32")
        y = T.alloc_shared((16, 32), "float32")
        z = T.alloc_shared((32, 16), "float32")
        T.clear(x)
        T.fill(x[0:16, 8:16], 3.5)
        T.fill(x[20, 0:32], 1)
        T.copy(x, B)
        T.copy(x[8:24, 0:32], y)
        T.transpose(y, z)
        T.copy(z, C)


def test_fills_and_transposes():
    x = np.zeros((32, 32), np.float32)
    x[:16, 8:16], x[20] = 3.5, 1
    out = run(fills)
    assert (out["B"] == x).all()
    assert (out["C"] == x[8:24].T).all()


@T.prim_func
def asynchronous(A: T.Tensor((N, N), "float16"), B: T.Tensor((2, N, N), "float16")):
    with T.Kernel(1, threads=128) as _:
        x = T.alloc_shared((N, N), "float16")
        y = T.alloc_shared((N, N), "float16")
        full = T.alloc_barrier(128)
        T.async_copy(A, x)
        T.tma_copy(A, y, barrier=full[0])
        T.barrier_arrive(full[0])
        T.ptx_wait_group(0)
        T.barrier_wait(full[0], 0)
        T.sync_threads()
        T.copy(x, B[0, 0, 0])
        T.tma_copy(y, B[1, 0, 0])
        T.tma_store_arrive()
        T.tma_store_wait(0)


def test_asynchronous_copies():
    A = normal(N, N, dtype="float16")
    assert (run(asynchronous, A=A)["B"] == A).all()


@pytest.mark.parametrize("transpose_A", [False, True])
@pytest.mark.parametrize("transpose_B", [False, True])
@pytest.mark.parametrize(
    ("dtype", "accumulate"),
    [("float16", "float16"), ("float16", "float32"), ("int8", "int32"), ("float32", "float32")],
)
def test_gemm(transpose_A, transpose_B, dtype, accumulate):
    M, K = 32, 128
    a_shape, b_shape = ((K, M) if transpose_A else (M, K)), ((M, K) if transpose_B else (K, M))

    @T.prim_func
    def program(
        A: T.Tensor(a_shape, dtype), B: T.Tensor(b_shape, dtype), C: T.Tensor((M, M), accumulate)
    ):
        with T.Kernel(1, threads=128) as _:
            a = T.alloc_shared(a_shape, dtype)
            b = T.alloc_shared(b_shape, dtype)
            c = T.alloc_fragment((M, M), accumulate)
            T.copy(A, a)
            T.copy(B, b)
            T.fill(c, 2048)
            T.gemm(a, b, c, transpose_A, transpose_B, policy=T.GemmWarpPolicy.FullRow)
            T.gemm(a, b, c, transpose_A, transpose_B)
            T.copy(c, C)

    make = integers if dtype == "int8" else normal
    A, B = make(*a_shape, dtype=dtype), make(*b_shape, dtype=dtype)
    wide = np.int32 if dtype == "int8" else np.float32
    product = (A.T if transpose_A else A).astype(wide) @ (B.T if transpose_B else B).astype(wide)
    once = (product + wide(2048)).astype(accumulate)  # a float16 sum is rounded each time
    right = (once.astype(wide) + product).astype(accumulate)
    np.testing.assert_allclose(run(program, A=A, B=B)["C"], right, rtol=1e-6)


@T.prim_func
def read_before_the_wait(A: T.Tensor((N,), "float16"), B: T.Tensor((N,), "float16")):
    with T.Kernel(1, threads=32) as _:
        x = T.alloc_shared((N,), "float16")
        T.async_copy(A, x)
        T.copy(x, B)
        T.ptx_wait_group(0)


def test_an_asynchronous_copy_has_not_arrived_before_the_wait():
    assert fault(read_before_the_wait, A=normal(N, dtype="float16")).kind == "poison"


# Atomics.


@T.prim_func
def atomics(A: T.Tensor((N,), "float32"), B: T.Tensor((8,), "float32"),
            H: T.Tensor((8,), "float16"), J: T.Tensor((6,), "int32"),
            old: T.Tensor((2, N), "int32")):  # fmt: skip
    with T.Kernel(1, threads=N) as _:
        t = T.get_thread_binding()
        count = T.alloc_shared((2,), "int32")
        if t == 0:
            count[0] = 0
        T.sync_threads()
        T.atomic_addx4(B[t % 2 * 4], A[t // 4 * 4])
        T.atomic_addx2(B[t % 4 * 2], A[t // 2 * 2])
        T.atomic_add(H[t % 8], T.Cast("float16", 1))
        T.atomic_max(J[0], t)
        T.atomic_min(J[1], t)
        T.atomic_or(J[2], 1 << (t % 8))
        old[0, t] = T.atomic_add(J[3], 1, return_prev=True)
        old[1, t] = T.atomic_add(count[0], 1, return_prev=True)
        T.sync_threads()
        if t == 0:
            T.atomic_store(J[4], 5)
            J[5] = T.atomic_load(J[4]) + count[0]


def test_atomics():
    A = normal(N)
    out = run(atomics, A=A, B=np.zeros(8, np.float32), H=np.zeros(8, np.float16),
              J=np.array([0, 0, 0, 3, 0, 0], np.int32))  # fmt: skip
    right = np.zeros(8, np.float64)
    for t in range(N):
        right[t % 2 * 4 :][:4] += A[t // 4 * 4 :][:4]
        right[t % 4 * 2 :][:2] += A[t // 2 * 2 :][:2]
    np.testing.assert_allclose(out["B"], right, rtol=1e-4, atol=1e-5)
    assert (out["H"] == 8).all()
    assert out["J"].tolist() == [63, 0, 255, 67, 5, 69]
    assert sorted(out["old"][0]) == list(range(3, 67))
    assert sorted(out["old"][1]) == list(range(N))


# Scalars.


@T.prim_func
def scalars(A: T.Tensor((N,), "int32"), B: T.Tensor((8, N), "int32"), C: T.Tensor((2,), "int32")):
    with T.Kernel(1, threads=N) as _:
        marks = T.alloc_shared((N,), "bool")
        for i in T.Parallel(N):
            B[0, i] = T.Select(A[i] > 3, A[i], -A[i])
            B[1, i] = A[i] // 7
            B[2, i] = A[i] % 7
            B[3, i] = T.truncmod(A[i], 7)
            B[4, i] = (A[i] << 2) ^ (A[i] >> 1)
            B[5, i] = (A[i] & 12) | 1
            B[6, i] = T.abs(A[i])
            B[7, i] = T.if_then_else(A[i] > 0, T.popcount(A[i]), T.max(A[i], -3))
            marks[i] = A[i] > 0
        if T.get_thread_binding() == 0:
            C[0] = T.Cast("int32", T.any_of(marks))
            C[1] = T.Cast("int32", T.all_of(marks))


def test_scalars():
    A = integers(N)
    ones = [bin(max(a, 0)).count("1") if a > 0 else max(a, -3) for a in A]
    right = [np.where(A > 3, A, -A), A // 7, A % 7, np.fmod(A, 7), (A << 2) ^ (A >> 1),
             (A & 12) | 1, abs(A), ones]  # fmt: skip
    out = run(scalars, A=A)
    assert (out["B"] == right).all()
    assert out["C"].tolist() == [1, 0]


# What a program says.


@T.prim_func
def talks(A: T.Tensor((4,), "int32")):
    with T.Kernel(2, threads=32) as block:
        if block == 1:
            T.print(A[1] + T.get_thread_binding() * 0, msg="second")
        T.device_assert(A[2] > 0, "positive")


def test_print_says_who(capsys):
    run(talks, schedules=1, A=np.array([1, 22, 3, 4], np.int32))
    (line,) = capsys.readouterr().out.splitlines()
    assert "second" in line and "22" in line and "rank 0, block 1 (1) in launch 0" in line


def test_a_failed_assertion_is_a_fault():
    error = fault(talks, A=np.array([1, 22, 0, 4], np.int32))
    assert error.kind == "assertion"
    assert "positive" in error.report and "test_tilelang.py" in error.report


# What is not simulated is refused, by name and line.


def refused(name):
    def put(make):
        REFUSED[name] = make
        return make

    return put


REFUSED = {}


@refused("gemm_sp")
def sparse():
    @T.prim_func
    def program(A: T.Tensor((N, 32), "float16"), C: T.Tensor((N, N), "float32")):
        with T.Kernel(1, threads=128) as _:
            a = T.alloc_shared((N, 32), "float16")
            e = T.alloc_shared((N, 8), "uint8")
            b = T.alloc_shared((N, N), "float16")
            c = T.alloc_fragment((N, N), "float32")
            T.gemm_sp(a, e, b, c)  # HERE

    return program


@refused("im2col")
def image():
    @T.prim_func
    def program(A: T.Tensor((1, 16, 16, 32), "float16")):
        with T.Kernel(1, threads=128) as _:
            a = T.alloc_shared((N, 32), "float16")
            T.c2d_im2col(A, a, 0, 0, 3, 1, 1, 1)  # HERE

    return program


@refused("my_function")
def extern():
    @T.prim_func
    def program(A: T.Tensor((4,), "int32")):
        with T.Kernel(1, threads=32) as _:
            T.call_extern("handle", "my_function", A.data)  # HERE

    return program


@refused("match_all_sync")
def match_all():
    @T.prim_func
    def program(A: T.Tensor((32,), "int32")):
        with T.Kernel(1, threads=32) as _:
            t = T.get_thread_binding()
            A[t] = T.Cast("int32", T.match_all_sync(A[t]))  # HERE

    return program


@refused("finalize_reducer")
def legacy_reducer():
    @T.prim_func
    def program(A: T.Tensor((32,), "int32")):
        with T.Kernel(1, threads=32) as _:
            total = T.alloc_reducer((32,), "int32", op="sum", replication="all")
            T.finalize_reducer(total)  # HERE

    return program


@refused("memory scratch")
def global_memory_in_a_kernel():
    @T.prim_func
    def program(A: T.Tensor((32,), "int32")):
        with T.Kernel(1, threads=32) as _:
            scratch = T.alloc_global((32,), "int32")  # HERE
            T.copy(A, scratch)

    return program


@refused("memory allocated outside a kernel: scratch")
def global_memory_outside_a_kernel():
    @T.prim_func
    def program(A: T.Tensor((32,), "int32")):
        scratch = T.alloc_global((32,), "int32")  # HERE
        with T.Kernel(1, threads=32) as _:
            T.copy(A, scratch)

    return program


@refused("a loop outside a kernel")
def loop_of_kernels():
    @T.prim_func
    def program(A: T.Tensor((32,), "int32")):
        for k in T.serial(3):  # HERE
            with T.Kernel(1, threads=32) as _:
                A[T.get_thread_binding()] = k

    return program


@refused("bits, a view of another type")
def view_of_another_type():
    @T.prim_func
    def program(A: T.Tensor((32,), "float32"), B: T.Tensor((32,), "int32")):
        with T.Kernel(1, threads=32) as _:
            x = T.alloc_shared((32,), "float32")
            T.copy(A, x)
            bits = T.view(x, (32,), "int32")
            for i in T.Parallel(32):
                B[i] = bits[i]  # HERE

    return program


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_what_is_not_simulated_is_named_with_its_line(name):
    lines, first = inspect.getsourcelines(REFUSED[name])
    (here,) = [first + n for n, line in enumerate(lines) if "# HERE" in line]
    with pytest.raises(tw.SimulationError) as error:
        tw.simulate(REFUSED[name](), 1)
    assert error.value.kind == "unsupported"
    assert re.search(name, error.value.report)
    assert int(re.search(r"tilelang\.py:(\d+)", error.value.report)[1]) == here
