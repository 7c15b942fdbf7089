"""All-reduce with RMSNorm, with the signatures of ``flashinfer.comm``.

An engine that calls ``flashinfer.comm.allreduce_fusion`` uses this module instead. FlashInfer need
not be installed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch

from ..builtins.errors import TileWeaveError
from ..ops import all_reduce, all_reduce_rms_norm
from ..ops.core.groups import group_of, name_of
from ..ops.norm.problem import NormProblem

__all__ = [
    "AllReduceFusionPattern",
    "AllReduceFusionWorkspace",
    "allreduce_fusion",
    "create_allreduce_fusion_workspace",
]


class AllReduceFusionPattern:
    """Numbers of FlashInfer's patterns; ``allreduce_fusion`` computes those of ``SUPPORTED``."""

    kAllReduce = 0
    kARResidualRMSNorm = 1
    kARResidualRMSNormFP8Quant = 2
    kARResidualRMSNormFP4Quant = 3
    kARResidualRMSNormOutFP8Quant = 4
    kARResidualRMSNormOutFP4Quant = 5
    kMoEReductionARResidualRMSNorm = 6
    kMoEFinalizeARResidualRMSNorm = 7
    kARResidualRMSNormPerTokenGroupFP8PackedQuant = 8
    kARResidualRMSNormOutPerTokenGroupFP8PackedQuant = 9
    kARResidualRMSNormDynamicFP8Quant = 10
    kARResidualRMSNormOutDynamicFP8Quant = 11


SUPPORTED = ("kAllReduce", "kARResidualRMSNorm", "kARResidualRMSNormFP8Quant")
"""Names of the patterns that are computed here."""
_CREATE = "create_allreduce_fusion_workspace"
_STRATEGIES = {None: "auto", True: "one_shot", False: "two_shot"}
"""Strategy for each value of ``use_oneshot``."""


@dataclass
class AllReduceFusionWorkspace:
    """Group of an ``allreduce_fusion``. Memory is allocated by the first call of each shape.

    Attributes:
        world_size, rank: size of the group, and rank of this process in it.
        group: name of the group.
        backend: ``tileweave``.
    """

    world_size: int
    rank: int
    group: str
    backend: str = "tileweave"
    scales: dict[tuple[float, torch.device], torch.Tensor] = field(default_factory=dict)

    def is_buffer_size_sufficient(
        self, tp_size: int, num_tokens: int, hidden_dim: int, dtype: torch.dtype,
        use_oneshot: bool | None = None,
    ) -> bool:  # fmt: skip
        """Return whether there is a program for this shape."""
        problem = NormProblem("", num_tokens, hidden_dim, tp_size, dtype, 0.0)
        return tp_size == self.world_size and problem.obstacle() is None

    def destroy(self) -> None:
        """Do nothing: ``tw.finalize`` frees the memory of programs."""

    def scale(self, value: torch.Tensor | float | None, device: torch.device) -> torch.Tensor:
        """Return a scale on the device, the same tensor for equal numbers."""
        if isinstance(value, torch.Tensor):
            return value
        if value is None:
            _refuse("scale_factor is None", "a float32 tensor or a number for this pattern")
        key = float(value), device
        if key not in self.scales:
            self.scales[key] = torch.full((1,), key[0], device=device)
        return self.scales[key]


def create_allreduce_fusion_workspace(
    backend: str = "auto",
    world_size: int | None = None,
    rank: int | None = None,
    max_token_num: int | None = None,
    hidden_dim: int | None = None,
    dtype: torch.dtype | None = None,
    gpus_per_node: int | None = None,
    comm_backend: Any = None,
    force_oneshot_support: bool = False,
    group: Any = None,
) -> AllReduceFusionWorkspace:
    """Return the workspace of a group. Nothing is allocated.

    Args:
        world_size, rank: those of the group; None for unknown.
        group: a ``ProcessGroup``, its name, or None for the default group.
        backend, max_token_num, hidden_dim, dtype, gpus_per_node, force_oneshot_support: not used.
        comm_backend: not used; the group of FlashInfer's object is not known, so ``group`` must be
            given, too.

    Raises:
        TileWeaveError: the group has another size, or this process another rank in it.
    """
    if comm_backend is not None and group is None:
        _refuse("comm_backend is given without a group", "group", _CREATE)
    name = "" if group is None else name_of(group)
    ranks = group_of(name)
    for what, value, actual in (
        ("world_size", world_size, ranks.world_size),
        ("rank", rank, ranks.rank),
    ):
        if value not in (None, actual):
            _refuse(f"{what}={value}", f"{actual} in this group", _CREATE)
    return AllReduceFusionWorkspace(ranks.world_size, ranks.rank, name)


def allreduce_fusion(
    input: torch.Tensor,
    workspace: AllReduceFusionWorkspace,
    pattern: int,
    launch_with_pdl: bool = False,
    trigger_completion_at_end: bool = True,
    output: torch.Tensor | None = None,
    residual_out: torch.Tensor | None = None,
    norm_out: torch.Tensor | None = None,
    quant_out: torch.Tensor | None = None,
    scale_out: torch.Tensor | None = None,
    residual_in: torch.Tensor | None = None,
    rms_gamma: torch.Tensor | None = None,
    rms_eps: float = 1e-6,
    scale_factor: torch.Tensor | float | None = None,
    layout_code: int | None = None,
    use_oneshot: bool | None = None,
    fp32_acc: bool = False,
    moe_reduction_device_num_experts: int | None = None,
    moe_reduction_scale_input: torch.Tensor | None = None,
    moe_reduction_active_experts_token_input: torch.Tensor | None = None,
    moe_reduction_token_input: torch.Tensor | None = None,
    expanded_idx_to_permuted_idx: torch.Tensor | None = None,
    expert_scale_factor: torch.Tensor | None = None,
    shared_expert_output: torch.Tensor | None = None,
    block_quant_group_size: int | None = None,
    weight_bias: float = 0.0,
) -> torch.Tensor:
    """Compute a pattern of ``SUPPORTED`` with ``tileweave.ops``; docs/guides/decode.md says which
    arguments are used.

    Args:
        output, residual_out, norm_out, quant_out: receive the results; None for new tensors. They
            may be ``input`` or ``residual_in``, if they have the same type.

    Returns:
        The sum, the normalized rows, or the quantized rows.

    Raises:
        TileWeaveError: the pattern is not supported, or arguments do not fit.
    """
    name = _name_of(pattern)
    if name not in SUPPORTED:
        _refuse(f"pattern={name}", ", ".join(SUPPORTED))
    if name == "kAllReduce":
        return all_reduce(input, workspace.group, out=output)
    if residual_in is None or rms_gamma is None:
        missing = "residual_in" if residual_in is None else "rms_gamma"
        _refuse(f"{missing} is None", f"a tensor for pattern={name}")
    if weight_bias != 0:
        _refuse(f"weight_bias={weight_bias}", "0, and a sum of rms_gamma and weight_bias")
    is_quantized = name == "kARResidualRMSNormFP8Quant"
    if is_quantized and norm_out is not None:
        _refuse("norm_out is given", f"None for pattern={name}")
    return all_reduce_rms_norm(
        input, residual_in, rms_gamma, rms_eps,
        quant="fp8" if is_quantized else None,
        scale=workspace.scale(scale_factor, input.device) if is_quantized else None,
        group=workspace.group, out=quant_out if is_quantized else norm_out,
        residual_out=residual_out, strategy=_STRATEGIES[use_oneshot],
    )[0]  # fmt: skip


def _name_of(pattern: int) -> str:
    """Return the name of a pattern, or its number if it is unknown."""
    names = {number: name for name, number in vars(AllReduceFusionPattern).items()}
    return names.get(pattern, str(pattern)) if isinstance(pattern, int) else repr(pattern)


def _refuse(what: str, expected: str, function: str = "allreduce_fusion") -> NoReturn:
    raise TileWeaveError(f"{function}: {what}; expected {expected}")
