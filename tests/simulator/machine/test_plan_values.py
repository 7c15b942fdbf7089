"""Values in plans: copied from device memory, written and waited for by streams."""

import numpy as np
import pytest
import tilelang.language as T

import tileweave as tw
from tests.lines import place_of
from tests.simulator.machine.checks import N, fault_of, fill
from tileweave import language as W


@T.prim_func
def count_up(count: T.Tensor((1,), "uint32")):
    with T.Kernel(1, threads=N):
        if T.get_thread_binding() == 0:
            count[0] += 1


@T.prim_func
def take(
    inbox: W.Symmetric((2, N), "int32"),
    flag: W.Symmetric((2,), "uint32"),
    count: T.Tensor((1,), "uint32"),
    out: T.Tensor((N,), "int32"),
    half: T.int32,
):
    with T.Kernel(1, threads=N):
        W.wait_reached(flag[W.rank(), half], count[0])
        for i in T.Parallel(N):
            out[i] = inbox[W.rank(), half, i]


def counted(fault=""):
    """Two ranks send each other a tensor; the epoch is a value in device memory."""

    @tw.plan
    def plan(
        p,
        A: T.Tensor((N,), "int32"),
        inbox: W.Symmetric((2, N), "int32"),
        flag: W.Symmetric((2,), "uint32"),
        count: T.Tensor((1,), "uint32"),
        out: T.Tensor((N,), "int32"),
        half: T.int32,
    ):
        peer = 1 - p.rank
        p.launch(count_up, count)
        if fault != "wait":
            p.wait_stream(None, stream="copies")
        if fault == "order":
            p.copy_value(flag[peer, half], count[0], stream="copies")
        p.copy(inbox[peer, half], A, stream="copies")
        if fault != "order":
            p.copy_value(flag[peer, half], count[0], stream="copies")
        p.launch(take, inbox, flag, count, out, half)

    return plan


def counted_inputs():
    return [
        {
            "A": np.arange(N, dtype=np.int32) + 100 * rank,
            "inbox": np.zeros((2, N), np.int32),
            "flag": np.zeros(2, np.uint32),
            "count": np.zeros(1, np.uint32),
            "half": lambda epoch: epoch % 2,
        }
        for rank in range(2)
    ]


def test_values_copied_from_device_memory():
    out = tw.simulate(counted(), 2, counted_inputs(), schedules=100, epochs=4)
    for rank in range(2):
        assert (out[rank]["out"] == np.arange(N) + 100 * (1 - rank)).all()
        assert out[rank]["flag"].tolist() == [3, 4]


@pytest.mark.parametrize(
    ("fault", "line", "text"),
    [
        ("wait", "p.copy_value", "p.copy_value (step 3) of count[0] by stream 'copies' of rank"),
        ("order", "p.copy(inbox", "p.copy (step 4) of inbox["),
    ],
)
def test_faults_of_values_copied_from_device_memory(fault, line, text):
    error = fault_of(counted(fault), 2, counted_inputs())
    assert error.kind == "race"
    assert text in error.report
    if fault == "order":
        assert place_of(counted, line) in error.report


@T.prim_func
def square(
    x: T.Tensor((2, N), "int32"), done: T.Tensor((2,), "uint32"), y: T.Tensor((2, N), "int32")
):
    with T.Kernel(2, 2, threads=N // 2) as (part, half):
        for i in T.Parallel(N // 2):
            y[half, part * (N // 2) + i] = x[half, part * (N // 2) + i] * x[half, 0]
        W.signal(done[half])


@T.prim_func
def collect(
    inbox: W.Symmetric((2, 2, N), "int32"),
    ready: W.Symmetric((2, 2), "uint32"),
    out: T.Tensor((2, N), "int32"),
    epoch: T.int32,
):
    with T.Kernel(2, threads=N) as half:
        W.wait_reached(ready[W.rank(), epoch % 2, half], T.Cast("uint32", epoch + 1))
        for i in T.Parallel(N):
            out[half, i] = inbox[W.rank(), epoch % 2, half, i]


def halves(fault=""):
    """Two ranks send each other each half of a kernel's result as soon as it is written."""

    @tw.plan
    def plan(
        p,
        x: T.Tensor((2, N), "int32"),
        done: T.Tensor((2,), "uint32"),
        y: T.Tensor((2, N), "int32"),
        inbox: W.Symmetric((2, 2, N), "int32"),
        ready: W.Symmetric((2, 2), "uint32"),
        out: T.Tensor((2, N), "int32"),
        epoch: T.int32,
    ):
        peer, turn = 1 - p.rank, epoch % 2
        stream = None if fault == "stream" else "copies"
        if fault != "stream":
            p.launch(square, x, done, y)
        for half in range(2):
            if fault != "drop":
                p.wait_value(done[half], 3 if fault == "high" else 2, stream=stream)
            p.write_value(done[half], 0, stream=stream)
            p.copy(inbox[peer, turn, half], y[half], stream=stream)
            p.write_value(ready[peer, turn, half], epoch + 1, stream=stream)
        if fault == "stream":
            p.launch(square, x, done, y)
        p.launch(collect, inbox, ready, out, epoch)

    return plan


def halves_inputs():
    return [
        {
            "x": np.arange(2 * N, dtype=np.int32).reshape(2, N) + 100 * rank + 1,
            "done": np.zeros(2, np.uint32),
            "ready": np.zeros((2, 2), np.uint32),
            "inbox": np.zeros((2, 2, N), np.int32),
            "epoch": lambda epoch: epoch,
        }
        for rank in range(2)
    ]


@pytest.mark.parametrize("resident", [1, 8])
def test_streams_that_wait_for_values(resident):
    inputs = halves_inputs()
    out = tw.simulate(halves(), 2, inputs, schedules=20, epochs=3, resident_blocks=resident)
    for rank in range(2):
        x = inputs[1 - rank]["x"]
        assert (out[rank]["out"] == x * x[:, :1]).all()
        assert out[rank]["done"].tolist() == [0, 0]


def test_a_stream_that_does_not_wait_for_a_value():
    error = fault_of(halves("drop"), 2, halves_inputs())
    assert error.kind in ("race", "reuse")
    assert place_of(halves, "p.copy(inbox") in error.report
    assert "of y[" in error.report


def test_a_value_that_is_never_reached():
    error = fault_of(halves("high"), 2, halves_inputs())
    assert error.kind == "deadlock"
    line = place_of(halves, "p.wait_value")
    for rank in range(2):
        assert (
            f"stream 'copies' of rank {rank} in launch 0 waits at p.wait_value(done[0]): value "
            f"seen 2, value wanted >= 3 --> {line}\n    1 missing\n"
        ) in error.report
        assert f"rank {rank}, stream 'copies': p.write_value (step 3) has not" in error.report
    assert "could signal it: W.signal --> " in error.report


def test_a_stream_that_waits_for_a_later_kernel():
    error = fault_of(halves("stream"), 2, halves_inputs())
    assert error.kind == "deadlock"
    assert (
        "the caller's stream of rank 0 in launch 0 waits at p.wait_value(done[0]): value seen "
        in (error.report)
    )
    assert "rank 0, the caller's stream: p.write_value (step 2) has not started" in error.report


@pytest.mark.parametrize(("seen", "value", "goes"), [
    (2**32 - 3, -2, False), (2**32 - 2, -2, True), (1, -2, True), (2**31 - 3, -2, True),
    (2**31 - 2, -2, False), (0, 1, False),
])  # fmt: skip
@pytest.mark.parametrize("dtype", ["int32", "uint32"])
def test_values_reached_across_wrap_around(seen, value, goes, dtype):
    @tw.plan
    def plan(p, word: T.Tensor((1,), dtype)):
        p.wait_value(word[0], value)

    inputs = [{"word": np.array([seen], np.uint32).view(dtype)}]
    if goes:
        tw.simulate(plan, 1, inputs, schedules=1)
    else:
        assert fault_of(plan, 1, inputs, schedules=1).kind == "deadlock"


def test_an_uninitialized_value():
    @tw.plan
    def plan(p, word: T.Tensor((1,), "uint32")):
        p.wait_value(word[0], 1)

    error = fault_of(plan, 1, [{}])
    assert error.kind == "poison"
    line = place_of(test_an_uninitialized_value, "p.wait_value")
    assert (
        "p.wait_value (step 1) in the caller's stream of rank 0 in launch 0 waits for word[0]"
        in (error.report)
    )
    assert line in error.report


def test_flags_without_a_wait():
    @tw.plan
    def plan(p, flag: W.Symmetric((2,), "uint32"), x: T.Tensor((4, N), "int32")):
        p.launch(fill, x, 1)
        p.write_value(flag[p.rank, 1], 7)

    line = place_of(test_flags_without_a_wait, "p.write_value")
    with pytest.warns(tw.SimulationWarning, match="but never waited for or read") as warned:
        tw.simulate(plan, 1, [{"flag": np.zeros(2, np.uint32)}])
    assert "flag[0, 1] is signalled" in str(warned[0].message)
    assert f"p.write_value --> {line}" in str(warned[0].message)
