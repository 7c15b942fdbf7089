"""Plans on simulated ranks: streams beside kernels, and reports of their faults."""

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import tilelang.language as T

import tileweave as tw
from tests.lines import place_of
from tests.modules import load_module
from tests.simulator.machine.checks import N, fault_of, fill
from tileweave import language as W

pytestmark = pytest.mark.long

BF16 = ml_dtypes.bfloat16


ROWS, DEPTH, COLUMNS = 16, 16, 32


def all_gather_gemm(ranks, fault=""):
    """All-gather of rows, and a GEMM with one block for each shard and half of the columns."""

    @T.prim_func
    def gemm(
        B: T.Tensor((DEPTH, COLUMNS), "bfloat16"),
        gathered: W.Symmetric((2, ranks, ROWS, DEPTH), "bfloat16"),
        ready: W.Symmetric((2, ranks), "uint32"),
        C: T.Tensor((ranks * ROWS, COLUMNS), "float32"),
        epoch: T.int32,
    ):
        with T.Kernel(2, ranks, threads=64) as (part, distance):
            A_tile = T.alloc_shared((ROWS, DEPTH), "bfloat16")
            B_tile = T.alloc_shared((DEPTH, COLUMNS // 2), "bfloat16")
            total = T.alloc_fragment((ROWS, COLUMNS // 2), "float32")
            me = W.rank()
            source = (me + ranks - distance) % ranks
            if source != me:
                W.wait_reached(
                    ready[me, epoch % 2, source],
                    T.Cast("uint32", epoch + (0 if fault == "wait" else 1)),
                )
            T.clear(total)
            T.copy(gathered[me, epoch % 2, source, 0, 0], A_tile)
            T.copy(B[0, part * (COLUMNS // 2)], B_tile)
            T.gemm(A_tile, B_tile, total)
            T.copy(total, C[source * ROWS, part * (COLUMNS // 2)])

    @tw.plan
    def plan(
        p: tw.PlanBuilder,
        A: T.Tensor((ROWS, DEPTH), "bfloat16"),
        B: T.Tensor((DEPTH, COLUMNS), "bfloat16"),
        gathered: W.Symmetric((2, ranks, ROWS, DEPTH), "bfloat16"),
        ready: W.Symmetric((2, ranks), "uint32"),
        C: T.Tensor((ranks * ROWS, COLUMNS), "float32"),
        epoch: T.int32,
    ):
        half = epoch % 2
        flags = "flags" if fault == "stream" else "copies"
        for peer in p.peers():
            if fault == "peer" and peer == 0 and p.rank == 1:
                continue
            if fault == "order":
                p.write_value(ready[peer, half, p.rank], epoch + 1, stream=flags)
            p.copy(gathered[peer, 0 if fault == "half" else half, p.rank], A, stream="copies")
            if fault != "order":
                p.write_value(ready[peer, half, p.rank], epoch + 1, stream=flags)
        p.copy(gathered[p.rank, half, p.rank], A, stream="own" if fault == "own" else None)
        p.launch(gemm, B, gathered, ready, C, epoch)

    return plan, gemm


def gemm_inputs(ranks):
    rng = np.random.default_rng(ranks)
    return [
        {
            "A": rng.integers(-4, 5, (ROWS, DEPTH)).astype(BF16),
            "B": rng.integers(-4, 5, (DEPTH, COLUMNS)).astype(BF16),
            "gathered": np.zeros((2, ranks, ROWS, DEPTH), BF16),
            "ready": np.zeros((2, ranks), np.uint32),
            "epoch": lambda epoch: epoch,
        }
        for _ in range(ranks)
    ]


@pytest.mark.parametrize(("ranks", "resident"), [(1, 4), (2, 4), (3, 1), (4, 4), (5, 2)])
def test_all_gather_gemm(ranks, resident):
    plan, _ = all_gather_gemm(ranks)
    inputs, schedules = gemm_inputs(ranks), 200 if ranks < 4 else 30
    out = tw.simulate(plan, ranks, inputs, schedules=schedules, resident_blocks=resident)
    A = np.concatenate([i["A"] for i in inputs]).astype(np.float32)
    for given, actual in zip(inputs, out, strict=True):
        assert (actual["C"] == A @ given["B"].astype(np.float32)).all()


COPY, OWN = "p.copy(gathered[peer", "p.copy(gathered[p.rank"


@pytest.mark.parametrize(
    ("fault", "kind", "line", "text"),
    [
        ("order", "race", COPY, "by stream 'copies' of rank"),
        ("stream", "race", COPY, "by stream 'copies' of rank"),
        ("half", "reuse", COPY, "by stream 'copies' of rank"),
        ("own", "race", OWN, "by stream 'own' of rank"),
        ("wait", "race", COPY, "by stream 'copies' of rank"),
    ],
)
@pytest.mark.parametrize("seed", [0, 100])
def test_faults_of_all_gather_gemm(fault, kind, line, text, seed):
    plan, _ = all_gather_gemm(3, fault)
    error = fault_of(plan, 3, gemm_inputs(3), seed=seed)
    assert (error.kind, text in error.report) == (kind, True), error.report
    assert place_of(all_gather_gemm, line) in error.report
    assert place_of(all_gather_gemm, "T.copy(gathered[me") in error.report


def test_a_peer_left_out():
    plan, _ = all_gather_gemm(3, "peer")
    error = fault_of(plan, 3, gemm_inputs(3))
    assert error.kind == "deadlock"
    assert "W.wait_reached(ready[0, 0, 1]): value seen 0, value wanted reached 1" in error.report
    assert place_of(all_gather_gemm, "W.wait_reached") in error.report
    flag = place_of(all_gather_gemm, "p.write_value(ready", 1)
    assert f"could signal it: p.write_value --> {flag}, so far never" in error.report
    assert "p.copy" not in error.report  # the next launch, which none of them has begun


@T.prim_func
def double(x: T.Tensor((4, N), "int32"), y: T.Tensor((4, N), "int32")):
    with T.Kernel(2, threads=N) as half:
        for r, i in T.Parallel(2, N):
            y[half * 2 + r, i] = x[half * 2 + r, i] * 2


def streams(waits):
    """One stream fills x, another doubles it into y; z is a copy of part of y."""

    @tw.plan
    def plan(
        p,
        x: T.Tensor((4, N), "int32"),
        y: T.Tensor((4, N), "int32"),
        z: T.Tensor((2, 4), "int32"),
        epoch: T.int32,
    ):
        p.launch(fill, x, 10 * epoch, stream="first")
        if "first" in waits:
            p.wait_stream("first", stream="second")
        p.launch(double, x, y, stream="second")
        if "second" in waits:
            p.wait_stream("second")
        p.copy(z, y[1:3, 4:8])

    return plan


@pytest.mark.parametrize("resident", [1, 4, 20])
def test_streams_that_wait_for_each_other(resident):
    out = tw.simulate(
        streams(("first", "second")), 1, [{"epoch": lambda epoch: epoch}], schedules=50,
        resident_blocks=resident,
    )  # fmt: skip
    assert (out[0]["x"] == np.arange(N) + 20).all()
    assert (out[0]["y"] == 2 * (np.arange(N) + 20)).all()
    assert (out[0]["z"] == 2 * (np.arange(4, 8) + 20)).all()


@pytest.mark.parametrize(
    ("waits", "one", "other"),
    [(("second",), "p.launch(fill", "x["), (("first",), "p.copy(z", "y[")],
)
def test_streams_that_do_not(waits, one, other):
    inputs = [{
        "x": np.zeros((4, N), np.int32), "y": np.zeros((4, N), np.int32),
        "z": np.zeros((2, 4), np.int32), "epoch": lambda epoch: epoch,
    }]  # fmt: skip
    error = fault_of(streams(waits), 1, inputs)
    assert error.kind in ("race", "reuse")
    assert f"of {other}" in error.report
    assert "of stream '" in error.report


def test_a_copy_of_uninitialized_memory():
    @tw.plan
    def plan(p, x: T.Tensor((4,), "int32"), y: T.Tensor((4,), "int32")):
        p.copy(y, x)

    error = fault_of(plan, 1, [{}])
    assert error.kind == "poison"
    assert "p.copy (step 1) in the caller's stream of rank 0 in launch 0 reads x[0:4]" in (
        error.report
    )
    assert place_of(test_a_copy_of_uninitialized_memory, "p.copy(y, x)") in error.report


@T.prim_func
def spin(inbox: T.Tensor((4,), "int32"), flag: T.Tensor((1,), "uint32"), epoch: T.int32):
    with T.Kernel(4, threads=N):
        W.wait_reached(flag[0], T.Cast("uint32", epoch + 1))


@T.prim_func
def announce(flag: T.Tensor((1,), "uint32")):
    with T.Kernel(1, threads=N):
        W.signal(flag[0])


def queued_after(what, first):
    """A kernel that occupies all SMs waits for work of a side stream."""

    @tw.plan
    def plan(
        p,
        x: T.Tensor((4,), "int32"),
        inbox: T.Tensor((4,), "int32"),
        flag: T.Tensor((1,), "uint32"),
        epoch: T.int32,
    ):
        def side():
            if what == "kernel":
                p.launch(announce, flag, stream="side")
            else:
                p.copy(inbox, x, stream="side")
                p.write_value(flag[0], epoch + 1, stream="side")

        if first:
            side()
        p.launch(spin, inbox, flag, epoch)
        if not first:
            side()

    return plan


def queued_after_inputs():
    return [{"x": np.ones(4, np.int32), "flag": np.zeros(1, np.uint32), "epoch": lambda e: e}]


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("kernel", "blocks 0 to 0 of stream 'side' have not started: 4 fit at a time"),
        ("copy", "p.copy (step 2) in stream 'side' in launch 0 needs an SM, and all 4 are"),
    ],
)
def test_work_queued_after_a_kernel_that_waits_for_it(what, text):
    error = fault_of(queued_after(what, first=False), 1, queued_after_inputs(), resident_blocks=4)
    assert error.kind == "deadlock"
    assert text in error.report
    if what == "copy":
        assert place_of(queued_after, "p.copy(inbox") in error.report
        assert "stream 'side': p.write_value (step 3) has not started" in error.report
        assert place_of(queued_after, "p.write_value(flag") in error.report
    assert "the caller's stream waits for stream 'side'" not in error.report
    for plan, resident in (
        (queued_after(what, first=False), 5),
        (queued_after(what, first=True), 4),
    ):
        tw.simulate(plan, 1, queued_after_inputs(), schedules=30, resident_blocks=resident)


def test_a_dynamic_shape_and_a_kernel_launched_twice():
    m = T.dynamic("m")

    @T.prim_func
    def add(x: T.Tensor((m, 4), "int32"), n: T.int32, y: T.Tensor((m, 4), "int32")):
        with T.Kernel(m, threads=32) as row:
            for i in T.Parallel(4):
                y[row, i] = x[row, i] + n

    @tw.plan
    def plan(
        p,
        a: T.Tensor((m, 4), "int32"),
        b: T.Tensor((m, 4), "int32"),
        c: T.Tensor((m, 4), "int32"),
    ):
        p.launch(add, a, a.shape[0], b)
        p.launch(add, b, 1000 * p.rank, c)

    inputs = [{"a": np.arange(4 * n, dtype=np.int32).reshape(n, 4)} for n in (3, 5)]
    out = tw.simulate(plan, 2, inputs, schedules=20)
    for rank, n in enumerate((3, 5)):
        assert (out[rank]["c"] == inputs[rank]["a"] + n + 1000 * rank).all()


def test_regions_out_of_bounds():
    @tw.plan
    def plan(p, x: W.Symmetric((4,), "int32"), y: T.Tensor((4,), "int32")):
        p.copy(x[p.rank + 1], y)

    error = fault_of(plan, 2, [{}, {}])
    assert error.kind == "bounds"
    assert "x[0:2, 0:4]: index 2 of axis 0; expected 0 to 1" in error.report
    assert "in plan plan of rank 1 in launch 0" in error.report
    assert place_of(test_regions_out_of_bounds, "p.copy(x") in error.report


def gpu_tests():
    return load_module(Path(__file__).parents[2] / "gpu" / "plan.py")


@pytest.mark.parametrize("kernels", [1, 2])
def test_the_plan_of_the_gpu_tests_that_sends_parts(kernels):
    module = gpu_tests()
    shape = (module.ROWS, module.COLUMNS)
    inputs = [
        {
            "A": np.arange(np.prod(shape), dtype=np.int32).reshape(shape) + rank,
            "flags": np.zeros((2, 2, module.PARTS), np.uint32),
            "done": np.zeros(module.PARTS, np.uint32),
            "count": np.zeros(1, np.uint32),
            "half": lambda epoch: epoch % 2,
        }
        for rank in range(2)
    ]
    out = tw.simulate(module.overlapped(2, kernels), 2, inputs, schedules=3, epochs=3)
    for rank in range(2):
        assert (out[rank]["out"][1 - rank] == inputs[1 - rank]["A"] + 1).all()
        assert not out[rank]["done"].any()


@pytest.mark.parametrize("by", ["write_value", "copy_value", "strided"])
def test_the_plans_of_the_gpu_tests(by):
    module = gpu_tests()
    plan, width = module.exchange(3, by)
    shape = (module.ROWS, module.COLUMNS)
    inputs = [
        {
            "A": np.arange(np.prod(shape), dtype=np.int32).reshape(shape) + rank,
            "flags": np.zeros((2, 3), np.uint32),
            "count": np.zeros(1, np.uint32),
            "epoch": lambda epoch: epoch,
        }
        for rank in range(3)
    ]
    out = tw.simulate(plan, 3, inputs, schedules=5, epochs=4)
    for rank, peer in ((0, 1), (0, 2), (2, 1)):
        sent = inputs[peer]["A"][:, module.COLUMNS - width :]
        assert (out[rank]["out"][peer, :, :width] == sent + 1).all()
