"""Mapping of torch's symmetric allocations, on a fake driver: offsets of buffers in them."""

import re
from types import SimpleNamespace

import pytest
import torch
import torch.distributed._symmetric_memory as symm_mem

from tileweave import TileWeaveError
from tileweave.runtime.host import memory
from tileweave.runtime.host.memory import ALIGNMENT, PAGE

RANKS = 3
RESERVED = 1 << 40
MULTICAST = 1 << 44
PAD = 9 * 1024 + 16
"""Bytes of a signal pad; no multiple of the alignment."""


class FakeDriver:
    """Allocations of the ranks, and what is mapped where.

    Attributes:
        mapped: the allocation that is mapped at an address.
        freed: address ranges that were returned.
    """

    def __init__(self, sizes):
        self.sizes, self.mapped, self.freed = sizes, {}, []
        self.starts = [(rank + 1) << 32 for rank in range(len(sizes))]

    def call(self, name, *args):
        if name == "cuMemGetAddressRange":
            rank = self._rank_of(args[0])
            return self.starts[rank], self.sizes[rank]
        if name == "cuMemAddressReserve":
            return RESERVED
        if name == "cuMemRetainAllocationHandle":
            return self._rank_of(args[0])
        if name == "cuMemMap":
            address, size, offset, rank, _ = args
            assert offset == 0 and size == self.sizes[rank]
            self.mapped[address] = rank
        if name == "cuMemUnmap":
            del self.mapped[args[0]]
        if name == "cuMemAddressFree":
            self.freed.append(args)
        return None

    def _rank_of(self, pointer):
        (rank,) = [
            rank
            for rank, start in enumerate(self.starts)
            if start <= pointer < start + self.sizes[rank]
        ]
        return rank


def mapped(monkeypatch, nbytes, pads, pool_offset=0):
    """Map buffers that begin ``pads`` bytes after their allocations; return memory and driver."""
    size = (max(pads) + pool_offset + nbytes + ALIGNMENT + PAGE - 1) // PAGE * PAGE
    driver = FakeDriver([size] * len(pads))
    handle = SimpleNamespace(
        buffer_ptrs=[start + pad for start, pad in zip(driver.starts, pads, strict=True)],
        offset=pool_offset,
        multicast_ptr=MULTICAST + pads[0] + pool_offset,
    )
    access = SimpleNamespace(location=SimpleNamespace())
    bindings = SimpleNamespace(
        CUmemAccessDesc=lambda: access,
        CUmemLocationType=SimpleNamespace(CU_MEM_LOCATION_TYPE_DEVICE=1),
        CUmemAccess_flags=SimpleNamespace(CU_MEM_ACCESS_FLAGS_PROT_READWRITE=3),
    )
    monkeypatch.setattr(memory, "call", driver.call)
    monkeypatch.setattr(memory, "driver", lambda: bindings)
    monkeypatch.setattr(symm_mem, "empty", lambda n, **_: torch.empty(n, dtype=torch.uint8))
    monkeypatch.setattr(symm_mem, "rendezvous", lambda *_: handle)
    group = SimpleNamespace(
        process_group=object(), world_size=len(pads), device=torch.device("cpu")
    )
    return memory.memory_of(group, nbytes), driver


@pytest.mark.parametrize(("pad", "pool_offset"), [(0, 0), (PAD, 0), (PAD, 4096), (0, 1 << 21)])
def test_each_rank_uses_its_buffer_and_nothing_before_it(monkeypatch, pad, pool_offset):
    nbytes = 3 * PAGE
    found, driver = mapped(monkeypatch, nbytes, [pad] * RANKS, pool_offset)
    begin = pad + pool_offset
    for rank in range(RANKS):
        address = RESERVED + rank * found.stride
        assert driver.mapped[address] == rank
        start = found.base + rank * found.stride - address
        assert begin <= start < begin + ALIGNMENT
        assert start + nbytes <= driver.sizes[rank] <= found.stride
    assert found.base % ALIGNMENT == 0
    assert found.multicast - MULTICAST == found.base - RESERVED


def test_without_an_offset_the_heap_is_the_allocation(monkeypatch):
    found, _ = mapped(monkeypatch, PAGE, [0] * RANKS)
    assert (found.base, found.multicast) == (RESERVED, MULTICAST)


def test_closing_returns_what_was_reserved(monkeypatch):
    found, driver = mapped(monkeypatch, PAGE, [PAD] * RANKS)
    found.close()
    assert driver.mapped == {} and driver.freed == [(RESERVED, RANKS * found.stride)]
    found.close()
    assert len(driver.freed) == 1


def test_offsets_that_differ_are_refused(monkeypatch):
    message = (
        "init: torch's symmetric buffers begin at different offsets of their allocations "
        "(rank 0: 0, rank 1: 512, rank 2: 0); expected equal offsets"
    )
    with pytest.raises(TileWeaveError, match=re.escape(message)):
        mapped(monkeypatch, PAGE, [0, 512, 0])
