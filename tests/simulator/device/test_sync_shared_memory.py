"""Barriers of accesses of shared memory that TileLang leaves out, weakens or misplaces."""

import ml_dtypes
import numpy as np
import pytest
import tilelang.language as T

import tileweave as tw
from tests.releases import needs_nested_pipelines
from tests.simulator.device.shared_memory import (
    border,
    statement_of_some_threads,
    stored_operand,
)
from tests.simulator.device.test_validate import reported, switch_off
from tileweave import language as W


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
