"""Memory of the symmetric heap: one block per rank, all blocks in one address range at a constant
stride.

``torch.distributed._symmetric_memory`` allocates the blocks and exchanges their handles. This
module maps the same physical memory a second time, with adjacent blocks; only this mapping is used.
An allocation of torch is more than the buffer that it returns: the signal pad of torch follows the
buffer, and from torch 2.14 on precedes it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ...builtins.errors import TileWeaveError
from .driver import call, driver
from .group import Group

PAGE = 1 << 21
ALIGNMENT = 1024
"""Alignment of the memory of each rank, and of symmetric tensors in it, in bytes."""


@dataclass
class Memory:
    """Mapping of the memory of all ranks: ``nbytes`` bytes of rank r at ``base + r * stride``.

    Attributes:
        owner: keeps the memory alive.
        blocks: (address, bytes) of each block that ``close`` unmaps.
        multicast: address at which a store reaches all ranks; 0 if there is none.
    """

    base: int
    stride: int
    nbytes: int
    owner: Any
    blocks: tuple[tuple[int, int], ...] = ()
    multicast: int = 0

    def close(self) -> None:
        """Undo the mapping. Kernels that use the memory must have ended on every rank."""
        for address, size in self.blocks:
            call("cuMemUnmap", address, size)
        if self.blocks:
            call("cuMemAddressFree", self.blocks[0][0], len(self.blocks) * self.stride)
        self.blocks = ()


def memory_of(group: Group, nbytes: int) -> Memory:
    """Allocate at least ``nbytes`` bytes per rank. Collective."""
    nbytes = math.ceil(nbytes / PAGE) * PAGE
    if group.process_group is None or group.world_size == 1:
        return _own(group.device, nbytes)
    return _everyones(group.process_group, group.device, nbytes)


def _own(device: torch.device, nbytes: int) -> Memory:
    owner = torch.zeros(nbytes + PAGE, dtype=torch.uint8, device=device)
    base = math.ceil(owner.data_ptr() / PAGE) * PAGE
    return Memory(base, nbytes, nbytes, owner)


def _everyones(process_group: dist.ProcessGroup, device: torch.device, nbytes: int) -> Memory:
    import torch.distributed._symmetric_memory as symm_mem

    owner = symm_mem.empty(nbytes + ALIGNMENT, dtype=torch.uint8, device=device)
    handle = symm_mem.rendezvous(owner, process_group)
    pointers = [int(p) + int(handle.offset) for p in handle.buffer_ptrs]
    ranges = [call("cuMemGetAddressRange", p) for p in pointers]
    sizes = [int(size) for _, size in ranges]
    offset = _offset([p - int(start) for p, (start, _) in zip(pointers, ranges, strict=True)])
    aligned = math.ceil(offset / ALIGNMENT) * ALIGNMENT
    stride = math.ceil(max(sizes) / PAGE) * PAGE
    reserved = int(call("cuMemAddressReserve", len(pointers) * stride, PAGE, 0, 0))
    bindings = driver()
    access = bindings.CUmemAccessDesc()
    access.location.type = bindings.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    access.location.id = device.index
    access.flags = bindings.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    blocks = tuple((reserved + rank * stride, size) for rank, size in enumerate(sizes))
    for pointer, (address, size) in zip(pointers, blocks, strict=True):
        memory = call("cuMemRetainAllocationHandle", pointer)
        call("cuMemMap", address, size, 0, memory, 0)
        call("cuMemRelease", memory)
        call("cuMemSetAccess", address, size, [access], 1)
    multicast = int(handle.multicast_ptr or 0)
    if multicast:
        multicast += aligned - offset
    return Memory(reserved + aligned, stride, nbytes, owner, blocks, multicast)


def _offset(offsets: list[int]) -> int:
    """Return where in its allocation the buffer of each rank begins, in bytes.

    Raises:
        TileWeaveError: the ranks' offsets differ.
    """
    if len(set(offsets)) > 1:
        among = ", ".join(f"rank {rank}: {offset}" for rank, offset in enumerate(offsets))
        raise TileWeaveError(
            f"init: torch's symmetric buffers begin at different offsets of their allocations "
            f"({among}); expected equal offsets (the same torch and signal pad size on all ranks)"
        )
    return offsets[0]
