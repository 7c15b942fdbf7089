"""Tensors that a program makes of addresses in the memory of the calling process."""

from __future__ import annotations

import gc

import numpy as np

from .memory import Memory, Tensor


class PointedTensors:
    """Tensors from an address to the end of the torch tensor that has it. Each has a copy of that
    memory: it observes no writes by way of another address."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._tensors: dict[tuple[int, np.dtype], tuple[Tensor, np.ndarray]] = {}

    def at(self, address: int, name: str, dtype: np.dtype) -> Tensor | None:
        """Return the elements from an address on; None: no CPU tensor of torch has it."""
        key = address, dtype
        if key not in self._tensors:
            raw = _bytes_at(address)
            if raw is None:
                return None
            source = raw[: len(raw) // dtype.itemsize * dtype.itemsize].view(dtype)
            tensor = Tensor(self._memory, name, source.shape, dtype, written=True)
            tensor.give((Ellipsis,), source)
            self._tensors[key] = tensor, source
        return self._tensors[key][0]

    def write_back(self) -> None:
        """Store the elements that the program has written in the memory of the process."""
        for tensor, source in self._tensors.values():
            written = tensor.writes.last != 0
            source[written] = tensor.data[written]


def _bytes_at(address: int) -> np.ndarray | None:
    """Return the memory from an address to the end of a live CPU tensor of torch."""
    import torch

    types = torch.Tensor, torch.nn.Parameter
    for tensor in (o for o in gc.get_objects() if type(o) in types):
        if tensor.device.type == "cpu" and tensor.layout == torch.strided:
            storage = tensor.untyped_storage()
            begin = address - storage.data_ptr()
            if 0 <= begin < storage.nbytes():
                return torch.empty(0, dtype=torch.uint8).set_(storage).numpy()[begin:]
    return None
