"""Collectives of ``torch.distributed`` as steps of plans: refused steps, gloo, graphs, traces."""

import pytest
import tilelang.language as T
import torch

import tileweave as tw
from tests.ops import on_ranks
from tests.runtime.plans import collectives_on_ranks
from tests.runtime.plans.fakes import INBOX, Ranks, declared
from tests.runtime.trace.test_recording import TimedEvent
from tileweave import language as W
from tileweave.runtime.executor import calls as plan_calls
from tileweave.runtime.executor import collectives
from tileweave.runtime.host import tracer
from tileweave.runtime.host.group import Group
from tileweave.runtime.plans.steps import Collective, WaitStream
from tileweave.runtime.trace import recording
from tileweave.runtime.trace.clocks import Reading
from tileweave.runtime.trace.merge import RankClock, RankRecord, merge

NODES, N = 3, 8
FP8 = T.Tensor((NODES, N), "float8_e4m3fn")
PARAMETERS = {
    "x": T.Tensor((N,), "float32"), "pieces": T.Tensor((NODES, N), "float32"),
    "ints": T.Tensor((NODES, N), "int32"), "bytes": FP8, "inbox": W.Symmetric((N,), "float32"),
    "flag": W.Symmetric((1,), "uint32"),
}  # fmt: skip


def trace(body, node=1, nodes=NODES):
    """Return the steps of rank 0 of 2."""
    plan = declared(body, **PARAMETERS).on_node(node, nodes)
    shapes = {p.name: p.shape for p in plan.parameters}
    return plan.trace(0, 2, shapes, {})


def test_a_step_of_a_stream():
    seen = []

    def body(p, x, pieces, *_):
        seen.append((p.rank, p.world_size, p.node, p.nodes))
        p.collective("all_gather", pieces, x, stream="nodes")

    fork, step, join = trace(body)
    assert {*seen} == {(0, 2, 1, 3), (1, 2, 1, 3)}
    assert isinstance(step, Collective) and (step.across, step.members) == ("nodes", NODES)
    assert (step.stream, step.number) == ("nodes", 1)
    assert step.title == "p.collective of all_gather"
    assert isinstance(fork, WaitStream) and isinstance(join, WaitStream)


def test_nodes_have_steps_of_their_own():
    def body(p, x, *_):
        if p.node == 2:
            p.collective("all_reduce", x, x)

    plan = declared(body, **PARAMETERS)
    shapes = {p.name: p.shape for p in plan.parameters}
    counts = [len(plan.on_node(node, NODES).trace(0, 2, shapes, {})) for node in range(NODES)]
    assert counts == [0, 0, 1]
    again = plan.on_node(2, NODES).with_configs({"tileweave.delays": 3})
    assert len(again.trace(0, 2, shapes, {})) == 1


REFUSED = [
    (lambda p, x, pieces, *_: p.collective("gather", pieces, x), "name='gather'; expected "
     "'all_gather' or 'reduce_scatter' or 'all_reduce'"),
    (lambda p, x, pieces, *_: p.collective(["x"], pieces, x), "name=['x']; expected"),
    (lambda p, x, pieces, *_: p.collective("all_gather", pieces, x, across="tp"), "across='tp'; "
     "expected 'nodes' or 'ranks'"),
    (lambda p, x, pieces, *_: p.collective("all_gather", x, pieces), "dst=x[0:8] of all_gather "
     "across 3 nodes has shape (8,); expected (3, 3, 8)"),
    (lambda p, x, pieces, *_: p.collective("all_gather", pieces, x, across="ranks"),
     "dst=pieces[0:3, 0:8] of all_gather across 2 ranks has shape (3, 8); expected (2, 8)"),
    (lambda p, x, pieces, *_: p.collective("reduce_scatter", x[:4], pieces),
     "src=pieces[0:3, 0:8] of reduce_scatter across 3 nodes has shape (3, 8); expected (3, 4)"),
    (lambda p, x, pieces, *_: p.collective("all_reduce", x, pieces), "dst=x[0:8] of all_reduce "
     "across 3 nodes has shape (8,); expected (3, 8)"),
    (lambda p, x, pieces, ints, *_: p.collective("all_gather", ints, x), "src=x[0:8] has dtype "
     "float32; expected int32 of dst=ints[0:3, 0:8]"),
    (lambda p, x, pieces, ints, data, *_: p.collective("all_reduce", data, data),
     "all_reduce of float8_e4m3fn; expected float16, bfloat16, float32"),
    (lambda p, x, pieces, *_: p.collective("all_gather", pieces[:, :4], x[:4]),
     "dst=pieces[0:3, 0:4]; expected a region that is contiguous in memory"),
    (lambda p, x, pieces, *_: p.collective("all_reduce", pieces[:2], pieces[1:]),
     "src=pieces[1:3, 0:8] overlaps dst=pieces[0:2, 0:8]; expected regions apart"),
    (lambda p, x, pieces, *_: p.collective("all_gather", 3, x), "dst=3; expected a tensor of"),
    (lambda p, x, pieces, ints, data, inbox, *_: p.collective("all_gather", pieces, inbox[1]),
     "src=inbox[1, 0:8]; expected own memory, of rank 0"),
    (lambda p, x, pieces, ints, data, inbox, *_: p.collective("all_gather", pieces, inbox),
     "src=inbox[0:2, 0:8]; expected own memory, of rank 0"),
    (lambda p, x, pieces, *_: p.collective("all_gather", pieces, x, stream=3), "collective: "
     "stream=3; expected a name, or None"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "message"), REFUSED)
def test_refused_steps(body, message):
    with pytest.raises(tw.TileWeaveError) as error:
        trace(body)
    assert str(error.value).startswith("collective: ") and message in str(error.value)
    assert f" --> {__file__}:" in str(error.value)


def through_symmetric_memory(p, x, pieces, ints, data, inbox, flag):
    p.copy(inbox[1 - p.rank], x)
    p.copy(x, inbox[p.rank], stream="back")
    p.collective("all_gather", pieces, inbox[p.rank], stream="nodes")


def test_inferred_flags_do_not_order_it():
    with pytest.raises(tw.TileWeaveError) as error:
        trace(through_symmetric_memory)
    assert "p.collective of all_gather accesses inbox[0, 0:8], which is symmetric" in str(
        error.value
    )
    assert f" --> {__file__}:" in str(error.value)


def test_explicit_flags_order_it():
    def body(p, x, pieces, ints, data, inbox, flag):
        p.copy(inbox[1 - p.rank], x)
        p.write_value(flag[1 - p.rank, 0], 1)
        p.wait_value(flag[p.rank, 0], 1)
        p.collective("all_gather", pieces, inbox[p.rank])

    assert isinstance(trace(body)[-1], Collective)


@pytest.fixture(scope="module")
def four():
    ranks = on_ranks.Ranks(4)
    yield ranks
    ranks.close()


@pytest.mark.parametrize("mesh", [[[0, 1], [2, 3]], [[0, 2], [1, 3]]])
def test_values_by_gloo(four, mesh):
    outs = four.run(collectives_on_ranks.on_mesh, mesh)
    for rank, out in enumerate(outs):
        (node,) = (n for n, ranks in enumerate(mesh) if rank in ranks)
        local = mesh[node].index(rank)
        same = [ranks[local] for ranks in mesh]
        x = [10.0**r for r in range(4)]
        sums = sum(x[r] for r in same)
        assert out == (
            (node, 2),
            [x[r] for r in same],
            x[same[1 - node]],
            [x[r] for r in mesh[node]],
            2 * x[same[node]],  # both nodes have the same pieces
            [2 * sums, sums],
            [1.0 + r for r in same],
        )


def test_meshes(four):
    assert four.run(collectives_on_ranks.one_node) == [(0, 1, True)] * 4
    for text in four.run(collectives_on_ranks.refused_order):
        assert "ranks 1, 0 along one axis; expected ascending ranks along both" in text


@tw.plan
def one_collective(p, x: T.Tensor((N,), "float32"), out: T.Tensor((2, N), "float32")):
    p.collective("all_gather", out, x, stream="nodes")


def called(monkeypatch, every_rank, function):
    """Return the result of ``function(world, calls, x, out)`` on the only rank of a node, where
    ``calls`` calls ``one_collective`` as node 1 of 2."""
    world = Ranks(1, monkeypatch)

    def rank(group: Group):
        world.join(group)
        calls = plan_calls.Calls(one_collective.on_node(1, 2))
        calls._nodes = "the nodes"
        return function(world, calls, torch.ones(N), torch.zeros(2, N))

    (actual,) = every_rank(rank, 1)
    if isinstance(actual, Exception):
        raise actual
    return actual


class FakeWork:
    """Work of NCCL: the stream that waits for it is the current one."""

    def __init__(self, here) -> None:
        self.here = here

    def wait(self) -> None:
        self.here.log.append("wait")


def as_nccl(monkeypatch, here):
    """Make the collectives those of an NCCL that logs."""

    def all_gather(dst, src, group, async_op):
        here.log.append(("all_gather", dst.numel(), src.numel(), group, async_op))
        return FakeWork(here)

    monkeypatch.setattr(collectives, "all_gather_single", all_gather)
    for module in (collectives, plan_calls):
        monkeypatch.setattr(module, "uses_gloo", lambda group, device: False)


def test_nccl_runs_in_the_stream_of_the_step(every_rank, monkeypatch):
    """The caller's stream is the current one again after it, also if it fails."""

    def calls(world, call, x, out):
        as_nccl(monkeypatch, world.here)
        call(x, out)
        log = list(world.here.log)
        world.here.log.clear()

        def fails(*tensors, group, async_op):
            raise RuntimeError("NCCL\n  error")

        monkeypatch.setattr(collectives, "all_gather_single", fails)
        with pytest.raises(tw.TileWeaveError) as error:
            call(x, out)
        return log, str(error.value), world.here.log[-1]

    log, message, last = called(monkeypatch, every_rank, calls)
    assert log == [
        ("side 1", "wait", "caller 0"),
        ("current", "side 1"),
        ("all_gather", 4 * 2 * N, 4 * N, "the nodes", True),
        "wait",
        ("current", "caller 0"),
        ("caller 0", "wait", "side 1"),
    ]
    assert message.startswith(
        "p.collective of all_gather across nodes: NCCL error; expected the same calls on all 2 "
        f"nodes\n --> {__file__}:"
    )
    assert last == ("current", "caller 0")


@pytest.mark.parametrize("gloo", [True, False])
def test_graphs(every_rank, monkeypatch, gloo):
    """NCCL can be captured after a call; gloo cannot. A refused call enqueues nothing."""
    state = {"capturing": True}
    monkeypatch.setattr(plan_calls, "capturing", lambda: state["capturing"])

    def calls(world, call, x, out):
        as_nccl(monkeypatch, world.here)
        monkeypatch.setattr(plan_calls, "uses_gloo", lambda group, device: gloo)
        monkeypatch.setattr(plan_calls, "current_stream", lambda device: state["capturing"])
        with pytest.raises(tw.TileWeaveError) as error:
            call(x, out)
        refused = str(error.value), list(world.here.log)
        state["capturing"] = False
        call(x, out)
        state["capturing"] = True
        if gloo:
            with pytest.raises(tw.TileWeaveError):
                call(x, out)
        else:
            call(x, out)
        return *refused, sum(entry[0] == "all_gather" for entry in world.here.log)

    message, log, count = called(monkeypatch, every_rank, calls)
    assert not log and count == (1 if gloo else 2)
    assert message.partition("\n --> ")[0] == (
        "one_collective: a CUDA graph cannot record p.collective of all_gather, which gloo makes; "
        "expected NCCL, or the call outside of the graph"
        if gloo
        else "one_collective: NCCL has not connected the nodes for p.collective of all_gather yet; "
        "expected one call of the plan before it is captured in a CUDA graph"
    )
    assert f"\n --> {__file__}:" in message


def test_a_timed_step_of_a_trace(every_rank, monkeypatch):
    def calls(world, call, x, out):
        monkeypatch.setattr(torch.cuda, "Event", TimedEvent)
        as_nccl(monkeypatch, world.here)
        active = tracer.Tracer(world.here.session)
        tracer.activate(active)
        try:
            call(x, out)
        finally:
            tracer.activate(None)
        base = TimedEvent(True)
        base.time = 0
        reading = Reading(RankClock(), base, 0)
        return [recording._timed(step, reading) for step in active.steps], world.here.log

    steps, log = called(monkeypatch, every_rank, calls)
    assert ("all_gather", 4 * 2 * N, 4 * N, "the nodes", True) in log
    (step,) = steps
    assert (step.kind, step.op, step.tensor) == ("collective", "p.collective of all_gather", "out")
    assert step.nbytes == 4 * 2 * N and step.end_ns - step.begin_ns == 1_000_000
    record = RankRecord(0, recording.np.zeros(0, recording.EVENT), 0, [], steps)
    (span,) = merge([record], "plan").spans
    assert span.label == f"p.collective of all_gather out, {4 * 2 * N} bytes"
    assert span.end - span.start == 1000 and span.loc.startswith(f"{__file__}:")


def test_a_plan_keeps_its_group_with_other_options(monkeypatch):
    plan = one_collective.on_node(1, 2)
    plan._group, plan._nodes = "ranks", "nodes"
    again = plan.with_configs({"tileweave.delays": 3})
    assert (again.node, again.nodes, again._group, again._nodes) == (1, 2, "ranks", "nodes")


def test_one_process_copies(every_rank, monkeypatch):
    """Without other nodes and ranks no process group is needed."""
    world = Ranks(1, monkeypatch)

    @tw.plan
    def plan(p, x: T.Tensor((N,), "float32"), out: T.Tensor((1, N), "float32"), inbox: INBOX):
        p.collective("all_gather", out, x)
        p.collective("all_reduce", out, out, across="ranks")

    def rank(group: Group):
        world.join(group)
        out = torch.zeros(1, N)
        inbox = world.here.session.heap.allocate((2, 4, 8), torch.int32)
        plan_calls.Calls(plan)(torch.arange(N).float(), out, inbox)
        return out.tolist()

    assert every_rank(rank, 1) == [[list(range(N))]]
