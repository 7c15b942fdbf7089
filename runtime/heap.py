"""The symmetric heap: one block a rank, all blocks mapped into one address range at a constant
stride.

``torch.distributed._symmetric_memory`` allocates and exchanges; we map the same physical memory a
second time, side by side, so that the heaps of all ranks are one strided tensor. Only that view is
used.
"""

from __future__ import annotations

import math

import torch

from ..builtins.errors import TileWeaveError
from ..builtins.symmetric import is_symmetric_dtype
from .driver import call, driver
from .group import Group

ALIGNMENT = 1024
PAGE = 1 << 21


class HeapExhausted(TileWeaveError, MemoryError):
    """The symmetric heap has no room for an allocation."""


class SymmetricTensor:
    """A tensor that every rank has, each rank's copy within reach of all.

    Attributes:
        all: torch tensor (world_size, *shape): the copies of all ranks. What a ``W.Symmetric``
            parameter takes.
        local: torch tensor ``shape``: this rank's copy.
        shape, dtype: of one copy.
        offset: bytes from the start of the heap, the same on every rank.
    """

    def __init__(
        self, heap: Heap, offset: int, nbytes: int, shape: tuple[int, ...], dtype: torch.dtype
    ):
        self._heap, self._nbytes = heap, nbytes
        self.offset, self.shape, self.dtype = offset, shape, dtype
        self.all = heap.view(offset, shape, dtype)
        self.local = self.all[heap.group.rank]

    def peer(self, rank: int) -> torch.Tensor:
        """Torch tensor ``shape``: the copy of ``rank``."""
        if not 0 <= rank < self._heap.group.world_size:
            raise TileWeaveError(
                f"peer: rank={rank}; expected 0 to {self._heap.group.world_size - 1}"
            )
        return self.all[rank]

    def free(self) -> None:
        """Give the memory back. Collective: every rank frees the same tensors in the same order."""
        self._heap.free(self)

    def __repr__(self) -> str:
        return f"SymmetricTensor(shape={self.shape}, dtype={self.dtype}, offset={self.offset})"


class Heap:
    """This group's symmetric memory.

    Args:
        nbytes: size of one rank's heap.
        reserved: bytes at its start kept for the runtime.
    """

    def __init__(self, group: Group, nbytes: int, reserved: int) -> None:
        self.group = group
        self._mapped: list[tuple[int, int]] = []
        self._reservation: tuple[int, int] | None = None
        self._allocations = 0
        self._live: list[SymmetricTensor] = []
        size = math.ceil(nbytes / PAGE) * PAGE
        if group.world_size == 1:
            self._owner = torch.zeros(size + PAGE, dtype=torch.uint8, device=group.device)
            self.base = math.ceil(self._owner.data_ptr() / PAGE) * PAGE
            self.stride = size
        else:
            self._map_all(size)
        self.nbytes = size
        self._holes = [(reserved, size - reserved)]
        self._storage = torch._C._construct_storage_from_data_pointer(
            self.base, group.device, self.stride * group.world_size
        )
        self.unchecked_storage = torch._C._construct_storage_from_data_pointer(
            self.base, group.device, 1 << 60
        )
        """Storage at the heap's address that claims any size: for arguments that are never looked
        at."""
        self.view(0, (size,), torch.uint8)[group.rank].zero_()
        torch.cuda.synchronize(group.device)

    def _map_all(self, size: int) -> None:
        import torch.distributed._symmetric_memory as symm_mem

        self._owner = symm_mem.empty(size, dtype=torch.uint8, device=self.group.device)
        handle = symm_mem.rendezvous(self._owner, self.group.process_group)
        sizes = [int(call("cuMemGetAddressRange", int(p))[1]) for p in handle.buffer_ptrs]
        self.stride = math.ceil(max(sizes) / PAGE) * PAGE
        total = self.stride * self.group.world_size
        self.base = int(call("cuMemAddressReserve", total, PAGE, 0, 0))
        self._reservation = (self.base, total)
        bindings = driver()
        access = bindings.CUmemAccessDesc()
        access.location.type = bindings.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        access.location.id = self.group.device.index
        access.flags = bindings.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        for peer, (pointer, block) in enumerate(zip(handle.buffer_ptrs, sizes, strict=True)):
            memory = call("cuMemRetainAllocationHandle", int(pointer))
            address = self.base + peer * self.stride
            call("cuMemMap", address, block, 0, memory, 0)
            call("cuMemRelease", memory)
            call("cuMemSetAccess", address, block, [access], 1)
            self._mapped.append((address, block))

    def view(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Torch tensor (world_size, *shape) over the bytes from ``offset`` of every rank's heap."""
        itemsize = dtype.itemsize
        strides = [1] * len(shape)
        for axis in reversed(range(len(shape) - 1)):
            strides[axis] = strides[axis + 1] * shape[axis + 1]
        tensor = torch.empty(0, dtype=dtype, device=self.group.device)
        return tensor.set_(
            self._storage,
            offset // itemsize,
            (self.group.world_size, *shape),
            (self.stride // itemsize, *strides),
        )

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> SymmetricTensor:
        """A zeroed symmetric tensor; see ``tw.symmetric``."""
        if not is_symmetric_dtype(dtype.itemsize):
            raise TileWeaveError(
                f"symmetric: dtype={dtype}; expected elements of 1, 2, 4, 8 or 16 bytes"
            )
        if any(not isinstance(s, int) or s < 1 for s in shape):
            raise TileWeaveError(f"symmetric: shape={shape}; expected positive integers")
        nbytes = math.ceil(math.prod(shape) * dtype.itemsize / ALIGNMENT) * ALIGNMENT
        self._agree(f"allocate {tuple(shape)} {dtype}")
        for index, (offset, room) in enumerate(self._holes):
            if room >= nbytes:
                self._holes[index] = (offset + nbytes, room - nbytes)
                tensor = SymmetricTensor(self, offset, nbytes, tuple(shape), dtype)
                self._live.append(tensor)
                tensor.local.zero_()
                torch.cuda.synchronize(self.group.device)
                self.group.meet(f"heap/{self._allocations}/zeroed")
                return tensor
        free = max((room for _, room in self._holes), default=0)
        raise HeapExhausted(
            f"symmetric: {nbytes} bytes for shape={tuple(shape)} dtype={dtype} do not fit into "
            "the symmetric heap "
            f"of {self.nbytes} bytes, {free} of them free in one piece; expected a larger "
            "TILEWEAVE_HEAP_BYTES"
        )

    def free(self, tensor: SymmetricTensor) -> None:
        """Return a tensor's memory; neighbouring holes merge."""
        if tensor not in self._live:
            raise TileWeaveError(
                f"free: {tensor} is not allocated; expected a live symmetric tensor"
            )
        self._agree(f"free {tensor.offset}")
        torch.cuda.synchronize(self.group.device)
        self.group.meet(f"heap/{self._allocations}/idle")
        self._live.remove(tensor)
        merged: list[tuple[int, int]] = []
        for offset, room in sorted([*self._holes, (tensor.offset, tensor._nbytes)]):
            if merged and sum(merged[-1]) == offset:
                merged[-1] = (merged[-1][0], merged[-1][1] + room)
            else:
                merged.append((offset, room))
        self._holes = merged

    def describe(self, address: int) -> str:
        """In words, what stands at an address of the heap."""
        if not self.base <= address < self.base + self.stride * self.group.world_size:
            return f"{address:#x}"
        rank, offset = divmod(address - self.base, self.stride)
        for tensor in self._live:
            if tensor.offset <= offset < tensor.offset + tensor._nbytes:
                element = (offset - tensor.offset) // tensor.dtype.itemsize
                place = []
                for extent in reversed(tensor.shape):
                    element, index = divmod(element, extent)
                    place.insert(0, str(index))
                return f"[{', '.join([str(rank), *place])}] of {tensor!r}"
        return f"byte {offset} of rank {rank}'s heap"

    def close(self) -> None:
        """Undo the mapping. Kernels that use the heap must have ended on every rank."""
        for address, block in self._mapped:
            call("cuMemUnmap", address, block)
        if self._reservation is not None:
            call("cuMemAddressFree", *self._reservation)
        self._mapped, self._reservation = [], None

    def _agree(self, what: str) -> None:
        self._allocations += 1
        said = self.group.exchange(f"heap/{self._allocations}", what)
        for peer, theirs in enumerate(said):
            if theirs != what:
                raise TileWeaveError(
                    f"symmetric heap: rank {self.group.rank} does `{what}` where rank {peer} "
                    f"does `{theirs}`; expected the same calls in the same order on every rank"
                )
