"""Timelines: recorded events of a schedule, and the files that show them."""

import re
from pathlib import Path

import numpy as np
import pytest
import tilelang.language as T

import tileweave as tw
from tests.factory import factory
from tests.runtime.trace.picture import FAULT, SIGNAL, WRITE, draw, texts
from tileweave import language as W
from tileweave.runtime.trace.chrome import read
from tileweave.simulator import Executable, simulate
from tileweave.simulator.case import Case
from tileweave.simulator.report.timeline import Recorder

N = 32


@factory
def exchange(
    mail: W.Symmetric((2, N), "int32"),
    flags: W.Symmetric((2,), "int32"),
    out: T.Tensor((2, N), "int32"),
    epoch: T.int32,
    *,
    signals=True,
    waits=True,
):
    """Each rank writes to its right neighbor, with two blocks."""
    with T.Kernel(2, threads=N) as block:
        me = W.rank()
        peer = (me + 1) % W.world_size()
        for i in T.Parallel(N):
            mail[peer, block, i] = i
        if signals:
            W.signal(flags[peer, block])
        if waits:
            W.wait_reached(flags[me, block], epoch + 1)
        for i in T.Parallel(N):
            out[block, i] = mail[me, block, i]
        W.barrier_blocks()


def inputs(ranks):
    return [{"flags": np.zeros(2, np.int32), "epoch": lambda e: e} for _ in range(ranks)]


def recorded(program, ranks=3, epochs=2, given=None):
    """Return the timeline of one schedule, and the machine."""
    case = Case(Executable(program, ranks), given or inputs(ranks), epochs)
    machine = case.machine(0, 4, Recorder)
    fault = None
    try:
        machine.run()
    except tw.SimulationError as error:
        fault = error
    return machine.trace("exchange", 0, fault), machine


def test_bars_signals_waits_and_transfers():
    ranks, epochs = 3, 2
    timeline, _ = recorded(exchange(), ranks, epochs)
    assert sorted((b.rank, b.launch, b.label) for b in timeline.spans) == [
        (r, e, f"block {b}") for r in range(ranks) for e in range(epochs) for b in range(2)
    ]
    assert all(0 < b.start < b.end <= timeline.end for b in timeline.spans)
    waits = [(b, w) for b in timeline.spans for w in b.waits]
    assert waits and all(b.start < w.start < w.end < b.end for b, w in waits)
    assert any("waits at W.wait_reached(flags[" in w.text for _, w in waits)

    signals = [s for s in timeline.signals if s.flag]  # the others arrive at the barrier
    assert len(signals) == ranks * epochs * 2
    assert all("W.signal of flags" in m.text and " -> " in m.text for m in signals)
    flows = [f for f in timeline.flows if f.wait.flag]
    assert len(flows) == len(signals)
    for arrow in flows:
        sender, reader = arrow.signal.span, arrow.span
        assert reader.rank == (sender.rank + 1) % ranks and reader.label == sender.label
        assert arrow.wait.start <= arrow.wait.end - 1 and arrow.signal.time < arrow.wait.end

    writes = [t for t in timeline.transfers if t.writes]
    assert len(writes) == len(timeline.transfers) == ranks * epochs * 2
    assert all(t.peer == (t.span.rank + 1) % ranks for t in writes)


def test_a_signal_serves_every_wait_after_it():
    @T.prim_func
    def program(flags: W.Symmetric((1,), "int32")):
        with T.Kernel(3, threads=N) as block:
            if block == 0:
                W.signal(flags[0, 0])
                W.signal(flags[0, 0])
            else:
                W.wait_reached(flags[0, 0], 2)

    given = [{"flags": np.zeros(1, np.int32)}]
    timeline, _ = recorded(program, 1, 1, given=given)
    last = max(m.time for m in timeline.signals)
    by_reader = [[a for a in timeline.flows if a.span.label == f"block {b}"] for b in (1, 2)]
    assert sorted(len(actual) for actual in by_reader) == [1, 2]
    assert all(max(a.signal.time for a in actual) == last for actual in by_reader)


def test_reads_from_another_rank():
    @T.prim_func
    def program(mine: W.Symmetric((N,), "int32"), out: T.Tensor((N,), "int32")):
        with T.Kernel(1, threads=N) as _:
            for i in T.Parallel(N):
                mine[W.rank(), i] = i
            W.sync_ranks()
            W.get_block(mine[0, 0], out[0], N, 1 - W.rank())
            W.sync_ranks()

    timeline, _ = recorded(program, 2, 1, given=[{}, {}])
    assert [(t.span.rank, t.peer, t.writes) for t in timeline.transfers] in (
        [(0, 1, False), (1, 0, False)],
        [(1, 0, False), (0, 1, False)],
    )


def test_streams_are_bars_too():
    @tw.plan
    def program(p: tw.PlanBuilder, A: T.Tensor((N,), "int32"), inbox: W.Symmetric((N,), "int32"),
                flag: W.Symmetric((1,), "uint32")):  # fmt: skip
        p.copy(inbox[1 - p.rank], A, stream="copies")
        p.write_value(flag[1 - p.rank, 0], 1, stream="copies")

    given = [{"A": np.zeros(N, np.int32), "flag": np.zeros(1, np.uint32)} for _ in range(2)]
    timeline, _ = recorded(program, 2, 1, given=given)
    assert {(b.block, b.stream) for b in timeline.spans} == {(None, "stream 'copies'")}
    assert sorted(b.label for b in timeline.spans) == [
        "p.copy (step 1)", "p.copy (step 1)", "p.write_value (step 2)", "p.write_value (step 2)",
    ]  # fmt: skip
    assert {t.peer for t in timeline.transfers} == {0, 1}
    names = texts(draw(timeline))
    assert names.count("stream 'copies'") == names.count("blocks") == 2


def test_recording_changes_nothing(tmp_path, monkeypatch):
    program, file = exchange(), tmp_path / "a.html"
    with_it = simulate(program, 3, inputs(3), seed=5, timeline=file)
    assert file.is_file()
    monkeypatch.setattr(Recorder, "__init__", None)  # not even made when it is not asked for
    for one, other in zip(with_it, simulate(program, 3, inputs(3), seed=5), strict=True):
        assert all((one[name] == other[name]).all() for name in one)


def crosses(timeline):
    """Return the number of crosses, which have two thick lines each."""
    lines = [e for e in draw(timeline) if e.get("stroke") == FAULT]
    legend = 2
    return sum(e.get("stroke-width") == "3.2" for e in lines) // 2 - legend // 2


def test_a_deadlock_is_marked_at_each_stuck_block():
    timeline, _ = recorded(exchange(signals=False))
    assert timeline.fault.kind == "deadlock"
    stuck = [b for b in timeline.spans if b.waits and b.waits[-1].end is None]
    assert len(stuck) == len(timeline.spans) == crosses(timeline) == 6


def test_a_race_is_marked_at_both_accesses():
    timeline, _ = recorded(exchange(signals=False, waits=False))
    assert timeline.fault.kind == "race"
    assert sum(b.failed_at is not None for b in timeline.spans) == 1
    assert timeline.fault.other.text in timeline.fault.report
    assert crosses(timeline) == 2


def test_a_surplus_is_marked_at_its_last_arrival(tmp_path):
    @T.prim_func
    def program(flags: W.Symmetric((1,), "int32"), epoch: T.int32):
        with T.Kernel(1, threads=N) as _:
            W.signal(flags[0, 0], 2)
            W.wait_reached(flags[0, 0], epoch + 1)

    given = [{"flags": np.zeros(1, np.int32), "epoch": lambda e: e}]
    file = tmp_path / "a.json"
    with pytest.raises(tw.SimulationError, match="arrival: "):
        tw.simulate(program, 1, given, timeline=file)
    assert crosses(read(file)) == 1


def test_a_page_is_one_file(tmp_path):
    file = tmp_path / "a.html"
    with pytest.raises(tw.SimulationError) as error:
        tw.simulate(exchange(signals=False), 2, inputs(2), seed=4, schedules=3, timeline=file)
    page = file.read_text()
    assert {*re.findall(r"(?:https?:)?//[\w.]+", page)} == {"http://www.w3.org"}  # the name of SVG
    assert "<title>exchange: 2 ranks, seed 4, deadlock fault</title>" in page
    assert error.value.report.splitlines()[1].split(" --> ")[0] in page


def test_a_text_does_not_end_the_script_of_the_page():
    timeline, _ = recorded(exchange())
    timeline.spans[0].label = "</script>"
    assert any("</script>" in (e.get("data-tip") or "") for e in draw(timeline))


def test_the_page_draws_what_the_trace_has():
    timeline, _ = recorded(exchange())
    elements = draw(timeline)
    assert {"rank 0", "rank 1", "waits", "signal ends wait"} <= {*texts(elements)}
    tips = [e.get("data-tip") for e in elements]
    assert tips.count("rank 1, block 0, launch 0") == 1
    waits = [w for s in timeline.spans for w in s.waits]
    for wait in waits:
        assert tips.count(wait.text) == sum(w.text == wait.text for w in waits)
    fills = [e.get("fill") for e in elements if e.tag.endswith("polygon")]
    legend = 2  # an arrow and a triangle
    assert fills.count(SIGNAL) == len(timeline.signals) + len(timeline.flows) + legend
    assert fills.count(WRITE) == len(timeline.transfers) + 1
    arrows = [e for e in elements if e.get("stroke") == SIGNAL]
    assert len(arrows) == len(timeline.flows) + 1
    ends = {f"{float(e.get('x2')):.1f}" for e in arrows}
    scale = (1480 - 124 - 24) / timeline.end
    assert ends >= {f"{round(124 + f.wait.end * scale, 1):.1f}" for f in timeline.flows}


def test_of_too_much_the_last_is_drawn():
    timeline, _ = recorded(exchange())
    part = draw(timeline, "const MOST = 20;")
    assert len(part) < len(draw(timeline))
    note = next(t for t in texts(part) if t.startswith("time: "))
    assert re.search(r"the first \d+ are left out$", note)


def test_a_missing_folder(tmp_path):
    with pytest.raises(tw.TileWeaveError, match="expected a name in a folder that exists"):
        tw.simulate(exchange(), 2, inputs(2), timeline=tmp_path / "no" / "a.html")


@pytest.mark.parametrize("signals", [True, False])
@pytest.mark.parametrize("suffix", ["html", "json"])
def test_a_file_that_cannot_be_written_hides_no_fault(tmp_path, monkeypatch, signals, suffix):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    file = tmp_path / f"a.{suffix}"
    said = f"timeline: {file}: No space left on device; expected a file that can be written"
    if signals:
        with pytest.raises(tw.TileWeaveError, match=said):
            tw.simulate(exchange(), 2, inputs(2), timeline=file)
        return
    with pytest.warns(tw.SimulationWarning, match=said), pytest.raises(tw.SimulationError):
        tw.simulate(exchange(signals=False), 2, inputs(2), timeline=file)


@pytest.mark.parametrize("name", ["a.svg", "a", "a.htm"])
def test_another_suffix(tmp_path, name):
    with pytest.raises(tw.TileWeaveError, match=r"expected a name that ends in \.html or \.json"):
        tw.simulate(exchange(), 2, inputs(2), timeline=tmp_path / name)
