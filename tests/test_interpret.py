"""``tw.interpret`` runs TileLang kernels that are called with CPU tensors in the simulator."""

import math
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import tilelang
import tilelang.language as T
import torch
from tilelang import tvm
from tilelang.autotuner import autotune
from tilelang.autotuner.tuner import AutoTuneImpl, AutoTuner
from tilelang.jit import JITImpl, JITKernel

import tileweave as tw
from tests.releases import RECORDS_LINES
from tileweave import interpreter
from tileweave.codegen.compile import compile_by_tilelang

JIT = sys.modules["tilelang.jit"]
M = T.dynamic("M")


@tilelang.jit(out_idx=[-1])
def double(n, dtype, block=32):
    @T.prim_func
    def kernel(A: T.Tensor((n,), dtype), B: T.Tensor((n,), dtype)):
        with T.Kernel(T.ceildiv(n, block), threads=32) as b:
            for i in T.Parallel(block):
                B[b * block + i] = A[b * block + i] * 2

    return kernel


@tilelang.jit
def matmul(A, B, C, block: int = 32):
    m, n, k = T.const("m n k")
    A: T.Tensor((m, k), "float16")
    B: T.Tensor((k, n), "float16")
    C: T.Tensor((m, n), "float32")
    with T.Kernel(T.ceildiv(n, block), T.ceildiv(m, block), threads=128) as (bx, by):
        a = T.alloc_shared((block, block), "float16")
        b = T.alloc_shared((block, block), "float16")
        c = T.alloc_fragment((block, block), "float32")
        T.clear(c)
        for i in T.Pipelined(T.ceildiv(k, block), num_stages=2):
            T.copy(A[by * block, i * block], a)
            T.copy(B[i * block, bx * block], b)
            T.gemm(a, b, c)
        T.copy(c, C[by * block, bx * block])


@tilelang.jit
def negative(A):
    n = T.const("n")
    A: T.Tensor((n,), "float32")
    B = T.empty((n,), "float32")
    with T.Kernel(T.ceildiv(n, 32), threads=32) as b:
        for i in T.Parallel(32):
            B[b * 32 + i] = -A[b * 32 + i]
    return B


@T.prim_func
def add_rows(X: T.Tensor((M, 32), "float32"), y: T.float32, Y: T.Tensor((M, 32), "float32")):
    with T.Kernel(M, threads=32) as m:
        for i in T.Parallel(32):
            T.atomic_add(Y[m, i], X[m, i] + y)


@pytest.fixture(params=["tile", "device"])
def interpreted(request):
    with tw.interpret(level=request.param):
        yield


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float8_e4m3fn"])
def test_outputs_are_returned_in_their_type(interpreted, name):
    a = torch.arange(64).to(getattr(torch, name))
    result = double(64, name)(a)
    assert result.dtype == a.dtype
    assert torch.equal(result.float(), 2 * a.float())


@pytest.mark.skipif(not hasattr(torch, "float4_e2m1fn_x2"), reason="this torch has no fp4")
def test_a_byte_holds_two_elements_of_4_bits(interpreted):
    codes = torch.tensor([0, 1, 2, 3, 8, 9, 10, 11] * 8, dtype=torch.uint8)
    doubled = torch.tensor([0, 2, 4, 5, 8, 10, 12, 13] * 8, dtype=torch.uint8)
    pack = lambda c: (c[0::2] | c[1::2] << 4).view(torch.float4_e2m1fn_x2)  # noqa: E731
    result = double(64, "float4_e2m1fn")(pack(codes))
    assert torch.equal(result.view(torch.uint8), pack(doubled).view(torch.uint8))


def test_a_byte_holds_two_integers_of_4_bits():
    """At the device level they are refused: they have no bytes of their own in shared memory."""

    @T.prim_func
    def product(A: T.Tensor((32, 64), "int4"), C: T.Tensor((32, 32), "int32")):
        with T.Kernel(1, threads=128):
            x = T.alloc_shared((32, 64), "int4")
            total = T.alloc_fragment((32, 32), "int32")
            T.copy(A, x)
            T.clear(total)
            T.gemm(x, x, total, transpose_B=True)
            T.copy(total, C)

    @T.prim_func
    def opposite(A: T.Tensor((32, 64), "int4"), B: T.Tensor((32, 64), "int4")):
        with T.Kernel(1, threads=128):
            for i, j in T.Parallel(32, 64):
                B[i, j] = -A[i, j]

    a = torch.randint(-8, 8, (32, 64), dtype=torch.int8)
    pack = lambda n: (n[:, 0::2] & 15 | n[:, 1::2] << 4).to(torch.int8)  # noqa: E731
    c, b = torch.zeros(32, 32, dtype=torch.int32), torch.zeros(32, 32, dtype=torch.int8)
    with tw.interpret("tile"):
        tilelang.compile(product)(pack(a), c)
        tilelang.compile(opposite)(pack(a), b)
    assert torch.equal(c, a.int() @ a.int().T)
    assert torch.equal(b, pack(-a))
    with tw.interpret("device", "sm_80"), pytest.raises(tw.SimulationError, match="unsupported"):
        tilelang.compile(product)(pack(a), c)


def test_eager_functions_write_in_place(interpreted):
    a = torch.randn(64, 96, dtype=torch.float16)
    b = torch.randn(96, 64, dtype=torch.float16)
    c = torch.zeros(64, 64)
    assert matmul(a, b, c) == []
    torch.testing.assert_close(c, a.float() @ b.float(), rtol=1e-3, atol=1e-3)


def test_tensors_of_an_eager_function_are_returned(interpreted):
    a = torch.randn(96)
    assert torch.equal(negative(a), -a)
    a = torch.randn(64)
    assert torch.equal(negative(a), -a)


def test_one_call_is_one_launch_and_binds_dynamic_sizes(interpreted):
    kernel = tilelang.compile(add_rows)
    for rows in (3, 5):
        x, y = torch.randn(rows, 32), torch.ones(rows, 32, requires_grad=True)
        kernel(x, 1.5, y)
        torch.testing.assert_close(y.detach(), x + 2.5)


@T.prim_func
def copy_strided(
    X: T.StridedTensor((32, 8), (T.dynamic("s"), 2), "float32"), Y: T.Tensor((32, 8), "float32")
):
    with T.Kernel(1, threads=32):
        for i, j in T.Parallel(32, 8):
            Y[i, j] = X[i, j]


def test_strides_are_those_that_the_kernel_declares():
    x, y = torch.randn(32, 24)[:, :16:2], torch.zeros(32, 8)
    with tw.interpret():
        kernel = tilelang.compile(copy_strided)
        kernel(x, y)
        assert torch.equal(x, y)
        for arguments, message in (
            ((x, torch.zeros(8, 32).T), r"Y has strides \(1, 32\); expected \(8, 1\), as on a GPU"),
            ((y, y), r"copy_strided: X has strides \(8, 1\); expected \(8, 2\)"),
        ):
            with pytest.raises(tw.TileWeaveError, match=message):
                kernel(*arguments)
    with (
        tw.interpret(level="device"),
        pytest.raises(tw.SimulationError, match=r"X with strides \(s, 2\) below the tile level"),
    ):
        kernel(x, y)


@pytest.mark.skipif(
    not hasattr(T, "make_tensor_from_addr"), reason="this TileLang has no tensors at addresses"
)
def test_tensors_at_addresses_are_written_in_place(interpreted):
    @T.prim_func
    def scale(P: T.Tensor((2,), "int64"), factor: T.float32):
        with T.Kernel(4, threads=32) as b:
            X = T.make_tensor_from_addr(P[b // 2], (2, 32), "float32")
            tile = T.alloc_shared((1, 32), "float32")
            T.copy(X[b % 2, 0], tile)
            for i in T.Parallel(32):
                X[b % 2, i] = tile[0, i] * factor

    kernel, first = tilelang.compile(scale), torch.randn(5, 32)
    x, y = first[3:], torch.nn.Parameter(torch.randn(2, 32))
    expected = [t.detach() * 3 for t in (x, y)] + [first[:3].clone()]
    kernel(torch.tensor([x.data_ptr(), y.data_ptr()]), 3.0)
    assert all(torch.equal(*pair) for pair in zip((x, y, first[:3]), expected, strict=True))
    with pytest.raises(tw.SimulationError, match=r"X at the address 0x10, by rank 0, block [01] "):
        kernel(torch.tensor([16, y.data_ptr()]), 1.0)
    with pytest.raises(tw.SimulationError, match=r"race: .* of \*X\[0"):
        kernel(torch.tensor([x.data_ptr()] * 2), 1.0)
    with tw.interpret(blocks=2), pytest.raises(tw.TileWeaveError, match="with tensors at addresse"):
        kernel(torch.tensor([x.data_ptr()] * 2), 1.0)


def test_wrong_arguments_are_named(interpreted):
    kernel = tilelang.compile(add_rows)
    with pytest.raises(tw.TileWeaveError, match=r"add_rows: missing a required argument: 'Y'"):
        kernel(torch.ones(3, 32), 1.0)
    with pytest.raises(tw.TileWeaveError, match=r"Y of rank 0 is float64 \(3, 32\); expected flo"):
        kernel(torch.ones(3, 32), 1.0, torch.ones(3, 32).double())


@pytest.mark.parametrize(("dtype", "missing"), [("float32", math.nan), ("int32", 7)])
def test_elements_of_blocks_that_do_not_run_are_nan(dtype, missing):
    a, b = (
        torch.arange(128).to(getattr(torch, dtype)),
        torch.full((128,), 7).to(getattr(torch, dtype)),
    )
    with (
        tw.interpret(blocks=2),
        pytest.warns(tw.SimulationWarning, match="2 blocks compute 64 of 128 elements of B"),
    ):
        tilelang.compile(double.get_tir(128, dtype))(a, b)
    expected = torch.cat([a[:32] * 2, torch.full((64,), missing, dtype=a.dtype), a[96:] * 2])
    torch.testing.assert_close(b, expected, equal_nan=True)


@T.prim_func
def race(A: T.Tensor((32,), "float32"), B: T.Tensor((32,), "float32")):
    with T.Kernel(2, threads=32) as b:
        for i in T.Parallel(32):
            B[i] = A[i] + b  # race


@T.prim_func
def beyond(A: T.Tensor((32,), "float32"), B: T.Tensor((32,), "float32")):
    with T.Kernel(1, threads=32):
        tile = T.alloc_shared((32,), "float32")
        T.copy(A, tile)
        B[T.get_thread_binding()] = tile[T.get_thread_binding() + 1]  # bounds


@T.prim_func
def uninitialized(A: T.Tensor((32,), "float32"), B: T.Tensor((32,), "float32")):
    with T.Kernel(1, threads=32):
        tile = T.alloc_shared((32,), "float32")
        for i in T.Parallel(31):
            tile[i] = A[i]
        T.copy(tile, B)  # poison


@T.prim_func
def stuck(A: T.Tensor((32,), "float32"), B: T.Tensor((32,), "float32")):
    with T.Kernel(1, threads=32):
        barrier = T.alloc_barrier(arrive_count=32)
        T.barrier_wait(barrier[0], 0)  # deadlock
        T.copy(A, B)


@pytest.mark.parametrize(
    ("program", "kind"),
    [(race, "race"), (beyond, "bounds"), (uninitialized, "poison"), (stuck, "deadlock")],
)
def test_faults_name_their_line(interpreted, program, kind):
    kernel = tilelang.compile(program)
    with pytest.raises(tw.SimulationError) as error:
        kernel(torch.ones(32), torch.ones(32))
    assert error.value.kind == kind
    lines = Path(__file__).read_text().splitlines()
    (line,) = (n for n, text in enumerate(lines, 1) if text.endswith(f"  # {kind}"))
    assert not RECORDS_LINES or f"{__file__}:{line}" in str(error.value)


def state():
    owners = (JIT, JITImpl, JITKernel, AutoTuner, AutoTuneImpl)
    return [dict(vars(owner)) for owner in owners], tvm.target.Target.current(allow_none=True)


def test_nothing_of_tilelang_is_changed_outside():
    before = state()
    with tw.interpret():
        assert state() != before
        with pytest.raises(ZeroDivisionError), tw.interpret(level="device"):
            1 / 0  # noqa: B018
        assert torch.equal(negative(torch.ones(32)), -torch.ones(32))
    assert state() == before


def test_the_last_of_several_threads_restores_tilelang():
    before = state()[0]
    entered, leave = threading.Event(), threading.Event()

    def enter():
        with tw.interpret(level="device"):
            entered.set()
            leave.wait()

    thread = threading.Thread(target=enter)
    thread.start()
    entered.wait()
    with tw.interpret() as calls:
        leave.set()
        thread.join()
        assert torch.equal(negative(torch.ones(32)), -torch.ones(32))
    assert calls == {"negative": 1}
    assert state()[0] == before


@pytest.fixture
def compiled(monkeypatch):
    """Replace TileLang's compiler; return the programs that it was called with."""
    programs = []

    def compile_stock(func, *args, **options):
        programs.append(func)
        adapter = SimpleNamespace(get_kernel_source=lambda kernel_only: "compiled")
        return SimpleNamespace(
            torch_function=lambda *args: "launched", get_kernel_source=adapter.get_kernel_source
        )

    monkeypatch.setattr(interpreter, "_compile", compile_stock)
    return programs


@pytest.mark.parametrize(
    "target",
    ["auto", "cuda", {"kind": "cuda", "arch": "sm_80"}, tvm.target.Target("cuda")],
    ids=str,
)
def test_kernels_of_all_cuda_targets_are_interpreted(compiled, target):
    with tw.interpret():
        assert (
            tilelang.compile(add_rows, target=target)(torch.ones(3, 32), 1.0, torch.ones(3, 32))
            == []
        )
    assert not compiled


def test_other_calls_are_those_of_tilelang(compiled):
    gpu = torch.empty(128, device="meta")
    with tw.interpret():
        kernel = double(128, "float32")
        assert not compiled
        assert kernel(gpu) == kernel(gpu) == "launched"
        assert len(compiled) == 1
        assert "__global__" in kernel.get_kernel_source()
    assert kernel(torch.ones(128)) == "launched"
    assert kernel.get_kernel_source() == "compiled"


def test_kernels_of_other_targets_and_of_groups_are_compiled(compiled):
    with tw.interpret():
        tilelang.compile(add_rows, target="c")
        compile_by_tilelang(add_rows)
    assert len(compiled) == 2


def test_kernels_that_were_compiled_before_are_interpreted():
    target = {"kind": "cuda", "arch": "sm_90a"}
    kernel = JITKernel(add_rows, None, "tvm_ffi", target, from_database=True)
    kernel.adapter = SimpleNamespace(result_idx=[])
    kernel.torch_function = lambda *args: "launched"
    arguments = torch.ones(3, 32), 1.0, torch.zeros(3, 32)
    with tw.interpret():
        assert kernel(*arguments) == []
        assert torch.equal(arguments[2], torch.full((3, 32), 2.0))
        assert kernel(torch.ones(3, 32, device="meta"), 1.0, arguments[2]) == "launched"
    assert kernel(*arguments) == "launched"


def test_autotune_chooses_the_first_configuration():
    tuned = autotune(configs=[{"block": 16}, {"block": 64}])(double)
    options = {"pass_configs": {"tl.disable_safe_memory_legalize": True}}
    configured = autotune(configs=lambda n, dtype: [{"block": 16} | options])(double)
    with tw.interpret():
        with pytest.warns(tw.SimulationWarning, match=r"first of 2 configurations, {'block': 16}"):
            kernel = tuned(64, "float32")
        assert torch.equal(kernel(torch.ones(64)), torch.full((64,), 2.0))
        assert kernel.config == {"block": 16}
        assert math.isnan(kernel.latency)
        assert tuned(64, "float32", block=32).config == {}
        assert configured(64, "float32").pass_configs == options["pass_configs"]
    assert tuned._tuner_cache == {}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"level": "warp"}, "interpret: level='warp'; expected 'tile' or 'device'"),
        ({"arch": "sm_70"}, "interpret: arch='sm_70'; expected 'sm_80' or 'sm_90a'"),
        ({"blocks": 0}, "interpret: blocks=0; expected an integer from 1 on, or None"),
        ({"schedules": 0}, "interpret: schedules=0; expected an integer from 1 to"),
    ],
)
def test_illegal_arguments_are_named(arguments, message):
    with pytest.raises(tw.TileWeaveError) as error:
        tw.interpret(**arguments)
    assert str(error.value).startswith(message)


@tilelang.jit
def late(n: int = 32):
    """Store a tile without a barrier before the threads that load it, in another warp."""

    @T.prim_func
    def program(A: T.Tensor((n,), "int32"), B: T.Tensor((n,), "int32")):
        with T.Kernel(1, threads=64):
            tile, t = T.alloc_shared((n,), "int32"), T.get_thread_binding()
            if t < n:
                tile[t] = A[t]
            else:
                B[t - n] = tile[t - n]

    return program


def test_the_device_level_runs_what_tilelang_lowers():
    A, B = torch.ones(32, dtype=torch.int32), torch.zeros(32, dtype=torch.int32)
    with tw.interpret("device"), pytest.raises(tw.SimulationError) as fault:
        late()(A, B)
    assert fault.value.kind in ("race", "poison")
