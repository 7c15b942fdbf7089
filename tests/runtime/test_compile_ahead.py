"""Programs that are compiled ahead are compiled once, by one of the ranks, and found later."""

import threading
import types

import pytest
import tilelang
import tilelang.language as T
import torch

import tileweave as tw
from tests.groups import one_rank
from tileweave import language as W
from tileweave.ops.core.collective_problem import CollectiveProblem
from tileweave.ops.core.compiled import OpCache, programs_of
from tileweave.ops.core.gemm_config import GemmConfig
from tileweave.ops.core.problem import Problem
from tileweave.ops.core.registry import OPERATORS
from tileweave.ops.core.tiles import SMALL, Choice, Tiles
from tileweave.ops.gemm.all_gather_matmul import all_gather_matmul_plan
from tileweave.runtime import compiler
from tileweave.runtime.executor import compile_ahead
from tileweave.runtime.host.group import Group
from tileweave.runtime.kernel import kernel
from tileweave.runtime.kernel.shared_kernels import SharedKernels
from tileweave.runtime.plans.steps import Launch

SIZES = (3 << 20, 5 << 20, 7 << 20)
CONFIGS = {"tl.disable_warp_specialized": True, "tileweave.verify": "warn"}


def shift(columns, ranks=2):
    @T.prim_func
    def shift(S: W.Symmetric((columns,), "float32"), C: T.Tensor((columns,), "float32")):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(columns):
                S[(W.rank() + 1) % ranks, i] = C[i]
            for i in T.Parallel(columns):
                C[i] = S[W.rank(), i]

    return shift


class Compilers:
    """Compilers of ranks that are threads; they record the requests.

    Attributes:
        asked: (rank, program, options) of each request.
    """

    def __init__(self) -> None:
        self.asked: list[tuple[int, str, str]] = []
        self._own = threading.local()

    def join(self, group: Group) -> None:
        heap = types.SimpleNamespace(stride=1 << 30)
        self._own.session = types.SimpleNamespace(group=group, heap=heap, kernels=SharedKernels())

    def session(self, group=None) -> types.SimpleNamespace:
        return self._own.session

    def compile(self, program, **options):
        session = getattr(self._own, "session", None)
        rank = -1 if session is None else session.group.rank  # a thread of compile_ahead has none
        self.asked.append((rank, program.script(), str(sorted(options.items()))))
        return types.SimpleNamespace(prim_func=program)


@pytest.fixture
def compilers(monkeypatch):
    compilers = Compilers()
    monkeypatch.setattr(tilelang, "compile", compilers.compile)
    monkeypatch.setattr(compile_ahead, "current", compilers.session)
    monkeypatch.setattr(compiler, "init", compilers.session)
    monkeypatch.setattr(kernel, "warm", lambda *_: True)
    monkeypatch.setattr(kernel, "_allocate", lambda *_: torch.empty(0))
    return compilers


def test_what_is_compiled_ahead_is_what_is_asked_for(compilers, every_rank):
    def rank(group):
        compilers.join(group)
        tiles = Tiles(16, 16, 16, 2, 32)
        plan = all_gather_matmul_plan(GemmConfig(32, 16, 16, 2, "float16", True, tiles))
        plan = plan.with_configs(CONFIGS)
        own = shift(64)
        count = compile_ahead.compile_ahead([own, plan, own])
        tw.compile(own)
        shapes = {p.name: p.shape for p in plan.parameters}
        for step in plan.trace(group.rank, 2, shapes, {}):
            if isinstance(step, Launch):
                compiler.compile(step.program, pass_configs=plan.pass_configs)
        return count

    # Two kernels of the plan: the product, and what counts the calls.
    assert every_rank(rank) == [3, 3]
    of = {rank: [what for r, *what in compilers.asked if r == rank] for rank in (-1, 0, 1)}
    assert sorted(of[-1]) == sorted(of[0]) == sorted(of[1])
    assert len(of[-1]) == 3


def test_ranks_share_them_out(compilers, every_rank):
    def rank(group):
        compilers.join(group)
        return compile_ahead.compile_ahead([shift(32 * n) for n in range(1, 5)])

    assert every_rank(rank) == [4, 4]
    assert len(compilers.asked) == len({script for _, script, _ in compilers.asked}) == 4


def test_what_does_not_compile_is_left_to_those_who_need_it(compilers, monkeypatch):
    def fail(program, **options):
        raise ValueError("nvcc does not like it")

    compilers.join(one_rank())
    monkeypatch.setattr(tilelang, "compile", fail)
    assert compile_ahead.compile_ahead([shift(64, ranks=1)]) == 1
    with pytest.raises(ValueError, match="nvcc does not like it"):
        tw.compile(shift(64, ranks=1))


def test_what_cannot_be_ordered_is_left_to_those_who_need_it(compilers, monkeypatch):
    bad, good, ordered = shift(32, ranks=1), shift(64, ranks=1), compile_ahead.for_group

    def for_group(func, session):
        if func is bad:
            raise tw.TileWeaveError("cannot be ordered")
        return ordered(func, session)

    compilers.join(one_rank())
    monkeypatch.setattr(compile_ahead, "for_group", for_group)
    assert compile_ahead.compile_ahead([bad, good]) == 1


def test_a_plan_that_cannot_be_ordered_is_left_to_those_who_need_it(compilers):
    @tw.plan
    def bad(p: tw.PlanBuilder, C: T.Tensor((32,), "float32")):
        raise tw.TileWeaveError("cannot be ordered")

    compilers.join(one_rank())
    assert compile_ahead.compile_ahead([bad, shift(64, ranks=1)]) == 1


def test_a_plan_whose_call_decides_is_refused():
    @tw.plan
    def some(p: tw.PlanBuilder, S: W.Symmetric((64,), "float32"), n: T.int32):
        p.copy(S[p.rank], S[p.rank])

    with pytest.raises(tw.TileWeaveError, match="what it launches may depend on n; expected a"):
        some.kernels(2)


def test_operators_find_what_was_compiled_together(compilers, every_rank):
    """Two sizes share a kernel, which fits a third one, too."""
    results = [CollectiveProblem("all_gather", (n,), (2 * n,), (), 2, torch.float32) for n in SIZES]
    first, second, third = ((problem, "ldst") for problem in results)
    product = Problem("matmul_all_reduce", 64, 64, 64, 2, torch.bfloat16, False)
    product = product, Choice("one_shot", SMALL)

    def rank(group):
        compilers.join(group)
        cache = OpCache(compilers.session())
        counts = [cache.compile_ahead(keys) for keys in ([first, product, second], [third])]
        own = [programs_of(OPERATORS[p.op], p, choice) for p, choice in (first, product)]
        return *counts, *(compile_ahead.compile_ahead(programs) for programs in own)

    assert every_rank(rank) == [(2, 0, 0, 0)] * 2
    assert len(compilers.asked) == 2
