"""Loads and stores of single elements, by one thread, several threads, or a T.Parallel.

As in TileLang, an access out of bounds of global memory loads zero or stores nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ..memory.threads import EACH_THREAD, ElementAccess, ParallelLoop, bits, clash
from ..memory.values import convert
from ..report.errors import SimulationError, two_values, uninitialized, unsupported
from .numbers import require_numbers

if TYPE_CHECKING:
    from ..machine.block import Frame, Mask, Tile
    from ..memory.memory import Access, Tensor


_REGISTERS = ("local", "local.var")
"""Scopes of registers that each thread has for itself, without a layout."""


@dataclass(frozen=True)
class GlobalRef:
    """A tensor parameter of a program as one statement accesses it."""

    name: str
    op: str
    loc: str
    clips: bool = False
    """True if TileLang guards the access: out of bounds, it loads zero or stores nothing."""
    constants: tuple[int, ...] = ()
    """Constant term of each index, if known."""

    def tensor(self, frame: Frame) -> Tensor:
        return frame.block.tensors[self.name]


def out_of_bounds(frame: Frame, name: str, shape: tuple, index: Any, loc: str) -> SimulationError:
    return SimulationError("bounds", _missing_element(frame, name, shape, index, loc))


def _missing_element(frame: Frame, name: str, shape: tuple, index: Any, loc: str) -> str:
    indices = ", ".join(map(str, index))
    return f"{name}[{indices}] of shape {tuple(shape)}, by {frame.block.place}\n --> {loc}"


def note_clipped(
    frame: Frame, name: str, shape: tuple, axis: int, index: list, constants: tuple, extent: int,
    loc: str,
) -> None:  # fmt: skip
    """Note, for a warning, an element that a guard skips, if only the constant term of an index
    moves it out of bounds. Programs rely on guards at the ends of tiles of other sizes than
    ``extent`` elements divide into, and where they compute indices from data."""
    constant = constants[axis] if constants else 0
    is_tail = shape[axis] % extent != 0
    if constant and not is_tail and 0 <= index[axis] - constant < shape[axis]:
        text = _missing_element(frame, name, shape, index, loc)
        frame.block.machine.clipped.setdefault((name, loc), f"no element {text}")


def select(
    frame: Frame, name: str, shape: tuple, index: list, loc: str, symmetric: bool = False,
    clips: bool = False, constants: tuple[int, ...] = (),
) -> tuple[tuple, np.ndarray | None, tuple | None]:  # fmt: skip
    """Return a NumPy index for these indices, the mask of the elements of the vector that it covers
    (None: all), and the shape of the vector (None: a scalar)."""
    if not any(isinstance(i, np.ndarray) for i in index):
        key = tuple(int(i) for i in index)
        outside = [axis for axis, n in enumerate(shape) if not 0 <= key[axis] < n]
        if outside:
            if clips and not (symmetric and outside[0] == 0):
                note_clipped(frame, name, shape, outside[0], key, constants, 1, loc)
                return key, np.zeros((), np.bool_), ()
            raise out_of_bounds(frame, name, shape, key, loc)
        return key, None, None
    space = np.broadcast_shapes(*(np.shape(i) for i in index))
    covered = active = _active(frame, space)
    for axis, (i, n) in enumerate(zip(index, shape, strict=True)):
        if np.size(i) and 0 <= np.min(i) and np.max(i) < n:
            continue
        fits = np.logical_and(np.greater_equal(i, 0), np.less(i, n))
        raises = (symmetric and axis == 0) or not clips
        if raises or constants:
            missing = ~np.broadcast_to(fits, space) if active is None else ~fits & active
            if missing.any():
                at = tuple(np.argwhere(np.broadcast_to(missing, space))[0])
                first = [int(np.broadcast_to(j, space)[at]) for j in index]
                if raises:
                    raise out_of_bounds(frame, name, shape, first, loc)
                extent = int(np.max(i)) - int(np.min(i)) + 1
                note_clipped(frame, name, shape, axis, first, constants, extent, loc)
        covered = np.broadcast_to(fits if covered is None else covered & fits, space)
    if covered is None or covered.all():
        return tuple(i if isinstance(i, np.ndarray) else int(i) for i in index), None, space
    return tuple(np.broadcast_to(i, space)[covered] for i in index), covered, space


def _ranges(frame: Frame, shape: tuple, index: list) -> tuple | None:
    """Return these indices as slices and integers if they are inside of ``shape`` and each axis of
    the T.Parallel is the index of one axis, in the same order; else None."""
    if frame.space is None or frame.active is not None:
        return None
    key: list[Any] = []
    axes = 0
    for i, extent in zip(index, shape, strict=True):
        if isinstance(i, np.ndarray):
            axis, part = frame.ranges.get(id(i), (-1, None))
            if part is None or axis != axes or not 0 <= part.start <= part.stop <= extent:
                return None
            axes += 1
            key.append(part)
        elif 0 <= i < extent:
            key.append(int(i))
        else:
            return None
    return tuple(key) if axes == len(frame.space) else None


def _active(frame: Frame, space: tuple) -> np.ndarray | None:
    """Return the mask of active elements of a vector of shape ``space``; None: all."""
    lanes = frame.lanes()
    if frame.space is None and (frame.mask.single is not None or frame.mask.full):
        return None
    if lanes is None:
        return None
    if len(space) > lanes.ndim:  # lanes of a vector
        lanes = lanes[..., None]
    elif len(space) < lanes.ndim:
        lanes = np.logical_or.reduce(lanes, axis=tuple(range(lanes.ndim - len(space))))
    shrink = tuple(a for a in range(len(space)) if space[a] == 1 and lanes.shape[a] != 1)
    if shrink:
        lanes = lanes.any(axis=shrink, keepdims=True)
    if lanes.ndim and all(a in (b, 1) for a, b in zip(lanes.shape, space, strict=True)):
        return np.broadcast_to(lanes, space)
    return None


def is_poisoned(poison: Any, frame: Frame) -> bool:
    """Return whether an active element is poison."""
    if poison is None:
        return False
    lanes = lanes_of(poison, frame)
    return bool(np.any(poison if lanes is None else poison & lanes))


def lanes_of(values: Any, frame: Frame) -> np.ndarray | None:
    """Return the mask of the active elements of an array; None: all, or its shape is another."""
    lanes = frame.lanes() if frame.block is not None else None
    if not isinstance(values, np.ndarray) or lanes is None or lanes.ndim > values.ndim:
        return None
    lanes = lanes.reshape(lanes.shape + (1,) * (values.ndim - lanes.ndim))  # of a vector
    fits = all(a in (b, 1) or b == 1 for a, b in zip(values.shape, lanes.shape, strict=True))
    return lanes if fits else None


def _select_elements(
    frame: Frame, ref: GlobalRef, tensor: Tensor, index: list
) -> tuple[tuple, np.ndarray | None, tuple | None]:
    """Return what ``select`` does for an ordinary access."""
    options = ref.loc, tensor.symmetric, ref.clips, ref.constants
    return select(frame, ref.name, tensor.shape, index, *options)


def load_global(frame: Frame, ref: GlobalRef, index: list) -> tuple[Any, Any]:
    """Return values and poison of ordinary loads."""
    tensor = ref.tensor(frame)
    key, covered, space = _select_elements(frame, ref, tensor, index)
    if space is None or (covered is None and _acts_together(frame, space)):
        access = element_access(frame, ref, frame.mask.overlapping, tensor, index, covered)
        return tensor.read(key, access)
    if space == ():
        return tensor.dtype.type(0), None
    values, poison = np.zeros(space, tensor.dtype), np.zeros(space, np.bool_)
    for thread_groups, in_group in _per_group(frame, covered, space):
        part = tuple(np.broadcast_to(i, space)[in_group] for i in index)
        access = element_access(frame, ref, thread_groups, tensor, index, in_group)
        values[in_group], bad = tensor.read(part, access)
        if bad is not None:
            poison[in_group] = bad
    return values, poison if poison.any() else None


def store_global(frame: Frame, ref: GlobalRef, index: list, values: Any, poison: Any) -> None:
    """Perform ordinary stores."""
    tensor = ref.tensor(frame)
    if not tensor.symmetric and is_poisoned(poison, frame):
        use = f"what is stored to {ref.name} is computed from"
        raise uninitialized(use, frame.block, ref.loc)
    values = convert(values, tensor.dtype)
    if isinstance(values, np.ndarray) and any(isinstance(i, np.ndarray) for i in index):
        space = np.broadcast_shapes(values.shape, *(np.shape(i) for i in index))
        index = [np.broadcast_to(i, space) if isinstance(i, np.ndarray) else i for i in index]
    elif isinstance(values, np.ndarray):
        values = _of_one_element(frame, ref.name, index, values, ref.loc)
        if values is None:
            return
    key, covered, space = _select_elements(frame, ref, tensor, index)
    if space == ():
        return
    require_numbers(frame, ref.name, index, values, covered, ref.loc)
    if space is None or (covered is None and _acts_together(frame, space)):
        if space is not None and not isinstance(values, np.ndarray):
            values = np.broadcast_to(values, space)
        access = element_access(frame, ref, frame.mask.overlapping, tensor, index, covered)
        tensor.write(key, values, access, poison)
        return
    values = np.broadcast_to(values, space)
    whole = [np.broadcast_to(i, space) for i in index]

    def parts(covered: np.ndarray | None) -> list[tuple[np.ndarray, Access]]:
        return [
            (in_group, element_access(frame, ref, thread_groups, tensor, index, in_group))
            for thread_groups, in_group in _per_group(frame, covered, space)
        ]

    accesses = parts(covered)
    if poison is None and tensor.write_first(whole, values, covered, accesses):
        return
    if frame.space is None:
        accesses = parts(_without_replicas(frame, tensor, index, values, covered))
    for in_group, access in accesses:
        part = tuple(i[in_group] for i in whole)
        bad = np.broadcast_to(poison, space)[in_group] if poison is not None else None
        tensor.write(part, values[in_group], access, bad)


def _of_one_element(frame: Frame, name: str, index: list, values: np.ndarray, loc: str) -> Any:
    """Return the value that active threads or points store to one element; None if none is active.

    Raises:
        SimulationError: different threads store different values.
    """
    space, active = frame.shape, np.ones(values.shape, np.bool_)
    if len(space) == values.ndim and all(
        n in (1, m) for n, m in zip(values.shape, space, strict=True)
    ):
        values, active = np.broadcast_to(values, space), np.broadcast_to(frame.on, space)
    if not active.any():
        return None
    stored = values[active]
    if stored.tobytes() != stored[:1].tobytes() * len(stored):
        accessed = _executed(frame, (1,), [np.zeros(values.shape, np.int64)], active)
        current = None if accessed is None else accessed()
        if current is not None and current.points.size == stored.size:
            if current.clash(bits(stored), stored.itemsize) is not None:
                raise _two_values(frame, name, index, loc)
    return stored[-1]


def _two_values(frame: Frame, name: str, index: tuple | list, loc: str) -> SimulationError:
    where = f"{frame.block.name()}, in launch {frame.block.epoch}"
    return two_values(name, tuple(map(int, index)), where, loc)


def _without_replicas(
    frame: Frame, tensor: Tensor, index: list, values: np.ndarray, covered: np.ndarray | None
) -> np.ndarray | None:
    """Return the mask of the elements to store, each by one thread, if all threads that store an
    element store the same value, such as their replicas of an element of a fragment."""
    space = values.shape
    active = frame.mask.on.reshape(-1, *[1] * (len(space) - 1))
    active = np.broadcast_to(active if covered is None else active & covered, space)
    flat = np.ravel_multi_index(
        tuple(np.broadcast_to(i, space)[active] for i in index), tensor.shape, mode="clip"
    )
    _, first, replica_of = np.unique(flat, return_index=True, return_inverse=True)
    stored = np.ascontiguousarray(values[active])
    if len(first) == len(flat) or stored.tobytes() != stored[first][replica_of].tobytes():
        return covered
    is_stored, positions = np.zeros(space, np.bool_), np.flatnonzero(active)
    is_stored.flat[positions[first]] = True
    return is_stored


def element_access(
    frame: Frame, ref: GlobalRef, thread_groups: tuple[int, ...], tensor: Tensor, index: list,
    mask: np.ndarray | None, scope: int = 0,
) -> Access:  # fmt: skip
    """Return an access by these thread groups; ``mask`` is the mask of its elements."""
    accessed = _executed(frame, tensor.shape, index, mask)
    return frame.block.access(thread_groups, ref.op, ref.loc, scope, accessed=accessed)


def _executed(
    frame: Frame, shape: tuple, index: list, mask: np.ndarray | None
) -> Callable[[], ElementAccess] | None:
    """Return the function of the elements at ``index`` and what accesses each; None if that is
    not known."""
    has_lanes = frame.space is not None and any(np.ndim(i) > len(frame.space) for i in index)
    if frame.space is not None and (frame.loop is None or has_lanes):
        return None
    if frame.space is not None and frame.active is not None:
        mask = frame.active if mask is None else frame.active & mask
    points = frame.loop_points
    return partial(_accessed, frame.mask, frame.space, frame.loop, points, shape, index, mask)


def _accessed(
    mask: Mask, space: tuple | None, loop: ParallelLoop | None, loop_points: np.ndarray | None,
    shape: tuple, index: list, covered: np.ndarray | None,
) -> ElementAccess:  # fmt: skip
    """Return the elements at ``index`` and the thread or point of T.Parallel that accesses each."""
    flat: Any = 0
    for i, extent in zip(index, shape, strict=True):
        flat = flat * extent + i
    flat = np.asarray(flat)
    if space is not None:
        points = np.arange(int(np.prod(space))) if loop_points is None else loop_points
        points, flat = points.reshape(space), np.broadcast_to(flat, space)
    elif flat.shape[:1] == mask.on.shape and mask.single is None:
        points = np.arange(len(flat)).reshape(-1, *[1] * (flat.ndim - 1))
        points = np.broadcast_to(points, flat.shape)
    else:
        points = mask.threads
        points, flat, covered = (
            np.repeat(points, flat.size),
            np.tile(flat.reshape(-1), len(points)),
            None,
        )
    executors = EACH_THREAD if loop is None else loop
    if covered is None:
        return ElementAccess(executors, flat.reshape(-1), points.reshape(-1))
    covered = np.broadcast_to(covered, flat.shape)
    return ElementAccess(executors, flat[covered], points[covered])


def _acts_together(frame: Frame, space: tuple) -> bool:
    """Return whether the active threads perform one access to elements of shape ``space``: in
    T.Parallel, in one thread group, or because the elements are the same for all threads."""
    is_same = space[:1] != frame.mask.on.shape
    return frame.space is not None or len(frame.mask.overlapping) == 1 or is_same


def _per_group(frame: Frame, covered: np.ndarray | None, space: tuple):
    """Yield thread groups with masks of their elements. In T.Parallel all groups act together."""
    everything = np.ones(space, np.bool_) if covered is None else covered
    if frame.space is not None:
        yield frame.mask.overlapping, everything
        return
    for thread_groups, threads in frame.mask.by_group:
        if len(space) > 1:
            threads = threads.reshape(threads.shape + (1,) * (len(space) - 1))
        in_group = everything & threads
        if in_group.any():
            yield thread_groups, in_group


def uniform(
    value: Any, frame: Frame, loc: str,
    what: str = "an operand that differs between the threads of one operation",
) -> int:  # fmt: skip
    """Return an integer that is equal for all active threads; ``what`` differs otherwise."""
    if isinstance(value, np.ndarray):
        active = value[frame.mask.on] if value.shape == frame.mask.on.shape else value
        if not (active == active.flat[0]).all():
            raise unsupported(what, loc)
        value = active.flat[0]
    return int(value)


def of_threads(value: Any, frame: Frame, lanes: int = 1) -> np.ndarray:
    """Return a value for each active thread, with an axis for the lanes if there are several."""
    threads = frame.mask.threads
    tail = (lanes,) if lanes > 1 else ()
    value = np.asarray(value)
    per_thread = value.ndim > len(tail) and frame.mask.single is None
    if per_thread:
        return np.broadcast_to(value, frame.mask.on.shape + tail)[threads]
    return np.broadcast_to(value, (len(threads), *tail))


def load_tile(frame: Frame, tile: Tile, index: list, loc: str) -> tuple[Any, Any]:
    """Return values and poison of loads from shared memory or registers."""
    if tile in frame.points:
        select(frame, tile.name, tile.shape, index, loc)
        copies, key = frame.points[tile], _key_of_points(frame, tile, index, loc)
        bad = read_poison(
            frame, copies, key, None if copies.poison is None else copies.poison[key], loc
        )
        require_one_value(frame, copies, bad, loc)
        return copies.data[key], bad
    frame.block.use(tile, frame.mask.overlapping)
    data, poison = tile.data, tile.poison
    if tile.by_thread:
        thread = frame.mask.single
        if thread is not None:
            data, poison = data[thread], None if poison is None else poison[thread]
        elif frame.space is None:
            return _load_by_thread(frame, tile, index, loc)
        else:
            data, poison = tile.agreed(frame.mask.threads)
    key, covered = _ranges(frame, tile.shape, index), None
    if key is None:
        key, covered, _ = select(frame, tile.name, tile.shape, index, loc)
    values, bad = data[key].copy(), None if poison is None else poison[key].copy()
    if covered is not None:
        values, bad = (
            None if part is None else _scattered(part, covered) for part in (values, bad)
        )
    require_one_value(frame, tile, bad, loc)
    return values, read_poison(frame, tile, key, bad, loc)


def read_poison(frame: Frame, tile: Tile, key: Any, poison: Any, loc: str) -> Any:
    """Return the mask of the poison that a line reads at ``key``; None if there is none."""
    if poison is None or not poison.any():
        return None
    frame.block.note_poison(tile, key, loc)
    return poison


def _scattered(values: np.ndarray, covered: np.ndarray) -> np.ndarray:
    """Return the values at the places of a mask, and zero elsewhere."""
    scattered = np.zeros(covered.shape, values.dtype)
    scattered[covered] = values
    return scattered


def require_one_value(frame: Frame, tile: Tile, poison: Any, loc: str) -> None:
    """Refuse a load of a value that differs between threads or points of a T.Parallel."""
    if tile.parted and is_poisoned(poison, frame):
        raise unsupported(
            f"{tile.name}, which differs between threads or points of T.Parallel,", loc
        )


def _key_of_points(frame: Frame, tile: Tile, index: list, loc: str) -> tuple:
    space = frame.space
    assert space is not None
    if any(np.ndim(i) > len(space) for i in index):
        raise _vector_of_points(tile, loc)
    points = np.arange(int(np.prod(space))).reshape(space)
    positions = [np.broadcast_to(i, space) for i in index]
    if frame.active is not None:  # indices of inactive points may be out of bounds
        positions = [np.where(frame.active, i, 0) for i in positions]
    return points, *positions


def _load_by_thread(frame: Frame, tile: Tile, index: list, loc: str) -> tuple[Any, Any]:
    threads = np.arange(len(frame.mask.on))
    lanes = any(np.ndim(i) > 1 or np.shape(i)[:1] not in ((), threads.shape) for i in index)
    row = threads[:, None] if lanes else threads
    _, covered, _ = select(frame, tile.name, tile.shape, index, loc)
    if covered is not None:
        index = [np.where(covered, i, 0) if isinstance(i, np.ndarray) else i for i in index]
    key = (row, *index)
    bad = None if tile.poison is None else tile.poison[key]
    if bad is not None:  # inactive threads may not have written theirs
        bad = bad & (frame.mask.on[:, None] if bad.ndim > 1 else frame.mask.on)
    return tile.data[key], read_poison(frame, tile, key, bad, loc)


def store_tile(frame: Frame, tile: Tile, index: list, values: Any, poison: Any, loc: str) -> None:
    """Store to shared memory or registers."""
    values = convert(values, tile.dtype)
    require_numbers(frame, tile.name, index, values, lanes_of(values, frame), loc)
    own_copies = tile.scope in _REGISTERS and frame.space is None
    if own_copies and (tile.by_thread or not frame.mask.full or _differs(index, values)):
        tile.spread(len(frame.mask.on))
        if frame.mask.single is not None:
            select(frame, tile.name, tile.shape, index, loc)
            key = (frame.mask.single, *index)
        else:
            select(frame, tile.name, tile.shape, index, loc)
            threads = frame.mask.threads
            parts = [i[threads] if _of_threads(i, frame) else i for i in index]
            wide = any(np.ndim(i) > 1 or (np.ndim(i) and not _of_threads(i, frame)) for i in index)
            key = (threads[:, None] if wide else threads, *parts)
            values = values[threads] if _of_threads(values, frame) else values
            if poison is not None and _of_threads(poison, frame):
                poison = poison[threads]
        tile.data[key] = values
        frame.block.set_poison(tile, key, poison)
        return
    if frame.space is not None and tile.scope in _REGISTERS and (
        tile in frame.points or not any(isinstance(i, np.ndarray) for i in index)
    ):  # fmt: skip
        _store_of_points(frame, tile, index, values, poison, loc)
        return
    _refuse_vector_of_points(frame, tile, index, values, loc)
    box = _ranges(frame, tile.shape, index) if np.shape(values) in ((), frame.space) else None
    if box is not None:
        _put(frame, tile, box, values, poison, loc)
        return
    if isinstance(values, np.ndarray) and any(isinstance(i, np.ndarray) for i in index):
        space = np.broadcast_shapes(values.shape, *(np.shape(i) for i in index))
        index = [np.broadcast_to(i, space) if isinstance(i, np.ndarray) else i for i in index]
    elif isinstance(values, np.ndarray):
        values = _of_one_element(frame, tile.name, index, values, loc)
        if values is None:
            return
        poison = np.any(poison) if poison is not None else None
    key, covered, _ = select(frame, tile.name, tile.shape, index, loc)
    if covered is not None:
        values = np.broadcast_to(values, covered.shape)[covered]
        poison = None if poison is None else np.broadcast_to(poison, covered.shape)[covered]
    _put(frame, tile, key, values, poison, loc)
    accessed = _executed(frame, tile.shape, index, covered) if tile.is_shared else None
    if accessed is not None and poison is None:
        element = clash(tile.data, key, values, accessed)
        if element is not None:
            at = np.unravel_index(element, tile.shape)
            raise _two_values(frame, tile.name, at, loc)


def _refuse_vector_of_points(frame: Frame, tile: Tile, index: list, values: Any, loc: str) -> None:
    """Refuse a store of vectors that differ between points of T.Parallel to the same registers."""
    if frame.space is None or tile.scope not in _REGISTERS or np.ndim(values) <= len(frame.space):
        return
    if all(np.size(i) in (1, values.shape[-1]) for i in index):
        raise _vector_of_points(tile, loc)


def _vector_of_points(tile: Tile, loc: str) -> SimulationError:
    return unsupported(f"a vector of {tile.name} in each point of T.Parallel", loc)


def _put(frame: Frame, tile: Tile, key: tuple, values: Any, poison: Any, loc: str) -> None:
    frame.block.overwrite(tile)
    if frame.block.stores:
        frame.block.require_unread(tile, key, loc)
    tile.data[key] = values
    frame.block.set_poison(tile, key, poison)


def _store_of_points(
    frame: Frame, tile: Tile, index: list, values: Any, poison: Any, loc: str
) -> None:
    space = frame.space
    assert space is not None
    select(frame, tile.name, tile.shape, index, loc)
    if tile not in frame.points:
        frame.points[tile] = tile.for_points(space, frame.mask.threads)
    active = frame.on
    key = tuple(np.broadcast_to(i, space)[active] for i in _key_of_points(frame, tile, index, loc))
    copies = frame.points[tile]
    copies.data[key] = np.broadcast_to(values, space)[active]
    bad = None if poison is None else np.broadcast_to(poison, space)[active]
    frame.block.set_poison(copies, key, bad)


def _differs(index: list, values: Any) -> bool:
    return any(isinstance(v, np.ndarray) for v in (*index, values))


def _of_threads(value: Any, frame: Frame) -> bool:
    return isinstance(value, np.ndarray) and value.shape[:1] == frame.mask.on.shape
