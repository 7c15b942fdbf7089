"""Routing, dispatch and combine by definition: loops over experts, ranks and tokens."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn.functional import silu


class Row(NamedTuple):
    """Token at an expert."""

    expert: int
    rank: int
    token: int
    choice: int


def random_ids(
    ranks: int, tokens: int, choices: int, num_experts: int, generator: torch.Generator
) -> torch.Tensor:
    """Return the experts of all tokens: uniform, skewed, one for all, few, or none; some are
    repeated, some no experts."""

    def pick(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator, dtype=torch.int32)

    shape = ranks, tokens, choices
    ids = pick(0, num_experts, *shape)
    kind = int(pick(0, 6))
    if kind == 1:
        ids = ids.where(pick(0, 3, *shape) == 0, int(pick(0, num_experts)))
    elif kind == 2:
        ids = torch.full(shape, int(pick(0, num_experts)), dtype=torch.int32)
    elif kind == 3:
        ids = pick(0, num_experts, 2)[pick(0, 2, *shape)]
    elif kind == 4:
        ids = pick(-2, num_experts + 2, *shape)
    elif kind == 5:
        ids = torch.full(shape, -1, dtype=torch.int32)
        ids[int(pick(0, ranks)), int(pick(0, tokens))] = pick(0, num_experts, choices)
    return ids


def all_rows(ids: torch.Tensor, num_experts: int) -> list[list[Row]]:
    """Return the rows of each rank's experts, as if there were room for all.

    Args:
        ids: (W, T, k).
    """
    ranks, tokens, _ = ids.shape
    experts = ids.tolist()
    rows: list[list[Row]] = [[] for _ in range(ranks)]
    for expert in range(num_experts):
        for rank in range(ranks):
            for token in range(tokens):
                choices = experts[rank][token]
                if expert in choices:
                    row = Row(expert, rank, token, choices.index(expert))
                    rows[expert * ranks // num_experts].append(row)
    return rows


def kept_ids(ids: torch.Tensor, num_experts: int, capacity: int) -> torch.Tensor:
    """Return the experts of all tokens; -1 for choices that are dropped."""
    kept = torch.full_like(ids, -1)
    for rows in all_rows(ids, num_experts):
        for expert, rank, token, _ in rows[:capacity]:
            kept[rank, token][ids[rank, token] == expert] = expert
    return kept


def mlp(x: torch.Tensor, w_gate_up: torch.Tensor, w_down: torch.Tensor) -> torch.Tensor:
    gate, up = (w_gate_up @ x).chunk(2)
    return w_down @ (silu(gate) * up)


def mixture(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, w_gate_up: torch.Tensor,
    w_down: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """Return the results of all tokens, (W, T, H), by the experts of all ranks."""
    out = []
    for rank, token in torch.cartesian_prod(*map(torch.arange, ids.shape[:2])).tolist():
        total = 0 * x[rank, token]
        for choice, expert in enumerate(ids[rank, token].tolist()):
            if 0 <= expert < len(w_down):
                result = mlp(x[rank, token], w_gate_up[expert], w_down[expert])
                total = total + weights[rank, token, choice] * result
        out.append(total)
    return torch.stack(out).view(x.shape)


def quantized(token: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the e4m3 values of a token, and a scale for each 128 of them."""
    values, scales = [], []
    for block in token.float().split(128):
        largest = float(block.abs().max())
        scales.append(torch.tensor(largest or 448 * 2.0**-126) / 448)
        values.append((block / scales[-1]).to(torch.float8_e4m3fn))
    return torch.cat(values), torch.stack(scales)


def dequantized(rows: torch.Tensor) -> torch.Tensor:
    """Return rows, (rows, H), as their e4m3 values and scales show them, in fp32."""
    parts = [quantized(row) for row in rows]
    return torch.stack([
        values.float() * scales.repeat_interleave(128)[: len(values)] for values, scales in parts
    ])  # fmt: skip


def quantized_mixture(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, w_gate_up: torch.Tensor,
    w_down: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """Return the results of tokens, (T, H), whose inputs and hidden values are quantized.

    Args:
        w_gate_up, w_down: of all experts, in fp32: e4m3 times scales.
    """
    out = torch.zeros(x.shape)
    tokens = dequantized(x)
    for token, choice in (ids >= 0).logical_and(ids < len(w_down)).nonzero().tolist():
        expert = int(ids[token, choice])
        gate, up = (w_gate_up[expert] @ tokens[token]).chunk(2)
        hidden = dequantized((silu(gate) * up).to(x.dtype).unsqueeze(0))[0]
        out[token] += weights[token, choice] * (w_down[expert] @ hidden).to(x.dtype).float()
    return out.to(x.dtype)
