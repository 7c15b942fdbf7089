"""One line of ``tw.explain``: an operation and its reason."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

KINDS: dict[str, str] = {
    "wait": "the block stands until a counter has reached a number",
    "fence": "what a wait made visible is visible to the TMA, too",
    "bulk_wait": "bulk stores are complete, not merely read",
    "barrier": "all threads of the block meet; one of them goes on to speak for the block",
    "signal": "a counter is advanced, after all that the block wrote before",
}
"""The kinds of operations, in the order in which they stand around one access."""


BY_HAND = "written by hand"


@dataclass(frozen=True)
class Operation:
    """One operation that orders memory.

    Attributes:
        kind: ``wait``, ``fence``, ``bulk_wait``, ``barrier`` or ``signal``.
        tensor: whose data it orders; the counter itself where it counts launches or is the
            program's own.
        file, line: of the access it is for.
        reason: why it is there; ``written by hand`` where the program says it.
        granule: elements along each axis that one counter stands for, or nothing.
        amount: what a signal adds, or has arrived in a launch when a wait ends.
        flag: the tensor of its counters, or nothing.
        per_block: how often a block does it in a launch, or a stream in a call of a plan, at most;
            None where only the running kernel knows.
        kernel: the program in which it stands.
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


Kind = Literal["wait", "fence", "bulk_wait", "barrier", "signal", "unordered", "unverified"]
