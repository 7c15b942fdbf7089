"""Remainders keep their values when TVM simplifies them."""

import random

import numpy as np
import pytest
import tilelang.language as T
from tilelang import tvm
from tvm import tirx

import tileweave as tw
from tileweave import language as W
from tileweave.passes.group.make_factors_positive import make_factors_positive
from tileweave.passes.ir.walk import nodes_in

from .index_values import in_loops, values_of


def random_remainder(rng, extents):
    """Return a quotient or remainder of a sum of loop variables, quotients and remainders, and one
    of it."""
    dividend = tirx.const(rng.choice([0, 0, 1, 3, 7, 8]), "int32")
    for _ in range(rng.choice([1, 1, 2])):
        term, kind = rng.choice(list(extents)), rng.choice(["variable", "//", "%"])
        if kind != "variable":
            divisor = rng.choice([2, 3, 4])
            term = term // divisor if kind == "//" else term % divisor
        dividend = dividend - term * rng.choice([1, 1, 2, 4])
    divisor = rng.choice([2, 3, 4, 8])
    value = dividend % divisor if rng.random() < 0.6 else dividend // divisor
    return value // rng.choice([1, 2, 3]) % 16


def simplified(expr, extents):
    analyzer = tvm.arith.Analyzer()
    for variable, extent in extents.items():
        analyzer.bind(variable, tvm.ir.Range(0, extent))
    return analyzer.simplify(expr)


def rewritten(expr, extents):
    body = in_loops(tirx.Evaluate(expr), extents)
    (value,) = nodes_in(make_factors_positive(tirx.PrimFunc([], body)).body, tirx.Evaluate)
    return value.value


def test_random_remainders():
    rng, wrong = random.Random(0), 0
    for _ in range(500):
        extents = {tirx.Var(name, "int32"): rng.choice([3, 4, 8, 16]) for name in "ij"}
        expr = random_remainder(rng, extents)
        expected = values_of(expr, extents)
        found = values_of(simplified(rewritten(expr, extents), extents), extents)
        np.testing.assert_array_equal(found, expected)
        wrong += not np.array_equal(values_of(simplified(expr, extents), extents), expected)
    assert wrong >= 25, "TVM simplifies few of them wrongly"


def test_twice():
    """The pass runs before and after other passes, and does not change its own result."""
    i = tirx.Var("i", "int32")
    once = rewritten((8 - i // 2) % 8, {i: 8})
    tvm.ir.assert_structural_equal(rewritten(once, {i: 8}), once)


@pytest.mark.parametrize(
    "row",
    [lambda i: (8 - i // 2) % 8 * 2 + i % 2, lambda i: (0 - i // 2 * 2) % 8 + i % 2],
    ids=["quotient", "multiple"],
)
def test_inferred(row):
    """Inferred signals and waits have the index of the access."""

    @T.prim_func
    def program(X: T.Tensor((8, 32), "float32"), Y: T.Tensor((8, 32), "float32")):
        with T.Kernel(1, threads=32):
            me = W.rank()
            S = W.alloc_symmetric((16, 32), "float32")
            tile = T.alloc_shared((1, 32), "float32")
            for i in T.serial(8):
                T.copy(X[i, 0], tile)
                T.copy(tile, S[1 - me, row(i), 0])
            for i in T.serial(8):
                T.copy(S[me, row(i), 0], tile)
                T.copy(tile, Y[i, 0])

    rng = np.random.default_rng(0)
    given = [{"X": rng.integers(0, 9, (8, 32)).astype(np.float32)} for _ in range(2)]
    results = tw.validate(program, 2, given)
    for rank in range(2):
        np.testing.assert_array_equal(results[rank]["Y"], given[1 - rank]["X"])
