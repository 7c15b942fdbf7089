"""Programs of tests that differ in constants."""

import functools
import inspect
import types
from collections.abc import Callable
from typing import Any

import tilelang.language as T


def _constant(value: Any) -> Callable[[], Any]:
    """Return an annotation that T.prim_func evaluates to ``value``."""
    return lambda: value


def factory(function: Callable[..., None]) -> Callable[..., Any]:
    """Return the factory of the programs that a function describes.

    Its parameters without an annotation are constants and become those of the factory; the others
    are those of each program::

        @factory
        def shift(faulty, out: T.Tensor((N,), "int32"), *, threads=32):
            with T.Kernel(1, threads=threads):
                ...

        shift(True), shift(False, threads=64)

    A function without annotations is a factory already.
    """
    parameters = inspect.signature(function).parameters.values()
    constants = [p for p in parameters if p.annotation is p.empty]
    if len(constants) == len(parameters):
        return function
    signature = inspect.Signature([
        p.replace(kind=p.POSITIONAL_OR_KEYWORD) for p in constants
    ])  # fmt: skip

    @functools.wraps(function)
    def make(*positional: Any, **named: Any) -> Any:
        given = signature.bind(*positional, **named)
        given.apply_defaults()
        program = types.FunctionType(
            function.__code__, function.__globals__, function.__name__, None, function.__closure__
        )
        values = {name: _constant(value) for name, value in given.arguments.items()}
        program.__annotations__ = function.__annotations__ | values
        return T.prim_func(program)

    make.__signature__ = signature  # so that it is not taken for a program
    return make
