"""Programs that are compiled ahead are compiled once, by one of the ranks, and found later."""

import functools
import threading
import types
from concurrent.futures import Future

import pytest
import tilelang
import tilelang.language as T
import torch
from tilelang import env

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
from tileweave.runtime.kernel import kernel, stored_programs
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
        is_stored: whether later sessions find the kernels.
    """

    def __init__(self) -> None:
        self.asked: list[tuple[int, str, str]] = []
        self.is_stored = False
        self._own = threading.local()

    def join(self, group: Group) -> None:
        heap = types.SimpleNamespace(stride=1 << 30)
        kernels = SharedKernels(self.is_stored)
        self._own.session = types.SimpleNamespace(group=group, heap=heap, kernels=kernels)

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


@pytest.fixture
def cache(compilers, monkeypatch, tmp_path):
    """Return the folder of an empty cache in which sessions find the kernels of earlier ones."""
    monkeypatch.setattr(env, "TILELANG_CACHE_DIR", str(tmp_path))
    compilers.is_stored = True
    return tmp_path / "tileweave"


def test_what_is_compiled_ahead_is_what_is_asked_for(compilers, every_rank):
    def rank(group):
        compilers.join(group)
        tiles = Tiles(16, 16, 16, 2, 32)
        plan = all_gather_matmul_plan(GemmConfig(32, 16, 16, 2, "float16", True, tiles))
        plan = plan.with_configs(CONFIGS)
        own = shift(64)
        count = compile_ahead.compile_ahead([own, plan, own]).kernels
        tw.compile(own)
        shapes = {p.name: p.shape for p in plan.parameters}
        for step in plan.trace(group.rank, 2, shapes, {}):
            if isinstance(step, Launch):
                compiler.compile(step.program)
        return count

    # Two kernels of the plan: the product, and what counts the calls.
    assert every_rank(rank) == [3, 3]
    of = {rank: [what for r, *what in compilers.asked if r == rank] for rank in (-1, 0, 1)}
    assert sorted(of[-1]) == sorted(of[0]) == sorted(of[1])
    assert len(of[-1]) == 3


def test_ranks_share_them_out(compilers, every_rank):
    def rank(group):
        compilers.join(group)
        return compile_ahead.compile_ahead([shift(32 * n) for n in range(1, 5)]).kernels

    assert every_rank(rank) == [4, 4]
    assert len(compilers.asked) == len({script for _, script, _ in compilers.asked}) == 4


def test_what_does_not_compile_is_left_to_those_who_need_it(compilers, monkeypatch):
    def fail(program, **options):
        raise ValueError("nvcc does not like it")

    compilers.join(one_rank())
    monkeypatch.setattr(tilelang, "compile", fail)
    assert compile_ahead.compile_ahead([shift(64, ranks=1)]).kernels == 1
    with pytest.raises(ValueError, match="nvcc does not like it"):
        tw.compile(shift(64, ranks=1))


def test_what_cannot_be_ordered_is_left_to_those_who_need_it(compilers, monkeypatch):
    bad, good, ordered = shift(32, ranks=1), shift(64, ranks=1), compile_ahead.for_group

    def for_group(func, *group):
        if func is bad:
            raise tw.TileWeaveError("cannot be ordered")
        return ordered(func, *group)

    compilers.join(one_rank())
    monkeypatch.setattr(compile_ahead, "for_group", for_group)
    assert compile_ahead.compile_ahead([bad, good]).kernels == 1


def test_a_plan_that_cannot_be_ordered_is_left_to_those_who_need_it(compilers):
    @tw.plan
    def bad(p: tw.PlanBuilder, C: T.Tensor((32,), "float32")):
        raise tw.TileWeaveError("cannot be ordered")

    compilers.join(one_rank())
    assert compile_ahead.compile_ahead([bad, shift(64, ranks=1)]).kernels == 1


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
        counts = [cache.compile_ahead(keys).kernels for keys in ([first, product, second], [third])]
        own = [programs_of(OPERATORS[p.op], p, choice) for p, choice in (first, product)]
        return *counts, *(compile_ahead.compile_ahead(programs).kernels for programs in own)

    assert every_rank(rank) == [(2, 0, 0, 0)] * 2
    assert len(compilers.asked) == 2


@pytest.fixture
def product(compilers, every_rank, monkeypatch):
    """Return a function that compiles a product of some rows in a new session of two ranks.

    It returns the numbers of kernels that each rank compiles ahead and of similar sizes that it
    infers, and the texts with which all ranks then look the kernel up.
    """
    operator, inferred = OPERATORS["matmul_all_reduce"], []
    similar_programs = operator.similar_programs

    def similar(problem, choice):
        inferred.append(problem)
        return similar_programs(problem, choice)

    monkeypatch.setattr(operator, "similar_programs", similar)

    def rank(group, key):
        compilers.join(group)
        count = OpCache(compilers.session()).compile_ahead([key]).kernels
        stride = compilers.session().heap.stride
        own = compile_ahead._for_group(programs_of(operator, *key), 2, stride)
        found = [compilers.session().kernels.find(*program) for program in own]
        for program in programs_of(operator, *key):
            compiler.compile(program)
        return count, [len(sizes) for _, sizes in found]

    def run(rows):
        problem = Problem("matmul_all_reduce", rows, 64, 64, 2, torch.bfloat16, False)
        compilers.asked.clear()
        inferred.clear()
        key = problem, Choice("one_shot", SMALL)
        (first, second) = every_rank(lambda group: rank(group, key))
        assert first == second
        count, sizes = first
        return count, len(inferred) // 2, sizes, {text for _, text, _ in compilers.asked}

    return run


def test_a_later_session_finds_the_kernel_for_any_size(product, cache):
    count, similar, sizes, texts = product(512)
    assert (count, similar, len(texts)) == (1, 1, 1) and sizes > [0]
    for rows in (512, 1536):
        assert product(rows) == (0, 0, sizes, texts)


@pytest.mark.parametrize("content", ["", "{}", "not JSON"])
def test_a_file_with_other_content_is_ignored_and_replaced(product, cache, content):
    first = product(128)
    (file,) = cache.glob("program-*.json")
    text = file.read_text()
    file.write_text(content)
    key = file.stem.split("-")[1]
    foreign = cache / f"{stored_programs._name(key, content)}.json"
    foreign.write_text(content)
    assert product(128) == first
    assert file.read_text() == text
    foreign.unlink()
    assert product(128)[:2] == (0, 0)


def test_what_only_some_ranks_find_is_compiled(product, compilers, cache, monkeypatch):
    first, load = product(128), stored_programs.load

    def load_on_rank_0(keys):
        programs = load(keys)
        is_first = compilers.session().group.rank == 0
        return programs if is_first else {key: {} for key in programs}

    monkeypatch.setattr(stored_programs, "load", load_on_rank_0)
    assert product(128) == first


def test_what_every_user_may_write_is_not_read(product, cache):
    product(128)
    (file,) = cache.glob("program-*.json")
    key = file.stem.split("-")[1]
    assert stored_programs.load([key])[key]
    cache.parent.chmod(0o777)
    assert not stored_programs.load([key])[key]


def test_what_does_not_compile_is_not_stored(compilers, cache, monkeypatch):
    def fail(program, **options):
        raise ValueError("nvcc does not like it")

    compilers.join(one_rank())
    monkeypatch.setattr(tilelang, "compile", fail)
    assert compile_ahead.compile_ahead([shift(64, ranks=1)]).kernels == 1
    assert not [*cache.glob("program-*")]


def test_a_cache_that_cannot_be_written_is_no_error(compilers, cache, monkeypatch):
    def read_only():
        raise PermissionError("read-only")

    monkeypatch.setattr(stored_programs, "writable_folder", read_only)
    compilers.join(one_rank())
    tw.compile(shift(64, ranks=1))
    assert not cache.exists()


def test_a_call_waits_for_what_is_being_compiled(compilers, monkeypatch):
    may_end = threading.Event()

    def compile_later(*args, **options):
        assert may_end.wait(60)
        return compilers.compile(*args, **options)

    monkeypatch.setattr(tilelang, "compile", compile_later)
    compilers.join(one_rank())
    own = shift(64, ranks=1)
    begun = compile_ahead.compile_ahead([own], waits=False)
    again = compile_ahead.compile_ahead([own], waits=False)
    assert (begun.kernels, again.kernels) == (1, 0) and not begun.work[0].done()
    threading.Timer(0.1, may_end.set).start()
    tw.compile(own)
    assert begun.work[0].done()
    assert [rank for rank, *_ in compilers.asked] == [
        -1,
        0,
    ]  # the call finds what a thread compiled


def test_a_session_finds_what_a_process_compiled_that_was_no_rank(product, compilers, cache):
    operator = OPERATORS["matmul_all_reduce"]
    problem = Problem("matmul_all_reduce", 512, 64, 64, 2, torch.bfloat16, False)
    key = problem, Choice("one_shot", SMALL)
    compilers.join(one_rank())
    stride = compilers.session().heap.stride
    for _ in range(2):
        similar = functools.partial(operator.similar_programs, *key)
        compile_ahead.compile_alone(programs_of(operator, *key), similar, 2, stride)
    assert len(compilers.asked) == 1
    for rows in (512, 1536):
        assert product(rows)[:2] == (0, 0)


def test_other_sizes_are_compiled_once(compilers, cache, every_rank, monkeypatch):
    """The ranks divide them, and later processes see that they are compiled. The compilers begin
    before the programs are made."""
    begun = threading.local()

    class Workers:
        def __init__(self, count):
            assert count > 0
            begun.here = True

        def submit(self, call, then):
            call()
            then()
            future = Future()
            future.set_result(None)
            return future

        def close(self):
            pass

    monkeypatch.setattr(compile_ahead, "CompileWorkers", Workers)
    compiled: list[int] = []

    def programs():
        assert begun.here
        yield from ()

    def rank(group):
        compilers.join(group)
        later = [
            compile_ahead.Later(str(n), functools.partial(compiled.append, n)) for n in range(4)
        ]
        first = compile_ahead.compile_ahead(programs(), later=later)
        group.meet("compiled")
        second = compile_ahead.compile_ahead([], later=later)
        return len(first.work), len(second.work)

    assert every_rank(rank) == [(2, 0)] * 2
    assert sorted(compiled) == [0, 1, 2, 3]
