"""Calls on several streams run in the order of the program; values are bound for each thread."""

from __future__ import annotations

import random
import threading
import types
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

import tileweave as tw
from tests.groups import open_sessions
from tests.runtime.stand_in_gpu import Gpu, Graph, Steps, run
from tileweave.runtime.host import session as sessions
from tileweave.runtime.kernel import host_functions, launch_order
from tileweave.runtime.kernel.launch_order import CallStream, LaunchOrder, begin_call, end_call

RANKS, STREAMS, OPERATORS = 2, 3, 2
SEEDS = range(40)


class Operator:
    """Sum over two ranks by memory and counters that all its calls share, as one that is inferred:
    two buffers in turn, and an epoch in device memory."""

    def __init__(self) -> None:
        self.epochs, self.signals = [0, 0], [0, 0]
        self.buffers = [[0.0, 0.0], [0.0, 0.0]]

    def call(self, rank: int, value: float, results: dict[float, float]) -> Steps:
        """Yield between the accesses of a call to memory; write ``results[value]`` at its end."""
        epoch = self.epochs[rank]
        yield lambda: True
        self.buffers[1 - rank][epoch % 2] = value
        yield lambda: True
        self.signals[1 - rank] += 1
        yield lambda: self.signals[rank] > epoch
        results[value] = value + self.buffers[rank][epoch % 2]
        yield lambda: True
        self.epochs[rank] = epoch + 1


@dataclass
class Rank:
    """Host of one rank: it enqueues a program on its GPU, with an order of its own."""

    number: int
    operators: list[Operator]
    gpu: Gpu = field(default_factory=Gpu)
    order: LaunchOrder = field(default_factory=LaunchOrder)
    graphs: list[tuple[Graph, int]] = field(default_factory=list)
    """Graphs, each with the number of its calls."""
    results: dict[float, float] = field(default_factory=dict)
    values: list[float] = field(default_factory=list)
    """Values of all calls and replays, in the order of the program."""

    def value(self, launch: int, position: int = 0) -> float:
        """Return the value of a call: its fraction is that of the rank."""
        return 100 * launch + position + 0.25 * (self.number + 1)

    def enqueue(self, stream: CallStream, operator: int, position: int = 0) -> None:
        def kernel(launch: int) -> Steps:
            value = self.value(launch, position)
            return self.operators[operator].call(self.number, value, self.results)

        must_end = begin_call(sessions.only, stream)
        self.gpu.launch(stream.handle, kernel)
        if must_end:
            end_call(stream)

    def call(self, stream: int, operator: int, is_external: bool) -> None:
        known = None if is_external else stream
        self.enqueue(CallStream(stream, False, is_external, known), operator)
        self.values.append(self.value(self.gpu._numbers))
        if is_external:
            self.gpu.destroy(stream)

    def capture(self, streams: list[int], operators: list[int]) -> None:
        """Capture calls, in the first stream and in others that wait for it at the beginning."""
        first, *others = streams
        self.gpu.begin_capture(first)
        for other in others:
            self.gpu.fork(first, other)
        for position, operator in enumerate(operators):
            stream = streams[position % len(streams)]
            self.enqueue(CallStream(stream, True, False, None), operator, position)
        for other in others:
            self.gpu.fork(other, first)
        self.graphs.append((self.gpu.end_capture(first), len(operators)))

    def replay(self, graph: int, stream: int) -> None:
        captured, calls = self.graphs[graph]
        number = self.gpu.replay(captured, stream)
        self.values += [self.value(number, position) for position in range(calls)]


def enqueue_program(rank: Rank, seed: int, modes: str) -> None:
    """Enqueue a random program, the same on all ranks, whose streams differ between the ranks.

    Args:
        modes: letters of the calls that it has: Eager, on eXternal streams, and in Graphs.
    """
    rng, own = random.Random(seed), random.Random(f"{seed} {rank.number}")
    captures = 0
    for _ in range(14):
        mode, operator = rng.choice(modes), rng.randrange(OPERATORS)
        operators = [rng.randrange(OPERATORS) for _ in range(rng.randint(1, 3))]
        graph, is_new = rng.random(), rng.random() < 0.4
        stream = own.randrange(STREAMS)
        if mode != "G":
            rank.call(stream + 100 * (mode == "X"), operator, mode == "X")
        elif is_new or not captures:
            # torch.cuda.graph captures streams of its own.
            rank.capture([10 + s for s in own.sample(range(3), own.randint(1, 3))], operators)
            captures += 1
        else:
            rank.replay(int(graph * captures), stream)


def fault_of(monkeypatch, seed: int, modes: str, refuses_removal: bool = False) -> str:
    """Return what is wrong with a random program on all ranks."""
    operators = [Operator() for _ in range(OPERATORS)]
    ranks = [Rank(n, operators, Gpu(refuses_removal)) for n in range(RANKS)]
    for rank in ranks:
        monkeypatch.setattr(launch_order, "_order", rank.order)
        monkeypatch.setattr(launch_order, "call", rank.gpu.call)
        enqueue_program(rank, seed, modes)
    if not run([rank.gpu for rank in ranks], seed, kernels=1 + seed % 2):
        return "deadlock"
    both = zip(*(rank.values for rank in ranks), strict=True)
    expected = [sum(values) for values in both]
    wrong = [r for r in ranks if [r.results.get(v) for v in r.values] != expected]
    return "wrong results" if wrong else ""


@pytest.fixture
def one_session(monkeypatch):
    open_sessions(monkeypatch, types.SimpleNamespace(name=""))
    monkeypatch.setattr(launch_order, "driver", types.SimpleNamespace)


MODES = ["E", "G", "X", "EG", "EXG"]


@pytest.mark.parametrize("modes", MODES)
def test_calls_on_several_streams_are_exact(one_session, monkeypatch, modes):
    for seed in SEEDS:
        assert fault_of(monkeypatch, seed, modes) == "", seed


def test_edges_that_cannot_be_removed_remain(one_session, monkeypatch):
    for seed in SEEDS:
        assert fault_of(monkeypatch, seed, "EG", refuses_removal=True) == "", seed


def no_order(monkeypatch):
    monkeypatch.setattr(LaunchOrder, "begin", lambda self, stream: False)


def no_wait_in_graphs(monkeypatch):
    monkeypatch.setattr(launch_order, "_EXTERNAL", 0)
    wait = Gpu.cuStreamWaitEvent

    def wait_inside(self, stream, event, flags):
        if stream not in self._captures or event.capture is not None:
            wait(self, stream, event, flags)

    monkeypatch.setattr(Gpu, "cuStreamWaitEvent", wait_inside)


def no_end_of_calls(monkeypatch):
    monkeypatch.setattr(LaunchOrder, "_record", lambda self, stream: None)


def no_end_of_graphs(monkeypatch):
    monkeypatch.setattr(LaunchOrder, "_end_captured", lambda self, stream: None)


def only_the_first_call_ends_a_graph(monkeypatch):
    monkeypatch.setattr(launch_order, "_edges", lambda *_: None)


def no_order_in_graphs(monkeypatch):
    begin = LaunchOrder._begin_capture

    def begin_captured(self, stream):
        number, *_ = launch_order._capture_of(stream)
        if number not in self._captures:
            begin(self, number, stream)

    monkeypatch.setattr(LaunchOrder, "_begin_captured", begin_captured)


def no_end_on_external_streams(monkeypatch):
    begin = LaunchOrder.begin

    def begin_known(self, stream):
        return begin(self, CallStream(stream.handle, stream.is_captured, False, stream.handle))

    monkeypatch.setattr(LaunchOrder, "begin", begin_known)


@pytest.mark.parametrize(
    ("fault", "modes"),
    [
        *((no_order, modes) for modes in MODES),
        (no_wait_in_graphs, "EG"),
        (no_end_of_calls, "E"),
        (no_end_of_calls, "EG"),
        (no_end_of_graphs, "G"),
        (only_the_first_call_ends_a_graph, "EG"),
        (no_order_in_graphs, "G"),
        (no_end_on_external_streams, "X"),
    ],
)
def test_each_part_of_the_order_is_needed(one_session, monkeypatch, fault: Callable, modes):
    fault(monkeypatch)
    assert any(fault_of(monkeypatch, seed, modes) for seed in SEEDS)


def test_one_stream_costs_no_call_of_the_driver(one_session, monkeypatch):
    gpu = Gpu()
    monkeypatch.setattr(launch_order, "_order", LaunchOrder())
    monkeypatch.setattr(launch_order, "call", gpu.call)

    def calls(*streams: CallStream) -> list[str]:
        gpu.calls.clear()
        assert not any([begin_call(sessions.only, stream) for stream in streams])
        return [*gpu.calls]

    own = torch_stream(7, 3)
    default, side = (CallStream.of(s, False) for s in (torch_stream(0, 0), own))
    calls(default)
    assert calls(default, default) == []
    assert calls(None, default, None) == []  # calls that do not communicate
    joined = ["cuStreamGetCaptureInfo", "cuEventCreate", "cuEventRecord", "cuStreamWaitEvent"]
    assert calls(side, side) == joined
    assert calls(default, None) == [name for name in joined if name != "cuEventCreate"]


def torch_stream(handle: int, stream_id: int) -> types.SimpleNamespace:
    return types.SimpleNamespace(cuda_stream=handle, stream_id=stream_id)


def test_streams_of_torch_and_others():
    assert CallStream.of(torch_stream(0, 0), False).known == 0  # the default stream
    assert CallStream.of(torch_stream(64, 5), False).known == 64
    assert CallStream.of(torch_stream(64, 64), False).known is None  # torch.cuda.ExternalStream
    assert CallStream.of(torch_stream(64, 5), True).known is None


def test_old_captures_are_forgotten(one_session, monkeypatch):
    gpu, order = Gpu(), LaunchOrder()
    monkeypatch.setattr(launch_order, "call", gpu.call)
    for stream in range(20):
        gpu.begin_capture(stream)
        for _ in range(2):
            captured = CallStream(stream, True, False, None)
            order.begin(captured)
            order.end(captured)
    assert [c.stream for c in order._captures.values()] == [*range(4, 20)]
    monkeypatch.setattr(launch_order, "_order", order)
    launch_order.forget_launches()
    assert launch_order._order is not order


@pytest.mark.parametrize("is_version_12", [True, False])
def test_functions_of_both_versions_of_the_driver(monkeypatch, is_version_12):
    suffixes = {"cuStreamGetCaptureInfo": "_v3", "cuGraphAddDependencies": "_v2"}
    names = [n + s for n, s in suffixes.items()] if is_version_12 else [*suffixes]
    functions = types.SimpleNamespace(**dict.fromkeys([*suffixes, *names]))
    seen = []
    monkeypatch.setattr(launch_order, "driver", lambda: functions)
    monkeypatch.setattr(
        launch_order, "call", lambda name, *args, **_: seen.append(name) or (0, 0, None, [], 0)
    )
    assert launch_order._capture_of(1) is None
    launch_order._edges("Add", None, None, None)
    assert seen == names


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
