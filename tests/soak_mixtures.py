"""Random mixtures of experts and grouped GEMMs of tests/gpu/soak.py, with exact results."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import silu

from tests.on_gpus import GPU
from tests.soak_problems import (
    CHECKED,
    DEVICE,
    EXACT,
    FP8,
    MOVED,
    Data,
    Draw,
    integers,
    sparse,
    unwritten,
)
from tileweave import ops
from tileweave.ops.collectives.collective import checked_problem
from tileweave.ops.collectives.transport import SUMMED
from tileweave.ops.core.groups import group_of
from tileweave.ops.core.registry import OPERATORS
from tileweave.ops.moe.row_problem import RowProblem

EXPERTS = [(1, 256, 64), (2, 128, 128), (4, 512, 64)] if GPU else [(1, 16, 8), (2, 8, 24)]
"""Experts of a rank, elements of a token, and width of the MLP; few, because each one is compiled
on all ranks."""
WEIGHTS = [(4, 128, 256), (16, 256, 64), (3, 64, 512)] if GPU else [(4, 8, 16), (3, 16, 8)]
"""Experts, N and K of grouped GEMMs."""
EXACT_SILU = 32
"""A value whose ``silu`` is the value itself, in fp32."""


@dataclass(frozen=True)
class Mixture(Draw):
    """One of the operators of a mixture."""

    op: str
    tokens: int
    choices: int
    per_rank: int
    hidden: int
    width: int
    capacity: int
    dtype: torch.dtype
    capturable: bool

    @staticmethod
    def draw(rng: random.Random) -> Mixture:
        op, ranks = rng.choice(["dispatch", "combine", "expert_mlp"]), group_of("").world_size
        per_rank, hidden, width = rng.choice(EXPERTS)
        if op != "expert_mlp":
            per_rank, hidden = rng.randint(1, 8), rng.randint(1, 2000 if GPU else 40)
        tokens, choices = rng.randint(1, 300 if GPU else 12), rng.randint(1, 8)
        most = tokens * ranks * min(choices, per_rank)
        capacity = rng.choice([most, rng.randint(1, most)])
        types = MOVED if op == "dispatch" else SUMMED
        if op == "expert_mlp":
            types = SUMMED[:2] if GPU else (torch.float32,)
        capturable = rng.random() < 0.25
        return Mixture(
            op, tokens, choices, per_rank, hidden, width, capacity, rng.choice(types), capturable
        )

    @property
    def ranks(self) -> int:
        return group_of("").world_size

    @property
    def num_experts(self) -> int:
        return self.per_rank * self.ranks

    @property
    def name(self) -> str:
        return (
            f"{self.op} of {self.tokens} tokens of {self.hidden} {self.dtype}, top-{self.choices}, "
            f"{self.per_rank} experts of {self.width} a rank, capacity {self.capacity}"
        )

    def programs(self) -> list[Any]:
        ids = torch.empty(self.tokens, self.choices, dtype=torch.int32, device="meta")
        gather = checked_problem("all_gather", ids, None, self.ranks, ())
        problem = RowProblem(
            "", self.tokens, self.choices, self.capacity, self.hidden, self.ranks, self.dtype
        )
        both = [OPERATORS[op].program(problem) for op in ("dispatch", "combine")]
        programs = both[:1] if self.op == "dispatch" else both
        return [*programs, OPERATORS["all_gather"].steps(gather, "ldst")]

    def data(self) -> Data:
        return MixtureData(self)


def routing(drawn: Mixture, seed: int) -> torch.Tensor:
    """Return the experts of all tokens, (W, T, k): uniform, skewed, one for all, or few; some are
    repeated, some no experts."""
    shape, count = (drawn.ranks, drawn.tokens, drawn.choices), drawn.num_experts
    ids = integers(seed, *shape, high=count + 1) - 1
    kind = seed % 4
    if kind == 1:
        ids = (integers(seed, *shape, high=1000) / 1000) ** 4 * count
    elif kind == 2:
        ids = torch.full_like(ids, seed % count)
    elif kind == 3:
        ids = torch.where(integers(seed + 1, *shape, high=4) == 0, ids, -1)
    return ids.floor().int()


def kept(drawn: Mixture, ids: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return which choices of all tokens have a row, (W * T, k), and the numbers of the tokens of
    each expert, in the order of the rows."""
    flat = ids.flatten(0, 1)
    has_row, tokens, rows = torch.zeros_like(flat, dtype=torch.bool), [], 0
    for expert in range(drawn.num_experts):
        rows *= expert % drawn.per_rank != 0
        of_expert = (flat == expert).any(-1).nonzero().flatten()[: drawn.capacity - rows]
        has_row[of_expert] |= flat[of_expert] == expert
        rows += len(of_expert)
        tokens.append(of_expert)
    return has_row, tokens


class MixtureData(Data):
    """Inputs of an operator of a mixture."""

    def __init__(self, drawn: Mixture) -> None:
        self.drawn, self.group = drawn, group_of("")
        self.slots: list[list[torch.Tensor]] = []

    def fill(self, seed: int) -> None:
        for slot in range(self.launches):
            new = self._inputs(seed + 1000 * slot)
            if slot == len(self.slots):
                self.slots.append([*new, torch.empty_like(new[-1])])
            else:
                for old, value in zip(self.slots[slot], new, strict=False):
                    old.copy_(value)

    def _inputs(self, seed: int) -> list[torch.Tensor]:
        """Return x, experts and weights of this rank, the weights of its experts, and the
        result."""
        drawn, me = self.drawn, self.group.rank
        shape = drawn.ranks * drawn.tokens, drawn.hidden
        x = integers(seed, *shape).to(drawn.dtype)
        if drawn.op == "expert_mlp":  # one element of each token is 1
            at = integers(seed, len(x), 1, high=drawn.hidden).long()
            x = torch.zeros(shape, device=DEVICE).scatter_(1, at, 1.0).to(drawn.dtype)
        ids = routing(drawn, seed)
        weights = integers(seed + 1, *ids.shape, high=3)
        gate_up, down = self._experts(seed + 2)
        has_row, tokens = kept(drawn, ids)
        rows = x[torch.cat(tokens[me * drawn.per_rank : (me + 1) * drawn.per_rank])]
        if drawn.op == "dispatch":
            right = x.new_zeros(drawn.capacity, drawn.hidden)
            right[: len(rows)] = rows
        else:
            right = self._combined(x, ids, weights * has_row.view(ids.shape), gate_up, down)
        own = slice(me * drawn.per_rank, (me + 1) * drawn.per_rank)
        mine = x.view(drawn.ranks, drawn.tokens, -1)[me].contiguous()
        experts = [w[own].to(drawn.dtype).contiguous() for w in (gate_up, down)]
        return [mine, ids[me].contiguous(), weights[me].contiguous(), *experts, right]

    def _experts(self, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the weights of all experts, in fp32: gates are 0 or ``EXACT_SILU``, so that all
        products are exact."""
        drawn = self.drawn
        width = drawn.width if drawn.op == "expert_mlp" else 0
        shape = drawn.num_experts, width, drawn.hidden
        gate, up = (integers(seed + n, *shape, high=2) for n in range(2))
        down = sparse(seed + 2, drawn.num_experts, drawn.hidden, width)
        return torch.cat([gate * EXACT_SILU, up], 1), down

    def _combined(self, x, ids, weights, gate_up, down) -> torch.Tensor:
        """Return the weighted sums of the results of this rank's tokens."""
        drawn, me = self.drawn, self.group.rank
        x, ids, weights = x.view(drawn.ranks, drawn.tokens, -1)[me].float(), ids[me], weights[me]
        total = torch.zeros_like(x)
        for expert in range(drawn.num_experts):
            y = x
            if drawn.op == "expert_mlp":
                gate, up = (x @ gate_up[expert].t()).chunk(2, -1)
                y = (silu(gate) * up) @ down[expert].t()
            total += torch.where(ids == expert, weights, 0).sum(-1, keepdim=True) * y
        unit = EXACT_SILU if drawn.op == "expert_mlp" else 1
        if (total / unit).abs().max().item() > EXACT:
            raise ValueError(f"{drawn.name}: a sum above {EXACT}; expected smaller inputs")
        return total.to(drawn.dtype)

    def launch(self, slot: int) -> None:
        x, ids, weights, gate_up, down, _, out = self.slots[slot]
        drawn = self.drawn
        out.fill_(unwritten(out.dtype))
        if drawn.op == "expert_mlp":
            y = ops.expert_mlp(x, ids, weights, gate_up, down, capacity=drawn.capacity)
        else:
            y, _, handle = ops.dispatch(
                x, ids, weights, num_experts=drawn.num_experts, capacity=drawn.capacity
            )
            if drawn.op == "combine":
                ops.combine(y, handle, out=out)
                return
        out.copy_(y)

    def results(self, slot: int) -> CHECKED:
        *_, right, out = self.slots[slot]
        return [("result", out, right, 0.0)]


@dataclass(frozen=True)
class Grouped(Draw):
    """A grouped GEMM."""

    rows: int
    shape: tuple[int, int, int]
    dtype: torch.dtype
    capturable: bool

    @staticmethod
    def draw(rng: random.Random) -> Grouped:
        dtype = rng.choice([*SUMMED[:2], FP8] if GPU else [torch.float32])
        rows = rng.randint(1, 2000 if GPU else 60)
        return Grouped(rows, rng.choice(WEIGHTS), dtype, rng.random() < 0.25)

    @property
    def name(self) -> str:
        return f"grouped_matmul of {self.rows} rows by {self.shape} {self.dtype}"

    def data(self) -> Data:
        return GroupedData(self)


class GroupedData(Data):
    """Operands of a grouped GEMM."""

    def __init__(self, drawn: Grouped) -> None:
        self.drawn = drawn
        self.slots: list[list[torch.Tensor]] = []

    def fill(self, seed: int) -> None:
        drawn, (experts, N, K) = self.drawn, self.drawn.shape
        for slot in range(self.launches):
            first = seed + 1000 * slot
            x, w = sparse(first, drawn.rows, K), sparse(first + 1, experts, N, K)
            ends = integers(first + 2, experts, high=drawn.rows + 1).sort().values
            expert = torch.searchsorted(
                ends, torch.arange(drawn.rows, device=DEVICE).float(), right=True
            )
            right = x.new_zeros(drawn.rows, N)
            for e in range(experts):
                right[expert == e] = x[expert == e] @ w[e].t()
            if right.abs().max().item() > EXACT:
                raise ValueError(f"{drawn.name}: a sum above {EXACT}; expected smaller inputs")
            out_dtype = torch.bfloat16 if drawn.dtype == FP8 else drawn.dtype
            new = [x.to(drawn.dtype), w.to(drawn.dtype), ends.int(), right.to(out_dtype)]
            if slot == len(self.slots):
                self.slots.append([*new, torch.empty_like(new[-1])])
            else:
                for old, value in zip(self.slots[slot], new, strict=False):
                    old.copy_(value)

    def launch(self, slot: int) -> None:
        x, w, ends, _, out = self.slots[slot]
        one = torch.ones(1, device=DEVICE) if self.drawn.dtype == FP8 else None
        out.fill_(unwritten(out.dtype))
        ops.grouped_matmul(x, w, ends, scale_x=one, scale_w=one, out=out)

    def results(self, slot: int) -> CHECKED:
        *_, right, out = self.slots[slot]
        return [("result", out, right, 0.0)]
