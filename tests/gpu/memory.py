"""Symmetric memory whose buffer does not begin where torch's allocation begins.

    torchrun --nproc-per-node=2 tests/gpu/memory.py

torch 2.14 puts its signal pad in front of the buffer. Here a buffer that begins ``LEAD`` bytes
later imitates that with every torch: no byte before it may change, and peers must see each other's
data.
"""

import argparse
import sys
from pathlib import Path

import torch
import torch.distributed._symmetric_memory as symm_mem

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import tileweave as tw
from tests.on_gpus import GPU, Verdicts, main, parser_of, say
from tileweave import ops

LEAD = 9 * 1024 + 16
"""Bytes before the buffer; no multiple of the alignment."""
PATTERN = 0x5A
_allocations: list[torch.Tensor] = []
_empty, _rendezvous = symm_mem.empty, symm_mem.rendezvous


class Shifted:
    """Handle of a buffer that begins ``LEAD`` bytes after that of torch."""

    def __init__(self, handle) -> None:
        self._handle = handle
        self.buffer_ptrs = [int(pointer) + LEAD for pointer in handle.buffer_ptrs]
        self.offset = handle.offset
        self.multicast_ptr = int(handle.multicast_ptr or 0) and int(handle.multicast_ptr) + LEAD


def empty(nbytes: int, **options) -> torch.Tensor:
    whole = _empty(nbytes + LEAD, **options)
    whole[:LEAD] = PATTERN
    _allocations.append(whole)
    return whole


def verdicts(options: argparse.Namespace) -> Verdicts:
    ranks, rank = tw.world_size(), tw.rank()
    tensor = tw.symmetric((1 << 20,), torch.int32)
    tensor.local.fill_(rank + 1)
    torch.cuda.synchronize()
    tw.barrier()
    torch.cuda.synchronize()
    values = [tensor.peer(peer).unique().tolist() for peer in range(ranks)]
    fault = "" if values == [[peer + 1] for peer in range(ranks)] else f"peers hold {values}"
    yield "each rank sees the data of all", fault
    x = torch.full((1 << 16,), float(rank + 1), device="cuda")
    for _ in range(20):
        gathered = ops.all_gather(x)
    right = torch.arange(1, ranks + 1, device="cuda").repeat_interleave(len(x)).float()
    yield "all_gather, 20 launches", "" if bool((gathered == right).all()) else "wrong"
    heap = tw.runtime.current().heap
    heap.view(0, (heap.nbytes,), torch.uint8)[rank][-(1 << 20) :].fill_(1)
    torch.cuda.synchronize()
    changed = sum(int((whole[:LEAD] != PATTERN).sum()) for whole in _allocations)
    fault = f"{changed} bytes before the buffer changed" if changed else ""
    if ranks > 1 and not _allocations:
        fault = "no allocation was shifted"
    yield "nothing before the buffer changed", fault


if __name__ == "__main__":
    if not GPU:
        say("not run: no GPU")
        sys.exit(0)
    symm_mem.empty, symm_mem.rendezvous = empty, lambda *a: Shifted(_rendezvous(*a))
    sys.exit(main(verdicts, parser_of(__doc__), heap_bytes=256 << 20))
