"""Functions that tests/ops runs on each rank, in its own process, on a CPU."""

from __future__ import annotations

import contextlib
import gc
import io
import os
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from datetime import timedelta
from multiprocessing import get_context
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from benchmarks import host_time
from tests.ops.collectives.exchanges import EXCHANGES, exchange_by_one
from tileweave import ops
from tileweave.bench import command as bench
from tileweave.bench.case import ASYNC_TP, Buffers, Checker, Implementation, implementations_of
from tileweave.bench.collectives import IMPLEMENTATIONS as COLLECTIVES
from tileweave.bench.gemm import IMPLEMENTATIONS, Inputs
from tileweave.bench.moe_shapes import ROUTINGS
from tileweave.builtins.errors import TileWeaveError
from tileweave.cli.program_files import load_function
from tileweave.ops.autotune.trial import Trial, problem_of
from tileweave.ops.core.groups import group_of
from tileweave.ops.core.registry import OPERATORS, operators_of
from tileweave.ops.gemm.gemm_operator import GemmOperator

SHARE, N, K = 6, 10, 8
FP8 = torch.float8_e4m3fn


class Ranks:
    """Connected processes; each runs functions by name.

    Args:
        modules: imported once for all ranks, if no ranks were started before.
    """

    def __init__(self, count: int, *modules: str) -> None:
        self.count = count
        self._folder = tempfile.TemporaryDirectory()
        place = f"file://{self._folder.name}/store"
        context = get_context("forkserver")  # what all ranks import is imported once
        context.set_forkserver_preload(["tests.ops.on_ranks", *modules])
        self._processes = [
            ProcessPoolExecutor(1, context, _join, (place, rank, count)) for rank in range(count)
        ]

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Return the result of ``function(*args)`` on each rank, or its error."""
        futures = [process.submit(_outcome, function, args) for process in self._processes]
        return [future.result(timeout=120) for future in futures]

    def close(self) -> None:
        for process in self._processes:
            process.shutdown()
        self._folder.cleanup()


def _join(place: str, rank: int, count: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", place, timedelta(seconds=60), count, rank)


def _outcome(function: Callable[..., Any], args: tuple) -> Any:
    try:
        return function(*args)
    except Exception as error:
        return error


def numbers(*shape: int, of: int, what: str) -> torch.Tensor:
    """Return the inputs of one rank; every rank can generate those of all."""
    generator = torch.Generator().manual_seed(1000 * of + sum(map(ord, what)))
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def transposed(b: torch.Tensor) -> torch.Tensor:
    """Return the same values in column-major memory."""
    return b.t().contiguous().t()


def part_of_the_world(form: str) -> Any:
    """Return the group of the first two ranks, and the user's name for it."""
    part = dist.new_group([0, 1])
    if dist.get_rank() > 1:
        return part
    said = {
        "group": lambda: part,
        "name": lambda: part.group_name,
        "mesh": lambda: DeviceMesh.from_group(part, "cpu"),
    }
    return said[form]()


def product(op: str, order: str, where: str, form: str | None = None) -> dict[str, bool]:
    """Compare a GEMM operator on every rank of a group with one process."""
    kind, call = OPERATORS[op], getattr(ops, op)
    group = part_of_the_world(form) if form else None
    me, count = dist.get_rank(), 2 if form else dist.get_world_size()
    rows = SHARE if kind.gathers else SHARE * count if kind.scatters else SHARE + 1
    every = [numbers(rows, K, of=r, what="a") for r in range(count)]
    a, b = numbers(rows, K, of=me, what="a"), numbers(K, N, of=me, what="b")
    if kind.gathers:
        right = torch.cat(every) @ b
    else:
        total = sum(x @ numbers(K, N, of=r, what="b") for r, x in enumerate(every))
        right = total[me * SHARE : (me + 1) * SHARE] if kind.scatters else total
    b = transposed(b) if order == "transposed" else b
    out = torch.full_like(right, torch.nan) if where == "out" else None
    c = call(a, b, group, out=out)
    found = {"result": torch.allclose(c, right), "in out": out is None or c is out}
    bias = numbers(N, of=me if kind.gathers or kind.scatters else 0, what="bias")
    found["bias"] = torch.allclose(call(a, b, group, bias=bias, out=out), right + bias)
    if kind.gathers:
        c, gathered = call(a, b, group, out=out, return_gathered=True)
        found["rows"] = torch.equal(gathered, torch.cat(every)) and torch.allclose(c, right)
        found["in out with rows"] = out is None or c is out
    return found


def fp8(out_dtype: torch.dtype | None, biased: bool) -> dict[str, bool]:
    """Compare all operators on fp8 operands with one process.

    Numbers are small integers and scales powers of two, so every sum is exact.
    """
    me, count, wanted = dist.get_rank(), dist.get_world_size(), out_dtype or torch.bfloat16

    def integers(*shape: int, of: int, what: str, dtype: torch.dtype = FP8) -> torch.Tensor:
        return (numbers(*shape, of=of, what=what) * 2).round().to(dtype)

    def operands(rows: int, of: int) -> tuple[torch.Tensor, torch.Tensor]:
        a, b = integers(rows, 16, of=of, what="a"), integers(32, 16, of=of, what="b").t()
        return a, b

    def product(a: torch.Tensor, of: int) -> torch.Tensor:
        return a.double() @ operands(1, of)[1].double() * 0.25 * 2**of

    scales = {
        "scale_a": torch.tensor(0.25), "scale_b": torch.tensor([2.0**me]), "out_dtype": out_dtype
    }  # fmt: skip
    bias = integers(32, of=0, what="bias", dtype=wanted) if biased else None
    given = scales | {"bias": bias}
    rows = torch.cat([operands(SHARE, r)[0].double() for r in range(count)])
    whole = SHARE * count
    total = sum(product(operands(whole, r)[0], r) for r in range(count))
    a, b = operands(SHARE, me)
    gathered = ops.all_gather_matmul(a, b, return_gathered=True, **given)
    out = torch.empty(SHARE, 32, dtype=wanted)
    actual = {
        "gather": (gathered[0], product(rows, me)),
        "scatter": (ops.matmul_reduce_scatter(*operands(whole, me), **given),
                    total[me * SHARE : (me + 1) * SHARE]),
        "out": (ops.matmul_reduce_scatter(*operands(whole, me), out=out, **given),
                total[me * SHARE : (me + 1) * SHARE]),
        "reduce": (ops.matmul_all_reduce(*operands(whole, me), **given), total),
    }  # fmt: skip
    right = {"rows": torch.equal(gathered[1].double(), rows)}
    for name, (result, expected) in actual.items():
        expected = expected if bias is None else expected + bias.double()
        right[name] = result.dtype == wanted and torch.equal(result.double(), expected)
    return right


def parallel_layer(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Run a layer of a tensor-parallel transformer: each rank has columns of a and rows of b."""
    return ops.matmul_all_reduce(a.relu(), b, bias=bias).relu()


def gradients_of_a_sum(compiled: bool) -> dict[str, bool]:
    """Compare gradients of ``parallel_layer``, with equal weights on all ranks, with
    one process."""
    me, count = dist.get_rank(), dist.get_world_size()
    every = [
        [
            numbers(*shape, of=r, what=what).requires_grad_()
            for shape, what in (((SHARE, K), "a"), ((K, N), "b"))
        ]
        for r in range(count)
    ]
    weight = numbers(SHARE, N, of=0, what="weight")
    bias = numbers(N, of=0, what="bias").requires_grad_()
    total = (sum(a.relu() @ b for a, b in every) + bias).relu()
    expected = torch.autograd.grad((total * weight).sum(), [*every[me], bias])
    f = parallel_layer
    if compiled:
        f = torch.compile(f, backend="aot_eager", fullgraph=True)
    mine = [x.detach().clone().requires_grad_() for x in [*every[me], bias]]
    result = f(*mine)
    gradients = torch.autograd.grad((result * weight).sum(), mine)
    right = {"value": torch.allclose(result, total)}
    names = ("a", "b", "bias")
    return right | {
        name: torch.allclose(x, y) for name, x, y in zip(names, gradients, expected, strict=True)
    }


def two_layers(
    a: torch.Tensor, b: torch.Tensor, d: torch.Tensor, e: torch.Tensor, f: torch.Tensor, keep: bool
) -> torch.Tensor:
    """Run a block of a sequence-parallel transformer: gather, multiply, multiply, scatter."""
    if keep:
        h, rows = ops.all_gather_matmul(a, b, bias=e, return_gathered=True)
        h = h.relu() + rows.sum(1, keepdim=True)
    else:
        h = ops.all_gather_matmul(a, b, bias=e).relu()
    return ops.matmul_reduce_scatter(h, d, bias=f)


def gradients(keep: bool, compiled: bool) -> dict[str, bool]:
    """Compare gradients of ``two_layers``, with weights of each rank, with one process."""
    me, count = dist.get_rank(), dist.get_world_size()
    every = [
        [
            numbers(*shape, of=r, what=what).requires_grad_()
            for shape, what in zip(((SHARE, K), (K, N), (N, K), (N,), (K,)), "abdef", strict=True)
        ]
        for r in range(count)
    ]
    weights = [numbers(SHARE, K, of=r, what="weight") for r in range(count)]
    rows = torch.cat([a for a, *_ in every])
    total = torch.cat([f.expand(SHARE, K) for *_, f in every])
    for _, b, d, e, _ in every:
        h = (rows @ b + e).relu()
        total = total + (h + rows.sum(1, keepdim=True) if keep else h) @ d
    expected = torch.autograd.grad((total * torch.cat(weights)).sum(), every[me])

    f = torch.compile(two_layers, backend="aot_eager", fullgraph=True) if compiled else two_layers
    mine = [x.detach().clone().requires_grad_() for x in every[me]]
    result = f(*mine, keep)
    gradients = torch.autograd.grad((result * weights[me]).sum(), mine)
    right = {"value": torch.allclose(result, total[me * SHARE : (me + 1) * SHARE])}
    return right | {
        name: torch.allclose(x, y) for name, x, y in zip("abdef", gradients, expected, strict=True)
    }


def differ() -> None:
    """Call with other columns on every rank."""
    me = dist.get_rank()
    ops.matmul_reduce_scatter(torch.ones(6 * dist.get_world_size(), K), torch.ones(K, 16 + me))


def benchmark(json: str, figure: str | None, wrong: tuple[str, ...] = ()) -> tuple[bool, str]:
    """Return whether ``tileweave bench`` finds all operators right, and its output.

    Args:
        wrong: strategies with which operators return zeros.
    """
    said = io.StringIO()
    operators = {name: getattr(ops, name) for name in operators_of(GemmOperator)}
    for name, operator in operators.items():
        setattr(ops, name, _zeros_if(wrong, operator))
    wanted = bench.BenchOptions(
        shapes=["66x48x36", "24x12x18"], warmups=1, runs=2, json=json, figure=figure
    )
    try:
        with contextlib.redirect_stdout(said):
            right = bench.run(wanted)
    finally:
        for name, operator in operators.items():
            setattr(ops, name, operator)
    return right, said.getvalue()


def benchmark_of_collectives(json: str, wrong: str = "") -> tuple[bool, str]:
    """Return whether ``tileweave bench`` finds all collectives right, and its output.

    Args:
        wrong: an implementation whose result has one wrong element, on the last rank.
    """
    said, makers = io.StringIO(), dict(COLLECTIVES)
    if wrong:
        COLLECTIVES[wrong] = lambda buffers: _off_by_one(makers[wrong](buffers))
    wanted = bench.BenchOptions(["collectives"], sizes=[1], warmups=1, runs=2, json=json)
    try:
        with contextlib.redirect_stdout(said):
            right = bench.run(wanted)
    finally:
        COLLECTIVES.update(makers)
    return right, said.getvalue()


def benchmark_of_mixtures(json: str, model: str) -> tuple[bool, str]:
    """Return whether ``tileweave bench moe`` finds all results right, and its output."""
    said, shapes = io.StringIO(), (model, "8x2x64x32")
    wanted = bench.BenchOptions(
        ["moe"], shapes, (1, 9), routings=ROUTINGS, warmups=1, runs=2, json=json
    )
    with contextlib.redirect_stdout(said):
        right = bench.run(wanted)
    return right, said.getvalue()


def benchmark_against(location: str) -> dict[str, float]:
    """Return the errors of ``matmul_reduce_scatter`` and of a function, ``FILE:FUNCTION``."""
    options = bench.BenchOptions(
        ["matmul_reduce_scatter"], ["66x48x36"], warmups=1, runs=1,
        against=load_function("bench: --against", location),
    )  # fmt: skip
    (case,) = options.cases()
    group = bench.join([case])
    problem = case.problem(group.world_size, bench.DTYPE)
    return bench.measured(case, problem, group, None, options)[0].errors


def errors_of_host_time() -> dict[str, float]:
    """Return the relative errors of what torch computes in benchmarks/host_time.py, on random
    inputs. Cases that return nothing are left out."""

    class Random(host_time.Inputs):
        def zeros(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
            return torch.randn(shape).to(dtype)

    torch.manual_seed(dist.get_rank())
    errors = {}
    for case in (case for family in host_time.FAMILIES for case in family(Random())):
        ours, theirs = case.ours(), case.torch()
        if theirs is not None:
            actual = (ours[0] if isinstance(ours, tuple) else ours)[: len(theirs)].float()
            errors[case.name] = ((actual - theirs.float()).norm() / theirs.float().norm()).item()
    return errors


def _off_by_one(implementation: Implementation) -> Implementation:
    def result(returned: Any) -> torch.Tensor:
        actual = implementation.result(returned).clone()
        actual[-1] += dist.get_rank() == dist.get_world_size() - 1
        return actual

    return replace(implementation, result=result)


def _zeros_if(wrong: tuple[str, ...], operator: Callable[..., Any]) -> Callable[..., Any]:
    def call(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, strategy: str) -> None:
        operator(a, b, out=out, strategy=strategy)
        if strategy in wrong:
            out.zero_()

    return call


def an_arena(op: str) -> tuple[Buffers, Inputs]:
    """A problem of the default group, and inputs."""
    group = group_of("")
    trial = Trial(problem_of(op, 66, 48, 36, group.world_size, torch.float32), group)
    inputs = Inputs.random(trial)
    return Buffers(trial.problem, group, None, {"result": trial.c, "product": trial.c}), inputs


def who_takes_part(broken: int) -> tuple[list[str], dict[str, str]]:
    """Contenders, and why others do not take part, where PyTorch's raises on rank ``broken``."""
    buffers, inputs = an_arena("all_gather_matmul")
    makers = dict(IMPLEMENTATIONS)

    def fail(given: Any) -> torch.Tensor:
        if dist.get_rank() == broken:
            raise RuntimeError("no\nmemory")
        return given.result

    IMPLEMENTATIONS[ASYNC_TP] = lambda buffers: Implementation(fail)
    try:
        implementations, why = implementations_of(buffers, inputs, 2, IMPLEMENTATIONS)
    finally:
        IMPLEMENTATIONS.update(makers)
    return list(implementations), why


def async_tp() -> dict[str, float]:
    """Return the errors of PyTorch's operators, whose CPU versions gather, then multiply."""
    import torch.distributed._symmetric_memory as symmetric_memory

    with torch.library._scoped_library("symm_mem", "IMPL") as library:
        for name in ("fused_all_gather_matmul", "fused_matmul_reduce_scatter"):
            library.impl(name, getattr(symmetric_memory, f"_{name}_fallback"), "CPU")
        return {op: _error_of_async_tp(op) for op in ("all_gather_matmul", "matmul_reduce_scatter")}


def _error_of_async_tp(op: str) -> float:
    buffers, inputs = an_arena(op)
    buffers.group = replace(buffers.group, device=torch.device("cuda"))
    implementation = IMPLEMENTATIONS[ASYNC_TP](buffers)
    checker = Checker({"async_tp": implementation})
    checker("async_tp", inputs, implementation.call(inputs))
    return checker.errors["async_tp"]


def exchange(what: str, where: str, form: str | None = None) -> dict[str, bool]:
    """Compare a collective on every rank of a group with one process."""
    group = part_of_the_world(form) if form else None
    me, count = dist.get_rank(), 2 if form else dist.get_world_size()
    shape = EXCHANGES[what].shape(2 * count, 3 * count)
    x = [numbers(*shape, of=r, what="x") for r in range(count)]
    results = exchange_by_one(x, what)
    out = torch.full_like(results[me], torch.nan) if where == "out" else None
    given = numbers(*shape, of=me, what="x")
    actual = getattr(ops, what.split()[0])(given, *EXCHANGES[what].options, group, out=out)
    right = results[me]
    return {"result": torch.allclose(actual, right), "in out": out is None or actual is out}


def gradients_of_exchange(what: str, compiled: bool) -> dict[str, bool]:
    """Compare gradients of a collective with one process.

    Weights differ between ranks; for an all-reduce they are equal.
    """
    me, count = dist.get_rank(), dist.get_world_size()
    op, options = getattr(ops, what.split()[0]), EXCHANGES[what].options
    shape = EXCHANGES[what].shape(2 * count, 3 * count)
    x = [numbers(*shape, of=r, what="x").requires_grad_() for r in range(count)]
    results = exchange_by_one([given.relu() for given in x], what)
    alike = what == "all_reduce"
    weights = [
        numbers(*y.shape, of=0 if alike else r, what="weight") for r, y in enumerate(results)
    ]
    loss = sum((y * w).sum() for y, w in zip(results, weights, strict=True))
    loss = loss / count if alike else loss
    (right,) = torch.autograd.grad(loss, x[me], materialize_grads=True)

    def f(given):
        return op(given.relu(), *options) * weights[me]

    f = torch.compile(f, backend="aot_eager", fullgraph=True) if compiled else f
    mine = x[me].detach().clone().requires_grad_()
    actual = f(mine)
    (gradient,) = torch.autograd.grad(actual.sum(), mine)
    return {
        "value": torch.allclose(actual, results[me] * weights[me]),
        "gradient": torch.allclose(gradient, right),
    }


def exchange_differs() -> None:
    """Call with another shape on every rank."""
    ops.all_gather(torch.ones(2, 3 + dist.get_rank()))


def exchange_differs_after_known_calls() -> list[tuple[str, float]]:
    """Give, in a call after others, a new shape on rank 1. Then repeat the known call, and make a
    new one.

    Returns the error of each of these calls, with the seconds that it took.
    """
    for _ in range(2):
        ops.all_reduce(torch.ones(2, 3))
    errors = []
    for shape in ((2, 3 + dist.get_rank()), (2, 3), (5,)):
        begin = time.monotonic()
        try:
            ops.all_reduce(torch.ones(shape))
        except TileWeaveError as error:
            errors.append((str(error), time.monotonic() - begin))
    return errors


def differ_while_a_rank_is_late(seconds: float) -> tuple[str, float]:
    """Give a new shape on each rank, on the last one later; then give one shape on all ranks.

    Returns the error, and the sum of the result.
    """
    time.sleep(seconds * (dist.get_rank() == 2))
    try:
        ops.all_reduce(torch.ones(7, 3 + dist.get_rank()))
    except TileWeaveError as error:
        return str(error), float(ops.all_reduce(torch.ones(7, 2)).sum())
    return "", 0.0


def late_after_known_calls(seconds: float) -> float:
    """Make calls, in each of which another rank is late."""
    total = 0.0
    for call in range(3):
        if call == dist.get_rank():
            time.sleep(seconds)
        total += float(ops.all_reduce(torch.ones(5 + call % 2)).sum())
    return total


def strides() -> dict[str, bool]:
    """Tensors of one column, or of one element, are contiguous whatever their strides are."""
    me, right = dist.get_rank(), {}
    column, element = numbers(1, 4, of=me, what="x").t(), numbers(4, 4, of=me, what="x")[:1, 0]
    for name, x in (("column", column), ("element", element)):
        right[name] = torch.equal(ops.all_gather(x), torch.cat(_everyones(x)))
    b = numbers(1, 5, of=me, what="b")
    right["product"] = torch.allclose(
        ops.all_gather_matmul(column, b), torch.cat(_everyones(column)) @ b
    )
    return right


def _everyones(x: torch.Tensor) -> list[torch.Tensor]:
    results = [torch.empty(x.shape, dtype=x.dtype) for _ in range(dist.get_world_size())]
    dist.all_gather(results, x.contiguous().clone(memory_format=torch.contiguous_format))
    return results


def groups_that_come_and_go() -> int:
    """Return the number of descriptors that five groups leave open after use and destruction."""

    def once() -> None:
        group = dist.new_group()
        ops.all_gather(torch.ones(2), group)
        dist.barrier()
        dist.destroy_process_group(group)

    once()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        once()
    gc.collect()
    return len(os.listdir("/proc/self/fd")) - before
