"""Merging of the records of ranks: clocks, spans, flows, and events that had no room."""

import json
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from tileweave.passes.ir.events import decode_events, encode_events
from tileweave.runtime.host.tracer import TracedLaunch
from tileweave.runtime.trace.chrome import from_json, to_json
from tileweave.runtime.trace.clocks import combined, offset_of
from tileweave.runtime.trace.merge import EVENT, RankClock, RankRecord, TimedCall, Word, merge
from tileweave.runtime.trace.summary import summarize

TABLE = [
    {"kind": "begin", "kernel": "ring", "role": "", "loc": "ring.py:7"},
    {"kind": "signal", "kernel": "ring", "role": "", "op": "W.signal", "loc": "ring.py:8",
     "tensor": "F", "change": "add"},
    {"kind": "wait", "kernel": "ring", "role": "", "op": "W.wait_reached", "loc": "ring.py:9",
     "tensor": "F", "relation": "reached"},
    {"kind": "loop_begin", "kernel": "ring", "role": "", "op": "k", "loc": "ring.py:10"},
    {"kind": "loop_end", "kernel": "ring", "role": "", "op": "k", "loc": "ring.py:10"},
    {"kind": "transfer", "kernel": "ring", "role": "", "op": "T.copy", "loc": "ring.py:11",
     "tensor": "S", "writes": True},
    {"kind": "end", "kernel": "ring", "role": ""},
    {"kind": "begin", "kernel": "ring", "role": "producer"},
    {"kind": "end", "kernel": "ring", "role": "producer"},
]  # fmt: skip
BEGIN, SIGNAL, WAIT, LOOP, LOOP_END, TRANSFER, END, PRODUCER, PRODUCER_END = range(len(TABLE))
EPOCH = 1_700_000_000_000_000_000
"""The clock of a GPU counts nanoseconds since 1970."""


def events_of(rows, rank_offset=0):
    """Return events: (event, begin, end), then flag, seen, wanted, launch, block, sm by name."""
    events = np.zeros(len(rows), EVENT)
    for row, (event, begin, end, more) in zip(events, rows, strict=True):
        row["event"], row["begin"], row["end"] = (
            event, EPOCH + begin + rank_offset, EPOCH + end + rank_offset,
        )  # fmt: skip
        for name, value in more.items():
            row[name] = value
    return events


def ring(offset=0, error=50):
    """Return the records of two ranks that signal each other in one launch.

    Rank 0 signals at 1000 and waits from 1100 to 3500; rank 1 waits from 500 to 2200, and signals
    at 2300. The clock of rank 1 is ahead by ``offset``.
    """
    launch = TracedLaunch(encode_events(TABLE), "stream 0", EPOCH // 2)
    words = {0x10: Word(0, 16, "[0, 0]"), 0x20: Word(1, 16, "[1, 0]")}
    zero = events_of(
        [
            (BEGIN, 0, 0, {"sm": 5}),
            (LOOP, 100, 100, {}),
            (LOOP_END, 900, 900, {}),
            (TRANSFER, 910, 990, {"wanted": 1}),
            (SIGNAL, 1000, 1050, {"flag": 0x20, "wanted": 1}),
            (WAIT, 1100, 3500, {"flag": 0x10, "seen": 0, "wanted": 1}),
            (END, 4000, 4000, {}),
        ]
    )
    one = events_of(
        [
            (BEGIN, 100, 100, {"sm": 7}),
            (WAIT, 500, 2200, {"flag": 0x20, "seen": 0, "wanted": 1}),
            (SIGNAL, 2300, 2350, {"flag": 0x10, "wanted": 1}),
            (END, 2600, 2600, {}),
        ],
        offset,
    )
    host = EPOCH // 2 - (EPOCH - 2000)
    records = []
    for rank, events in enumerate((zero, one)):
        clock = RankClock(rank * offset, rank * error, host - rank * offset, 4000)
        records.append(RankRecord(rank, events, 0, [launch], (), words, clock))
    return records


def check_nesting(trace):
    """Waits, signals, transfers and phases are within their span; all end after they begin."""
    for span in trace.spans:
        for wait in span.waits:
            assert span.start <= wait.start < wait.end <= trace.until(span)
    for access in [*trace.signals, *trace.transfers]:
        assert access.span.start <= access.time
        assert access.time + access.duration <= trace.until(access.span) + 1e-9


@pytest.mark.parametrize("offset", [0, 1_000_000, -7_000_000_000])
def test_two_ranks(offset):
    trace = merge(ring(offset), "ring")
    assert [(s.rank, s.label, s.sm) for s in trace.spans] == [(0, "block 0", 5), (1, "block 0", 7)]
    assert [s.start for s in trace.spans] == [2.0, 2.1]
    assert [s.end for s in trace.spans] == pytest.approx([6.001, 4.601])
    check_nesting(trace)
    flows = [(f.signal.span.rank, f.signal.time, f.span.rank, f.wait.end) for f in trace.flows]
    assert flows == [(0, 3.0, 1, 4.2), (1, 4.3, 0, 5.5)]
    assert [w.flag for s in trace.spans for w in s.waits] == ["F[0, 0]", "F[1, 0]"]
    (loop,) = [p for p in trace.phases if p.stream != "host"]
    assert (loop.name, loop.start, loop.end, loop.loc) == ("loop k", 2.1, 2.901, "ring.py:10")
    assert [(p.name, p.start) for p in trace.phases if p.stream == "host"] == [
        ("enqueue ring", 0.0), ("enqueue ring", 0.0),
    ]  # fmt: skip
    assert [(t.peer, t.writes, t.time) for t in trace.transfers] == [(1, True, 2.91)]
    assert [(c.offset, c.error, c.host_error) for c in trace.clocks] == [
        (0, 0, 4), (offset / 1000, 0.05, 4),
    ]  # fmt: skip


def test_json_is_read_again():
    trace = merge(ring(5000), "ring")
    trace.lost = [0, 3]
    text = to_json(trace)
    again = from_json(text)
    assert to_json(again) == text
    assert again.clocks == trace.clocks and again.lost == [0, 3]
    assert "3 events lost" in again.title and "events lost" not in merge(ring(), "ring").title
    assert [s.sm for s in again.spans] == [5, 7] and len(again.flows) == 2
    names = [e["args"]["name"] for e in json.loads(text)["traceEvents"] if e["ph"] == "M"
             and e["name"] == "thread_name"]  # fmt: skip
    assert "block 0 of stream 0 (SM 5)" in names and "host" in names


def test_the_critical_path_crosses_the_ranks():
    summary = summarize(merge(ring(), "ring"))
    assert summary.last.rank == 0
    assert [(h.span.rank, h.signal.span.rank) for h in summary.path] == [(0, 1), (1, 0)]
    waiting = {s.rank: s.waiting for s in summary.shares}
    assert waiting == {0: pytest.approx(2.4), 1: pytest.approx(1.7)}


def test_events_without_room_are_counted_and_spans_stay_open():
    records = ring()
    events = records[0].events[:-1]
    trace = merge([replace(records[0], events=events, lost=1), records[1]], "ring")
    assert trace.lost == [1, 0]
    assert [s.end is None for s in sorted(trace.spans, key=lambda s: s.rank)] == [True, False]
    assert from_json(to_json(trace)).lost == [1, 0]


def test_producers_have_spans_of_their_own():
    (record, _) = ring()
    rows = [(PRODUCER, 20, 20, {}), (PRODUCER_END, 800, 800, {})]
    events = np.concatenate([record.events, events_of(rows)])
    record = RankRecord(0, events, 0, record.launches, (), record.words, record.clock)
    trace = merge([record], "ring")
    labels = [(s.kernel, s.label, s.stream) for s in trace.spans]
    assert labels == [
        ("ring", "block 0", "stream 0"),
        ("ring (producer)", "block 0, producer", "stream 0, producer"),
    ]
    assert len({e["tid"] for e in json.loads(to_json(trace))["traceEvents"]
                if e.get("cat") == "span"}) == 2  # fmt: skip


def counted(adds, waits):
    """Return the time of the signal that ended each wait for one counter on one GPU.

    Args:
        adds: times at which 1 is added.
        waits: (begin, end, seen, wanted).
    """
    rows = [(BEGIN, 0, 0, {})]
    rows += [(SIGNAL, t, t + 1, {"flag": 0x10, "wanted": 1}) for t in adds]
    rows += [
        (WAIT, begin, end, {"flag": 0x10, "seen": seen, "wanted": wanted, "block": 1})
        for begin, end, seen, wanted in waits
    ]
    launch = TracedLaunch(encode_events(TABLE), "stream 0", EPOCH)
    words = {0x10: Word(0, 16, "[0, 0]")}
    clock = RankClock(host_offset=0)
    trace = merge([RankRecord(0, events_of(rows), 0, [launch], (), words, clock)], "count")
    return [round(f.signal.time * 1000) for f in trace.flows]


def test_the_signal_that_completes_a_count_ends_the_wait():
    # The third arrival satisfies the wait; the fourth also comes before the wait ends.
    assert counted([100, 200, 300, 310], [(50, 320, 0, 3)]) == [300]
    # One of the arrivals was seen when the wait began.
    assert counted([100, 200, 300, 310], [(150, 320, 1, 3)]) == [300]
    # The flag had its value before: the last arrival before the wait.
    assert counted([100, 200, 300], [(250, 260, 2, 2)]) == [200]
    # No arrival was recorded before the wait ended.
    assert counted([100], [(10, 50, 0, 1)]) == []


def test_steps_of_a_plan():
    (record, _) = ring()
    copy = TimedCall("copy", "p.copy", "plan.py:3", "stream 1", "S", 0x20, None, 4096,
                     EPOCH + 1000, EPOCH + 5000, EPOCH // 2 + 10)  # fmt: skip
    write = TimedCall("write", "p.write_value", "plan.py:4", "stream 1", "F", 0x10, 1, 0,
                      EPOCH + 5000, EPOCH + 5200, EPOCH // 2 + 20)  # fmt: skip
    wait = TimedCall("wait", "p.wait_value", "plan.py:5", "stream 2", "F", 0x10, 1, 0,
                     EPOCH + 500, EPOCH + 5300, EPOCH // 2 + 30)  # fmt: skip
    record = RankRecord(
        0, record.events[:0], 0, [], [copy, write, wait], record.words, record.clock
    )  # fmt: skip
    other = RankRecord(1, record.events, 0, [])
    trace = merge([record, other], "plan")
    assert [(s.kernel, s.stream, s.block) for s in trace.spans] == [
        ("p.wait_value", "stream 2", None), ("p.copy", "stream 1", None),
        ("p.write_value", "stream 1", None),
    ]  # fmt: skip
    (transfer,) = trace.transfers
    assert (transfer.peer, transfer.text, round(transfer.duration, 3)) == (1, "4096 bytes", 4.0)
    (flow,) = trace.flows
    assert (flow.signal.op, flow.wait.op) == ("p.write_value", "p.wait_value")
    assert to_json(from_json(to_json(trace))) == to_json(trace)


def test_signals_within_a_step_of_the_clock_have_different_times():
    (record, _) = ring()
    rows = [(BEGIN, 0, 0, {})] + [(SIGNAL, 32, 32, {"flag": 0x10, "wanted": 1})] * 3
    record = RankRecord(0, events_of(rows), 0, record.launches, (), record.words, record.clock)
    trace = merge([record], "ring")
    assert all(a.time < b.time for a, b in pairwise(trace.signals))
    check_nesting(trace)


def test_the_offset_of_the_fastest_exchange():
    # The clock of the peer is 1000 ahead. The second exchange needs 20 each way, the first 90 + 10.
    zero = [(0, 105), (200, 245)]
    peer = [(1090, 1095), (1220, 1225)]
    assert offset_of(zero, peer) == (1000, 21)
    # Whatever the asymmetry, the error covers it.
    offset, error = offset_of(zero[:1], peer[:1])
    assert abs(offset - 1000) <= error


def test_drift_adds_to_the_error():
    clock = combined(RankClock(100, 5, 10, 3), RankClock(140, 7, 10, 2))
    assert clock == RankClock(120, 27, 10, 3)


def test_a_table_survives_host_code():
    text = encode_events(TABLE)
    assert decode_events(text) == TABLE
    assert text.replace("-", "").replace("_", "").replace("=", "").isalnum()


def test_no_event_at_all():
    trace = merge([RankRecord(0, np.zeros(0, EVENT), 0, [])], "empty")
    assert trace.spans == [] and trace.end == 0
    assert from_json(to_json(trace)).title == "empty: 1 ranks, no fault"
