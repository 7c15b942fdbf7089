"""Decode with a paged KV cache whose tokens are sharded over ranks.

    torchrun --nproc-per-node=4 examples/decode_step.py

Each step appends one token to each sequence, on the rank that owns its page, and attends to all
tokens. The result is that of attention to an unsharded cache. Without a GPU the ranks use gloo.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch.nn import functional

import tileweave as tw
from tileweave import ops

GPU = torch.cuda.is_available()
DTYPE = torch.bfloat16 if GPU else torch.float32
BATCH, HEADS, KV_HEADS, DIM, PAGE, TABLE = 3, 16, 2, 128, 16, 5
STEPS, TOLERANCE = 70, 2e-2


class Cache:
    """Tokens of this rank: page p of each sequence if p % W is the rank."""

    def __init__(self, rank: int, ranks: int, device: torch.device | str) -> None:
        self.rank, self.ranks = rank, ranks
        shape = BATCH * TABLE, PAGE, KV_HEADS, DIM
        self.keys, self.values = torch.zeros(2, *shape, dtype=DTYPE, device=device)
        pages = torch.arange(BATCH * TABLE, dtype=torch.int32, device=device)
        self.block_table = pages.view(BATCH, TABLE)
        self.lengths = torch.zeros(BATCH, dtype=torch.int32, device=device)

    def append(self, token: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Append a token, (batch, kv_heads, dim), to each sequence."""
        page, row = divmod(token, PAGE)
        if page % self.ranks == self.rank:
            places = self.block_table[:, page // self.ranks].long()
            self.keys[places, row], self.values[places, row] = keys, values
        self.lengths += 1

    def attend(self, q: torch.Tensor) -> torch.Tensor:
        """Attend to the tokens of all ranks."""
        return ops.decode_attention(
            q, self.keys, self.values, block_table=self.block_table, seq_lens=self.lengths
        )


@torch.no_grad()
def largest_error(rank: int, ranks: int, device: torch.device | str) -> float:
    """Decode, and return the largest error of a result. All ranks draw the same tokens."""
    generator, cache, error = torch.Generator().manual_seed(0), Cache(rank, ranks, device), 0.0
    keys, values = torch.zeros(2, BATCH, STEPS, KV_HEADS, DIM, dtype=DTYPE, device=device)
    for token in range(STEPS):
        q = torch.randn(BATCH, HEADS, DIM, generator=generator).to(device, DTYPE)
        k, v = torch.randn(2, BATCH, KV_HEADS, DIM, generator=generator).to(device, DTYPE)
        keys[:, token], values[:, token] = k, v
        cache.append(token, k, v)
        out = cache.attend(q)
        seen = (x[:, : token + 1].transpose(1, 2) for x in (keys, values))
        right = functional.scaled_dot_product_attention(q[:, :, None], *seen, enable_gqa=True)
        error = max(error, (out - right[:, :, 0]).abs().max().item())
    return error


def main() -> int:
    ranks, rank = (int(os.environ.get(name, n)) for name, n in (("WORLD_SIZE", 1), ("RANK", 0)))
    if GPU:
        tw.init()
    elif ranks > 1:
        dist.init_process_group("gloo")
    device = torch.device("cuda", torch.cuda.current_device()) if GPU else "cpu"
    error = largest_error(rank, ranks, device)
    verdict = "right" if error <= TOLERANCE else "WRONG"
    print(f"rank {rank}: {verdict}: {STEPS} steps, largest error {error:.1e}")
    if GPU:
        tw.finalize()
    if dist.is_initialized():
        dist.destroy_process_group()
    return int(verdict != "right")


if __name__ == "__main__":
    sys.exit(main())
