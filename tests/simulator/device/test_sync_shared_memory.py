"""Barriers of accesses of shared memory that TileLang leaves out, weakens or misplaces."""

import ml_dtypes
import numpy as np
import pytest
import tilelang.language as T

import tileweave as tw
from tests.releases import needs_nested_pipelines
from tests.simulator.device.test_validate import reported, switch_off
from tileweave import language as W


@T.prim_func
def border(X: T.Tensor((32, 64), "bfloat16"), Y: T.Tensor((32, 64), "bfloat16")):
    """Clear a tile, then load its inner rows by other threads."""
    with T.Kernel(1, threads=256):
        tile = T.alloc_shared((32, 64), "bfloat16")
        W.fence("gpu")
        T.clear(tile)
        T.copy(X[0:30, :], tile[1:31, :])
        T.copy(tile, Y)


@T.prim_func
def stored_operand(
    X: T.Tensor((64, 64), "float16"),
    B: T.Tensor((64, 64), "float16"),
    C: T.Tensor((64, 64), "float32"),
    Y: T.Tensor((64, 64), "float16"),
):
    """Store an operand of a product, of which two warps have the same elements."""
    with T.Kernel(1, threads=128):
        X_tile = T.alloc_shared((64, 64), "float16")
        B_tile = T.alloc_shared((64, 64), "float16")
        Y_tile = T.alloc_shared((64, 64), "float16")
        operand = T.alloc_fragment((64, 64), "float16")
        total = T.alloc_fragment((64, 64), "float32")
        W.fence("gpu")
        T.copy(X, X_tile)
        T.copy(B, B_tile)
        T.clear(total)
        T.copy(X_tile, operand)
        T.gemm(B_tile, operand, total, transpose_B=True)
        T.copy(total, C)
        for i, j in T.Parallel(64, 64):
            Y_tile[i, j] = operand[i, j]
        T.copy(Y_tile, Y)


@T.prim_func
def statement_of_some_threads(
    X: T.Tensor((48, 128), "int8"),
    A: T.Tensor((2, 48, 128), "int8"),
    N: T.Tensor((256,), "int32"),
    Y: T.Tensor((48, 128), "int8"),
    Z: T.Tensor((48, 128), "int32"),
):
    """Exchange elements by 256 threads, between a write and a copy of a tile by all 384."""
    with T.Kernel(1, threads=256):
        first = T.alloc_shared((48, 128), "int8")
        second = T.alloc_shared((48, 128), "int8")
        numbers = T.alloc_shared((256,), "int32")
        tile = T.alloc_shared((48, 128), "int8")
        total = T.alloc_fragment((48, 128), "int32")
        tx = T.get_thread_binding()
        W.fence("gpu")
        for i, j in T.Parallel(48, 128):
            first[i, j] = X[47 - i, j]
        numbers[tx] = tx * 3
        N[tx] = numbers[(tx + 133) % 256]
        T.copy(first[0:24, :], second[24:48, :])
        T.copy(first[24:48, :], second[0:24, :])
        T.clear(total)
        for k in T.Pipelined(2, num_stages=2):
            T.copy(A[k, 0, 0], tile)
            for i, j in T.Parallel(48, 128):
                total[i, j] += tile[i, j]
        T.copy(second, Y)
        T.copy(total, Z)


def _inputs(program) -> dict[str, np.ndarray]:
    rng, dtypes = np.random.default_rng(0), {"bfloat16": ml_dtypes.bfloat16}
    outputs = {"C", "Y", "Z", "N"}
    return {
        b.name: rng.integers(-4, 5, tuple(map(int, b.shape))).astype(
            dtypes.get(str(b.dtype), str(b.dtype))
        )
        for b in program.buffer_map.values()
        if b.name not in outputs
    }


@pytest.mark.parametrize("arch", ["sm_90a", "sm_80"])
def test_two_writes_of_one_place(arch):
    inputs = _inputs(border)
    (outputs,) = tw.validate(border, 1, [inputs], arch=arch)
    expected = np.zeros((32, 64), np.float32)
    expected[1:31] = inputs["X"][:30]
    assert np.array_equal(outputs["Y"].astype(np.float32), expected)


@pytest.mark.parametrize("arch", ["sm_90a", "sm_80"])
def test_barrier_under_a_condition_of_threads(arch):
    inputs = _inputs(stored_operand)
    (outputs,) = tw.validate(stored_operand, 1, [inputs], arch=arch)
    x, b = (inputs[name].astype(np.float32) for name in ("X", "B"))
    assert np.array_equal(outputs["C"], b @ x.T)
    assert np.array_equal(outputs["Y"], inputs["X"])


@needs_nested_pipelines
def test_barrier_of_fewer_threads():
    inputs = _inputs(statement_of_some_threads)
    (outputs,) = tw.validate(statement_of_some_threads, 1, [inputs])
    assert np.array_equal(outputs["Y"], np.roll(inputs["X"][::-1], 24, axis=0))
    assert np.array_equal(outputs["Z"], inputs["A"].astype(np.int32).sum(axis=0))


@pytest.mark.parametrize(
    "program",
    [border, pytest.param(statement_of_some_threads, marks=needs_nested_pipelines)],
)
def test_without_the_pass(monkeypatch, program):
    switch_off(monkeypatch, "sync_shared_memory")
    assert reported(program, [_inputs(program)] * 2).kind == "race"


@pytest.mark.parametrize("arch", ["sm_90a", "sm_80"])
def test_an_element_that_a_register_names(arch):
    """Each thread reads and writes one element, in one statement."""

    @T.prim_func
    def program(Y: T.Tensor((256,), "int32")):
        with T.Kernel(1, threads=128):
            tile = T.alloc_shared((256,), "int32")
            place = T.alloc_var("int32")
            tx = T.get_thread_binding()
            W.fence("gpu")
            for i in T.Parallel(256):
                tile[i] = i
            place = tx * 2
            tile[place] = tile[place] + 1
            T.copy(tile, Y)

    (outputs,) = tw.validate(program, 1, [{}], arch=arch)
    assert np.array_equal(outputs["Y"], np.arange(256) + (np.arange(256) + 1) % 2)
