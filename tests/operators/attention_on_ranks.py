"""What each rank of the tests of attention does, in a process of its own, on a CPU."""

from __future__ import annotations

import torch
import torch.distributed as dist

from tileweave.ops.attention_problem import checked_attention
from tileweave.ops.groups import group_of
from tileweave.ops.problem import agree


def differ() -> None:
    """Rank 1 alone asks for a causal result."""
    group = group_of("")
    q = torch.zeros(1, 4, 2, 8)
    problem = checked_attention(q, q, q, group.world_size, causal=dist.get_rank() == 1)
    agree(group, problem, "auto")
