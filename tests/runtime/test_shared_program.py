"""Programs for several sizes that share a kernel, with its integers as arguments."""

import operator
import random
import re
import types

import pytest
import tilelang.language as T
import torch
from tvm import tirx
from tvm.arith import Analyzer
from tvm.tirx.stmt_functor import ir_transform

import tileweave as tw
from tests.groups import one_rank
from tileweave import language as W
from tileweave.builtins.spec import builtin_of
from tileweave.emit import lowered
from tileweave.ops.core.problem import Problem
from tileweave.ops.core.registry import OPERATORS
from tileweave.ops.core.tiles import Choice, Tiles
from tileweave.passes import for_group, with_options
from tileweave.passes.ir.walk import builtins_in
from tileweave.passes.sync.infer.inference import infer_and_explain
from tileweave.passes.sync.infer.options import options_of
from tileweave.runtime import Plan
from tileweave.runtime.kernel import for_group as group_programs
from tileweave.runtime.kernel import kernel, shared_program
from tileweave.runtime.kernel.for_group import for_group as program_for_group
from tileweave.runtime.kernel.shared_kernels import SharedKernels
from tileweave.runtime.kernel.shared_program import SharedProgram, SizedProgram
from tileweave.simulator.device.lowering import HEAP_STRIDE

RANKS, N, K = 2, 32, 32
TILES = Tiles(16, 16, 16, 2, 32)
PROGRAMS = [(op, name) for op in (
    "all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"
) for name in OPERATORS[op].programs]  # fmt: skip
FOLDING = {
    tirx.Add: operator.add, tirx.Sub: operator.sub, tirx.Mul: operator.mul,
    tirx.Min: tirx.min, tirx.Max: tirx.max,
    tirx.FloorDiv: tirx.floordiv, tirx.FloorMod: tirx.floormod, tirx.LT: operator.lt,
}  # fmt: skip
"""Operations that fold integers, by the kinds of nodes that do not."""


def gemm(op, name, rows):
    """Return a program of a GEMM operator for a number of rows of a shard."""
    operator = OPERATORS[op]
    rows = rows * RANKS if operator.scatters else rows
    problem = Problem(op, rows, N, K, RANKS, torch.float16, True)
    return operator.program(problem, Choice(name, TILES))


def kernels_of(program):
    return program.kernels(RANKS) if isinstance(program, Plan) else [program]


def with_constants(shared, arguments):
    """Return the program of ``shared`` with integers in the place of its parameters."""
    numbers = zip(shared.parameters, arguments, strict=True)
    return folded(shared.program.specialize({p: tirx.IntImm(p.dtype, n) for p, n in numbers}))


def folded(func):
    """Return ``func`` without operations on integers only, or on 0 or 1, with simple shapes."""

    def fold(node):
        if isinstance(node, tirx.Cast):
            is_number = isinstance(node.value, tirx.IntImm)
            return tirx.IntImm(node.dtype, int(node.value)) if is_number else None
        return FOLDING[type(node)](node.a, node.b)

    kinds = ["tirx.Cast", *(f"tirx.{kind.__name__}" for kind in FOLDING)]
    body = ir_transform(func.body, None, fold, kinds)
    return shared_program._change(func.with_body(body), Analyzer().simplify)


def text_of(func):
    """Return the text of ``func`` without attributes and the numbers of locations."""
    text = "\n".join(line for line in func.script().split("\n") if "T.func_attr" not in line)
    return re.sub(r"context\(\), \d+", "context()", text)


@pytest.mark.parametrize(("op", "name"), PROGRAMS)
def test_gemm_of_any_rows_has_few_kernels(op, name):
    """The shared kernel with the arguments of a size is the program that is proven for it."""
    shared, rng = {}, random.Random(0)
    for rows in (TILES.M * 3, TILES.M * 7, 41, 90, 5, *(rng.randint(1, 200) for _ in range(8))):
        for func in kernels_of(gemm(op, name, rows)):
            instance = SizedProgram(for_group(func, RANKS, HEAP_STRIDE))
            shared.setdefault(instance.form, []).append(instance)
    assert len(shared) <= (8 if name == "stores" else 2)
    for instances in shared.values():
        program = SharedProgram.of(instances)
        for instance in instances:
            same = with_constants(program, program.arguments(instance))
            assert text_of(same) == text_of(folded(instance.program))


ORDERING = {"begin", "wait", "await_copy"}
"""Kernels that order the copies of plans: all plans of a session share them."""


MOST = {"all_gather_matmul": 7, "matmul_reduce_scatter": 7, "matmul_all_reduce": 10}
"""Most kernels for all numbers of rows. Copy engines have other programs for few rows."""


@pytest.mark.filterwarnings("ignore::tileweave.SyncWarning")
@pytest.mark.parametrize("op", MOST)
@pytest.mark.parametrize("count", [6, pytest.param(200, marks=pytest.mark.long)])
def test_few_kernels_compute_all_rows(op, count):
    """With the choices of calls, for eager calls and CUDA graphs, in random order."""
    operator, rng, kernels, found = OPERATORS[op], random.Random(3), SharedKernels(), {}
    for _ in range(count):
        rows = RANKS * max(1, int(2 ** rng.uniform(0, 14)) // RANKS)
        height = rows // RANKS if op == "all_gather_matmul" else rows
        problem = Problem(op, height, 7168, 8192, RANKS, torch.bfloat16, True)
        choice = operator.table(problem)
        own = inferred_kernels(operator.compiled_programs(problem, choice))
        if not kernels.has([(program, {}) for program in own], one_rank()):
            for other in inferred_kernels(operator.similar_programs(problem, choice)):
                kernels.add(other, {})
        for program in own:
            shared, _ = kernels.find(program, {})
            shared.is_cached = True
            found[id(shared)] = str(program.attrs["global_symbol"])
    assert len([name for name in found.values() if name not in ORDERING]) <= MOST[op], found


def inferred_kernels(steps):
    return [for_group(func, RANKS, 1 << 37) for each in steps for func in kernels_of(each)]


@pytest.mark.long
def test_a_shared_kernel_of_persistent_blocks_compiles():
    """It did not while inserted synchronization was simplified by the sizes: TileLang counts the
    threads at a barrier by a solver, which ended early."""
    problem = Problem("matmul_all_reduce", 2048, 7168, 8192, RANKS, torch.bfloat16, True)
    choice = Choice("copy_engines", Tiles(128, 224, 64, 4, 256, group_m=4))
    operator, kernels = OPERATORS[problem.op], SharedKernels()

    def persistent(plan):
        (func,) = (f for f in kernels_of(plan) if f.attrs["global_symbol"] == "gemm_ar_persistent")
        return for_group(func, RANKS, 1 << 37)

    program = persistent(operator.program(problem, choice))
    similar = operator.similar_programs(problem, choice)
    for func in (program, *(persistent(plan) for plan in similar if isinstance(plan, Plan))):
        kernels.add(func, {})
    shared, arguments = kernels.find(program, {})
    assert len(arguments) > 10
    assert "gemm_ar_persistent_kernel" in lowered(shared.program, "sm_90a", {}).kernel_source


@pytest.fixture
def kernels():
    return SharedKernels()


def shift_program(columns, distance=1):
    @T.prim_func
    def shift(S: W.Symmetric((columns,), "int32"), C: T.Tensor((columns,), "int32")):
        with T.Kernel(columns // 32, threads=32) as block:
            for i in T.Parallel(32):
                S[(W.rank() + distance) % RANKS, block * 32 + i] = C[block * 32 + i]
            for i in T.Parallel(32):
                C[block * 32 + i] = S[W.rank(), block * 32 + i]

    return shift


def shift(columns, distance=1, **options):
    """Return the program for the group."""
    configs = {f"tileweave.{name}": value for name, value in options.items()}
    return for_group(with_options(shift_program(columns, distance), configs), RANKS, HEAP_STRIDE)


def test_a_kernel_fits_what_was_known_when_it_was_compiled(kernels):
    for columns in (96, 160):
        kernels.add(shift(columns, share="shift"), {})
    first, sizes = kernels.find(shift(64, share="shift"), {})
    assert len(first.program.params) == len(shift(64).params) + len(sizes)
    for columns in (32 * 7, 32 * 1000):
        assert kernels.find(shift(columns, share="shift"), {})[0] is first
    other, _ = kernels.find(shift(64, distance=0, share="shift"), {})
    assert other is not first


def test_only_programs_with_one_name_and_equal_options_share(kernels):
    first, _ = kernels.find(shift(64, share="a"), {})
    assert kernels.find(shift(64, share="a"), {})[0] is first
    assert kernels.find(shift(64, share="b"), {})[0] is not first
    assert kernels.find(shift(64, share="a"), {"pass_configs": {"tl.x": 1}})[0] is not first
    alone, sizes = kernels.find(shift(64), {})
    assert sizes == () and kernels.find(shift(96), {})[0] is not alone


def test_a_second_size_needs_a_second_kernel_that_fits_all(kernels):
    first, sizes = kernels.find(shift(64, share="a"), {})
    assert sizes == ()
    second, _ = kernels.find(shift(96, share="a"), {})
    assert second is not first
    assert kernels.find(shift(32 * 77, share="a"), {})[0] is second


def strided(rows, pitch):
    @T.prim_func
    def strided(A: T.StridedTensor((rows, 32), (pitch, 1), "float32")):
        with T.Kernel(rows, threads=32) as row:
            A[row, T.get_thread_binding()] = 1

    return SizedProgram(strided)


def test_a_stride_is_an_argument_unless_it_follows_from_the_shape_for_all_sizes():
    assert strided(48, 32).form != strided(48, 40).form
    packed = SharedProgram.of([strided(48, 32), strided(80, 32)])
    assert packed.arguments(strided(112, 32)) == (112,)
    pitched = SharedProgram.of([strided(48, 40), strided(80, 100)])
    assert pitched.arguments(strided(112, 64)) == (112, 64)


def test_a_kernel_that_does_not_compile_is_replaced_by_one_of_constants(monkeypatch):
    compiled = []

    def compiled_by(func, **options):
        if any(p.name.startswith("size_") for p in func.params):
            raise tw.LanguageError("an integer must be a constant")
        compiled.append(func)
        return types.SimpleNamespace(prim_func=func)

    group = types.SimpleNamespace(
        world_size=RANKS, local_rank=0, exchange=lambda topic, value, timeout_s=0: [value]
    )
    session = types.SimpleNamespace(
        group=group, heap=types.SimpleNamespace(stride=1 << 30), kernels=SharedKernels()
    )
    monkeypatch.setattr(kernel, "compile_by_tilelang", compiled_by)
    monkeypatch.setattr(kernel, "warm", lambda *_: True)
    monkeypatch.setattr(kernel, "_allocate", lambda *_: torch.empty(0))
    session.kernels.add(shift(96, share="a"), {})
    program = with_options(shift_program(64), {"tileweave.share": "a"})
    made = kernel.compile_kernel(program, {}, session)
    assert len(compiled) == 1 and made.added_arguments == (*made.implicit_tensors.values(),)
    # Later sizes are not tried with arguments again.
    monkeypatch.setattr(kernel, "compile_by_tilelang", lambda func, **_: compiled.append(func))
    program = with_options(shift_program(128), {"tileweave.share": "a"})
    kernel.compile_kernel(program, {}, session)
    assert [len(func.params) for func in compiled] == [len(compiled[0].params)] * 2


def test_locations_are_no_arguments():
    """Their texts have the numbers of a size, so sizes have different ones."""
    plan = gemm("all_gather_matmul", "copy_engines", 67)
    *_, func = (for_group(func, RANKS, HEAP_STRIDE) for func in kernels_of(plan))
    calls = [call for call in builtins_in(func.body) if "loc" in builtin_of(call).implicit]
    locs = {int(builtin_of(call).operand(call, "loc")) for call in calls}
    assert locs and not locs.intersection(SizedProgram(func).integers)


@pytest.mark.parametrize(("op", "name"), PROGRAMS)
def test_the_inference_does_not_depend_on_the_stride(op, name):
    for func in kernels_of(gemm(op, name, 41)):
        expected = for_group(func, RANKS, HEAP_STRIDE)
        assert text_of(program_for_group(func, RANKS, HEAP_STRIDE)) == text_of(expected)


def test_the_kernel_of_a_plan_is_inferred_once(monkeypatch):
    inferred = []

    def infer(func, *args):
        inferred.append(func)
        return infer_and_explain(func, *args)

    monkeypatch.setattr(group_programs, "infer_and_explain", infer)
    for func in kernels_of(gemm("all_gather_matmul", "copy_engines", 67)):
        options = {"tileweave.share": options_of(func).share}
        for stride in (HEAP_STRIDE, 2 * HEAP_STRIDE):
            program_for_group(with_options(func, options), RANKS, stride)
    names = [str(func.attrs["global_symbol"]) for func in inferred]
    assert names.count("ag_gemm_copy_engine") == 1
