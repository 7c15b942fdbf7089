"""A signal between an asynchronous load and its wait frees memory that is still being read."""

import numpy as np
import pytest
import tilelang.language as T
from tilelang import tvm

import tileweave as tw
from tests.factory import factory
from tests.releases import RECORDS_LINES
from tests.simulator.memory.test_async_loads import every_load, load, prefetch
from tileweave import language as W
from tileweave import passes
from tileweave.passes.sync.verify.verification import find_fault

RANKS = 2


def fault(program) -> str:
    mod = tvm.IRModule({"program": program})
    (func,) = passes.run_group(mod, RANKS, 1 << 40, ["group"]).functions.values()
    return find_fault(func, RANKS)[0]


@every_load
def test_a_signal_before_the_wait_is_refused(by):
    message = fault(load(by, True))
    assert message.startswith(f"{by} reads mail[me, 0] until T."), message
    assert "since W.signal(credit[" in message
    assert "expected the signal that frees it after the wait" in message
    labels = [line.split(" --> ")[0].strip() for line in message.splitlines()[1:]]
    assert not RECORDS_LINES or labels == ["read", "end of the load", "signal", "write"]


@every_load
def test_a_signal_after_the_wait_is_accepted(by):
    assert fault(load(by, False)) == ""


@factory
def pipelined(
    ahead,
    mail: W.Symmetric((4, 64, 64), "float16"),
    credit: W.Symmetric((4,), "uint32"),
    B: T.Tensor((64, 64), "float16"),
    out: T.Tensor((64, 64), "float32"),
):
    """A pipelined loop multiplies pieces of the own mail and credits each; the left neighbor then
    overwrites it."""
    with T.Kernel(1, threads=128) as _:
        me, ranks = W.rank(), W.world_size()
        a = T.alloc_shared((64, 64), "float16")
        b = T.alloc_shared((64, 64), "float16")
        sums = T.alloc_fragment((64, 64), "float32")
        T.clear(sums)
        T.copy(B, b)
        for k in T.Pipelined(4, num_stages=2):
            T.copy(mail[me, k, 0:64, 0:64], a)
            if ahead:
                W.signal(credit[(me - 1) % ranks, k])
            T.gemm(a, b, sums)
            if not ahead:
                W.signal(credit[(me - 1) % ranks, k])
        T.copy(sums, out)
        for k in T.serial(4):
            W.wait_reached(credit[me, k], 1)
            T.copy(b, mail[(me + 1) % ranks, k, 0:64, 0:64])
        W.sync_ranks()


def start():
    one = np.eye(64, dtype=np.float16)
    return [{"mail": np.stack([one] * 4), "credit": np.zeros(4, np.uint32), "B": one}] * RANKS


def test_a_signal_before_the_first_use_of_a_pipelined_copy_is_refused():
    message = fault(pipelined(True))
    assert "T.copy reads mail[me, k, 0, 0] until the first use of what it loads" in message
    assert fault(pipelined(False)) == ""


def test_a_signal_before_the_first_use_of_a_pipelined_copy_is_a_fault():
    with pytest.raises(tw.SimulationError, match="asynchronous loads") as error:
        tw.simulate(pipelined(True), world_size=RANKS, inputs=start(), epochs=1, schedules=20)
    assert error.value.kind in ("race", "reuse")
    for out in tw.simulate(pipelined(False), world_size=RANKS, inputs=start(), epochs=1):
        np.testing.assert_array_equal(out["out"], 4 * np.eye(64))


def test_loads_that_end_in_another_loop():
    message = fault(prefetch(0))
    assert "W.bulk_load reads mail" in message, message
    assert fault(prefetch(2)) == ""
