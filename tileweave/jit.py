"""``tw.jit``: TileLang's decorator, compiling for a group of ranks."""

from __future__ import annotations

import ast
import dataclasses
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import tilelang
import tilelang.language as T
from tilelang.jit import JITImpl

from .builtins.errors import TileWeaveError
from .runtime import compile
from .runtime.host.session import joined
from .runtime.kernel.kernel import tensors_of


class GroupJIT(JITImpl):
    """``tilelang.jit``'s object, compiling with ``tw.compile``."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._compiled_in = joined()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As TileLang's; symmetric tensors may be passed as they are."""
        if self._compiled_in is not joined():
            self.__post_init__()  # forgets the kernels, whose memory went with their session
        positional, named = tensors_of(args, kwargs)
        try:
            return super().__call__(*positional, **named)
        finally:
            self._compiled_in = joined()  # the first call may open it

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

    def par_compile(self, configs: Iterable[Any], *_: Any, **__: Any) -> list[Any]:
        """The compiled kernels for several sets of arguments, tuples or dicts; one after the other,
        as ranks meet for each."""
        return [self.compile(**c) if isinstance(c, dict) else self.compile(*c) for c in configs]


def jit(func: Callable[..., Any] | None = None, **options: Any) -> Any:
    """``tilelang.jit`` for a group of ranks: same use, same options but for ``debug_root_path``, in
    lazy and eager style.

    Calling the decorated function is collective the first time for each set of compile-time
    arguments.
    """

    if (folder := options.get("debug_root_path")) is not None:
        raise TileWeaveError(
            f"jit: debug_root_path={folder!r}; expected none, as `tileweave emit` shows all stages"
        )

    def decorate(f: Callable[..., Any]) -> GroupJIT:
        if not inspect.isfunction(f):
            raise TileWeaveError(f"jit: {f!r}; expected a function")
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
    # Within a block any depth is legal, also where a text begins in the first column.
    source = inspect.getsource(f)
    inside = source[:1].isspace()
    (tree, *_) = ast.parse(f"if True:\n{source}" if inside else source).body
    tree = tree.body[0] if isinstance(tree, ast.If) else tree
    parameters = inspect.signature(f).parameters
    for node in tree.body if isinstance(tree, ast.FunctionDef) else ():
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            kind = node.annotation
            inner = getattr(kind, "func", getattr(kind, "value", None))
            name = getattr(inner, "attr", getattr(inner, "id", ""))
            if name == "Symmetric" and node.target.id in parameters:
                f.__annotations__[node.target.id] = T.ptr
