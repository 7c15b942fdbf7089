"""``pass_configs`` of a plan reach its kernels, whether a call, explain or the simulator compiles
them."""

import re

import numpy as np
import pytest
import tilelang.language as T
from tvm import tirx

import tileweave as tw
from tests.corpus import PROGRAMS
from tileweave.builtins.spec import builtin_of
from tileweave.cli.main import main
from tileweave.passes.ir.walk import builtins_in, nodes_in, op_name
from tileweave.runtime.kernel.configured import configured
from tileweave.runtime.plans.parameters import parameters_of
from tileweave.runtime.plans.steps import Launch
from tileweave.simulator import Executable
from tileweave.simulator.device.lowering import lowered as device_functions
from tileweave.simulator.frontend.program import lowered

RANKS, HERE = 2, f"{__file__}:1"


def all_gather(**options) -> tw.Plan:
    """Return a plan of copies beside a GEMM, with these TileWeave options."""
    plan = PROGRAMS["all_gather_gemm"].make(RANKS)
    return plan.with_configs({f"tileweave.{name}": value for name, value in options.items()})


def reduce_scatter(**options) -> tw.Plan:
    """Return a plan of one kernel that exchanges data with its peers."""
    program = PROGRAMS["gemm_reduce_scatter"].make(RANKS)
    plan = tw.Plan(
        "plan", list(parameters_of(program)), lambda p, *given: p.launch(program, *given), HERE
    )
    return plan.with_configs({f"tileweave.{name}": value for name, value in options.items()})


def names_in(plan: tw.Plan) -> list[str]:
    """Return the builtins in the kernels that the simulator runs."""
    steps = plan.trace(0, RANKS, {p.name: p.shape for p in plan.parameters}, {})
    kernels = [lowered(s.program, RANKS) for s in steps if isinstance(s, Launch) and s.number > 0]
    return [builtin_of(c).name for k in kernels for c in builtins_in(k.body)]


@pytest.mark.parametrize("make", [all_gather, reduce_scatter])
def test_delays_at_the_waits_of_its_kernels(make):
    without, delayed = names_in(make()), names_in(make(delays=3))
    waits = sum(name.startswith("wait") for name in without)
    assert delayed.count("delay") >= waits > 0
    assert [name for name in delayed if name != "delay"] == without


def test_a_plan_with_delays_is_right():
    case = PROGRAMS["all_gather_gemm"]
    inputs = case.inputs(np.random.default_rng(0), RANKS)
    out = tw.simulate(all_gather(delays=3), RANKS, inputs)
    for rank, expected in enumerate(case.expected(inputs)):
        np.testing.assert_array_equal(out[rank]["C"], expected["C"])


def test_explain_uses_options():
    """Options of the caller take precedence over those of the plan."""
    granule = {"parts": [16, 32]}
    for actual in (
        tw.explain(reduce_scatter(granule=granule), RANKS),
        tw.explain(reduce_scatter(), RANKS, {"tileweave.granule": granule}),
        tw.explain(reduce_scatter(granule={}), RANKS, {"tileweave.granule": granule}),
    ):
        assert {o.granule for o in actual.ops if o.kind == "signal" and o.granule} == {"16 x 32"}
    assert "credit" in tw.explain(reduce_scatter(reuse="credit"), RANKS).reuse["parts"]
    assert tw.explain(all_gather(verify="off"), RANKS).ops == ()


def test_simulate_heeds_them():
    inputs = PROGRAMS["all_gather_gemm"].inputs(np.random.default_rng(0), RANKS)
    off = {"tileweave.verify": "off"}
    with pytest.raises(tw.SimulationError):
        tw.simulate(all_gather(), RANKS, inputs, pass_configs=off)
    with pytest.raises(tw.SimulationError):
        tw.simulate(all_gather(verify="off"), RANKS, inputs)


def test_refused_with_what_an_option_makes_of_it():
    with pytest.raises(
        tw.LanguageError, match="two copies write parts of a region that is read at once"
    ):
        tw.explain(all_gather(granule={"gathered": [32, 32]}), RANKS)


@pytest.mark.parametrize(
    ("configs", "message"),
    [
        ({"tileweave.delay": 3}, "pass_configs: tileweave.delay; expected tileweave.reuse, tilew"),
        ({"tileweave.reuse": "never"}, "pass_configs: tileweave.reuse='never'; expected 'auto' or"),
        ({"tl.no_wgmma": 1}, "pass_configs: tl.no_wgmma; expected an option of TileLang, such as"),
        ({"tl.disable_wgmma": "no"}, "pass_configs: tl.disable_wgmma='no'; Expect config"),
    ],
)  # fmt: skip
def test_options_that_there_are_not(configs, message):
    with pytest.raises(tw.TileWeaveError, match=re.escape(message)):

        @tw.plan(pass_configs=configs)
        def never(p: tw.PlanBuilder, A: T.Tensor((4,), "int32")):
            """Nothing."""

    with pytest.raises(tw.TileWeaveError, match=re.escape(message)):
        tw.simulate(all_gather(), RANKS, pass_configs=configs)


def test_a_program_stays_one_program():
    """A program that is launched twice and traced twice is compiled once."""

    @T.prim_func
    def step(x: T.Tensor((4,), "int32")):
        with T.Kernel(1, threads=32):
            x[0] = 1

    @tw.plan(pass_configs={"tileweave.delays": 1})
    def twice(p: tw.PlanBuilder, x: T.Tensor((4,), "int32"), n: T.int32):
        p.launch(step, x)
        p.launch(step, x)

    traces = [twice.trace(rank, RANKS, {"x": (4,)}, {"n": rank}) for rank in range(RANKS)]
    launched = [s for steps in traces for s in steps]
    assert len(launched) == 4
    assert all(s.program is launched[0].program and s.kernel is step for s in launched)
    assert launched[0].program is not step


KERNEL_OF_A_PLAN = """
import tilelang.language as T
import tileweave as tw
from tileweave import language as W

@T.prim_func
def read(S: W.Symmetric((4, 8), "float32"), Y: T.Tensor((4, 8), "float32")):
    with T.Kernel(4, threads=32) as row:
        tile = T.alloc_shared((1, 8), "float32")
        T.copy(S[W.rank(), row, 0], tile)
        T.copy(tile, Y[row, 0])

@tw.plan(pass_configs={"tileweave.delays": 1})
def gather(p, A: T.Tensor((1, 8), "float32"), S: W.Symmetric((4, 8), "float32"),
           Y: T.Tensor((4, 8), "float32")):
    for peer in range(4):
        p.copy(S[peer, p.rank : p.rank + 1], A)
    p.launch(read, S, Y)
"""


def test_the_command_line(tmp_path, capsys):
    """``--config`` applies to plans, too; their kernels do not run a second time by themselves."""
    path = tmp_path / "gather.py"
    path.write_text(KERNEL_OF_A_PLAN)
    arguments = [str(path), "--schedules", "1", "--epochs", "2"]
    assert main(["simulate", *arguments]) == 0
    assert capsys.readouterr().out == "gather: 1 schedules of 4 ranks, no fault\n"
    assert main(["explain", str(path), "--config", "tileweave.resident_blocks=8"]) == 0
    assert capsys.readouterr().out.startswith("gather, 4 ranks\n")
    with pytest.raises(SystemExit):
        main(["simulate", *arguments, "--config", "tileweave.verify=off"])
    assert "gather: " in capsys.readouterr().out


def test_executables_know_what_the_plan_says():
    plan = all_gather(delays=1)
    run = Executable(plan, RANKS)
    call = run.call(0, 0, {p.name: p.shape for p in plan.parameters}, {})
    launches = [s for s, _ in call.steps if isinstance(s, Launch)]
    assert run.launched == {id(s.kernel) for s in launches}
    assert all(s.kernel is not s.program for s in launches if s.number > 0)


@pytest.mark.parametrize("planned", [False, True])
def test_options_of_tilelang_reach_the_device_function(planned):
    """Without warp specialization, TileLang copies tiles by ``cp.async``."""

    def copies(configs: dict[str, bool]) -> set[str]:
        if planned:
            programs = reduce_scatter().with_configs(configs).kernels(RANKS)
        else:
            program = PROGRAMS["gemm_reduce_scatter"].make(RANKS)
            programs = [configured("simulate", program, configs)]
        kernels = [k for p in programs for k in device_functions(p, RANKS, "sm_90a").kernels]
        names = {op_name(call) for kernel in kernels for call in nodes_in(kernel.body, tirx.Call)}
        return names & {"tl.tma_load", "tl.ptx_cp_async"}

    assert copies({}) == {"tl.tma_load"}
    assert copies({"tl.disable_warp_specialized": True}) == {"tl.ptx_cp_async"}


def test_options_that_a_program_cannot_hold():
    configs = {"tl.disable_wgmma": tirx.IntImm("bool", 1)}
    with pytest.raises(tw.TileWeaveError, match="expected a bool, a number, a string, or lists"):
        tw.simulate(PROGRAMS["gemm_reduce_scatter"].make(RANKS), RANKS, pass_configs=configs)
