"""Forms in which kernels say the same: what is inferred is right in each, or they are refused."""

from typing import Any

import numpy as np
import pytest
import tilelang.language as T

import tileweave as tw
from tileweave import language as W

N, F32 = 16, "float32"


def inputs_of(ranks: int, rows: int = 8) -> list[dict[str, Any]]:
    rng = np.random.default_rng(ranks)
    return [{"X": rng.standard_normal((rows, N), np.float32)} for _ in range(ranks)]


def simulated(program, ranks: int, inputs: list[dict[str, Any]]) -> list[dict[str, np.ndarray]]:
    return tw.simulate(program, ranks, inputs, schedules=3, epochs=3, resident_blocks=64)


def refused(program) -> str:
    with pytest.raises(tw.LanguageError) as error:
        tw.explain(program, 2)
    assert "test_forms.py:" in str(error.value)
    return str(error.value)


@T.prim_func
def register_in_parallel(
    X: T.Tensor((8, N), F32), S: W.Symmetric((8, N), F32), Y: T.Tensor((N,), F32)
):
    with T.Kernel(9, threads=32) as b:
        row = T.alloc_var("int32")
        total = T.alloc_fragment((N,), F32)
        if b < 8:
            for j in T.Parallel(N):
                S[(W.rank() + 1) % W.world_size(), b, j] = X[b, j]
        else:
            T.clear(total)
            for j in T.Parallel(N):
                row = 0
                for _k in T.serial(4):
                    total[j] += S[W.rank(), row, j]
                    row = row + 2
            T.copy(total, Y)


@T.prim_func
def register_of_some_threads(
    X: T.Tensor((8, N), F32), S: W.Symmetric((8, N), F32), Y: T.Tensor((N,), F32)
):
    with T.Kernel(9, threads=32) as b:
        thread = T.get_thread_binding()
        row = T.alloc_var("int32")
        total = T.alloc_local((1,), F32)
        if b < 8:
            for j in T.Parallel(N):
                S[(W.rank() + 1) % W.world_size(), b, j] = X[b, j]
        else:
            row = 0
            total[0] = 0
            if thread < N:
                for _k in T.serial(4):
                    total[0] += S[W.rank(), row, thread]
                    row = row + 2
                Y[thread] = total[0]


@pytest.mark.parametrize("program", [register_in_parallel, register_of_some_threads])
def test_registers_of_inner_loops(program):
    """Registers that change in a loop inside the statement of all threads."""
    inputs = inputs_of(2)
    for rank, found in enumerate(simulated(program, 2, inputs)):
        np.testing.assert_allclose(found["Y"], inputs[rank - 1]["X"][::2].sum(0), rtol=1e-5)
