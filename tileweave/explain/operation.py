"""One row of ``tw.explain``: an operation and its reason."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Kind = Literal[
    "wait", "ll_load", "fence", "bulk_wait", "barrier", "ll_store", "signal", "unordered",
    "unverified",
]  # fmt: skip
KINDS: dict[str, str] = {
    "wait": "waits until a counter has reached a value",
    "ll_load": "loads words until they have the flag of this launch",
    "fence": "makes the writes that a wait made visible also visible to the TMA",
    "bulk_wait": "waits until bulk stores have written their destination, not only read their "
    "source",
    "barrier": "synchronizes the threads of the block, before one of them acts for the block",
    "ll_store": "stores words with the flag of this launch",
    "signal": "advances a counter after all earlier writes of the block",
}
"""Kinds of inserted operations, in the order in which they run around one access."""

EXPLICIT = "explicit in the program"
"""Reason of an operation that the program itself contains."""


@dataclass(frozen=True)
class Operation:
    """An operation that orders memory.

    Attributes:
        kind: a key of ``KINDS``; ``unordered`` or ``unverified`` for an access without an
            operation.
        tensor: tensor whose data it orders, or the counter itself if it counts launches or belongs
            to the program.
        file: source file of the access that needs it.
        line: source line of that access.
        reason: why it is needed; ``EXPLICIT`` if the program contains it.
        granule: elements along each axis that one counter covers, or "".
        amount: value that a signal adds, or that has arrived in a launch when a wait ends.
        flag: tensor of its counters, or "".
        per_block: how often a block runs it in a launch, or a stream in a call of a plan, at most;
            None if it is unknown before the kernel runs.
        kernel: program that contains it.
    """

    kind: Kind
    tensor: str
    file: str
    line: int
    reason: str
    granule: str = ""
    amount: str = ""
    flag: str = ""
    per_block: int | None = 1
    kernel: str = ""


def sorted_in(kernel: str, ops: Iterable[Operation]) -> tuple[Operation, ...]:
    """Return the operations of ``kernel`` by line, those of one line in the order of ``KINDS``."""
    order = [*KINDS, "unordered", "unverified"]
    by_line = sorted(ops, key=lambda op: (op.file, op.line, order.index(op.kind)))
    return tuple(dataclasses.replace(op, kernel=kernel) for op in by_line)
