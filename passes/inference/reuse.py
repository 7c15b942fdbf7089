"""Nobody overwrites what another rank may still be reading in the launch before."""

from __future__ import annotations

import numpy as np
from tvm import tirx

from ...builtins.errors import LanguageError
from . import builtin_calls
from .accesses import Access
from .boxes import Boxes
from .exchange import Exchange
from .placement import anchor_of, loops_kept, moved
from .traffic import Traffic
from .waits import dominates


def choose_buffers(exchange: Exchange, traffic: Traffic, scratch: bool) -> int:
    """How many buffers launches take in turn: two where that makes waiting unnecessary.

    Raises:
        LanguageError: two are asked for and do not suffice.
    """
    reuse = exchange.options.reuse
    if not scratch or reuse in ("barrier", "credit") or not _pairs(traffic):
        return 1
    far = _too_far(exchange, traffic)
    if far is None:
        return 2
    if reuse == "double_buffer":
        writer, reader = far
        raise LanguageError(
            f"tileweave.reuse=double_buffer: rank {writer} writes {traffic.tensor.name} for rank "
            f"{reader} and does not wait for anything from it in the same launch; expected auto, "
            f"barrier or credit{traffic.of_kind('write', 'add')[0].access.location}"
        )
    return 1


def guard_reuse(exchange: Exchange, scratch: set[tirx.Buffer]) -> None:
    """Prove that each write of a launch follows the reads of the launch before, or let it wait.

    Two buffers in turn suffice where every writer waits, in every launch, for something its readers
    write: it then begins the launch after next only when they have begun the next. A credit is a
    counter of launches that a reader has finished; what the caller reads between launches is free
    when the next launch of its rank has begun.
    """
    for traffic in exchange.traffic:
        name = traffic.tensor.name
        pairs = _pairs(traffic)
        if not pairs:
            exchange.reuse[name] = "each rank reads only what it writes itself"
        elif exchange.buffers[traffic.tensor] > 1:
            exchange.reuse[name] = "two buffers in turn: every writer waits for its readers' data"
        else:
            _guard(exchange, traffic, traffic.tensor in scratch)


def _guard(exchange: Exchange, traffic: Traffic, scratch: bool) -> None:
    name = traffic.tensor.name
    by_caller = not scratch or not traffic.has("read")
    started = by_caller or exchange.options.reuse == "barrier"
    done: list[tuple[str, Access, int]] = []
    guarded = False
    if traffic.copies is not None:
        exchange.credits(False, _pairs(traffic))
        exchange.reuse[name] = "copies wait for credits: the readers' last launch has finished"
        return
    for boxes in traffic.of_kind("write", "add"):
        readers = _readers_of(traffic, boxes)
        if boxes.access.kind == "add" and _cleared_by_readers(traffic, boxes, readers):
            continue
        if np.any(readers & -boxes.mask.astype(np.int64)):
            guarded = True
            _wait(exchange, traffic, boxes, started, done)
    if not guarded:
        exchange.reuse[name] = "the owner clears it, and additions wait for that"
    elif started:
        exchange.reuse[name] = "writers wait until the owner's next launch has started"
    else:
        exchange.reuse[name] = "writers wait for a credit: the readers' last launch has finished"


def _wait(exchange: Exchange, traffic: Traffic, boxes: Boxes, started: bool, done: list) -> None:
    access, symbols = boxes.access, exchange.symbols
    kept = loops_kept(access, boxes, [boxes.home])
    left = access.loops[kept:]
    home = symbols.simplified(symbols.at_start(access.starts[0], [*left, *access.inner]), access)
    rank, at, *_, others = boxes.flat(_readers_of(traffic, boxes))
    only_home = bool(np.all(others & ~(1 << at) == 0))
    key = f"{home if only_home else 'all'}"
    for k, other, other_kept in done:
        if key == k and dominates(other, other_kept, access, kept):
            reason = f"before {access.op} overwrites it: the wait at {other.line} serves, too"
            exchange.note("wait", access, traffic.tensor.name, reason)
            return
    done.append((key, access, kept))
    flags = exchange.credits(started, _pairs(traffic))
    one = tirx.const(1, "uint32")
    target = exchange.epoch if started else exchange.epoch - one

    def wait(peer: tirx.PrimExpr) -> tirx.Stmt:
        flag = tirx.BufferLoad(flags, [symbols.rank, peer])
        return builtin_calls.wait_reached(flag, target, peer, access)

    stmt = wait(home) if only_home else exchange.for_each_rank(wait)
    if only_home and np.any(at == rank):
        stmt = tirx.IfThenElse(tirx.NE(home, symbols.rank), stmt, None)
    exchange.placement.put_before(anchor_of(access, kept), stmt, access)
    what = "its launch has started" if started else "its last launch has finished"
    exchange.note(
        "wait", access, traffic.tensor.name,
        f"before {access.op} overwrites it: {'the owner' if only_home else 'every rank'} may "
        f"still read until {what}{moved(left)}",
        stmt, each="1", flag=flags.name,
    )  # fmt: skip


def _readers_of(traffic: Traffic, boxes: Boxes) -> np.ndarray:
    """Per iteration, which other ranks may read what it overwrites, a bit each.

    A tensor that nobody reads in the kernel is read by its owner between launches.
    """
    size = int(np.prod(traffic.grid.cells))
    readers = traffic.painted["read"].ranks.reshape(traffic.world_size, size)
    by_home = np.bitwise_or.reduce(readers, axis=1)[boxes.home]
    found = np.where(by_home == 0, 1 << boxes.home, by_home)
    return found & ~(1 << boxes.rank)


def _cleared_by_readers(traffic: Traffic, boxes: Boxes, readers: np.ndarray) -> bool:
    """Whether an addition waits, in the same launch, for a clearing by each of the readers."""
    size = int(np.prod(traffic.grid.cells))
    clearing = traffic.painted["write"].ranks.reshape(traffic.world_size, size)
    everywhere = np.bitwise_and.reduce(np.where(clearing == 0, -1, clearing), axis=1)
    return bool(np.all((readers & ~everywhere[boxes.home] == 0) | ~boxes.mask))


def _pairs(traffic: Traffic) -> set[tuple[int, int]]:
    """(writer, reader): which ranks write what other ranks read."""
    pairs = set()
    for boxes in traffic.of_kind("write", "add"):
        rank, _, *_, readers = boxes.flat(_readers_of(traffic, boxes))
        for writer, bits in set(zip(rank.tolist(), readers.tolist(), strict=True)):
            pairs |= {(writer, r) for r in range(traffic.world_size) if bits >> r & 1}
    return pairs


def _too_far(exchange: Exchange, traffic: Traffic) -> tuple[int, int] | None:
    """A writer and a reader of what it writes for which it does not wait in every launch."""
    waits_for = [0] * exchange.world_size
    for other in exchange.traffic:
        made = other.painted[other.last_producer].ranks.reshape(exchange.world_size, -1)
        for boxes in other.of_kind("read"):
            rank, _, pieces = other.grid.cells_of(boxes)
            for box, cell in pieces:
                for reader in range(exchange.world_size):
                    of_reader = cell[rank[box] == reader]
                    waits_for[reader] |= int(
                        np.bitwise_or.reduce(made.ravel()[of_reader], initial=0)
                    )
    for writer, reader in sorted(_pairs(traffic)):
        if not waits_for[writer] >> reader & 1:
            return writer, reader
    return None
