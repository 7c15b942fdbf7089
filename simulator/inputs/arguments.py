"""Checks of the arguments of ``tw.simulate``, before anything runs or is allocated."""

from __future__ import annotations

import math
import numbers
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from ...builtins.errors import TileWeaveError
from ...passes.ir.sizes import LARGEST, MAX_RANKS
from ...runtime.plans.parameters import Parameter, Shape
from ..memory.values import numpy_dtype

_MAX_CALLS = 1 << 20
"""Largest number of calls of a plan on all ranks. All are traced before the first one runs."""
_SHADOW = 25
"""Bytes that the simulator keeps for each element besides its value."""
_BLOCK = 1 << 7
"""Bytes that the simulator keeps for each thread block of a rank: its name."""


def check_numbers(
    op: str, world_size: Any, schedules: Any, seed: Any, epochs: Any, resident_blocks: Any
) -> None:
    """Refuse arguments that are not integers or out of range. ``resident_blocks`` may be None.

    Raises:
        TileWeaveError: names the argument, its value and what is legal.
    """
    for name, value, maximum in (
        ("world_size", world_size, MAX_RANKS), ("schedules", schedules, LARGEST),
        ("epochs", epochs, _MAX_CALLS),
        ("resident_blocks", 1 if resident_blocks is None else resident_blocks, LARGEST),
    ):  # fmt: skip
        if not _is_integer(value) or not 1 <= value <= maximum:
            raise TileWeaveError(f"{op}: {name}={value!r}; expected an integer from 1 to {maximum}")
    if not _is_integer(seed):
        raise TileWeaveError(f"{op}: seed={seed!r}; expected an integer")
    if world_size * epochs > _MAX_CALLS:
        raise TileWeaveError(
            f"{op}: epochs={epochs} on {world_size} ranks; expected at most "
            f"{_MAX_CALLS // int(world_size)}"
        )


def check_count(op: str, name: str, value: Any) -> None:
    """Refuse a number of processes or blocks that is no integer from 1 on, or None.

    Raises:
        TileWeaveError: names the operation ``op``, the argument and its value.
    """
    if value is not None and (not _is_integer(value) or value < 1):
        raise TileWeaveError(f"{op}: {name}={value!r}; expected an integer from 1 on, or None")


def check_exhaustive(schedules: Any, seed: Any, level: str, max_interleavings: Any) -> None:
    """Refuse arguments that an exhaustive simulation does not use.

    Raises:
        TileWeaveError: names the argument, its value and what is legal.
    """
    for name, value, legal in (("schedules", schedules, 1), ("seed", seed, 0)):
        if value != legal:
            raise TileWeaveError(
                f"simulate: {name}={value} with exhaustive=True; expected {legal}, "
                "since no schedule is random"
            )
    if level != "tile":
        raise TileWeaveError(f"simulate: level={level!r} with exhaustive=True; expected 'tile'")
    if not _is_integer(max_interleavings) or max_interleavings < 1:
        raise TileWeaveError(
            f"simulate: max_interleavings={max_interleavings!r}; expected an integer from 1 on"
        )


def check_file(timeline: Any) -> None:
    """Refuse a value that is neither a file name nor None.

    Raises:
        TileWeaveError: names the value.
    """
    if timeline is not None and not isinstance(timeline, (str, os.PathLike)):
        raise TileWeaveError(f"simulate: timeline={timeline!r}; expected a file name")


def check_extent(name: str, value: Any) -> int:
    """Return ``value`` as a dynamic extent.

    Raises:
        TileWeaveError: not an integer, or out of range.
    """
    if not _is_integer(value) or not 0 <= value <= LARGEST:
        raise TileWeaveError(
            f"simulate: extent {name}={value!r}; expected a whole number from 0 on, of 31 bits"
        )
    return int(value)


def scalars_at(epoch: int, values: Mapping[str, Any], parameters: Iterable[Parameter]) -> dict:
    """Return the scalars of one call. Functions of the launch are evaluated.

    Raises:
        TileWeaveError: an illegal value, or a function that fails.
    """
    declared = {p.name: p for p in parameters}
    scalars = {}
    for name, value in values.items():
        text = f"{name}={value!r}"
        if callable(value):
            try:
                value = value(epoch)
            except Exception as error:
                raise TileWeaveError(
                    f"simulate: {name} of launch {epoch}: {type(error).__name__}: {error}; "
                    "expected a function that takes the number of the launch"
                ) from error
            text = f"{name}={value!r} in launch {epoch}"
        try:
            scalars[name] = declared[name].number(value)
        except ValueError as error:
            raise TileWeaveError(f"simulate: {text}; expected {error}") from None
    return scalars


def check_tensors(
    parameters: Iterable[Parameter], shapes: Sequence[Mapping[str, Shape]], free: int | None = None
) -> None:
    """Refuse tensors that do not fit into memory, before they are allocated.

    Args:
        shapes: shapes of all tensors, one dict per rank, of the rank's own part.
        free: free memory in bytes; None: that of the system.

    Raises:
        TileWeaveError: names the largest tensor, the memory needed and the free memory.
    """
    need = {
        p.name: sum(math.prod(s[p.name]) for s in shapes)
        * (_SHADOW + numpy_dtype(p.dtype).itemsize)
        for p in parameters
        if p.shape is not None
    }
    largest = max(need, key=lambda name: need[name], default="")
    if largest:
        shape = " x ".join(map(str, shapes[0][largest])) or "one element"
        _require_memory(
            sum(need.values()), f"tensors such as {largest} ({shape})", len(shapes), free
        )


def check_blocks(
    blocks: int, groups: int, launches: int, world_size: int, free: int | None = None
) -> None:
    """Refuse grids whose vector clocks do not fit into memory, before these are allocated.

    Args:
        blocks: number of blocks of one rank.
        groups: number of thread groups of a block, each with an entry in a vector clock.
        launches: number of launches of one rank.

    Raises:
        TileWeaveError: names the number of blocks, the memory needed and the free memory.
    """
    clocks = 4 * world_size * blocks * (groups + 3) * (launches + 1)
    _require_memory(blocks * _BLOCK + clocks, f"{blocks} blocks", world_size, free)


def _require_memory(need: int, what: str, world_size: int, free: int | None) -> None:
    free = free_memory() if free is None else free
    if need > free:
        raise TileWeaveError(
            f"simulate: {what} on {world_size} ranks take {_size(need)} of memory; expected at "
            f"most the {_size(free)} that are free: smaller sizes, or fewer ranks"
        )


def free_memory() -> int:
    """Return the bytes that can be allocated without swapping."""
    try:
        with open("/proc/meminfo") as file:
            lines = dict(line.split(":", 1) for line in file)
        return int(lines["MemAvailable"].split()[0]) << 10
    except (OSError, KeyError, ValueError):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _size(count: int) -> str:
    """Return a number of bytes as text: ``1.5 GiB``."""
    for unit in ("KiB", "MiB", "GiB"):
        count_of_unit = count / 1024
        if count_of_unit < 1024:
            return f"{count_of_unit:.3g} {unit}"
        count = count // 1024
    return f"{count / 1024:.0f} TiB"


def _is_integer(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool | np.bool_)
