"""Launches of several groups: values are bound for each thread, and streams wait for each other."""

from __future__ import annotations

import threading
import types

import pytest

import tileweave as tw
from tests.groups import open_sessions
from tileweave.runtime.host import session as sessions
from tileweave.runtime.kernel import host_functions, launch_order
from tileweave.runtime.kernel.launch_order import prepare_launch


class Stream:
    """Stream that logs for which streams it waits."""

    def __init__(self, name: str, log: list[str], capture: int = 0) -> None:
        self.name, self.log, self.capture = name, log, capture
        self.cuda_stream = id(self)

    def record_event(self) -> str:
        return self.name

    def wait_event(self, event: str) -> None:
        self.log.append(f"{self.name} waits for {event}")


@pytest.fixture
def launch(monkeypatch):
    """Return a function that launches kernels of groups on streams, written as "X1": the kernel of
    group X on stream 1. It returns the waits, in order."""
    log: list[str] = []
    streams = {name: Stream(name, log) for name in "12"}
    streams |= {name: Stream(name, log, capture=7) for name in "34"}
    streams["5"] = Stream("5", log, capture=8)
    by_handle = {s.cuda_stream: s for s in streams.values()}
    groups = {name: types.SimpleNamespace(name=name) for name in "XY"}
    open_sessions(monkeypatch, *groups.values())
    monkeypatch.setattr(launch_order, "_capture_of", lambda handle: by_handle[handle].capture)
    monkeypatch.setattr(launch_order, "bind_session", lambda session: None)
    monkeypatch.setattr(launch_order, "_runs", {})

    def launch(kernels: str) -> list[str]:
        log.clear()
        for group, stream in kernels.split():
            prepare_launch(groups[group], streams[stream], streams[stream].capture != 0)
        return [*log]

    launch.open = lambda *names: open_sessions(monkeypatch, *(groups[name] for name in names))
    return launch


@pytest.mark.parametrize(
    ("kernels", "waits"),
    [
        ("X1 X2 X1", []),  # one group
        ("X1 Y1 X1", []),  # one stream
        ("X1 Y2 Y2 X1", ["2 waits for 1", "1 waits for 2"]),
        ("X1 X2 Y1 X1", ["1 waits for 2"]),
        ("X1 Y1 Y2", ["2 waits for 1"]),  # also the second stream of the new group
        ("X3 Y4 X3", ["4 waits for 3", "3 waits for 4"]),  # in one capture
        ("X3 Y5", []),  # two captures
        ("X1 Y3 Y2", ["2 waits for 1"]),  # a capture is not part of the eager order
        ("X3 X1 Y2 Y4", ["2 waits for 1", "4 waits for 3"]),
    ],
)
def test_streams_wait_where_the_group_changes(launch, kernels, waits):
    assert launch(kernels) == waits


def test_a_single_session_orders_nothing(launch):
    launch.open("X")
    assert launch("X1 X2 X1") == [] and launch_order._runs == {}


def test_runs_of_ended_captures_are_dropped(launch):
    launch("X1 X3 X5")
    assert sorted(launch_order._runs) == [0, 8]
    launch_order.forget_launches()
    assert launch_order._runs == {}


@pytest.fixture(params=["Python", "C++"])
def two(request, monkeypatch):
    """Open two sessions; Python or the native part binds their values."""
    monkeypatch.setenv("TILEWEAVE_NATIVE", "1" if request.param == "C++" else "0")
    opened = []
    for name, rank in (("", 3), ("tp", 1)):
        group = types.SimpleNamespace(rank=rank, world_size=4)
        opened.append(Session(name, group))
        open_sessions(monkeypatch, *opened)
        host_functions.open_session(opened[-1])
    yield opened
    open_sessions(monkeypatch)
    for session in opened:
        host_functions.close_session(session)
    host_functions.register()


class Session:
    context = types.SimpleNamespace(address=0)

    def __init__(self, name, group):
        self.name, self.group = name, group


def test_each_thread_binds_its_session(two):
    """A thread that has bound none uses the default group's."""
    from tests.runtime.test_host_functions import bind

    default, tp = two
    ranks = []

    def elsewhere():
        ranks.extend(bind("tileweave.rank")[:1])
        host_functions.bind_session(default)
        ranks.extend(bind("tileweave.rank")[:1])

    host_functions.bind_session(tp)
    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert [*ranks, bind("tileweave.rank")[0]] == [3, 3, 1]


def test_a_closed_session_is_not_bound(two, monkeypatch):
    from tests.runtime.test_host_functions import bind

    default, tp = two
    host_functions.bind_session(tp)
    open_sessions(monkeypatch, default)
    host_functions.close_session(tp)
    assert bind("tileweave.rank")[0] == 3


def test_sessions_are_found_by_their_group(monkeypatch, two):
    assert sessions.joined() is two[0] and sessions.find(None) is two[0]
    assert sessions.find_named("") is two[0]
    assert [tw.rank(), tw.world_size()] == [3, 4]
    with pytest.raises(tw.TileWeaveError, match="group 'tp': it was destroyed while its symmetric"):
        two[1].group.process_group = object()
        sessions.require_open(two[1], "f")
    with pytest.raises(tw.TileWeaveError, match=r"f: compiled before tw\.finalize"):
        sessions.require_open(Session("tp", None), "f")
