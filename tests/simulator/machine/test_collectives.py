"""Collectives of ``torch.distributed`` as steps of plans, on simulated ranks of several nodes."""

import numpy as np
import pytest
import tilelang.language as T

import tileweave as tw
from tests.plan_on_nodes import sums_over_nodes
from tests.simulator.machine.checks import line_of
from tileweave import language as W
from tileweave.runtime.trace.trace import Trace
from tileweave.simulator.case import Case
from tileweave.simulator.inputs.inputs import checked_inputs
from tileweave.simulator.machine.mesh import MeshExecutable
from tileweave.simulator.report.timeline import Recorder

UNREAD = pytest.mark.filterwarnings("ignore:.*never waited for:tileweave.SimulationWarning")
NODES, LOCAL, N = 2, 2, 32
MESH = {"node": NODES, "local": LOCAL}


@T.prim_func
def total(pieces: T.Tensor((NODES, N), "float32"), out: T.Tensor((N,), "float32")):
    with T.Kernel(1, threads=N) as _:
        for i in T.Parallel(N):
            out[i] = pieces[0, i] + pieces[1, i]


@T.prim_func
def double(x: T.Tensor((N,), "float32"), out: T.Tensor((N,), "float32")):
    with T.Kernel(1, threads=N) as _:
        for i in T.Parallel(N):
            out[i] = 2 * x[i]


def plan_of(steps):
    """Return the plan of ``steps(p, x, pieces, out)``."""

    @tw.plan
    def plan(
        p: tw.PlanBuilder,
        x: T.Tensor((N,), "float32"),
        pieces: T.Tensor((NODES, N), "float32"),
        out: T.Tensor((N,), "float32"),
    ):
        steps(p, x, pieces, out)

    return plan


def inputs():
    return [{"x": np.full(N, 10.0**rank, "float32")} for rank in range(NODES * LOCAL)]


def simulated(steps, **options):
    return tw.simulate(plan_of(steps), MESH, inputs(), **{"schedules": 10, **options})


def fault_of(steps, **options):
    with pytest.raises(tw.SimulationError) as error:
        simulated(steps, **options)
    return error.value


def gather(p, x, pieces, out):
    p.collective("all_gather", pieces, x, stream="nodes")
    p.wait_stream("nodes")
    p.launch(total, pieces, out)


def test_gathered_from_the_nodes():
    outs = simulated(gather)
    for rank, out in enumerate(outs):
        local = rank % LOCAL
        assert (out["pieces"] == [[10.0**local], [10.0 ** (LOCAL + local)]]).all()
        assert (out["out"] == 10.0**local + 10.0 ** (LOCAL + local)).all()


def test_gathered_from_the_ranks_of_a_node():
    def steps(p, x, pieces, out):
        p.collective("all_gather", pieces, x, across="ranks")

    for rank, out in enumerate(simulated(steps)):
        first = rank - rank % LOCAL
        assert (out["pieces"] == [[10.0**first], [10.0 ** (first + 1)]]).all()


def test_sums_over_nodes():
    """``reduce_scatter`` and ``all_reduce``, the latter also in place."""

    def steps(p, x, pieces, out):
        p.collective("all_reduce", out, x)
        p.copy(pieces[0], x)
        p.copy(pieces[1], out)
        p.collective("reduce_scatter", x, pieces)
        p.collective("all_reduce", x, x)

    for rank, out in enumerate(simulated(steps, epochs=1)):
        sums = 10.0 ** (rank % LOCAL) + 10.0 ** (rank % LOCAL + LOCAL)
        assert (out["out"] == sums).all()
        # Node 0 has the sum of x, node 1 two sums.
        assert (out["x"] == 3 * sums).all()


def test_one_node():
    @tw.plan
    def plan(p, x: T.Tensor((N,), "float32"), pieces: T.Tensor((1, N), "float32")):
        p.collective("all_gather", pieces, x, stream="nodes")

    for rank, out in enumerate(tw.simulate(plan, 2, inputs()[:2])):
        assert (out["pieces"] == 10.0**rank).all()


def test_symmetric_memory_through_flags():
    """A rank pushes its x to its neighbor, which sends it to the other node."""

    @tw.plan
    def plan(
        p: tw.PlanBuilder,
        x: T.Tensor((N,), "float32"),
        mail: W.Symmetric((N,), "float32"),
        flags: W.Symmetric((1,), "uint32"),
        pieces: T.Tensor((NODES, N), "float32"),
        epoch: T.int32,
    ):
        peer = 1 - p.rank
        p.copy(mail[peer], x, stream="push")
        p.write_value(flags[peer, 0], epoch + 1, stream="push")
        p.wait_value(flags[p.rank, 0], epoch + 1)
        p.collective("all_gather", pieces, mail[p.rank])

    given = [i | {"flags": np.zeros(1, "uint32"), "epoch": 0} for i in inputs()]
    for rank, out in enumerate(tw.simulate(plan, MESH, given, epochs=1, schedules=10)):
        local = 1 - rank % LOCAL
        assert (out["pieces"] == [[10.0**local], [10.0 ** (LOCAL + local)]]).all()


def test_a_mesh_plan_calls_it():
    plan = plan_of(gather)

    @tw.mesh_plan
    def step(
        m: tw.MeshBuilder,
        x: T.Tensor((N,), "float32"),
        pieces: T.Tensor((NODES, N), "float32"),
        out: T.Tensor((N,), "float32"),
        again: T.Tensor((NODES, N), "float32"),
        end: T.Tensor((N,), "float32"),
    ):
        m.call(plan, x, pieces, out, group="local", nodes="node")
        m.call(plan, out, again, end, group="node", nodes="local")

    for rank, out in enumerate(tw.simulate(step, MESH, inputs(), schedules=5)):
        assert (out["again"] == [[101], [1010]]).all(), rank
        assert (out["end"] == 1111).all()


@UNREAD
def test_it_orders_what_all_ranks_did_before():
    """A rank reads what its neighbor has copied to it before the collective of both."""

    @tw.plan
    def plan(
        p: tw.PlanBuilder,
        x: T.Tensor((N,), "float32"),
        inbox: W.Symmetric((N,), "float32"),
        flag: W.Symmetric((1,), "uint32"),
        word: T.Tensor((1,), "int32"),
        out: T.Tensor((N,), "float32"),
    ):
        p.write_value(flag[p.rank, 0], 1)  # the plan synchronizes explicitly
        p.copy(inbox[1 - p.rank], x)
        p.collective("all_reduce", word, word, across="ranks")
        p.copy(out, inbox[p.rank])

    given = [i | {"word": np.ones(1, "int32")} for i in inputs()]
    for rank, out in enumerate(tw.simulate(plan, MESH, given, schedules=10, epochs=1)):
        assert (out["out"] == 10.0 ** (rank ^ 1)).all() and out["word"] == [LOCAL]


def test_the_plan_of_the_gpu_program():
    """Collectives beside copies and waits that the compiler orders."""
    plan = sums_over_nodes(NODES, LOCAL, 2, 128)
    rng = np.random.default_rng(0)
    given = [{"x": rng.integers(0, 1000, (2, 128)).astype(np.int32)} for _ in range(4)]
    every = [i["x"] for i in given]
    for rank, out in enumerate(tw.simulate(plan, MESH, given, schedules=5)):
        first = rank - rank % LOCAL
        assert (out["parts"] == every[first : first + LOCAL]).all()
        assert (out["pieces"] == [every[rank % LOCAL], every[rank % LOCAL + LOCAL]]).all()
        assert (out["total"] == sum(every)).all()
        assert (out["own_sums"] == NODES * every[rank]).all()


def test_a_source_may_be_overwritten_after_the_collective():
    def steps(p, x, pieces, out):
        p.launch(double, x, out)
        p.collective("all_gather", pieces, out)
        p.launch(total, pieces, out)

    assert all((out["out"] == 2 * sum_of(rank)).all() for rank, out in enumerate(simulated(steps)))


def sum_of(rank):
    return 10.0 ** (rank % LOCAL) + 10.0 ** (rank % LOCAL + LOCAL)


def no_wait_before_the_reader(p, x, pieces, out):
    p.collective("all_gather", pieces, x, stream="nodes")
    p.launch(total, pieces, out)


def no_wait_before_the_collective(p, x, pieces, out):
    p.launch(double, x, out)
    p.collective("all_gather", pieces, out, stream="nodes")


def source_overwritten_beside_it(p, x, pieces, out):
    p.collective("all_gather", pieces, out, stream="nodes")
    p.launch(double, x, out)


def overwrite_the_source_of_a_peer(p, x, inbox, pieces):
    p.collective("all_gather", pieces[p.rank], inbox[p.rank], across="ranks")
    if p.rank == 1:
        p.copy(inbox[0], x)


def read_the_result_of_a_peer(p, x, inbox, pieces):
    if p.rank == 1:
        p.copy(x, pieces[0, 2])
    p.collective("all_gather", pieces[p.rank], inbox[p.rank], across="ranks")


@pytest.mark.parametrize(
    ("steps", "tensor"),
    [(overwrite_the_source_of_a_peer, "inbox[0"), (read_the_result_of_a_peer, "pieces[0")],
)
def test_other_ranks_begin_and_end_at_other_times(steps, tensor):
    """What rank 1 has received, rank 0 may still send to rank 2."""

    @tw.plan
    def plan(
        p: tw.PlanBuilder,
        x: T.Tensor((N,), "float32"),
        inbox: W.Symmetric((N,), "float32"),
        flag: W.Symmetric((1,), "uint32"),
        pieces: W.Symmetric((3, N), "float32"),
    ):
        p.write_value(flag[p.rank, 0], 1)  # the plan synchronizes explicitly
        steps(p, x, inbox, pieces)

    zeros = {"inbox": np.zeros(N, "float32"), "pieces": np.zeros((3, N), "float32")}
    with pytest.raises(tw.SimulationError) as error:
        tw.simulate(plan, 3, [i | zeros for i in inputs()[:3]], schedules=30, epochs=1)
    assert error.value.kind == "race" and tensor in error.value.report
    assert "p.collective of all_gather" in error.value.report
    assert "p.copy" in error.value.report


@pytest.mark.parametrize(
    ("steps", "tensor"),
    [
        (no_wait_before_the_reader, "pieces"),
        (no_wait_before_the_collective, "out"),
        (source_overwritten_beside_it, "out"),
    ],
)
def test_a_missing_event_is_a_race(steps, tensor):
    zeros = {"out": np.zeros(N, "float32"), "pieces": np.zeros((NODES, N), "float32")}
    with pytest.raises(tw.SimulationError) as error:
        tw.simulate(plan_of(steps), MESH, [i | zeros for i in inputs()], epochs=1)
    fault = error.value
    assert fault.kind == "race"
    assert f" of {tensor}[" in fault.report
    assert "p.collective of all_gather (step " in fault.report
    assert f"--> {line_of(steps, 'p.collective')}" in fault.report


def test_a_rank_that_does_not_take_part_is_a_deadlock():
    def steps(p, x, pieces, out):
        if (p.node, p.rank) != (1, 0):
            p.collective("all_gather", pieces, x)

    fault = fault_of(steps)
    assert fault.kind == "deadlock"
    line = line_of(steps, "p.collective")
    assert (
        "the caller's stream of group 'local' of rank 0 in launch 0 waits in p.collective of "
        f"all_gather, number 1 of group 'node', for others: not begun: rank 2 --> {line}"
    ) in fault.report
    assert "rank 2 has finished" in fault.report
    assert "of rank 1 " not in fault.report


def test_collectives_of_a_group_run_in_the_order_of_the_host():
    """Another stream does not help: NCCL runs them one after the other."""

    @tw.plan
    def plan(
        p: tw.PlanBuilder,
        x: T.Tensor((N,), "float32"),
        flag: W.Symmetric((1,), "uint32"),
        pieces: T.Tensor((NODES, N), "float32"),
        again: T.Tensor((NODES, N), "float32"),
    ):
        p.wait_value(flag[p.rank, 0], 1, stream="late")
        p.collective("all_gather", pieces, x, stream="late")
        p.collective("all_gather", again, x)
        p.write_value(flag[p.rank, 0], 1)

    given = [i | {"flag": np.zeros(1, "uint32")} for i in inputs()]
    with pytest.raises(tw.SimulationError) as error:
        tw.simulate(plan, MESH, given, epochs=1)
    assert error.value.kind == "deadlock"
    assert (
        "waits in p.collective of all_gather, number 2 of group 'node', for an earlier collective "
        "of this rank"
    ) in error.value.report


def test_a_kernel_that_occupies_all_sms_keeps_it_from_starting():
    @T.prim_func
    def wait(flag: W.Symmetric((1,), "uint32"), out: T.Tensor((N,), "float32")):
        with T.Kernel(1, threads=N) as _:
            W.wait_reached(flag[W.rank(), 0], 1)
            out[T.get_thread_binding()] = 1

    @tw.plan
    def plan(
        p: tw.PlanBuilder,
        x: T.Tensor((N,), "float32"),
        flag: W.Symmetric((1,), "uint32"),
        pieces: T.Tensor((NODES, N), "float32"),
        out: T.Tensor((N,), "float32"),
    ):
        p.launch(wait, flag, out)
        p.collective("all_gather", pieces, x, stream="nodes")
        p.write_value(flag[1 - p.rank, 0], 1, stream="nodes")

    given = [i | {"flag": np.zeros(1, "uint32")} for i in inputs()]
    assert (tw.simulate(plan, MESH, given, epochs=1, resident_blocks=2)[0]["out"] == 1).all()
    with pytest.raises(tw.SimulationError) as error:
        tw.simulate(plan, MESH, given, epochs=1, resident_blocks=1)
    assert error.value.kind == "deadlock"
    assert "p.collective of all_gather (step 2) of group 'local' in stream" in error.value.report
    assert "needs an SM" in error.value.report


def other_kind(p, x, pieces, out):
    if p.node:
        p.collective("all_reduce", pieces[0], x)
    else:
        p.collective("all_gather", pieces, x)


def other_size(p, x, pieces, out):
    size = N - p.node
    p.collective("all_reduce", out[:size], x[:size])


@pytest.mark.parametrize(
    ("steps", "texts"),
    [
        (other_kind, ("all_gather of 32", "all_reduce of 32")),
        (other_size, ("all_reduce of 32", "all_reduce of 31")),
    ],
)
def test_collectives_that_differ_between_nodes(steps, texts):
    fault = fault_of(steps)
    assert fault.kind == "arrival"
    for text in texts:
        assert f"makes p.collective of {text} elements of float32 in launch 0 --> " in fault.report
    assert "as number 1 of group 'node'; expected the same collective" in fault.report
    assert f"{__file__}:" in fault.report


def test_an_uninitialized_source():
    def steps(p, x, pieces, out):
        p.collective("all_gather", pieces, out)

    fault = fault_of(steps)
    assert fault.kind == "poison"
    assert f"reads out[0:32], which is partly uninitialized --> {line_of(steps, 'p.coll')}" in str(
        fault
    )


def test_it_is_a_span_of_the_trace():
    executable = MeshExecutable(plan_of(gather), MESH)
    machine = Case(executable, checked_inputs(executable, inputs()), 2).machine(0, 4, Recorder)
    machine.run()
    trace = machine.trace("plan", 0)
    assert isinstance(trace, Trace)
    spans = [s for s in trace.spans if s.kernel == "p.collective of all_gather"]
    assert sorted((s.rank, s.launch) for s in spans) == [(r, e) for r in range(4) for e in (0, 1)]
    line = line_of(gather, "p.collective")
    for span in spans:
        assert span.stream == "stream 'plan of local: nodes'" and span.loc == line
        assert span.end is not None and span.start < span.end
        assert all(w.op == "p.collective of all_gather" for w in span.waits)
    arrived_last = {flow.signal.span for flow in trace.flows}
    assert {s for s in spans if not s.waits} & arrived_last


def test_all_interleavings():
    @tw.plan
    def plan(p, x: T.Tensor((1,), "int32"), pieces: T.Tensor((2, 1), "int32")):
        p.collective("all_gather", pieces, x, stream="nodes")
        p.collective("all_reduce", x, x, stream="sums")

    given = [{"x": np.full(1, rank + 1, "int32")} for rank in range(2)]
    with pytest.raises(tw.SimulationError) as error:
        tw.simulate(plan, {"node": 2, "local": 1}, given, epochs=1, exhaustive=True)
    assert error.value.kind == "race"

    @tw.plan
    def ordered(p, x: T.Tensor((1,), "int32"), pieces: T.Tensor((2, 1), "int32")):
        p.collective("all_gather", pieces, x, stream="nodes")
        p.wait_stream("nodes", stream="sums")
        p.collective("all_reduce", x, x, stream="sums")

    result = tw.simulate(ordered, {"node": 2, "local": 1}, given, epochs=1, exhaustive=True)
    assert result.complete and len(result.outcomes) == 1
    (outs,) = result.outcomes
    assert [(out["x"].tolist(), out["pieces"].tolist()) for out in outs] == [([3], [[1], [2]])] * 2


def test_refused_meshes():
    plan = plan_of(gather)
    with pytest.raises(tw.TileWeaveError, match=r"expected a tw\.mesh_plan, or a tw\.plan on two"):
        tw.simulate(plan, {"node": 2})

    @tw.mesh_plan
    def step(
        m,
        x: T.Tensor((N,), "float32"),
        pieces: T.Tensor((NODES, N), "float32"),
        out: T.Tensor((N,), "float32"),
    ):
        m.call(plan, x, pieces, out, group="local", nodes="local")

    with pytest.raises(tw.TileWeaveError, match=r"nodes='local' of group='local'; expected two ax"):
        tw.simulate(step, MESH)
