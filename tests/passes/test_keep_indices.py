"""Indices keep their values when TileLang flattens them."""

import random
from itertools import product

import numpy as np
import pytest
import tilelang
import tilelang.language as T
from tilelang import tvm
from tvm import tirx

import tileweave as tw
from tests.releases import names_line
from tileweave import language as W
from tileweave.passes.flat.keep_indices import keep_indices
from tileweave.passes.group.make_factors_positive import make_factors_positive
from tileweave.passes.ir.walk import nodes_in

from .index_values import in_loops, values_of

EXTENTS = (2, 3, 4, 6, 8, 16, 32, 64)


def program_of(index, extents, condition=None):
    """Return ``y[index] = 0`` in nested loops, in a branch if there is a condition."""
    y = tirx.decl_buffer((1 << 20,), "int32", "y")
    body = tirx.BufferStore(y, tirx.const(0, "int32"), [index])
    if condition is not None:
        body = tirx.IfThenElse(condition, body, None)
    return tirx.PrimFunc([y.data], in_loops(body, extents)).with_attr("global_symbol", "program")


def flattened(func):
    """Return the index of the store after TileLang's pass."""
    mod = tilelang.transform.FlattenBuffer()(tvm.IRModule({"program": func}))
    (store,) = nodes_in(mod["program"].body, tirx.BufferStore)
    return store.indices[0]


def random_index(rng):
    """Return a sum of the digits of some loop variables in any order, some of them with offsets,
    the loops and a condition."""
    extents = {tirx.Var(n, "int32"): rng.choice(EXTENTS) for n in "jti"[: rng.randint(1, 3)]}
    digits = []
    for variable, extent in extents.items():
        scale, left = 1, extent
        while left > 1:
            size = rng.choice([d for d in (2, 3, 4, 8) if left % d == 0])
            digits.append((variable // scale if scale > 1 else variable, size))
            scale, left = scale * size, left // size
    if rng.random() < 0.5:
        rng.shuffle(digits)
    index, factor = tirx.const(0, "int32"), 1
    for value, size in digits:
        kind = rng.choice(["plain", "plain", "shifted", "backward"])
        if kind == "shifted":
            value = value % size + rng.randint(1, size + 1)
        elif kind == "backward":
            value = rng.randint(0, size + 1) - value
        index, factor = index + value % size * factor, factor * size
    variable, extent = rng.choice(list(extents.items()))
    number = rng.randint(0, extent - 1)
    condition = rng.choice([None, variable >= number, variable < number + 1])
    return index, extents, condition


@pytest.mark.parametrize("seed", range(400))
def test_random_indices(seed):
    index, extents, condition = random_index(random.Random(seed))
    kept = keep_indices(make_factors_positive(program_of(index, extents, condition)))
    expected, found = values_of(index, extents), values_of(flattened(kept), extents)
    inside = True if condition is None else values_of(condition, extents)
    np.testing.assert_array_equal(np.where(inside, expected, 0), np.where(inside, found, 0))


def test_unchanged():
    """Indices that TVM simplifies rightly do not change, and it simplifies many wrongly."""
    wrong = 0
    for seed in range(100):
        index, extents, condition = random_index(random.Random(seed))
        func = make_factors_positive(program_of(index, extents, condition))
        simplified = values_of(flattened(func), extents)
        is_right = np.array_equal(values_of(index, extents), simplified)
        if is_right:
            assert keep_indices(func).body.same_as(func.body)
        wrong += not is_right
    assert wrong >= 20


@pytest.mark.parametrize("divisor", [2, 4])
def test_row(divisor):
    """An index that begins with a constant in each digit, as in a row of a swizzled tile."""
    j = tirx.Var("j", "int32")
    for first, second in product(range(divisor), repeat=2):
        index = (j // divisor + first) % divisor * divisor + (j % divisor + second) % divisor
        extents = {j: divisor * divisor}
        kept = flattened(keep_indices(program_of(index, extents)))
        np.testing.assert_array_equal(values_of(kept, extents), values_of(index, extents))


def test_an_index_that_one_thread_has():
    """Few of the values that are compared first are reached."""

    @T.prim_func
    def program(x: T.Tensor((1,), "int32"), y: T.Tensor((2, 1, 4), "int32")):
        with T.Kernel(1, threads=256):
            thread = T.get_thread_binding()
            if thread < 1:
                for j in T.serial(4):
                    y[(x[0] + 1) % 2, thread, j] = j

    assert "y[" in tw.emit(program)


def test_refused(monkeypatch):
    """An index that TVM would simplify wrongly nevertheless is refused."""

    @T.prim_func
    def program(x: T.Tensor((64,), "int32"), y: T.Tensor((64,), "int32")):
        with T.Kernel(1, threads=64):
            W.fence("gpu")
            for j in T.Parallel(64):
                y[j] = x[(j // 8 + 1) % 8 * 8 + (j % 8 + 1) % 8]

    monkeypatch.setattr(f"{keep_indices.__module__}._with_no_op", lambda index: index)
    with pytest.raises(tw.LanguageError, match=r"x\[.*TVM simplifies this index") as error:
        tw.emit(program)
    assert names_line(str(error.value), "test_keep_indices.py:")
