"""A compiled program is launched once with stand-in arguments, into a graph that is discarded.

The kernel is a fake; its program is not.
"""

import contextlib
from typing import Any

import pytest
import tilelang.language as T
import torch
from tilelang import tvm
from tilelang.engine.param import KernelParam

from tests.groups import one_rank
from tileweave import language as W
from tileweave import passes
from tileweave.runtime.host.heap import Heap
from tileweave.runtime.host.memory import memory_of
from tileweave.runtime.kernel import warm
from tileweave.runtime.kernel.shared_program import SharedProgram, SizedProgram


@T.prim_func
def scale(
    A: T.Tensor((64, 32), "float16"),
    factor: T.float32,
    C: T.StridedTensor((64, 32), (100, 1), "int64"),
    D: T.Tensor((1 << 40,), "uint8"),
):
    with T.Kernel(1, threads=32):
        C[0, 0] = T.Cast("int64", T.Cast("float32", A[0, 0]) * factor)
        D[0] = T.uint8(1)


n = T.dynamic("n")


@T.prim_func
def symbolic(A: T.Tensor((n, 4), "float32")):
    with T.Kernel(1, threads=32):
        A[0, 0] = T.float32(1)


@T.prim_func
def symmetric(S: W.Symmetric((8,), "float32")):
    with T.Kernel(1, threads=32):
        S[W.rank(), 0] = T.float32(1)


class FakeKernel:
    """Attributes of a TileLang kernel that ``warm`` reads; it records its calls."""

    def __init__(self, func, out_idx: list[int] | None = None) -> None:
        self.prim_func, self.out_idx = func, out_idx
        self.params = [
            KernelParam.from_buffer(func.buffer_map[p])
            if p in func.buffer_map
            else KernelParam.from_var(p)
            for p in func.params
        ]
        self.calls: list[tuple[Any, ...]] = []

    def __call__(self, *args: Any) -> None:
        self.calls.append(args)


class FakeSession:
    def __init__(self) -> None:
        self.group = one_rank()
        self.heap = Heap(self.group, memory_of(self.group, 1 << 20), 0)


@pytest.fixture
def graphs(monkeypatch) -> list[dict[str, Any]]:
    """Record the captured graphs."""
    recorded: list[dict[str, Any]] = []

    @contextlib.contextmanager
    def record(graph, **options):
        recorded.append(options)
        yield

    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "graph", record)
    return recorded


def test_arguments_have_the_programs_types(graphs):
    kernel, session = FakeKernel(scale), FakeSession()
    assert warm.warm(kernel, session)
    ((a, factor, c, d),) = kernel.calls
    assert factor == warm.SCALAR
    assert [(t.dtype, tuple(t.shape), t.stride()) for t in (a, c, d)] == [
        (torch.float16, (64, 32), (32, 1)),
        (torch.int64, (64, 32), (100, 1)),
        (torch.uint8, (1 << 40,), (1,)),
    ]
    assert {t.data_ptr() for t in (a, c, d)} == {session.heap.base}
    assert graphs == [{"capture_error_mode": "relaxed"}]


@pytest.mark.parametrize("out_idx", [[2], [-2]])
def test_output_parameters_are_left_out(graphs, out_idx):
    kernel = FakeKernel(scale, out_idx)
    assert warm.warm(kernel, FakeSession())
    ((a, factor, d),) = kernel.calls
    assert (a.dtype, factor, d.dtype) == (torch.float16, warm.SCALAR, torch.uint8)


def test_symbolic_shapes_get_stand_ins(graphs):
    kernel = FakeKernel(symbolic)
    assert warm.warm(kernel, FakeSession())
    (tensor,) = kernel.calls[0]
    assert (tuple(tensor.shape), tensor.stride()) == ((warm.EXTENT, 4), (4, 1))


def test_a_program_that_takes_no_stand_in_is_named(graphs):
    class Refusing(FakeKernel):
        def __call__(self, *args: Any) -> None:
            raise ValueError("shape[0] violates a constraint")

    with pytest.warns(UserWarning, match=r"symbolic could not be loaded .* violates a constraint"):
        assert warm.warm(Refusing(symbolic), FakeSession()) is False


def test_a_symbolic_output_is_no_argument(graphs):
    kernel = FakeKernel(symbolic, [0])
    assert warm.warm(kernel, FakeSession())
    assert kernel.calls == [()]


def test_symmetric_tensors_once_their_group_is_known(graphs):
    (program,) = passes.run_group(
        tvm.IRModule({"symmetric": symmetric}), 4, 1 << 21
    ).functions.values()
    kernel = FakeKernel(program)
    assert warm.warm(kernel, FakeSession())
    (tensor,) = kernel.calls[0]
    assert (tuple(tensor.shape), tensor.stride()) == ((4, 8), (1 << 19, 1))


def rows(count):
    @T.prim_func
    def rows(A: T.Tensor((count, 32), "float32")):
        with T.Kernel(count, threads=32) as row:
            A[row, T.get_thread_binding()] = 1

    return SizedProgram(rows)


def test_integers_of_a_shared_program_are_those_of_its_first_size(graphs):
    program = SharedProgram.of([rows(48), rows(80)])
    kernel = FakeKernel(program.program)
    assert warm.warm(kernel, FakeSession(), program.arguments(rows(48)))
    ((tensor, size),) = kernel.calls
    assert (tuple(tensor.shape), size) == ((48, 32), 48)
