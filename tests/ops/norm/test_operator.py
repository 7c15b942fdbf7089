"""ops.all_reduce_rms_norm on ranks that are processes: values; refusals."""

from __future__ import annotations

import pytest
import torch

import tileweave as tw
from tests.ops.core.test_torch import assert_right
from tests.ops.meshes import NODES
from tests.ops.norm import norm_on_ranks
from tests.ops.norm.norm_on_ranks import Call
from tileweave import ops

LONG = pytest.mark.long
CALLS = {
    "bf16": Call(),
    "fp16, three axes": Call((2, 3, 200), torch.float16, biased=True),
    "fp32, one row": Call((7,), torch.float32),
    "fp8": Call(quant="fp8", where="out"),
    "groups": Call(quant="fp8_1x128", biased=True),
    "groups, fp16": Call((4, 128), torch.float16, "fp8_1x128", where="out"),
    "residual in place": Call(where="residual"),
    "in place": Call(where="in place"),
    "crossed": Call(where="crossed"),
    "fp8, residual in place": Call(quant="fp8", where="residual"),
    "valid rows in place": Call(where="in place", valid=3),
    "no valid row, groups": Call(quant="fp8_1x128", valid=0),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_values(three, call):
    assert_right(three.run(norm_on_ranks.values, call, None, False))


@LONG
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_four_ranks(four, call):
    assert_right(four.run(norm_on_ranks.values, call, None, False))


@LONG
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_compiled(three, call):
    assert_right(three.run(norm_on_ranks.values, call, None, True))


@LONG
@pytest.mark.parametrize("form", ["group", "name", "mesh"])
def test_part_of_the_world(three, form):
    *inside, outside = three.run(norm_on_ranks.values, Call(quant="fp8_1x128"), form, False)
    assert_right(inside)
    assert isinstance(outside, tw.TileWeaveError) and "expected" in str(outside)


@LONG
@pytest.mark.parametrize("nodes", NODES)
@pytest.mark.parametrize("call", ["bf16", "groups", "in place"])
def test_several_nodes(four, nodes, call):
    assert_right(four.run(norm_on_ranks.on_mesh, CALLS[call], NODES[nodes]))


@LONG
def test_no_program_for_several_nodes(four):
    for error in four.run(norm_on_ranks.program_on_mesh, NODES["2 x 2"]):
        assert "strategy='one_shot', but the group has several nodes; expected ranks" in str(error)


@LONG
@pytest.mark.parametrize(
    ("what", "shown"),
    [
        ("eps", "5 tokens of 264 bfloat16, eps 2e-05, nccl; rank 1:"),
        ("tokens", "11 tokens of 264 bfloat16, eps 1e-05, nccl; rank 1:"),
        ("quant", "17 tokens of 264 bfloat16, eps 1e-05, nccl; rank 1:"),
    ],
)
def test_ranks_that_disagree_are_told(three, what, shown):
    for error in three.run(norm_on_ranks.differ, what):
        start = "all_reduce_rms_norm: the ranks disagree (rank 0: all_reduce_rms_norm of "
        assert str(error).startswith(start + shown)


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_one_process(call):
    assert all(norm_on_ranks.one_rank(call).values())


X, RESIDUAL, WEIGHT = torch.ones(4, 16), torch.ones(4, 16), torch.ones(16)
SCALE = torch.ones(1)
REFUSED = [
    ((None, RESIDUAL, WEIGHT), {}, "x=None; expected a dense torch.Tensor"),
    ((X, [1], WEIGHT), {}, "residual=[1]; expected a dense torch.Tensor"),
    ((X, RESIDUAL, WEIGHT), {"scale": 2.0}, "scale=2.0; expected a dense torch.Tensor"),
    ((X, RESIDUAL, WEIGHT), {"out": 1}, "out=1; expected a dense torch.Tensor"),
    ((X[:0], RESIDUAL, WEIGHT), {}, "x has shape (0, 16); expected (..., hidden), all positive"),
    ((X.int(), RESIDUAL, WEIGHT), {}, "x is of torch.int32; expected a floating-point type of 16"),
    ((X, RESIDUAL[:1], WEIGHT), {}, "residual has shape (1, 16); expected (4, 16) for x of shape"),
    ((X, RESIDUAL.half(), WEIGHT), {}, "residual is of torch.float16; expected torch.float32 as x"),
    ((X, RESIDUAL, WEIGHT[1:]), {}, "weight has shape (15,); expected (16,) for x of shape (4, 16"),
    ((X, RESIDUAL, WEIGHT.to("meta")), {}, "weight is on meta; expected cpu as x"),
    ((X, RESIDUAL, WEIGHT), {"bias": X}, "bias has shape (4, 16); expected (16,) for x of shape"),
    ((X, RESIDUAL, WEIGHT, -1.0), {}, "eps=-1.0; expected a number, at least 0"),
    ((X, RESIDUAL, WEIGHT), {"quant": "fp4"}, "quant='fp4'; expected None, 'fp8', 'fp8_1x128'"),
    ((X, RESIDUAL, WEIGHT), {"quant": "fp8"}, "scale is None, and quant='fp8'; expected a scale w"),
    ((X, RESIDUAL, WEIGHT), {"scale": SCALE}, "scale is given, and quant=None; expected a scale w"),
    ((X, RESIDUAL, WEIGHT), {"quant": "fp8", "scale": X}, "scale has shape (4, 16); expected one"),
    ((X, RESIDUAL, WEIGHT), {"quant": "fp8", "scale": SCALE.half()}, "scale is of torch.float16;"),
    ((X, RESIDUAL, WEIGHT), {"out": X[:1]}, "out has shape (1, 16); expected (4, 16) for x of sha"),
    ((X, RESIDUAL, WEIGHT), {"out": X.half()}, "out is of torch.float16; expected torch.float32 a"),
    ((X, RESIDUAL, WEIGHT), {"residual_out": torch.ones(16, 4).t()}, "residual_out has strides (1"),
    ((X, RESIDUAL, WEIGHT), {"strategy": "fused"}, "strategy='fused'; expected 'auto', 'one_shot'"),
    ((X, RESIDUAL, WEIGHT), {"strategy": "two_shot"}, "strategy='two_shot', but the tensors are o"),
]  # fmt: skip


@pytest.mark.parametrize(("tensors", "options", "message"), REFUSED)
def test_refused(tensors, options, message):
    with pytest.raises(tw.TileWeaveError) as error:
        ops.all_reduce_rms_norm(*tensors, **options)
    assert str(error.value).startswith(f"all_reduce_rms_norm: {message}")


MEMORY = torch.ones(8, 16)
OVERLAPPING = [
    ({"out": MEMORY[1:5]}, "out shares memory with x; expected the same tensor, or other memory"),
    ({"out": MEMORY[4:]}, None),
    (
        {"residual_out": MEMORY[:4], "out": MEMORY[:4]},
        "out shares memory with residual_out; expect",
    ),
    ({"residual_out": MEMORY[2:6]}, "residual_out shares memory with x; expected the same tensor"),
]


@pytest.mark.parametrize(("results", "message"), OVERLAPPING)
def test_overlapping_results(results, message):
    x, weight = MEMORY[:4], torch.ones(16)
    if message is None:
        ops.all_reduce_rms_norm(x, RESIDUAL, weight, **results)
        return
    with pytest.raises(tw.TileWeaveError, match=message):
        ops.all_reduce_rms_norm(x, RESIDUAL, weight, **results)


def test_a_parameter_is_not_overwritten():
    weight = torch.ones(1024)
    out = weight[:64].view(4, 16)
    with pytest.raises(
        tw.TileWeaveError, match="out shares memory with weight; expected memory of"
    ):
        ops.all_reduce_rms_norm(X, RESIDUAL, weight[:16], out=out)


@pytest.mark.parametrize("name", ["x", "residual", "weight", "out"])
def test_no_gradient(name):
    given = {"x": X, "residual": RESIDUAL, "weight": WEIGHT, "out": torch.empty_like(X)}
    given[name] = given[name].clone().requires_grad_()
    with pytest.raises(tw.TileWeaveError) as error:
        ops.all_reduce_rms_norm(**given)
    assert str(error.value) == (
        f"all_reduce_rms_norm: {name} requires a gradient; expected torch.no_grad(), as there is "
        "no gradient"
    )
    with torch.no_grad():
        ops.all_reduce_rms_norm(**given)
