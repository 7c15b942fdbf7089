"""Symmetric heap: memory that is allocated at the same offset on all ranks, in the same order."""

from __future__ import annotations

import math
import operator
from typing import Any, NoReturn

import torch

from ...builtins.errors import TileWeaveError
from ...builtins.symmetric import is_symmetric_dtype, packed_strides
from .group import Group
from .memory import ALIGNMENT, Memory


class HeapExhausted(TileWeaveError, MemoryError):
    """The symmetric heap has no room for an allocation."""


class SymmetricTensor:
    """Tensor with a copy on each rank; all ranks can access all copies.

    Attributes:
        all: torch tensor (world_size, *shape): the copies of all ranks; the argument for a
            ``W.Symmetric`` parameter.
        local: torch tensor ``shape``: this rank's copy.
        multicast: torch tensor ``shape`` at the multicast address of all copies, only for
            ``W.multimem_*``; None if the machine has no NVLink multicast.
        shape, dtype: shape and type of one copy.
        offset: bytes from the start of the heap, the same on every rank.
        nbytes: bytes of one copy.
    """

    def __init__(self, heap: Heap, offset: int, shape: tuple[int, ...], dtype: torch.dtype):
        self._heap = heap
        self.offset, self.shape, self.dtype = offset, shape, dtype
        self.nbytes = _nbytes(shape, dtype)
        self.all = heap.view(offset, shape, dtype)
        self.local = self.all[heap.group.rank]
        self.multicast = heap.multicast_view(offset, shape, dtype)

    def peer(self, rank: int) -> torch.Tensor:
        """Return the copy of ``rank``, a torch tensor ``shape``."""
        ranks = range(self._heap.group.world_size)
        if type(rank) is bool or rank not in ranks:
            raise TileWeaveError(f"peer: rank={rank!r}; expected 0 to {ranks[-1]}")
        return self.all[int(rank)]

    def belongs_to(self, heap: Heap) -> bool:
        """Return whether its memory is part of ``heap``."""
        return self._heap is heap

    def free(self) -> None:
        """Free the memory. Collective: all ranks free the same tensors in the same order."""
        self._heap.free(self)

    @property
    def is_live(self) -> bool:
        """True until ``free`` or ``tw.finalize`` frees its memory."""
        return "all" in vars(self)

    def invalidate(self) -> None:
        """Drop the torch tensors, because the memory is freed."""
        del self.all, self.local, self.multicast

    def __getattr__(self, name: str) -> Any:
        if name in ("all", "local", "multicast"):
            raise TileWeaveError(f"{name}: {self} was freed; expected a live symmetric tensor")
        raise AttributeError(f"SymmetricTensor has no attribute {name!r}")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TileWeaveError(
            f"copy: {self} is memory of all ranks; expected its .local to be copied or pickled"
        )

    def __repr__(self) -> str:
        return f"SymmetricTensor(shape={self.shape}, dtype={self.dtype}, offset={self.offset})"


class FreeList:
    """Free byte ranges between ``start`` and ``end``; allocation uses the first range that fits."""

    def __init__(self, start: int, end: int) -> None:
        self._holes = [(start, end)]

    @property
    def largest(self) -> int:
        """Size of the largest hole, in bytes."""
        return max((end - start for start, end in self._holes), default=0)

    def allocate(self, nbytes: int) -> int | None:
        """Allocate ``nbytes`` bytes and return their offset, or None if no hole fits."""
        for index, (start, end) in enumerate(self._holes):
            if end - start >= nbytes:
                self._holes[index] = (start + nbytes, end)
                return start
        return None

    def free(self, offset: int, nbytes: int) -> None:
        """Free a range that ``allocate`` returned; adjacent holes merge."""
        merged: list[tuple[int, int]] = []
        for start, end in sorted([*self._holes, (offset, offset + nbytes)]):
            if merged and merged[-1][1] == start:
                start = merged.pop()[0]
            merged.append((start, end))
        self._holes = merged


class Heap:
    """Symmetric memory of a group.

    Args:
        memory: mapping of the memory of all ranks of ``group``.
        reserved: bytes at its start that the runtime uses.
    """

    def __init__(self, group: Group, memory: Memory, reserved: int) -> None:
        self.group = group
        self.base, self.stride, self.nbytes = memory.base, memory.stride, memory.nbytes
        self._memory = memory
        self._free = FreeList(reserved, memory.nbytes)
        self._live: list[SymmetricTensor] = []
        self._storage = torch._C._construct_storage_from_data_pointer(
            self.base, group.device, self.stride * group.world_size
        )
        self.unchecked_storage = torch._C._construct_storage_from_data_pointer(
            self.base, group.device, 1 << 60
        )
        """Storage at the heap's address that claims any size, for arguments that no kernel
        accesses."""
        self.view(0, (self.nbytes,), torch.uint8)[group.rank].zero_()
        group.synchronize()

    def view(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return a torch tensor (world_size, *shape) at byte ``offset`` of each rank's heap."""
        itemsize = dtype.itemsize
        tensor = torch.empty(0, dtype=dtype, device=self.group.device)
        return tensor.set_(
            self._storage,
            offset // itemsize,
            (self.group.world_size, *shape),
            (self.stride // itemsize, *packed_strides(shape)),
        )

    def is_view_of_all(self, tensor: torch.Tensor) -> bool:
        """Return whether ``tensor`` is memory of this heap, one part for each rank.

        With one rank the stride is ignored: torch may change the stride of an axis of extent 1.
        """
        ranks = self.group.world_size
        return (
            tensor.ndim > 0
            and len(tensor) == ranks
            and self.base <= tensor.data_ptr() < self.base + self.stride
            and (ranks == 1 or tensor.stride(0) * tensor.itemsize == self.stride)
        )

    def multicast_view(
        self, offset: int, shape: tuple[int, ...], dtype: torch.dtype
    ) -> torch.Tensor | None:
        """Return a torch tensor ``shape`` at byte ``offset`` from the multicast address."""
        if not self._memory.multicast:
            return None
        storage = torch._C._construct_storage_from_data_pointer(
            self._memory.multicast, self.group.device, self.nbytes
        )
        tensor = torch.empty(0, dtype=dtype, device=self.group.device)
        return tensor.set_(storage, offset // dtype.itemsize, shape, packed_strides(shape))

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> SymmetricTensor:
        """Allocate a zeroed symmetric tensor; see ``tw.symmetric``."""
        is_plain = isinstance(dtype, torch.dtype) and not str(dtype).startswith("torch.q")
        if not is_plain or not is_symmetric_dtype(dtype.itemsize):
            raise TileWeaveError(
                f"symmetric: dtype={dtype!r}; expected a torch.dtype with elements of 1, 2, 4, 8 "
                "or 16 bytes, not quantized"
            )
        shape = _extents(shape)
        nbytes = _nbytes(shape, dtype)
        offset = self._free.allocate(_aligned(nbytes))
        place = "without room for it" if offset is None else f"at byte {offset}"
        try:
            self._agree(f"allocate {shape} {dtype} {place}")
        except TileWeaveError:
            if offset is not None:
                self._free.free(offset, _aligned(nbytes))
            raise
        if offset is None:
            raise HeapExhausted(
                f"symmetric: {nbytes} bytes for shape={shape} dtype={dtype} do not fit into the "
                f"symmetric heap of {self.nbytes} bytes, {self._free.largest} of them free in one "
                "piece; expected a larger TILEWEAVE_HEAP_BYTES"
            )
        tensor = SymmetricTensor(self, offset, shape, dtype)
        self._live.append(tensor)
        tensor.local.zero_()
        self.group.synchronize()
        self.group.meet("symmetric heap: zeroed")
        return tensor

    def free(self, tensor: SymmetricTensor) -> None:
        """Free a tensor's memory. Collective."""
        if tensor not in self._live:
            raise TileWeaveError(
                f"free: {tensor} is not allocated; expected a live symmetric tensor"
            )
        self._agree(f"free {tensor.offset}")
        self.group.synchronize()
        self.group.meet("symmetric heap: idle")
        self._live.remove(tensor)
        tensor.invalidate()
        self._free.free(tensor.offset, _aligned(tensor.nbytes))

    def describe(self, address: int) -> str:
        """Return a description of the element at an address."""
        if (found := self._element_at(address)) is not None:
            tensor, index = found
            return f"{index} of {tensor!r}"
        if (place := self.place_of(address)) is not None:
            return f"byte {place[1]} of rank {place[0]}'s heap"
        return f"{address:#x}"

    def place_of(self, address: int) -> tuple[int, int] | None:
        """Return the rank whose heap has this address, and the byte in it; None if no heap has."""
        rank, offset = divmod(address - self.base, self.stride)
        return (rank, offset) if 0 <= rank < self.group.world_size else None

    def index_of(self, address: int) -> list[int] | None:
        """Return the index of the element at an address, the rank first; None if no live tensor has
        it."""
        found = self._element_at(address)
        return None if found is None else found[1]

    def _element_at(self, address: int) -> tuple[SymmetricTensor, list[int]] | None:
        """Return the tensor that has this address, and the index in it, the rank first."""
        if (place := self.place_of(address)) is None:
            return None
        rank, offset = place
        for tensor in self._live:
            if tensor.offset <= offset < tensor.offset + tensor.nbytes:
                element = (offset - tensor.offset) // tensor.dtype.itemsize
                index: list[int] = []
                for extent in reversed(tensor.shape):
                    element, position = divmod(element, extent)
                    index.insert(0, position)
                return tensor, [rank, *index]
        return None

    def close(self) -> None:
        """Unmap the memory. Kernels that use it must have ended on every rank."""
        for tensor in self._live:
            tensor.invalidate()
        self._live.clear()
        self._memory.close()

    def _agree(self, call: str) -> None:
        for peer, peer_call in enumerate(self.group.exchange("symmetric heap", call)):
            if peer_call != call:
                raise TileWeaveError(
                    f"symmetric heap: rank {self.group.rank} does `{call}` where rank {peer} "
                    f"does `{peer_call}`; expected the same calls in the same order on every rank"
                )


def _extents(shape: tuple[Any, ...]) -> tuple[int, ...]:
    try:
        extents = tuple(map(operator.index, shape))
    except TypeError:
        extents = (0,)
    if any(e < 1 for e in extents) or bool in map(type, shape):
        raise TileWeaveError(f"symmetric: shape={shape}; expected positive integers")
    return extents


def _nbytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return math.prod(shape) * dtype.itemsize


def _aligned(nbytes: int) -> int:
    return math.ceil(nbytes / ALIGNMENT) * ALIGNMENT
