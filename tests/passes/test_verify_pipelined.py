"""Waits of pipelined loops that the warps of a role load themselves."""

import numpy as np
import pytest
import tilelang.language as T

import tileweave as tw
from tileweave import language as W

N, STEPS = 32, 4


def second_loop(num_stages: int):
    """Build a program with two pipelined loops. TileLang specializes the warps of the first one."""

    @T.prim_func
    def program(A: T.Tensor((STEPS, N, N), "float16"), out: T.Tensor((N, N), "float32")):
        with T.Kernel(1, threads=128):
            S = W.alloc_symmetric((STEPS, N, N), "float16")
            loaded = T.alloc_shared((N, N), "float16")
            received = T.alloc_shared((N, N), "float16")
            total = T.alloc_fragment((N, N), "float32")
            T.clear(total)
            for k in T.Pipelined(STEPS, num_stages=2):
                T.copy(A[k, 0, 0], loaded)
                for i, j in T.Parallel(N, N):
                    total[i, j] += loaded[i, j]
            for k in T.serial(STEPS):
                for i, j in T.Parallel(N, N):
                    S[1 - W.rank(), k, i, j] = total[i, j] + k
            for k in T.Pipelined(STEPS, num_stages=num_stages):
                T.copy(S[W.rank(), k, 0, 0], received)
                for i, j in T.Parallel(N, N):
                    total[i, j] += (k + 1) * received[i, j]
            T.copy(total, out)

    return program


@pytest.mark.parametrize("num_stages", [1, 2, 3])
def test_second_loop_loads_from_a_peer(num_stages):
    rng = np.random.default_rng(num_stages)
    A = [rng.integers(0, 4, (STEPS, N, N)).astype(np.float16) for _ in range(2)]
    sums = [a.astype(np.float32).sum(0) for a in A]
    factors = np.arange(1, STEPS + 1)
    outputs = tw.validate(second_loop(num_stages), 2, [{"A": a} for a in A], epochs=2)
    for rank, given in enumerate(outputs):
        right = sums[rank] + factors.sum() * sums[1 - rank] + (factors * (factors - 1)).sum()
        assert np.array_equal(given["out"], right)
