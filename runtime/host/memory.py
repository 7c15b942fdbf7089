"""Memory of the symmetric heap: one block per rank, all blocks in one address range at a constant
stride.

``torch.distributed._symmetric_memory`` allocates the blocks and exchanges their handles. This
module maps the same physical memory a second time, with adjacent blocks; only this mapping is used.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from .driver import call, driver
from .group import Group

PAGE = 1 << 21


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
            call("cuMemAddressFree", self.base, len(self.blocks) * self.stride)
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

    owner = symm_mem.empty(nbytes, dtype=torch.uint8, device=device)
    handle = symm_mem.rendezvous(owner, process_group)
    pointers = [int(p) for p in handle.buffer_ptrs]
    sizes = [int(call("cuMemGetAddressRange", p)[1]) for p in pointers]
    stride = math.ceil(max(sizes) / PAGE) * PAGE
    base = int(call("cuMemAddressReserve", len(pointers) * stride, PAGE, 0, 0))
    bindings = driver()
    access = bindings.CUmemAccessDesc()
    access.location.type = bindings.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    access.location.id = device.index
    access.flags = bindings.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    blocks = tuple((base + rank * stride, size) for rank, size in enumerate(sizes))
    for pointer, (address, size) in zip(pointers, blocks, strict=True):
        memory = call("cuMemRetainAllocationHandle", pointer)
        call("cuMemMap", address, size, 0, memory, 0)
        call("cuMemRelease", memory)
        call("cuMemSetAccess", address, size, [access], 1)
    return Memory(base, stride, nbytes, owner, blocks, int(handle.multicast_ptr or 0))
