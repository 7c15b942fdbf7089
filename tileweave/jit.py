"""``tw.jit``: TileLang's decorator, compiling for a group of ranks."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import textwrap
from collections.abc import Callable
from typing import Any

import tilelang
import tilelang.language as T
from tilelang.jit import JITImpl

from .runtime import compile
from .runtime.kernel import tensors_of


class GroupJIT(JITImpl):
    """``tilelang.jit``'s object, compiling with ``tw.compile``."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As TileLang's; symmetric tensors may be passed as they are."""
        positional, named = tensors_of(args, kwargs)
        return super().__call__(*positional, **named)

    def compile(self, *args: Any, **kwargs: Any) -> Any:
        """The compiled kernel for these arguments; see ``tw.compile``."""
        return compile(
            self.get_tir(*args, **kwargs),
            out_idx=self.out_idx,
            execution_backend=self.execution_backend,
            target=self.target,
            target_host=self.target_host,
            verbose=self.verbose,
            pass_configs=self.pass_configs,
            compile_flags=self.compile_flags,
        )


def jit(func: Callable[..., Any] | None = None, **options: Any) -> Any:
    """``tilelang.jit`` for a group of ranks: same use, same options, in lazy and eager style.

    Calling the decorated function is collective the first time for each set of compile-time
    arguments.
    """

    def decorate(f: Callable[..., Any]) -> GroupJIT:
        _declare_symmetric_parameters(f)
        stock = tilelang.jit(**options)(f)
        fields = [d.name for d in dataclasses.fields(JITImpl) if d.init]
        return GroupJIT(**{name: getattr(stock, name) for name in fields})

    return decorate(func) if func is not None else decorate


def _declare_symmetric_parameters(f: Callable[..., Any]) -> None:
    """Tell TileLang that parameters annotated ``X: W.Symmetric[...]`` in the body are tensors.

    In eager style TileLang recognises its own tensor annotations by name and takes the parameter
    for a compile-time value otherwise.
    """
    tree = ast.parse(textwrap.dedent(inspect.getsource(f))).body[0]
    parameters = inspect.signature(f).parameters
    for node in tree.body if isinstance(tree, ast.FunctionDef) else ():
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            kind = node.annotation
            inner = getattr(kind, "func", getattr(kind, "value", None))
            name = getattr(inner, "attr", getattr(inner, "id", ""))
            if name == "Symmetric" and node.target.id in parameters:
                f.__annotations__[node.target.id] = T.ptr
