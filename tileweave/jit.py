"""``tw.jit``: TileLang's decorator, compiling for a group of ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import tilelang
from tilelang.jit import JITImpl

from .runtime.kernel import compile


class GroupJIT(JITImpl):
    """``tilelang.jit``'s object, compiling with ``tw.compile``."""

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
        stock = tilelang.jit(**options)(f)
        return GroupJIT(
            **{d.name: getattr(stock, d.name) for d in dataclasses.fields(JITImpl) if d.init}
        )

    return decorate(func) if func is not None else decorate
