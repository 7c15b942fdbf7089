"""Plans on simulated ranks: streams beside kernels, and what is said of their faults."""

import inspect

import numpy as np
import pytest
import tilelang.language as T

import tileweave as tw
from tileweave import language as W

N = 32


@T.prim_func
def take(
    inbox: W.Symmetric((2, 4, N), "int32"),
    flag: W.Symmetric((2,), "uint32"),
    out: T.Tensor((4, N), "int32"),
    epoch: T.int32,
):
    with T.Kernel(4, threads=N) as row:
        W.wait_reached(flag[W.rank(), epoch % 2], T.Cast("uint32", epoch + 1))
        for i in T.Parallel(N):
            out[row, i] = inbox[W.rank(), epoch % 2, row, i]


def swap(early=False, apart=False, halves=2):
    """Two ranks give each other a tensor, by copy engine, and a kernel takes it."""

    @tw.plan
    def program(
        p: tw.Steps,
        A: T.Tensor((4, N), "int32"),
        inbox: W.Symmetric((2, 4, N), "int32"),
        flag: W.Symmetric((2,), "uint32"),
        out: T.Tensor((4, N), "int32"),
        epoch: T.int32,
    ):
        peer = 1 - p.rank
        if early:
            p.write_value(flag[peer, epoch % 2], epoch + 1, stream="copies")
        p.copy(inbox[peer, epoch % halves], A, stream="copies")
        if not early:
            p.write_value(flag[peer, epoch % 2], epoch + 1, stream="flags" if apart else "copies")
        p.launch(take, inbox, flag, out, epoch)

    return program


def line_of(function, text):
    lines, first = inspect.getsourcelines(function)
    return f"{__file__}:{first + next(n for n, line in enumerate(lines) if text in line)}"


def inputs_of_swap():
    return [
        {
            "A": np.arange(4 * N, dtype=np.int32).reshape(4, N) + 1000 * rank,
            "inbox": np.zeros((2, 4, N), np.int32),
            "flag": np.zeros(2, np.uint32),
            "epoch": lambda epoch: epoch,
        }
        for rank in range(2)
    ]


def test_copy_flag_and_kernel():
    inputs = inputs_of_swap()
    out = tw.simulate(swap(), 2, inputs, schedules=200)
    for rank in range(2):
        assert (out[rank]["out"] == inputs[1 - rank]["A"]).all()


@pytest.mark.parametrize(
    ("fault", "kind", "text"),
    [
        ({"early": True}, "race", "p.copy(inbox"),
        ({"apart": True}, "race", "p.copy(inbox"),
        ({"halves": 1}, "reuse", "p.copy(inbox"),
    ],
)
def test_faults(fault, kind, text):
    with pytest.raises(tw.SimulationError) as error:
        tw.simulate(swap(**fault), 2, inputs_of_swap(), schedules=50)
    assert error.value.kind == kind
    assert line_of(swap, text) in error.value.report
    assert "of inbox[" in error.value.report
    assert "by stream 'copies' of rank" in error.value.report
