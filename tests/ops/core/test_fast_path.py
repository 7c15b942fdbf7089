"""A call with the signature of an earlier one is one native call; any other call is checked."""

from __future__ import annotations

import sys
import threading
import types
from pathlib import Path

import pytest
import torch

import tileweave as tw
from tests.groups import one_rank, open_sessions
from tileweave import ops
from tileweave.ops.collectives import transport
from tileweave.ops.collectives.collective import Collective
from tileweave.ops.core import call, noted
from tileweave.ops.core.compiled import op_cache_of
from tileweave.ops.core.registry import OPERATORS, operators_of
from tileweave.ops.core.tiles import LARGE, Choice
from tileweave.ops.gemm import gemm_operator
from tileweave.ops.gemm.matmul_reduce_scatter import MatmulReduceScatter
from tileweave.runtime.executor import recorded_calls
from tileweave.runtime.executor.recorded_calls import RecordedCall
from tileweave.runtime.host.context import Record
from tileweave.runtime.host.watchdog import Watchdog
from tileweave.runtime.kernel.kernel import Kernel
from tileweave.runtime.kernel.shared_kernels import SharedKernels

pytestmark = pytest.mark.filterwarnings("ignore:.*copied in each call")
ALONE = one_rank()
ROOT = Path(__file__).resolve().parents[3]
MEMORY = 0xABC0
"""Address of the symmetric tensor that each call works in."""


class StandIn(MatmulReduceScatter):
    """Operator that records its calls: in full, or by addresses."""

    said: list
    session: types.SimpleNamespace

    def __init__(self, problem, choice, session):
        self.kernel = Kernel(None, None, {"counter": torch.zeros(1)})

    def enqueue(self, inputs, out):
        self.said.append("whole")

    def declared(self, a, b, *tensors):
        *epilogue, c = tensors
        return [a, b.t(), *epilogue], c.view(-1)

    def recorded_call(self, inputs, out):
        def enqueue(*addresses):
            self.said.append(addresses)
            return 0

        call = RecordedCall(self.session, None, [], [self.kernel], enqueue)
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
    StandIn.session = fake_session()
    open_sessions(monkeypatch, StandIn.session)
    monkeypatch.setattr(noted, "_notes", {})
    monkeypatch.setattr(call, "has_driver", lambda device: True)
    monkeypatch.setattr(call, "current_stream", lambda device: (7, False))
    monkeypatch.setattr(call, "library", lambda: "native")
    monkeypatch.setattr(gemm_operator, "obstacle", lambda *_: None)
    monkeypatch.setattr(gemm_operator, "choice_of", lambda *_: Choice("stores", LARGE))
    monkeypatch.setitem(OPERATORS, "matmul_reduce_scatter", StandIn)
    recorded_calls.invalidate()
    yield StandIn.said
    recorded_calls.invalidate()


def fake_session():
    watchdog = types.SimpleNamespace(raise_if_deadlocked=lambda: None)
    kernels = SharedKernels()
    return types.SimpleNamespace(group=ALONE, watchdog=watchdog, kernels=kernels, name="")


def bf16(*shape):
    return torch.randn(shape).bfloat16()


def scattered(a, b, **given):
    return ops.matmul_reduce_scatter(a, b, **given)


def test_a_repeated_call_receives_its_own_tensors(said):
    scattered(bf16(16, 8), bf16(8, 24), bias=bf16(24))
    a, b, bias = bf16(16, 8), bf16(8, 24), bf16(24)
    c, d = (scattered(a, b, bias=bias) for _ in range(2))
    assert said == ["whole", *((*places(a, b, bias), MEMORY, *places(x)) for x in (c, d))]
    assert c.data_ptr() != d.data_ptr()
    assert (c.shape, c.dtype, c.device) == ((16, 24), a.dtype, a.device)


def test_a_repeated_call_writes_to_out(said):
    a, b, out = bf16(16, 8), bf16(8, 24), bf16(16, 24)
    for _ in range(2):
        assert scattered(a, b, out=out) is out
    assert said == ["whole", (*places(a, b), MEMORY, *places(out))]


def test_arguments_are_distinguished_by_place(said):
    """The first call has one tensor for two arguments."""
    x, a, b = bf16(16, 16), bf16(16, 16), bf16(16, 16)
    scattered(x, x)
    c = scattered(a, b)
    assert said == ["whole", (*places(a, b), MEMORY, *places(c))]


def test_options_without_a_hash_are_refused(said):
    a, b = bf16(16, 8), bf16(8, 24)
    for _ in range(2):
        scattered(a, b)
    with pytest.raises(tw.TileWeaveError, match=r"strategy=\['fused'\]; expected"):
        scattered(a, b, strategy=["fused"])


@pytest.mark.parametrize("around", [torch.no_grad, torch.inference_mode])
def test_results_belong_to_the_mode_of_the_call(said, around):
    a, b = bf16(16, 8), bf16(8, 24)
    with around():
        scattered(a, b)
    assert not scattered(a, b).is_inference()
    with torch.inference_mode():
        assert scattered(a, b).is_inference()
    assert said[0] == "whole" and len(said) == 3 and isinstance(said[2], tuple)


def another_stream(monkeypatch, a, b):
    monkeypatch.setattr(call, "current_stream", lambda device: (8, False))
    scattered(a, b)


def another_thread(_, a, b):
    thread = threading.Thread(target=scattered, args=(a, b))
    thread.start()
    thread.join()


def a_graph(monkeypatch, a, b):
    monkeypatch.setattr(call, "current_stream", lambda device: (7, True))
    monkeypatch.setattr(call, "capturing", lambda: True)
    scattered(a, b)


def another_session(monkeypatch, a, b):
    StandIn.session = fake_session()
    open_sessions(monkeypatch, StandIn.session)
    recorded_calls.invalidate()
    scattered(a, b)


def tuned(_, a, b):
    recorded_calls.invalidate()
    scattered(a, b)


def freed(_, a, b):
    op_cache_of(ALONE).free()
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


def test_an_out_that_overlaps_an_input_is_refused(said):
    """Its signature is that of an earlier call, whose ``out`` had memory of its own."""
    memory = bf16(2 * 16 * 24)
    a, b, out = memory[: 16 * 8].view(16, 8), bf16(8, 24), memory[16 * 24 :].view(16, 24)
    for _ in range(2):
        scattered(a, b, out=out)
    for start in (0, 8, 16 * 8 - 8):
        with pytest.raises(tw.TileWeaveError, match="out shares memory with a; expected memory"):
            scattered(a, b, out=memory[start : start + 16 * 24].view(16, 24))
    scattered(a, b, out=memory[16 * 8 : 16 * 8 + 16 * 24].view(16, 24))
    assert [isinstance(way, tuple) for way in said] == [False, True, True]


@pytest.mark.parametrize("bad", [None, 3, "a", [1.0], torch.ones(16, 8).to_sparse()])
def test_arguments_that_are_no_dense_tensors_are_refused(said, bad):
    a, b = bf16(16, 8), bf16(8, 24)
    for _ in range(2):
        scattered(a, b)
    for arguments in ((bad, b), (a, bad)):
        with pytest.raises(tw.TileWeaveError, match=r"expected a dense torch\.Tensor"):
            scattered(*arguments)
    with torch.autocast("cpu"), pytest.raises(tw.TileWeaveError, match="expected a dense torch"):
        scattered(bad, b)
    assert [isinstance(way, tuple) for way in said] == [False, True]


def test_what_must_be_copied_is_copied_each_time(said):
    b, memory = bf16(8, 24), bf16(16 * 8 + 1)
    for _ in range(3):
        scattered(memory[1:].view(16, 8), b)
    assert said == ["whole"] * 3


def test_calls_of_nccl_are_not_repeated(said, monkeypatch):
    monkeypatch.setattr(gemm_operator, "choice_of", lambda *_: None)
    for _ in range(2):
        scattered(bf16(16, 8), bf16(8, 24))
    assert said == ["unfused"] * 2


def test_nothing_is_repeated_without_the_native_part(said, monkeypatch):
    monkeypatch.setattr(call, "library", lambda: None)
    for _ in range(2):
        scattered(bf16(16, 8), bf16(8, 24))
    assert said == ["whole"] * 2


def test_a_repeated_call_counts_as_a_use(said):
    a, b = bf16(16, 8), bf16(8, 24)
    scattered(a, b)
    (operator,) = op_cache_of(ALONE).operators.values()
    scattered(a[:8], b)
    (_, other) = op_cache_of(ALONE).operators.values()
    assert operator.last_used < other.last_used
    scattered(a, b)
    assert operator.last_used > other.last_used and isinstance(said[-1], tuple)


def test_a_repeated_call_raises_after_a_deadlock(said):
    a, b = bf16(16, 8), bf16(8, 24)
    for _ in range(2):
        scattered(a, b)

    def deadlocked():
        raise RuntimeError("rank 1 gave up")

    StandIn.session.watchdog.raise_if_deadlocked = deadlocked
    with pytest.raises(RuntimeError, match="rank 1 gave up"):
        scattered(a, b)


class StandInExchange(Collective):
    """Collective that records its calls."""

    def __init__(self, problem, transport, session):
        self.kernel, self.said = Kernel(None, None), StandIn.said
        self.session = StandIn.session

    def declared(self, x, out):
        return [x.view(-1)], out.view(-1)

    enqueue = StandIn.enqueue
    recorded_call = StandIn.recorded_call
    free = StandIn.free


@pytest.fixture
def exchanges(said, monkeypatch):
    """Record calls of all collectives."""
    monkeypatch.setattr(transport, "obstacle", lambda *_: None)
    for name, collective in operators_of(Collective).items():
        stand_in = type("StandIn", (StandInExchange, collective), {})
        monkeypatch.setitem(OPERATORS, name, stand_in)
    return said


def test_collectives_are_repeated(exchanges):
    x, y, out = bf16(4, 8), bf16(4, 8), bf16(4, 8)
    ops.all_gather(x)
    gathered = ops.all_gather(y)
    for _ in range(2):
        assert ops.all_gather(x, out=out) is out
    ops.all_gather(bf16(5, 8))
    assert gathered.shape == y.shape and gathered.dtype == y.dtype
    assert exchanges == [
        "whole", (*places(y), MEMORY, *places(gathered)),
        "whole", (*places(x), MEMORY, *places(out)), "whole",
    ]  # fmt: skip


def test_a_collective_decides_once(exchanges, monkeypatch):
    """Also where Python enqueues its calls, which are not repeated."""
    decided, decide = [], OPERATORS["all_gather"].decide

    def count(given):
        decided.append(given.operator.op)
        return decide(given)

    monkeypatch.setattr(OPERATORS["all_gather"], "decide", count)
    monkeypatch.setattr(call, "library", lambda: None)
    x = bf16(4, 8)
    for by in ("ldst", "ldst", "copy_engine"):
        ops.all_gather(x, transport=by)
    assert exchanges == ["whole"] * 3 and decided == ["all_gather"] * 2


def test_a_collective_in_place_is_repeated(exchanges):
    """``out`` may be ``x``, unlike for ``all_to_all``."""
    x = bf16(4, 8)
    for _ in range(2):
        assert ops.all_reduce(x, out=x) is x
    assert exchanges == ["whole", (*places(x), MEMORY, *places(x))]
    shifted = bf16(40)
    x = shifted[:32].view(4, 8)
    ops.all_reduce(x, out=shifted[8:].view(4, 8))  # copies x
    assert exchanges[2:] == ["whole"]
    y = bf16(2 * 4 * 8)
    first, second = y[:32].view(4, 8), y[32:].view(4, 8)
    for _ in range(2):
        ops.all_to_all(first, 0, 0, out=second)
    assert len(exchanges) == 5 and isinstance(exchanges[-1], tuple)
    with pytest.raises(tw.TileWeaveError, match="out shares memory with x"):
        ops.all_to_all(first, 0, 0, out=first)


@pytest.mark.parametrize("given_out", [False, True])
def test_a_repeated_call_passes_eight_files(said, given_out):
    """Files with a function that runs, in the order of a call. In a real call, C++ then enqueues
    its operations: ``runtime/src/enqueue.cc`` is the eighth file."""
    record = types.SimpleNamespace(state=Record.EMPTY)
    StandIn.session.watchdog = object.__new__(Watchdog)
    StandIn.session.watchdog._record = record
    a, b, out = bf16(16, 8), bf16(8, 24), bf16(16, 24) if given_out else None
    scattered(a, b, out=out)
    files = []

    def called(frame, event, _):
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(ROOT) and path != Path(__file__):
            files.append(path.relative_to(ROOT).as_posix())

    sys.setprofile(called)
    try:
        scattered(a, b, out=out)
    finally:
        sys.setprofile(None)
    assert isinstance(said[-1], tuple)
    assert list(dict.fromkeys(f for f in files if not f.startswith(".venv"))) == [
        "builtins/errors.py", "ops/gemm/matmul_reduce_scatter.py", "ops/core/library.py",
        "ops/core/call.py", "runtime/executor/recorded_calls.py", "runtime/host/watchdog.py",
        "runtime/kernel/launch_order.py",
    ]  # fmt: skip
