"""Operators in torch: their registration in ``torch.ops.tileweave``, and their calls from Python,
with or without torch's dispatcher."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Hashable, Iterable, Sequence
from operator import itemgetter
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import _C
from torch._subclasses.fake_tensor import is_fake
from torch.autograd import forward_ad

from ...builtins.errors import TileWeaveError
from ...runtime.executor.recorded_calls import recorded_calls
from .autocast import NO_CASTS, Casts, register_autocast
from .call import TENSORS, Recorded, signature
from .caller import CALLER, called_as
from .checks import refused
from .epilogue import FP8
from .groups import name_of
from .schema import Parameter, caller_of, parameters_of, type_mismatch

_LIBRARY = torch.library.Library("tileweave", "DEF")
_VALUES = frozenset((type(None), str, bool, int, float, torch.dtype))
"""Types of arguments that are not tensors."""
_NUMBERS = frozenset((bool, numbers.Integral, numbers.Real))
"""Types of arguments that may equal one of another type."""
_Getter: TypeAlias = "Callable[[tuple[Any, ...]], tuple[Any, ...]]"
_DIFFERENTIATING = {
    _C._functorch.TransformType.Grad: "torch.func",
    _C._functorch.TransformType.Jvp: "forward mode",
}


def define(
    schema: str,
    eager: Callable[..., Any],
    fake: Callable[..., Any],
    gradient: tuple[Callable[..., None], Callable[..., Any]] | None = None,
    check: Callable[..., None] | None = None,
    casts: Casts = NO_CASTS,
    places: Places | None = None,
) -> Callable[..., Any]:
    """Register an operator with torch.

    Args:
        eager: implementation for tensors of any device. It checks its arguments, and calls
            ``mark_written`` for those that it writes.
        fake: returns empty tensors of the result's shape and type, for ``torch.compile``.
        gradient: ``setup_context`` and ``backward`` of ``torch.library.register_autograd``.
        check: refuses arguments of calls from Python that the dispatcher would refuse with another
            message, and gradients that it does not refuse.
        casts: arguments that ``torch.autocast`` casts. Operators that write to an argument have
            none, as in torch.
        places: places of the arguments, if calls of the operator are recorded. ``eager`` then has
            the keyword ``recorded`` of ``call.compute``.

    Returns:
        The operator for calls from Python. It skips torch's dispatcher, which costs as much time
        as the rest of a call, where the dispatcher would only find ``eager``.
    """
    name, parameters = schema.partition("(")[0], parameters_of(schema)
    # torch.compile keeps a transposed b transposed: no copy, and the kernel made for it.
    _LIBRARY.define(schema, tags=(torch.Tag.needs_exact_strides, torch.Tag.pt2_compliant_tag))
    _LIBRARY.impl(name, eager, "CompositeExplicitAutograd")
    torch.library.register_fake(f"tileweave::{name}", fake, lib=_LIBRARY)
    if gradient is not None:
        save, gradients = gradient
        gradients = called_as(f"gradient of {caller_of(name)}", gradients)
        torch.library.register_autograd(
            f"tileweave::{name}", gradients, setup_context=save, lib=_LIBRARY
        )
    register_autocast(_LIBRARY, name, [p.name for p in parameters], casts)
    return _for_python(name, parameters, eager, check, places)


def _for_python(
    name: str, parameters: Sequence[Parameter], computed: Callable[..., Any],
    check: Callable[..., None] | None = None, places: Places | None = None,
) -> Callable[..., Any]:  # fmt: skip
    """Return the registered operator ``name`` for calls from Python, as ``define`` describes it.

    It repeats a recorded call before anything else. It refuses arguments of wrong types in the
    words of the public operator. To cost right calls no time, it compares types only after an
    error, and while it is traced: a tracer would wrap the error.
    """
    op, registered = caller_of(name), getattr(torch.ops.tileweave, name)

    def dispatched(args: tuple[Any, ...]) -> Any:
        if not torch.compiler.is_compiling():
            _refuse_functional_gradients(op, args)
        if check is not None:
            check(*args)
        return registered(*args)

    def operator(*args: Any) -> Any:
        if torch.compiler.is_compiling():
            if (refusal := type_mismatch(op, parameters, args)) is not None:
                raise refusal
            return dispatched(args)
        recorded = None
        if places is not None:
            names = name, *places.options(args)
            recorded, addresses = look_up(names, places.tensors(args))
            value = None if recorded is None else recorded.value
            if value is not None and value.fast_path is not None:
                out = None if places.out is None else args[places.out]
                result = value.fast_path(addresses, out)
                if result is not None:
                    return result if out is None else mark_written(*places.written(args))
        token = None if CALLER.get() else CALLER.set(op)
        try:
            if recorded is not None:
                return computed(*args, recorded=recorded)
            return dispatched(args) if needs_dispatcher(args) else computed(*args)
        except Exception as error:
            if isinstance(error, TileWeaveError):
                raise
            refusal = type_mismatch(op, parameters, args)
            if refusal is None:
                raise
            raise refusal from error
        finally:
            if token is not None:
                CALLER.reset(token)

    return operator


def is_traced(tensor: torch.Tensor) -> bool:
    """Return whether a tracer calls a composite operator: ranks must not communicate then."""
    return torch.compiler.is_compiling() or is_fake(tensor)


def mark_written(*tensors: torch.Tensor | None) -> None:
    """Mark tensors as changed, because torch does not see the writes of kernels."""
    for tensor in tensors:
        if tensor is not None and not tensor.is_inference():
            torch.autograd.graph.increment_version(tensor)


def needs_dispatcher(args: Iterable[Any]) -> bool:
    """Return whether a call needs torch's dispatcher, which otherwise only finds ``eager``.

    It does if it ``is_observed``, or if a tensor is a subclass, requires a gradient, is a meta
    tensor, or is a lazy negation or conjugate.
    """
    if is_observed():
        return True
    differentiates = torch.is_grad_enabled()
    for tensor in args:
        kind = tensor.__class__
        if kind not in _VALUES and (
            kind not in TENSORS
            or (differentiates and tensor.requires_grad)
            or tensor.is_meta
            or tensor.is_neg()
            or tensor.is_conj()
        ):
            return True
    return False


def is_observed() -> bool:
    """Return whether a dispatch or function mode, a transform, forward-mode differentiation, a
    tracer, autocast or a profiler is active: all calls then need torch's dispatcher."""
    return bool(
        _C._len_torch_dispatch_stack()
        or _C._len_torch_function_stack()
        or _C._functorch.peek_interpreter_stack()
        or forward_ad._current_level >= 0
        or _C._is_tracing()
        or _C._is_any_autocast_enabled()
        or _C._autograd._profiler_enabled()
    )


def look_up(names: Iterable[Hashable], tensors: Sequence[Any]) -> tuple[Recorded | None, list[int]]:
    """Look up a call, whose arguments need not be checked yet, in ``recorded_calls``.

    Args:
        names, tensors: see ``signature``.

    Returns:
        The key with the value of an equal call, and the addresses of the tensors. No key if the
        call cannot be legal or needs torch's dispatcher.
    """
    if is_observed():
        return None, []
    key, addresses = signature(names, tensors, skips_dispatcher=True)
    if key is None:
        return None, []
    try:
        return Recorded(key, recorded_calls().get(key)), addresses
    except TypeError:  # an option without a hash, which is illegal
        return None, []


class Places(NamedTuple):
    """Places of the arguments of an operator.

    Attributes:
        tensors: returns the tensors that are read, then the results of the caller, ``out`` last.
        options: returns the arguments that are not tensors, and the types of numbers: an illegal
            True differs from a legal 1.
        written: returns the results of the caller, ``out`` first.
        out: place of ``out``; None if the results are new.
    """

    tensors: _Getter
    options: _Getter
    written: _Getter
    out: int | None


_DEFINED: dict[str, tuple[Callable[..., Any], Callable[..., None]]] = {}
"""Operators of ``define_pair`` by name: one that returns new results, and one that writes them."""


def define_pair(
    name: str, inputs: str, options: str, compute: Callable[..., Any], fake: Callable[..., Any],
    check: Callable[..., None], *, written: str = "Tensor(a!) out", returns: str = "Tensor",
    new_only: str = "", gradient: Any = None, casts: Casts = NO_CASTS,
) -> tuple[Callable[..., Any], Callable[..., None]]:  # fmt: skip
    """Register an operator that returns new results, and ``name_out``, which writes them to memory
    of the caller, and has no gradient and no casts.

    Args:
        inputs, options, written, returns: parts of the schema; ``written`` are the results of
            ``name_out``, between its inputs and its options.
        compute, fake, check: as in ``define``, but functions of the tensors that are read, the
            result and all other arguments. The result is None for a new one, and a tuple if
            ``written`` has several. ``compute`` also has the keyword ``recorded`` of
            ``call.compute``.
        new_only: first options, which ``name_out`` does not have.
        gradient, casts: as in ``define``.

    Returns:
        Both operators for calls from Python.
    """
    schema = f"{name}({inputs}, {new_only}{options}) -> {returns}"
    schema_out = f"{name}_out({inputs}, {written}, {options}) -> ()"
    new, out = (
        (_split(compute, s, writes=True), _split(fake, s), _split(check, s, is_traced=True))
        for s in (schema, schema_out)
    )
    _DEFINED[name] = (
        define(schema, *new[:2], gradient, new[2], casts, _places(schema)),
        define(schema_out, *out[:2], check=out[2], places=_places(schema_out)),
    )
    return _DEFINED[name]


def _split(
    function: Callable[..., Any], schema: str, is_traced: bool = False, writes: bool = False
) -> Callable[..., Any]:
    """Return a function of the parameters of ``schema``, given one of the tensors that it reads,
    the results that it writes, and the others.

    Args:
        is_traced: whether ``torch.compile`` traces it, which supports no ``itemgetter``.
        writes: whether ``function`` writes the results.
    """
    parameters = list(enumerate(parameters_of(schema)))
    written = [n for n, p in parameters if p.is_written]
    getter = _traceable_getter if is_traced else _getter
    inputs = getter([n for n, p in parameters if torch.Tensor in p.types and not p.is_written])
    options = getter([n for n, p in parameters if torch.Tensor not in p.types])
    if not written:
        return lambda *args, **recorded: function(inputs(args), None, options(args), **recorded)
    results, has_one = getter(written), len(written) == 1

    def into_out(*args: Any, **recorded: Any) -> None:
        tensors = results(args)
        function(inputs(args), tensors[0] if has_one else tensors, options(args), **recorded)
        if writes:
            mark_written(*tensors)

    return into_out


def _places(schema: str) -> Places:
    parameters = list(enumerate(parameters_of(schema)))
    written = [n for n, p in parameters if p.is_written]
    inputs = [n for n, p in parameters if torch.Tensor in p.types and not p.is_written]
    tensors = _getter([*inputs, *written[1:], *written[:1]])
    options = _getter([n for n, p in parameters if torch.Tensor not in p.types])
    if typed := [n for n, p in parameters if not _NUMBERS.isdisjoint(p.types)]:
        options = _with_types(options, _getter(typed))
    return Places(tensors, options, _getter(written), written[0] if written else None)


def _with_types(options: _Getter, typed: _Getter) -> _Getter:
    return lambda args: (*options(args), *map(type, typed(args)))


def _getter(places: Sequence[int]) -> _Getter:
    """Return a function that returns some elements of a tuple, without a call of Python."""
    first = places[0] if places else 0
    is_range = [*places] == [*range(first, first + len(places))]
    return itemgetter(slice(first, first + len(places))) if is_range else itemgetter(*places)


def _traceable_getter(places: Sequence[int]) -> _Getter:
    return lambda args: tuple([args[n] for n in places])


def call_pair(
    name: str, inputs: tuple[Any, ...], group: Any, out: torch.Tensor | None, *options: Any,
    axes: tuple[int, ...] = (),
) -> torch.Tensor:  # fmt: skip
    """Call an operator of ``define_pair`` with one result, and return this, in ``out`` if given.

    Args:
        axes, options: options before and after the group.
    """
    into_new, into_out = _DEFINED[name]
    group = "" if group is None else name_of(group)
    if out is None:
        return into_new(*inputs, *axes, group, *options)
    into_out(*inputs, out, *axes, group, *options)
    return out


def define_composite(
    schema: str, function: Callable[..., Any], casts: Casts = NO_CASTS
) -> Callable[..., Any]:
    """Register an operator that calls others, and inherits their gradients.

    Args:
        casts: as in ``define``.

    Returns:
        The operator for calls from Python, as ``define`` returns it.
    """
    name, parameters = schema.partition("(")[0], parameters_of(schema)
    _LIBRARY.define(schema, tags=(torch.Tag.needs_exact_strides, torch.Tag.pt2_compliant_tag))
    _LIBRARY.impl(name, function, "CompositeImplicitAutograd")
    register_autocast(_LIBRARY, name, [p.name for p in parameters], casts)
    return _for_python(name, parameters, function)


def _refuse_functional_gradients(op: str, args: Iterable[Any]) -> None:
    """Refuse differentiation by ``torch.func`` and in forward mode. torch would raise an error
    about its own classes for the former, and ignore the other ranks in the latter."""
    transforms = _C._functorch.get_interpreter_stack() or ()
    kinds = {transform.key() for transform in transforms} & _DIFFERENTIATING.keys()
    kinds = {_DIFFERENTIATING[kind] for kind in kinds}
    if forward_ad._current_level >= 0:
        kinds.add("forward mode")
    if kinds and any(_is_differentiated(x) for x in args if isinstance(x, torch.Tensor)):
        raise refused(
            op, f"{' and '.join(sorted(kinds))} differentiates it",
            "torch.autograd.grad or backward()",
        )  # fmt: skip


def _is_differentiated(tensor: torch.Tensor) -> bool:
    return (
        _C._functorch.is_functorch_wrapped_tensor(tensor)
        or forward_ad.unpack_dual(tensor).tangent is not None
    )


def refuse_gradients(op: str, out: torch.Tensor | None, *tensors: torch.Tensor) -> None:
    """Refuse gradients through ``out``, as torch does, and through fp8 products.

    A call that skips the dispatcher has no gradient to refuse.
    """
    if out is not None and out.requires_grad and torch.is_grad_enabled():
        raise refused(op, "out requires a gradient", "one that does not, or torch.no_grad()")
    if out is not None:
        reason = "out is given"
    elif tensors[0].dtype == FP8:
        reason = f"the operands are of {FP8}"
    else:
        return
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        raise refused(
            op, f"{reason} and an argument requires a gradient", "one of both, or torch.no_grad()"
        )


def refuse_all_gradients(op: str, /, **tensors: torch.Tensor | None) -> None:
    """Refuse gradients of an operator that has none; keywords are names of arguments."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.requires_grad and torch.is_grad_enabled():
            legal = "torch.no_grad(), as there is no gradient"
            raise refused(op, f"{name} requires a gradient", legal)
