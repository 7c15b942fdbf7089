"""Bulk copies (``cp.async.bulk``) of contiguous memory between shared and global memory.

They are asynchronous. Loads complete on an mbarrier, stores and reductions in groups::

    full = T.alloc_barrier(128)                   # the number of threads of the block
    W.bulk_load(tile, A[0], 4096, full[0])
    T.mbarrier_arrive(full[0])
    T.mbarrier_wait_parity(full[0], 0)            # the tile has arrived
    W.bulk_store(S[peer, 0], tile, 4096)
    W.bulk_commit()
    W.bulk_wait(0, read=True)                     # the tile may be overwritten

Where the whole block reaches them, as above, one thread issues all of them, and the compiler adds
the block barriers that their order needs. Under a condition on the thread index, each thread that
reaches a call issues it, and the compiler adds nothing. The program is then responsible for:

- commit and wait in the issuing thread;
- ``T.fence_proxy_async()`` in the writing threads and ``T.sync_threads()``, between ordinary stores
  to shared memory and a bulk store of it;
- ``T.sync_threads()`` between ordinary accesses of shared memory and a bulk load that overwrites
  it, and between ``bulk_wait`` and new stores by other threads.

The tiles that they move are row-major in shared memory, so they cannot be operands of ``T.gemm``.
In a kernel with bulk stores, each tile has shared memory of its own. Before the block ends, the
program must wait for each store, at least for its read; a release after the store does this, too.
"""

from __future__ import annotations

import math
from typing import Any

from tvm import tirx

from .atomics import INTEGER_TYPES
from .declaration.declare import builtin
from .declaration.operands import element, require_same_type
from .declaration.qualifiers import BulkReduceOp
from .errors import reject
from .spec import Barrier, Constant, ConstantFlag, Int32, Read, SharedRead, SharedWrite, Write
from .symmetric import packed_strides

__all__ = ["bulk_commit", "bulk_load", "bulk_reduce", "bulk_store", "bulk_wait"]

MAX_BYTES = (1 << 20) - 1
"""Limit of the bytes that an mbarrier counts in one phase (PTX ISA, mbarrier tx-count)."""

_EXTREMUM_TYPES = (*INTEGER_TYPES, "f16", "bf16")
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
            raise reject(
                op,
                f"size={int(size)} exceeds {name}={ref.buffer.name}",
                f"at most its {room} elements",
            )
        first = _flat_index(ref) if space == "shared" else None
        if first is not None:
            if first + int(size) > room:
                raise reject(
                    op,
                    f"size={int(size)} from {name}={ref} exceeds the tensor",
                    f"at most the {room - first} elements up to its end",
                )
            if first * itemsize % 16:
                start = f"{name}={ref} starts at byte {first * itemsize}"
                raise reject(op, start, "a multiple of 16 bytes")


def _flat_index(ref: tirx.BufferLoad) -> int | None:
    """Return the flat index of an element in shared memory; None if it is not constant."""
    if not all(isinstance(index, tirx.IntImm) for index in ref.indices):
        return None
    strides = packed_strides([int(extent) for extent in ref.buffer.shape])
    return sum(int(i) * stride for i, stride in zip(ref.indices, strides, strict=True))


@builtin(**_COPY, observes=True)
def bulk_load(dst: SharedWrite, src: Read, size: Int32, barrier: Barrier) -> None:
    """Start a copy of ``size`` elements from global to shared memory. It completes on an mbarrier.

    The call adds the bytes to the count that the current phase of the mbarrier expects, but does
    not arrive. As with ``T.tma_copy``, the program arrives (``T.mbarrier_arrive``) after its loads
    and waits (``T.mbarrier_wait_parity``). All threads of the block synchronize before the call, so
    ``dst`` may be in use until then. A wait (``W.wait_reached``, ...) before the call orders writes
    of a peer to ``src``.

    Args:
        dst: first element in shared memory, 16-byte aligned.
        src: first element in global memory of this rank or a peer, 16-byte aligned, of the same
            type.
        size: number of elements, a multiple of 16 bytes below 1 MiB. Constants are checked when
            the program is traced.
        barrier: an element of ``T.alloc_barrier``.

    Needs: sm_90.
    Source: PTX ISA, ``cp.async.bulk`` and ``mbarrier.expect_tx``.
    """
    _check("bulk_load", src, dst, size, ("global", "shared"))


@builtin(**_COPY)
def bulk_store(dst: Write, src: SharedRead, size: Int32) -> None:
    """Start a copy of ``size`` elements from shared to global memory of this rank or a peer.

    All threads of the block synchronize before the call, so their writes to ``src`` are copied.
    ``src`` may be overwritten after ``bulk_commit`` and ``bulk_wait(read=True)``. A release that
    follows, such as ``W.signal``, publishes the data: the compiler waits there until it has
    arrived.

    Args:
        dst: first element in global memory, 16-byte aligned.
        src: first element in shared memory, 16-byte aligned, of the same type.
        size: number of elements, a multiple of 16 bytes. Constants are checked when the program is
            traced.

    Needs: sm_90.
    Source: PTX ISA, ``cp.async.bulk``.
    """
    _check("bulk_store", src, dst, size, ("shared", "global"))


@builtin(
    types=(*_EXTREMUM_TYPES, "f32", "f64"),
    op_types={
        "min": _EXTREMUM_TYPES,
        "max": _EXTREMUM_TYPES,
        "and": INTEGER_TYPES,
        "or": INTEGER_TYPES,
        "xor": INTEGER_TYPES,
    },
    **_COPY,
)
def bulk_reduce(dst: Write, src: SharedRead, size: Int32, *, op: BulkReduceOp = "add") -> None:
    """Start a reduction of ``size`` elements of shared memory into global memory.

    The global memory belongs to this rank or a peer. Each element is changed atomically, with
    relaxed order; float16 and bfloat16 sums are rounded to the type at each step. PTX guarantees
    this at gpu scope only. Between GPUs it depends on NVLink, where the memory of the owner
    executes the operation. Otherwise like ``bulk_store``.

    Args:
        dst: first element in global memory, 16-byte aligned.
        src: first element in shared memory, 16-byte aligned, of the same type.
        size: number of elements, a multiple of 16 bytes. Constants are checked when the program is
            traced.
        op: ``add`` (all types), ``min`` and ``max`` (integers, float16, bfloat16), ``and``, ``or``
            and ``xor`` (integers).

    Needs: sm_90.
    Source: PTX ISA, ``cp.reduce.async.bulk``.
    """
    _check("bulk_reduce", src, dst, size, ("shared", "global"))


@builtin(level="leader", bulk_group="commit", sm=90)
def bulk_commit() -> None:
    """Put the bulk stores and reductions of this thread since its last commit into one group.

    Needs: sm_90.
    Source: PTX ISA, ``cp.async.bulk.commit_group``.
    """


@builtin(level="leader", barrier_after=True, bulk_group="wait", sm=90)
def bulk_wait(n: Constant = 0, *, read: ConstantFlag = False) -> None:
    """Wait until at most ``n`` groups of bulk stores are in flight.

    All threads of the block synchronize after the wait.

    Args:
        n: number of most recent groups that may stay in flight; 0 waits for all.
        read: wait only until the shared memory has been read and may be overwritten. Otherwise,
            wait until the issuing thread can publish the data.

    Needs: sm_90.
    Source: PTX ISA, ``cp.async.bulk.wait_group``.
    """
    if isinstance(n, int) and n < 0:
        raise reject("bulk_wait", f"n={n}", "0 or more")
