"""``torch.ops.tileweave``: how operators are made known to torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import reduce
from typing import Any

import torch
from torch._C import DispatchKey, DispatchKeySet

_LIBRARY = torch.library.Library("tileweave", "DEF")
_Key = DispatchKey
_PLAIN = reduce(
    DispatchKeySet.add,
    (
        _Key.CUDA, _Key.AutogradCPU, _Key.AutogradCUDA, _Key.ADInplaceOrView, _Key.AutocastCPU,
        _Key.AutocastCUDA, _Key.BackendSelect,
    ),
    DispatchKeySet(_Key.CPU),
)  # fmt: skip
"""What tensors and a thread say to torch's dispatcher where nothing but gradients stands between
the caller and ``eager``."""
_LISTENING = ~_PLAIN.raw_repr()
_VALUES = frozenset((type(None), str, bool, int, float, torch.dtype))
"""Of arguments that are no tensors."""
_TENSORS = frozenset((torch.Tensor, torch.nn.Parameter))
"""Whose methods are torch's own."""


def define(
    schema: str,
    eager: Callable[..., Any],
    fake: Callable[..., Any],
    gradient: tuple[Callable[..., None], Callable[..., Any]] | None = None,
) -> Callable[..., Any]:
    """An operator of this schema.

    Args:
        eager: what it does, on tensors of any device.
        fake: empty tensors as it would return them, for ``torch.compile``.
        gradient: saves what the gradients need, and makes them, as ``torch.library`` wants it.

    Returns:
        It, for calls from Python: ``eager`` itself where torch's dispatcher, which takes as long as
        all the rest of a call, would do nothing but find it.
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
    dispatched = getattr(torch.ops.tileweave, name)

    def operator(*args: Any) -> Any:
        if torch.compiler.is_compiling() or concerns_torch(args):
            return dispatched(*args)
        return eager(*args)

    return operator


def concerns_torch(args: Iterable[Any]) -> bool:
    """Whether anybody listens to what torch's dispatcher is called with: gradients, a mode, a
    tracer, a profiler, or a tensor that is more than its memory."""
    c = torch._C
    if (
        c._dispatch_tls_local_include_set().raw_repr() & _LISTENING
        or c._len_torch_function_stack()
        or torch.autograd._profiler_enabled()
    ):
        return True
    differentiates = torch.is_grad_enabled()
    for tensor in args:
        kind = tensor.__class__
        if kind not in _VALUES and (
            kind not in _TENSORS
            or c._dispatch_keys(tensor).raw_repr() & _LISTENING
            or (differentiates and tensor.requires_grad)
        ):
            return True
    return False


def define_composite(schema: str, function: Callable[..., Any]) -> None:
    """An operator made of others, whose gradients it has."""
    _LIBRARY.define(schema, tags=(torch.Tag.needs_exact_strides, torch.Tag.pt2_compliant_tag))
    _LIBRARY.impl(schema.partition("(")[0], function, "CompositeImplicitAutograd")
