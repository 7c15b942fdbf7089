"""The NumPy interpreter: results that are known, and programs that have none."""

import numpy as np
import pytest

from .programs import FAMILIES, random_program
from .reference import Unsuitable, inputs_of, results_of

PROGRAM = """
@T.prim_func
def program(X: T.Tensor((2, 8, 8), "float32"), n: T.Tensor((2, 4), "int32"),
            O: T.Tensor((2, 8, 8), "{dtype}")):
    with T.Kernel(2, threads=32) as block:
        a = T.alloc_shared((8, 8), "float32")
        f = T.alloc_fragment((8,), "float32")
        S = W.alloc_symmetric((2, 8, 8), "float32")
        me = W.rank()
        tx = T.get_thread_binding()
        {body}
        T.copy(a, O[block, :, :])
"""


def results(*body: str, dtype: str = "float32") -> tuple[list, list]:
    """Return input X of each rank, and O."""
    text = PROGRAM.format(body="\n        ".join(body), dtype=dtype)
    inputs = inputs_of(text, 2)
    outputs = results_of(text, 2, inputs)
    return [i["X"] for i in inputs], [o["O"] for o in outputs]


def test_exchange():
    x, o = results(
        "T.copy(X[block, 0, 0], a)",
        "T.copy(a, S[(me + 1) % 2, block, 0, 0])",
        "T.copy(S[me, block, 0:7, :], a[1:8, :])",
    )
    for rank in range(2):
        np.testing.assert_array_equal(o[rank][:, 1:], x[1 - rank][:, :7])
        np.testing.assert_array_equal(o[rank][:, 0], x[rank][:, 0])


def test_loops_and_conditions():
    _, o = results(
        "T.clear(a)",
        "for s in T.serial(3):",
        "    for i, j in T.Parallel(8, 8):",
        "        if i >= 2 and j < 4:",
        "            a[i, 7 - j] += i + s",
        "if me == 1:",
        "    T.fill(a[0, :], 5)",
        "elif block == 1:",
        "    if tx < 8:",
        "        a[1, tx] = tx // 2",
    )
    i, j = np.indices((8, 8))
    expected = np.where((i >= 2) & (j >= 4), 3 * i + 3, 0)
    for rank in range(2):
        for block in range(2):
            want = expected.copy()
            if rank == 1:
                want[0] = 5
            elif block == 1:
                want[1] = np.arange(8) // 2
            np.testing.assert_array_equal(o[rank][block], want)


def test_products_and_reductions():
    x, o = results(
        "T.copy(X[block, :, :], a)",
        "T.reduce_max(a, f, dim=1)",
        "T.gemm(a, a, a, transpose_B=True, clear_accum=True)",
        "for i in T.Parallel(8):",
        "    a[i, 0] = f[i]",
    )
    for rank in range(2):
        want = x[rank] @ x[rank].transpose(0, 2, 1)
        want[:, :, 0] = x[rank].max(2)
        np.testing.assert_array_equal(o[rank], want)


def test_rows_past_the_end():
    x, o = results("T.clear(a)", "T.copy(X[block, 5:13, :], a)")
    np.testing.assert_array_equal(o[0][:, :3], x[0][:, 5:])
    assert not o[0][:, 3:].any()


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (("T.clear(a[0:4, :])",), "uninitialized"),
        (("for i, j in T.Parallel(8, 8):", "    a[i, j] = a[i, j] + 1"), "uninitialized"),
        (("T.clear(a)", "for i, j in T.Parallel(8, 8):", "    a[0, j] = i"), "race"),
        (("T.clear(a)", "for i, j in T.Parallel(8, 8):", "    a[i, j] = a[j, i]"), "race"),
        (("T.clear(a)", "if tx < 8:", "    a[0, tx] = a[0, 7 - tx]"), "race"),
        (("T.clear(a)", "if tx < 9:", "    a[0, tx] = 1"), "out of range"),
        (("T.fill(a, 300)",), "overflows"),
        (("T.copy(b, a)",), "not defined"),
    ],
)
def test_unsuitable(body, why):
    with pytest.raises(Unsuitable, match=why):
        results(*body, dtype="int8")


@pytest.mark.parametrize("family", FAMILIES)
def test_programs_do_not_change(family):
    """A seed is the name of a program."""
    assert random_program(family, 3) == random_program(family, 3)
    assert random_program(family, 3) != random_program(family, 4)
