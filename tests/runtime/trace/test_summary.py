"""Summaries of traces: shares of time, and the critical path. The times are microseconds."""

from dataclasses import replace

import pytest

from tests.runtime.trace.picture import draw, texts
from tileweave.runtime.trace.chrome import from_json, to_json
from tileweave.runtime.trace.summary import summarize
from tileweave.runtime.trace.trace import Clock, Flow, Signal, Span, Trace, Transfer, Wait

STREAM = "the caller's stream"


def span(rank, start, end, block=0, launch=0, kernel="gemm"):
    return Span(rank, kernel, STREAM, block, f"block {block}", launch, "gemm.py:10", start, end)


def flow(sender, time, receiver, start, end, flag="parts[1, 1]"):
    """Add a wait to ``receiver`` that a signal of ``sender`` ends."""
    tensor = flag.split("[")[0]
    signal = Signal(sender, time, 0.5, "W.signal", flag, tensor, 0, 1, "/x/gemm.py:46", "a signal")
    wait = Wait(
        start, end, "W.wait_reached", flag, tensor, 0, "reached 1", "/x/gemm.py:50", "waits"
    )
    receiver.waits.append(wait)
    return Flow(signal, receiver, wait)


@pytest.fixture
def chain():
    """Rank 0 signals rank 1 at 40, which signals rank 2 at 90, which ends at 120."""
    a, b, c = span(0, 0.0, 50.0), span(1, 0.0, 100.0), span(2, 0.0, 120.0)
    flows = [flow(a, 40.0, b, 10.0, 41.0), flow(b, 90.0, c, 20.0, 92.0, "parts[2, 1]")]
    write = Transfer(a, 35.0, 5.0, 1, True, "tma store", "parts", "gemm.py:44", "a write")
    read = Transfer(a, 30.0, 5.0, 1, False, "load", "parts", "gemm.py:43", "a read")
    return Trace("gemm", 3, "us", 125.0, [a, b, c], [f.signal for f in flows], flows, [write, read])


def test_shares_of_time(chain):
    shares = summarize(chain).shares
    assert [(s.rank, s.kernel, s.spans, s.total) for s in shares] == [
        (0, "gemm", 1, 50), (1, "gemm", 1, 100), (2, "gemm", 1, 120),
    ]  # fmt: skip
    assert [s.waiting for s in shares] == [0, 31, 72]
    assert [s.publishing for s in shares] == [5.5, 0.5, 0]  # the write and the signal; no read
    assert [s.computing for s in shares] == [44.5, 68.5, 48]
    assert shares[2].by_wait == {("parts", "/x/gemm.py:50"): 72}


def test_lost_events_and_clocks_of_each_rank(chain):
    assert "lost" not in str(summarize(chain))
    chain.lost, chain.clocks = [0, 3, 0], [Clock(rank, 2.0 * rank, 0.5, 10.0) for rank in range(3)]
    lines = str(summarize(chain)).splitlines()
    assert lines[0].startswith("gemm: 3 ranks, no fault, 3 events lost")
    assert lines[1] == "rank 1: 3 events lost, for which its buffer had no room"
    assert lines[2].startswith("rank  kernel")
    content = summarize(chain).as_json()
    assert content["lost"] == [0, 3, 0]
    assert content["clocks"][1] == {"rank": 1, "offset": 2.0, "error": 0.5, "host_error": 10.0}


def test_waits_that_overlap_count_once(chain):
    flow(chain.spans[0], 60.0, chain.spans[2], 50.0, 70.0, "others[0]")
    share = summarize(chain).shares[2]
    assert share.waiting == 72 and sum(share.by_wait.values()) == 92


def test_critical_path_leads_from_rank_to_rank(chain):
    path = summarize(chain).path
    assert [(h.span.rank, h.signal.span.rank, h.worked) for h in path] == [(2, 1, 49), (1, 0, 40)]
    text = str(summarize(chain)).splitlines()
    at = text.index("critical path, from its end:")
    assert text[at + 1 :] == [
        "  rank 2, block 0 in launch 0 ended last, at 120 us",
        "  rank 2, block 0 waited 72 us for parts[2, 1] at gemm.py:50, which rank 1, block 0 "
        "signalled at gemm.py:46, 49 us after rank 1 had waited for parts[1, 1]",
        "  rank 1, block 0 waited 31 us for parts[1, 1] at gemm.py:50, which rank 0, block 0 "
        "signalled at gemm.py:46, 40 us after rank 0 began",
    ]


def test_a_signal_before_the_wait_is_not_on_the_path(chain):
    chain.flows[1].signal.time = 15.0
    assert summarize(chain).path == []
    assert str(summarize(chain)).endswith("it did not wait for another rank or block")


def test_the_path_continues_in_the_previous_block_of_the_rank(chain):
    chain.spans.append(span(2, 121.0, 124.0, launch=1))
    assert summarize(chain).last is chain.spans[-1]
    assert [h.span.rank for h in summarize(chain).path] == [2, 1]


def test_two_ranks_that_wait_for_each_other_at_one_time_end_the_path():
    a, b = span(0, 0.0, 10.0), span(1, 0.0, 10.0)
    flows = [flow(a, 6.0, b, 5.0, 6.0), flow(b, 6.0, a, 5.0, 6.0, "parts[0, 1]")]
    trace = Trace("gemm", 2, "us", 10.0, [a, b], [f.signal for f in flows], flows, [])
    assert len(summarize(trace).path) == 2


def test_a_wait_without_end(chain):
    stuck = Wait(95.0, None, "W.wait_reached", "parts[2, 2]", "parts", 0, "reached 1", "gemm.py:51")
    chain.spans[2].end = None
    chain.spans[2].waits.append(stuck)
    summary = summarize(chain)
    assert "  rank 2, block 0 waits for parts[2, 2] at gemm.py:51 without end: value seen 0, " in (
        str(summary)
    )
    assert summary.path[0].signal is None and summary.path[1].wait is chain.flows[1].wait
    assert summary.as_json()["critical_path"][0]["signalled"] is None


def test_an_empty_trace():
    text = str(summarize(Trace("gemm", 2, "us", 0.0, [], [], [], [])))
    assert text.startswith("gemm: 2 ranks, no fault, 0 us\n")


def test_microseconds_survive_the_file(chain):
    again = from_json(to_json(chain))
    assert str(summarize(again)) == str(summarize(chain))
    assert again.unit == "us" and again.seed is None and again.end == 125.0


def test_the_drawing_names_the_unit(chain):
    assert {"time: microseconds", "gemm: 3 ranks, no fault"} <= {*texts(draw(chain))}
    steps = texts(draw(replace(chain, unit="steps")))
    assert any(t.startswith("time: simulator steps") for t in steps)
