"""What TileLang's own operations do in the simulator, against NumPy."""

import ml_dtypes
import numpy as np
import pytest
import tilelang.language as T

import tileweave as tw
from tileweave import language as W

rng = np.random.default_rng(7)


def normal(*shape, dtype=np.float32):
    return rng.standard_normal(shape).astype(dtype)


def run(program, *, ranks=1, **tensors):
    """The tensors of rank 0 after one launch."""
    return tw.simulate(program, ranks, [tensors] * ranks, epochs=1)[0]


@T.prim_func
def copy_tiles(A: T.Tensor((100, 60), "float16"), B: T.Tensor((100, 60), "float16")):
    with T.Kernel(4, 2, threads=128) as (bx, by):
        tile = T.alloc_shared((32, 32), "float16")
        T.copy(A[bx * 32, by * 32], tile)
        T.copy(tile, B[bx * 32, by * 32])


def test_copies_clip_at_the_edges():
    A = normal(100, 60, dtype=np.float16)
    assert (run(copy_tiles, A=A)["B"] == A).all()


@T.prim_func
def pad_with_zeros(A: T.Tensor((10, 10), "float32"), B: T.Tensor((16, 16), "float32")):
    with T.Kernel(1, threads=128) as _:
        tile = T.alloc_shared((16, 16), "float32")
        T.copy(A[0, 0], tile)
        for i, j in T.Parallel(16, 16):
            B[i, j] = tile[i, j]


def test_what_lies_outside_reads_zero():
    A = normal(10, 10)
    B = run(pad_with_zeros, A=A)["B"]
    assert (B[:10, :10] == A).all()
    assert not B[10:].any()
    assert not B[:, 10:].any()


def gemm_program(transpose_A, transpose_B, dtype):
    M, N, K = 32, 48, 64

    @T.prim_func
    def gemm(
        A: T.Tensor((K, M) if transpose_A else (M, K), dtype),
        B: T.Tensor((N, K) if transpose_B else (K, N), dtype),
        C: T.Tensor((M, N), "float32"),
    ):
        with T.Kernel(1, threads=128) as _:
            a = T.alloc_shared((16, M) if transpose_A else (M, 16), dtype)
            b = T.alloc_shared((N, 16) if transpose_B else (16, N), dtype)
            c = T.alloc_fragment((M, N), "float32")
            T.clear(c)
            for k in T.Pipelined(K // 16, num_stages=2):
                if transpose_A:
                    T.copy(A[k * 16, 0], a)
                else:
                    T.copy(A[0, k * 16], a)
                if transpose_B:
                    T.copy(B[0, k * 16], b)
                else:
                    T.copy(B[k * 16, 0], b)
                T.gemm(a, b, c, transpose_A=transpose_A, transpose_B=transpose_B)
            T.copy(c, C)

    return gemm


@pytest.mark.parametrize("transpose_A", [False, True])
@pytest.mark.parametrize("transpose_B", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
def test_gemm(transpose_A, transpose_B, dtype):
    kind = getattr(ml_dtypes, dtype)
    A = normal(*((64, 32) if transpose_A else (32, 64)), dtype=kind)
    B = normal(*((48, 64) if transpose_B else (64, 48)), dtype=kind)
    a, b = A.astype(np.float32), B.astype(np.float32)
    right = (a.T if transpose_A else a) @ (b.T if transpose_B else b)
    C = run(gemm_program(transpose_A, transpose_B, dtype), A=A, B=B)["C"]
    np.testing.assert_allclose(C, right, rtol=1e-4, atol=1e-4)


@T.prim_func
def softmax(A: T.Tensor((32, 64), "float32"), B: T.Tensor((32, 64), "float32")):
    with T.Kernel(2, threads=64) as bx:
        x = T.alloc_fragment((16, 64), "float32")
        most = T.alloc_fragment((16,), "float32")
        total = T.alloc_fragment((16,), "float32")
        T.copy(A[bx * 16, 0], x)
        T.fill(most, -T.infinity("float32"))
        T.reduce_max(x, most, dim=1, clear=False)
        for i, j in T.Parallel(16, 64):
            x[i, j] = T.exp2((x[i, j] - most[i]) * 1.4426950408889634)
        T.reduce_sum(x, total, dim=1)
        for i, j in T.Parallel(16, 64):
            x[i, j] = x[i, j] / total[i]
        T.copy(x, B[bx * 16, 0])


def test_softmax():
    A = normal(32, 64)
    e = np.exp(A - A.max(1, keepdims=True))
    np.testing.assert_allclose(run(softmax, A=A)["B"], e / e.sum(1, keepdims=True), rtol=1e-5)


REDUCTIONS = {
    "sum": lambda x: x.sum(0), "max": lambda x: x.max(0), "min": lambda x: x.min(0),
    "abssum": lambda x: abs(x).sum(0), "absmax": lambda x: abs(x).max(0),
}  # fmt: skip


@pytest.mark.parametrize("kind", sorted(REDUCTIONS))
def test_reduce(kind):
    @T.prim_func
    def program(A: T.Tensor((8, 16), "float32"), B: T.Tensor((16,), "float32")):
        with T.Kernel(1, threads=32) as _:
            x = T.alloc_fragment((8, 16), "float32")
            y = T.alloc_fragment((16,), "float32")
            T.copy(A, x)
            getattr(T, f"reduce_{kind}")(x, y, dim=0)
            T.copy(y, B)

    A = normal(8, 16)
    np.testing.assert_allclose(run(program, A=A)["B"], REDUCTIONS[kind](A), rtol=1e-5)


@T.prim_func
def running_sums(A: T.Tensor((8, 16), "float32"), B: T.Tensor((8, 16), "float32")):
    with T.Kernel(1, threads=32) as _:
        x = T.alloc_shared((8, 16), "float32")
        T.copy(A, x)
        T.cumsum(x, dim=1)
        T.copy(x, B)


def test_cumsum():
    A = normal(8, 16)
    np.testing.assert_allclose(run(running_sums, A=A)["B"], A.cumsum(1), rtol=1e-4, atol=1e-5)


@T.prim_func
def threads_of_their_own(A: T.Tensor((64,), "int32"), B: T.Tensor((64,), "int32")):
    with T.Kernel(1, threads=64) as _:
        t = T.get_thread_binding()
        x = T.alloc_var("int32")
        y = T.alloc_local((4,), "int32")
        x = A[t]
        for k in T.unroll(4):
            y[k] = x * k
        if t < 10:
            x = x + 100
        elif t == 20:
            x = 7
        while x % 5 != 0:
            x += 1
            if x == 13:
                T.loop_break()
        B[t] = x + y[2]


def test_threads_have_their_own_registers_and_ways():
    A = np.arange(64, dtype=np.int32)

    def one(t):
        x = t + 100 if t < 10 else 7 if t == 20 else t
        while x % 5 != 0:
            x += 1
            if x == 13:
                break
        return x + 2 * t

    assert run(threads_of_their_own, A=A)["B"].tolist() == [one(t) for t in range(64)]


@T.prim_func
def atomics(A: T.Tensor((32, 32), "float32"), total: T.Tensor((32,), "float32"),
            sums: T.Tensor((32, 32), "float32"), count: T.Tensor((2,), "int32")):  # fmt: skip
    with T.Kernel(4, threads=64) as _:
        x = T.alloc_shared((32, 32), "float32")
        T.copy(A, x)
        T.atomic_add(sums, x)
        for i, j in T.Parallel(32, 32):
            T.atomic_add(total[j], x[i, j])
        T.atomic_add(count[0], 1)
        if T.get_thread_binding() == 0:
            T.atomic_max(count[1], 5)


def test_atomics():
    A = normal(32, 32)
    zeros = dict(total=np.zeros(32, np.float32), sums=np.zeros((32, 32), np.float32),
                 count=np.zeros(2, np.int32))  # fmt: skip
    out = run(atomics, A=A, **zeros)
    np.testing.assert_allclose(out["total"], A.sum(0) * 4, rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(out["sums"], A * 4, rtol=1e-5)
    assert out["count"].tolist() == [256, 5]


n = T.dynamic("n")


@T.prim_func
def dynamic(A: T.Tensor((n,), "float32"), B: T.Tensor((n,), "float32"), scale: T.float32):
    with T.Kernel(T.ceildiv(n, 32), threads=32) as bx:
        for i in T.Parallel(32):
            B[bx * 32 + i] = A[bx * 32 + i] * scale


@pytest.mark.parametrize("size", [1, 32, 77])
def test_dynamic_shape_and_scalar(size):
    A = normal(size)
    assert (run(dynamic, A=A, B=np.zeros(size, np.float32), scale=2.0)["B"] == A * 2).all()


@T.prim_func
def two_kernels(A: T.Tensor((64,), "float32"), B: T.Tensor((64,), "float32"),
                C: T.Tensor((64,), "float32")):  # fmt: skip
    with T.Kernel(2, threads=32) as bx:
        for i in T.Parallel(32):
            B[bx * 32 + i] = A[bx * 32 + i] + 1
    with T.Kernel(1, threads=32) as _:
        for i in T.Parallel(64):
            C[i] = B[63 - i] * 2


def test_kernels_of_one_program_follow_each_other():
    A = normal(64)
    assert (run(two_kernels, A=A)["C"] == (A + 1)[::-1] * 2).all()


@T.prim_func
def elementwise(A: T.Tensor((64,), "float32"), B: T.Tensor((8, 64), "float32")):
    with T.Kernel(1, threads=64) as _:
        for i in T.Parallel(64):
            B[0, i] = T.sigmoid(A[i])
            B[1, i] = T.if_then_else(A[i] > 0, T.sqrt(A[i]), T.abs(A[i]))
            B[2, i] = T.max(T.tanh(A[i]), T.min(A[i], 0.5))
            B[3, i] = T.Cast("float32", T.Cast("bfloat16", A[i]))
            B[4, i] = T.Cast("float32", T.Cast("int32", A[i] * 10))
            B[5, i] = T.pow(T.abs(A[i]), 1.5) + T.floor(A[i]) + T.ceil(A[i])
            B[6, i] = T.rsqrt(T.abs(A[i])) + T.sin(A[i]) * T.cos(A[i]) + T.log(T.abs(A[i]))
            B[7, i] = T.clamp(A[i], -0.5, 0.5)


def test_scalar_functions():
    A = normal(64)
    with np.errstate(invalid="ignore"):
        right = [
            1 / (1 + np.exp(-A)), np.where(A > 0, np.sqrt(A), abs(A)),
            np.maximum(np.tanh(A), np.minimum(A, 0.5)), A.astype(ml_dtypes.bfloat16),
            np.trunc(A * 10), abs(A) ** 1.5 + np.floor(A) + np.ceil(A),
            1 / np.sqrt(abs(A)) + np.sin(A) * np.cos(A) + np.log(abs(A)), np.clip(A, -0.5, 0.5),
        ]  # fmt: skip
    for got, expected in zip(run(elementwise, A=A)["B"], right, strict=True):
        np.testing.assert_allclose(got, expected.astype(np.float32), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
def test_round_goes_to_even(dtype):
    @T.prim_func
    def program(A: T.Tensor((64,), dtype), B: T.Tensor((64,), dtype)):
        with T.Kernel(1, threads=64) as _:
            for i in T.Parallel(64):
                B[i] = T.round(A[i])

    A = (np.arange(64) / 4 - 8).astype(getattr(ml_dtypes, dtype, dtype))
    assert (run(program, A=A)["B"] == np.rint(A)).all()


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
@pytest.mark.parametrize("propagates", [False, True])
def test_extremes_leave_out_what_is_no_number(dtype, propagates):
    rows = T.dynamic("rows")

    @T.prim_func
    def program(A: T.Tensor((rows, 4), dtype), B: T.Tensor((4, rows), dtype)):
        with T.Kernel(rows, threads=32) as row:
            tile, found = T.alloc_fragment((1, 4), dtype), T.alloc_fragment((1,), dtype)
            T.copy(A[row, 0], tile)
            T.reduce_max(tile, found, dim=1, nan_propagate=propagates)
            T.copy(found, B[0, row])
            T.reduce_min(tile, found, dim=1)
            T.copy(found, B[1, row])
            if T.get_thread_binding() == 0:
                B[2, row] = T.max(A[row, 0], A[row, 1])
                B[3, row] = T.min(A[row, 0], A[row, 1])

    nan = np.nan
    A = [[1, nan, 3, 2], [nan, nan, nan, nan], [nan, 1, 2, 3], [4, 3, 2, 1], [nan, -1, nan, nan]]
    A = np.array(A).astype(getattr(ml_dtypes, dtype, dtype))
    right = [
        [3, -np.inf, 3, 4, -1], [1, np.inf, 1, 1, -1], [1, nan, 1, 4, -1], [1, nan, 1, 3, -1]
    ]  # fmt: skip
    if propagates and A.itemsize == 2:  # others have no such instruction
        right[0] = [nan, nan, nan, 4, nan]
    assert np.array_equal(run(program, A=A)["B"].astype(float), right, equal_nan=True)


@pytest.mark.parametrize("dtype", ["int32", "uint32", "int64", "uint64"])
@pytest.mark.parametrize("given", ["float32", "float64"])
def test_numbers_too_large_for_an_integer_saturate(given, dtype):
    @T.prim_func
    def program(A: T.Tensor((8,), given), B: T.Tensor((8,), dtype)):
        with T.Kernel(1, threads=32) as _:
            for i in T.Parallel(8):
                B[i] = T.Cast(dtype, A[i])

    info = np.iinfo(dtype)
    A = np.array([1e30, -1e30, np.inf, -np.inf, np.nan, -1.5, 2.75, 2.0**31], given)
    of_nan = info.min if dtype.startswith("int") else 1 << info.bits - 1
    if given == "float32" and info.bits == 32:
        of_nan = 0
    right = [
        info.max, info.min, info.max, info.min, of_nan, max(info.min, -1), 2,
        min(info.max, 1 << 31),
    ]  # fmt: skip
    assert run(program, A=A)["B"].tolist() == right


def test_literals_of_a_choice_have_its_type():
    @T.prim_func
    def program(A: T.Tensor((4,), "int32"), B: T.Tensor((4,), "int32")):
        with T.Kernel(1, threads=32) as _:
            for i in T.Parallel(4):
                B[i] = (A[i] + T.if_then_else(A[i] > 0, 1, 2)) >> 4

    A = np.array([2**31 - 1, -(2**31), 14, 15], np.int32)
    assert run(program, A=A)["B"].tolist() == [-(2**27), -(2**27), 0, 1]


@pytest.mark.parametrize("dtype", ["int8", "int32", "int64"])
def test_the_least_integer_is_divided(dtype):
    @T.prim_func
    def program(A: T.Tensor((4,), dtype), B: T.Tensor((2, 4), dtype)):
        with T.Kernel(1, threads=32) as _:
            for i in T.Parallel(4):
                B[0, i] = T.truncdiv(A[i], T.Cast(dtype, 3))
                B[1, i] = T.truncmod(A[i], T.Cast(dtype, 3))

    least = np.iinfo(dtype).min
    A = np.array([least, least + 1, -7, 7], dtype)
    right = [[-(-int(a) // 3) if a < 0 else int(a) // 3 for a in A]]
    right.append([int(a) - 3 * q for a, q in zip(A, right[0], strict=True)])
    assert run(program, A=A)["B"].tolist() == right


UNDEFINED = {
    "//": (lambda a, n: a // n, "a division by 0"),
    "%": (lambda a, n: a % n, "a division by 0"),
    "truncdiv": (T.truncdiv, "a division by 0"),
    "<<": (lambda a, n: a << (n - 1), "a shift of 32 bits by -1"),
    ">>": (lambda a, n: a >> (n + 32), "a shift of 32 bits by 32"),
}


@pytest.mark.parametrize("name", UNDEFINED)
@pytest.mark.parametrize("of_memory", [False, True])
def test_what_has_no_result_is_refused_where_it_happens(name, of_memory):
    f, text = UNDEFINED[name]

    @T.prim_func
    def program(n: T.int32, A: T.Tensor((4,), "int32"), B: T.Tensor((4,), "int32")):
        with T.Kernel(4, threads=32) as block:
            if T.get_thread_binding() == 0:
                if A[block] > 0:
                    B[block] = f(block, A[block] - 1) if of_memory else f(block, n)

    def given(*A):
        return {"n": 0, "A": np.array(A, np.int32), "B": np.zeros(4, np.int32)}

    run(program, **given(0, 0, 0, 0))
    with pytest.raises(tw.SimulationError, match=text) as error:
        run(program, **given(0, 1, 0, 0))
    assert error.value.kind == "unsupported"


@T.prim_func
def registers_of_points(
    A: T.Tensor((8, 4), "float32"), at: T.Tensor((8,), "int32"), B: T.Tensor((6, 8, 4), "float32")
):
    with T.Kernel(1, threads=64) as _:
        x, row = T.alloc_var("float32"), T.alloc_local((4,), "float32")
        for i, j in T.Parallel(8, 4):
            x = A[i, j]
            if x < 0:
                x = -2 * x
            B[0, i, j] = x
            x = 7
        B[1, 0, 0] = x
        for i in T.Parallel(8):
            x = 0
            for k in T.serial(4):
                x += A[i, k]
                row[k] = x
            for k in T.vectorized(4):
                B[2, i, k] = row[k]
            B[3, i, 0] = row[at[i]]
        with T.ws(0):
            for i, j in T.Parallel(8, 4):
                x = A[i, j]
                if i > j:
                    x = 0
                B[4, i, j] = x


def test_each_point_of_a_loop_has_its_own_registers():
    A, at = normal(8, 4), rng.integers(0, 4, 8).astype(np.int32)
    B = run(registers_of_points, A=A, at=at)["B"]
    assert (B[0] == np.where(A < 0, -2 * A, A)).all() and B[1, 0, 0] == 7
    sums = np.add.accumulate(A, axis=1)
    np.testing.assert_allclose(B[2], sums, rtol=1e-5, atol=1e-6)
    assert (B[3, :, 0] == B[2, np.arange(8), at]).all()
    assert (B[4] == np.triu(A)).all()


@pytest.mark.parametrize("way", ["behind", "within", "tile"])
def test_registers_that_differ_are_refused_where_one_value_is_read(way):
    @T.prim_func
    def program(A: T.Tensor((64,), "float32"), B: T.Tensor((64,), "float32")):
        with T.Kernel(1, threads=32) as _:
            x, t = T.alloc_local((2,), "float32"), T.get_thread_binding()
            total = T.alloc_local((1,), "float32")
            x[0] = 0 if way == "behind" else t
            x[1] = 0
            if way == "behind":
                for i in T.Parallel(64):
                    x[0] += A[i]
                B[t] = x[0]
            elif way == "within":
                for i in T.Parallel(64):
                    B[i] = x[0]
            else:
                T.reduce_sum(x, total, dim=0)
                B[t] = total[0]

    with pytest.raises(tw.SimulationError, match="x, which differs between threads or po") as error:
        run(program, A=normal(64))
    assert error.value.kind == "unsupported"


@T.prim_func
def three_axes(B: T.Tensor((2, 3, 4, 8), "int32")):
    with T.Kernel(4, 3, 2, threads=(8, 2)) as (bx, by, bz):
        t, u = T.get_thread_binding(0), T.get_thread_binding(1)
        if u == 1:
            B[bz, by, bx, t] = bz * 1000 + by * 100 + bx * 10 + t


def test_three_axes_of_blocks_and_two_of_threads():
    B = run(three_axes)["B"]
    z, y, x, t = np.indices(B.shape)
    assert (B == z * 1000 + y * 100 + x * 10 + t).all()


@T.prim_func
def producer_and_consumer(A: T.Tensor((64,), "float32"), B: T.Tensor((64,), "float32")):
    with T.Kernel(1, threads=64) as _:
        tile = T.alloc_shared((64,), "float32")
        full = T.alloc_barrier(32)
        t = T.get_thread_binding()
        if t < 32:
            T.mbarrier_wait_parity(full[0], 0)
            B[t] = tile[t] + tile[t + 32]
            B[t + 32] = 0
        else:
            tile[t] = A[t]
            tile[t - 32] = A[t - 32]
            T.mbarrier_arrive(full[0])


def test_warps_wait_for_each_other():
    A = normal(64)
    B = run(producer_and_consumer, A=A)["B"]
    assert (B[:32] == A[:32] + A[32:]).all()


@T.prim_func
def transposed_view(A: T.Tensor((64,), "float32"), B: T.Tensor((64,), "float32")):
    with T.Kernel(1, threads=64) as _:
        line = T.alloc_shared((64,), "float32")
        T.copy(A, line)
        square = T.reshape(line, (8, 8))
        for i, j in T.Parallel(8, 8):
            B[i * 8 + j] = square[j, i]


def test_reshaped_views():
    A = normal(64)
    assert (run(transposed_view, A=A)["B"].reshape(8, 8) == A.reshape(8, 8).T).all()


@T.prim_func
def warps(A: T.Tensor((64,), "int32")):
    with T.Kernel(1, threads=64) as _:
        t = T.get_thread_binding()
        if T.get_warp_idx() == 1:
            A[t] = T.get_lane_idx()
        elif T.shuffle_elect(64):
            A[t] = 100


def test_reshaped_views_of_tensors():
    M = T.dynamic("M")

    @T.prim_func
    def program(A: T.Tensor((M, 4), "int32"), B: T.Tensor((M * 2, 2), "int32"),
                C: T.Tensor((M * 4,), "int32")):  # fmt: skip
        with T.Kernel(1, threads=32) as _:
            row, pairs = T.reshape(A, (M * 4,)), T.reshape(B, (M, 4))
            for i, j in T.Parallel(8, 8):  # behind the ends of both axes, too
                pairs[i, j] = A[i, j]
            for i in T.Parallel(32):
                C[i] = row[i]
            T.sync_threads()
            T.atomic_add(row[6], 10)
            W.put_block(row[0], row[12], 4)

    A = np.arange(20, dtype=np.int32).reshape(5, 4)
    out = run(program, A=A, B=np.zeros((10, 2), np.int32))
    assert (out["B"].ravel() == A.ravel()).all() and (out["C"] == A.ravel()).all()
    A[1, 2] += 32 * 10
    A[3] = A[0]
    assert (out["A"] == A).all()


@pytest.mark.parametrize("tile", [True, False])
@pytest.mark.parametrize("whole", [True, False])
def test_views_as_another_type_are_refused(tile, whole):
    @T.prim_func
    def program(A: T.Tensor((8, 4), "int32"), B: T.Tensor((8, 4), "float32")):
        with T.Kernel(1, threads=32) as _:
            own, ones = T.alloc_shared((8, 4), "int32"), T.alloc_shared((8, 4), "float32")
            view = T.view(own if tile else A, (8, 4), dtype="float32")
            T.copy(A, own)
            if whole:
                T.copy(view, ones)
                T.copy(ones, B)
            else:
                for i, j in T.Parallel(8, 4):
                    B[i, j] = view[i, j]

    with pytest.raises(tw.SimulationError, match="view, a view of another type, is not sim"):
        run(program, A=np.ones((8, 4), np.int32))


def test_a_tile_of_a_reshaped_tensor_is_refused():
    @T.prim_func
    def program(A: T.Tensor((8, 4), "int32"), B: T.Tensor((32,), "int32")):
        with T.Kernel(1, threads=32) as _:
            tile, row = T.alloc_shared((16,), "int32"), T.reshape(A, (32,))
            T.copy(row[0:16], tile)
            T.copy(tile, B[0:16])

    with pytest.raises(tw.SimulationError, match="an operation on tiles of row, a reshaped view"):
        run(program, A=np.ones((8, 4), np.int32))


def test_warps_and_lanes():
    A = run(warps, A=np.full(64, -1, np.int32))["A"]
    assert A.tolist() == [100] + [-1] * 31 + list(range(32))


@T.prim_func
def outside(A: T.Tensor((8,), "int32"), where: T.int32):
    with T.Kernel(1, threads=32) as _:
        if T.get_thread_binding() == 0:
            A[where] = 1


def test_a_thread_outside_a_tensor():
    with pytest.raises(tw.SimulationError) as error:
        run(outside, A=np.zeros(8, np.int32), where=8)
    assert error.value.kind == "bounds"
    assert "A[8]" in error.value.report
    assert "test_interpreter.py" in error.value.report


@T.prim_func
def poisoned(A: T.Tensor((8,), "float32"), B: T.Tensor((8,), "float32")):
    with T.Kernel(1, threads=32) as _:
        x = T.alloc_shared((8,), "float32")
        for i in T.Parallel(7):
            x[i] = A[i]
        for i in T.Parallel(8):
            B[i] = x[i] * 2.0


def test_memory_nobody_wrote():
    with pytest.raises(tw.SimulationError) as error:
        run(poisoned, A=np.zeros(8, np.float32))
    assert error.value.kind == "poison"


@T.prim_func
def unknown(A: T.Tensor((32,), "float32")):
    with T.Kernel(1, threads=32) as _:
        A[T.get_thread_binding()] = T.call_extern("float32", "my_function", A[0])


def test_unwritten_memory_that_a_branch_leaves_out():
    @T.prim_func
    def program(A: T.Tensor((4,), "int32"), B: T.Tensor((8, 8), "int32"),
                C: T.Tensor((8,), "int32")):  # fmt: skip
        with T.Kernel(1, threads=32) as _:
            tile = T.alloc_shared((8,), "int32")
            for i in T.Parallel(4):
                tile[i] = A[i]
            for i, j in T.Parallel(8, 8):
                x = tile[i]
                if i < 4:
                    if x > 2:
                        B[i, j] = x
                    else:
                        B[i, j] = 0
            for i in T.Parallel(8):
                y = tile[i]
                if i < 4:
                    C[i] = y

    A = np.array([1, 3, 2, 4], np.int32)
    zeros = {"B": np.zeros((8, 8), np.int32), "C": np.zeros(8, np.int32)}
    out = run(program, A=A, **zeros)
    assert (out["B"][:4] == np.where(A > 2, A, 0)[:, None]).all()
    assert (out["C"][:4] == A).all()


def test_an_unknown_operation_is_named_with_its_line():
    with pytest.raises(tw.SimulationError) as error:
        run(unknown, A=np.zeros(32, np.float32))
    assert error.value.kind == "unsupported"
    assert "my_function" in error.value.report
    assert "test_interpreter.py" in error.value.report


@T.prim_func
def each_rank(S: W.Symmetric((4,), "int32"), epochs: T.Tensor((3,), "int32"), epoch: T.int32):
    with T.Kernel(1, threads=32) as _:
        if T.get_thread_binding() == 0:
            S[W.rank(), 1] = W.rank() * 10 + W.world_size()
            epochs[epoch] = epoch + 1


def test_ranks_have_their_parts_and_scalars_may_follow_the_epoch():
    inputs = [dict(S=np.full(4, r, np.int32), epoch=lambda e: e) for r in range(3)]
    out = tw.simulate(each_rank, 3, inputs)
    assert [o["S"].tolist() for o in out] == [[r, r * 10 + 3, r, r] for r in range(3)]
    assert out[0]["epochs"].tolist() == [1, 2, 3]
