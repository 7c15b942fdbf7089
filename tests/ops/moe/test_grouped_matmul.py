"""``ops.grouped_matmul``: values, gradients, torch.compile and errors, without a GPU."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

import tileweave as tw
from tests.ops.moe.simulated_kernels import recorded_launches, simulate_kernels
from tileweave import ops
from tileweave.ops.moe import grouped_matmul as module
from tileweave.ops.moe import local_kernels
from tileweave.runtime.executor import recorded_calls

E, N, K, ROWS = 4, 6, 10, 23
ENDS = {
    "mixed": [5, 5, 17, 20],
    "none": [0, 0, 0, 0],
    "last": [0, 0, 0, ROWS],
    "all": [4, 9, 22, 23],
}
FP8 = torch.float8_e4m3fn
ORDERS = ["(E, N, K)", "(E, K, N)"]


def offsets_of(ends):
    return torch.tensor(ends, dtype=torch.int32)


def operands(order, dtype=torch.float64, grad=False):
    torch.manual_seed(0)
    x = torch.randn(ROWS, K).to(dtype)
    w = torch.randn(E, N, K) if order == ORDERS[0] else torch.randn(E, K, N).transpose(1, 2)
    return x.requires_grad_(grad), w.to(dtype).requires_grad_(grad)


def by_loop(x, w, ends):
    rows = [x[begin:end] @ w[e].t() for e, (begin, end) in enumerate(pairwise([0, *ends]))]
    return torch.cat([*rows, x.new_zeros(len(x) - ends[-1], w.shape[1])])


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("ends", ENDS.values(), ids=ENDS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("given_out", [False, True], ids=["new", "out"])
def test_value(order, ends, dtype, given_out):
    x, w = operands(order, dtype)
    out = torch.full((ROWS, N), torch.nan, dtype=dtype) if given_out else None
    y = ops.grouped_matmul(x, w, offsets_of(ends), out=out)
    torch.testing.assert_close(y, by_loop(x, w, ends))
    assert y.dtype == dtype and (not given_out or y is out)
    assert torch.equal(y, ops.grouped_matmul(x, w, offsets_of(ends), reference=True))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("ends", ENDS.values(), ids=ENDS)
def test_gradients(order, ends):
    x, w = operands(order, grad=True)
    grad = torch.randn(ROWS, N, dtype=x.dtype)
    actual = torch.autograd.grad(ops.grouped_matmul(x, w, offsets_of(ends)), (x, w), grad)
    expected = torch.autograd.grad(by_loop(x, w, ends), (x, w), grad)
    torch.testing.assert_close(actual, expected)
    assert actual[1].stride() == w.stride()


@pytest.mark.parametrize("order", ORDERS)
def test_second_derivatives(order):
    x, w = operands(order, grad=True)
    assert torch.autograd.gradgradcheck(
        lambda x, w: ops.grouped_matmul(x, w, offsets_of(ENDS["mixed"])), (x, w)
    )


@pytest.mark.parametrize("given", [("x",), ("w",)])
def test_only_the_gradient_that_is_needed(given, monkeypatch):
    x, w = operands(ORDERS[0])
    needed = {"x": x, "w": w}[given[0]].requires_grad_()
    y = ops.grouped_matmul(x, w, offsets_of(ENDS["mixed"]))
    function = "grouped_wgrad" if given == ("x",) else "grouped_matmul"
    monkeypatch.setattr(module.by_torch, function, None)
    y.sum().backward()
    assert needed.grad is not None


@pytest.mark.parametrize("order", ORDERS)
def test_compiled(order):
    """Offsets change between calls of one graph."""
    x, w = operands(order, torch.float32, grad=True)
    call = torch.compile(ops.grouped_matmul, backend="aot_eager", fullgraph=True)
    for ends in ENDS.values():
        y = call(x, w, offsets_of(ends))
        actual = torch.autograd.grad(y.square().sum(), (x, w))
        expected = torch.autograd.grad(by_loop(x, w, ends).square().sum(), (x, w))
        torch.testing.assert_close(actual, expected)


def test_opcheck():
    x, w = operands(ORDERS[1], torch.float32, grad=True)
    torch.library.opcheck(
        torch.ops.tileweave.grouped_matmul,
        (x, w, offsets_of(ENDS["mixed"]), *[None] * 6, False, True),
    )
    grad = torch.randn(ROWS, N, requires_grad=True)
    for transposed in (True, False):
        torch.library.opcheck(
            torch.ops.tileweave.grouped_wgrad,
            (grad, x, offsets_of(ENDS["mixed"]), transposed, False),
        )


def test_no_rows():
    w, offsets = torch.randn(E, N, K, requires_grad=True), offsets_of([0] * E)
    y = ops.grouped_matmul(torch.randn(0, K), w, offsets)
    assert y.shape == (0, N)
    y.sum().backward()
    assert w.grad is not None and not w.grad.any()


X, W, OFFSETS = torch.zeros(ROWS, K), torch.zeros(E, N, K), offsets_of(ENDS["mixed"])
REFUSED = {
    "x=None; expected a dense torch.Tensor": (None, W, OFFSETS),
    "offsets=[1]; expected a dense torch.Tensor": (X, W, [1]),
    r"x has shape (10,); expected (rows, K) with K > 0": (X[0], W, OFFSETS),
    r"x has shape (23, 0); expected (rows, K) with K > 0": (X[:, :0], W, OFFSETS),
    "x is of torch.int32; expected a floating-point type": (
        X.int(), W.int(), OFFSETS,
    ),
    "w has shape (6, 10); expected three positive extents (E, N, K)": (X, W[0], OFFSETS),
    "w has shape (0, 6, 10); expected three positive extents (E, N, K)": (X, W[:0], OFFSETS[:0]),
    "w has shape (4, 10, 6); expected (E, N, 10) for x of shape (23, 10)": (
        X, W.transpose(1, 2), OFFSETS,
    ),
    "w is of torch.float16; expected torch.float32 as x": (X, W.half(), OFFSETS),
    "w is on meta; expected cpu as x": (X, W.to("meta"), OFFSETS),
    "offsets is of torch.int64; expected torch.int32": (X, W, OFFSETS.long()),
    "offsets has shape (3,); expected (4,) for w of shape (4, 6, 10)": (X, W, OFFSETS[:3]),
    "offsets is on meta; expected cpu as x": (X, W, OFFSETS.to("meta")),
    "offsets=[5, 4, 17, 20]; expected ascending ends of rows, from 0 to 23": (
        X, W, offsets_of([5, 4, 17, 20]),
    ),
    "offsets=[5, 5, 17, 24]; expected ascending ends of rows, from 0 to 23": (
        X, W, offsets_of([5, 5, 17, 24]),
    ),
}  # fmt: skip


@pytest.mark.parametrize("message", REFUSED)
def test_refused(message):
    with pytest.raises(tw.TileWeaveError) as error:
        ops.grouped_matmul(*REFUSED[message])
    assert str(error.value) == f"grouped_matmul: {message}"


def fp8(*shape):
    return torch.randint(-3, 4, shape).to(FP8)


X8, W8 = fp8(ROWS, 144), fp8(E, 160, 144)
ONE, EACH = torch.tensor(0.5), torch.tensor([1.0, 2.0, 4.0, 0.5])
BLOCKS = torch.rand(ROWS, 2), torch.rand(E, 2, 2)
REFUSED_FP8 = {
    "scale_x is None; expected float32 for x of torch.float8_e4m3fn": (X8, W8, None, ONE),
    "scale_w is given; expected none for x of torch.float32": (X, W, None, ONE),
    "scale_w is of torch.float64; expected torch.float32": (X8, W8, ONE, ONE.double()),
    "scale_x has shape (4,); expected () or (1,)": (X8, W8, EACH, EACH),
    "scale_w has shape (3,); expected () or (1,) or (4,)": (X8, W8, ONE, EACH[:3]),
    "scale_x has shape (23, 1); expected (23, 2)": (X8, W8, BLOCKS[0][:, :1], BLOCKS[1]),
    "scale_w has shape (4, 1, 2); expected (4, 2, 2)": (X8, W8, BLOCKS[0], BLOCKS[1][:, :1]),
    "w is of torch.float8_e4m3fn and (E, K, N) in memory; expected (E, N, K)": (
        X8, fp8(E, 144, 160).transpose(1, 2), ONE, ONE,
    ),
    "N=159; expected a multiple of 16 for torch.float8_e4m3fn": (
        X8, W8[:, :159].contiguous(), ONE, ONE,
    ),
    "out_dtype=torch.float32; expected torch.bfloat16 or torch.float16 for x of": (
        X8, W8, ONE, ONE, torch.float32,
    ),
    "out_dtype=torch.float16; expected torch.float32 as x": (X, W, None, None, torch.float16),
}  # fmt: skip


@pytest.mark.parametrize("message", REFUSED_FP8)
def test_refused_fp8(message):
    x, w, scale_x, scale_w, *out_dtype = REFUSED_FP8[message]
    options = {"scale_x": scale_x, "scale_w": scale_w, "out_dtype": (*out_dtype, None)[0]}
    with pytest.raises(tw.TileWeaveError) as error:
        ops.grouped_matmul(x, w, OFFSETS, **options)
    assert str(error.value).startswith(f"grouped_matmul: {message}")


def dequantized(scale_x, scale_w):
    """Return x and w in fp32 by definition, element by element."""
    x, w = X8.float(), W8.float()
    if scale_w.ndim < 3:
        return x * scale_x, w * scale_w.expand(E).view(E, 1, 1)
    n, k = torch.arange(160), torch.arange(144)
    return x * scale_x[:, k // 128], w * scale_w[:, (n // 128)[:, None], (k // 128)[None]]


SCALES = {"one": (ONE, ONE), "each": (ONE.view(1), EACH), "blocks": BLOCKS}


@pytest.mark.parametrize("out_dtype", [None, torch.float16])
@pytest.mark.parametrize("scales", SCALES.values(), ids=SCALES)
def test_fp8(scales, out_dtype):
    scale_x, scale_w = scales
    options = {"scale_x": scale_x, "scale_w": scale_w, "out_dtype": out_dtype}
    y = ops.grouped_matmul(X8, W8, OFFSETS, **options)
    assert y.dtype == (out_dtype or torch.bfloat16)
    expected = by_loop(*dequantized(scale_x, scale_w), OFFSETS.tolist()).to(y.dtype)
    torch.testing.assert_close(y, expected)
    call = torch.compile(ops.grouped_matmul, backend="aot_eager", fullgraph=True)
    assert torch.equal(call(X8, W8, OFFSETS, **options), y)


@pytest.mark.parametrize("scales", SCALES.values(), ids=SCALES)
def test_fp8_kernels_are_called_with_what_they_declare(simulated, scales):
    scale_x, scale_w = scales
    y = ops.grouped_matmul(X8, W8, OFFSETS, scale_x=scale_x, scale_w=scale_w)
    expected = by_loop(*dequantized(scale_x, scale_w), OFFSETS.tolist())
    torch.testing.assert_close(y, expected.to(y.dtype))


def test_rest_is_undefined_on_request(simulated):
    x, w = torch.randn(ROWS, 8).bfloat16(), torch.randn(E, 16, 8).bfloat16()
    ends, out = ENDS["mixed"], torch.full((ROWS, 16), 7.0).bfloat16()
    y = ops.grouped_matmul(x, w, offsets_of(ends), out=out.clone())
    assert not y[ends[-1] :].any()
    rest = ops.grouped_matmul(x, w, offsets_of(ends), out=out.clone(), clear_rest=False)
    assert torch.equal(rest[: ends[-1]], y[: ends[-1]]) and (rest[ends[-1] :] == 7).all()


def test_fp8_has_no_gradient():
    x = X8.clone().requires_grad_()
    with pytest.raises(tw.TileWeaveError, match=r"operands are of torch\.float8_e4m3fn and an"):
        ops.grouped_matmul(x, W8, OFFSETS, scale_x=ONE, scale_w=ONE)


REFUSED_OUT = {
    "out has shape (23, 7); expected (23, 6)": torch.zeros(ROWS, N + 1),
    "out is of torch.float64; expected torch.float32 as x": torch.zeros(ROWS, N).double(),
    "out has strides (1, 23)": torch.zeros(N, ROWS).t(),
    "out=3; expected a dense torch.Tensor": 3,
    "out requires a gradient": torch.zeros(ROWS, N, requires_grad=True),
    "out shares memory with w; expected memory of its own": W.view(-1)[: ROWS * N].view(ROWS, N),
}


@pytest.mark.parametrize("message", REFUSED_OUT)
def test_refused_out(message):
    with pytest.raises(tw.TileWeaveError) as error:
        ops.grouped_matmul(X, W, OFFSETS, out=REFUSED_OUT[message])
    assert str(error.value).startswith(f"grouped_matmul: {message}")


def test_out_has_no_gradient():
    x = X.clone().requires_grad_()
    with pytest.raises(tw.TileWeaveError, match="out is given and an argument requires a gradient"):
        ops.grouped_matmul(x, W, OFFSETS, out=torch.zeros(ROWS, N))


@pytest.fixture
def simulated(monkeypatch):
    simulate_kernels(monkeypatch)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("dtype", "rows"), [(torch.bfloat16, 200), (torch.float16, 300)])
def test_kernels_are_called_with_what_they_declare(simulated, order, dtype, rows):
    """Tiles have 64 rows for 200 rows of four experts, and 128 for more."""
    ends, n, k = [40, 40, 168, 170], 24, 40
    x = torch.randint(-2, 3, (rows, k)).to(dtype).requires_grad_()
    w = torch.randint(-2, 3, (E, n, k) if order == ORDERS[0] else (E, k, n)).to(dtype)
    w = (w if order == ORDERS[0] else w.transpose(1, 2)).requires_grad_()
    y = ops.grouped_matmul(x, w, offsets_of(ends))
    grad = torch.randint(-2, 3, y.shape).to(dtype)
    expected = by_loop(x, w, ends)
    assert torch.equal(y, expected)
    actual = torch.autograd.grad(y, (x, w), grad)
    for one, other in zip(actual, torch.autograd.grad(expected, (x, w), grad), strict=True):
        assert torch.equal(one, other)
    assert actual[1].stride() == w.stride()
    out = torch.full_like(y, torch.nan)
    with torch.no_grad():
        ops.grouped_matmul(x, w, offsets_of(ends), out=out)
        assert torch.equal(out, expected)
        assert not ops.grouped_matmul(x[:0], w, offsets_of([0] * E)).numel()


def test_other_layouts_are_copied_with_a_warning(simulated):
    x, w = torch.ones(40, 64).bfloat16(), torch.ones(E, 24, 40).bfloat16()
    with pytest.warns(UserWarning, match="grouped_matmul: x of shape .* is copied in each call"):
        y = ops.grouped_matmul(x[:, :40], w, offsets_of([10, 20, 30, 40]))
    assert (y == 40).all()


@pytest.mark.parametrize("order", ORDERS)
def test_repeated_calls_are_not_checked_again(simulated, monkeypatch, order):
    def operands():
        w = torch.randint(-2, 3, (E, 24, 40)).bfloat16()
        w = w if order == ORDERS[0] else w.transpose(1, 2).contiguous().transpose(1, 2)
        return torch.randint(-2, 3, (40, 40)).bfloat16(), w

    ends, x, w = [10, 20, 30, 40], *operands()
    out = torch.empty(40, 24).bfloat16()
    ops.grouped_matmul(x, w, offsets_of(ends))
    ops.grouped_matmul(x, w, offsets_of(ends), out=out)
    for name in ("check", "check_out", "config_of", "compiled", "as_kernel_operand"):
        monkeypatch.setattr(module, name, None)
    x, w = operands()
    y = ops.grouped_matmul(x, w, offsets_of([0, 7, 40, 40]))
    assert torch.equal(y, by_loop(x, w, [0, 7, 40, 40]))
    ops.grouped_matmul(x, w, offsets_of(ends), out=out)
    assert torch.equal(out, by_loop(x, w, ends))
    with pytest.raises(tw.TileWeaveError, match="out shares memory with x"):
        ops.grouped_matmul(x, w, offsets_of(ends), out=x.view(-1)[: 40 * 24].view(40, 24))
    with pytest.raises(TypeError):  # another number of rows is checked
        ops.grouped_matmul(x[:20], w, offsets_of([5, 10, 15, 20]))


def test_only_the_latest_calls_are_kept(simulated, monkeypatch):
    monkeypatch.setattr(recorded_calls, "_MAX_CALLS", 2)
    w, offsets = torch.ones(E, 24, 40).bfloat16(), offsets_of([1, 2, 3, 4])
    for rows in (4, 5, 6, 6):
        ops.grouped_matmul(torch.ones(rows, 40).bfloat16(), w, offsets)
    assert [call.empty().shape[0] for call in recorded_launches()] == [5, 6]


def test_graphs_need_an_earlier_call(simulated, monkeypatch):
    x, w = torch.ones(40, 40).bfloat16(), torch.ones(E, 24, 40).bfloat16()
    offsets = offsets_of([10, 20, 30, 40])
    monkeypatch.setattr(local_kernels, "capturing", lambda: True)
    with pytest.raises(tw.TileWeaveError, match=r"^grouped_matmul: not compiled yet; expected one"):
        ops.grouped_matmul(x, w, offsets)
    monkeypatch.setattr(local_kernels, "capturing", lambda: False)
    ops.grouped_matmul(x, w, offsets)
    monkeypatch.setattr(local_kernels, "capturing", lambda: True)
    assert (ops.grouped_matmul(x, w, offsets) == 40).all()
