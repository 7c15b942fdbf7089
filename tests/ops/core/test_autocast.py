"""``torch.autocast``: operators cast what the matching function of torch casts."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

import tileweave as tw
from tileweave import ops

BF16, FP32 = torch.bfloat16, torch.float32
GEMMS = [ops.all_gather_matmul, ops.matmul_all_reduce, ops.matmul_reduce_scatter]


def in_bf16() -> torch.autocast:
    return torch.autocast("cpu", BF16)


def normal(*shape: int, dtype: torch.dtype = FP32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def message_of(call, *args) -> str:
    with pytest.raises(tw.TileWeaveError) as error:
        call(*args)
    return str(error.value)


def with_gradients(product, a, b, bias):
    """Return the result of a product under autocast, and the gradients of its arguments."""
    arguments = [t.clone().detach().requires_grad_() for t in (a, b, bias)]
    with in_bf16():
        c = product(*arguments)
    c.float().square().sum().backward()
    return [c, *(t.grad for t in arguments)]


@pytest.mark.parametrize(
    ("dtypes", "compiled"),
    [
        ((FP32, FP32, FP32), False),
        ((FP32, BF16, FP32), False),
        ((BF16, FP32, FP32), False),
        ((BF16, FP32, FP32), True),
    ],
)
@pytest.mark.parametrize("op", GEMMS)
def test_products_are_as_linear(op, dtypes, compiled):
    a, weight, bias = normal(4, 8), normal(6, 8), normal(6)
    a, weight, bias = (t.to(dtype) for t, dtype in zip((a, weight, bias), dtypes, strict=True))

    def product(a, weight, bias):
        return op(a, weight.t(), bias=bias)

    if compiled:
        torch.compiler.reset()
        product = torch.compile(product, backend="aot_eager", fullgraph=True)
    actual = with_gradients(product, a, weight, bias)
    expected = with_gradients(functional.linear, a, weight, bias)
    assert [t.dtype for t in actual] == [BF16, *dtypes] == [t.dtype for t in expected]
    for value, right in zip(actual, expected, strict=True):
        assert torch.allclose(value.float(), right.float(), rtol=2e-2, atol=2e-2)


def test_a_product_that_returns_the_rows():
    with in_bf16():
        rows, c = ops.all_gather_matmul(normal(4, 8), normal(8, 6), return_gathered=True)
    assert rows.dtype == c.dtype == BF16


@pytest.mark.parametrize("op", GEMMS)
def test_the_registered_operator_is_cast_too(op):
    registered = getattr(torch.ops.tileweave, op.__name__)
    with in_bf16():
        assert registered(normal(4, 8), normal(8, 6), "", "auto", *[None] * 4).dtype == BF16


def test_what_torch_does_not_cast():
    a, b = normal(4, 8), normal(8, 6)
    with in_bf16():
        out = ops.matmul_all_reduce(a, b, out=torch.empty(4, 6))  # as torch.mm(out=)
        wide = ops.matmul_all_reduce(a.double(), b.double())
        refused = message_of(ops.matmul_all_reduce, a.double(), b)
    assert torch.equal(out, a @ b) and wide.dtype == torch.float64
    assert refused == "matmul_all_reduce: b is of torch.float32; expected torch.float64 as a"


def test_fp8_is_cast_no_more_than_scaled_mm():
    a, b = (normal(16, 32).to(torch.float8_e4m3fn) for _ in range(2))
    one, bias = torch.ones(1), normal(16, dtype=torch.float16)
    options = {"scale_a": one, "scale_b": one, "bias": bias, "out_dtype": torch.float16}
    right = ops.matmul_all_reduce(a, b.t(), **options)
    with in_bf16():
        c = ops.matmul_all_reduce(a, b.t(), **options)
    assert c.dtype == torch.float16 and torch.equal(c, right)


@pytest.mark.parametrize("exchange", [ops.all_gather, ops.all_reduce, ops.reduce_scatter])
def test_exchanges_keep_types(exchange):
    with in_bf16():
        assert exchange(normal(4, 8)).dtype == FP32
        assert exchange(normal(4, 8, dtype=torch.float16)).dtype == torch.float16


@pytest.mark.parametrize("attend", [ops.sp_attention, ops.ulysses_attention])
def test_attention_is_as_sdpa(attend):
    q, k, v = normal(1, 4, 2, 8), normal(1, 4, 2, 8, dtype=BF16), normal(1, 4, 2, 8)
    right = attend(q.to(BF16), k, v.to(BF16), causal=True)
    q.requires_grad_()
    with in_bf16():
        out = attend(q, k, v, causal=True)
    out.sum().backward()
    assert out.dtype == BF16 and torch.equal(out, right) and q.grad.dtype == FP32


def test_a_norm_computes_in_the_widest_type():
    x, residual, weight = normal(4, 8, dtype=BF16), normal(4, 8), normal(8)
    right = ops.all_reduce_rms_norm(x.float(), residual, weight)
    with in_bf16():
        actual = ops.all_reduce_rms_norm(x, residual, weight)
    for value, expected in zip(actual, right, strict=True):
        assert value.dtype == FP32 and torch.equal(value, expected)


def test_decode_attention():
    q, cache = normal(1, 2, 64), normal(2, 16, 2, 64, dtype=BF16)
    table, lens = torch.zeros(1, 1, dtype=torch.int32), torch.full((1,), 9, dtype=torch.int32)
    options = {"block_table": table, "seq_lens": lens}
    right = ops.decode_attention(q.to(BF16), cache, cache, **options)
    with in_bf16():
        out = ops.decode_attention(q, cache, cache, **options)
    assert out.dtype == BF16 and torch.equal(out, right)


def test_mixtures():
    x, ids = normal(4, 8), torch.tensor([[0], [1], [0], [1]])
    weights, gate_up, down = torch.rand(4, 1), normal(2, 12, 8), normal(2, 8, 6)
    leaves = [t.requires_grad_() for t in (x, weights, gate_up, down)]
    with in_bf16():
        y = ops.expert_mlp(x, ids, weights, gate_up, down)
        hidden = ops.grouped_matmul(x.to(BF16), gate_up, torch.tensor([2, 4], dtype=torch.int32))
    (y.sum() + hidden.sum()).backward()
    assert y.dtype == hidden.dtype == BF16
    assert all(t.grad.dtype == FP32 for t in leaves)


def test_the_strategy_is_that_of_the_call():
    a, b = normal(4, 8, dtype=BF16), normal(8, 6)
    assert "b is of torch.float32" in message_of(ops.strategy_of, ops.matmul_all_reduce, a, b)
    with in_bf16():
        assert ops.strategy_of(ops.matmul_all_reduce, a, b).name == "nccl"


def test_without_autocast_types_must_match():
    with in_bf16(), torch.autocast("cpu", enabled=False):
        assert ops.matmul_all_reduce(normal(4, 8), normal(8, 6)).dtype == FP32
        refused = message_of(ops.matmul_all_reduce, normal(4, 8, dtype=BF16), normal(8, 6))
    assert refused == "matmul_all_reduce: b is of torch.float32; expected torch.bfloat16 as a"
