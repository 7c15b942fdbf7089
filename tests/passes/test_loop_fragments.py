"""Fragments of the consumers in statements of a pipelined loop that look like loads."""

import numpy as np
import pytest
import tilelang.language as T

import tileweave as tw
from tests.factory import factory
from tileweave import language as W

M, STEPS, K = 64, 2, 32
F16, F32 = "float16", "float32"


@T.macro
def operand(A, a, b, parts, total, C, step):
    T.copy(A[0, step * K], parts)
    T.gemm(parts, b, total)


@T.macro
def stored(A, a, b, parts, total, C, step):
    T.copy(A[0, step * K], parts)
    T.copy(total, C[step, 0, 0])
    T.gemm(parts, b, total)


@T.macro
def scaled(A, a, b, parts, total, C, step):
    for i, j in T.Parallel(M, K):
        a[i, j] = parts[i, j] * A[i, step * K + j]
    T.gemm(a, b, total)


@T.macro
def changed(A, a, b, parts, total, C, step):
    scaled(A, a, b, parts, total, C, step)
    for i, j in T.Parallel(M, K):
        parts[i, j] += T.Cast(F16, 1)


@factory
def product(
    body,
    A: T.Tensor((M, 2 * STEPS * K), F16),
    B: T.Tensor((2 * STEPS * K, M), F16),
    C: T.Tensor((2 * STEPS + 1, M, M), F32),
):
    with T.Kernel(1, threads=128):
        a, b = T.alloc_shared((M, K), F16), T.alloc_shared((K, M), F16)
        parts, total = T.alloc_fragment((M, K), F16), T.alloc_fragment((M, M), F32)
        W.fence("gpu")
        T.clear(total)
        for turn in T.serial(2):
            T.fill(parts, turn + 1)
            for k in T.Pipelined(STEPS, num_stages=2):
                T.copy(B[(turn * STEPS + k) * K, 0], b)
                body(A, a, b, parts, total, C, turn * STEPS + k)
        T.copy(total, C[2 * STEPS, 0, 0])


@pytest.mark.parametrize("arch", ["sm_90a", "sm_80"])
@pytest.mark.parametrize("body", [operand, stored, scaled])
def test_consumers_keep_their_fragments(body, arch):
    random = np.random.default_rng(0)
    A, B = (random.integers(-2, 3, shape).astype(F16) for shape in ((M, 128), (128, M)))
    inputs = {"A": A, "B": B, "C": np.zeros((2 * STEPS + 1, M, M), F32)}
    (actual,) = tw.validate(product(body), 1, [inputs], arch, epochs=1)
    parts = np.split(A.astype(F32), 2 * STEPS, axis=1)
    factors = [k // STEPS + 1 if body is scaled else 1 for k in range(2 * STEPS)]
    rows = np.split(B.astype(F32), 2 * STEPS)
    sums = np.cumsum([f * a @ b for f, a, b in zip(factors, parts, rows, strict=True)], axis=0)
    np.testing.assert_array_equal(actual["C"][-1], sums[-1])
    if body is stored:
        np.testing.assert_array_equal(actual["C"][1:-1], sums[:-1])


def test_a_load_by_a_fragment_that_consumers_change_is_refused():
    with pytest.raises(tw.TileWeaveError, match=r"a: reads parts in producer warps .*change it"):
        tw.emit(product(changed), arch="sm_90a", world_size=1)
