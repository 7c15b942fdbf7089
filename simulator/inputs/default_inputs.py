"""Generated inputs for a program that comes without inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ...runtime.plans.parameters import dynamic_extents
from ...runtime.plans.regions import Region
from ...runtime.plans.steps import Launch
from ..case import Case
from ..machine.executable import Executable
from ..memory.values import is_float, numpy_dtype
from .index_ranges import Range, index_ranges
from .inputs import checked_inputs

INITIAL_ZEROS = "zeros at first"
"""Origin of integers that the program writes, such as flags."""


def described_inputs(
    executable: Executable,
    seed: int,
    scalars: Mapping[str, Any],
    supplied: Sequence[Mapping[str, Any]] | None = None,
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Return inputs for every rank, and how each tensor that is not supplied was made, by name.

    Tensors that are only read get normal numbers, or random integers where the program shows their
    range (``index_ranges``); other integers (flags, counters) are zero. Floats that the program
    writes are no inputs: they are poison until written.

    Args:
        scalars: values by name, of the scalars and of the dynamic extents.
        supplied: inputs of every rank that are not invented. ``scalars`` precede them. Names that
            this program lacks are ignored.

    Raises:
        TileWeaveError: a scalar or an extent without a value, or an illegal value.
    """
    rng = np.random.default_rng(seed)
    parameters = executable.parameters
    names = {p.name for p in parameters} | set(dynamic_extents(parameters))
    inputs = checked_inputs(
        executable,
        [
            {name: value for name, value in {**values, **scalars}.items() if name in names}
            for values in supplied or [{}] * executable.world_size
        ],
    )
    case = Case(executable, inputs, 1)
    ranges, origins = _ranges(case), {}
    for tensors, shapes in zip(inputs, case.shapes, strict=True):
        for p in parameters:
            if p.shape is None or p.name in tensors:
                continue
            dtype, shape, is_read = numpy_dtype(p.dtype), shapes[p.name], p.name not in case.written
            if is_read and p.name in ranges:
                low, high = ranges[p.name]
                tensors[p.name] = rng.integers(low, high, shape, endpoint=True).astype(dtype)
                origins[p.name] = f"random integers {low} to {high}"
            elif is_read and dtype.itemsize == 1 and not is_float(dtype):
                tensors[p.name] = rng.integers(0, 128, shape).astype(dtype)
                origins[p.name] = "random integers 0 to 127"
            elif not is_float(dtype):
                tensors[p.name] = np.zeros(shape, dtype)
                origins[p.name] = "zeros" if is_read else INITIAL_ZEROS
            elif is_read:
                tensors[p.name] = rng.standard_normal(shape).astype(dtype)
                origins[p.name] = "random numbers"
    return inputs, origins


def _ranges(case: Case) -> dict[str, Range]:
    """Return the ranges of the integers that every kernel shows which reads them, by parameter."""
    ranges: dict[str, Range] = {}
    world_size = case.executable.world_size
    for rank, calls in enumerate(case.calls):
        for step in (s for s, _ in calls[0].steps if isinstance(s, Launch)):
            regions = {n: v for n, v in step.arguments.items() if isinstance(v, Region)}
            shapes = {name: region.shape for name, region in regions.items()}
            for name, (low, high) in index_ranges(step.program, world_size, shapes).items():
                if name not in regions:
                    continue
                parameter = regions[name].parameter.name
                previous = ranges.get(parameter, (low, high))
                ranges[parameter] = max(low, previous[0]), min(high, previous[1])
        if rank == 0 and not ranges:
            break
    return {name: (low, high) for name, (low, high) in ranges.items() if low <= high}
