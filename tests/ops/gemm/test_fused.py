"""A fused call on one rank, from the user's tensors to the kernel's arguments and back.

The heap, the plan, its checks and its copies are real; a fake multiplies.
"""

from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import tileweave as tw
from tests.groups import open_sessions
from tests.runtime.plans.fakes import FakeKernel, Ranks
from tileweave import ops
from tileweave.ops.autotune import tuner
from tileweave.ops.collectives import transport
from tileweave.ops.core import call as op_call
from tileweave.ops.core import compiled as op_cache
from tileweave.ops.core import noted, registry
from tileweave.ops.core.groups import group_of
from tileweave.ops.core.tiles import LARGE, SMALL, Choice, store_tiles
from tileweave.ops.gemm import gemm_operator, strategy
from tileweave.runtime import Plan
from tileweave.runtime.executor import calls as plan_streams
from tileweave.runtime.executor.compile_ahead import Compilation
from tileweave.runtime.host import session
from tileweave.runtime.host.heap import HeapExhausted
from tileweave.runtime.plans.parameters import parameters_of


class Multiplier(FakeKernel):
    """C is A, or what was gathered, times B, scaled and with a bias where it has these; of a
    collective, which has one rank, ``out`` is ``x``. Its arguments are as its program declares
    them."""

    def __call__(self, *arguments):
        given = dict(zip([p.name for p in parameters_of(self.program)], arguments, strict=True))
        for p in parameters_of(self.program):
            shape = tuple(given[p.name].shape)
            assert (shape[1:] if p.symmetric else shape) == p.shape
            assert given[p.name].is_contiguous() or p.symmetric
        self.log.append(str(self.program.attrs["global_symbol"]))
        if "x" in given:
            given["out"].copy_(given["x"].view(given["out"].shape))
            return
        a = given["A"] if "A" in given else given["gathered"][0]
        b = given["B"] if given["B"].shape[0] == a.shape[-1] else given["B"].t()
        if "scale_a" in given:
            a, b = a.float() * given["scale_a"], b.float() * given["scale_b"]
        given["C"].copy_((a @ b + given.get("bias", 0)).view(given["C"].shape))


FP8 = torch.float8_e4m3fn
KERNELS = {
    (ops.all_gather_matmul, "copy_engines"): "ag_gemm_copy_engine",
    (ops.all_gather_matmul, "communicating_blocks"): "ag_gemm_comm_blocks",
    (ops.all_gather_matmul, "stores"): "ag_gemm_push",
    (ops.matmul_reduce_scatter, "copy_engines"): "gemm_rs_persistent",
    (ops.matmul_reduce_scatter, "stores"): "gemm_rs_store",
    (ops.matmul_reduce_scatter, "one_shot"): "gemm_rs_one_shot",
    (ops.matmul_all_reduce, "copy_engines"): "gemm_ar_persistent",
    (ops.matmul_all_reduce, "two_shot"): "gemm_ar_two_shot",
    (ops.matmul_all_reduce, "one_shot"): "gemm_ar_one_shot",
}
"""The kernel of each operator's programs on one rank."""
OPERATORS = list(dict.fromkeys(operator for operator, _ in KERNELS))


@pytest.fixture
def on_rank(every_rank, monkeypatch):
    """Return a runner of functions on a rank with a heap; it returns their result and
    the launches."""
    world = Ranks(1, monkeypatch)

    def compiled(program, **options):
        return Multiplier(program, world.here.log)

    monkeypatch.setattr(plan_streams, "compile", compiled)
    monkeypatch.setattr(op_cache, "compile_program", compiled)
    monkeypatch.setattr(noted, "_notes", {})
    monkeypatch.setattr(op_cache, "compile_ahead", lambda programs, group, similar: len(programs))
    monkeypatch.setattr(transport, "obstacle_of_ranks", lambda *_: None)
    for module in (gemm_operator, strategy):
        monkeypatch.setattr(module, "obstacle", lambda *_: None)

    def run(function):
        def rank(group):
            world.join(group)
            open_sessions(monkeypatch, world.here.session)
            return function(), world.here.log

        (actual,) = every_rank(rank, 1)
        if isinstance(actual, Exception):
            raise actual
        return actual

    return run


@pytest.fixture
def taking(monkeypatch):
    """Make the table choose this program, whatever the cost model predicts."""

    def take(operator, program):
        kind = registry.OPERATORS[operator.__name__]
        options = kind.options

        def of_program(problem):
            choices = {c: us for c, us in options(problem).items() if c.program == program}
            return choices or {Choice(program, store_tiles(problem.itemsize)[0]): 1.0}

        monkeypatch.setattr(kind, "options", staticmethod(of_program))

    gemm_operator._choice_of_measured.cache_clear()
    yield take
    gemm_operator._choice_of_measured.cache_clear()


@pytest.mark.parametrize("given_out", [False, True], ids=["new", "out"])
@pytest.mark.parametrize("transposed", [False, True], ids=["row-major", "transposed"])
@pytest.mark.parametrize(
    ("dtype", "biased"), [(torch.bfloat16, False), (torch.float16, False), (torch.float16, True)]
)
@pytest.mark.parametrize(("operator", "program"), KERNELS)
def test_value(on_rank, taking, operator, program, dtype, biased, transposed, given_out):
    taking(operator, program)
    a, b = torch.randn(40, 16).to(dtype), torch.randn(16, 24).to(dtype)
    bias = torch.randn(24).to(dtype) if biased else None
    b = b.t().contiguous().t() if transposed else b
    out = torch.empty(40, 24, dtype=dtype) if given_out else None

    def calls():
        return [operator(a, b, bias=bias, out=out, strategy="fused") for _ in range(2)]

    results, log = on_rank(calls)
    expected = a @ b + bias if biased else a @ b
    assert all(torch.equal(c, expected) for c in results)
    assert not given_out or all(c is out for c in results)
    assert [entry for entry in log if isinstance(entry, str)] == [KERNELS[operator, program]] * 2


@pytest.mark.parametrize("out_dtype", [None, torch.float16])
@pytest.mark.parametrize(("operator", "program"), KERNELS)
def test_fp8(on_rank, taking, operator, program, out_dtype):
    taking(operator, program)
    a, b = (torch.randint(-4, 5, shape).to(FP8) for shape in ((40, 16), (32, 16)))
    wanted = out_dtype or torch.bfloat16
    given = {"bias": torch.randint(-4, 5, (32,)).to(wanted), "out_dtype": out_dtype}
    given |= {"scale_a": torch.tensor(0.5), "scale_b": torch.tensor([[0.25]])}
    (result, *rows), log = on_rank(
        lambda: [operator(a, b.t(), strategy="fused", **given)]
        + ([operator(a, b.t(), return_gathered=True, strategy="fused", **given)[1]]
           if operator is ops.all_gather_matmul else [])
    )  # fmt: skip
    assert result.dtype == wanted
    assert torch.equal(result.float(), a.float() @ b.float().t() / 8 + given["bias"].float())
    assert all(torch.equal(actual.float(), a.float()) for actual in rows)
    assert KERNELS[operator, program] in log


@pytest.mark.parametrize("program", ["copy_engines", "stores"])
def test_gathered_rows_are_a_copy(on_rank, taking, program):
    taking(ops.all_gather_matmul, program)
    a, b = torch.randn(2, 40, 16).bfloat16(), torch.randn(16, 24).bfloat16()

    def calls():
        return [ops.all_gather_matmul(x, b, return_gathered=True, strategy="fused") for x in a]

    results, _ = on_rank(calls)
    for x, (c, rows) in zip(a, results, strict=True):
        assert torch.equal(rows, x) and torch.equal(c, x @ b)


@pytest.mark.parametrize("operator", OPERATORS)
def test_tuning_keeps_the_winner_alone(on_rank, monkeypatch, operator):
    """Kernels have real programs and a real heap; a fake multiplies."""
    monkeypatch.setattr(gemm_operator, "CANDIDATES", (LARGE, SMALL))
    monkeypatch.setattr(tuner, "compile_ahead", lambda programs, group: None)
    monkeypatch.setattr(tuner, "save", lambda *_: None)
    a, b = torch.randn(40, 16).bfloat16(), torch.randn(24, 16).bfloat16().t()

    def calls():
        heap, group = session.current().heap, group_of("")
        free = heap._free.largest
        (tuned,) = ops.tune(operator, [(40, 24, 16)])
        ((_, choice), kept), *others = op_cache.op_cache_of(group).operators.items()
        c = operator(a, b, strategy="fused")
        assert list(op_cache.op_cache_of(group).operators.values()) == [kept]
        taken = free - heap._free.largest
        kept.free()
        return tuned, choice, others, c, taken, free - heap._free.largest

    (actual, choice, others, c, taken, left), _ = on_rank(calls)
    assert actual.measured.choice == choice and others == [] and left == 0
    assert (taken > 0) == (choice.program == "copy_engines")  # the fake has no hidden memory
    assert [a.reason for a in actual.attempts] == [""] * len(actual.attempts) != [""]
    table = registry.OPERATORS[operator.__name__].options(actual.problem)
    assert {a.choice.tiles for a in actual.attempts} == {LARGE, SMALL, *(c.tiles for c in table)}
    assert torch.equal(c, a @ b)


def test_each_problem_is_prepared_once_and_makes_room(on_rank, taking):
    """The heap has 2 MiB."""
    taking(ops.all_gather_matmul, "copy_engines")
    b = torch.randn(512, 24).bfloat16()

    def calls():
        saved = []
        for rows in (600, 600, 1200, 600, 800):
            ops.all_gather_matmul(torch.randn(rows, 512).bfloat16(), b, strategy="fused")
            saved.append([p.M for p, _ in op_cache.op_cache_of(group_of("")).operators])
        with pytest.raises(
            HeapExhausted, match=r"all_gather_matmul of \(4000, 512\) .* 4096000 by"
        ):
            ops.all_gather_matmul(torch.randn(4000, 512).bfloat16(), b, strategy="fused")
        return saved

    kept, _ = on_rank(calls)
    assert kept == [[600], [600], [600, 1200], [600, 1200], [600, 800]]


@pytest.mark.parametrize(
    ("op", "axes", "by", "dtype", "ran"),
    [
        (ops.all_gather, (), "copy_engine", torch.float64, ["collect_shares"]),
        (ops.all_gather, (), "ldst", torch.uint8, ["all_gather"]),
        (ops.reduce_scatter, (), "copy_engine", torch.bfloat16, ["add_partials"]),
        (ops.reduce_scatter, (), "ldst", torch.float16, ["reduce_scatter"]),
        (ops.all_reduce, (), "copy_engine", torch.float32, ["add_and_share"]),
        (ops.all_reduce, (), "ldst", torch.bfloat16, ["all_reduce_one_shot"]),
        (ops.all_to_all, (0, 1), "ldst", torch.bool, ["all_to_all"]),
    ],
)
def test_exchange(on_rank, op, axes, by, dtype, ran):
    """One rank receives its own input, through symmetric memory if copy engines move it."""
    x = torch.randint(0, 2, (16, 8, 32)).to(dtype)

    def calls():
        out = torch.zeros_like(x)
        return [op(x, *axes, transport=by), op(x, *axes, out=out, transport=by)]

    results, log = on_rank(calls)
    assert all(torch.equal(actual, x) for actual in results)
    assert [entry for entry in log if isinstance(entry, str)] == ran * 2


def test_an_exchange_that_does_not_fit_leaves_nothing(on_rank):
    """The heap has 2 MiB: two tensors of 1.5 MB do not fit."""
    x = torch.ones(3 << 17)

    def calls():
        with pytest.raises(HeapExhausted, match=r"all_reduce of \(393216,\) float32: "):
            ops.all_reduce(x, transport="copy_engine")
        return ops.all_gather(x, transport="copy_engine")

    actual, _ = on_rank(calls)
    assert torch.equal(actual, x)


def test_products_that_do_not_fit_leave_nothing(on_rank, taking):
    """The heap has 2 MiB: the gathered rows fit, the products do not."""
    taking(ops.matmul_reduce_scatter, "copy_engines")
    b = torch.randn(8, 1024).bfloat16()

    def calls():
        heap = session.current().heap
        free = heap._free.largest
        with pytest.raises(HeapExhausted, match=r"matmul_reduce_scatter of \(640, 8\) "):
            ops.matmul_reduce_scatter(torch.randn(640, 8).bfloat16(), b, strategy="fused")
        return free, heap._free.largest

    (before, after), _ = on_rank(calls)
    assert before == after


def test_room_is_made_for_what_kernels_of_plans_hide(on_rank, taking, monkeypatch):
    """The heap has 2 MiB, of which each kernel uses 1.2 MB of implicit memory."""
    taking(ops.all_gather_matmul, "copy_engines")
    compiled = plan_streams.compile

    def hiding(program, **options):
        made = compiled(program, **options)
        if parameters_of(program):
            made.implicit = {"held": session.current().heap.allocate((1200000,), torch.uint8)}
        return made

    monkeypatch.setattr(plan_streams, "compile", hiding)
    b = torch.randn(16, 24).bfloat16()

    def calls():
        saved = []
        for rows in (40, 48, 40):
            a = torch.randn(rows, 16).bfloat16()
            assert torch.equal(ops.all_gather_matmul(a, b, strategy="fused"), a @ b)
            saved.append([p.M for p, _ in op_cache.op_cache_of(group_of("")).operators])
        return saved

    kept, _ = on_rank(calls)
    assert kept == [[40], [48], [40]]


def test_graphs_record_what_needs_no_branch(on_rank, taking, monkeypatch):
    """A kernel and copies that wait for each other are two unordered branches of a graph."""
    taking(ops.matmul_reduce_scatter, "copy_engines")
    a, b = torch.randn(40, 16).bfloat16(), torch.randn(16, 24).bfloat16()
    together = []
    monkeypatch.setattr(op_cache, "compile_ahead", lambda p, group, similar: together.append(p))

    def call():
        return ops.matmul_reduce_scatter(a, b, strategy="fused")

    def calls():
        results = [call()]
        with monkeypatch.context() as captured:
            for module in (gemm_operator, op_cache, op_call):
                captured.setattr(module, "capturing", lambda: True)
            results.append(call())
        return [*results, call()]

    results, log = on_rank(calls)
    assert all(torch.equal(actual, a @ b) for actual in results)
    ran = [entry for entry in log if isinstance(entry, str)]
    assert ran == ["gemm_rs_persistent", "gemm_rs_store", "gemm_rs_persistent"]
    kinds = [[type(p).__name__ for p in programs] for programs in together]
    assert kinds == [["Plan", "PrimFunc"], ["PrimFunc"]]


class Layer(torch.nn.Module):
    """Two products, whose gradients need two others; the input of the first layer has none."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up = torch.nn.Parameter(torch.randn(16, hidden).bfloat16())
        self.down = torch.nn.Parameter(torch.randn(hidden, 16).bfloat16())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = ops.all_gather_matmul(x, self.up, strategy="fused")
        return ops.matmul_reduce_scatter(hidden, self.down, strategy="fused")


def named(programs) -> set[str]:
    return {
        " ".join([str(getattr(p, "name", "")), *(f"{q.name}{q.extents}" for q in parameters)])
        for p in programs
        for parameters in [p.parameters if isinstance(p, Plan) else parameters_of(p)]
    }


@pytest.fixture
def layers(on_rank, taking, monkeypatch):
    """Return two layers, an input, and the programs that are compiled together, by name."""
    taking(ops.all_gather_matmul, "copy_engines")
    taking(ops.matmul_reduce_scatter, "stores")
    monkeypatch.setattr(noted, "_notes", {})
    together: list[set[str]] = []

    def compile_ahead(programs, group, similar, waits=True, later=()):
        together.append(named(programs))
        assert [*similar()]
        return Compilation(len(together[-1]))

    monkeypatch.setattr(op_cache, "compile_ahead", compile_ahead)
    model = torch.nn.Sequential(Layer(24), Layer(40))
    return model, torch.randn(32, 16).bfloat16(), together


TRACERS = {
    "compile": lambda model: torch.compile(model, backend="aot_eager", dynamic=False),
    "symbolic": lambda model: torch.compile(model, backend="aot_eager", dynamic=True),
}


@pytest.mark.parametrize("tracer", TRACERS)
def test_what_is_traced_is_compiled_together(on_rank, layers, tracer):
    """The first call compiles forward and gradients of all layers; later calls nothing new."""
    model, x, together = layers

    def step():
        torch.compiler.reset()
        TRACERS[tracer](model)(x).float().sum().backward()

    on_rank(step)
    first, *others = together
    assert len(first) == 7 and all(other < first for other in others)
    assert all(p.grad is not None for p in model.parameters())


def test_a_trace_alone_compiles_nothing(on_rank, layers):
    model, x, together = layers
    on_rank(lambda: make_fx(model, tracing_mode="fake", _allow_non_fake_inputs=True)(x))
    assert together == [] and noted.noted_groups() == [""]


STEPS = {
    "module": lambda model: model,
    "loss": lambda model: lambda x: {"loss": model(x).float().sum()},
    "backward": lambda model: lambda x: model(x).float().sum().backward(),
    "compiled": lambda model: torch.compile(model),
}


@pytest.mark.parametrize("step", STEPS)
def test_a_step_is_prepared(on_rank, layers, step):
    model, x, together = layers

    def calls():
        count = tw.prepare(STEPS[step](model), x).kernels
        assert all(p.grad is None for p in model.parameters())
        assert not op_cache.op_cache_of(group_of("")).operators and len(together) == 1
        model(x).float().sum().backward()
        return count

    count, _ = on_rank(calls)
    first, *others = together
    assert count == len(first) == 7 and all(other < first for other in others)
    assert all(p.grad is not None for p in model.parameters())


def test_a_step_without_gradients_is_prepared(on_rank, layers):
    model, x, together = layers

    @torch.no_grad()
    def calls():
        return tw.prepare(model, x).kernels, tw.prepare(model, x).kernels

    assert on_rank(calls)[0] == (4, 4) and together[0] == together[1]


def test_a_step_that_needs_values_is_refused(on_rank, layers):
    model, x, _ = layers
    expected = r"prepare: aten._local_scalar_dense.default needs values of .*; expected a function"
    with pytest.raises(tw.TileWeaveError, match=expected):
        on_rank(lambda: tw.prepare(lambda x: model(x).sum().item(), x))
    with pytest.raises(ZeroDivisionError):
        on_rank(lambda: tw.prepare(lambda x: 1 // 0, x))
    assert torch.autograd.backward.__module__ == "torch.autograd"
