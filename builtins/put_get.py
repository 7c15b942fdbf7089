"""Copies between global memories by the threads of a block or a warp.

A put writes to a peer; a get reads from one. They move any number of elements at any alignment.
They neither signal nor wait. Copy engines and ``bulk_*`` move large aligned regions with fewer
threads.
"""

from __future__ import annotations

from typing import Any

from tvm import tirx

from .declaration.declare import builtin
from .declaration.operands import element, require_same_type
from .errors import reject
from .spec import Int64, Peer, Read, Write
from .symmetric import at_rank

__all__ = ["get_block", "get_warp", "put_block", "put_warp"]


def _checked(op: str, remote: str, src: Any, dst: Any, size: Any, peer: Any) -> dict[str, Any]:
    """Check the arguments; return ``src`` and ``dst``, the one named ``remote`` at ``peer``."""
    refs = {"src": element(op, "src", src, "global"), "dst": element(op, "dst", dst, "global")}
    require_same_type(op, refs["src"], refs["dst"])
    if isinstance(size, (int, tirx.IntImm)) and int(size) < 0:
        raise reject(op, f"size={size}", "a number of elements, 0 or more")
    if peer is not None:
        dtype = "int32" if isinstance(peer, int) else str(getattr(peer, "dtype", ""))
        if not dtype.startswith(("int", "uint")):
            raise reject(op, f"peer={peer!r}", "a rank as an integer")
        refs[remote] = at_rank(op, remote, refs[remote], peer)
    return refs


@builtin(level="block", moves="size", implicit=("thread", "threads"))
def put_block(src: Read, dst: Write, size: Int64, peer: Peer | None = None) -> None:
    """Copy ``size`` elements from own memory to a peer, by all threads of the block.

    Each thread continues after it has issued its own stores; the block does not synchronize. The
    peer may read the data after a release that follows, such as ``W.signal``, and its own wait for
    it. If other threads of the block wrote ``src``, ``T.sync_threads()`` must precede the call.

    Args:
        src: first element to copy, in global memory; the elements are consecutive.
        dst: first element to write, in global memory, of the same type.
        size: number of elements, int64; may be a run-time value.
        peer: rank whose copy of the symmetric tensor ``dst`` is written. It replaces the rank index
            of ``dst``; None keeps it.

    Raises:
        LanguageError: types differ, elements do not have 1, 2, 4, 8 or 16 bytes, or ``dst`` is
            not a symmetric tensor although ``peer`` is given.

    Source: PTX ISA, ``ld`` and ``st``; memory consistency model, weak operations.
    """
    return _checked("put_block", "dst", src, dst, size, peer)


@builtin(level="warp", moves="size", implicit=("thread",))
def put_warp(src: Read, dst: Write, size: Int64, peer: Peer | None = None) -> None:
    """Copy ``size`` elements from own memory to a peer, by the lanes of the warp that reaches it.

    All lanes must reach the call with the same arguments; they do not synchronize. The compiler
    refuses a condition that provably selects only a part of a warp. Otherwise like ``put_block``.
    """
    return _checked("put_warp", "dst", src, dst, size, peer)


@builtin(level="block", moves="size", implicit=("thread", "threads"), observes=True)
def get_block(src: Read, dst: Write, size: Int64, peer: Peer | None = None) -> None:
    """Copy ``size`` elements from a peer to own memory, by all threads of the block.

    It reads data that was published to the block before. If the peer writes ``src`` in the same
    launch, a wait (``W.wait_reached``, ...) must precede the call. Other threads of the block see
    the copy after ``T.sync_threads()``.

    Args:
        src: first element to copy, in global memory; the elements are consecutive.
        dst: first element to write, in global memory, of the same type.
        size: number of elements, int64; may be a run-time value.
        peer: rank whose copy of the symmetric tensor ``src`` is read. It replaces the rank index of
            ``src``; None keeps it.

    Raises:
        LanguageError: the same as for ``put_block``, with ``src`` as the symmetric tensor.

    Source: PTX ISA, ``ld`` and ``st``; memory consistency model, weak operations.
    """
    return _checked("get_block", "src", src, dst, size, peer)


@builtin(level="warp", moves="size", implicit=("thread",), observes=True)
def get_warp(src: Read, dst: Write, size: Int64, peer: Peer | None = None) -> None:
    """Copy ``size`` elements from a peer to own memory, by the lanes of the warp that reaches it.

    All lanes must reach the call with the same arguments; they do not synchronize. Otherwise like
    ``get_block``.
    """
    return _checked("get_warp", "src", src, dst, size, peer)
