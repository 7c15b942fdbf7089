"""Programs for several sizes that share a kernel, with its integers as arguments."""

import random
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from tvm import tirx
from tvm.arith import Analyzer
from tvm.tirx.stmt_functor import ir_transform, post_order_visit, substitute

import tileweave as tw
from tileweave.ops.core.problem import Problem
from tileweave.ops.core.registry import OPERATORS
from tileweave.ops.core.tiles import Choice, Tiles
from tileweave.runtime import Plan
from tileweave.runtime.kernel import shared_program
from tileweave.runtime.kernel.shared_program import SharedProgram, SizedProgram
from tileweave.simulator.device.lowering import DeviceFunctions, for_group, lowered
from tileweave.simulator.device.program import DeviceProgram
from tileweave.simulator.frontend.program import lowered as tile_level
from tileweave.simulator.machine.executable import Executable

RANKS, N, K = 2, 32, 32
TILES = Tiles(16, 16, 16, 2, 32)
PROGRAMS = [(op, name) for op in (
    "all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"
) for name in OPERATORS[op].programs]  # fmt: skip


class Shared:
    """Kernels of programs for several sizes, as a session has them."""

    def __init__(self, arch: str = "sm_90a") -> None:
        self.kernels: dict[object, list[tuple[SharedProgram, DeviceFunctions]]] = {}
        self._arch, self._known = arch, {}

    def add(self, func: tirx.PrimFunc) -> None:
        instance = SizedProgram(for_group(func, RANKS))
        self._known.setdefault(instance.form, {})[instance.integers] = instance

    def find(self, func: tirx.PrimFunc) -> tuple[SharedProgram, DeviceFunctions, tuple[int, ...]]:
        instance = SizedProgram(for_group(func, RANKS))
        kernels = self.kernels.setdefault(instance.form, [])
        for shared, functions in kernels:
            if (arguments := shared.arguments(instance)) is not None:
                return shared, functions, arguments
        known = self._known.get(instance.form, {})
        shared = SharedProgram([instance, *known.values()])
        kernels.append((shared, lowered(func, RANKS, self._arch, shared.program)))
        return *kernels[-1], shared.arguments(instance)

    def program(self, func: tirx.PrimFunc, world_size: int) -> DeviceProgram:
        """Return the device functions of the shared kernel with the arguments of ``func``."""
        shared, functions, arguments = self.find(func)
        values = dict(zip((p.name for p in shared.parameters), arguments, strict=True))
        kernels = [with_values(kernel, values) for kernel in functions.kernels]
        maps = {
            parameter: replace(
                tensor_map,
                shape=[at_values(e, values) for e in tensor_map.shape],
                strides=[at_values(e, values) for e in tensor_map.strides],
            )
            for parameter, tensor_map in functions.descriptors.items()
        }
        below = DeviceFunctions(tile_level(func, RANKS), kernels, maps, functions.bound)
        return DeviceProgram(func, world_size, self._arch, below=below)


def at_values(expr, values):
    if not isinstance(expr, tirx.PrimExpr):
        return expr
    variables = {}
    post_order_visit(expr, lambda n: variables.update({n: n}) if isinstance(n, tirx.Var) else None)
    named = {v: tirx.IntImm(v.dtype, values[v.name]) for v in variables if v.name in values}
    return substitute(expr, named)


def with_values(kernel, values):
    """Return a device function with integers in the place of these parameters."""
    numbers = {p: tirx.IntImm(p.dtype, values[p.name]) for p in kernel.params if p.name in values}
    params = [p for p in kernel.params if p.name not in values]
    body = substitute(kernel.body, numbers)
    return tirx.PrimFunc(params, body, kernel.ret_type, kernel.buffer_map, kernel.attrs)


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
    """Return ``func`` without casts and maxima of integers, and with simple shapes."""

    def fold(node):
        if isinstance(node, tirx.Cast):
            is_number = isinstance(node.value, tirx.IntImm)
            return tirx.IntImm(node.dtype, int(node.value)) if is_number else None
        if isinstance(node.a, tirx.IntImm) and isinstance(node.b, tirx.IntImm):
            return tirx.IntImm(node.dtype, max(int(node.a), int(node.b)))
        return None

    tensors = [func.buffer_map[p] for p in func.params if p in func.buffer_map]
    simplify = Analyzer().simplify
    shapes = {b.data: list(map(simplify, b.shape)) for b in tensors}
    strides = {b.data: list(map(simplify, b.strides)) for b in tensors}
    body = ir_transform(func.body, None, fold, ["tirx.Cast", "tirx.Max"])
    return shared_program._with_shapes(func, body, shapes, strides)


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
            instance = SizedProgram(for_group(func, RANKS))
            shared.setdefault(instance.form, []).append(instance)
    assert len(shared) <= 9
    for instances in shared.values():
        program = SharedProgram(instances)
        for instance in instances:
            same = with_constants(program, program.arguments(instance))
            assert text_of(same) == text_of(folded(instance.program))


def product(op, name, rows, arch, shared):
    """Return the results of all ranks for a number of rows, and the right ones; small integers, so
    all sums are exact."""
    program, rng = gemm(op, name, rows), np.random.default_rng(rows)
    gathers, scatters = OPERATORS[op].gathers, OPERATORS[op].scatters
    height = rows * RANKS if scatters else rows
    a = [rng.integers(-2, 3, (height, K)).astype(np.float16) for _ in range(RANKS)]
    b = [rng.integers(-2, 3, (N, K)).astype(np.float16) for _ in range(RANKS)]
    parameters = program.parameters if isinstance(program, Plan) else ()
    identity = {
        p.name: np.eye(*p.extents, dtype=p.dtype) for p in parameters if p.name == "identity"
    }
    inputs = [{"A": x, "B": y, **identity} for x, y in zip(a, b, strict=True)]
    executable = Executable(program, RANKS, shared.program)
    outputs = [o["C"] for o in tw.simulate(executable, RANKS, inputs, resident_blocks=64)]
    if gathers:
        return outputs, [np.concatenate(a) @ y.T for y in b]
    total = sum(x.astype(np.float32) @ y.T for x, y in zip(a, b, strict=True))
    parts = [total[r * rows :][:rows] if scatters else total for r in range(RANKS)]
    return outputs, [part.astype(np.float16) for part in parts]


def check_products(op, name, arch, sizes):
    shared = Shared(arch)
    for rows in (TILES.M * 3, TILES.M * 7, 41, 90, 5):
        for func in kernels_of(gemm(op, name, rows)):
            shared.add(func)
    for rows in sizes:
        actual, right = product(op, name, rows, arch, shared)
        for x, y in zip(actual, right, strict=True):
            np.testing.assert_array_equal(x.reshape(y.shape), y, err_msg=f"{rows} rows")
    return shared


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize(
    ("op", "name"), [("matmul_reduce_scatter", "stores"), ("matmul_all_reduce", "two_shot")]
)
def test_shared_kernels_compute_each_size(op, name, arch):
    shared = check_products(op, name, arch, (32, 23, 80, 7))
    assert sum(map(len, shared.kernels.values())) <= 3


@pytest.mark.long
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize(("op", "name"), PROGRAMS)
def test_random_sizes(op, name, arch):
    rng = random.Random(f"{op} {name}")
    check_products(op, name, arch, [rng.randint(1, 120) for _ in range(12)])
