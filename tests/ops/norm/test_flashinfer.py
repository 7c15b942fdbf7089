"""``tileweave.compat.flashinfer`` on ranks that are processes, and what it refuses."""

from __future__ import annotations

import inspect

import pytest
import torch
import torch.distributed as dist

import tileweave as tw
from tests.ops.core.test_torch import assert_right
from tests.ops.norm.norm_on_ranks import Call
from tileweave.compat.flashinfer import (
    SUPPORTED,
    AllReduceFusionPattern,
    AllReduceFusionWorkspace,
    allreduce_fusion,
    create_allreduce_fusion_workspace,
)
from tileweave.ops.norm.reference import reference

NAMES = {n for n in vars(AllReduceFusionPattern) if n.startswith("k")}


def patterns(in_place: bool, number: bool) -> dict[str, bool]:
    """Compare all supported patterns with the definition, as an engine calls them."""
    me, count = dist.get_rank(), dist.get_world_size()
    workspace = create_allreduce_fusion_workspace(
        backend="trtllm", world_size=count, rank=me, max_token_num=64, hidden_dim=264,
        dtype=torch.bfloat16, group=dist.group.WORLD,
    )  # fmt: skip
    right = {}
    for name in SUPPORTED:
        call = Call(quant="fp8" if name.endswith("FP8Quant") else None)
        every = [call.rows(r) for r in range(count)]
        inputs = call.inputs(me)
        expected = reference(every, inputs, call.eps, call.quant)
        results, residual_out = {}, torch.empty_like(inputs.x)
        if name == "kAllReduce":
            results["output"] = inputs.x if in_place else None
            expected_out = torch.stack(every).float().sum(0).bfloat16()
        else:
            residual_out = inputs.residual if in_place else residual_out
            key = "quant_out" if call.quant else "norm_out"
            results[key] = inputs.x if in_place and not call.quant else None
            expected_out = expected.out
        scale = inputs.scale if inputs.scale is None or not number else inputs.scale.item()
        out = allreduce_fusion(
            input=inputs.x, workspace=workspace, pattern=getattr(AllReduceFusionPattern, name),
            launch_with_pdl=True, residual_out=residual_out, residual_in=inputs.residual,
            rms_gamma=inputs.weight, rms_eps=call.eps, scale_factor=scale, layout_code=0,
            fp32_acc=True, **results,
        )  # fmt: skip
        right[name] = torch.equal(out.float(), expected_out.float())
        right[f"{name}: in place"] = all(t is None or t is out for t in results.values())
        if name != "kAllReduce":
            right[f"{name}: residual"] = torch.equal(residual_out, expected.residual)
    return right


@pytest.mark.parametrize(("in_place", "number"), [(False, True), (True, False)])
def test_patterns(three, in_place, number):
    assert_right(three.run(patterns, in_place, number))


def test_workspace():
    workspace = create_allreduce_fusion_workspace(world_size=1, rank=0)
    assert (workspace.world_size, workspace.rank, workspace.backend) == (1, 0, "tileweave")
    fits = workspace.is_buffer_size_sufficient
    assert fits(tp_size=1, num_tokens=9, hidden_dim=4096, dtype=torch.float16)
    assert not fits(2, 9, 4096, torch.float16) and not fits(1, 9, 4097, torch.float16)
    assert workspace.scale(2.0, torch.device("cpu")) is workspace.scale(2, torch.device("cpu"))
    workspace.destroy()
    for options, message in [
        ({"world_size": 2}, "world_size=2; expected 1 in this group"),
        ({"rank": 1}, "rank=1; expected 0 in this group"),
        ({"comm_backend": object()}, "comm_backend is given without a group; expected group"),
    ]:
        with pytest.raises(
            tw.TileWeaveError, match=f"create_allreduce_fusion_workspace: {message}"
        ):
            create_allreduce_fusion_workspace(**options)


X, WEIGHT = torch.ones(2, 16), torch.ones(16)


def fused(pattern: str, **options) -> torch.Tensor:
    workspace = AllReduceFusionWorkspace(1, 0, "")
    given = {"residual_in": X, "rms_gamma": WEIGHT} | options
    return allreduce_fusion(X, workspace, getattr(AllReduceFusionPattern, pattern), **given)


@pytest.mark.parametrize("pattern", sorted(NAMES - set(SUPPORTED)))
def test_patterns_that_are_refused_by_name(pattern):
    with pytest.raises(tw.TileWeaveError) as error:
        fused(pattern)
    assert str(error.value) == (
        f"allreduce_fusion: pattern={pattern}; expected kAllReduce, kARResidualRMSNorm, "
        "kARResidualRMSNormFP8Quant"
    )


@pytest.mark.parametrize(
    ("pattern", "options", "message"),
    [
        ("kARResidualRMSNorm", {"residual_in": None}, "residual_in is None; expected a tensor for"),
        (
            "kARResidualRMSNorm",
            {"rms_gamma": None},
            "rms_gamma is None; expected a tensor for patt",
        ),
        (
            "kARResidualRMSNorm",
            {"weight_bias": 1.0},
            "weight_bias=1.0; expected 0, and a sum of rm",
        ),
        (
            "kARResidualRMSNormFP8Quant",
            {},
            "scale_factor is None; expected a float32 tensor or a n",
        ),
        (
            "kARResidualRMSNormFP8Quant",
            {"norm_out": X},
            "norm_out is given; expected None for patt",
        ),
    ],
)
def test_refused(pattern, options, message):
    with pytest.raises(tw.TileWeaveError, match=f"allreduce_fusion: {message}"):
        fused(pattern, **options)


def test_unknown_pattern():
    workspace = AllReduceFusionWorkspace(1, 0, "")
    with pytest.raises(
        tw.TileWeaveError, match="pattern=99; expected kAllReduce, kARResidualRMSNor"
    ):
        allreduce_fusion(X, workspace, 99)


PARAMETERS = """
input workspace pattern launch_with_pdl trigger_completion_at_end output residual_out norm_out
quant_out scale_out residual_in rms_gamma rms_eps scale_factor layout_code use_oneshot fp32_acc
moe_reduction_device_num_experts moe_reduction_scale_input
moe_reduction_active_experts_token_input moe_reduction_token_input expanded_idx_to_permuted_idx
expert_scale_factor shared_expert_output block_quant_group_size weight_bias
"""
"""Of ``flashinfer.comm.allreduce_fusion`` in August 2026."""


def test_parameters_of_flashinfer():
    assert list(inspect.signature(allreduce_fusion).parameters) == PARAMETERS.split()
