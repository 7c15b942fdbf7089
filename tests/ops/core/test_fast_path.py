"""An equal call is one native call on its own tensors; any other call is checked."""

from __future__ import annotations

import threading
import types

import pytest
import torch

from tileweave import ops
from tileweave.ops.collectives import collective as exchange
from tileweave.ops.collectives.all_gather import AllGather
from tileweave.ops.core import call, strategy
from tileweave.ops.core import fast_path as repeated
from tileweave.ops.core import session_cache as remembered
from tileweave.ops.core.cache import prepared
from tileweave.ops.core.compiled import CompiledOp
from tileweave.ops.core.operator import OPERATORS, Choice
from tileweave.ops.core.tiles import LARGE
from tileweave.runtime.executor import calls as plan_streams
from tileweave.runtime.executor.recorded_call import RecordedCall
from tileweave.runtime.host import session
from tileweave.runtime.host.group import Group
from tileweave.runtime.kernel.kernel import Kernel

pytestmark = pytest.mark.filterwarnings("ignore:.*copied in each call")
ALONE = Group(0, 1, 0, torch.device("cpu"), None, None)
MEMORY = 0xABC0
"""Where a symmetric tensor lies that each call works in."""


class StandIn(CompiledOp):
    """Operator that records its calls: in full, or by addresses."""

    said: list
    watchdog: types.SimpleNamespace

    def __init__(self, problem, choice):
        self.kernel = Kernel(None, None, {"counter": torch.zeros(1)})

    def __call__(self, *tensors):
        self.said.append("whole")

    def declared(self, a, b, c, *epilogue):
        return [a, b.t(), *epilogue], c.view(-1)

    def ready(self, inputs, out):
        def enqueue(*addresses):
            self.said.append(addresses)
            return 0

        call = RecordedCall(self.watchdog, [], [self.kernel], enqueue)
        return call, [*places(*inputs), MEMORY, *places(out)]

    def free(self):
        self.kernel.free()

    @staticmethod
    def unfused(a, b, c, group, epilogue):
        StandIn.said.append("unfused")


def places(*tensors):
    return tuple(t.data_ptr() for t in tensors)


@pytest.fixture
def said(monkeypatch):
    """Record calls in a session on a machine with a driver."""
    StandIn.said = []
    StandIn.watchdog = types.SimpleNamespace(raise_if_deadlocked=lambda: None)
    monkeypatch.setattr(session, "_session", types.SimpleNamespace(group=ALONE))
    monkeypatch.setattr(plan_streams, "has_driver", lambda device: True)
    monkeypatch.setattr(plan_streams, "current_stream", lambda device: 7)
    monkeypatch.setattr(repeated, "library", lambda: "native")
    monkeypatch.setattr(strategy, "obstacle", lambda *_: None)
    monkeypatch.setattr(call, "choice_of", lambda *_: Choice("stores", LARGE))
    monkeypatch.setitem(OPERATORS, "matmul_reduce_scatter", StandIn)
    remembered.invalidate()
    yield StandIn.said
    remembered.invalidate()


def bf16(*shape):
    return torch.randn(shape).bfloat16()


def scattered(a, b, **given):
    return ops.matmul_reduce_scatter(a, b, **given)


def test_it_gets_the_tensors_of_its_call(said):
    scattered(bf16(16, 8), bf16(8, 24), bias=bf16(24))
    a, b, bias = bf16(16, 8), bf16(8, 24), bf16(24)
    c, d = (scattered(a, b, bias=bias) for _ in range(2))
    assert said == ["whole", *((*places(a, b, bias), MEMORY, *places(x)) for x in (c, d))]
    assert c.data_ptr() != d.data_ptr()
    assert (c.shape, c.dtype, c.device) == ((16, 24), a.dtype, a.device)


def test_out_is_where_the_result_goes(said):
    a, b, out = bf16(16, 8), bf16(8, 24), bf16(16, 24)
    for _ in range(2):
        assert scattered(a, b, out=out) is out
    assert said == ["whole", (*places(a, b), MEMORY, *places(out))]


def another_stream(monkeypatch, a, b):
    monkeypatch.setattr(plan_streams, "current_stream", lambda device: 8)
    scattered(a, b)


def another_thread(_, a, b):
    thread = threading.Thread(target=scattered, args=(a, b))
    thread.start()
    thread.join()


def a_graph(monkeypatch, a, b):
    monkeypatch.setattr(repeated, "capturing", lambda: True)
    scattered(a, b)


def another_session(monkeypatch, a, b):
    monkeypatch.setattr(session, "_session", types.SimpleNamespace(group=ALONE))
    scattered(a, b)


def tuned(_, a, b):
    remembered.invalidate()
    scattered(a, b)


def freed(_, a, b):
    prepared(ALONE).free()
    scattered(a, b)


def at_an_odd_place(_, a, b):
    memory = bf16(a.numel() + 1)
    scattered(memory[1:].view(a.shape), b)


@pytest.mark.parametrize(
    "other",
    [
        another_stream,
        another_thread,
        a_graph,
        another_session,
        tuned,
        freed,
        at_an_odd_place,
        lambda _, a, b: scattered(a[:8], b),
        lambda _, a, b: scattered(a, b.t().contiguous().t()),
        lambda _, a, b: scattered(a.half(), b.half()),
        lambda _, a, b: scattered(a, b, out=bf16(16, 24)),
        lambda _, a, b: scattered(a, b, bias=bf16(24)),
        lambda _, a, b: scattered(a, b, strategy="fused"),
    ],
)
def test_another_call_is_checked(said, monkeypatch, other):
    a, b = bf16(16, 8), bf16(8, 24)
    for _ in range(2):
        scattered(a, b)
    other(monkeypatch, a, b)
    assert [isinstance(way, tuple) for way in said] == [False, True, False]


def test_what_must_be_copied_is_copied_each_time(said):
    b, memory = bf16(8, 24), bf16(16 * 8 + 1)
    for _ in range(3):
        scattered(memory[1:].view(16, 8), b)
    assert said == ["whole"] * 3


def test_what_nccl_computes_is_not_repeated(said, monkeypatch):
    monkeypatch.setattr(call, "choice_of", lambda *_: None)
    for _ in range(2):
        scattered(bf16(16, 8), bf16(8, 24))
    assert said == ["unfused"] * 2


def test_without_the_native_part_nothing_is_repeated(said, monkeypatch):
    monkeypatch.setattr(repeated, "library", lambda: None)
    for _ in range(2):
        scattered(bf16(16, 8), bf16(8, 24))
    assert said == ["whole"] * 2


def test_a_repeated_call_counts_as_a_use(said):
    a, b = bf16(16, 8), bf16(8, 24)
    scattered(a, b)
    (operator,) = prepared(ALONE).operators.values()
    scattered(a[:8], b)
    (_, other) = prepared(ALONE).operators.values()
    assert operator.last_used < other.last_used
    scattered(a, b)
    assert operator.last_used > other.last_used and isinstance(said[-1], tuple)


def test_a_deadlock_is_told(said):
    a, b = bf16(16, 8), bf16(8, 24)
    for _ in range(2):
        scattered(a, b)

    def deadlocked():
        raise RuntimeError("rank 1 gave up")

    StandIn.watchdog.raise_if_deadlocked = deadlocked
    with pytest.raises(RuntimeError, match="rank 1 gave up"):
        scattered(a, b)


class StandInExchange(AllGather, op="stand-in"):
    """Collective that records its calls."""

    def __init__(self):
        self.kernel, self.said = Kernel(None, None), StandIn.said
        self.watchdog = StandIn.watchdog

    def declared(self, x, out):
        return [x.view(-1)], out.view(-1)

    enqueue = StandIn.__call__
    ready = StandIn.ready


del exchange.EXCHANGES["stand-in"]


def test_collectives_are_repeated(said, monkeypatch):
    made = StandInExchange()
    monkeypatch.setattr(exchange, "_move", lambda *_: made)
    x, y, out = bf16(4, 8), bf16(4, 8), bf16(4, 8)
    ops.all_gather(x)
    gathered = ops.all_gather(y)
    for _ in range(2):
        assert ops.all_gather(x, out=out) is out
    ops.all_gather(bf16(5, 8))
    assert gathered.shape == y.shape and gathered.dtype == y.dtype
    assert said == [
        "whole", (*places(y), MEMORY, *places(gathered)),
        "whole", (*places(x), MEMORY, *places(out)), "whole",
    ]  # fmt: skip
