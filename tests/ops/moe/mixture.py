"""Inputs of a mixture of experts on each rank, and what its steps must return."""

from typing import NamedTuple

import torch
from torch.nn.functional import silu

from tests.on_gpus import GPU
from tileweave import ops
from tileweave.ops.core import nccl
from tileweave.ops.core.groups import group_of
from tileweave.ops.moe.quant import quantized

ERROR = 2e-2
"""Largest relative norm of the error of results and gradients."""
FP8 = torch.float8_e4m3fn
ROUTINGS = "uniform", "skewed", "one expert", "two experts", "dropped", "no experts"


class Case(NamedTuple):
    """Extents of a mixture. Experts are per rank."""

    tokens: int
    hidden: int
    width: int
    choices: int
    per_rank: int
    capacity: int | None = None
    dtype: torch.dtype = torch.bfloat16


class Mixture:
    """Inputs of a layer on this rank."""

    def __init__(self, case: Case, transport: str, seed: int) -> None:
        self.case, self.transport, self.group = case, transport, group_of("")
        self.device = torch.device("cuda", torch.cuda.current_device()) if GPU else "cpu"
        self.num_experts = case.per_rank * self.group.world_size
        self.seed = seed
        torch.manual_seed(1000 * seed + self.group.rank)
        self.w_gate_up, self.w_down = self.experts(self.group.rank)
        shape, options = (case.tokens, case.hidden), {"dtype": case.dtype, "device": self.device}
        self.x, self.grad = (torch.randn(shape, **options) for _ in range(2))
        self.weights = torch.rand(case.tokens, case.choices, device=self.device) + 0.5
        self.ids = torch.zeros(case.tokens, case.choices, dtype=torch.int32, device=self.device)
        self.route(ROUTINGS[seed % len(ROUTINGS)])

    def experts(self, rank: int) -> list[torch.Tensor]:
        """Return the weights of a rank's experts."""
        case, generator = self.case, torch.Generator(self.device)
        generator.manual_seed(1000 * self.seed + rank)
        options = {"dtype": case.dtype, "device": self.device, "generator": generator}
        return [
            torch.randn(case.per_rank, N, K, **options) * K**-0.5
            for N, K in ((2 * case.width, case.hidden), (case.hidden, case.width))
        ]

    def fp8_weights(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return the weights of this rank's experts in e4m3, and scales of 128 x 128 of them."""
        pairs = [quantized_squares(w) for w in (self.w_gate_up, self.w_down)]
        values, scales = zip(*pairs, strict=True)
        return list(values), list(scales)

    def quantized(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the results of fp8 by ``expert_mlp``, and by steps whose products plain torch
        computes."""
        (gate_up, down), (scale_gate_up, scale_down) = self.fp8_weights()
        options = {
            "capacity": self.case.capacity, "quant": "fp8_1x128", "transport": self.transport,
        }  # fmt: skip
        tokens = self.x, self.ids, self.weights
        out = ops.expert_mlp(
            *tokens, gate_up, down, scale_w_gate_up=scale_gate_up, scale_w_down=scale_down,
            **options,
        )  # fmt: skip
        (rows, scales), offsets, handle = ops.dispatch(
            *tokens, num_experts=self.num_experts, **options
        )
        by_torch = {"out_dtype": self.case.dtype, "reference": True}
        hidden = ops.grouped_matmul(
            rows, gate_up, offsets, scale_x=scales, scale_w=scale_gate_up, epilogue="swiglu",
            **by_torch,
        )  # fmt: skip
        values, scales = quantized(hidden)
        y = ops.grouped_matmul(
            values, down, offsets, scale_x=scales, scale_w=scale_down, **by_torch
        )
        return out, ops.combine(y, handle)

    @property
    def given(self) -> list[torch.Tensor]:
        return [self.x, self.weights, self.w_gate_up, self.w_down]

    def route(self, routing: str) -> None:
        """Choose experts, in the memory of ``ids``."""
        ids, count = self.ids, self.num_experts
        ids.random_(0, count)
        if routing == "skewed":
            ids.copy_((torch.rand(ids.shape, device=self.device) ** 4 * count).int())
        elif routing == "one expert":
            ids.fill_(count - 1)
        elif routing == "two experts":
            ids.remainder_(2).mul_(count - 1)
        elif routing == "dropped":
            ids.random_(-2, count + 2)
        elif routing == "no experts":
            ids.fill_(-1)

    def exchange(self) -> tuple[torch.Tensor, torch.Tensor, ops.DispatchHandle, torch.Tensor]:
        """Dispatch, double the rows, and combine."""
        rows, offsets, handle = ops.dispatch(
            self.x, self.ids, self.weights, num_experts=self.num_experts,
            capacity=self.case.capacity, transport=self.transport,
        )  # fmt: skip
        return rows, offsets, handle, ops.combine(rows * 2, handle)

    def __call__(self, tokens: int | None = None) -> torch.Tensor:
        """Return the result of ``expert_mlp``, for the first ``tokens`` if given."""
        of_tokens = (tensor[:tokens] for tensor in (self.x, self.ids, self.weights))
        return ops.expert_mlp(
            *of_tokens, self.w_gate_up, self.w_down, capacity=self.case.capacity,
            max_tokens=None if tokens is None else self.case.tokens, transport=self.transport,
        )  # fmt: skip

    def gathered(self, x: torch.Tensor) -> torch.Tensor:
        """Return the tensors of all ranks, (W, ...)."""
        every = nccl.all_gather(x.detach().contiguous(), self.group)
        return every.view(self.group.world_size, *x.shape)

    def kept(self) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Return the experts of all tokens, -1 for dropped choices, and the numbers of the tokens
        of each expert in the order of the rows, on the CPU: there are many short steps."""
        ids = self.gathered(self.ids).flatten(0, 1).cpu()
        capacity = self.case.capacity or len(ids) * self.case.choices
        kept, tokens, rows = torch.full_like(ids, -1), [], 0
        for expert in range(self.num_experts):
            rows *= expert % self.case.per_rank != 0
            of_expert = (ids == expert).any(-1).nonzero().flatten()[: capacity - rows]
            kept[of_expert] = torch.where(ids[of_expert] == expert, expert, kept[of_expert])
            rows += len(of_expert)
            tokens.append(of_expert)
        return kept, tokens

    def fault_of_exchange(self, results: tuple) -> str:
        """Return what is wrong with the results of ``exchange``, or ""."""
        rows, offsets, _, out = results
        kept, tokens = self.kept()
        me, per_rank = self.group.rank, self.case.per_rank
        mine = tokens[me * per_rank : (me + 1) * per_rank]
        ends = torch.tensor([len(of_expert) for of_expert in mine]).cumsum(0).tolist()
        if offsets.tolist() != ends:
            return f"{self.case}: offsets {offsets.tolist()}; expected {ends}"
        x = self.gathered(self.x).flatten(0, 1)
        right = x[torch.cat(mine).to(self.device)]
        if not torch.equal(rows[: ends[-1]], right) or rows[ends[-1] :].any():
            return f"{self.case}: rows are wrong"
        total = torch.zeros(self.x.shape, device=self.device)
        own = kept.view(self.group.world_size, *self.ids.shape)[me].to(self.device)
        for choice in range(self.case.choices):
            weight = torch.where(own[:, choice] >= 0, self.weights[:, choice], 0)
            total += weight[:, None] * (self.x * 2).float()
        error = (out.float() - total).norm() / total.norm().clamp(min=1e-9)
        return "" if error <= ERROR / 4 else f"{self.case}: combine: relative error {error:.1e}"

    @torch.enable_grad()
    def right(self) -> list[torch.Tensor]:
        """Return the result and the gradients, in fp32, from the tokens and experts of all
        ranks."""
        every = [self.experts(rank) for rank in range(self.group.world_size)]
        wholes = [self.gathered(tensor).flatten(0, 1) for tensor in self.given[:2]]
        wholes += [torch.cat(parts) for parts in zip(*every, strict=True)]
        x, weights, w_gate_up, w_down = (whole.float().requires_grad_() for whole in wholes)
        kept, tokens = self.kept()
        kept, tokens = kept.to(self.device), [numbers.to(self.device) for numbers in tokens]
        out = torch.zeros_like(x)
        for expert, of_expert in enumerate(tokens):
            gate, up = (x[of_expert] @ w_gate_up[expert].t()).chunk(2, -1)
            y = (silu(gate) * up) @ w_down[expert].t()
            chosen = kept[of_expert] == expert
            weight = torch.where(chosen, weights[of_expert], 0).sum(-1, keepdim=True)
            out = out.index_add(0, of_expert, weight * y)
        grads = self.gathered(self.grad).flatten(0, 1).float()
        gradients = torch.autograd.grad(
            out, [x, weights, w_gate_up, w_down], grads, materialize_grads=True
        )
        return [
            whole.detach().chunk(self.group.world_size)[self.group.rank]
            for whole in (out, *gradients)
        ]

    def fault(
        self, actual: torch.Tensor, right: torch.Tensor, what: str = "out", typical: float = 0.0
    ) -> str:
        """Return what is wrong with a result or a gradient, or "".

        Args:
            typical: norm to which the error is compared if ``right`` has a smaller one.
        """
        error = (actual.float() - right).norm() / right.norm().clamp(min=max(typical, 1e-3))
        return "" if error <= ERROR else f"{self.case}: {what}: relative error {error:.1e}"


def quantized_squares(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return e4m3 values of weights, (E, N, K), and a scale for each 128 x 128 of them."""
    (_, N, K), side = w.shape, 128
    padded = torch.nn.functional.pad(w.float(), (0, -K % side, 0, -N % side))
    squares = padded.unflatten(2, (-1, side)).unflatten(1, (-1, side))
    scales = squares.abs().amax((2, 4)).clamp(min=1e-6) / torch.finfo(FP8).max
    values = (squares / scales[:, :, None, :, None]).flatten(3, 4).flatten(1, 2)
    return values[:, :N, :K].to(FP8).contiguous(), scales
