"""Random exchanges between blocks of all ranks, and which changes of them are faults.

An exchange is a list of messages. One block writes each message into its own slot at a rank and
signals it there, directly or through a third block that relays the signal. The receiving block
waits for a counter that one or more messages share, and reads them.

``changes`` derives from reachability in the graph of operations whether a change of one operation
is a fault. It does not look at schedules.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Literal

import numpy as np
import tilelang.language as T

from tileweave import language as W

from .faults.case import datum

TILE = 32
"""Elements of a message, and threads of a block."""

Place = tuple[int, int]
"""Rank and block."""


@dataclass(frozen=True)
class Message:
    """One tile, from a block to a slot at the rank of its delivery."""

    source: Place
    via: Place | None
    transport: Literal["store", "put", "tile"]
    delivery: int


@dataclass(frozen=True)
class Exchange:
    """Messages, the receiving block of each delivery, and the order of all steps.

    ``order`` restricted to a block is its program order, so no exchange deadlocks. Steps are
    ``("send", message)``, ``("relay", message)`` and ``("receive", delivery)``.
    """

    ranks: int
    blocks: int
    messages: tuple[Message, ...]
    deliveries: tuple[Place, ...]
    order: tuple[tuple[str, int], ...]

    def messages_of(self, delivery: int) -> list[int]:
        return [m for m, message in enumerate(self.messages) if message.delivery == delivery]


@dataclass(frozen=True, repr=False)
class Op:
    """One operation of one block.

    Args:
        rank, block: the block that performs it.
        to: rank whose memory it accesses.
        flag: number of the flag, for signals and waits.
        message: number of the slot, for writes and reads.
        count: arrivals that a wait expects in each epoch; ``ahead`` is added to their sum.
    """

    kind: Literal["write", "signal", "wait", "read"]
    rank: int
    block: int
    to: int
    flag: int = -1
    message: int = -1
    transport: str = ""
    count: int = 0
    ahead: int = 0
    sem: str = ""
    scope: str = "sys"

    @property
    def place(self) -> Place:
        return self.rank, self.block

    def __repr__(self) -> str:
        at = f"message {self.message}" if self.flag < 0 else f"flag {self.flag}"
        wanted = f" {self.count}{self.ahead:+}" if self.kind == "wait" else ""
        parts = (self.transport, self.sem, self.sem and self.scope)
        qualifiers = " ".join(q for q in parts if q)
        return f"{self.place}: {self.kind} {at} of rank {self.to}{wanted} {qualifiers}"


def operations(x: Exchange) -> list[Op]:
    """Return all operations in order. Flags of relays follow the counters of deliveries."""
    ops = []

    def signal(place: Place, to: Place, flag: int) -> None:
        ops.append(Op("signal", *place, to[0], flag, sem="release"))

    def wait(place: Place, flag: int, count: int) -> None:
        ops.append(Op("wait", *place, place[0], flag, count=count, sem="acquire"))

    for step, number in x.order:
        if step == "receive":
            place, messages = x.deliveries[number], x.messages_of(number)
            wait(place, number, len(messages))
            for m in messages:
                transport = x.messages[m].transport
                ops.append(Op("read", *place, place[0], message=m, transport=transport))
            continue
        message = x.messages[number]
        reader, relay = _reader(x, number), len(x.deliveries) + number
        if step == "relay":
            wait(message.via, relay, 1)
            signal(message.via, reader, message.delivery)
            continue
        write = Op("write", *message.source, reader[0], message=number)
        ops.append(replace(write, transport=message.transport))
        if message.via is None:
            signal(message.source, reader, message.delivery)
        else:
            signal(message.source, message.via, relay)
    return ops


def exchange_program(x: Exchange, ops: list[Op], barrier: bool):
    """Return the kernel of ``ops``; the ``barrier`` at its end makes the next epoch safe."""
    messages, blocks = len(x.messages), x.blocks
    num_flags = len(x.deliveries) + messages

    @T.prim_func
    def program(
        mail: W.Symmetric((messages, TILE), "int32"),
        flags: W.Symmetric((num_flags,), "int32"),
        outbox: T.Tensor((messages, TILE), "int32"),
        state: T.Tensor((blocks,), "int32"),
        out: T.Tensor((messages, TILE), "int32"),
    ):
        with T.Kernel(blocks, threads=TILE) as block:
            me = W.rank()
            tile = T.alloc_shared((TILE,), "int32")
            epoch = T.alloc_var("int32")
            epoch = state[block]
            for op in ops:
                if me == op.rank and block == op.block:
                    if op.kind == "signal":
                        W.signal(flags[op.to, op.flag], sem=op.sem, scope=op.scope)
                    elif op.kind == "wait":
                        target = (epoch + 1) * op.count + op.ahead
                        W.wait_reached(flags[op.to, op.flag], target, sem=op.sem, scope=op.scope)
                    elif op.kind == "read":
                        if op.transport == "tile":
                            T.copy(mail[op.to, op.message, 0], tile)
                            T.copy(tile, out[op.message, 0])
                        else:
                            for i in T.Parallel(TILE):
                                out[op.message, i] = mail[op.to, op.message, i]
                    elif op.transport == "store":
                        for i in T.Parallel(TILE):
                            mail[op.to, op.message, i] = datum(epoch, op.message, i)
                    elif op.transport == "tile":
                        for i in T.Parallel(TILE):
                            tile[i] = datum(epoch, op.message, i)
                        T.copy(tile, mail[op.to, op.message, 0])
                    else:
                        for i in T.Parallel(TILE):
                            outbox[op.message, i] = datum(epoch, op.message, i)
                        T.sync_threads()
                        W.put_block(outbox[op.message, 0], mail[op.to, op.message, 0], TILE)
            if barrier:
                W.barrier_blocks()
            T.sync_threads()
            if T.get_thread_binding() == 0:
                state[block] = epoch + 1

    return program


def inputs(x: Exchange) -> list[dict[str, np.ndarray]]:
    shapes = {
        "mail": (len(x.messages), TILE),
        "flags": (len(x.deliveries) + len(x.messages),),
        "outbox": (len(x.messages), TILE),
        "state": (x.blocks,),
        "out": (len(x.messages), TILE),
    }
    return [{n: np.zeros(s, np.int32) for n, s in shapes.items()} for _ in range(x.ranks)]


def expected_out(x: Exchange, epoch: int, rank: int) -> np.ndarray:
    out = np.zeros((len(x.messages), TILE), np.int32)
    for m in range(len(x.messages)):
        if _reader(x, m)[0] == rank:
            out[m] = datum(epoch, m, np.arange(TILE))
    return out


@dataclass(frozen=True)
class Change:
    """An exchange with one changed operation.

    Args:
        kinds: fault kinds that the simulator may report; empty if the exchange stays correct.
    """

    what: str
    ops: list[Op]
    kinds: tuple[str, ...]
    barrier: bool = True


def changes(x: Exchange) -> Iterator[Change]:
    """Yield each change of one operation of which it is certain whether it is a fault."""
    ops = operations(x)
    for index, op in enumerate(ops):
        what = f"{op.kind} of flag {op.flag} of rank {op.to} by block {op.block} of rank {op.rank}"

        def changed(how: str, kinds=None, new=None, what=what, index=index, **fields) -> Change:
            new = new or [*ops[:index], replace(ops[index], **fields), *ops[index + 1 :]]
            return Change(f"{how}: {what}", new, _race(new) if kinds is None else kinds)

        without = [*ops[:index], *ops[index + 1 :]]
        if op.kind == "signal":
            yield changed("dropped", ("deadlock",), without)
            yield changed("relaxed", sem="relaxed")
            yield from _certain(changed("gpu scope", scope="gpu"))
            write = ops[index - 1]
            if write.kind == "write" and op.place != _reader(x, write.message):
                yield changed("early", None, [*ops[: index - 1], op, write, *ops[index + 1 :]])
        if op.kind == "wait":
            yield changed("dropped", None, without)
            yield changed("relaxed", sem="relaxed")
            yield from _certain(changed("gpu scope", scope="gpu"))
            yield changed("one too many", ("deadlock",), ahead=1)
            arrivals = [s for s in ops if s.kind == "signal" and _same_flag(s, op)]
            late = any(_unordered(_edges(ops, lost=(s, op)), ops) for s in arrivals)
            yield changed("one too few", ("race",) if late else (), ahead=-1)
    if _overtaken(x, ops):
        yield Change("no barrier at the end", ops, ("reuse", "race"), barrier=False)


def _certain(change: Change) -> Iterator[Change]:
    """Yield the change, unless its only possible fault is a race of a failed poll."""
    if change.kinds or not _clash(_edges(change.ops), change.ops, True):
        yield change


def _reader(x: Exchange, message: int) -> Place:
    return x.deliveries[x.messages[message].delivery]


def _same_flag(a: Op, b: Op) -> bool:
    return (a.to, a.flag) == (b.to, b.flag)


def _race(ops: list[Op]) -> tuple[str, ...]:
    edges = _edges(ops)
    return ("race",) if _unordered(edges, ops) or _clash(edges, ops, False) else ()


Edges = dict[int, set[int]]


def _edges(ops: list[Op], lost: tuple[Op, Op] | None = None) -> Edges:
    """Return the order of operations: within a block, and from a release to its acquire.

    A tile store is complete only at the next release of its block. ``lost`` is an arrival that one
    wait does not wait for.
    """
    edges: Edges = {i: set() for i in range(len(ops))}
    for i, a in enumerate(ops):
        for j, b in enumerate(ops):
            if i < j and a.place == b.place:
                pending = a.kind == "write" and a.transport == "tile"
                if not pending or b.sem == "release":
                    edges[i].add(j)
            if a.sem == "release" and b.sem == "acquire" and _same_flag(a, b):
                wide = a.rank == b.rank or a.scope == b.scope == "sys"
                if wide and not (lost and a is lost[0] and b is lost[1]):
                    edges[i].add(j)
    return edges


def _reached(edges: Edges, start: int) -> set[int]:
    seen: set[int] = set()
    stack = [start]
    while stack:
        for after in edges[stack.pop()] - seen:
            seen.add(after)
            stack.append(after)
    return seen


def _unordered(edges: Edges, ops: list[Op]) -> bool:
    """Return whether a message may be read before it is written."""
    reads = {op.message: i for i, op in enumerate(ops) if op.kind == "read"}
    return any(
        reads[op.message] not in _reached(edges, i)
        for i, op in enumerate(ops)
        if op.kind == "write"
    )


def _clash(edges: Edges, ops: list[Op], failed_polls: bool) -> bool:
    """Return whether two ranks may access a flag concurrently, one of them only at gpu scope.

    With ``failed_polls``, a wait accesses it from its start; else only when it succeeds.
    """

    def ordered(i: int, j: int) -> bool:
        after = _reached(edges, i)
        if not failed_polls or ops[j].kind != "wait":
            return j in after
        return any(ops[k].place == ops[j].place for k in range(j) if k in after)

    flags = [i for i, op in enumerate(ops) if op.kind in ("signal", "wait")]
    return any(
        not (ordered(i, j) or ordered(j, i))
        for i, j in combinations(flags, 2)
        if _same_flag(ops[i], ops[j])
        and ops[i].rank != ops[j].rank
        and (ops[i].scope, ops[j].scope) != ("sys", "sys")
    )


def _overtaken(x: Exchange, ops: list[Op]) -> bool:
    """Return whether, without a barrier, a slot may be written again before it was read.

    A rank's next launch begins when its last has ended, so two epochs are two copies of the graph
    joined at each rank.
    """
    once, n = _edges(ops), len(ops)
    edges = {i: set(after) for i, after in once.items()}
    edges |= {n + i: {n + j for j in after} for i, after in once.items()}
    for i, a in enumerate(ops):
        edges[i] |= {n + j for j, b in enumerate(ops) if a.rank == b.rank}
    writes = {op.message: i for i, op in enumerate(ops) if op.kind == "write"}
    return any(
        n + writes[op.message] not in _reached(edges, i)
        for i, op in enumerate(ops)
        if op.kind == "read"
    )
