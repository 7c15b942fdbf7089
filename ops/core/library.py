"""Registration of operators in ``torch.ops.tileweave``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import _C

_LIBRARY = torch.library.Library("tileweave", "DEF")
_VALUES = frozenset((type(None), str, bool, int, float, torch.dtype))
"""Types of arguments that are not tensors."""
_TENSORS = frozenset((torch.Tensor, torch.nn.Parameter))
"""Tensor types whose methods are torch's own."""


def define(
    schema: str,
    eager: Callable[..., Any],
    fake: Callable[..., Any],
    gradient: tuple[Callable[..., None], Callable[..., Any]] | None = None,
) -> Callable[..., Any]:
    """Register an operator with torch.

    Args:
        eager: implementation for tensors of any device.
        fake: returns empty tensors of the result's shape and type, for ``torch.compile``.
        gradient: ``setup_context`` and ``backward`` of ``torch.library.register_autograd``.

    Returns:
        The operator for calls from Python. It skips torch's dispatcher, which costs as much time
        as the rest of a call, where the dispatcher would only find ``eager``.
    """
    name = schema.partition("(")[0]
    computed = _in_given_types(eager, _written(schema))
    # torch.compile keeps a transposed b transposed: no copy, and the kernel made for it.
    _LIBRARY.define(schema, tags=(torch.Tag.needs_exact_strides, torch.Tag.pt2_compliant_tag))
    _LIBRARY.impl(name, computed, "CompositeExplicitAutograd")
    torch.library.register_fake(f"tileweave::{name}", fake, lib=_LIBRARY)
    if gradient is not None:
        save, gradients = gradient
        torch.library.register_autograd(
            f"tileweave::{name}", gradients, setup_context=save, lib=_LIBRARY
        )
    dispatched = getattr(torch.ops.tileweave, name)

    def operator(*args: Any) -> Any:
        if torch.compiler.is_compiling() or concerns_torch(args):
            return dispatched(*args)
        return computed(*args)

    return operator


def _written(schema: str) -> list[int]:
    """Return the positions of the arguments that an operator writes."""
    arguments = _C.parse_schema(f"tileweave::{schema}").arguments
    return [n for n, a in enumerate(arguments) if a.alias_info and a.alias_info.is_write]


def _in_given_types(eager: Callable[..., Any], written: Sequence[int]) -> Callable[..., Any]:
    """Wrap ``eager``: disable ``torch.autocast``, and mark the written arguments as changed,
    because torch does not see the writes of kernels."""

    without_autocast = _without_autocast(eager)

    def computed(*args: Any) -> Any:
        result = without_autocast(*args)
        for place in written:
            if not args[place].is_inference():
                torch.autograd.graph.increment_version(args[place])
        return result

    return computed


def _without_autocast(function: Callable[..., Any]) -> Callable[..., Any]:
    def called(*args: Any) -> Any:
        if _C._is_any_autocast_enabled():
            kind = args[0].device.type
            if torch.amp.is_autocast_available(kind):
                with torch.autocast(kind, enabled=False):
                    return function(*args)
        return function(*args)

    return called


def concerns_torch(args: Iterable[Any]) -> bool:
    """Return whether a call needs torch's dispatcher, which otherwise only finds ``eager``.

    It does if a dispatch or function mode, a transform, a tracer or a profiler is active, or if a
    tensor is a subclass, requires a gradient, is a meta tensor, or is a lazy negation or
    conjugate.
    """
    if (
        _C._len_torch_dispatch_stack()
        or _C._len_torch_function_stack()
        or _C._functorch.peek_interpreter_stack()
        or _C._is_tracing()
        or _C._autograd._profiler_enabled()
    ):
        return True
    differentiates = torch.is_grad_enabled()
    for tensor in args:
        kind = tensor.__class__
        if kind not in _VALUES and (
            kind not in _TENSORS
            or (differentiates and tensor.requires_grad)
            or tensor.is_meta
            or tensor.is_neg()
            or tensor.is_conj()
        ):
            return True
    return False


def define_composite(schema: str, function: Callable[..., Any]) -> None:
    """Register an operator that calls others. It inherits their gradients, and ``torch.autocast``
    does not change its types."""
    _LIBRARY.define(schema, tags=(torch.Tag.needs_exact_strides, torch.Tag.pt2_compliant_tag))
    composite = _without_autocast(function)
    _LIBRARY.impl(schema.partition("(")[0], composite, "CompositeImplicitAutograd")
