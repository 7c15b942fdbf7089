"""``tw.simulate``: run a program of W ranks on the CPU, in many schedules."""

from __future__ import annotations

import numbers
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from ...builtins.errors import TileWeaveError
from ...passes.hidden import Hidden
from ...passes.sizes import LARGEST
from ..configured import configured
from ..parameters import Parameter, dynamic_extents, shapes_of
from .arrivals import refuse_surplus, unconsumed
from .drawing import draw
from .errors import SimulationError, SimulationWarning
from .executable import Executable
from .machine import Machine
from .memory import Tensor
from .render import writer
from .timeline import Recorder
from .values import is_float, numpy_dtype

Scalar = float | int | Callable[[int], Any]
Inputs = Sequence[Mapping[str, Any]]


def simulate(
    program: Any,
    world_size: int,
    inputs: Inputs | None = None,
    schedules: int = 1,
    seed: int = 0,
    epochs: int = 3,
    resident_blocks: int = 4,
    progress: bool = False,
    timeline: str | Path | None = None,
    pass_configs: Mapping[str, Any] | None = None,
) -> list[dict[str, np.ndarray]]:
    """Run ``program`` on ``world_size`` simulated ranks and return every rank's tensors.

    Memory is weak, blocks interleave at random, launches follow each other without a barrier
    between ranks. What nothing orders is a fault even where the values happen to be right.

    Args:
        program: a ``@T.prim_func``, or a ``@tw.plan``.
        inputs: one dict a rank, parameter name -> NumPy array (ml_dtypes for bfloat16 and fp8), of
            the rank's own part for a symmetric tensor; a scalar is a number or a callable
            epoch -> number. Tensors not given are poison until written. A tensor that multimem
            operations access is a multicast address: its copy on each rank is an input and a
            result like any tensor, or it is the name of the symmetric tensor it stands for.
        schedules: how many interleavings to try.
        seed: of the first; the others follow it.
        epochs: calls of the program on each rank, back to back.
        resident_blocks: blocks of a rank, of all its streams, that fit on its GPU at a time.
        progress: show a bar on a terminal.
        timeline: draw the schedule that fails, else the last one, to this file: ``.html``,
            ``.svg`` or, with matplotlib, ``.png``.
        pass_configs: as for ``tw.compile``; of a plan, for each of its kernels.

    Returns:
        One dict a rank, parameter name -> array, after the last epoch of the last schedule.

    Raises:
        SimulationError: a fault; its report says who, where and with which seed.
        SimulationWarning: (a warning) flags are signalled that nobody waits for or reads.
        TileWeaveError: inputs that do not fit the program; a ``timeline`` that cannot be drawn.
    """
    write = None if timeline is None else writer(timeline)
    for name, value in (
        ("world_size", world_size), ("schedules", schedules), ("epochs", epochs),
        ("resident_blocks", resident_blocks),
    ):  # fmt: skip
        if not isinstance(value, numbers.Integral) or value < 1:
            raise TileWeaveError(f"simulate: {name}={value!r}; expected at least 1, an integer")
    executable = program
    if not isinstance(program, Executable):
        program = configured("simulate", program, pass_configs)
        executable = Executable(program, world_size)
    case = Case(executable, _checked(executable, inputs), epochs)
    name, lost = executable.plan.name, {}
    for number in _shown(range(seed, seed + schedules), name, progress):
        machine = case.machine(number, resident_blocks, Machine if write is None else Recorder)
        try:
            machine.run()
            refuse_surplus(machine.every_tensor())
        except SimulationError as error:
            fault = error.in_schedule(number)
            if write is not None:
                try:
                    write(draw(machine.timeline(name, number, fault)))
                except TileWeaveError as unwritten:  # the fault says more
                    warnings.warn(str(unwritten), SimulationWarning, stacklevel=2)
            raise fault from None
        found = unconsumed(machine.every_tensor())
        lost = found if number == seed else {k: v for k, v in lost.items() if k in found}
    for text in lost.values():
        warnings.warn(f"{name}: {text}", SimulationWarning, stacklevel=2)
    if write is not None:
        write(draw(machine.timeline(name, number)))
    return _outputs(machine)


def random_inputs(
    executable: Executable, seed: int, scalars: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Inputs for a program about which nothing else is known: normal numbers and bytes where it
    only reads, zeros in other tensors of integers (flags, counters, indices); poison elsewhere.

    Args:
        scalars: values by name, of the scalars and of the dynamic extents.

    Raises:
        TileWeaveError: one of them without a value.
    """
    rng = np.random.default_rng(seed)
    parameters = executable.parameters
    values = {p.name: _scalar(p, scalars) for p in parameters if p.shape is None}
    for name in dynamic_extents(parameters).keys() & scalars.keys():
        values[name] = _extent(name, scalars[name])
    given = [values] * executable.world_size
    case = Case(executable, given, 1)
    inputs: list[dict[str, Any]] = []
    for shapes, values in zip(case.shapes, given, strict=True):
        tensors: dict[str, np.ndarray] = {}
        for p in parameters:
            if p.shape is None:
                continue
            dtype = numpy_dtype(p.dtype)
            if dtype.itemsize == 1 and not is_float(dtype) and p.name not in case.written:
                tensors[p.name] = rng.integers(0, 128, shapes[p.name]).astype(dtype)
            elif not is_float(dtype):
                tensors[p.name] = np.zeros(shapes[p.name], dtype)
            elif p.name not in case.written:
                tensors[p.name] = rng.standard_normal(shapes[p.name]).astype(dtype)
        inputs.append(values | tensors)
    return inputs


def _scalar(p: Parameter, values: Mapping[str, Any]) -> Any:
    if p.name not in values:
        raise TileWeaveError(f"simulate: no value for {p.name}; expected a number")
    return values[p.name]


def _extent(name: str, value: Any) -> int:
    if not isinstance(value, numbers.Integral) or not 0 <= int(value) <= LARGEST:
        raise TileWeaveError(
            f"simulate: extent {name}={value!r}; expected a whole number from 0 on, of 31 bits"
        )
    return int(value)


def _checked(executable: Executable, inputs: Inputs | None) -> list[dict[str, Any]]:
    world_size, parameters = executable.world_size, executable.parameters
    if inputs is not None and (
        isinstance(inputs, Mapping) or not all(isinstance(i, Mapping) for i in inputs)
    ):
        raise TileWeaveError(f"simulate: inputs={inputs!r}; expected a list with one dict a rank")
    given = [dict(i) for i in inputs] if inputs is not None else [{} for _ in range(world_size)]
    if len(given) != world_size:
        raise TileWeaveError(f"simulate: {len(given)} inputs; expected one for each rank")
    names = {p.name for p in parameters} | set(dynamic_extents(parameters))
    for values in given:
        for name in values:
            if name not in names:
                raise TileWeaveError(
                    f"simulate: input {name!r}; expected {', '.join(sorted(names))}"
                )
        for name in dynamic_extents(parameters).keys() & values.keys():
            values[name] = _extent(name, values[name])
        for p in parameters:
            if p.shape is None:
                scalar = _scalar(p, values)
                if not (
                    callable(scalar) or (hasattr(scalar, "__float__") and np.ndim(scalar) == 0)
                ):
                    raise TileWeaveError(
                        f"simulate: {p.name}={scalar!r}; expected a number or a function of the "
                        "launch"
                    )
            elif isinstance(values.get(p.name), str):
                _require_alias(p, values[p.name], executable)
    return given


def _require_alias(p: Parameter, target: str, executable: Executable) -> None:
    same = [
        q.name for q in executable.parameters
        if q.symmetric and q.dtype == p.dtype and len(q.extents) == len(p.extents)
    ]  # fmt: skip
    if target not in same:
        raise TileWeaveError(
            f"simulate: {p.name} is the multicast address of {target!r}; expected a symmetric "
            f"tensor of its type and shape: {', '.join(same) or 'there is none'}"
        )


def _shown(seeds: range, name: str, progress: bool) -> Iterable[int]:
    """With a bar where there is a terminal and something to wait for."""
    hidden = None if progress and len(seeds) > 1 else True
    return tqdm(seeds, name, leave=False, unit="schedule", disable=hidden)


class Case:
    """Calls of a plan, one after another on every rank, with their inputs: what a schedule runs.

    Attributes:
        shapes: of every tensor, one dict a rank, of the rank's own part.
        written: names of the tensors that some call writes.
    """

    def __init__(
        self, executable: Executable, given: Sequence[Mapping[str, Any]], epochs: int
    ) -> None:
        parameters = executable.parameters
        names = {p.name for p in parameters if p.shape is not None}
        dynamic = dynamic_extents(parameters)
        self.executable = executable
        self.aliases = {n: v for n, v in given[0].items() if isinstance(v, str)}
        """Multicast parameters that stand for a symmetric one."""
        self.given = given = [
            {n: v for n, v in values.items() if n not in self.aliases} for values in given
        ]
        self.shapes = [
            shapes_of(
                parameters, {n: np.shape(v) for n, v in values.items() if n in names}, "simulate",
                {n: v for n, v in values.items() if n in dynamic},
            )
            for values in given
        ]  # fmt: skip
        scalars = [{n: v for n, v in i.items() if n not in names | dynamic.keys()} for i in given]
        self.calls = [
            [executable.call(rank, e, shapes, _at(e, values)) for e in range(epochs)]
            for rank, (shapes, values) in enumerate(zip(self.shapes, scalars, strict=True))
        ]
        calls = [call for calls in self.calls for call in calls]
        self.written = executable.written(calls)
        self.written |= {self.aliases[name] for name in self.written & self.aliases.keys()}
        self.multicasts = executable.multicasts(calls)
        self.thread_names = executable.divide()

    def machine(self, seed: int, resident_blocks: int, kind: type[Machine] = Machine) -> Machine:
        """One schedule, ready to run."""
        world_size = self.executable.world_size
        layout = self.executable.layout(self.calls)
        machine = kind(world_size, layout, seed, resident_blocks, self.thread_names)
        for p in self.executable.parameters:
            if p.shape is not None and p.name not in self.aliases:
                machine.tensors[p.name] = self._tensors(p, machine)
        for name, target in self.aliases.items():
            machine.tensors[name] = machine.tensors[target]
        machine.named |= machine.tensors
        for kernel, hidden in self.executable.hidden.items():
            made = [(name, h.name, self._hidden(h, machine)) for name, h in hidden]
            machine.hidden[kernel] = {own: tensors for _, own, tensors in made}
            machine.named |= {name: tensors for name, _, tensors in made}
        for rank, calls in enumerate(self.calls):
            self.executable.enqueue(machine, rank, calls)
        return machine

    def _hidden(self, h: Hidden, machine: Machine) -> list[Tensor]:
        """A hidden tensor of each rank: zeroed, but for scratch memory."""
        world_size = self.executable.world_size
        shape, dtype = (world_size, *h.shape) if h.symmetric else h.shape, numpy_dtype(h.dtype)
        made = 1 if h.symmetric else world_size
        tensors = [Tensor(machine.memory, h.name, shape, dtype, written=True) for _ in range(made)]
        for tensor in tensors:
            tensor.symmetric = h.symmetric
            if not h.scratch:
                tensor.give((Ellipsis,), np.zeros(shape, dtype))
        return tensors * (world_size // made)

    def _tensors(self, p: Parameter, machine: Machine) -> list[Tensor]:
        """The tensor of each rank, with its input; a multicast address reaches all copies."""
        p = replace(p, symmetric=p.symmetric or p.name in self.multicasts)
        world_size, dtype = self.executable.world_size, numpy_dtype(p.dtype)

        def tensor(rank: int) -> Tensor:
            shape = p.across(self.shapes[rank][p.name], world_size)
            return Tensor(machine.memory, p.name, shape, dtype, written=p.name in self.written)

        if p.symmetric:
            for rank, shapes in enumerate(self.shapes):
                if shapes[p.name] != self.shapes[0][p.name]:
                    raise TileWeaveError(
                        f"simulate: {p.name} of rank {rank} has shape {shapes[p.name]}; expected "
                        f"{self.shapes[0][p.name]} as of rank 0, since it is symmetric"
                    )
            tensors = [tensor(0)] * world_size
            tensors[0].symmetric = True
        else:
            tensors = [tensor(rank) for rank in range(world_size)]
        for rank, values in enumerate(self.given):
            if p.name not in values:
                continue
            array, shape = _array(values[p.name]), self.shapes[rank][p.name]
            if array.shape != shape or array.dtype != dtype:
                raise TileWeaveError(
                    f"simulate: {p.name} of rank {rank} is {array.dtype} {array.shape}; expected "
                    f"{dtype} {shape}"
                )
            tensors[rank].give((rank,) if p.symmetric else (Ellipsis,), array)
        return tensors


def _array(value: Any) -> np.ndarray:
    """What was given, of torch, too, which has bfloat16 and fp8 that NumPy knows by ml_dtypes."""
    if not hasattr(value, "detach"):
        return np.asarray(value)
    import torch

    value = value.detach().cpu()
    try:
        return value.numpy()
    except TypeError:
        bits = value.contiguous().view({1: torch.uint8, 2: torch.int16}[value.element_size()])
        return bits.numpy().view(numpy_dtype(str(value.dtype).removeprefix("torch.")))


def _outputs(machine: Machine) -> list[dict[str, np.ndarray]]:
    """Every rank's tensors."""
    return [
        {
            name: (tensors[rank].data[rank] if tensors[rank].symmetric else tensors[rank].data)
            for name, tensors in machine.tensors.items()
        }
        for rank in range(machine.world_size)
    ]


def _at(epoch: int, values: Mapping[str, Any]) -> dict[str, Any]:
    """The scalars of one call."""
    return {name: value(epoch) if callable(value) else value for name, value in values.items()}
