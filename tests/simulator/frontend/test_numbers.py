"""Scalar arithmetic of TileLang in the simulator, against NumPy."""

import ml_dtypes
import numpy as np
import pytest
import tilelang.language as T

import tileweave as tw
from tests.simulator.frontend.launch import normal, run


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
def test_round_half_to_even(dtype):
    @T.prim_func
    def program(A: T.Tensor((64,), dtype), B: T.Tensor((64,), dtype)):
        with T.Kernel(1, threads=64) as _:
            for i in T.Parallel(64):
                B[i] = T.round(A[i])

    A = (np.arange(64) / 4 - 8).astype(getattr(ml_dtypes, dtype, dtype))
    assert (run(program, A=A)["B"] == np.rint(A)).all()


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
@pytest.mark.parametrize("propagates", [False, True])
def test_min_and_max_ignore_nan(dtype, propagates):
    rows = T.dynamic("rows")

    @T.prim_func
    def program(A: T.Tensor((rows, 4), dtype), B: T.Tensor((4, rows), dtype)):
        with T.Kernel(rows, threads=32) as row:
            tile, last = T.alloc_fragment((1, 4), dtype), T.alloc_fragment((1,), dtype)
            T.copy(A[row, 0], tile)
            T.reduce_max(tile, last, dim=1, nan_propagate=propagates)
            T.copy(last, B[0, row])
            T.reduce_min(tile, last, dim=1)
            T.copy(last, B[1, row])
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
def test_division_of_the_least_integer(dtype):
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
def test_undefined_results_are_refused_with_their_line(name, of_memory):
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
