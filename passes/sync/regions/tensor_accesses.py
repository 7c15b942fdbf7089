"""What happens to one symmetric tensor in one launch, on all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NoReturn

import numpy as np
from tvm import tirx

from ....builtins.errors import LanguageError
from ...ir.walk import arrows
from .accesses import Access, Kind, Program
from .copies import Copies
from .coverage import CellGrid, Coverage
from .footprints import Footprints, access_footprints


@dataclass(eq=False)
class TensorAccesses:
    """The accesses to one tensor, as boxes and by cell.

    Attributes:
        boxes: of each access.
        grid: the cells no access divides.
        painted: by kind of access, who touches each cell of each copy.
        missing: reads of the kernel that in some iteration lie wholly outside of the tensor.
    """

    tensor: tirx.Buffer
    world_size: int
    footprints: dict[Access | Copies, Footprints]
    grid: CellGrid
    painted: dict[Kind, Coverage] = field(default_factory=dict)
    missing: Sequence[Access] = ()

    def of_kind(self, *kinds: Kind) -> list[Footprints]:
        return [b for a, b in self.footprints.items() if a.kind in kinds]

    @property
    def copies(self) -> Footprints | None:
        """The copies that a plan makes into it."""
        return self._copies("write")

    @property
    def copies_out(self) -> Footprints | None:
        """The copies that a plan makes of what the kernel brings."""
        return self._copies("read")

    def _copies(self, kind: Kind) -> Footprints | None:
        every = self.footprints.items()
        return next((b for a, b in every if isinstance(a, Copies) and a.kind == kind), None)

    def in_kernel(self, *kinds: Kind) -> list[Footprints]:
        """The kernel's own accesses."""
        return [b for b in self.of_kind(*kinds) if not isinstance(b.access, Copies)]

    def has(self, kind: Kind) -> bool:
        return bool(self.of_kind(kind))

    @property
    def is_exchanged(self) -> bool:
        """Whether it must be synchronised: what one block writes another may read, or a copy is
        reached from another rank."""
        made = self.has("write") or self.has("add")
        passed_on = (made and self.has("read")) or (self.has("write") and self.has("add"))
        return passed_on or any(_foreign(b) for b in self.footprints.values())

    @property
    def is_written_again(self) -> bool:
        """Whether some element is written more than once."""
        return self.is_exchanged and bool(np.any(self.painted["write"].times > 1))

    @property
    def last_producer(self) -> Kind:
        """After what kind of access the data is complete; but for cells without additions."""
        return "add" if self.has("add") else "write"

    def complete_after(self, kind: Kind) -> np.ndarray:
        """Which cells are complete after accesses of ``kind``: those with additions after these,
        the others after their write."""
        added = self.painted["add"].times > 0
        return added if kind == "add" else ~added

    def users_of(self, kind: Kind) -> list[Footprints]:
        """The accesses of the kernel that need what those of ``kind`` bring: reads of what is
        complete after these, and additions to what is cleared."""
        reads = self.in_kernel("read")
        if not self.has("add"):
            return reads
        clearing = self.in_kernel("add") if kind == "write" else []
        return [*clearing, *(b for b in reads if self.needs(b, kind))]

    def needs(self, read: Footprints, kind: Kind) -> bool:
        """Whether some cell of ``read`` is complete after accesses of ``kind``."""
        touched = Coverage.by(self.grid, self.world_size, "read", [read]).times > 0
        return bool(np.any(touched & self.complete_after(kind)))


def traffic_of(
    tensor: tirx.Buffer, accesses: Sequence[Access], copies: Sequence[Copies], program: Program,
    world_size: int,
) -> TensorAccesses:  # fmt: skip
    """Evaluate the accesses to ``tensor``; a copy out of it is one where the kernel brings
    something.

    Raises:
        LanguageError: one of them cannot be evaluated.
    """
    footprints: dict[Access | Copies, Footprints]
    footprints = {a: access_footprints(a, program, world_size) for a in accesses}
    missing = [a for a, b in footprints.items() if a.kind == "read" and b.misses]
    footprints = {a: b for a, b in footprints.items() if b.mask.any()}
    brings = any(a.kind in ("write", "add") for a in footprints)
    footprints |= {c: c.footprints() for c in copies if c.kind == "write" or brings}
    shape = [int(e) for e in tensor.shape[1:]]
    traffic = TensorAccesses(tensor, world_size, footprints, CellGrid(shape, list(footprints.values())),
                      missing=missing)  # fmt: skip
    if not traffic.is_exchanged:
        return traffic
    for kind in ("write", "add", "read"):
        of_kind = traffic.of_kind(kind)
        traffic.painted[kind] = Coverage.by(traffic.grid, world_size, kind, of_kind)
    return traffic


def verify_traffic(traffic: TensorAccesses) -> None:
    """Refuse what has no meaning.

    Raises:
        LanguageError: an element is written twice, read though nobody writes it, or added to though
            nobody clears it.
    """
    if traffic.is_written_again:
        refuse_second_write(traffic, int(np.argmax(traffic.painted["write"].times > 1)))
    refuse_unwritten(traffic)


def refuse_jumps(program: Program, every: Sequence[TensorAccesses]) -> None:
    """Refuse what may leave out accesses, or what is put behind them.

    Raises:
        LanguageError: names an access and what may leave it out.
    """
    accesses = [b.access for t in every for b in t.in_kernel("read", "write", "add")]
    for jump in program.jumps:
        for access in (a for a in accesses if jump.may_skip(a)):
            raise LanguageError(
                f"{access.text}, and {jump.name} may leave it out, or what orders it; expected a "
                f"condition around it, or signals and waits written by hand{access.location}"
                f"{jump.location}"
            )


def _foreign(footprints: Footprints) -> bool:
    return any(rank != home for rank, home in footprints.ranks_and_homes())


def refuse_second_write(traffic: TensorAccesses, cell: int) -> NoReturn:
    """Refuse that ``cell`` is written again."""
    times = int(traffic.painted["write"].times[cell])
    writers = [a for a in traffic.footprints if a.kind == "write" and _touches(traffic, a, cell)]
    lines = arrows((a.kind, a.line) for a in writers)
    raise LanguageError(
        f"{writers[0].text}: {region_of(traffic, cell)} is written {times} times in one launch, by "
        f"{_whoever(traffic, cell)}; expected once, or a read of each before the next{lines}"
    )


def _whoever(traffic: TensorAccesses, cell: int) -> str:
    ranks = traffic.painted["write"].ranks[cell]
    names = [str(r) for r in range(traffic.world_size) if ranks >> r & 1]
    return f"rank {' and '.join(names)}"


def refuse_unwritten(traffic: TensorAccesses) -> None:
    """Refuse reads of what nobody writes, and additions to what nobody clears."""
    after: list[tuple[Kind, Kind, str]] = [
        ("read", traffic.last_producer, "read, but no rank writes it"),
        ("add", "write", "added to, but no rank clears it first"),
    ]
    for kind, needs, what in after:
        touched, made = traffic.painted[kind].times > 0, traffic.painted[needs].times > 0
        if needs == "add":
            made = made | (traffic.painted["write"].times > 0)
        missing = touched & ~made
        if np.any(missing):
            cell = int(np.argmax(missing))
            user = next(
                a for a in traffic.footprints if a.kind == kind and _touches(traffic, a, cell)
            )
            verb = "is" if traffic.footprints[user].is_certain else "may be"
            raise LanguageError(
                f"{user.text}: {region_of(traffic, cell)} {verb} {what} in this launch; expected a "
                f"write of it in the same program, or W.unordered{user.location}"
            )


def _touches(traffic: TensorAccesses, access: Access | Copies, cell: int) -> bool:
    *_, pieces = traffic.grid.cells_of(traffic.footprints[access])
    return any(np.any(cells == cell) for _, cells in pieces)


def region_of(traffic: TensorAccesses, cell: int) -> str:
    """The region of one cell, in words."""
    index = []
    for cells, size, extent in zip(
        reversed(traffic.grid.cells), reversed(traffic.grid.cell), reversed(traffic.grid.shape),
        strict=True,
    ):  # fmt: skip
        cell, at = divmod(cell, cells)
        low, high = at * size, min((at + 1) * size, extent)
        index.insert(0, f"{low}:{high}" if high - low > 1 else str(low))
    return f"{traffic.tensor.name}[{', '.join([str(cell), *index])}]"
