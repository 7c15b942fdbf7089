"""Programs that are compiled for each set of sizes: time of compilation, refusals and caches.

The compiler is a fake, and ranks are threads; sizes, arguments and agreement are real.
"""

import types

import pytest
import tilelang.language as T
import torch

import tileweave as tw
from tests.corpus import PROGRAMS
from tests.groups import open_sessions
from tileweave import language as W
from tileweave.passes import dynamic_sizes, needs_sizes, specialize_sizes
from tileweave.passes.ir.sizes import sizes_of
from tileweave.runtime import compiler
from tileweave.runtime.executor import calls as plan_streams
from tileweave.runtime.executor.recorded_calls import RecordedCall
from tileweave.runtime.kernel import dynamic as dynamic_kernel
from tileweave.runtime.kernel.dynamic import CallOrder, DynamicKernel
from tileweave.runtime.kernel.kernel import Kernel

RANKS, N = 2, 32
PROGRAM = PROGRAMS["dynamic_shift"].make(RANKS)


class Compiled(Kernel):
    """Compiled program that records its calls; nothing runs."""

    def __init__(self, program, implicit=()):
        super().__init__(None, program, dict(implicit))
        self.calls, self.freed = 0, False

    def __call__(self, *args, **kwargs):
        self.calls += 1
        return sizes_of(self.program)

    def free(self):
        self.freed = True


@pytest.fixture
def made(monkeypatch):
    """Record compilations and enqueued barriers in order, as sizes and words."""
    log = []

    def compiled(program, options, session, similar):
        log.append(sizes_of(program))
        return Compiled(program)

    monkeypatch.setattr(dynamic_kernel, "compile_kernel", compiled)
    monkeypatch.setattr(dynamic_kernel, "barrier_in", lambda session: log.append("barrier"))
    return log


def session_of(group=None):
    alone = types.SimpleNamespace(world_size=RANKS, exchange=lambda topic, value: [value] * RANKS)
    return types.SimpleNamespace(group=group or alone)


def arguments(m, **others):
    shapes = {"X": (m, N), "S": (RANKS, m, N), "Y": (m, N)} | others
    return [torch.empty(shape) for shape in shapes.values()]


def dynamic(program=PROGRAM, out_idx=None, group=None):
    return DynamicKernel(program, {"out_idx": out_idx}, session_of(group))


def test_each_size_is_compiled_once_and_kept_apart(made):
    f = dynamic()
    for m in (20, 20, 3, 20):
        assert f(*arguments(m)) == {"M": m}
    assert made == [{"M": 20}, {"M": 3}, "barrier", "barrier"]
    assert [k.calls for k in f.kernels.values()] == [3, 1]
    assert repr(f) == "kernel program for each M, compiled for 2 so far"


def test_sizes_compiled_ahead(made):
    f = dynamic()
    ahead = f.at(M=20)
    f(*arguments(20))
    assert (made, ahead.calls, f.at(M=20)) == ([{"M": 20}], 1, ahead)


def test_named_arguments_and_outputs(made):
    X, S, Y = arguments(20)
    assert dynamic()(X, Y=Y, S=S) == {"M": 20}
    assert dynamic(out_idx=[2])(X, S) == {"M": 20}


def test_free_gives_back_all_sizes(made):
    f = dynamic()
    kernels = [f.at(M=20), f.at(M=3)]
    f.free()
    assert [k.freed for k in kernels] == [True, True]
    assert f.kernels == {}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda f: f.at(), "program: no size for M, on which its synchronization depends"),
        (lambda f: f.at(M=20, K=3), "program: size K=3; expected M"),
        (lambda f: f.at(M=0), "program: size M=0; expected an integer from 1 to"),
        (lambda f: f.at(M=2.5), "program: size M=2.5; expected an integer from 1 to"),
        (lambda f: f.at(M=1 << 31), "size M=2147483648; expected an integer from 1 to 2147483647"),
        (lambda f: tw.emit(PROGRAM, sizes=[3]), "program: sizes=[3]; expected a dict"),
        (lambda f: f(*arguments(20, X=(1, 20, N))), "X has shape (1, 20, 32); expected 2 axes"),
        (lambda f: f(*arguments(20, Y=(24, N))),
         "program: Y has shape (24, 32); expected (20, 32) for M=20"),
        (lambda f: f(*arguments(20, S=(RANKS, 24, N))), "program: S has shape (24, 32); expected "
         "(20, 32)"),
        (lambda f: f(*arguments(20, S=(20, N))), "program: S has shape (20, 32); expected a "
         "tw.symmetric tensor"),
        (lambda f: f(), "program: M of X is dynamic; expected an input that shows its size"),
    ],
)  # fmt: skip
def test_refused_sizes(made, call, message):
    with pytest.raises(tw.TileWeaveError) as error:
        call(dynamic())
    assert message in str(error.value)
    assert made == []


def test_different_sizes_raise_on_all_ranks(made, every_rank):
    """All ranks raise an error before anything is compiled."""

    def rank(group):
        dynamic(group=group).at(M=20 + group.rank)

    for me, error in enumerate(every_rank(rank, 2)):
        assert str(error) == (
            f"program for M={20 + me}: the ranks compile for different sizes, ['program for M=20', "
            "'program for M=21']; expected the same sizes on every rank"
        )
    assert made == []


def test_a_graph_knows_only_sizes_compiled_before(made, monkeypatch):
    f = dynamic()
    f(*arguments(20))
    monkeypatch.setattr(dynamic_kernel, "capturing", lambda: True)
    assert f(*arguments(20)) == {"M": 20}
    with pytest.raises(
        tw.TileWeaveError, match=r"program for M=3: not compiled yet; expected a ca"
    ):
        f(*arguments(3))
    assert made == [{"M": 20}, "barrier"]


def test_calls_beside_a_graph_are_kept_apart_from_its_replays(made, monkeypatch):
    order, one = CallOrder(session_of()), object()
    order.enter(one)
    order.enter(one)
    assert made == []
    monkeypatch.setattr(dynamic_kernel, "capturing", lambda: True)
    order.enter(one)
    monkeypatch.setattr(dynamic_kernel, "capturing", lambda: False)
    order.enter(one)
    assert made == ["barrier", "barrier"]


def test_calls_of_a_plan_with_other_kernels_are_kept_apart(made, monkeypatch):
    def turns(plan, *calls):
        made.clear()
        turn = plan_streams.Calls(plan)
        watchdog = types.SimpleNamespace(raise_if_deadlocked=lambda: None)
        session = types.SimpleNamespace(watchdog=watchdog)
        open_sessions(monkeypatch, session)
        turn._reset(session)
        for kernels in calls:
            recorded = RecordedCall(session, None, [], kernels)
            monkeypatch.setattr(turn, "recorded_call", lambda *_, call=recorded: (call, [], []))
            turn()
        return made

    one, other = (Compiled(PROGRAM, {"flags": torch.zeros(1)}) for _ in range(2))
    plan = tw.Plan.of_program(PROGRAM)
    assert turns(plan, [one], [one], [other], [Compiled(PROGRAM)]) == ["barrier"]
    assert turns(tw.Plan.of_program(PROGRAMS["ring_shift"].make(RANKS)), [one], [other]) == []


def test_compile_waits_for_sizes_where_they_matter(monkeypatch):
    """A program without inference keeps its dynamic extent, as TileLang compiles it."""
    monkeypatch.setattr(compiler, "init", lambda group: None)
    monkeypatch.setattr(compiler, "compile_kernel", lambda func, options, session: func)
    assert isinstance(tw.compile(PROGRAM), DynamicKernel)
    local, explicit = programs_without_inference()
    assert tw.compile(local).same_as(local)
    assert tw.compile(explicit).same_as(explicit)
    off = tw.compile(PROGRAM, pass_configs={"tileweave.verify": "off"})
    assert dynamic_sizes(off) == ("M",)


def programs_without_inference():
    M = T.dynamic("M")

    @T.prim_func
    def local(X: T.Tensor((M, N), "float32"), S: W.Symmetric((4, N), "float32")):
        with T.Kernel(1, threads=32):
            for row in T.serial(M):
                X[row, 0] = 1.0
            T.copy(X[0:4, 0:N], S[W.rank(), 0:4, 0:N])

    @T.prim_func
    def explicit(X: T.Tensor((M, N), "float32"), S: W.Symmetric((M, N), "float32")):
        with T.Kernel(M, threads=32) as row:
            T.copy(X[row, 0:N], S[0, row, 0:N])
            W.sync_ranks()

    return local, explicit


def test_which_programs_need_sizes():
    assert needs_sizes(PROGRAM)
    assert needs_sizes(PROGRAMS["dynamic_gather"].make(2))
    assert not any(needs_sizes(f) for f in programs_without_inference())
    assert not needs_sizes(specialize_sizes(PROGRAM, {"M": 20}))


def test_refusals_name_the_sizes():
    M = T.dynamic("M")

    @T.prim_func
    def program(S: W.Symmetric((M, N), "float32"), Y: T.Tensor((M, N), "float32")):
        with T.Kernel(T.ceildiv(M, 8), threads=32) as row:
            T.copy(S[(W.rank() + 1) % 2, row * 8, 0], Y[row * 8 : row * 8 + 8, 0:N])

    with pytest.raises(tw.LanguageError, match=r"^with M=20: T\.copy reads S.* no rank writes it"):
        tw.explain(program, 2, sizes={"M": 20})


def test_scratch_of_dynamic_size_in_a_program_with_signals():
    M = T.dynamic("M")

    @T.prim_func
    def program(X: T.Tensor((M, N), "float32")):
        with T.Kernel(1, threads=32):
            S = W.alloc_symmetric((2 * M, N), "float32")
            T.copy(X[0, 0:N], S[W.rank(), 0, 0:N])
            W.sync_ranks()

    with pytest.raises(
        tw.LanguageError, match=r"alloc_symmetric: S has shape \(M \* 2, 32\); expected positive"
    ):
        tw.emit(program)


def test_one_program_with_several_sizes_in_a_plan():
    """Each size has its own counters and its own name."""
    f, a, b = PROGRAMS["dynamic_shift"].make(RANKS), T.dynamic("a"), T.dynamic("b")

    @tw.plan
    def plan(
        p: tw.PlanBuilder,
        X: T.Tensor((a, N), "float32"),
        S: W.Symmetric((a, N), "float32"),
        Z: T.Tensor((b, N), "float32"),
        R: W.Symmetric((b, N), "float32"),
    ):
        p.launch(f, X, S, X)
        p.launch(f, Z, R, Z)

    explanation = tw.explain(plan, RANKS, sizes={"a": 20, "b": 3})
    assert [name for name, *_ in explanation.sources] == [
        "plan",
        "program for M=20",
        "program for M=3",
    ]
    assert explanation.sizes == {"a": 20, "b": 3}
    with pytest.raises(tw.TileWeaveError, match=r"plan: size c=1; expected a or b"):
        tw.explain(plan, RANKS, sizes={"c": 1})
    with pytest.raises(tw.TileWeaveError, match=r"explain plan: b of Z is dynamic.*--set b=\.\.\."):
        tw.explain(plan, RANKS, sizes={"a": 20})
