"""``tw.simulate``: run a program of W ranks on the CPU, in many schedules."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ...builtins.errors import TileWeaveError
from .errors import SimulationError
from .machine import Machine
from .memory import Tensor
from .order import Layout
from .program import Parameter, Program
from .values import is_float

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
) -> list[dict[str, np.ndarray]]:
    """Run ``program`` on ``world_size`` simulated ranks and return every rank's tensors.

    Memory is weak, blocks interleave at random, launches follow each other without a barrier
    between ranks. What nothing orders is a fault even where the values happen to be right.

    Args:
        program: a ``@T.prim_func``.
        inputs: one dict a rank, parameter name -> NumPy array (ml_dtypes for bfloat16 and fp8), of
            the rank's own part for a symmetric tensor; a scalar is a number or a callable
            epoch -> number. Tensors not given are poison until written.
        schedules: how many interleavings to try.
        seed: of the first; the others follow it.
        epochs: launches of the program, back to back.
        resident_blocks: blocks of a rank that fit on its GPU at a time.

    Returns:
        One dict a rank, parameter name -> array, after the last epoch of the last schedule.

    Raises:
        SimulationError: a fault; its report says who, where and with which seed.
        TileWeaveError: inputs that do not fit the program.
    """
    for name, value in (
        ("world_size", world_size), ("schedules", schedules), ("epochs", epochs),
        ("resident_blocks", resident_blocks),
    ):  # fmt: skip
        if value < 1:
            raise TileWeaveError(f"simulate: {name}={value}; expected at least 1")
    compiled = program if isinstance(program, Program) else Program(program, world_size)
    given = _checked(compiled, inputs, world_size)
    out: list[dict[str, np.ndarray]] = []
    for number in range(seed, seed + schedules):
        try:
            out = _run(compiled, given, number, epochs, resident_blocks)
        except SimulationError as error:
            raise error.with_note(
                f"schedule of seed {number}: replay it with schedules=1, seed={number}"
            ) from None
    return out


def random_inputs(program: Program, seed: int, scalars: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Inputs for a program about which nothing else is known: normal numbers where it only reads,
    zeros in tensors of integers (flags, counters, indices); the rest stays poison.

    Raises:
        TileWeaveError: a scalar without a value, or a dynamic shape.
    """
    rng = np.random.default_rng(seed)
    inputs: list[dict[str, Any]] = []
    for rank in range(program.world_size):
        values: dict[str, Any] = {}
        for p in program.parameters:
            if p.shape is None:
                if p.name not in scalars:
                    raise TileWeaveError(f"simulate: no value for {p.name}; expected a number")
                values[p.name] = scalars[p.name]
                continue
            shape = program.extents(p, {}, rank)
            shape = shape[1:] if p.symmetric else shape
            if not is_float(p.dtype):
                values[p.name] = np.zeros(shape, p.dtype)
            elif not p.written:
                values[p.name] = rng.standard_normal(shape).astype(p.dtype)
        inputs.append(values)
    return inputs


def _checked(program: Program, inputs: Inputs | None, world_size: int) -> list[dict[str, Any]]:
    given = [dict(i) for i in inputs] if inputs is not None else [{} for _ in range(world_size)]
    if len(given) != world_size:
        raise TileWeaveError(f"simulate: {len(given)} inputs; expected one for each rank")
    names = {p.name for p in program.parameters}
    for values in given:
        for name in values:
            if name not in names:
                raise TileWeaveError(
                    f"simulate: input {name!r}; expected {', '.join(sorted(names))}"
                )
        for p in program.parameters:
            if p.shape is None and p.name not in values:
                raise TileWeaveError(f"simulate: no value for {p.name}; expected a number")
    return given


def _run(
    program: Program, given: list[dict[str, Any]], seed: int, epochs: int, resident_blocks: int
) -> list[dict[str, np.ndarray]]:
    world_size = program.world_size
    shapes = [_dynamic_shapes(program, values) for values in given]

    def launches(rank: int) -> Iterator[tuple]:
        for epoch in range(epochs):
            values = {n: v(epoch) if callable(v) else v for n, v in given[rank].items()}
            for launch in program.launches(rank, values, shapes[rank]):
                yield (epoch, *launch)

    blocks = max(
        (
            int(np.prod(extents))
            for rank in range(world_size)
            for _, _, _, extents in launches(rank)
        ),
        default=1,
    )
    layout = Layout(world_size, max(blocks, 1), program.classes)
    machine = Machine(world_size, layout, seed, resident_blocks, program.thread_names)
    for p in program.parameters:
        if p.shape is not None:
            machine.tensors[p.name] = _tensors(program, p, machine, given, shapes)
    for rank in range(world_size):
        machine.add_stream(rank, launches(rank))
    machine.run()
    return [
        {
            name: (tensors[rank].data[rank] if tensors[rank].symmetric else tensors[rank].data)
            for name, tensors in machine.tensors.items()
        }
        for rank in range(world_size)
    ]


def _dynamic_shapes(program: Program, values: dict[str, Any]) -> dict[int, int]:
    """Values of the shape variables, from the inputs that show them."""
    found: dict[int, int] = {}
    for p in program.parameters:
        if p.shape is None or p.name not in values:
            continue
        shape = np.shape(values[p.name])
        declared = p.shape[1:] if p.symmetric else p.shape
        for extent, size in zip(declared, shape, strict=False):
            if isinstance(extent, tuple):
                found.setdefault(extent[0], size)
    return found


def _tensors(
    program: Program, p: Parameter, machine: Machine, given: list[dict[str, Any]], shapes: list
) -> list[Tensor]:
    extents = [program.extents(p, shapes[r], r) for r in range(program.world_size)]
    if p.symmetric:
        shared = Tensor(machine.memory, p.name, extents[0], p.dtype, written=p.written)
        shared.symmetric = True
        tensors = [shared] * program.world_size
    else:
        tensors = [
            Tensor(machine.memory, p.name, shape, p.dtype, written=p.written) for shape in extents
        ]
    for rank, values in enumerate(given):
        if p.name not in values:
            continue
        array = np.asarray(values[p.name])
        shape = extents[rank][1:] if p.symmetric else extents[rank]
        if array.shape != shape or array.dtype != p.dtype:
            raise TileWeaveError(
                f"simulate: {p.name} of rank {rank} is {array.dtype} {array.shape}; expected "
                f"{p.dtype} {shape}"
            )
        tensors[rank].give((rank,) if p.symmetric else (Ellipsis,), array)
    return tensors
