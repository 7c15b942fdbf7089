"""All accesses to one symmetric tensor in one launch, on all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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
    """Accesses to one tensor, as boxes and by cell.

    Attributes:
        footprints: the boxes of each access.
        grid: cells that no access cuts.
        coverage: for each kind of access, the accesses to each cell of each copy.
        missing: reads of the kernel that are completely outside of the tensor in some iteration.
        segments: number of axes that select a segment, if the tensor holds the rows of a ragged
            tensor or its announcements; else 0.
        counts: the accesses to the announcements, if the tensor holds the rows of a ragged tensor.
        tile: rows of a ragged tensor that readers wait for at once; 0 for other tensors.
    """

    tensor: tirx.Buffer
    world_size: int
    footprints: dict[Access | Copies, Footprints]
    grid: CellGrid
    coverage: dict[Kind, Coverage] = field(default_factory=dict)
    missing: Sequence[Access] = ()
    segments: int = 0
    counts: TensorAccesses | None = None
    tile: int = 0

    @property
    def is_ragged(self) -> bool:
        """True if the tensor holds the rows of a ragged tensor."""
        return self.tile > 0

    @property
    def is_limited(self) -> bool:
        """True if writes depend on a limit, see ``Limit``. Then the counters are set to 0 at the
        end of a launch, because they do not grow equally in all launches."""
        return any(f.limit is not None for f in self.in_kernel("write"))

    @property
    def announces(self) -> bool:
        """True if the tensor holds the announcements of a ragged tensor."""
        return self.segments > 0 and not self.is_ragged

    def of_kind(self, *kinds: Kind) -> list[Footprints]:
        return [f for a, f in self.footprints.items() if a.kind in kinds]

    @property
    def copies(self) -> Footprints | None:
        """Copies of a plan into the tensor."""
        return self._copies("write")

    @property
    def copies_out(self) -> Footprints | None:
        """Copies of a plan that read data written by the kernel."""
        return self._copies("read")

    def _copies(self, kind: Kind) -> Footprints | None:
        items = self.footprints.items()
        return next((f for a, f in items if isinstance(a, Copies) and a.kind == kind), None)

    def in_kernel(self, *kinds: Kind) -> list[Footprints]:
        """Return the accesses of these kinds that the kernel makes, without a plan's copies."""
        return [f for f in self.of_kind(*kinds) if not isinstance(f.access, Copies)]

    def has(self, kind: Kind) -> bool:
        return bool(self.of_kind(kind))

    @property
    def is_exchanged(self) -> bool:
        """True if accesses to the tensor need synchronization.

        They do if one block may read data that another block writes, or if a rank accesses the copy
        of another rank.
        """
        produced = self.has("write") or self.has("add")
        consumed = (produced and self.has("read")) or (self.has("write") and self.has("add"))
        return consumed or any(_is_remote(f) for f in self.footprints.values())

    @property
    def is_written_again(self) -> bool:
        """True if some element is written more than once in a launch.

        Rows of a ragged tensor are not, because they are distinct, and their announcements are
        not, because a segment is announced once.
        """
        written_again = self.is_exchanged and np.any(self.coverage["write"].times > 1)
        return bool(written_again) and not self.segments

    @property
    def last_producer(self) -> Kind:
        """Kind of access that completes the data, except for cells without additions."""
        return "add" if self.has("add") else "write"

    def complete_after(self, kind: Kind) -> np.ndarray:
        """Return a mask of the cells that accesses of ``kind`` complete.

        Additions complete the cells that have any; writes complete the others.
        """
        added = self.coverage["add"].times > 0
        return added if kind == "add" else ~added

    def users_of(self, kind: Kind) -> list[Footprints]:
        """Return the accesses of the kernel that depend on accesses of ``kind``.

        Reads depend on the accesses that complete their cells, and additions on the write that
        clears the element.
        """
        reads = self.in_kernel("read")
        if not self.has("add"):
            return reads
        clearing = self.in_kernel("add") if kind == "write" else []
        return [*clearing, *(f for f in reads if self.needs(f, kind))]

    def needs(self, read: Footprints, kind: Kind) -> bool:
        """Return whether accesses of ``kind`` complete some cell of ``read``."""
        accessed = Coverage.of_accesses(self.grid, self.world_size, "read", [read]).times > 0
        return bool(np.any(accessed & self.complete_after(kind)))


def collect_tensor_accesses(
    tensor: tirx.Buffer, accesses: Sequence[Access], copies: Sequence[Copies], program: Program,
    world_size: int, *, segments: int = 0, counts: TensorAccesses | None = None, tile: int = 0,
) -> TensorAccesses:  # fmt: skip
    """Evaluate the accesses to ``tensor``.

    Copies out of the tensor count only if the kernel writes it.

    Args:
        segments, counts, tile: see ``TensorAccesses``.

    Raises:
        LanguageError: an access cannot be evaluated.
    """
    footprints: dict[Access | Copies, Footprints]
    footprints = {a: access_footprints(a, program, world_size) for a in accesses}
    missing = [a for a, f in footprints.items() if a.kind == "read" and f.misses]
    footprints = {a: f for a, f in footprints.items() if f.mask.any()}
    is_produced = any(a.kind in ("write", "add") for a in footprints)
    footprints |= {c: c.footprints() for c in copies if c.kind == "write" or is_produced}
    grid = CellGrid([int(e) for e in tensor.shape[1:]], list(footprints.values()))
    tensor_accesses = TensorAccesses(
        tensor, world_size, footprints, grid, missing=missing, segments=segments, counts=counts,
        tile=tile,
    )  # fmt: skip
    if not (tensor_accesses.is_exchanged or segments):
        return tensor_accesses
    for kind in ("write", "add", "read"):
        of_kind = tensor_accesses.of_kind(kind)
        tensor_accesses.coverage[kind] = Coverage.of_accesses(grid, world_size, kind, of_kind)
    return tensor_accesses


def verify_tensor_accesses(accesses: TensorAccesses) -> None:
    """Refuse accesses whose result is not defined.

    Raises:
        LanguageError: an element is written twice, read although no rank writes it, or added to
            although no rank clears it.
    """
    if not accesses.is_ragged and np.any(accesses.coverage["write"].times > 1):
        refuse_second_write(accesses, int(np.argmax(accesses.coverage["write"].times > 1)))
    refuse_unwritten(accesses)


def refuse_jumps(program: Program, tensors: Sequence[TensorAccesses]) -> None:
    """Refuse jumps that may skip an access, or a statement that is inserted after an access.

    Raises:
        LanguageError: names the access and the jump.
    """
    accesses = [f.access for t in tensors for f in t.in_kernel("read", "write", "add")]
    for jump in program.jumps:
        for access in (a for a in accesses if jump.may_skip(a)):
            raise LanguageError(
                f"{access.text}, and {jump.name} may skip it, or the signal or wait that orders "
                "it; expected a condition around it, or explicit signals and waits"
                f"{access.location}{jump.location}"
            )


def _is_remote(footprints: Footprints) -> bool:
    return any(rank != owner for rank, owner in footprints.ranks_and_owners())


def refuse_second_write(accesses: TensorAccesses, cell: int) -> NoReturn:
    """Refuse the second write of ``cell`` in one launch."""
    times = int(accesses.coverage["write"].times[cell])
    writers = [a for a in accesses.footprints if a.kind == "write" and _contains(accesses, a, cell)]
    combining = next((a for a in writers if a.combines), None)
    if combining is not None:
        refuse_combination(combining, writers, region_of(accesses, cell), times)
    lines = arrows((a.kind, a.line) for a in writers)
    verb = "announced" if accesses.announces else "written"
    legal = "" if accesses.announces else ", or a read of each before the next"
    raise LanguageError(
        f"{writers[0].text}: {region_of(accesses, cell)} is {verb} {times} times in one launch, by "
        f"{_writing_ranks(accesses, cell)}; expected once{legal}{lines}"
    )


def refuse_combination(
    combining: Access, accesses: Iterable[Access], region: str, times: int
) -> NoReturn:
    """Refuse an atomic operation, no addition, on elements that the launch writes again."""
    lines = arrows((a.kind, a.line) for a in dict.fromkeys((combining, *accesses)))
    raise LanguageError(
        f"{combining.text}, and {region} is written {times} times in one launch; expected "
        "T.atomic_add, the only combination of several writes whose order is inferred, or explicit "
        f"signals and waits{lines}"
    )


def _writing_ranks(accesses: TensorAccesses, cell: int) -> str:
    ranks = accesses.coverage["write"].ranks[cell]
    names = [str(r) for r in range(accesses.world_size) if ranks >> r & 1]
    return f"rank {' and '.join(names)}"


def refuse_unwritten(accesses: TensorAccesses) -> None:
    """Refuse reads of elements that no rank writes, and additions to elements not cleared."""
    requirements: list[tuple[Kind, Kind, str]] = [
        ("read", accesses.last_producer, "read, but no rank writes it"),
        ("add", "write", "added to, but no rank clears it first"),
    ]
    for kind, producer, problem in requirements:
        accessed = accesses.coverage[kind].times > 0
        produced = accesses.coverage[producer].times > 0
        if producer == "add":
            produced = produced | (accesses.coverage["write"].times > 0)
        missing = accessed & ~produced
        if np.any(missing):
            cell = int(np.argmax(missing))
            user = next(
                a for a in accesses.footprints if a.kind == kind and _contains(accesses, a, cell)
            )
            verb = "is" if accesses.footprints[user].is_certain else "may be"
            legal = "a write of it in the same program, or W.unordered"
            if accesses.announces:
                problem, legal = "read, but no rank announces it", "W.announce for it, also of 0"
            raise LanguageError(
                f"{user.text}: {region_of(accesses, cell)} {verb} {problem} in this launch; "
                f"expected {legal}{user.location}"
            )


def _contains(accesses: TensorAccesses, access: Access | Copies, cell: int) -> bool:
    """Return whether a box of ``access`` contains ``cell``."""
    *_, chunks = accesses.grid.cells_of(accesses.footprints[access])
    return any(np.any(cells == cell) for _, cells in chunks)


def region_of(accesses: TensorAccesses, cell: int) -> str:
    """Return the region of one cell as text, for messages: ``S[1, 0:16, 3]``, or the segment of an
    announcement."""
    index = []
    for cells, size, extent in zip(
        reversed(accesses.grid.cells), reversed(accesses.grid.cell), reversed(accesses.grid.shape),
        strict=True,
    ):  # fmt: skip
        cell, position = divmod(cell, cells)
        low, high = position * size, min((position + 1) * size, extent)
        index.insert(0, f"{low}:{high}" if high - low > 1 else str(low))
    if accesses.announces:
        index = index[: accesses.segments]
    return f"{accesses.tensor.name}[{', '.join([str(cell), *index])}]"
