"""Dispatch, combine and expert_mlp on ranks that are processes: values and gradients; refusals."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch

import tileweave as tw
from tests.ops.core.test_torch import assert_right
from tests.ops.moe import moe_on_ranks
from tests.ops.moe.moe_on_ranks import Layer
from tileweave import ops
from tileweave.ops.moe.row_problem import checked_problem

LAYERS = {
    "uniform": Layer(routing=4),
    "repeated": Layer(routing=1, choices=4),
    "one expert": Layer(routing=0, tokens=4),
    "too little capacity": Layer(routing=2, capacity=3),
    "one row": Layer(routing=9, capacity=1, choices=3),
    "one choice": Layer(routing=5, choices=1),
    "one expert a rank": Layer(routing=6, per_rank=1, choices=3),
    "other numbers of tokens": Layer(routing=4, choices=3, uneven=True),
    "other numbers of tokens, too little capacity": Layer(routing=4, capacity=3, uneven=True),
}


@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
def test_values_and_gradients(three, layer):
    assert_right(three.run(moe_on_ranks.apply, layer, None, False))


@pytest.mark.long
@pytest.mark.parametrize("routing", range(40))
def test_many_routings(three, routing):
    layer = Layer(routing, choices=1 + routing % 4, per_rank=1 + routing % 3)
    assert_right(three.run(moe_on_ranks.apply, layer, None, False))
    capacity = 1 + routing % 7
    assert_right(three.run(moe_on_ranks.apply, layer._replace(capacity=capacity), None, False))


@pytest.mark.long
@pytest.mark.parametrize("form", ["group", "name", "mesh"])
def test_part_of_the_world(three, form):
    *inside, outside = three.run(moe_on_ranks.apply, Layer(), form, False)
    assert_right(inside)
    assert isinstance(outside, tw.TileWeaveError) and "expected" in str(outside)


@pytest.mark.long
@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
def test_compiled_layers(three, layer):
    assert_right(three.run(moe_on_ranks.apply, layer, None, True))


@pytest.mark.long
@pytest.mark.parametrize("capacity", [None, 4])
def test_compiled(three, capacity):
    assert_right(three.run(moe_on_ranks.compiled_exchange, Layer(capacity=capacity, choices=3)))


@pytest.mark.parametrize("capacity", [None, 1, 4])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn], ids=str
)
def test_rows(three, dtype, capacity):
    assert_right(three.run(moe_on_ranks.rows, Layer(capacity=capacity, tokens=7), dtype))


@pytest.mark.parametrize("hidden", [6, 128, 300])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_quantized_rows(three, dtype, hidden):
    layer = Layer(routing=4, hidden=hidden, choices=3, capacity=9)
    assert_right(three.run(moe_on_ranks.quantized_rows, layer, dtype))


FP8_LAYERS = {
    "uniform": Layer(routing=4, hidden=144, width=128, choices=3),
    "little capacity": Layer(routing=1, hidden=48, width=256, capacity=4),
}


@pytest.mark.parametrize(
    ("layer", "dtype", "compiled"),
    [
        ("uniform", torch.bfloat16, False),
        pytest.param("uniform", torch.float16, True, marks=pytest.mark.long),
        pytest.param("little capacity", torch.bfloat16, False, marks=pytest.mark.long),
    ],
)
def test_quantized_mlp(three, layer, dtype, compiled):
    assert_right(three.run(moe_on_ranks.quantized_mlp, FP8_LAYERS[layer], dtype, compiled))


def test_inference_computes_swiglu_in_the_grouped_gemm(monkeypatch):
    x, gate_up, down = torch.randn(4, 6), torch.randn(4, 10, 6), torch.randn(4, 6, 5)
    trained = ops.expert_mlp(x.requires_grad_(), IDS, WEIGHTS, gate_up, down)
    monkeypatch.setattr("tileweave.ops.moe.expert_mlp.functional", None)
    with torch.no_grad():
        torch.testing.assert_close(ops.expert_mlp(x, IDS, WEIGHTS, gate_up, down), trained.detach())
    with pytest.raises(AttributeError):  # training keeps the products
        ops.expert_mlp(x, IDS, WEIGHTS, gate_up, down)


def test_grouped_matmul_accepts_quantized_rows():
    x, ids = torch.randn(6, 160), torch.tensor([[0, 1], [1, -1], [2, 0]] * 2)
    w = torch.randn(3, 32, 160).to(torch.float8_e4m3fn)
    scale_w = torch.rand(3, 1, 2)
    (rows, scales), offsets, _ = ops.dispatch(
        x, ids, torch.ones(ids.shape), num_experts=3, quant="fp8_1x128"
    )
    actual = ops.grouped_matmul(rows, w, offsets, scale_x=scales, scale_w=scale_w)
    wide, _, _ = ops.dispatch(x, ids, torch.ones(ids.shape), num_experts=3)
    weights = w.float() * scale_w.repeat_interleave(128, 2)[..., :160]
    right = ops.grouped_matmul(wide, weights, offsets)
    assert (actual.float() - right).norm() <= 0.05 * right.norm()


def test_quantization_of_tiny_and_special_values():
    tiny = torch.tensor([[0.0, 1e-45], [1e-38, -1e-38], [torch.nan, 1.0]])
    (values, scales), *_ = ops.dispatch(
        tiny, torch.zeros(3, 1).int(), torch.ones(3, 1), num_experts=1, quant="fp8_1x128"
    )
    assert (scales[:2] >= torch.finfo(torch.float32).tiny).all()
    assert torch.allclose(values[:2].float() * scales[:2], tiny[:2], atol=1e-38)
    assert values[2, 0].isnan()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_sums_in_fp32(three, dtype):
    assert_right(three.run(moe_on_ranks.types, dtype))


@pytest.mark.parametrize(
    ("what", "shown"),
    [
        ("capacity", "5 tokens of 10 float64, top-2, 6 experts, capacity 17, auto; rank 1:"),
        ("columns", "5 tokens of 6 float32, top-2, 6 experts, capacity 30, auto; rank 1:"),
        ("tokens", "1 tokens of 10 float64, top-2, 6 experts, capacity 6, auto; rank 1:"),
        ("choices", "5 tokens of 10 float64, top-2, 6 experts, capacity 30, auto; rank 1:"),
        ("experts", "5 tokens of 10 float64, top-2, 12 experts, capacity 30, auto; rank 1:"),
        ("quant", "5 tokens of 10 float64, top-2, 6 experts, capacity 30, auto; rank 1: dispatch "
         "of 5 tokens of 10 float64, top-2, 6 experts, capacity 30, fp8_1x128, auto; rank 2:"),
        ("transport", "5 tokens of 10 float64, top-2, 6 experts, capacity 30, auto; rank 1:"),
        ("check", "5 tokens of 10 float64, top-2, 6 experts, capacity 30, auto; rank 1: dispatch "
         "of 5 tokens of 10 float64, top-2, 6 experts, capacity 30, auto, ids checked; rank 2:"),
    ],
)  # fmt: skip
def test_ranks_that_disagree_are_told(three, what, shown):
    for error in three.run(moe_on_ranks.differ, what):
        assert f"dispatch: the ranks disagree (rank 0: dispatch of {shown}" in str(error)


def test_ranks_that_combine_other_results_are_told(three):
    for error in three.run(moe_on_ranks.other_results):
        assert str(error).startswith(
            "combine: the ranks disagree (rank 0: combine of 3 tokens of 5 float32, top-2, capacity"
            " 18, nccl; rank 1: combine of 3 tokens of 6 float32, top-2, capacity 18, nccl; rank 2:"
        )


def test_numbers_that_are_no_expert(three):
    """They drop the choice, or are refused on all ranks if the environment says so."""
    for error in three.run(moe_on_ranks.illegal_ids, "1"):
        assert str(error) == (
            "dispatch: topk_ids of rank 1 has 6 for choice 1 of token 1, the first of 2 numbers "
            "that are no expert; expected 0 to 5, or -1 for a dropped choice"
        )


def test_unknown_value_of_the_check(three):
    for error in three.run(moe_on_ranks.illegal_ids, "yes"):
        assert str(error) == "TILEWEAVE_CHECK_IDS='yes'; expected 0 or 1"


@pytest.mark.long
def test_example(three):
    assert_right(three.run(moe_on_ranks.example))


def test_one_process():
    """A group of one rank, which has all experts."""
    x, ids = torch.randn(4, 6), torch.tensor([[0, 1], [1, -1], [2, 2], [-1, -1]])
    weights = torch.tensor([[1.0, 2.0], [3.0, 9.0], [0.5, 0.25], [9.0, 9.0]])
    rows, offsets, handle = ops.dispatch(x, ids, weights, num_experts=3)
    assert offsets.tolist() == [1, 3, 4] and rows.shape == (8, 6)
    assert torch.equal(rows[:4], x[[0, 0, 1, 2]]) and not rows[4:].any()
    rows[4:] = torch.nan  # what no token has is not read
    assert torch.allclose(ops.combine(rows, handle), x * torch.tensor([3, 3, 0.75, 0])[:, None])


QUANT = {"quant": "fp8_1x128"}
X, IDS, WEIGHTS = torch.ones(4, 6), torch.zeros(4, 2, dtype=torch.int32), torch.ones(4, 2)
REFUSED = [
    ((X[0], IDS, WEIGHTS), {}, "x has shape (6,); expected (tokens, hidden), both positive"),
    ((X[:0], IDS, WEIGHTS), {}, "x has shape (0, 6); expected (tokens, hidden), both positive"),
    ((X, IDS[0], WEIGHTS), {}, "topk_ids has shape (2,); expected (tokens, k), both positive"),
    ((X, IDS[:3], WEIGHTS), {}, "topk_ids has shape (3, 2); expected (4, 2) for x of shape (4, 6)"),
    ((X, IDS, WEIGHTS[:, :1]), {}, "topk_weights has shape (4, 1); expected (4, 2) as topk_ids"),
    ((X, IDS.float(), WEIGHTS), {}, "topk_ids is of torch.float32; expected torch.int32 or torch"),
    ((X, IDS, IDS), {}, "topk_weights is of torch.int32; expected a floating-point type"),
    ((X, IDS.to("meta"), WEIGHTS), {}, "topk_ids is on meta; expected cpu as x"),
    ((X, IDS, WEIGHTS.to("meta")), {}, "topk_weights is on meta; expected cpu as x"),
    ((None, IDS, WEIGHTS), {}, "x=None; expected a dense torch.Tensor"),
    ((X, [[0]], WEIGHTS), {}, "topk_ids=[[0]]; expected a dense torch.Tensor"),
    ((X, IDS, WEIGHTS), {"capacity": 0}, "capacity=0; expected a positive number of rows, or None"),
    ((X, IDS, WEIGHTS), {"capacity": 2.5}, "capacity=2.5; expected a positive number of rows, or "),
    ((X, IDS, WEIGHTS), {"capacity": True}, "capacity=True; expected a positive number of rows, o"),
    ((X, IDS, WEIGHTS), {"capacity": 1 << 63}, "capacity=9223372036854775808; expected a positiv"),
    ((X, IDS, WEIGHTS), {"max_tokens": 1 << 63}, "max_tokens=9223372036854775808; expected a pos"),
    ((X, IDS, WEIGHTS), {"num_experts": 1 << 63}, "num_experts=9223372036854775808; expected a "),
    ((X, IDS, WEIGHTS), {"max_tokens": 0}, "max_tokens=0; expected a positive number of tokens, o"),
    ((X, IDS, WEIGHTS), {"max_tokens": True}, "max_tokens=True; expected a positive number of tok"),
    ((X, IDS, WEIGHTS), {"max_tokens": 3}, "x has 4 tokens; expected at most max_tokens=3"),
    ((X, IDS[:, :0], WEIGHTS), {"max_tokens": 4},
     "topk_ids has shape (4, 0); expected (tokens, k), the second one positive"),
    ((X[:0], IDS, WEIGHTS), {"max_tokens": 4}, "topk_ids has shape (4, 2); expected (0, 2) for x "),
    ((X, IDS, WEIGHTS), {"num_experts": 0}, "num_experts=0; expected a positive multiple of 1 fo"),
    ((X, IDS, WEIGHTS), {"quant": "fp8"}, "quant='fp8'; expected None, 'fp8_1x128'"),
    ((X, IDS, WEIGHTS), {"num_experts": 2.0}, "num_experts=2.0; expected a positive multiple of "),
    ((X, IDS, WEIGHTS), {"num_experts": [2]}, "num_experts=[2]; expected a positive multiple of "),
    ((X, IDS, WEIGHTS), {"num_experts": None}, "num_experts=None; expected a positive multiple of"),
    ((X, IDS, WEIGHTS), {"num_experts": True}, "num_experts=True; expected a positive multiple of"),
    ((X.int(), IDS, WEIGHTS), QUANT, "x is of torch.int32; expected a floating-point type of 16 "),
    ((X.clone().requires_grad_(), IDS, WEIGHTS), QUANT, "quant='fp8_1x128' and x requires a gradi"),
    ((X, IDS, WEIGHTS), {"transport": "tma"}, "transport='tma'; expected 'auto', 'ldst', 'nccl'"),
    ((X, IDS, WEIGHTS), {"transport": None}, "transport=None; expected 'auto', 'ldst', 'nccl'"),
    ((X, IDS, WEIGHTS), {"transport": "ldst"}, "transport='ldst', but the tensors are on cpu; exp"),
]  # fmt: skip


@pytest.mark.parametrize(("tensors", "options", "message"), REFUSED)
def test_refused(tensors, options, message):
    with pytest.raises(tw.TileWeaveError) as error:
        ops.dispatch(*tensors, **{"num_experts": 4} | options)
    assert str(error.value).startswith(f"dispatch: {message}")


def test_options_of_numpy():
    """They are integers, although no ints."""
    options = {"num_experts": np.int64(4), "capacity": np.int64(8), "max_tokens": np.int64(5)}
    rows, offsets, handle = ops.dispatch(X, IDS, WEIGHTS, **options)
    assert rows.shape == (8, 6) and offsets.shape == (4,)
    assert ops.combine(rows, handle).shape == X.shape


def test_experts_that_ranks_cannot_share():
    with pytest.raises(tw.TileWeaveError) as error:
        checked_problem("dispatch", X, IDS, 6, None, 4)
    assert (
        str(error.value) == "dispatch: num_experts=6; expected a positive multiple of 4 for 4 ranks"
    )


_, _, HANDLE = ops.dispatch(X, IDS, WEIGHTS, num_experts=4)
Y = torch.ones(8, 6)
COMBINE_REFUSED = [
    ((Y[:7], HANDLE), {}, "y has shape (7, 6); expected (8, columns) for this handle"),
    ((Y[:, 0], HANDLE), {}, "y has shape (8,); expected (8, columns) for this handle"),
    ((Y.int(), HANDLE), {}, "y is of torch.int32; expected a floating-point type of 16 bits or mo"),
    ((Y.to(torch.float8_e5m2), HANDLE), {}, "y is of torch.float8_e5m2; expected a floating-point"),
    ((Y.to("meta"), HANDLE), {}, "y is on meta; expected cpu as the handle"),
    ((None, HANDLE), {}, "y=None; expected a dense torch.Tensor"),
    ((Y, None), {}, "handle=None; expected the handle that dispatch returned"),
    ((Y, HANDLE), {"out": Y[:3]}, "out has shape (3, 6); expected (4, 6)"),
    ((Y, HANDLE), {"out": Y[:4].half()}, "out is of torch.float16; expected torch.float32 as y"),
    ((Y, HANDLE), {"out": Y[:4]}, "out shares memory with y; expected memory of its own"),
    ((Y, HANDLE), {"out": torch.ones(6, 4).t()}, "out has strides (1, 4) and begins at"),
    ((Y.clone().requires_grad_(), HANDLE), {"out": X}, "out is given and an argument requires a g"),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "options", "message"), COMBINE_REFUSED)
def test_combine_refused(arguments, options, message):
    with pytest.raises(tw.TileWeaveError) as error:
        ops.combine(*arguments, **options)
    assert str(error.value).startswith(f"combine: {message}")


GATE_UP, DOWN = torch.ones(4, 10, 6), torch.ones(4, 6, 5)
MLP_REFUSED = [
    ((X, IDS, WEIGHTS, GATE_UP[0], DOWN), "w_gate_up has shape (10, 6); expected (experts of a ra"),
    ((X, IDS, WEIGHTS, GATE_UP[:, 1:], DOWN), "w_gate_up has shape (4, 9, 6); expected (experts o"),
    ((X, IDS, WEIGHTS, GATE_UP, DOWN[:3]), "w_down has shape (3, 6, 5); expected (4, 6, 5) for w_"),
    ((X, IDS, WEIGHTS, GATE_UP.half(), DOWN), "w_gate_up is of torch.float16; expected torch.floa"),
    ((X, IDS, WEIGHTS, GATE_UP, DOWN.to("meta")), "w_down is on meta; expected cpu as x"),
    ((X.int(), IDS, WEIGHTS, GATE_UP, DOWN), "x is of torch.int32; expected a floating-point type"),
    ((X, IDS.float(), WEIGHTS, GATE_UP, DOWN), "topk_ids is of torch.float32; expected torch.int3"),
]


@pytest.mark.parametrize(("tensors", "message"), MLP_REFUSED)
def test_expert_mlp_refused(tensors, message):
    with pytest.raises(tw.TileWeaveError) as error:
        ops.expert_mlp(*tensors)
    assert str(error.value).startswith(f"expert_mlp: {message}")


X8 = torch.ones(4, 16, dtype=torch.bfloat16)
GATE_UP8, DOWN8 = (
    torch.ones(4, *shape).to(torch.float8_e4m3fn) for shape in ((256, 16), (16, 128))
)
SCALES8 = {"scale_w_gate_up": torch.ones(4, 2, 1), "scale_w_down": torch.ones(4, 1, 1)}
WEIGHTS_WITH_GRADIENT = WEIGHTS.clone().requires_grad_()
FP8_REFUSED = [
    ((X8, GATE_UP8, DOWN8), SCALES8 | {"quant": "fp8"}, "quant='fp8'; expected None, 'fp8_1x128'"),
    ((X8, GATE_UP8, DOWN8), {"quant": None}, "w_gate_up is of torch.float8_e4m3fn; expected torch"),
    ((X, GATE_UP, DOWN), SCALES8 | {"quant": None}, "scale_w_gate_up is given; expected none for "),
    ((X8, GATE_UP8.bfloat16(), DOWN8), SCALES8, "w_gate_up is of torch.bfloat16; expected torch.f"),
    ((X8, GATE_UP8, DOWN8), SCALES8 | {"scale_w_down": None}, "scale_w_down is None; expected flo"),
    ((X8, GATE_UP8, DOWN8), SCALES8 | {"scale_w_down": torch.ones(4, 1)},
     "scale_w_down has shape (4, 1); expected (4, 1, 1) for w_down of shape (4, 16, 128)"),
    ((X8, GATE_UP8, DOWN8), SCALES8 | {"scale_w_down": torch.ones(4, 1, 1).double()},
     "scale_w_down is of torch.float64; expected torch.float32"),
    ((X8.float(), GATE_UP8, DOWN8), SCALES8, "x is of torch.float32; expected torch.bfloat16 or t"),
    ((X8, GATE_UP8[:, :128].contiguous(), DOWN8[..., :64].contiguous()),
     SCALES8 | {"scale_w_gate_up": torch.ones(4, 1, 1)},
     "intermediate size 64; expected a multiple of 128 for quant='fp8_1x128'"),
    ((X8[:, :8], GATE_UP8[..., :8].contiguous(), DOWN8[:, :8].contiguous()), SCALES8,
     "hidden size 8; expected a multiple of 16 for quant='fp8_1x128'"),
    ((X8, GATE_UP8, DOWN8.transpose(1, 2).contiguous().transpose(1, 2)), SCALES8,
     "w_down has strides (2048, 1, 16); expected a contiguous tensor"),
    ((X8.clone().requires_grad_(), GATE_UP8, DOWN8), SCALES8, "quant='fp8_1x128' and x requires a"),
    ((X8, GATE_UP8, DOWN8), SCALES8 | {"weights": WEIGHTS_WITH_GRADIENT},
     "quant='fp8_1x128' and topk_weights requires a gradient; expected one of both, or torch.no_"),
]  # fmt: skip


@pytest.mark.parametrize(("tensors", "options", "message"), FP8_REFUSED)
def test_quantized_mlp_refused(tensors, options, message):
    x, *experts = tensors
    options = {"quant": "fp8_1x128", "weights": WEIGHTS} | options
    weights = options.pop("weights")
    with pytest.raises(tw.TileWeaveError) as error:
        ops.expert_mlp(x, IDS, weights, *experts, **options)
    assert str(error.value).startswith(f"expert_mlp: {message}")


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8, torch.bool, torch.complex64])
def test_max_tokens_of_all_types(dtype):
    rows, offsets, _ = ops.dispatch(X.to(dtype), IDS, WEIGHTS, num_experts=4, max_tokens=7)
    assert rows.dtype == dtype and rows.shape == (14, 6) and offsets.tolist() == [4] * 4


@pytest.mark.long
def test_one_compiled_function_for_all_numbers_of_tokens():
    """torch.compile compiles it for one number and for a dynamic one."""
    graphs = []

    def count(graph, _):
        graphs.append(graph)
        return graph.forward

    @partial(torch.compile, backend=count, fullgraph=True)
    def f(x, ids, weights):
        rows, _, handle = ops.dispatch(x, ids, weights, num_experts=4, max_tokens=9)
        return ops.combine(rows, handle)

    for tokens in (2, 4, 7, 9, 3):
        x, weights = torch.randn(tokens, 6), torch.rand(tokens, 2)
        ids = torch.arange(2 * tokens).view(tokens, 2) % 4
        expected = x * weights.sum(-1, keepdim=True)
        assert torch.allclose(f(x, ids, weights), expected, atol=1e-6)
    assert len(graphs) <= 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"capacity": 0}, "capacity=0; expected a positive number of rows, or None"),
        ({"capacity": True}, "capacity=True; expected a positive number of rows, or None"),
        ({"capacity": 2.5}, "capacity=2.5; expected a positive number of rows, or None"),
        ({"max_tokens": 2}, "x has 4 tokens; expected at most max_tokens=2"),
        ({"transport": None}, "transport=None; expected 'auto', 'ldst', 'nccl'"),
        ({"strategy": "fused"}, "strategy='fused', which is removed; expected a call without st"),
    ],
)
def test_options_of_expert_mlp(options, message):
    with pytest.raises(tw.TileWeaveError, match=f"expert_mlp: {message}"):
        ops.expert_mlp(X, IDS, WEIGHTS, GATE_UP, DOWN, **options)
