"""``torch.ops.tileweave``: how operators are made known to torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_LIBRARY = torch.library.Library("tileweave", "DEF")


def define(
    schema: str,
    eager: Callable[..., Any],
    fake: Callable[..., Any],
    gradient: tuple[Callable[..., None], Callable[..., Any]] | None = None,
) -> None:
    """An operator of this schema.

    Args:
        eager: what it does, on tensors of any device.
        fake: empty tensors as it would return them, for ``torch.compile``.
        gradient: saves what the gradients need, and makes them, as ``torch.library`` wants it.
    """
    name = schema.partition("(")[0]
    # b stays transposed under torch.compile if it is: no copy, and the kernel for it.
    _LIBRARY.define(schema, tags=(torch.Tag.needs_exact_strides, torch.Tag.pt2_compliant_tag))
    _LIBRARY.impl(name, eager, "CompositeExplicitAutograd")
    torch.library.register_fake(f"tileweave::{name}", fake, lib=_LIBRARY)
    if gradient is not None:
        save, gradients = gradient
        torch.library.register_autograd(
            f"tileweave::{name}", gradients, setup_context=save, lib=_LIBRARY
        )


def define_composite(schema: str, function: Callable[..., Any]) -> None:
    """An operator made of others, whose gradients it has."""
    _LIBRARY.define(schema, tags=(torch.Tag.needs_exact_strides, torch.Tag.pt2_compliant_tag))
    _LIBRARY.impl(schema.partition("(")[0], function, "CompositeImplicitAutograd")
