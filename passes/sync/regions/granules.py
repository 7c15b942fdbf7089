"""What one counter stands for: the smallest box in which every accessed box lies whole."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from tvm import tirx

from ....builtins.errors import LanguageError, SyncWarning
from .accesses import Kind
from .copies import Copies
from .coverage import volumes
from .footprints import Footprints
from .space import Loop
from .symbols import Symbols
from .tensor_accesses import TensorAccesses


@dataclass(frozen=True, eq=False)
class Granules:
    """A tensor's copy cut into boxes of equal size, the last of an axis possibly smaller.

    Attributes:
        size: of a granule, in elements.
        counts: granules along each axis.
    """

    shape: tuple[int, ...]
    size: tuple[int, ...]

    @property
    def counts(self) -> tuple[int, ...]:
        return tuple(-(-n // g) for n, g in zip(self.shape, self.size, strict=True))

    @property
    def text(self) -> str:
        """``16 x 32``: elements along each axis."""
        return " x ".join(map(str, self.size))

    @property
    def total(self) -> int:
        return math.prod(self.counts)

    def of(self, footprints: Footprints) -> np.ndarray:
        """The granule's number, for each iteration."""
        number = self.at(footprints.low)
        return number.reshape(np.shape(number) or (1,) * footprints.mask.ndim)

    def at(self, low: Sequence[np.ndarray]) -> np.ndarray:
        """The number of the granule in which boxes that begin at ``low`` lie."""
        number = np.int64(0)
        for start, size, count in zip(low, self.size, self.counts, strict=True):
            if count > 1:
                number = number * count + np.minimum(start // size, count - 1)
        return np.asarray(number)

    def of_copies(self, copies: Footprints) -> Iterator[np.ndarray]:
        """The numbers of the granules in which each copy of a plan lies, or of which it brings
        several, in their order."""
        low, size = (np.array(arrays).T.tolist() for arrays in (copies.low, copies.size))
        for starts, extents in zip(low, size, strict=True):
            sides = zip(starts, extents, self.size, strict=True)
            axes = [np.arange(start // n, -(-(start + extent) // n)) for start, extent, n in sides]
            yield np.ravel_multi_index(np.ix_(*axes), self.counts).ravel()

    def index(
        self,
        footprints: Footprints,
        symbols: Symbols,
        left: Sequence[Loop],
        *,
        in_place: bool = False,
    ) -> tirx.PrimExpr:
        """The same as an expression that can stand at the access, outside the loops ``left``.

        Args:
            in_place: whether it may name what the program binds; see ``Symbols.start``.
        """
        number: tirx.PrimExpr = tirx.IntImm("int32", 0)
        loops = [*left, *footprints.access.inner]
        for axis, (size, count) in enumerate(zip(self.size, self.counts, strict=True), 1):
            if count > 1:
                start = symbols.start(footprints, axis, loops, in_place=in_place)
                number = number * count + start // size
        return symbols.simplified(number, footprints.access)

    def of_cells(self, traffic: TensorAccesses) -> np.ndarray:
        """The granule of each cell of one copy, in the order of the cells."""
        number = np.int64(0)
        grid = traffic.grid
        for axis, (cells, cell) in enumerate(zip(grid.cells, grid.cell, strict=True)):
            at = np.arange(cells) * cell // self.size[axis]
            shape = [1] * len(grid.cells)
            shape[axis] = -1
            number = number * self.counts[axis] + at.reshape(shape)
        return np.broadcast_to(number, grid.cells).ravel()


def choose_granules(traffic: TensorAccesses, wanted: tuple[int, ...] | None = None) -> Granules:
    """The granules of a tensor: along each axis the least size that divides no accessed box.

    If two of a plan's copies would share a granule, copies may bring several: the largest size then
    at whose multiples copies begin and end, if it divides no box that the kernel accesses.

    Args:
        wanted: the user's choice, by axis.

    Raises:
        LanguageError: ``wanted`` divides a box, or has not as many axes as the tensor; or a box
            begins before the first element of an axis.
    """
    shape = traffic.grid.shape
    if wanted is not None and len(wanted) != len(shape):
        raise LanguageError(
            f"tileweave.granule={wanted} of {traffic.tensor.name} has {len(wanted)} axes; expected "
            f"{len(shape)}, those behind the rank's"
        )
    every = list(traffic.footprints.values())
    size = []
    for axis, extent in enumerate(shape):
        bounds = [b.bounds[axis] for b in every]
        if wanted is not None:
            for footprints, (low, high) in zip(every, bounds, strict=True):
                if not _whole(low, high, wanted[axis]):
                    raise LanguageError(
                        f"{footprints.access.text}: tileweave.granule={wanted} of "
                        f"{traffic.tensor.name} divides what it accesses on axis {axis}; expected "
                        f"a multiple of {_least(bounds, extent)} there{footprints.access.location}"
                    )
            size.append(wanted[axis])
        else:
            size.append(_least(bounds, extent))
            _warn_of_whole_axis(every, axis, extent, size[-1])
    granules = Granules(shape, tuple(size))
    for footprints in every:
        _refuse_before(footprints, granules)
    if wanted is None and np.any(_times_copied(traffic, granules) > 1):
        return Granules(shape, tuple(_cut(traffic, axis, n) for axis, n in enumerate(size)))
    return granules


def _warn_of_whole_axis(every: list[Footprints], axis: int, extent: int, size: int) -> None:
    """Warn that one counter stands for all of an axis of which every access touches a part only."""
    bounds = [b.bounds[axis] for b in every]
    if size < extent or any(np.any(high - low >= extent) for low, high in bounds):
        return
    divided = [_least([b for b in bounds if b is not one], extent) < extent for one in bounds]
    footprints = every[divided.index(True)] if True in divided else every[-1]
    warnings.warn(
        f"{footprints.access.text}: no granule of axis {axis} but all its {extent} elements fits the "
        "accesses to the tensor, so each wait is for all of them; expected tiles that begin at "
        f"multiples of their size{footprints.access.location}",
        SyncWarning,
        stacklevel=2,
    )


def _refuse_before(footprints: Footprints, granules: Granules) -> None:
    """Refuse a box that TileLang clips at the start of an axis, where its start counts."""
    for axis in footprints.before:
        if footprints.access.kind != "read" or granules.counts[axis] > 1:
            raise footprints.refused(
                "begins before the first element of an axis", "indices from 0 on, or a condition"
            )


def _cut(traffic: TensorAccesses, axis: int, least: int) -> int:
    """The size at whose multiples copies begin and end, or ``least`` if it divides what the kernel
    accesses."""
    extent, copies = traffic.grid.shape[axis], traffic.copies
    assert copies is not None
    size = int(np.gcd.reduce(np.concatenate(copies.bounds[axis]) % extent))
    in_kernel = [b for b in traffic.footprints.values() if b is not copies]
    fits = size and all(_whole(*b.bounds[axis], size) for b in in_kernel)
    return size if fits else least


def _whole(low: np.ndarray, high: np.ndarray, size: int) -> bool:
    return bool(np.all(low // size == np.maximum(high - 1, low) // size))


def _least(bounds: list, extent: int) -> int:
    extents = sorted({int(n) for low, high in bounds for n in np.unique(high - low) if n > 0})
    candidates = set(extents[:8])
    for n in (2, len(extents[:8])):
        candidates |= {math.lcm(*some) for some in itertools.combinations(extents[:8], n)}
    for size in sorted(c for c in candidates if c < extent):
        if all(_whole(low, high, size) for low, high in bounds):
            return size
    return extent


@dataclass(eq=False)
class Counter:
    """Counts the elements that arrive in each granule of each copy, on every rank that waits.

    Attributes:
        kind: the kind of access it counts.
        unit: elements that it counts as one.
        waiting: by owner of a copy, which ranks wait for it, a bit each.
        arrivals: units that arrive in a launch, by copy and granule.
        own: granules of each copy that their owner's kernel finds there when it starts, for the
            share of the rank: granules from ``rank * own`` on, as many; 0 for none.
        at_exit: whether the owner waits for it at the end of the launch, rather than a read.
        also_at_exit: whether the owner waits at the end of the launch for all its granules, too,
            since reads may wait for some of them only.
        by_copies: whether a plan's copies wait for it, whose streams set it back to 0.
        users: the accesses of the kernel that wait for it.
    """

    traffic: TensorAccesses
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
        """Whether other ranks than the owner wait for a copy; then each of them has its own counter
        of every copy."""
        return any(bits & ~(1 << home) for home, bits in enumerate(self.waiting))

    @property
    def is_of_copies(self) -> bool:
        """Whether it counts copies of a plan rather than elements."""
        return self.kind == "write" and self.traffic.copies is not None


def counter_of(
    traffic: TensorAccesses, kind: Kind, granules: Granules, users: list[Footprints]
) -> Counter:
    """The counter of what accesses of ``kind`` bring, for the accesses ``users`` to wait for."""
    if traffic.copies is not None and kind == "write":
        arrivals, brought = _copied_once(traffic, granules), [np.ones(1, np.int64)]
    else:
        arrivals = _arriving(traffic, kind, granules)
        brought = [np.unique(b.where(elements_of(b))[0]) for b in traffic.of_kind(kind)]
    unit = int(np.gcd.reduce(np.concatenate([arrivals.ravel(), *brought]), initial=0)) or 1
    waiting = [0] * traffic.world_size
    for footprints in users:
        for rank, home in footprints.ranks_and_homes():
            waiting[home] |= 1 << rank
    in_kernel = [b for b in users if not isinstance(b.access, Copies)]
    counter = Counter(traffic, kind, granules, unit, waiting, arrivals // unit, users=in_kernel)
    if counter.is_of_copies and not counter.pulled:
        counter.own = _own_share(traffic, granules)
    return counter


def _arriving(traffic: TensorAccesses, kind: Kind, granules: Granules) -> np.ndarray:
    """Elements that arrive in each granule of each copy."""
    grid = traffic.grid
    times = traffic.painted[kind].times.reshape(traffic.world_size, -1)
    elements = times * volumes(grid.shape, grid.cell).ravel()
    of = granules.of_cells(traffic)
    return np.stack([np.bincount(of, e, minlength=granules.total) for e in elements]).astype(int)


def _own_share(traffic: TensorAccesses, granules: Granules) -> int:
    """How many granules each rank copies for itself before its kernel starts, if they are its share
    of the copy, in the order of the ranks; else 0."""
    copies = traffic.copies
    assert copies is not None
    share, rest = divmod(granules.total, traffic.world_size)
    if rest or not share:
        return 0
    for copy, numbers in zip(copies.access.each, granules.of_copies(copies), strict=True):
        before = copy.before and copy.rank == copy.start[0]
        mine = numbers // share == copy.start[0]
        if np.any(mine != before):
            return 0
    return share


def _copied_once(traffic: TensorAccesses, granules: Granules) -> np.ndarray:
    """How many copies bring each granule: a stream writes a flag, it does not add to it, so there
    must be one that brings all of it, and no write of the kernel."""
    copies, count = traffic.copies, _times_copied(traffic, granules)
    assert copies is not None
    if traffic.in_kernel("write", "add") or np.any(count > 1):
        others = "two copies bring" if np.any(count > 1) else "the kernel, too, brings"
        raise LanguageError(
            f"{copies.access.text}: {others} parts of what is read at once; expected one copy for "
            f"it{copies.access.location}"
        )
    return count


def _times_copied(traffic: TensorAccesses, granules: Granules) -> np.ndarray:
    """How many copies of a plan bring something of each granule, by its owner."""
    count = np.zeros((traffic.world_size, granules.total), np.int64)
    if (copies := traffic.copies) is not None:
        for copy, numbers in zip(copies.access.each, granules.of_copies(copies), strict=True):
            count[copy.start[0], numbers] += 1
    return count


def elements_of(footprints: Footprints) -> np.ndarray:
    """Elements in the box of each iteration, as an array over all in which boxes differ."""
    count = np.int64(1)
    for size in footprints.size:
        count = count * size
    return np.broadcast_to(count, np.broadcast_shapes(*(a.shape for a in (*footprints.low, count))))
