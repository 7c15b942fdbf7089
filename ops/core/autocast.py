"""``torch.autocast``: which arguments of an operator it casts, and its registration with torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch

_KEYS = {"cpu": "AutocastCPU", "cuda": "AutocastCUDA"}
"""Dispatch keys of ``torch.autocast`` by type of device."""


@dataclass(frozen=True)
class Casts:
    """Arguments that ``torch.autocast`` casts.

    Attributes:
        names: their names in the schema; the first one is a tensor in each call.
        to_widest: whether they become the widest of their types, as those of ``torch.addcmul``,
            instead of the type of autocast, as those of ``torch.mm``.
    """

    names: tuple[str, ...] = ()
    to_widest: bool = False


NO_CASTS = Casts()
"""Casts of an operator that moves data, or writes to an argument."""


def lowers(*names: str) -> Casts:
    """Return the casts of an operator that multiplies these arguments, as ``torch.mm`` does."""
    return Casts(names)


def widens(*names: str) -> Casts:
    """Return the casts of an operator that adds these arguments, as ``torch.addcmul`` does."""
    return Casts(names, to_widest=True)


def as_autocast(first: torch.Tensor, *others: torch.Tensor | None) -> list[Any]:
    """Return the arguments of a product as ``torch.autocast`` casts them, if it is enabled on the
    device of the first one."""
    tensors, device_type = (first, *others), first.device.type
    if device_type in _KEYS and torch.is_autocast_enabled(device_type):
        return _cast(tensors, device_type)
    return list(tensors)


def _cast(
    tensors: Sequence[torch.Tensor | None], device_type: str, to_widest: bool = False
) -> list[torch.Tensor | None]:
    """Return the arguments as ``torch.autocast`` casts them.

    As in torch, float64 and integers keep their types. fp8 does too, and if the first argument is
    of fp8, all do: ``torch._scaled_mm`` is not cast either.
    """
    present = [t for t in tensors if t is not None and _is_cast(t, device_type)]
    if not present or present[0] is not tensors[0]:
        return list(tensors)
    if to_widest:
        dtype = reduce(torch.promote_types, (t.dtype for t in present))
    else:
        dtype = torch.get_autocast_dtype(device_type)
    return [t.to(dtype) if t is not None and _is_cast(t, device_type) else t for t in tensors]


def _is_cast(tensor: torch.Tensor, device_type: str) -> bool:
    return (
        tensor.is_floating_point()
        and tensor.device.type == device_type
        and tensor.dtype != torch.float64
        and tensor.itemsize > 1
    )


def register_autocast(
    library: torch.library.Library, name: str, parameters: Iterable[str], casts: Casts
) -> None:
    """Let ``torch.autocast`` cast arguments of a registered operator, and compute it as without
    autocast.

    Args:
        parameters: names of all parameters in the schema.
    """
    order = list(parameters)
    places = [order.index(name) for name in casts.names]
    for device_type, key in _KEYS.items():
        library.impl(name, _kernel(name, places, device_type, casts.to_widest), key)


def _kernel(
    name: str, places: Sequence[int], device_type: str, to_widest: bool
) -> Callable[..., Any]:
    registered = getattr(torch.ops.tileweave, name)

    def kernel(*args: Any) -> Any:
        arguments = list(args)
        tensors = _cast([args[place] for place in places], device_type, to_widest)
        for place, tensor in zip(places, tensors, strict=True):
            arguments[place] = tensor
        with torch.autocast(device_type, enabled=False):
            return registered(*arguments)

    return kernel
