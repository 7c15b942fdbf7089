"""Reshaped tensors and views in the simulator."""

import numpy as np
import pytest
import tilelang.language as T

import tileweave as tw
from tests.simulator.frontend.launch import normal, run
from tileweave import language as W


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


def test_parts_of_reshaped_tensors_and_tiles():
    @T.prim_func
    def program(A: T.Tensor((8, 4), "int32"), B: T.Tensor((32,), "int32")):
        with T.Kernel(1, threads=32) as _:
            tile, row = T.alloc_shared((4, 4), "int32"), T.reshape(A, (32,))
            pairs = T.reshape(tile, (8, 2))
            T.copy(row[7:23], T.reshape(tile, (16,)))
            T.fill(pairs[2:4, 1], -1)
            T.copy(T.reshape(tile, (16,)), B[24:40])

    right = np.arange(7, 15)
    right[[5, 7]] = -1
    A = np.arange(32, dtype=np.int32)
    with pytest.warns(tw.SimulationWarning, match=r"no element B\[32\]"):
        assert run(program, A=A.reshape(8, 4), B=A)["B"].tolist() == [*range(24), *right]
