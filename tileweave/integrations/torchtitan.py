"""Expert parallelism of torchtitan by TileWeave's operators.

    --override.imports tileweave.integrations.torchtitan.moe

replaces the token dispatcher of the mixtures of experts. Tokens move without the host reading the
routing, with gradients.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torchtitan.config import override
from torchtitan.models.common.token_dispatcher import (
    AllToAllTokenDispatcher,
    BaseEPTokenDispatcher,
    LocalTokenDispatcher,
)

from .. import ops


class TokenDispatcher(BaseEPTokenDispatcher):
    """Sends tokens by ``dispatch``, and adds their results by ``combine``.

    The experts get rows of a constant number, enough for every routing; those past the last token
    are zeros, and belong to no expert.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseEPTokenDispatcher.Config):
        """Has the options of ``AllToAllTokenDispatcher.Config``."""

    def dispatch(
        self, x: Tensor, scores: Tensor, expert_ids: Tensor, counts: Tensor
    ) -> tuple[Tensor, Tensor, Any]:
        """Return rows, the number of rows of each expert of this rank, and a handle.

        Args:
            x, scores, expert_ids: (T, H), (T, k) and (T, k); T is equal on all ranks.
            counts: number of own tokens of each expert, which only one rank alone needs.
        """
        if self.ep_mesh is None:
            return LocalTokenDispatcher.dispatch(self, x, scores, expert_ids, counts)
        group = self.ep_mesh.get_group()
        rows, offsets, handle = ops.dispatch(
            x, expert_ids, scores, num_experts=self.num_experts, group=group
        )
        return rows, offsets.diff(prepend=torch.zeros_like(offsets[:1])), handle

    def combine(self, rows: Tensor, handle: Any, x: Tensor) -> Tensor:
        """Return the sum of the results of each token, multiplied by its scores: (T, H)."""
        if self.ep_mesh is None:
            return LocalTokenDispatcher.combine(self, rows, handle, x)
        return ops.combine(rows, handle)


@override(
    target=AllToAllTokenDispatcher.Config, exact=True,
    description="token exchange by TileWeave's operators",
)  # fmt: skip
def moe(config: AllToAllTokenDispatcher.Config) -> TokenDispatcher.Config:
    """Return the configuration of the token dispatcher that replaces that of ``config``."""
    return TokenDispatcher.Config(num_experts=config.num_experts, top_k=config.top_k)
