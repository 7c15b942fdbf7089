"""Operations that the simulator does not support: the report has name and line."""

import inspect
import re

import pytest
import tilelang.language as T

import tileweave as tw
from tests.factory import factory
from tests.releases import names_line
from tests.simulator.frontend.launch import N
from tileweave import language as W


def refused(name):
    def put(make):
        make = REFUSED[name] = factory(make)
        return make

    return put


REFUSED = {}


@refused("gemm_sp")
def sparse(A: T.Tensor((N, 32), "float16"), C: T.Tensor((N, N), "float32")):
    with T.Kernel(1, threads=128) as _:
        a = T.alloc_shared((N, 32), "float16")
        e = T.alloc_shared((N, 8), "uint8")
        b = T.alloc_shared((N, N), "float16")
        c = T.alloc_fragment((N, N), "float32")
        T.gemm_sp(a, e, b, c)  # HERE


@refused(r"T.call_extern of my_function without @tw.stand_in\('my_function'\)")
def extern(A: T.Tensor((4,), "int32")):
    with T.Kernel(1, threads=32) as _:
        T.call_extern("handle", "my_function", A.data)  # HERE


@refused("a vector of x in each point of T.Parallel is not simulated")
def vectors_of_points(A: T.Tensor((N,), "float32"), B: T.Tensor((N,), "float32")):
    with T.Kernel(1, threads=32) as _:
        x = T.alloc_local((2,), "float32")
        for i in T.Parallel(N // 2):
            x[0:2] = A[i * 2 : i * 2 + 2]  # HERE
            B[i * 2] = x[1]


@refused("match_all_sync")
def match_all(A: T.Tensor((32,), "int32")):
    with T.Kernel(1, threads=32) as _:
        t = T.get_thread_binding()
        A[t] = T.Cast("int32", T.match_all_sync(A[t]))  # HERE


@refused("a loop outside a kernel")
def loop_of_kernels(A: T.Tensor((32,), "int32")):
    for k in T.serial(3):  # HERE
        with T.Kernel(1, threads=32) as _:
            A[T.get_thread_binding()] = k


@refused("bits, a view of another type")
def view_of_another_type(A: T.Tensor((32,), "float32"), B: T.Tensor((32,), "int32")):
    with T.Kernel(1, threads=32) as _:
        x = T.alloc_shared((32,), "float32")
        T.copy(A, x)
        bits = T.view(x, (32,), "int32")
        for i in T.Parallel(32):
            B[i] = bits[i]  # HERE


@refused(r"x with elements of float16x2 is not simulated; expected float16, which x\[i : i \+ 2\]")
def tile_of_vectors(A: T.Tensor((32,), "int32")):
    with T.Kernel(1, threads=32) as _:
        x = T.alloc_shared((32,), "float16x2")  # HERE
        for i in T.Parallel(32):
            x[i] = T.reinterpret(A[i], "float16x2")


@pytest.mark.parametrize("dtype", ["float16x2", "bfloat16x2"])
@pytest.mark.parametrize("level", ["tile", "device"])
def test_tensors_of_vectors_are_refused(dtype, level):
    @T.prim_func
    def parameters(A: T.Tensor((32,), "int32"), B: T.Tensor((32,), dtype)):
        with T.Kernel(1, threads=32) as _:
            for i in T.Parallel(32):
                B[i] = T.reinterpret(A[i], dtype)

    @T.prim_func
    def allocated(A: T.Tensor((32,), "int32")):
        with T.Kernel(1, threads=32) as _:
            B = W.alloc_symmetric((32,), dtype)
            for i in T.Parallel(32):
                B[W.rank(), i] = T.reinterpret(A[i], dtype)

    @tw.plan
    def copies(p, A: T.Tensor((32,), dtype), B: T.Tensor((32,), dtype)):
        p.copy(B, A)

    for program in (parameters, allocated, copies):
        with pytest.raises(tw.SimulationError) as error:
            tw.simulate(program, 1, level=level)
        assert error.value.kind == "unsupported"
        assert f" with elements of {dtype} is not simulated" in error.value.report


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_unsupported_operations_are_named_with_their_line(name):
    lines, first = inspect.getsourcelines(REFUSED[name])
    (here,) = [first + n for n, line in enumerate(lines) if "# HERE" in line]
    with pytest.raises(tw.SimulationError) as error:
        tw.simulate(REFUSED[name](), 1)
    assert error.value.kind == "unsupported"
    assert re.search(name, error.value.report)
    assert names_line(f"{error.value.report}\n", f"test_unsupported.py:{here}\n")
