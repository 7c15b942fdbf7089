"""``tw.validate``: compare a program with the device functions that it is lowered to."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import ml_dtypes
import numpy as np
from tvm import tirx

from ..builtins.errors import brief_errors
from ..passes.ir.walk import nodes_in
from ..passes.lowering.places import stored_orders
from ..runtime.kernel.configured import configured, program_of
from .case import Case
from .inputs.arguments import check_numbers
from .inputs.default_inputs import described_inputs
from .inputs.inputs import Inputs, checked_inputs
from .machine.executable import Executable
from .machine.machine import Machine, outputs_of
from .memory.memory import Tensor
from .memory.values import is_float, numpy_dtype
from .report.errors import SimulationError, SimulationWarning
from .report.progress import Progress
from .schedules import run_schedule
from .simulate import LEVELS, executable_at

Key = tuple[int, str]
"""Number of a kernel and name of its implicit tensor; or 0 and the name of a parameter."""
Writes = dict[tuple[Key, int, int], np.ndarray]
"""Last write of each element as the number of its event, by tensor, rank and launch of the writer;
0 if the launch does not write the element."""


_TOLERANCE = 4
"""Largest difference between floats, in units of the last place of the tensor's largest number in
the program's least precise type: a sum in another order may round to the next number there."""


@brief_errors
def validate(
    program: Any,
    world_size: int,
    inputs: Inputs | None = None,
    arch: str = "sm_90a",
    schedules: int = 1,
    seed: int = 0,
    epochs: int = 2,
    pass_configs: Mapping[str, Any] | None = None,
    resident_blocks: int | None = None,
    progress: bool = False,
    sizes: Mapping[str, Any] | None = None,
) -> list[dict[str, np.ndarray]]:
    """Run ``program`` and the device functions that it is lowered to, and compare the two.

    Both levels must end without a fault. After the last launch every tensor of every rank, also a
    counter that the compiler added, must have the same values, floats within the error of reordered
    additions (``_TOLERANCE``). In each launch each rank must write the same elements.

    Args:
        inputs: as for ``simulate``; None: those that the command line generates.
        arch: ``sm_80`` or ``sm_90a``.
        others: as for ``simulate``.

    Returns:
        One dict per rank, parameter name -> array, after the last launch of the device level.

    Raises:
        SimulationError: a fault of a level, which its report names; or kind ``translation``: the
            report names tensor, rank, first element, both values, the number of elements that
            differ, and the last write of the first one at both levels.
        TileWeaveError: inputs do not match the program, or an argument is illegal.
    """
    check_numbers("validate", world_size, schedules, seed, epochs, resident_blocks)
    plan = program.plan if isinstance(program, Executable) else program
    plan = configured("validate", program_of("validate", plan, sizes), pass_configs)
    levels = {level: executable_at(plan, world_size, level, arch) for level in LEVELS}
    if inputs is None:
        inputs, _ = described_inputs(levels["tile"], seed, {})
    tiles = Case(levels["tile"], checked_inputs(levels["tile"], inputs), epochs)
    orders = {n: o for func in levels["tile"].functions for n, o in stored_orders(func).items()}
    given = checked_inputs(levels["device"], inputs)
    given = [{n: _stored(v, orders.get(n)) for n, v in values.items()} for values in given]
    cases = [(tiles, "tile"), (Case(levels["device"], given, epochs), "device")]
    for number in range(seed, seed + schedules):
        runs = [_run(*case, number, resident_blocks, progress) for case in cases]
        if faults := [run for run in runs if isinstance(run, SimulationError)]:
            raise _fault(runs, faults)
        tile, device = _Results(runs[0], {}), _Results(runs[1], orders)
        _compare(tile, device, _precision(levels["tile"]), number)
    return outputs_of(device.machine)


def _precision(executable: Executable) -> float:
    """Return the distance of 1 and the next number in the least precise type of the program."""
    types: set[str] = set()
    for func in executable.functions:
        accesses = nodes_in(func.body, tirx.BufferLoad, tirx.BufferStore)
        types |= {str(access.buffer.dtype) for access in accesses}
        types |= {str(cast.dtype) for cast in nodes_in(func.body, tirx.Cast)}
        blocks = nodes_in(func.body, tirx.SBlock)
        types |= {str(buffer.dtype) for block in blocks for buffer in block.alloc_buffers}
    floats = [d for d in map(numpy_dtype, types) if is_float(d)]
    return max((float(ml_dtypes.finfo(dtype).eps) for dtype in floats), default=0.0)


def _run(
    case: Case, level: str, seed: int, resident_blocks: int | None, progress: bool
) -> Machine | SimulationError:
    """Run one schedule at one level; return its machine, or its fault."""
    blocks = resident_blocks or case.executable.resident_blocks
    bar = Progress(f"{case.executable.plan.name}, {level} level", 1, progress)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SimulationWarning)
            return run_schedule(case, seed, blocks, bar)
    except SimulationError as error:
        return error


def _fault(runs: list[Machine | SimulationError], faults: list[SimulationError]) -> SimulationError:
    """Return the first fault, with the levels that have one."""
    levels = [level for level, run in zip(LEVELS, runs, strict=True) if run in faults]
    levels_text = f"only at the {levels[0]} level" if len(levels) == 1 else "at both levels"
    error = faults[0]
    return SimulationError(
        error.kind, f"{error.report}\n{levels_text}", seed=error.seed, event=error.event
    )


class _Results:
    """Tensors and writes of one schedule.

    Args:
        orders: places of the elements of tensors that are stored in another order, by name. The
            tensors of ``machine`` get the order of the program.

    Attributes:
        tensors: every tensor, by key and by the rank that has it; a symmetric one has rank None.
    """

    def __init__(self, machine: Machine, orders: Mapping[str, np.ndarray]) -> None:
        self.machine = machine
        self.tensors: dict[tuple[Key, int | None], Tensor] = {}
        keys: dict[int, Key] = {}
        named = {(0, name): tensors for name, tensors in machine.tensors.items()}
        for number, implicit in enumerate(machine.implicit.values(), 1):
            named |= {(number, name): tensors for name, tensors in implicit.items()}
        for key, tensors in named.items():
            for rank, tensor in enumerate(tensors):
                if keys.setdefault(id(tensor), key) == key:
                    self.tensors[key, None if tensor.symmetric else rank] = tensor
        self.writes = self._writes(keys)
        for place, written in self.writes.items():
            self.writes[place] = _loaded(written, orders.get(place[0][1]))
        for ((_, name), _), tensor in self.tensors.items():
            order = orders.get(name)
            tensor.data, tensor.poison = _loaded(tensor.data, order), _loaded(tensor.poison, order)
            tensor.writes.last = _loaded(tensor.writes.last, order)

    def _writes(self, keys: dict[int, Key]) -> Writes:
        memory, writes = self.machine.memory, {}
        for event, (_, _, tensor, key, epoch, is_write) in enumerate(memory.events.what):
            if not is_write or tensor is None:
                continue
            rank = int(memory.layout.place(int(memory.events.agent[event]))[0])
            place = keys[id(tensor)], rank, epoch
            if place not in writes:
                writes[place] = np.zeros(tensor.shape, np.int32)
            writes[place][key] = event
        return writes

    def describe(self, event: int, otherwise: str) -> str:
        return self.machine.memory.describe(event) if event else otherwise


def _loaded(array: np.ndarray, order: np.ndarray | None) -> np.ndarray:
    """Return elements, which are stored at the places ``order``, in the order of the program."""
    return array if order is None else array.reshape(-1)[order].reshape(array.shape)


def _stored(value: Any, order: np.ndarray | None) -> Any:
    """Return an input in the order in which it is stored: the inverse of ``_loaded``."""
    if order is None:
        return value
    stored = np.empty_like(value)
    stored.reshape(-1)[order] = value.reshape(-1)
    return stored


def _compare(tile: _Results, device: _Results, precision: float, seed: int) -> None:
    """Raise the first difference between the levels."""
    for report in (*_value_differences(tile, device, precision), *_write_differences(tile, device)):
        raise SimulationError("translation", report).in_schedule(seed)


def _value_differences(tile: _Results, device: _Results, precision: float) -> Iterator[str]:
    for (key, rank), tensor in tile.tensors.items():
        other, name = device.tensors[key, rank], tensor.name
        differs = _differ(tensor, other, precision)
        if not differs.any():
            continue
        index = _first(differs)
        owner = index[0] if rank is None else rank
        yield "\n".join(
            [
                f"{name} of rank {owner} has other values at the device level: "
                f"{_count(differs)}, the first at {name}{list(index)}",
                _value("tile", tile, tensor, index),
                _value("device", device, other, index),
            ]
        )


def _differ(first: Tensor, second: Tensor, precision: float) -> np.ndarray:
    """Return which elements differ; uninitialized ones equal each other."""
    differs, defined = first.poison != second.poison, ~first.poison
    if not is_float(first.dtype):
        return differs | ((first.data != second.data) & defined)
    x, y = (t.data.astype(np.float64) for t in (first, second))
    finite = np.abs(x[defined & np.isfinite(x)])
    scale = max(precision, float(ml_dtypes.finfo(first.dtype).eps)) * finite.max(initial=0.0)
    equal = np.isclose(x, y, rtol=0, atol=_TOLERANCE * scale, equal_nan=True)
    return differs | (~equal & defined)


def _value(level: str, results: _Results, tensor: Tensor, index: tuple) -> str:
    value = "uninitialized" if tensor.poison[index] else str(tensor.data[index])
    last = results.describe(int(tensor.writes.last[index]), "never written")
    return f"{level} level: {value}; last write: {last}"


def _write_differences(tile: _Results, device: _Results) -> Iterator[str]:
    for place in tile.writes.keys() | device.writes.keys():
        (_, name), rank, epoch = place
        shape = next(r.writes[place].shape for r in (tile, device) if place in r.writes)
        nothing = np.zeros(shape, np.int32)
        tile_writes = tile.writes.get(place, nothing)
        device_writes = device.writes.get(place, nothing)
        differs = (tile_writes != 0) != (device_writes != 0)
        if not differs.any():
            continue
        index = _first(differs)
        yield "\n".join(
            [
                f"rank {rank} writes other elements of {name} in launch {epoch} at the device "
                f"level: {_count(differs)}, the first at {name}{list(index)}",
                f"tile level: {tile.describe(int(tile_writes[index]), 'not written')}",
                f"device level: {device.describe(int(device_writes[index]), 'not written')}",
            ]
        )


def _first(mask: np.ndarray) -> tuple[int, ...]:
    return tuple(int(i) for i in np.unravel_index(int(np.argmax(mask)), mask.shape))


def _count(mask: np.ndarray) -> str:
    return f"{int(mask.sum())} of {mask.size} elements"
