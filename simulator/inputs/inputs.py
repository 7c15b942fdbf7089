"""Inputs of a simulation: checks of those given, and random ones."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from ...builtins.errors import TileWeaveError, short_repr
from ...runtime.plans.parameters import Parameter, dynamic_extents
from ..machine.executable import Executable
from ..memory.values import numpy_dtype
from .arguments import check_extent

Inputs = Sequence[Mapping[str, Any]]
_NIBBLES = ("int4", "uint4")
"""Types without one of torch: two elements are in a byte of a tensor of int8 or uint8."""


def checked_inputs(executable: Executable, inputs: Inputs | None) -> list[dict[str, Any]]:
    """Return the inputs of every rank, tensors as NumPy arrays.

    Raises:
        TileWeaveError: names the parameter, the rank and what is expected.
    """
    world_size, parameters = executable.world_size, executable.parameters
    by_rank = [{} for _ in range(world_size)] if inputs is None else _dicts(inputs)
    if len(by_rank) != world_size:
        raise TileWeaveError(f"simulate: {len(by_rank)} inputs; expected one for each rank")
    names = {p.name for p in parameters} | set(dynamic_extents(parameters))
    for rank, values in enumerate(by_rank):
        for name in values:
            if name not in names:
                raise TileWeaveError(
                    f"simulate: input {name!r}; expected {', '.join(sorted(names))}"
                )
        for name in dynamic_extents(parameters).keys() & values.keys():
            values[name] = check_extent(name, values[name])
        for p in parameters:
            if p.shape is None:
                _check_scalar(p, values)
            elif isinstance(values.get(p.name), str):
                _require_alias(p, values[p.name], executable)
                if by_rank[0].get(p.name) is not values[p.name] != by_rank[0].get(p.name):
                    raise TileWeaveError(
                        f"simulate: {p.name}={values[p.name]!r} on rank {rank}; expected what "
                        "rank 0 has"
                    )
            elif p.name in values:
                values[p.name] = _array(p, values[p.name], rank)
    return by_rank


def _dicts(inputs: Any) -> list[dict[str, Any]]:
    try:
        by_rank = None if isinstance(inputs, (Mapping, str, bytes)) else list(inputs)
    except TypeError:
        by_rank = None
    if by_rank is None or not all(isinstance(values, Mapping) for values in by_rank):
        text = short_repr(inputs)
        raise TileWeaveError(f"simulate: inputs={text}; expected a list with one dict a rank")
    return [dict(values) for values in by_rank]


def _check_scalar(p: Parameter, values: Mapping[str, Any]) -> None:
    if p.name not in values:
        raise TileWeaveError(
            f"simulate: no value for {p.name}; expected a number, or a function of the launch such "
            f"as lambda epoch: epoch (--set {p.name}=1 or --set {p.name}=epoch on the command line)"
        )
    scalar = values[p.name]
    if not (callable(scalar) or (hasattr(scalar, "__float__") and np.ndim(scalar) == 0)):
        raise TileWeaveError(
            f"simulate: {p.name}={scalar!r}; expected a number or a function of the launch"
        )


def _require_alias(p: Parameter, target: str, executable: Executable) -> None:
    alike_names = [
        q.name for q in executable.parameters
        if q.symmetric and q.dtype == p.dtype and len(q.extents) == len(p.extents)
    ]  # fmt: skip
    if target not in alike_names:
        raise TileWeaveError(
            f"simulate: {p.name} is the multicast address of {target!r}; expected a symmetric "
            f"tensor of its type and shape: {', '.join(alike_names) or 'there is none'}"
        )


def check_aliases(
    aliases: Mapping[str, str], multicasts: Iterable[str], shapes: Mapping[str, tuple[int, ...]]
) -> None:
    """Refuse illegal names of tensors that are given for multicast addresses.

    Raises:
        TileWeaveError: no multimem operation accesses the tensor, or the two differ in shape.
    """
    for name, target in aliases.items():
        if name not in multicasts:
            raise TileWeaveError(
                f"simulate: {name}={target!r}; expected an array: no multimem operation accesses "
                f"{name}, so it is no multicast address"
            )
        if shapes[name] != shapes[target]:
            raise TileWeaveError(
                f"simulate: {name} {shapes[name]} is the multicast address of {target!r}; expected "
                f"its shape, {shapes[target]}"
            )


def _array(p: Parameter, value: Any, rank: int) -> np.ndarray:
    """Return a NumPy array; ml_dtypes has the torch types that NumPy lacks: bfloat16 and fp8."""
    try:
        if not hasattr(value, "detach"):
            array = np.asarray(value)
            if array.dtype.hasobject:
                raise TypeError("no numbers")
            return array
        import torch

        value = value.detach().cpu()
        if p.dtype in _NIBBLES and value.element_size() == 1:
            data = value.contiguous().view(torch.uint8).numpy()
            return _unpacked(data).astype(numpy_dtype(p.dtype))
        try:
            return value.numpy()
        except TypeError:
            bits = value.contiguous().view({1: torch.uint8, 2: torch.int16}[value.element_size()])
            bits, name = bits.numpy(), str(value.dtype).removeprefix("torch.")
            if name.endswith("_x2"):
                bits = _unpacked(bits)
            return bits.view(numpy_dtype(name.removesuffix("_x2")))
    except (TypeError, ValueError, KeyError, RuntimeError) as error:
        kind = "a ragged list" if isinstance(value, list | tuple) else " ".join(repr(value).split())
        raise TileWeaveError(
            f"simulate: {p.name} of rank {rank} is {kind}; expected an array of {p.dtype} with "
            f"{len(p.extents)} axes"
        ) from error


def _unpacked(data: np.ndarray) -> np.ndarray:
    """Return two elements of 4 bits for each byte, the lower half first."""
    return np.stack([data & 15, data >> 4], axis=-1).reshape(*data.shape[:-1], -1)


def tensor_of(array: np.ndarray, dtype: Any) -> Any:
    """Return the torch tensor of ``dtype`` with the bits of a NumPy array."""
    import torch

    raw, shape = np.ascontiguousarray(array).reshape(-1).view(np.uint8).copy(), array.shape
    if str(dtype).endswith("_x2") or array.dtype.name in _NIBBLES:
        raw, shape = raw[0::2] & 15 | raw[1::2] << 4, (*shape[:-1], shape[-1] // 2)
    return torch.from_numpy(raw).view(dtype).reshape(shape)
