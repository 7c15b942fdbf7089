"""Bulk copies (``cp.async.bulk``): one thread moves a contiguous piece between shared and global
memory.

They are asynchronous. Loads complete on an mbarrier, stores and reductions in groups::

    full = T.alloc_barrier(128)                   # as many arrivals as the block has threads
    W.bulk_load(tile, A[0], 4096, full[0])
    T.mbarrier_arrive(full[0])
    T.mbarrier_wait_parity(full[0], 0)            # tile is there
    W.bulk_store(S[peer, 0], tile, 4096)
    W.bulk_commit()
    W.bulk_wait(0, read=True)                     # tile may be overwritten

Where the whole block reaches them, as above, one thread (always the same) issues each of them and
the block meets where the order needs it. Under a condition on the thread index each thread that
reaches them issues them and nothing is added. The program then does itself: commit and wait in the
issuing thread; ``T.fence_proxy_async()`` by the writing threads and ``T.sync_threads()`` between
ordinary stores to shared memory and a bulk store of it; ``T.sync_threads()`` between ordinary
accesses of shared memory and a bulk load that overwrites it, and between ``bulk_wait`` and new
stores by other threads.

Tiles they move lie row by row, so they cannot be operands of ``T.gemm``; and no two tiles of a
kernel with bulk stores share memory. A store must have been waited for, at least for the read,
before the block ends; a release that follows it does that.
"""

from __future__ import annotations

import math
from typing import Any

from tvm import tirx

from .atomics import INTEGER_TYPES
from .declare import builtin
from .errors import reject
from .operands import element, require_same_type
from .qualifiers import BulkReduceOp
from .spec import Barrier, Constant, ConstantFlag, Int32, Read, SharedRead, SharedWrite, Write
from .symmetric import packed_strides

__all__ = ["bulk_commit", "bulk_load", "bulk_reduce", "bulk_store", "bulk_wait"]

MAX_BYTES = (1 << 20) - 1
"""What an mbarrier can count at a time (PTX ISA, mbarrier tx-count)."""

_COPY = dict(level="leader", barrier_before=True, moves="size", async_proxy=True, sm=90)


def _check(op: str, src: Any, dst: Any, size: Any, spaces: tuple[str, str]) -> None:
    source = element(op, "src", src, spaces[0])
    target = element(op, "dst", dst, spaces[1])
    itemsize = require_same_type(op, source, target)
    if not isinstance(size, (int, tirx.IntImm)):
        return
    count = int(size) * itemsize
    if count <= 0 or count % 16 != 0 or count > MAX_BYTES:
        raise reject(
            op,
            f"size={int(size)} of type {source.buffer.dtype} is {count} bytes",
            f"a positive multiple of 16 bytes, at most {MAX_BYTES}",
        )
    for name, ref, space in (("src", source, spaces[0]), ("dst", target, spaces[1])):
        room = math.prod(int(e) for e in ref.buffer.shape) if space == "shared" else int(size)
        if int(size) > room:
            raise reject(op, f"size={int(size)}, {name}={ref.buffer.name}", f"at most its {room}")
        first = _first(ref) if space == "shared" else None
        if first is not None:
            if first + int(size) > room:
                raise reject(
                    op, f"size={int(size)}, {name}={ref}", f"at most {room - first}, up to its end"
                )
            if first * itemsize % 16:
                raise reject(op, f"{name}={ref}", "a start at a multiple of 16 bytes")


def _first(ref: tirx.BufferLoad) -> int | None:
    """Return the flat index of an element in shared memory; None if it is not constant."""
    if not all(isinstance(index, tirx.IntImm) for index in ref.indices):
        return None
    strides = packed_strides([int(extent) for extent in ref.buffer.shape])
    return sum(int(i) * stride for i, stride in zip(ref.indices, strides, strict=True))


@builtin(**_COPY, observes=True)
def bulk_load(dst: SharedWrite, src: Read, size: Int32, barrier: Barrier) -> None:
    """Start copying ``size`` elements from global to shared memory; an mbarrier says when they are
    there.

    Adds the bytes to what the barrier's current phase expects, but does not arrive: as with
    ``T.tma_copy``, the program arrives (``T.mbarrier_arrive``) after its loads and waits
    (``T.mbarrier_wait_parity``). The block meets before it, so ``dst`` may be in use until then. A
    wait (``W.wait_reached``, ...) before it orders what a peer wrote to ``src``.

    Args:
        dst: first element in shared memory, 16-byte aligned.
        src: first element in global memory, own or a peer's, 16-byte aligned, of the same type.
        size: elements; a multiple of 16 bytes, less than 1 MiB. Constants are checked when traced.
        barrier: an element of ``T.alloc_barrier``.

    Needs: sm_90.
    Source: PTX ISA, ``cp.async.bulk`` and ``mbarrier.expect_tx``.
    """
    _check("bulk_load", src, dst, size, ("global", "shared"))


@builtin(**_COPY)
def bulk_store(dst: Write, src: SharedRead, size: Int32) -> None:
    """Start copying ``size`` elements from shared to global memory, own or a peer's.

    What the block wrote to ``src`` before is stored: the block meets before it. ``src`` may be
    overwritten after ``bulk_commit`` and ``bulk_wait(read=True)``. The data is published by a
    release that follows, such as ``W.signal``; the compiler waits there until it has arrived.

    Args:
        dst: first element in global memory, 16-byte aligned.
        src: first element in shared memory, 16-byte aligned, of the same type.
        size: elements; a multiple of 16 bytes. Constants are checked when traced.

    Needs: sm_90.
    Source: PTX ISA, ``cp.async.bulk``.
    """
    _check("bulk_store", src, dst, size, ("shared", "global"))


@builtin(
    types="u32 s32 u64 s64 f16 bf16 f32 f64",
    op_types={
        "min": "u32 s32 u64 s64 f16 bf16",
        "max": "u32 s32 u64 s64 f16 bf16",
        "and": INTEGER_TYPES,
        "or": INTEGER_TYPES,
        "xor": INTEGER_TYPES,
    },
    **_COPY,
)
def bulk_reduce(dst: Write, src: SharedRead, size: Int32, *, op: BulkReduceOp = "add") -> None:
    """Start combining ``size`` elements of shared memory into global memory, own or a peer's.

    Each element is changed atomically, with relaxed order; float16 and bfloat16 sums are rounded to
    the type at each step. PTX promises this at gpu scope and has no other; between GPUs it relies
    on NVLink, where the memory of the owner carries out the change. Otherwise as ``bulk_store``.

    Args:
        dst: first element in global memory, 16-byte aligned.
        src: first element in shared memory, 16-byte aligned, of the same type.
        size: elements; a multiple of 16 bytes. Constants are checked when traced.
        op: ``add`` (all types), ``min`` and ``max`` (integers, float16, bfloat16), ``and``, ``or``
            and ``xor`` (integers).

    Needs: sm_90.
    Source: PTX ISA, ``cp.reduce.async.bulk``.
    """
    _check("bulk_reduce", src, dst, size, ("shared", "global"))


@builtin(level="leader", bulk_group="commit", sm=90)
def bulk_commit() -> None:
    """Make one group of the bulk stores and reductions its thread issued since the last.

    Needs: sm_90.
    Source: PTX ISA, ``cp.async.bulk.commit_group``.
    """


@builtin(level="leader", barrier_after=True, bulk_group="wait", sm=90)
def bulk_wait(n: Constant = 0, *, read: ConstantFlag = False) -> None:
    """Stand until at most ``n`` groups of bulk stores are under way; then the block meets.

    Args:
        n: groups that may remain, the youngest; 0 waits for all.
        read: wait only until the shared memory has been read and may be overwritten; else until
            what was written is visible to the issuing thread, which may then publish it.

    Needs: sm_90.
    Source: PTX ISA, ``cp.async.bulk.wait_group``.
    """
    if isinstance(n, int) and n < 0:
        raise reject("bulk_wait", f"n={n}", "0 or more")
