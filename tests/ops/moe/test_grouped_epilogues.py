"""Epilogues of ``ops.grouped_matmul``: values, gradients, torch.compile and errors, without a
GPU."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

import tileweave as tw
from tests.ops.moe.simulated_kernels import recorded_launches, simulate_kernels
from tileweave import ops

E, N, K, ROWS = 4, 12, 10, 23
ENDS = [5, 5, 17, 20]
OFFSETS = torch.tensor(ENDS, dtype=torch.int32)
FP8 = torch.float8_e4m3fn
EPILOGUES = [
    ("swiglu", False, False),
    ("swiglu", True, True),
    (None, True, False),
    (None, False, True),
    (None, True, True),
]
"""Epilogue, and whether a bias and weights of rows are given."""
NAMES = ["swiglu", "swiglu, bias, weights", "bias", "weights", "bias, weights"]
every_epilogue = pytest.mark.parametrize(("epilogue", "bias", "weights"), EPILOGUES, ids=NAMES)


def operands(dtype=torch.float64, grad=False, n=N, k=K, rows=ROWS):
    """Return x, w, bias and weights of rows."""
    generator = torch.Generator().manual_seed(0)
    shapes = (rows, k), (E, n, k), (E, n), (rows,)
    tensors = [torch.randn(shape, generator=generator) for shape in shapes]
    tensors = [t.to(dtype) for t in tensors[:3]] + tensors[3:]
    return [t.requires_grad_(grad) for t in tensors]


def by_definition(x, w, bias, weights, epilogue, ends=ENDS):
    """Return the result in the type of the operands, row by row."""
    rows = []
    for e, (begin, end) in enumerate(pairwise([0, *ends])):
        for i in range(begin, end):
            row = w[e] @ x[i]
            if bias is not None:
                row = row + bias[e]
            if epilogue == "swiglu":
                gate, up = row[: len(row) // 2], row[len(row) // 2 :]
                row = gate / (1 + torch.exp(-gate)) * up
            rows.append(row if weights is None else row * weights[i])
    rest = x.new_zeros(len(x) - ends[-1], w.shape[1] // (2 if epilogue else 1))
    return torch.cat([torch.stack(rows), rest])


def call(x, w, bias, weights, epilogue, **options):
    return ops.grouped_matmul(
        x, w, OFFSETS, bias=bias, row_weights=weights, epilogue=epilogue, **options
    )


@every_epilogue
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_value(epilogue, bias, weights, dtype):
    """Narrow results have the bits of sums in fp64 that are rounded once."""
    x, w, added, factors = operands(dtype)
    given = added if bias else None, factors if weights else None, epilogue
    y = call(x, w, *given)
    exact = by_definition(
        x.double(), w.double(), *(None if t is None else t.double() for t in given[:2]), epilogue
    )
    assert y.dtype == dtype and torch.equal(y, call(x, w, *given, reference=True))
    torch.testing.assert_close(y, exact.to(dtype), rtol=2**-8 if dtype != torch.float64 else 1e-7,
                               atol=1e-12)  # fmt: skip
    out = torch.full_like(y, torch.nan)
    assert call(x, w, *given, out=out) is out and torch.equal(out, y)


@every_epilogue
def test_gradients(epilogue, bias, weights):
    x, w, added, factors = operands(grad=True)
    given = added if bias else None, factors if weights else None, epilogue
    inputs = [x, w, *(t for t in given[:2] if t is not None)]
    y = call(x, w, *given)
    grad = torch.randn(y.shape, dtype=y.dtype)
    actual = torch.autograd.grad(y, inputs, grad)
    expected = torch.autograd.grad(by_definition(x, w, *given), inputs, grad)
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_rows_of_no_expert_have_no_gradient():
    x, w, bias, weights = operands(grad=True)
    y = call(x, w, bias, weights, "swiglu")
    grad = torch.ones_like(y)
    grad[ENDS[-1] :] = torch.nan
    grads = torch.autograd.grad(y, (x, bias, weights), grad)
    assert all(not g.isnan().any() for g in grads)
    assert not grads[0][ENDS[-1] :].any() and not grads[2][ENDS[-1] :].any()


@pytest.mark.parametrize("needed", range(4), ids=["x", "w", "bias", "weights"])
def test_only_the_gradient_that_is_needed(needed):
    given = operands()
    given[needed].requires_grad_()
    y = call(*given, "swiglu")
    (actual,) = torch.autograd.grad(y.sum(), given[needed])
    (expected,) = torch.autograd.grad(by_definition(*given, "swiglu").sum(), given[needed])
    torch.testing.assert_close(actual, expected)


@pytest.mark.long
def test_second_derivatives():
    x, w, bias, _ = operands(grad=True, n=4, k=3)
    weights = torch.rand(ROWS, requires_grad=True)
    assert torch.autograd.gradgradcheck(
        lambda x, w, bias: call(x, w, bias, weights.detach(), "swiglu"), (x, w, bias)
    )


@pytest.mark.long
def test_compiled():
    given = operands(torch.float32, grad=True)
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    results = [f(*given, "swiglu") for f in (call, compiled)]
    torch.testing.assert_close(*results)
    torch.testing.assert_close(
        *(torch.autograd.grad(y.square().sum(), given) for y in results)
    )  # fmt: skip


@pytest.mark.long
def test_opcheck():
    x, w, bias, weights = operands(torch.float32, grad=True)
    torch.library.opcheck(
        torch.ops.tileweave.grouped_matmul,
        (x, w, OFFSETS, None, None, bias, weights, "swiglu", None, False, True),
    )


X, W, BIAS, WEIGHTS = operands(torch.float32)
GATE_UP = {"epilogue": "swiglu"}
REFUSED = {
    "epilogue='gelu'; expected None or 'swiglu'": (X, W, {"epilogue": "gelu"}),
    "w has shape (4, 11, 10); expected (E, 2 * I, 10) for epilogue='swiglu'": (
        X, W[:, 1:], GATE_UP,
    ),
    "bias has shape (4, 6); expected (4, 12) for x of shape (23, 10) and w of shape (4, 12, 10)": (
        X, W, {"bias": BIAS[:, :6]} | GATE_UP,
    ),
    "bias is of torch.float16; expected torch.float32 as x": (X, W, {"bias": BIAS.half()}),
    "bias=1; expected a dense torch.Tensor": (X, W, {"bias": 1}),
    "row_weights has shape (22,); expected (23,) for x of shape (23, 10) and w of shape (4, 12": (
        X, W, {"row_weights": WEIGHTS[1:]},
    ),
    "row_weights is of torch.bfloat16; expected torch.float32": (
        X, W, {"row_weights": WEIGHTS.bfloat16()},
    ),
    "row_weights is on meta; expected cpu as x": (X, W, {"row_weights": WEIGHTS.to("meta")}),
    "out has shape (23, 12); expected (23, 6)": (X, W, {"out": torch.empty(ROWS, N)} | GATE_UP),
    "out shares memory with bias; expected memory of its own": (
        X[:4], W, {"out": BIAS, "bias": BIAS},
    ),
    "out is given and an argument requires a gradient; expected one of both": (
        X, W, {"out": torch.empty(ROWS, N), "bias": BIAS.clone().requires_grad_()},
    ),
}  # fmt: skip


@pytest.mark.parametrize("message", REFUSED)
def test_refused(message):
    x, w, options = REFUSED[message]
    with pytest.raises(tw.TileWeaveError) as error:
        ops.grouped_matmul(x, w, OFFSETS, **options)
    assert str(error.value).startswith(f"grouped_matmul: {message}")


def fp8_operands(n, k=144):
    """Return x, w, and exact scales of blocks."""
    generator = torch.Generator().manual_seed(1)
    x, w = (
        torch.randint(-3, 4, shape, generator=generator).to(FP8) for shape in ((ROWS, k), (E, n, k))
    )
    blocks = (ROWS, -(-k // 128)), (E, -(-n // 128), -(-k // 128))
    scales = [2.0 ** torch.randint(-6, -3, shape, generator=generator) for shape in blocks]
    return x, w, scales


def dequantized(x, w, scale_x, scale_w):
    n, k = torch.arange(w.shape[1]) // 128, torch.arange(w.shape[2]) // 128
    return x.double() * scale_x[:, k], w.double() * scale_w[:, n[:, None], k[None]]


@pytest.mark.parametrize("kernels", [False, True], ids=["torch", "kernels"])
def test_fp8(kernels, monkeypatch):
    if kernels:
        simulate_kernels(monkeypatch)
    x, w, (scale_x, scale_w) = fp8_operands(256)
    bias, weights = torch.randn(E, 256).half(), torch.rand(ROWS)
    y = call(
        x, w, bias, weights, "swiglu", scale_x=scale_x, scale_w=scale_w, out_dtype=torch.float16
    )
    wide = *dequantized(x, w, scale_x, scale_w), bias.double(), weights.double()
    exact = by_definition(*wide, "swiglu")
    torch.testing.assert_close(y, exact.half(), rtol=2**-10, atol=1e-6)
    assert bool(recorded_launches()) == kernels


def test_fp8_refused():
    x, w, (scale_x, scale_w) = fp8_operands(384)
    scales = {"scale_x": scale_x, "scale_w": scale_w}
    with pytest.raises(tw.TileWeaveError, match=r"N=384; expected a multiple of 256 for epilogue="):
        call(x, w, None, None, "swiglu", **scales)
    bias = torch.zeros(E, 384, dtype=torch.bfloat16, requires_grad=True)
    with pytest.raises(tw.TileWeaveError, match="float8_e4m3fn and an argument requires a grad"):
        call(x, w, bias, None, None, **scales)


@pytest.mark.parametrize("transposed", [True, False], ids=["(E, N, K)", "(E, K, N)"])
def test_kernels_are_called_with_what_they_declare(monkeypatch, transposed):
    """A second call repeats the first one, and the gradients equal those of plain torch."""
    simulate_kernels(monkeypatch)
    x, w, bias, weights = operands(torch.bfloat16, grad=True, n=48, k=40)
    if not transposed:
        w = w.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
    given = x, w, bias, weights
    results = []
    for reference in (False, False, True):
        y = call(*given, "swiglu", reference=reference)
        results.append((y, *torch.autograd.grad(y.float().square().sum(), given)))
    for one, again, other in zip(*results, strict=True):
        assert torch.equal(one, again)
        torch.testing.assert_close(one.float(), other.float(), rtol=2e-2, atol=2e-2)
    assert any(call.config.gated for call in recorded_launches())
    with torch.no_grad():
        assert torch.equal(call(*given, "swiglu"), results[0][0])
