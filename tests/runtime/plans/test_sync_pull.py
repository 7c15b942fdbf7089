"""Plans whose copies read data that copies of other ranks write: they are ordered, or refused."""

import numpy as np
import pytest
import tilelang.language as T

import tileweave as tw
from tests.releases import needs_lines
from tileweave import language as W
from tileweave.runtime.plans.steps import CopyValue, WaitStream
from tileweave.runtime.plans.sync_push import WAIT

N = 24


def gather(ranks, cut=8, skip=None):
    """Send each rank's numbers to all ranks, in two pieces."""

    @tw.plan
    def gather(
        p: tw.PlanBuilder,
        x: T.Tensor((N,), "float32"),
        given: W.Symmetric((N,), "float32"),
        out: T.Tensor((ranks, N), "float32"),
    ):
        pieces = [slice(0, cut), slice(cut, N)]
        for piece in pieces[:skip]:
            p.copy(given[p.rank, piece], x[piece])
        p.copy(out[p.rank], x)
        for number, piece in enumerate(pieces):
            for peer in p.peers():
                p.copy(out[peer, piece], given[peer, piece], stream=f"fetch {number}")

    return gather


def ring(ranks):
    """Each rank copies from its left neighbor what that rank has copied before."""

    @tw.plan
    def ring(
        p: tw.PlanBuilder,
        x: T.Tensor((N,), "float32"),
        actual: W.Symmetric((ranks, N), "float32"),
        out: T.Tensor((ranks, N), "float32"),
    ):
        left = (p.rank - 1) % p.world_size
        p.copy(actual[p.rank, p.rank], x)
        for step in range(1, p.world_size):
            source = (p.rank - step) % p.world_size
            p.copy(actual[p.rank, source], actual[left, source], stream="fetch")
        for source in range(p.world_size):
            p.copy(out[source], actual[p.rank, source], stream="out")

    return ring


def inputs_of(ranks):
    rng = np.random.default_rng(ranks)
    return [{"x": rng.integers(0, 99, N).astype(np.float32)} for _ in range(ranks)]


@pytest.mark.parametrize(
    ("make", "ranks"), [*((gather, n) for n in (1, 2, 3, 5)), *((ring, n) for n in (1, 2, 3, 5))]
)
def test_every_schedule_is_right(make, ranks):
    inputs = inputs_of(ranks)
    right = np.stack([i["x"] for i in inputs])
    for actual in tw.simulate(make(ranks), ranks, inputs, schedules=5, epochs=3):
        assert np.array_equal(actual["out"], right)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("wait", [False, True])
def test_own_copies_in_two_streams(ranks, wait):
    """A stream wait orders own copies; without one they are ordered like copies of peers."""

    @tw.plan
    def through_own_memory(
        p: tw.PlanBuilder,
        x: T.Tensor((N,), "float32"),
        given: W.Symmetric((N,), "float32"),
        out: T.Tensor((N,), "float32"),
    ):
        p.copy(given[p.rank], x)
        if wait:
            p.wait_stream(None, stream="out")
        p.copy(out, given[p.rank], stream="out")

    inputs = inputs_of(ranks)
    for rank, actual in enumerate(tw.simulate(through_own_memory, ranks, inputs, schedules=5)):
        assert np.array_equal(actual["out"], inputs[rank]["x"])
    shapes = {p.name: tuple(map(int, p.shape)) for p in through_own_memory.parameters}
    steps = through_own_memory.trace(0, ranks, shapes, {})
    assert any(isinstance(step, CopyValue) for step in steps) is not wait


@needs_lines
def test_all_inserted_synchronization_is_needed():
    """Each change of the inserted synchronization is detected, or explained."""
    mutants = tw.mutate(gather(2), 2, inputs_of(2), schedules=3)
    assert {m.op for m in mutants if m.verdict == "killed"} >= {
        "copy_value", "join", "signal", "wait_reached",
    }  # fmt: skip
    assert not [m for m in mutants if m.verdict == "survived"]


def test_waiting_copies_come_after_copies_that_peers_wait_for():
    """Otherwise a waiting copy could delay it, as a branch of a CUDA graph."""
    plan = gather(3)
    shapes = {p.name: tuple(map(int, p.shape)) for p in plan.parameters}
    steps = plan.trace(0, 3, shapes, {})
    told = [n for n, step in enumerate(steps) if isinstance(step, CopyValue)]
    for stream in ("fetch 0", "fetch 1"):
        first = next(n for n, s in enumerate(steps) if (s.number, s.stream) == (WAIT, stream))
        behind = steps[first - 1]
        assert isinstance(behind, WaitStream) and (behind.stream, behind.other) == (stream, None)
        assert max(told) < first


def test_explained():
    explanation = tw.explain(gather(3), 3)
    assert [(op.kind, op.tensor, op.flag, op.per_block) for op in explanation.ops] == [
        ("wait", "given", "started", 2),
        ("signal", "given", "arrived", 4),
        ("wait", "given", "arrived", 4),
    ]
    assert explanation.flags == {"started": 12, "launches": 12, "arrived": 24}
    assert list(explanation.reuse) == ["given"]


def refused(plan, ranks=2):
    with pytest.raises(tw.TileWeaveError) as error:
        tw.simulate(plan, ranks, inputs_of(ranks), schedules=1)
    return str(error.value)


def test_what_nobody_brings():
    assert "p.copy reads given[1, 8:24] on rank 0, which is written by no copy in this call" in (
        refused(gather(2, skip=1))
    )


def exchange_of(say):
    @tw.plan
    def exchange(
        p: tw.PlanBuilder,
        x: T.Tensor((N,), "float32"),
        given: W.Symmetric((N,), "float32"),
        out: T.Tensor((N,), "float32"),
    ):
        say(p, x, given, out, 1 - p.rank)

    return exchange


def in_part(p, x, given, out, peer):
    p.copy(given[p.rank, 0:8], x[0:8])
    p.copy(out, given[peer])


def twice(p, x, given, out, peer):
    p.copy(given[p.rank], x)
    p.copy(given[peer], x)
    p.copy(out, given[peer])


@pytest.mark.parametrize(
    ("say", "message"),
    [
        (in_part, "given[1, 0:24] on rank 0, which is written only partly, or twice, in this call"),
        (twice, "given[1, 0:24] on rank 0, which is written only partly, or twice, in this call"),
    ],
)
def test_refused(say, message):
    error = refused(exchange_of(say))
    assert message in error and __file__ in error
