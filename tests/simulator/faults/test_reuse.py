"""Message of a fault of kind ``reuse``."""

import numpy as np
import pytest
import tilelang.language as T

import tileweave as tw
from tileweave import language as W


@T.prim_func
def no_credit(
    mail: W.Symmetric((64,), "int32"),
    flag: W.Symmetric((1,), "int32"),
    state: T.Tensor((1,), "int32"),
    out: T.Tensor((64,), "int32"),
):
    with T.Kernel(1, threads=64):
        me, tx, epoch = W.rank(), T.get_thread_binding(), T.alloc_var("int32")
        epoch = state[0]
        mail[1 - me, tx] = epoch
        W.signal(flag[1 - me, 0])
        W.wait_reached(flag[me, 0], epoch + 1)
        out[tx] = mail[me, tx]
        T.sync_threads()
        if tx == 0:
            state[0] = epoch + 1


def test_reuse_names_both_accesses_and_what_orders_them():
    inputs = [{"state": np.zeros(1, np.int32), "flag": np.zeros(1, np.int32)} for _ in range(2)]
    with pytest.raises(tw.SimulationError) as error:
        tw.simulate(no_credit, 2, inputs, epochs=2, schedules=20)
    lines = error.value.report.splitlines()
    assert error.value.kind == "reuse"
    assert "store of mail" in lines[0]
    assert lines[1] == "overwrites what an earlier use may still read: it is not ordered after"
    assert "load of mail" in lines[2]
    assert (
        "expected, before the write, a wait for what the reader signals after its last read, or "
        "W.sync_ranks"
    ) in lines
