"""Result of ``tw.explain``."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from .operation import Operation
from .page import page
from .table import table_lines


@dataclass(frozen=True)
class Explanation:
    """Operations that order the memory of a program, or of the programs of a plan.

    Attributes:
        name: name of the program or plan.
        world_size: ranks of the group, or of each node.
        ops: all operations by line; those of one line in the order in which they run.
        merged: operations that are not inserted because another one covers them; ``reason`` names
            it.
        reuse: tensor -> why the next launch may overwrite its memory.
        flags: tensor of counters -> bytes on each rank.
        scratch: ``W.alloc_symmetric`` tensor, or versions of a tensor -> bytes of all its buffers
            on each rank.
        sources: (name, file, first line, last line) of each program.
        unordered: accesses that ``W.unordered`` excludes, with the reasons of the program.
        explicit: first explicit signal, wait or barrier of each program that has one. It turns the
            inference off.
        unverified: accesses of explicitly synchronized programs that exceed the limits of the
            verification.
        sizes: sizes of the dynamic extents that the explanation holds for.
        protocols: tensor that ``tileweave.protocol`` names -> its protocol and why.
        versions: tensor with several versions in a launch -> how the versions are separated.
        assumed: tensor of ``W.alloc_ragged`` -> what is assumed of its rows.
    """

    name: str
    world_size: int
    ops: tuple[Operation, ...] = ()
    merged: tuple[Operation, ...] = ()
    reuse: Mapping[str, str] = field(default_factory=dict)
    flags: Mapping[str, int] = field(default_factory=dict)
    scratch: Mapping[str, int] = field(default_factory=dict)
    sources: tuple[tuple[str, str, int, int], ...] = ()
    unordered: tuple[Operation, ...] = ()
    explicit: tuple[Operation, ...] = ()
    unverified: tuple[Operation, ...] = ()
    sizes: Mapping[str, int] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    protocols: Mapping[str, str] = field(default_factory=dict)
    assumed: Mapping[str, str] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """Name of the program or plan, and its ranks."""
        ranks = f"{self.world_size} rank{'s' * (self.world_size > 1)}"
        return f"{self.name}, {ranks}"

    @property
    def flag_bytes(self) -> int:
        """Bytes of counters on each rank."""
        return sum(self.flags.values())

    def __str__(self) -> str:
        """Return a table."""
        return "\n".join(table_lines(self))

    def as_json(self) -> str:
        """Return one JSON object."""
        return json.dumps({**dataclasses.asdict(self), "flag_bytes": self.flag_bytes})

    def html(self) -> str:
        """Return a page that shows the source with the operations of each line."""
        return page(self)
