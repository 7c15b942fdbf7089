"""Plans of several groups of a mesh on simulated ranks."""

import re
from dataclasses import replace

import numpy as np
import pytest
import tilelang.language as T

import tileweave as tw
from tests.simulator.machine.checks import line_of
from tileweave import language as W
from tileweave.ops.collectives.all_gather import all_gather_plan, all_gather_program
from tileweave.ops.collectives.vectors import Lines
from tileweave.ops.core.gemm_config import GemmConfig
from tileweave.ops.core.tiles import Tiles
from tileweave.ops.gemm.matmul_reduce_scatter import MatmulReduceScatter
from tileweave.runtime.plans.parameters import parameters_of
from tileweave.runtime.trace.trace import Trace
from tileweave.simulator.case import Case
from tileweave.simulator.inputs.inputs import checked_inputs
from tileweave.simulator.machine.mesh import MeshExecutable
from tileweave.simulator.report.timeline import Recorder

MESH = {"cp": 2, "tp": 2}
N = 32


@T.prim_func
def ring(
    x: T.Tensor((N,), "float32"),
    mail: W.Symmetric((2, N), "float32"),
    flags: W.Symmetric((2,), "int32"),
    state: T.Tensor((1,), "int32"),
    out: T.Tensor((N,), "float32"),
):
    """Add x and the x of the left neighbor."""
    with T.Kernel(1, threads=N) as _:
        me, ranks = W.rank(), W.world_size()
        right, left = (me + 1) % ranks, (me + ranks - 1) % ranks
        epoch = T.alloc_var("int32")
        epoch = state[0]
        W.wait_reached(flags[me, 1], epoch - 1)
        for i in T.Parallel(N):
            mail[right, epoch % 2, i] = x[i]
        W.signal(flags[right, 0])
        W.wait_reached(flags[me, 0], epoch + 1)
        for i in T.Parallel(N):
            out[i] = mail[me, epoch % 2, i] + x[i]
        W.signal(flags[left, 1])
        T.sync_threads()
        if T.get_thread_binding() == 0:
            state[0] = epoch + 1


def of_two_groups(steps):
    """Return the mesh plan of ``steps(m, tp, cp, x, y, z)``, where ``tp(a, b)`` and ``cp(a, b)``
    call ``ring`` from tensor ``a`` to tensor ``b``."""

    @tw.mesh_plan
    def plan(
        m: tw.MeshBuilder,
        x: T.Tensor((N,), "float32"),
        y: T.Tensor((N,), "float32"),
        z: T.Tensor((N,), "float32"),
        tp_mail: W.Symmetric((2, N), "float32"),
        tp_flags: W.Symmetric((2,), "int32"),
        tp_state: T.Tensor((1,), "int32"),
        cp_mail: W.Symmetric((2, N), "float32"),
        cp_flags: W.Symmetric((2,), "int32"),
        cp_state: T.Tensor((1,), "int32"),
    ):
        def tp(x, out, **options):
            m.call(ring, x, tp_mail, tp_flags, tp_state, out, group="tp", **options)

        def cp(x, out, **options):
            m.call(ring, x, cp_mail, cp_flags, cp_state, out, group="cp", **options)

        steps(m, tp, cp, x, y, z)

    return plan


def inputs():
    """Return inputs whose sums show which ranks were added."""
    words = {
        f"{axis}_{name}": np.zeros(size, "int32")
        for axis in MESH
        for name, size in (("flags", 2), ("state", 1))
    }
    data = {name: np.zeros(N, "float32") for name in "yz"}
    return [{"x": np.full(N, 10.0**rank, "float32"), **data, **words} for rank in range(4)]


def simulated(steps, **options):
    return tw.simulate(of_two_groups(steps), MESH, inputs(), **{"schedules": 6, **options})


def fault_of(steps, **options):
    with pytest.raises(tw.SimulationError) as error:
        simulated(steps, **options)
    return error.value


def tp_then_cp(stream=None, **options):
    def steps(m, tp, cp, x, y, z):
        tp(x, y)
        cp(y, z, stream=stream, **options)

    return steps


@pytest.mark.parametrize("stream", [None, "side"])
def test_sums_along_both_axes(stream):
    for rank, out in enumerate(simulated(tp_then_cp(stream))):
        assert (out["y"] == (11, 11, 1100, 1100)[rank]).all()
        assert (out["z"] == 1111).all()


def test_a_group_of_all_ranks():
    @tw.mesh_plan
    def plan(
        m,
        x: T.Tensor((N,), "float32"),
        mail: W.Symmetric((2, N), "float32"),
        flags: W.Symmetric((2,), "int32"),
        state: T.Tensor((1,), "int32"),
        out: T.Tensor((N,), "float32"),
    ):
        m.call(ring, x, mail, flags, state, out, group=None)

    given = [
        {"x": i["x"], "flags": i["tp_flags"], "state": i["tp_state"]} for i in inputs()
    ]  # fmt: skip
    outs = [out["out"][0] for out in tw.simulate(plan, MESH, given, schedules=3)]
    assert outs == [1001, 11, 110, 1100]


def in_other_order(m, tp, cp, x, y, z, **options):
    """Call tp first on ranks 0 and 3, cp first on ranks 1 and 2."""
    if m.coordinate("cp") == m.coordinate("tp"):
        tp(x, y)
        cp(x, z, **options)
    else:
        cp(x, z, **options)
        tp(x, y)


@pytest.mark.parametrize("stream", [None, "side"])
def test_ranks_that_call_in_different_orders_deadlock(stream):
    fault = fault_of(lambda *args: in_other_order(*args, stream=stream))
    assert fault.kind == "deadlock"
    where = "" if stream is None else f" of stream {stream!r}"
    for rank, group in enumerate(("tp", "cp", "cp", "tp")):
        place = where if group == "cp" else ""
        assert f"rank {rank}, block 0 (0) of group {group!r}{place} in launch 0 waits" in str(fault)
    line = line_of(of_two_groups, "m.call(ring, x, cp_mail")
    assert f"p.launch of ring (step 1) of group 'cp' has not started --> {line}" in str(fault)


def test_unordered_groups_deadlock_only_without_sms():
    def steps(*args):
        in_other_order(*args, stream="side", ordered=False)

    assert [out["z"][0] for out in simulated(steps)] == [101, 1010, 101, 1010]
    fault = fault_of(steps, resident_blocks=1)
    assert fault.kind == "deadlock" and "1 fit at a time (resident_blocks)" in fault.report


def test_unordered_read_of_another_group_is_a_race():
    fault = fault_of(tp_then_cp("side", ordered=False), schedules=20)
    assert fault.kind == "race"
    assert " of y[0..31] by rank " in fault.report
    assert ", block 0 of group 'tp', all threads" in fault.report
    assert ", block 0 of group 'cp' of stream 'side', all threads" in fault.report


def test_wait_stream_orders_what_the_runtime_does_not():
    def steps(m, tp, cp, x, y, z):
        tp(x, y)
        m.wait_stream(None, stream="side")
        cp(y, z, stream="side", ordered=False)
        m.wait_stream("side")

    assert all(out["z"][0] == 1111 for out in simulated(steps))


@pytest.mark.parametrize("ordered", [True, False])
def test_the_runtime_orders_calls_of_one_group_on_two_streams(ordered):
    def steps(m, tp, cp, x, y, z):
        tp(x, y)
        tp(y, z, stream="side", ordered=ordered)

    if ordered:
        sums = [out["z"][0] for out in simulated(steps, schedules=20)]
        assert sums == [22, 22, 2200, 2200]
    else:
        assert fault_of(steps, schedules=20).kind in ("race", "reuse")


def test_replay_of_the_next_call_may_not_overtake():
    """The reader of y on the side stream is not ordered with the writer of the next launch."""

    def steps(m, tp, cp, x, y, z):
        tp(x, y)
        m.wait_stream(None, stream="side")
        cp(y, z, stream="side", ordered=False)

    assert fault_of(steps, schedules=20).kind == "reuse"


def test_transfers_have_ranks_of_the_mesh():
    executable = MeshExecutable(of_two_groups(tp_then_cp("side")), MESH)
    case = Case(executable, checked_inputs(executable, inputs()), 2)
    machine = case.machine(0, 4, Recorder)
    machine.run()
    trace = machine.trace("plan", 0)
    assert isinstance(trace, Trace)
    pairs = {(t.span.rank, t.peer, t.tensor) for t in trace.transfers if t.tensor[3:] == "mail"}
    tp = {(rank, rank ^ 1, "tp_mail") for rank in range(4)}
    assert pairs == tp | {(rank, rank ^ 2, "cp_mail") for rank in range(4)}


def test_barriers_meet_the_ranks_of_the_group():
    @T.prim_func
    def meet(value: W.Symmetric((1,), "int32"), out: T.Tensor((1,), "int32")):
        with T.Kernel(1, threads=32) as _:
            me = W.rank()
            if T.get_thread_binding() == 0:
                value[1 - me, 0] = 10 + me
            W.sync_ranks()
            if T.get_thread_binding() == 0:
                out[0] = value[me, 0]
            W.sync_ranks()

    @tw.mesh_plan
    def plan(
        m,
        v: W.Symmetric((1,), "int32"),
        w: W.Symmetric((1,), "int32"),
        a: T.Tensor((1,), "int32"),
        b: T.Tensor((1,), "int32"),
    ):
        m.call(meet, v, a, group="tp")
        m.call(meet, w, b, group="cp", stream="side")

    outs = tw.simulate(plan, MESH, schedules=5)
    assert [(out["a"][0], out["b"][0]) for out in outs] == [(11, 11), (10, 11), (11, 10), (10, 10)]


def plan_of(calls):
    """Return the mesh plan of calls: program, group, stream, and the tensors of its parameters if
    these have other names. Each call has symmetric tensors of its own."""
    tensors, arguments = {}, []
    for number, (program, *_, names) in enumerate(calls):
        of = program.parameters if isinstance(program, tw.Plan) else parameters_of(program)
        renamed = [
            replace(p, name=f"{p.name}_{number}" if p.symmetric else names.get(p.name, p.name))
            for p in of
        ]
        tensors |= {p.name: p for p in renamed}
        arguments.append([p.name for p in renamed])

    def body(m, *args):
        by_name = dict(zip(tensors, args, strict=True))
        for (program, group, stream, _), own in zip(calls, arguments, strict=True):
            m.call(program, *(by_name[name] for name in own), group=group, stream=stream)

    return tw.MeshPlan("plan", list(tensors.values()), body, "plan")


@pytest.mark.filterwarnings("ignore:.*never waited for:tileweave.SimulationWarning")
@pytest.mark.parametrize(
    ("way", "transport"),
    [
        ("stores", "copy_engine"),
        pytest.param("copy_engines", "ldst", marks=pytest.mark.long),
        pytest.param("copy_engines", "copy_engine", marks=pytest.mark.long),
        pytest.param("one_shot", "tma", marks=pytest.mark.long),
    ],
)
def test_operators_of_two_groups(way, transport):
    """A product is reduced along tp, and its rows are gathered along cp and along tp."""
    M, columns, K = 32, 16, 32
    tiles = Tiles(16, 16, 16, stages=2, threads=32, group_m=1)
    config = GemmConfig(M, columns, K, 2, "float16", False, tiles, False, "float16")
    product = MatmulReduceScatter.programs[way](config)
    lines = Lines.of(M // 2 * columns, "float16", columns, 128)
    if transport == "copy_engine":
        gather = all_gather_plan(lines, 2, [slice(0, lines.rows)], None)
    else:
        gather = all_gather_program(lines, 2, transport)
    plan = plan_of([
        (product, "tp", None, {"C": "x"}),
        (gather, "cp", "gather", {}),
        (gather, "tp", None, {"out": "again"}),
    ])  # fmt: skip
    rng = np.random.default_rng(0)
    given = [
        {
            "A": rng.integers(-4, 5, (M, K)).astype(np.float16),
            "B": rng.integers(-4, 5, (K, columns)).astype(np.float16),
        }
        for _ in range(4)
    ]
    if any(p.name == "identity" for p in plan.parameters):
        given = [values | {"identity": np.eye(16, dtype=np.float16)} for values in given]
    outs = tw.simulate(plan, MESH, given, schedules=2, epochs=3, resident_blocks=16)
    parts = [i["A"].astype(np.float32) @ i["B"].astype(np.float32) for i in given]
    sums = [parts[0] + parts[1], parts[2] + parts[3]]
    rows = [sums[rank // 2].reshape(2, M // 2, columns)[rank % 2] for rank in range(4)]
    for rank, out in enumerate(outs):
        assert np.array_equal(out["out"], np.stack([rows[rank % 2], rows[rank % 2 + 2]]))
        first = rank - rank % 2
        assert np.array_equal(out["again"], np.stack(rows[first : first + 2]))


REFUSED = {
    "axis 'dp'; expected one of cp, tp": lambda m, x, own: m.call(ring, *own, x, group="dp"),
    "axis 'dp'; expected": lambda m, x, own: m.coordinate("dp"),
    "mail=mail is a tensor of group 'tp'; expected one of group 'cp'": lambda m, x, own: (
        m.call(ring, *own, x, group="tp"),
        m.call(ring, *own, x, group="cp"),
    ),
    "rank 1 uses mail with group 'cp'; expected 'tp'": lambda m, x, own: m.call(
        ring, *own, x, group="cp" if m.rank else "tp"
    ),
    "4 arguments; expected 5": lambda m, x, own: m.call(ring, *own, group="tp"),
    "program=3; expected a tw.plan or a T.prim_func": lambda m, x, own: m.call(3, group="tp"),
    "out=state[0:1] of int32; expected float32": lambda m, x, own: m.call(
        ring, *own, own[3], group="tp"
    ),
    "other='side' has no steps": lambda m, x, own: m.wait_stream("side"),
}


@pytest.mark.parametrize("message", REFUSED)
def test_refused_calls(message):
    @tw.mesh_plan
    def plan(
        m,
        x: T.Tensor((N,), "float32"),
        mail: W.Symmetric((2, N), "float32"),
        flags: W.Symmetric((2,), "int32"),
        state: T.Tensor((1,), "int32"),
    ):
        REFUSED[message](m, x, (x, mail, flags, state))

    with pytest.raises(tw.TileWeaveError, match=re.escape(message)):
        tw.simulate(plan, MESH)


def test_refused_meshes():
    plan = of_two_groups(tp_then_cp())
    for program, mesh, message in (
        (plan, 4, "on 4 ranks; expected the axes of a mesh"),
        (ring, MESH, "ring on a mesh; expected a tw.mesh_plan"),
        (plan, {"tp": 0}, "axis 'tp' of size 0; expected a name, and an integer from 1 on"),
        (plan, {"": 2}, "axis '' of size 2"),
        (plan, {}, "world_size=0"),
    ):
        with pytest.raises(tw.TileWeaveError, match=re.escape(message)):
            tw.simulate(program, mesh)


@pytest.mark.long
def test_device_functions_of_two_groups():
    assert all(out["z"][0] == 1111 for out in simulated(tp_then_cp("side"), level="device"))


@pytest.mark.long
def test_all_interleavings_of_two_groups():
    @tw.mesh_plan
    def plan(
        m,
        tp: W.Symmetric((1,), "int32"),
        cp: W.Symmetric((1,), "int32"),
        out: T.Tensor((1,), "int32"),
    ):
        m.call(post, tp, out, group="tp")
        m.call(post, cp, out, group="cp", stream="side")

    @T.prim_func
    def post(word: W.Symmetric((1,), "int32"), out: T.Tensor((1,), "int32")):
        with T.Kernel(1, threads=1) as _:
            me, ranks = W.rank(), W.world_size()
            W.signal(word[(me + 1) % ranks, 0])
            W.wait_reached(word[me, 0], 1)
            out[0] = out[0] + ranks

    given = [{"tp": np.zeros(1, "int32"), "cp": np.zeros(1, "int32"), "out": np.zeros(1, "int32")}]
    result = tw.simulate(plan, {"cp": 1, "tp": 2}, given * 2, epochs=1, exhaustive=True)
    assert result.complete and [[out["out"][0] for out in outs] for outs in result.outcomes] == [
        [3, 3]
    ]
