"""The symmetric heap: allocation, reuse and refusals, on the CPU.

Ranks are threads whose heaps are adjacent in one buffer, as they are on GPUs.
"""

from __future__ import annotations

import copy
import ctypes
import pickle
import types

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.groups import one_rank
from tileweave import TileWeaveError
from tileweave.passes.ir.implicit import Implicit
from tileweave.runtime.host.group import Group
from tileweave.runtime.host.heap import ALIGNMENT, FreeList, Heap, HeapExhausted, SymmetricTensor
from tileweave.runtime.host.memory import PAGE, Memory, memory_of
from tileweave.runtime.kernel.kernel import _allocate_implicit

RESERVED = 1 << 16


def alone(nbytes: int = PAGE) -> Heap:
    group = one_rank()
    return Heap(group, memory_of(group, nbytes), RESERVED)


class Shared:
    """Memory of ``ranks`` ranks on the CPU."""

    def __init__(self, ranks: int) -> None:
        self._bytes = torch.full((ranks * 2 * PAGE,), 0xEE, dtype=torch.uint8)

    def heap(self, group: Group) -> Heap:
        heap = Heap(group, Memory(self._bytes.data_ptr(), 2 * PAGE, PAGE, self._bytes), RESERVED)
        group.meet("heap is up")
        return heap


def test_memory_of_a_group_of_one():
    group = one_rank()
    memory = memory_of(group, PAGE + 1)
    assert (memory.nbytes, memory.stride, memory.base % PAGE) == (2 * PAGE, 2 * PAGE, 0)
    memory.close()


def test_tensors_are_aligned_zeroed_and_apart():
    heap = alone()
    ctypes.memset(heap.base + RESERVED, 0xEE, heap.nbytes - RESERVED)
    first = heap.allocate((3, 5), torch.float64)
    second = heap.allocate((1,), torch.uint8)
    third = heap.allocate((), torch.bfloat16)
    assert [t.offset - RESERVED for t in (first, second, third)] == [0, ALIGNMENT, 2 * ALIGNMENT]
    assert first.local.data_ptr() == heap.base + RESERVED
    assert (first.all.shape, first.local.shape, third.local.shape) == ((1, 3, 5), (3, 5), ())
    assert not any(t.all.any() for t in (first, second, third))


def test_a_copy_is_the_same_memory_on_every_rank(every_rank):
    shared = Shared(3)

    def write(group: Group) -> list[list[int]]:
        tensor = shared.heap(group).allocate((2, 2), torch.int32)
        right = (group.rank + 1) % group.world_size
        tensor.peer(right)[1, 0] = 10 * group.rank + right
        tensor.local[0, 1] = group.rank + 1
        group.meet("written")
        return [copy.flatten().tolist() for copy in tensor.all]

    expected = [[0, 1, 20, 0], [0, 2, 1, 0], [0, 3, 12, 0]]
    assert every_rank(write, 3) == [expected] * 3


def test_freed_memory_is_used_again_zeroed():
    heap = alone()
    first, second = (heap.allocate((ALIGNMENT,), torch.uint8) for _ in range(2))
    first.local.fill_(7)
    first.free()
    again = heap.allocate((ALIGNMENT // 4,), torch.float32)
    assert again.offset == first.offset
    assert not again.local.any()
    assert heap.allocate((1,), torch.uint8).offset == second.offset + ALIGNMENT


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (0, 2, 1), (1, 0, 2), (1, 2, 0)])
def test_freed_neighbours_merge(order):
    heap = alone()
    tensors = [heap.allocate((ALIGNMENT,), torch.uint8) for _ in range(3)]
    for index in order:
        tensors[index].free()
    whole = heap.allocate((heap.nbytes - RESERVED,), torch.uint8)
    assert whole.offset == RESERVED


@settings(max_examples=200)
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 9)), max_size=60))
def test_each_byte_is_allocated_at_most_once_and_freed(steps):
    """Compare with a table of bytes."""
    free, live = FreeList(5, 37), []
    owner = [-1] * 5 + [0] * 32 + [-1] * 3
    for number, (take, size) in enumerate(steps, start=1):
        if take:
            fits = [a for a in range(41 - size) if not any(owner[a : a + size])]
            start = free.allocate(size)
            assert start == (fits[0] if fits else None)
            if start is not None:
                owner[start : start + size] = [number] * size
                live.append((start, size))
        elif live:
            start, size = live.pop(size % len(live))
            owner[start : start + size] = [0] * size
            free.free(start, size)
    runs = "".join("f" if o == 0 else "x" for o in owner).split("x")
    assert free.largest == max(map(len, runs))


def test_exhaustion_says_what_was_asked_and_what_is_free():
    heap = alone()
    heap.allocate((PAGE - RESERVED - 3 * ALIGNMENT,), torch.uint8)
    with pytest.raises(HeapExhausted) as error:
        heap.allocate((1025, 1), torch.float32)
    assert str(error.value) == (
        "symmetric: 4100 bytes for shape=(1025, 1) dtype=torch.float32 do not fit into the "
        "symmetric heap of 2097152 bytes, 3072 of them free in one piece; expected a larger "
        "TILEWEAVE_HEAP_BYTES"
    )
    assert isinstance(error.value, MemoryError) and isinstance(error.value, TileWeaveError)
    assert heap.allocate((3 * ALIGNMENT,), torch.uint8).local.numel() == 3 * ALIGNMENT


@pytest.mark.parametrize("shape", [(0,), (4, -1), (2.5,), ("8",), (True,), ((4,),)])
def test_shapes_that_are_refused(shape):
    with pytest.raises(TileWeaveError) as error:
        alone().allocate(shape, torch.float32)
    assert str(error.value) == f"symmetric: shape={shape}; expected positive integers"


def test_extents_of_any_integer_type():
    """Ranks agree on extents of different integer types."""
    tensor = alone().allocate((np.int64(3), torch.tensor(5)), torch.float32)
    assert tensor.shape == (3, 5) and {*map(type, tensor.shape)} == {int}


@pytest.mark.parametrize("dtype", ["float32", None, 4, [], torch.qint8, torch.quint4x2])
def test_dtypes_that_are_refused(dtype):
    with pytest.raises(TileWeaveError) as error:
        alone().allocate((4,), dtype)
    assert str(error.value) == (
        f"symmetric: dtype={dtype!r}; expected a torch.dtype with elements of 1, 2, 4, 8 or 16 "
        "bytes, not quantized"
    )


@pytest.mark.parametrize(
    "dtype", [torch.uint8, torch.bfloat16, torch.uint32, torch.int64, torch.complex128]
)
def test_elements_of_every_legal_size(dtype):
    assert alone().allocate((4,), dtype).local.dtype == dtype


def test_only_a_live_tensor_of_this_heap_can_be_freed():
    heap, other = alone(), alone()
    tensor, foreign = heap.allocate((4,), torch.int32), other.allocate((4,), torch.int32)
    tensor.free()
    for dead in (tensor, foreign):
        with pytest.raises(TileWeaveError) as error:
            heap.free(dead)
        assert str(error.value) == (
            "free: SymmetricTensor(shape=(4,), dtype=torch.int32, offset=65536) is not allocated; "
            "expected a live symmetric tensor"
        )


def test_freed_memory_is_not_handed_out():
    """A freed tensor cannot be used: its memory may belong to another one, or be unmapped."""
    heap = alone()
    freed, closed = heap.allocate((4,), torch.int32), heap.allocate((4,), torch.int32)
    freed.free()
    assert closed.is_live and closed.multicast is None
    heap.close()
    for tensor in (freed, closed):
        assert not tensor.is_live and not hasattr(tensor, "nothing")
        for use in (lambda t: t.all, lambda t: t.local, lambda t: t.peer(0), lambda t: t.multicast):
            with pytest.raises(TileWeaveError, match=r"was freed; expected a live symmetric"):
                use(tensor)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_memory_of_all_ranks_is_not_copied(copied):
    """Storage that claims any size would be read to its end."""
    tensor = alone().allocate((4,), torch.int32)
    with pytest.raises(TileWeaveError, match=r"copy: Symm.*; expected its \.local to be copied"):
        copied(tensor)


@pytest.mark.parametrize("peer", [-1, 1, "a", None, False])
def test_peers_are_ranks_of_the_group(peer):
    with pytest.raises(TileWeaveError, match=rf"peer: rank={peer!r}; expected 0 to 0"):
        alone().allocate((4,), torch.int32).peer(peer)


def test_addresses_in_words(every_rank):
    shared = Shared(2)

    def describe(group: Group) -> list[str]:
        heap = shared.heap(group)
        heap.allocate((8,), torch.uint8)
        tensor = heap.allocate((2, 3), torch.uint32)
        element, end = tensor.all[1, 1, 2].data_ptr(), heap.base + 2 * heap.stride
        addresses = (element, element + 4, heap.base + 12, heap.base - 1, end - 1, end)
        return [heap.describe(a).replace(hex(a), "the number") for a in addresses]

    shown = "SymmetricTensor(shape=(2, 3), dtype=torch.uint32, offset=66560)"
    assert every_rank(describe)[0] == [
        f"[1, 1, 2] of {shown}",
        "byte 66584 of rank 1's heap",
        "byte 12 of rank 0's heap",
        "the number",
        f"byte {2 * PAGE - 1} of rank 1's heap",
        "the number",
    ]


def allocate_another(heap: Heap, rank: int, tensors: list[SymmetricTensor]) -> None:
    heap.allocate((8 + rank,), torch.int32)


def allocate_without_room(heap: Heap, rank: int, tensors: list[SymmetricTensor]) -> None:
    if rank == 1:  # in place of a fault: this rank has no free memory
        heap._free, free = FreeList(0, 0), heap._free
    try:
        heap.allocate((4,), torch.int32)
    finally:
        if rank == 1:
            heap._free = free


def free_another(heap: Heap, rank: int, tensors: list[SymmetricTensor]) -> None:
    tensors[rank].free()


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (
            allocate_another,
            [f"allocate ({n},) torch.int32 at byte {RESERVED + 2 * ALIGNMENT}" for n in (8, 9)],
        ),
        (
            allocate_without_room,
            [
                f"allocate (4,) torch.int32 at byte {RESERVED + 2 * ALIGNMENT}",
                "allocate (4,) torch.int32 without room for it",
            ],
        ),
        (free_another, ["free 65536", "free 66560"]),
    ],
)
def test_ranks_that_disagree(every_rank, call, said):
    """Both ranks raise an error, and their heaps do not change."""
    shared = Shared(2)

    def disagree(group: Group) -> tuple[str, int]:
        heap = shared.heap(group)
        tensors = [heap.allocate((4,), torch.int32) for _ in range(2)]
        try:
            call(heap, group.rank, tensors)
        except TileWeaveError as error:
            return str(error), heap.allocate((4,), torch.int32).offset
        return "no error", 0

    for rank, (error, offset) in enumerate(every_rank(disagree)):
        assert error == (
            f"symmetric heap: rank {rank} does `{said[rank]}` where rank {1 - rank} does "
            f"`{said[1 - rank]}`; expected the same calls in the same order on every rank"
        )
        assert offset == RESERVED + 2 * ALIGNMENT


def test_a_kernel_gets_all_its_memory_or_none():
    heap = alone()
    session = types.SimpleNamespace(heap=heap, group=heap.group)
    small = Implicit("counters", True, (PAGE // 8,), "uint32")
    large = Implicit("parts", True, (PAGE,), "float32")
    local = Implicit("launches", False, (1,), "uint32")
    for _ in range(3):
        with pytest.raises(HeapExhausted):
            _allocate_implicit([small, local, large], session)
    assert list(_allocate_implicit([small, local], session)) == ["counters", "launches"]
