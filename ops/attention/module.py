"""Attention over a sharded sequence as a ``torch.nn.Module``."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ..core.checks import require_bools
from .reference import Result, gathered_attention
from .sp_attention import sp_attention


class SequenceParallelAttention(torch.nn.Module):
    """Attention over a sequence that is sharded among ranks.

    Args:
        causal, layout, softmax_scale, group, return_lse: see ``ops.sp_attention``.
        reference: compute in plain torch in fp32, which is slow: ``torch.distributed`` gathers all
            keys and values. This supports any floating-point type, any head dimensions and any
            number of ranks, on CPUs too, and has gradients of q, k and v.
    """

    def __init__(
        self,
        *,
        causal: bool,
        layout: str = "contiguous",
        softmax_scale: float | None = None,
        group: Any = None,
        return_lse: bool = False,
        reference: bool = False,
    ) -> None:
        super().__init__()
        flags = {"causal": causal, "return_lse": return_lse, "reference": reference}
        require_bools("SequenceParallelAttention", **flags)
        self.options = {"causal": causal, "layout": layout, "softmax_scale": softmax_scale}
        self.group, self.return_lse = group, return_lse
        self.attend = _chosen(reference)

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cu_seqlens_q: torch.Tensor | None = None,
        cu_seqlens_k: torch.Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_k: int | None = None,
    ) -> torch.Tensor | Result:
        """Call ``ops.sp_attention``, or the reference, with these tensors.

        Raises:
            TileWeaveError: arguments are invalid or differ between ranks.
        """
        out, lse = self.attend(
            q, k, v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k,
            max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k, group=self.group, **self.options,
        )  # fmt: skip
        return (out, lse) if self.return_lse else out


def _chosen(reference: bool) -> Callable[..., Any]:
    if reference:
        return gathered_attention
    return partial(sp_attention, return_lse=True)
