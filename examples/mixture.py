"""Train a small mixture of experts whose experts are distributed over ranks.

    torchrun --nproc-per-node=4 examples/mixture.py

The same model in one process has the same losses. Without a GPU the ranks use gloo.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch.nn import functional

import tileweave as tw
from tileweave import ops

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
TOKENS, HIDDEN, WIDTH, EXPERTS_PER_RANK, TOP_K = 64, 32, 48, 2, 2
STEPS, LEARNING_RATE, TOLERANCE = 60, 1e-2, 1e-2


def route(x: torch.Tensor, router: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the weights and the experts of each token."""
    weights, experts = (x @ router.t()).softmax(-1).topk(TOP_K)
    return weights / weights.sum(-1, keepdim=True), experts


def mixture(x: torch.Tensor, router: torch.Tensor, *experts: torch.Tensor) -> torch.Tensor:
    """Apply the experts of all ranks to this rank's tokens."""
    weights, ids = route(x, router)
    return x + ops.expert_mlp(x, ids, weights, *experts)


def mixture_of_one_process(
    x: torch.Tensor, router: torch.Tensor, w_gate_up: torch.Tensor, w_down: torch.Tensor
) -> torch.Tensor:
    """Apply all experts to all tokens, and multiply by zero what was not chosen."""
    weights, ids = route(x, router)
    out = x
    for expert, (gate_up, down) in enumerate(zip(w_gate_up, w_down, strict=True)):
        gate, up = (x @ gate_up.t()).chunk(2, -1)
        weight = torch.where(ids == expert, weights, 0).sum(-1, keepdim=True)
        out = out + weight * ((functional.silu(gate) * up) @ down.t())
    return out


def random_tensors(ranks: int) -> list[torch.Tensor]:
    """Return the tokens of all ranks, their targets and all parameters, equal on all ranks."""
    generator = torch.Generator().manual_seed(0)
    experts, tokens = ranks * EXPERTS_PER_RANK, ranks * TOKENS
    shapes = [
        (tokens, HIDDEN),
        (tokens, HIDDEN),
        (experts, HIDDEN),
        (experts, 2 * WIDTH, HIDDEN),
        (experts, HIDDEN, WIDTH),
    ]
    scales = [1, 1, *(shape[-1] ** -0.5 for shape in shapes[2:])]
    return [
        (scale * torch.randn(shape, generator=generator)).to(DEVICE)
        for shape, scale in zip(shapes, scales, strict=True)
    ]


def train(ranks: int, rank: int, distributed: bool) -> list[float]:
    """Return the loss of all tokens before each step.

    Args:
        distributed: whether this rank has its share of tokens and experts, else all of them.
    """
    x, targets, router, w_gate_up, w_down = random_tensors(ranks)
    if distributed:
        x, targets, w_gate_up, w_down = (
            tensor.chunk(ranks)[rank].clone() for tensor in (x, targets, w_gate_up, w_down)
        )
    parameters = [tensor.requires_grad_() for tensor in (router, w_gate_up, w_down)]
    optimizer = torch.optim.Adam(parameters, LEARNING_RATE)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        out = (mixture if distributed else mixture_of_one_process)(x, *parameters)
        loss = (out - targets).square().sum() / (ranks * TOKENS * HIDDEN)
        loss.backward()
        loss = loss.detach()[None]
        if distributed:  # experts have the gradients of all tokens, the router of own tokens
            router.grad, loss = ops.all_reduce(router.grad), ops.all_reduce(loss)
        optimizer.step()
        losses.append(float(loss))
    return losses


def main() -> int:
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if GPU:
        tw.init()
    elif ranks > 1:
        dist.init_process_group("gloo")
    rank = int(os.environ.get("RANK", "0"))
    losses, right = (train(ranks, rank, distributed) for distributed in (True, False))
    error = max(abs(a - b) / b for a, b in zip(losses, right, strict=True))
    falls = losses[-1] < losses[0] / 4
    verdict = "right" if falls and error <= TOLERANCE else "WRONG"
    print(
        f"rank {rank}: {verdict}: loss {losses[0]:.3f} to {losses[-1]:.3f} in {STEPS} steps, "
        f"largest difference to one process {error:.1e}"
    )
    if GPU:
        tw.finalize()
    if dist.is_initialized():
        dist.destroy_process_group()
    return int(verdict != "right")


if __name__ == "__main__":
    sys.exit(main())
