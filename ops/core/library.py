"""Operators in torch: their registration in ``torch.ops.tileweave``, and their calls from Python,
with or without torch's dispatcher."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import _C
from torch.autograd import forward_ad

from ...builtins.errors import TileWeaveError
from .autocast import NO_CASTS, Casts, lowers, register_autocast
from .call import compute
from .caller import CALLER, called_as
from .epilogue import EPILOGUE_SCHEMA, FP8, Epilogue
from .groups import name_of, ranks_of
from .operator import Operator
from .problem import checked_problem, refused, require_operands
from .schema import Parameter, caller_of, parameters_of, type_mismatch

_LIBRARY = torch.library.Library("tileweave", "DEF")
_VALUES = frozenset((type(None), str, bool, int, float, torch.dtype))
"""Types of arguments that are not tensors."""
_DIFFERENTIATING = {
    _C._functorch.TransformType.Grad: "torch.func",
    _C._functorch.TransformType.Jvp: "forward mode",
}
_TENSORS = frozenset((torch.Tensor, torch.nn.Parameter))
"""Tensor types whose methods are torch's own."""


def define(
    schema: str,
    eager: Callable[..., Any],
    fake: Callable[..., Any],
    gradient: tuple[Callable[..., None], Callable[..., Any]] | None = None,
    check: Callable[..., None] | None = None,
    casts: Casts = NO_CASTS,
) -> Callable[..., Any]:
    """Register an operator with torch.

    Args:
        eager: implementation for tensors of any device. It checks its arguments.
        fake: returns empty tensors of the result's shape and type, for ``torch.compile``.
        gradient: ``setup_context`` and ``backward`` of ``torch.library.register_autograd``.
        check: refuses arguments of calls from Python that the dispatcher would refuse with another
            message, and gradients that it does not refuse.
        casts: arguments that ``torch.autocast`` casts. Operators that write to an argument have
            none, as in torch.

    Returns:
        The operator for calls from Python. It skips torch's dispatcher, which costs as much time
        as the rest of a call, where the dispatcher would only find ``eager``.
    """
    name, parameters = schema.partition("(")[0], parameters_of(schema)
    computed = _wrapped_eager(eager, [n for n, p in enumerate(parameters) if p.is_written])
    # torch.compile keeps a transposed b transposed: no copy, and the kernel made for it.
    _LIBRARY.define(schema, tags=(torch.Tag.needs_exact_strides, torch.Tag.pt2_compliant_tag))
    _LIBRARY.impl(name, computed, "CompositeExplicitAutograd")
    torch.library.register_fake(f"tileweave::{name}", fake, lib=_LIBRARY)
    if gradient is not None:
        save, gradients = gradient
        gradients = called_as(f"gradient of {caller_of(name)}", gradients)
        torch.library.register_autograd(
            f"tileweave::{name}", gradients, setup_context=save, lib=_LIBRARY
        )
    register_autocast(_LIBRARY, name, [p.name for p in parameters], casts)
    return _for_python(name, parameters, computed, check)


def _for_python(
    name: str, parameters: Sequence[Parameter], computed: Callable[..., Any],
    check: Callable[..., None] | None = None,
) -> Callable[..., Any]:  # fmt: skip
    """Return the registered operator ``name`` for calls from Python, as ``define`` describes it.

    It refuses arguments of wrong types in the words of the public operator. To cost right calls no
    time, it compares types only after an error, and while it is traced: a tracer would wrap the
    error.
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
        token = None if CALLER.get() else CALLER.set(op)
        try:
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


def _wrapped_eager(eager: Callable[..., Any], places: Sequence[int]) -> Callable[..., Any]:
    """Wrap ``eager``: mark the written arguments as changed, because torch does not see the writes
    of kernels."""
    if not places:
        return eager

    def computed(*args: Any) -> Any:
        result = eager(*args)
        for place in places:
            written = args[place]
            if written is not None and not written.is_inference():
                torch.autograd.graph.increment_version(written)
        return result

    return computed


def needs_dispatcher(args: Iterable[Any]) -> bool:
    """Return whether a call needs torch's dispatcher, which otherwise only finds ``eager``.

    It does if a dispatch or function mode, a transform, forward-mode differentiation, a tracer,
    autocast or a profiler is active, or if a tensor is a subclass, requires a gradient, is a meta
    tensor, or is a lazy negation or conjugate.
    """
    if (
        _C._len_torch_dispatch_stack()
        or _C._len_torch_function_stack()
        or _C._functorch.peek_interpreter_stack()
        or forward_ad._current_level >= 0
        or torch.jit.is_tracing()
        or _C._is_any_autocast_enabled()
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


GEMM_CASTS = lowers("a", "b", "bias")
_DEFINED: dict[str, tuple[Callable[..., torch.Tensor], Callable[..., None]]] = {}
"""Registered products by name: one that returns a new result, and one that writes to ``out``."""


def call_gemm(
    name: str, a: torch.Tensor, b: torch.Tensor, group: Any, out: torch.Tensor | None,
    strategy: str, epilogue: Epilogue,
) -> torch.Tensor:  # fmt: skip
    """Call an operator that ``define_gemm`` registered. Return its result, in ``out`` if
    given."""
    into_new, into_out = _DEFINED[name]
    group = "" if group is None else name_of(group)
    if out is None:
        return into_new(a, b, group, strategy, *epilogue)
    into_out(a, b, out, group, strategy, *epilogue)
    return out


def define_gemm(operator: type[Operator]) -> None:
    """Register ``torch.ops.tileweave.name``, which returns one result of ``a @ b`` on each rank,
    and ``name_out``, which has no gradient."""
    name = operator.op

    def eager(a, b, group, strategy, *epilogue):
        return compute(name, a, b, None, group, strategy, epilogue)

    def eager_out(a, b, out, group, strategy, *epilogue):
        compute(name, a, b, out, group, strategy, epilogue)

    def fake(a, b, group, strategy, *epilogue):
        ranks = ranks_of(group).world_size
        problem = checked_problem(name, a, b, ranks, None, Epilogue(*epilogue))
        return a.new_empty(problem.shape, dtype=problem.out_dtype)

    def fake_out(a, b, out, group, strategy, *epilogue):
        checked_problem(name, a, b, ranks_of(group).world_size, out, Epilogue(*epilogue))

    def check(a, b, group, strategy, *epilogue):
        check_out(a, b, None, group, strategy, *epilogue)

    def check_out(a, b, out, group, strategy, *epilogue):
        added = Epilogue(*epilogue)
        require_operands(name, a, b, out, added)
        refuse_gradients(name, out, a, b, *added.tensors)

    options = f"str group, str strategy, {EPILOGUE_SCHEMA}"
    schema_out = f"{name}_out(Tensor a, Tensor b, Tensor(a!) out, {options}) -> ()"
    schema = f"{name}(Tensor a, Tensor b, {options}) -> Tensor"
    _DEFINED[name] = (
        define(schema, eager, fake, (_save, operator.gradients), check, GEMM_CASTS),
        define(schema_out, eager_out, fake_out, check=check_out),
    )


def _save(ctx: Any, inputs: tuple, output: torch.Tensor) -> None:
    a, b, ctx.group, ctx.strategy, *_ = inputs
    ctx.save_for_backward(a, b)
