"""Copies between global memories by the threads of a block or a warp: put to a peer, get from one.

They move any number of elements at any alignment. They neither signal nor wait. A copy engine or
``bulk_*`` moves large aligned pieces with fewer threads.
"""

from __future__ import annotations

from typing import Any

from tvm import tirx

from .declare import builtin
from .errors import reject
from .operands import element, require_same_type
from .spec import Int64, Peer, Read, Write
from .symmetric import at_rank

__all__ = ["get_block", "get_warp", "put_block", "put_warp"]


def _at(op: str, remote: str, src: Any, dst: Any, size: Any, peer: Any) -> dict[str, Any]:
    """The references as loads, the one called ``remote`` at ``peer``."""
    refs = {"src": element(op, "src", src, "global"), "dst": element(op, "dst", dst, "global")}
    require_same_type(op, refs["src"], refs["dst"])
    if isinstance(size, (int, tirx.IntImm)) and int(size) < 0:
        raise reject(op, f"size={size}", "a number of elements, 0 or more")
    if peer is not None:
        dtype = "int32" if isinstance(peer, int) else str(getattr(peer, "dtype", ""))
        if not dtype.startswith(("int", "uint")):
            raise reject(op, f"peer={peer!r}", "a rank, an integer")
        refs[remote] = at_rank(op, remote, refs[remote], peer)
    return refs


@builtin(level="block", moves="size", implicit=("thread", "threads"))
def put_block(src: Read, dst: Write, size: Int64, peer: Peer | None = None) -> None:
    """Copy ``size`` elements from own memory to a peer's, by all threads of the block.

    Each thread goes on when it has issued its own stores; the block does not meet. The peer may
    read the data after a release that follows, such as ``W.signal``, and its own wait for it. What
    threads of the block wrote to ``src`` must be ordered before by ``T.sync_threads()``.

    Args:
        src: first element to copy, in global memory; the elements follow each other in memory.
        dst: where it goes, in global memory, of the same type.
        size: elements to copy, int64; may differ from run to run.
        peer: rank whose copy of the symmetric tensor ``dst`` is written, in place of the rank index
            of ``dst``; None takes ``dst`` as it stands.

    Raises:
        LanguageError: types differ, elements are not of 1, 2, 4, 8 or 16 bytes, or ``peer`` is
            given and ``dst`` is no symmetric tensor.

    Source: PTX ISA, ``ld`` and ``st``; memory consistency model, weak operations.
    """
    return _at("put_block", "dst", src, dst, size, peer)


@builtin(level="warp", moves="size", implicit=("thread",))
def put_warp(src: Read, dst: Write, size: Int64, peer: Peer | None = None) -> None:
    """Copy ``size`` elements from own memory to a peer's, by the lanes of the warp that reaches it.

    All lanes must reach it with the same arguments; they do not meet. A condition that selects a
    part of a warp is refused where it is known. Otherwise as ``put_block``.
    """
    return _at("put_warp", "dst", src, dst, size, peer)


@builtin(level="block", moves="size", implicit=("thread", "threads"), observes=True)
def get_block(src: Read, dst: Write, size: Int64, peer: Peer | None = None) -> None:
    """Copy ``size`` elements from a peer's memory to own, by all threads of the block.

    Reads what was published to the block before it: put a wait (``W.wait_reached``, ...) first if
    the peer writes ``src`` in the same launch. Other threads of the block see the copy after
    ``T.sync_threads()``.

    Args:
        src: first element to copy, in global memory; the elements follow each other in memory.
        dst: where it goes, in global memory, of the same type.
        size: elements to copy, int64; may differ from run to run.
        peer: rank whose copy of the symmetric tensor ``src`` is read, in place of the rank index of
            ``src``; None takes ``src`` as it stands.

    Raises:
        LanguageError: as for ``put_block``, with ``src`` the symmetric tensor.

    Source: PTX ISA, ``ld`` and ``st``; memory consistency model, weak operations.
    """
    return _at("get_block", "src", src, dst, size, peer)


@builtin(level="warp", moves="size", implicit=("thread",), observes=True)
def get_warp(src: Read, dst: Write, size: Int64, peer: Peer | None = None) -> None:
    """Copy ``size`` elements from a peer's memory to own, by the lanes of the warp that reaches it.

    All lanes must reach it with the same arguments; they do not meet. Otherwise as ``get_block``.
    """
    return _at("get_warp", "src", src, dst, size, peer)
