"""TileLang operations that kernel authors use, in the simulator, against NumPy."""

import functools

import ml_dtypes
import numpy as np
import pytest
import tilelang.language as T

import tileweave as tw
from tests.simulator.frontend import launch
from tests.simulator.frontend.launch import N, fault, integers, normal

run = functools.partial(launch.run, schedules=3)


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
def registers_of_threads(A: T.Tensor((2, N), "int32"), B: T.Tensor((2, N), "int32")):
    with T.Kernel(1, threads=N):
        t = T.get_thread_binding()
        own = T.alloc_fragment((2,), "int32")
        for k in T.serial(2):
            own[k] = A[k, t]
        for k in T.serial(2):
            B[k, t] = own[1 - k]


@pytest.mark.parametrize("level", ["tile", "device"])
def test_each_thread_has_a_fragment_that_only_elements_access(level):
    A = integers(2, N)
    assert (run(registers_of_threads, level=level, A=A)["B"] == A[::-1]).all()


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


@pytest.mark.skipif(not hasattr(T, "reducer_init"), reason="TileLang 0.1.14 and later")
def test_reducers():
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

    A = normal(32, N)
    right = [A.sum(1) + 100, A.max(1)]
    np.testing.assert_allclose(run(reducers, A=A)["B"], right, rtol=1e-4)


REDUCTIONS = [
    *((kind, "int32") for kind in ("bitand", "bitor", "bitxor", "sum", "max", "min")),
    *((kind, "float16") for kind in ("sum", "max", "min", "absmax", "abssum")),
]


@pytest.mark.parametrize(
    ("kind", "dtype", "axis", "clear"),
    [
        *((*reduction, 0, True) for reduction in REDUCTIONS),
        *((*reduction, 1, False) for reduction in REDUCTIONS if reduction[0] != "abssum"),
    ],
)
def test_reduce(kind, dtype, axis, clear):
    shape = (8, 16)
    size, options = shape[1 - axis], {} if clear else {"clear": False}

    @T.prim_func
    def program(A: T.Tensor(shape, dtype), B: T.Tensor((size,), dtype)):
        with T.Kernel(1, threads=32) as _:
            x = T.alloc_fragment(shape, dtype)
            y = T.alloc_fragment((size,), dtype)
            T.copy(A, x)
            T.fill(y, 5)
            getattr(T, f"reduce_{kind}")(x, y, axis, **options)
            T.copy(y, B)

    A = integers(*shape, dtype=dtype)
    f = {"bitand": np.bitwise_and, "bitor": np.bitwise_or, "bitxor": np.bitwise_xor,
         "max": np.maximum, "min": np.minimum, "absmax": np.maximum}.get(kind, np.add)  # fmt: skip
    right = f.reduce(abs(A) if kind.startswith("abs") else A, axis=axis)
    if not clear:
        right = f(right, np.array(5, dtype))
    assert (run(program, A=A)["B"] == right).all()


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
    [
        ("float16", "float16"), ("float16", "float32"), ("int8", "int32"), ("float32", "float32"),
        ("bfloat16", "float32"), ("float8_e4m3fn", "float32"),
    ],
)  # fmt: skip
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


@T.prim_func
def talks(A: T.Tensor((4,), "int32")):
    with T.Kernel(2, threads=32) as block:
        if block == 1:
            T.print(A[1] + T.get_thread_binding() * 0, msg="second")
        T.device_assert(A[2] > 0, "positive")


def test_print_names_block_and_thread(capsys):
    run(talks, schedules=1, A=np.array([1, 22, 3, 4], np.int32))
    (line,) = capsys.readouterr().out.splitlines()
    assert "second" in line and "22" in line and "rank 0, block 1 (1) in launch 0" in line


def test_a_failed_assertion_is_a_fault():
    error = fault(talks, A=np.array([1, 22, 0, 4], np.int32))
    assert error.kind == "assertion"
    assert "positive" in error.report and "test_tilelang.py" in error.report
