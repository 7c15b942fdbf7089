"""``tw.trace`` on the host: steps of plans, the buffer, and the file. The GPU is a fake."""

import ctypes
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import tileweave as tw
from tests.runtime.plans.fakes import FakeEvent, alone, shared
from tests.runtime.trace.test_merge import BEGIN, END, EPOCH, SIGNAL, TABLE, WAIT, events_of
from tileweave.passes.ir.events import encode_events
from tileweave.runtime.executor import calls as plan_calls
from tileweave.runtime.executor.recorded_calls import recorded_calls
from tileweave.runtime.host import tracer
from tileweave.runtime.host.context import Context, DeviceContext, TraceBuffer
from tileweave.runtime.kernel.shared_kernels import SharedKernels
from tileweave.runtime.trace import recording
from tileweave.runtime.trace.chrome import read
from tileweave.runtime.trace.clocks import Reading
from tileweave.runtime.trace.merge import EVENT, RankClock


class TimedEvent(FakeEvent):
    """Event that has the time of its record: 1 ms after the previous one."""

    clock = 0

    def __init__(self, enable_timing: bool = False) -> None:
        self.enable_timing = enable_timing

    def record(self, stream) -> None:
        super().record(stream)
        TimedEvent.clock += 1
        self.time = TimedEvent.clock

    def elapsed_time(self, end) -> float:
        assert self.enable_timing and end.enable_timing
        return end.time - self.time


def test_steps_of_a_plan(every_rank, monkeypatch):
    """Only the calls in a trace are timed; all enqueue the same operations."""

    def calls(here, A, inbox, flags, word):
        monkeypatch.setattr(torch.cuda, "Event", TimedEvent)
        monkeypatch.setattr(plan_calls, "kernel_to_launch", lambda kernel, session: kernel)
        plan, active = plan_calls.Calls(shared), tracer.Tracer(here.session)
        logs = []
        for traced in (False, True, True, False):
            tracer.activate(active if traced else None)
            recording.invalidate()
            plan(A, inbox, flags, word)
            logs.append([entry for entry in here.log if entry[1] == "copy" or "write" in entry])
            here.log.clear()
        base = TimedEvent(True)
        base.time = 0
        reading = Reading(RankClock(), base, EPOCH)
        timed = [recording._timed(step, reading) for step in active.steps]
        words = recording.words_of(here.session, {step.address for step in timed})
        return logs, timed, {a: w.index for a, w in words.items()}

    logs, timed, words = alone(monkeypatch, every_rank, calls)
    assert logs[0] and all(log == logs[0] for log in logs)
    found = [(s.kind, s.op, s.tensor, words[s.address], s.value, s.nbytes) for s in timed]
    once = [
        ("copy", "p.copy", "inbox", "[0, 0, 0, 0]", None, 4 * 8 * 4),
        ("write", "p.copy_value", "flags", "[0, 0]", None, 0),
        ("write", "p.write_value", "flags", "[0, 1]", -1, 0),
    ]
    assert found == once * 2
    assert len({s.stream for s in timed}) == 3
    assert all(s.end_ns - s.begin_ns == 1_000_000 for s in timed)
    assert all(a.end_ns < b.begin_ns for a, b in pairwise(timed))


def test_the_context_gets_the_address_of_the_buffer(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    context = Context(
        torch.device("cpu"), rank=1, world_size=2, barrier=3, heap_stride=4, timeout_s=5
    )
    fields = DeviceContext.from_address(context.address)
    before = bytes(fields)
    context.set_trace(0x1234)
    assert fields.trace == 0x1234 and fields.record and fields.heap_stride == 4
    context.set_trace(0)
    assert bytes(fields) == before


@pytest.fixture
def session(monkeypatch):
    """A session of one rank, whose kernels are functions that write to the trace's buffer."""
    heap = SimpleNamespace(
        place_of=lambda address: (0, address) if address else None,
        index_of=lambda address: [0, address // 4],
    )
    group = SimpleNamespace(
        rank=0, world_size=1, device=torch.device("cpu"), process_group=None,
        synchronize=lambda: None, meet=lambda topic: None,
        exchange=lambda topic, value: [value],
    )  # fmt: skip
    context = SimpleNamespace(set_trace=lambda address: setattr(context, "trace", address))
    context.trace = 0
    made = SimpleNamespace(group=group, heap=heap, context=context, kernels=SharedKernels())
    base = TimedEvent(True)
    base.time = 0
    clocks = SimpleNamespace(
        read=lambda: Reading(RankClock(host_offset=-EPOCH), base, EPOCH), free=lambda: None
    )
    monkeypatch.setattr(recording, "init", lambda group: made)
    monkeypatch.setattr(recording, "Clocks", lambda session: clocks)
    monkeypatch.setattr(recording, "capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=0))
    return made


def launch(session, rows, later=0):
    """Append events as a kernel does, ``later`` by some nanoseconds."""
    number = tracer.active().begin_launch(encode_events(TABLE))
    head = TraceBuffer.from_address(session.context.trace)
    size = head.capacity * EVENT.itemsize
    at = session.context.trace + ctypes.sizeof(TraceBuffer)
    slots = np.frombuffer((ctypes.c_char * size).from_address(at), EVENT)
    for event in events_of(rows):
        event["launch"] = number
        event["begin"] += later
        event["end"] += later
        if head.count < head.capacity:
            slots[head.count] = event
        head.count += 1


ROWS = [
    (BEGIN, 100, 100, {}),
    (SIGNAL, 200, 210, {"flag": 8, "wanted": 1}),
    (WAIT, 150, 300, {"flag": 8, "seen": 0, "wanted": 1}),
    (END, 400, 400, {}),
]


def test_a_trace_is_written(session, tmp_path):
    before = recorded_calls()
    with tw.trace(tmp_path / "run.json"):
        assert recorded_calls() is not before and session.context.trace
        inside = recorded_calls()
        for number in range(2):
            launch(session, ROWS, 1000 * number)
    assert tracer.active() is None and not session.context.trace
    assert recorded_calls() is not inside
    trace = read(tmp_path / "run.json")
    assert (trace.name, trace.unit, trace.world_size, trace.lost) == ("run", "us", 1, [0])
    assert [(s.launch, s.label) for s in trace.spans] == [(0, "block 0"), (1, "block 0")]
    assert {f.signal.flag for f in trace.flows} == {"F[0, 2]"} and len(trace.flows) == 2
    assert sum(p.stream == "host" for p in trace.phases) == 2


def test_a_small_buffer_loses_events(session, tmp_path):
    with tw.trace(tmp_path / "run.json", events=5):
        for number in range(2):
            launch(session, ROWS, 1000 * number)
    trace = read(tmp_path / "run.json")
    assert trace.lost == [3] and "3 events lost" in trace.title
    assert [s.end is None for s in trace.spans] == [False, True]


def test_an_error_in_the_body_writes_nothing(session, tmp_path):
    with pytest.raises(ZeroDivisionError), tw.trace(tmp_path / "run.json"):
        raise ZeroDivisionError
    assert tracer.active() is None and not session.context.trace
    assert not (tmp_path / "run.json").exists()


@pytest.mark.parametrize("rank", [0, 1])
def test_all_ranks_raise_the_error_of_rank_0(session, tmp_path, rank, monkeypatch):
    monkeypatch.setattr(recording, "_gathered", lambda session, record: [record][rank:])
    failure, path = "trace: x.json: disk full", tmp_path / "run.json"

    def exchange(topic, value):
        """Return the values of two ranks: this one and another one, which is rank 0 or writes
        nothing."""
        return [value, ""] if rank == 0 else [failure, value]

    session.group.exchange = exchange
    expected = "run.json: Is a directory" if rank == 0 else failure
    with pytest.raises(tw.TileWeaveError, match=expected), tw.trace(path):
        path.mkdir()


def test_all_ranks_learn_of_any_error_of_rank_0(session, tmp_path, monkeypatch):
    def broken(records, name):
        raise IndexError("list index out of range")

    told = []
    session.group.exchange = lambda topic, value: told.append(value) or [value]
    monkeypatch.setattr(recording, "merge", broken)
    expected = "trace: run: rank 0 failed: IndexError: list index out of range"
    with pytest.raises(tw.TileWeaveError, match=expected), tw.trace(tmp_path / "run.json"):
        pass
    assert told == [expected]


def test_a_capture_is_refused(session, tmp_path, monkeypatch):
    monkeypatch.setattr(recording, "capturing", lambda: True)
    with pytest.raises(tw.TileWeaveError, match="while a CUDA graph is captured"):
        with tw.trace(tmp_path / "run.json"):
            pass
