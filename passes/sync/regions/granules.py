"""Granules: the boxes of elements that one counter covers.

A granule is the smallest box such that every accessed box is inside a single granule.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from tvm import tirx

from ....builtins.errors import LanguageError, SyncWarning
from .accesses import Kind
from .copies import Copies
from .coverage import volumes
from .footprints import Footprints
from .space import Loop
from .symbols import Symbols, product, quotient
from .tensor_accesses import TensorAccesses


@dataclass(frozen=True, eq=False)
class Granules:
    """Division of a tensor's copy into boxes of equal size; the last of an axis may be smaller.

    Attributes:
        shape: shape of the copy, without the rank axis.
        size: elements of a granule along each axis.
    """

    shape: tuple[int, ...]
    size: tuple[int, ...]

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """Number of granules along each axis."""
        return tuple(-(-n // g) for n, g in zip(self.shape, self.size, strict=True))

    @property
    def text(self) -> str:
        """Elements along each axis, as in ``16 x 32``."""
        return " x ".join(map(str, self.size))

    @cached_property
    def total(self) -> int:
        return math.prod(self.counts)

    def numbers_of(self, footprints: Footprints) -> np.ndarray:
        """Return the number of the granule that is accessed in each iteration."""
        number = self.number_at(footprints.low)
        return number.reshape(np.shape(number) or (1,) * footprints.mask.ndim)

    def number_at(self, low: Sequence[np.ndarray]) -> np.ndarray:
        """Return the number of the granule that contains a box that begins at ``low``."""
        number = np.int64(0)
        for start, size, count in zip(low, self.size, self.counts, strict=True):
            if count > 1:
                number = number * count + np.minimum(start // size, count - 1)
        return np.asarray(number)

    def numbers_of_copies(self, copies: Footprints) -> Iterator[np.ndarray]:
        """Yield, for each copy of a plan, the numbers of the granules that it accesses."""
        low, size = (np.array(arrays).T.tolist() for arrays in (copies.low, copies.size))
        for starts, extents in zip(low, size, strict=True):
            sides = zip(starts, extents, self.size, strict=True)
            axes = [np.arange(start // n, -(-(start + extent) // n)) for start, extent, n in sides]
            yield np.ravel_multi_index(np.ix_(*axes), self.counts).ravel()

    def index(
        self, footprints: Footprints, symbols: Symbols, exited: Sequence[Loop]
    ) -> tirx.PrimExpr:
        """Return the granule number as an expression, valid at the access outside ``exited``.

        Args:
            exited: loops around the access that do not enclose the use of the expression.
        """
        number: tirx.PrimExpr = tirx.IntImm("int32", 0)
        loops = [*exited, *footprints.access.inner]
        for axis, (size, count) in enumerate(zip(self.size, self.counts, strict=True), 1):
            if count > 1 or symbols.program.is_shared:
                start = symbols.box_start(footprints, axis, loops)
                number = product(number, count) + quotient(start, size)
        return symbols.inserted(number, footprints.access)

    def numbers_of_cells(self, accesses: TensorAccesses) -> np.ndarray:
        """Return the granule number of each cell of one copy, in the order of the cells."""
        number = np.int64(0)
        grid = accesses.grid
        for axis, (cells, cell) in enumerate(zip(grid.cells, grid.cell, strict=True)):
            numbers_on_axis = np.arange(cells) * cell // self.size[axis]
            shape = [1] * len(grid.cells)
            shape[axis] = -1
            number = number * self.counts[axis] + numbers_on_axis.reshape(shape)
        return np.broadcast_to(number, grid.cells).ravel()


def choose_granules(accesses: TensorAccesses, requested: tuple[int, ...] | None = None) -> Granules:
    """Choose the granules of a tensor: along each axis the smallest size that cuts no box.

    If two copies of a plan would share a granule, a copy may cover several granules instead. The
    size is then the largest one such that copies begin and end at its multiples, if it cuts no box
    that the kernel accesses.

    Args:
        requested: the user's choice, one size for each axis.

    Raises:
        LanguageError: ``requested`` cuts a box or has the wrong number of axes; or a box begins
            before the first element of an axis.
    """
    shape = accesses.grid.shape
    if requested is not None and len(requested) != len(shape):
        raise LanguageError(
            f"tileweave.granule={requested} of {accesses.tensor.name} has {len(requested)} axes; "
            f"expected {len(shape)}, one for each axis after the rank axis"
        )
    footprints = list(accesses.footprints.values())
    if requested is not None:
        _verify_choice(accesses, requested)
        size = list(requested)
    else:
        size = [
            smallest_size([f.bounds[axis] for f in footprints], extent)
            for axis, extent in enumerate(shape)
        ]
        for axis, extent in enumerate(shape):
            _warn_of_whole_axis(footprints, axis, extent, size[axis])
    granules = Granules(shape, tuple(size))
    for boxes in footprints:
        _refuse_before(boxes, granules)
    if requested is None and np.any(_times_copied(accesses, granules) > 1):
        sizes = (_size_of_copies(accesses, axis, n) for axis, n in enumerate(size))
        return Granules(shape, tuple(sizes))
    return granules


def tiles_of_rows(accesses: TensorAccesses) -> Granules:
    """Return the granules of a ragged tensor: tiles of whole rows, each in one segment."""
    shape, axes = accesses.grid.shape, accesses.segments
    return Granules(tuple(shape), (*(1 for _ in shape[:axes]), accesses.tile, *shape[1 + axes :]))


def _verify_choice(accesses: TensorAccesses, requested: tuple[int, ...]) -> None:
    """Refuse granules chosen by the user that divide a box."""
    for axis, extent in enumerate(accesses.grid.shape):
        bounds = [f.bounds[axis] for f in accesses.footprints.values()]
        for access, (low, high) in zip(accesses.footprints, bounds, strict=True):
            if not is_within_granules(low, high, requested[axis]):
                raise LanguageError(
                    f"{access.text}: tileweave.granule={requested} of {accesses.tensor.name} "
                    f"cuts what it accesses on axis {axis}; expected a multiple of "
                    f"{smallest_size(bounds, extent)} there{access.location}"
                )


def _warn_of_whole_axis(footprints: list[Footprints], axis: int, extent: int, size: int) -> None:
    """Warn if one counter covers a whole axis although every access uses only a part of it."""
    bounds = [f.bounds[axis] for f in footprints]
    if size < extent or any(np.any(high - low >= extent) for low, high in bounds):
        return
    is_cause = [
        smallest_size([b for b in bounds if b is not bound], extent) < extent for bound in bounds
    ]
    access = footprints[is_cause.index(True) if True in is_cause else -1].access
    warnings.warn(
        f"{access.text}: no granule smaller than the {extent} elements of axis {axis} "
        "fits the accesses to the tensor, so each wait is for all of them; expected tiles that "
        f"begin at multiples of their size{access.location}",
        SyncWarning,
        stacklevel=2,
    )


def _refuse_before(footprints: Footprints, granules: Granules) -> None:
    """Refuse a box that TileLang clips at the start of an axis, if its granule is then unknown."""
    for axis in footprints.before:
        if footprints.access.kind != "read" or granules.counts[axis] > 1:
            raise footprints.refused(
                "begins before the first element of an axis", "indices from 0 up, or a condition"
            )


def _size_of_copies(accesses: TensorAccesses, axis: int, minimum: int) -> int:
    """Return the largest size such that copies begin and end at its multiples.

    Return ``minimum`` if that size cuts a box that the kernel accesses.
    """
    extent, copies = accesses.grid.shape[axis], accesses.copies
    assert copies is not None
    size = int(np.gcd.reduce(np.concatenate(copies.bounds[axis]) % extent))
    in_kernel = [f for f in accesses.footprints.values() if f is not copies]
    fits = size and all(is_within_granules(*f.bounds[axis], size) for f in in_kernel)
    return size if fits else minimum


def is_within_granules(low: np.ndarray, high: np.ndarray, size: int) -> bool:
    """Return whether each box is inside one granule of ``size`` along an axis."""
    return bool(np.all(low // size == np.maximum(high - 1, low) // size))


def smallest_size(bounds: list, extent: int) -> int:
    """Return the smallest granule size along an axis that cuts no box."""
    extents = sorted({int(n) for low, high in bounds for n in np.unique(high - low) if n > 0})
    candidates = set(extents[:8])
    for n in (2, len(extents[:8])):
        candidates |= {math.lcm(*subset) for subset in itertools.combinations(extents[:8], n)}
    for size in sorted(c for c in candidates if c < extent):
        if all(is_within_granules(low, high, size) for low, high in bounds):
            return size
    return extent


@dataclass(eq=False)
class Counter:
    """Count of the elements that arrive in each granule of each copy, on every rank that waits.

    Attributes:
        accesses: the accesses to the tensor.
        kind: the kind of access that is counted.
        unit: number of elements that count as one.
        waiting: for each owner of a copy, the ranks that wait for it, one bit each.
        arrivals: units that arrive in a launch, by copy and granule.
        own: number of granules in the rank's own share. They have arrived before the owner's kernel
            starts, and begin at granule ``rank * own``; 0 if there is no such share.
        at_exit: whether the owner waits at the end of the launch, instead of a read.
        also_at_exit: whether the owner additionally waits for all granules at the end of the
            launch, because reads may wait for some of them only.
        by_copies: whether a plan's copies wait for the counter; their streams reset it to 0.
        users: the accesses of the kernel that wait for the counter.
    """

    accesses: TensorAccesses
    kind: Kind
    granules: Granules
    unit: int
    waiting: list[int]
    arrivals: np.ndarray
    own: int = 0
    at_exit: bool = False
    also_at_exit: bool = False
    by_copies: bool = False
    users: list[Footprints] = field(default_factory=list)
    flags: tirx.Buffer | None = None

    @property
    def pulled(self) -> bool:
        """True if ranks other than the owner wait for a copy.

        Then each rank has its own counter of every copy.
        """
        return any(bits & ~(1 << owner) for owner, bits in enumerate(self.waiting))

    @property
    def scope(self) -> str:
        """Scope of the signals and waits: ``gpu`` if only blocks of the owner signal and wait."""
        if self.by_copies or self.is_of_copies or self.accesses.is_ragged:
            return "sys"
        pairs = {p for f in self.accesses.in_kernel(self.kind) for p in f.ranks_and_owners()}
        is_local = all(rank == owner for rank, owner in pairs)
        return "gpu" if is_local and not self.pulled else "sys"

    @property
    def is_of_copies(self) -> bool:
        """True if the counter counts copies of a plan instead of elements."""
        return self.kind == "write" and self.accesses.copies is not None


def counter_of(
    accesses: TensorAccesses, kind: Kind, granules: Granules, users: list[Footprints]
) -> Counter:
    """Return the counter of accesses of ``kind``; the accesses ``users`` wait for it."""
    if accesses.copies is not None and kind == "write":
        arrivals, increments = _count_copies(accesses, granules), [np.ones(1, np.int64)]
    else:
        arrivals = _count_elements(accesses, kind, granules)
        increments = [np.unique(f.active(elements_of(f))[0]) for f in accesses.of_kind(kind)]
    unit = int(np.gcd.reduce(np.concatenate([arrivals.ravel(), *increments]), initial=0)) or 1
    if accesses.is_ragged:  # whole rows are announced, and a write may store a part of one
        row = math.prod(granules.shape[1 + accesses.segments :])
        unit = math.gcd(row, *(f.access.stored for f in accesses.in_kernel(kind)))
    waiting = [0] * accesses.world_size
    for footprints in users:
        for rank, owner in footprints.ranks_and_owners():
            waiting[owner] |= 1 << rank
    in_kernel = [f for f in users if not isinstance(f.access, Copies)]
    counter = Counter(accesses, kind, granules, unit, waiting, arrivals // unit, users=in_kernel)
    if counter.is_of_copies and not counter.pulled:
        counter.own = _own_share(accesses, granules)
    return counter


def _count_elements(accesses: TensorAccesses, kind: Kind, granules: Granules) -> np.ndarray:
    """Return the number of elements that arrive in each granule of each copy."""
    grid = accesses.grid
    times = accesses.coverage[kind].times.reshape(accesses.world_size, -1)
    elements = times * volumes(grid.shape, grid.cell).ravel()
    granule = granules.numbers_of_cells(accesses)
    counts = [np.bincount(granule, e, minlength=granules.total) for e in elements]
    return np.stack(counts).astype(int)


def _own_share(accesses: TensorAccesses, granules: Granules) -> int:
    """Return the number of granules that each rank copies for itself before its kernel starts.

    Return 0 unless these granules are equal shares of the copy, in the order of the ranks.
    """
    copies = accesses.copies
    assert copies is not None
    share, remainder = divmod(granules.total, accesses.world_size)
    if remainder or not share:
        return 0
    for copy, numbers in zip(copies.access.copies, granules.numbers_of_copies(copies), strict=True):
        before = copy.before and copy.rank == copy.start[0]
        in_own_share = numbers // share == copy.start[0]
        if np.any(in_own_share != before):
            return 0
    return share


def _count_copies(accesses: TensorAccesses, granules: Granules) -> np.ndarray:
    """Return the number of copies into each granule, which is 0 or 1.

    A stream stores a flag and cannot add to it. So one copy must write the whole granule, and the
    kernel must not write it.

    Raises:
        LanguageError: a granule has several writers.
    """
    copies, count = accesses.copies, _times_copied(accesses, granules)
    assert copies is not None
    if accesses.in_kernel("write", "add") or np.any(count > 1):
        writers = "two copies write" if np.any(count > 1) else "the kernel also writes"
        raise LanguageError(
            f"{copies.access.text}: {writers} parts of a region that is read at once; expected one "
            f"copy for all of it{copies.access.location}"
        )
    return count


def _times_copied(accesses: TensorAccesses, granules: Granules) -> np.ndarray:
    """Return the number of copies that write to each granule, by owner and granule."""
    count = np.zeros((accesses.world_size, granules.total), np.int64)
    if (copies := accesses.copies) is not None:
        granules_of_copies = granules.numbers_of_copies(copies)
        for copy, numbers in zip(copies.access.copies, granules_of_copies, strict=True):
            count[copy.start[0], numbers] += 1
    return count


def elements_of(footprints: Footprints) -> np.ndarray:
    """Return the number of elements in the box of each iteration.

    The array extends over the axes along which boxes differ.
    """
    count = np.int64(1)
    for size in footprints.size:
        count = count * size
    return np.broadcast_to(count, np.broadcast_shapes(*(a.shape for a in (*footprints.low, count))))
