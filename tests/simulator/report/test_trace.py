"""Traces of the simulator: as JSON in the trace-event format, and read back."""

import json
import re
from collections import defaultdict

import numpy as np
import pytest
import tilelang.language as T

import tileweave as tw
from tests.factory import factory
from tests.releases import RECORDS_LINES, needs_lines
from tests.simulator.report.test_timeline import N, exchange, inputs, recorded
from tileweave import language as W
from tileweave.runtime.trace import trace as schema
from tileweave.runtime.trace.chrome import from_json, read, to_json
from tileweave.runtime.trace.render import writer

REQUIRED = {
    "X": {"name", "cat", "pid", "tid", "ts", "dur", "args"},
    "M": {"name", "pid", "tid", "args"},
    "s": {"name", "cat", "pid", "tid", "ts", "id"},
    "f": {"name", "cat", "pid", "tid", "ts", "id", "bp"},
    "i": {"name", "cat", "pid", "tid", "ts", "s"},
}
"""Fields of an event by phase, of the trace-event format."""
ARGS = {
    "span": {"kernel", "launch", "stream", "block", "label", "loc", "ended", "failed_at", "sm"},
    "wait": {"op", "flag", "tensor", "seen", "wanted", "loc", "text", "ended"},
    "signal": {"op", "flag", "tensor", "before", "after", "loc", "text"},
    "transfer": {"op", "tensor", "peer", "writes", "loc", "text"},
}


@factory
def meets(out: T.Tensor((2, N), "int32")):
    """Two blocks of each rank meet all others."""
    with T.Kernel(2, threads=N) as block:
        for i in T.Parallel(N):
            out[block, i] = i
        W.barrier_blocks()


@factory
def inferred(mail: W.Symmetric((N,), "int32"), out: T.Tensor((N,), "int32")):
    """Each rank reads what its left neighbor wrote; the compiler adds signals and waits."""
    with T.Kernel(1, threads=N) as _:
        for i in T.Parallel(N):
            mail[(W.rank() + 1) % W.world_size(), i] = i
        for i in T.Parallel(N):
            out[i] = mail[W.rank(), i]


@factory
def two_waits(flags: W.Symmetric((2,), "int32"), epoch: T.int32):
    """Two parts of a block wait for different flags."""
    with T.Kernel(1, threads=64) as _:
        peer, tx = 1 - W.rank(), T.get_thread_binding()
        if tx < 32:
            if tx == 0:
                W.wait_reached(flags[W.rank(), 0], epoch + 1)
                W.st(flags[peer, 1], epoch + 1, scope="sys", sem="release")
        else:
            if tx == 32:
                W.st(flags[peer, 0], epoch + 1, scope="sys", sem="release")
                W.wait_reached(flags[W.rank(), 1], epoch + 1)


@tw.plan
def streams(p: tw.PlanBuilder, A: T.Tensor((N,), "int32"), inbox: W.Symmetric((N,), "int32"),
            flag: W.Symmetric((1,), "uint32"), epoch: T.int32):  # fmt: skip
    p.copy(inbox[1 - p.rank], A, stream="copies")
    p.write_value(flag[1 - p.rank, 0], epoch + 1, stream="copies")
    p.wait_value(flag[p.rank, 0], epoch + 1)
    p.wait_stream("copies")


def of_streams():
    one = {"A": np.zeros(N, np.int32), "flag": np.zeros(1, np.uint32), "epoch": lambda e: e}
    return recorded(streams, 2, 2, given=[dict(one) for _ in range(2)])[0]


def of_two_waits():
    one = {"flags": np.zeros(2, np.int32), "epoch": lambda e: e}
    return recorded(two_waits(), 2, 2, given=[dict(one) for _ in range(2)])[0]


TRACES = {
    "exchange": lambda: recorded(exchange())[0],
    "deadlock": lambda: recorded(exchange(signals=False))[0],
    "race": lambda: recorded(exchange(signals=False, waits=False))[0],
    "barrier": lambda: recorded(meets(), 2, given=[{}, {}])[0],
    "inferred": lambda: recorded(inferred(), 2, given=[{}, {}])[0],
    "two waits": of_two_waits,
    "streams": of_streams,
}


@pytest.fixture(scope="module", params=TRACES)
def trace(request):
    return TRACES[request.param]()


def events_of(trace):
    return json.loads(to_json(trace))["traceEvents"]


def test_every_event_has_its_fields(trace):
    events = events_of(trace)
    for event in events:
        assert event.keys() >= REQUIRED[event["ph"]], event
        assert isinstance(event["pid"], int) and isinstance(event["tid"], int)
        assert event["ph"] == "M" or (event["ts"] >= 0 and event.get("dur", 0) >= 0)
        if event["ph"] == "X":
            assert event["args"].keys() == ARGS[event["cat"]] and event["dur"] > 0
    timed = [e["ts"] for e in events if e["ph"] != "M"]
    assert timed == sorted(timed)
    assert {e["pid"] for e in events} == set(range(trace.world_size))
    named = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    assert {(e["pid"], e["tid"]) for e in events if e["ph"] != "M"} <= named


def test_events_of_a_track_nest(trace):
    tracks = defaultdict(list)
    for event in events_of(trace):
        if event["ph"] == "X":
            tracks[event["pid"], event["tid"]].append(event)
    for events in tracks.values():
        open_events = []
        for event in events:  # by time, those that contain others first
            while open_events and open_events[-1]["ts"] + open_events[-1]["dur"] <= event["ts"]:
                open_events.pop()
            assert (event["cat"] == "span") == (not open_events), event
            if open_events:
                outer = open_events[-1]
                assert event["ts"] + event["dur"] <= outer["ts"] + outer["dur"], (outer, event)
            open_events.append(event)


def test_every_flow_leads_from_a_signal_into_a_wait(trace):
    events, ends = events_of(trace), {"s": {}, "f": {}}
    for event in events:
        if event["ph"] in ends:
            assert event["id"] not in ends[event["ph"]]
            ends[event["ph"]][event["id"]] = event
    assert ends["s"].keys() == ends["f"].keys()
    assert len(ends["s"]) == len(trace.flows)

    def around(flow, cat):
        return [
            e for e in events
            if e.get("cat") == cat and (e["pid"], e["tid"]) == (flow["pid"], flow["tid"])
            and e["ts"] <= flow["ts"] < e["ts"] + e["dur"]
        ]  # fmt: skip

    for number, start in ends["s"].items():
        finish = ends["f"][number]
        assert start["ts"] <= finish["ts"]
        signals, waits = around(start, "signal"), around(finish, "wait")
        flags = {e["args"]["flag"] for e in signals} & {e["args"]["flag"] for e in waits}
        assert flags, (signals, waits)


def test_a_trace_read_back_is_the_same(trace):
    again = from_json(to_json(trace))
    assert to_json(again) == to_json(trace)
    assert [(f.signal.text, f.wait.text) for f in again.flows] == [
        (f.signal.text, f.wait.text) for f in trace.flows
    ]


def test_the_docstring_of_the_schema_lists_every_event(trace):
    events = [e for e in events_of(trace) if e.get("cat") in ARGS]
    rows = re.findall(r"^(\w+) +\w.*\n(?:^ .*\n)*", schema.__doc__, re.MULTILINE)
    assert {e["cat"] for e in events} <= set(rows)
    text = re.split(r"[^\w]+", schema.__doc__)
    assert {name for e in events for name in e["args"]} <= set(text)


def test_metadata_says_what_time_is():
    file = json.loads(to_json(TRACES["deadlock"]()))
    assert file["displayTimeUnit"] in ("ms", "ns")
    meta = file["otherData"]
    assert (meta["unit"], meta["world_size"], meta["seed"]) == ("steps", 3, 0)
    assert meta["time"].startswith("simulator steps")
    assert meta["fault"]["kind"] == "deadlock" and "waits at" in meta["fault"]["report"]


def test_waits_name_flag_and_values():
    trace = TRACES["exchange"]()
    waits = [e for e in events_of(trace) if e.get("cat") == "wait" and e["args"]["flag"]]
    assert len(waits) == 3 * 2 * 2
    for event in waits:
        args, rank = event["args"], event["pid"]
        assert args["flag"].startswith(f"flags[{rank}, ") and args["op"] == "W.wait_reached"
        assert args["wanted"] in ("reached 1", "reached 2") and args["tensor"] == "flags"
        assert isinstance(args["seen"], int)
        place = "test_timeline.py:" if RECORDS_LINES else "program"
        assert event["name"].startswith(f"wait {args['flag']} ({place}")
    blocked = [e for e in waits if e["dur"] > 1]
    assert blocked and all(e["args"]["seen"] < int(e["args"]["wanted"].split()[1]) for e in blocked)


@needs_lines
def test_spans_have_the_name_and_line_of_their_kernel():
    spans = [e for e in events_of(TRACES["exchange"]()) if e.get("cat") == "span"]
    assert {re.sub(r":\d+", "", e["name"]) for e in spans} == {"exchange (test_timeline.py)"}
    spans = [e for e in events_of(TRACES["streams"]()) if e.get("cat") == "span"]
    assert {re.sub(r":\d+", "", e["name"]) for e in spans} == {
        f"p.{step} (test_trace.py)" for step in ("copy", "write_value", "wait_value")
    }


def test_the_device_level_has_the_same_waits(tmp_path):
    flags = []
    for level in ("tile", "device"):
        file = tmp_path / f"{level}.json"
        tw.simulate(exchange(), 2, inputs(2), timeline=file, level=level)
        flags.append(sorted(w.flag for s in read(file).spans for w in s.waits if w.flag))
    assert flags[0] == flags[1] != []


def test_tracks_are_blocks_and_streams():
    def names(trace):
        return {
            (e["pid"], e["args"]["name"]) for e in events_of(trace) if e["name"] == "thread_name"
        }

    assert names(TRACES["exchange"]()) == {
        (rank, f"block {block}") for rank in range(3) for block in range(2)
    }
    assert names(TRACES["streams"]()) == {
        (rank, name) for rank in range(2) for name in ("the caller's stream", "stream 'copies'")
    }


def test_the_last_arrival_ends_the_wait_of_a_barrier():
    trace = TRACES["barrier"]()
    blocked = [w for s in trace.spans for w in s.waits if w.op == "W.barrier_blocks"]
    ended = [f for f in trace.flows if f.wait in blocked]
    assert blocked and len(ended) == len(blocked)
    assert len({f.signal for f in ended}) == 2  # one a launch
    assert all(f.signal.span is not f.span and f.signal.time < f.wait.end for f in ended)


def test_counters_of_the_compiler_have_flows():
    trace = TRACES["inferred"]()
    assert {(f.signal.span.rank, f.span.rank) for f in trace.flows} >= {(0, 1), (1, 0)}


def test_a_file_for_each_suffix_is_of_the_same_trace(tmp_path):
    for suffix in ("json", "html"):
        tw.simulate(exchange(), 2, inputs(2), seed=3, timeline=tmp_path / f"a.{suffix}")
    writer(tmp_path / "b.html")(read(tmp_path / "a.json"))
    assert (tmp_path / "a.html").read_text() == (tmp_path / "b.html").read_text()


META = '{"format": "tileweave-trace", "version": 1, "unit": "steps", "fault": null}'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "expected a trace that `tileweave simulate --timeline X.json` or tw.trace wrote"),
        ("[]", "expected a trace that"),
        ('{"traceEvents": []}', "expected a trace that"),
        (f'{{"otherData": {META.replace("1", "9")}}}', "expected a trace that"),
        (f'{{"otherData": {META}}}', "KeyError: 'traceEvents'"),
        (f'{{"otherData": {META}, "traceEvents": [1]}}', "AttributeError: .* expected events as"),
        (f'{{"otherData": {META.replace("steps", "s")}, "traceEvents": []}}', "unit 's'"),
    ],
)
def test_other_files_are_refused(text, message):
    with pytest.raises(tw.TileWeaveError, match=message):
        from_json(text, "trace: x.json")


def test_a_flow_without_its_finish_is_refused():
    file = json.loads(to_json(TRACES["exchange"]()))
    file["traceEvents"] = [e for e in file["traceEvents"] if e["ph"] != "f"]
    with pytest.raises(tw.TileWeaveError, match=r"KeyError: .*; expected events as"):
        from_json(json.dumps(file))
