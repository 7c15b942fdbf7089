"""Warnings of guarded accesses out of bounds of global memory."""

import warnings

import numpy as np
import pytest
import tilelang.language as T

import tileweave as tw
from tests.factory import factory
from tests.releases import names_line

from .launch import normal, run

n = T.dynamic("n")


@factory
def shifted(first, A: T.Tensor((n,), "float32"), B: T.Tensor((n,), "float32")):
    with T.Kernel(T.ceildiv(n, 32), threads=32) as block:
        for i in T.Parallel(32):
            B[block * 32 + i] = A[block * 32 + i + first] + 1


@factory
def copied(first, A: T.Tensor((n,), "float32"), B: T.Tensor((n,), "float32")):
    with T.Kernel(T.ceildiv(n, 32), threads=32) as block:
        tile = T.alloc_shared((32,), "float32")
        T.copy(A[block * 32 + first], tile)
        T.copy(tile, B[block * 32])


@T.prim_func
def next_element(A: T.Tensor((n,), "float32"), B: T.Tensor((n,), "float32")):
    with T.Kernel(1, threads=32):
        for k in T.serial(n):
            B[k] = T.if_then_else(k + 2 < n, A[k + 2], 0.0) + A[k + 1]


@T.prim_func
def rows(index: T.Tensor((n,), "int32"), A: T.Tensor((n,), "float32"),
         B: T.Tensor((n,), "float32")):  # fmt: skip
    with T.Kernel(1, threads=32):
        for i in T.Parallel(32):
            B[i] = A[index[i] + 1]


@pytest.mark.parametrize(
    ("program", "size", "element"),
    [
        (shifted(1), 64, 64),
        (shifted(-1), 64, -1),
        (next_element, 40, 40),
        (copied(1), 64, 64),
        (copied(-1), 64, -1),
    ],
)
def test_an_index_beside_the_tensor_is_reported_once(program, size, element):
    with pytest.warns(tw.SimulationWarning, match="no element") as caught:
        run(program, A=normal(size))
    (warning,) = caught
    text = str(warning.message)
    assert f"no element A[{element}] of shape ({size},), by rank 0, block " in text
    assert names_line(text, "test_guards.py:")


@pytest.mark.parametrize(
    ("program", "size", "inputs"),
    [
        (shifted(0), 64, {}),
        (shifted(0), 50, {}),  # the last tile is larger than what remains
        (shifted(1), 50, {}),
        (copied(0), 64, {}),
        (copied(1), 50, {}),
        (rows, 32, {"index": np.full(32, -2, np.int32)}),
    ],
)
def test_programs_may_rely_on_guards(program, size, inputs):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(program, A=normal(size), **inputs)
