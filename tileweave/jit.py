"""``tw.jit``: the decorator ``tilelang.jit`` for a group of ranks."""

from __future__ import annotations

import ast
import dataclasses
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import tilelang
import tilelang.language as T
from tilelang.jit import JITImpl

from .builtins.errors import TileWeaveError, brief_errors
from .runtime import compile
from .runtime.host.session import joined
from .runtime.kernel.kernel import tensors_of


class GroupJIT(JITImpl):
    """Decorated function of ``tw.jit``. It compiles with ``tw.compile``."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._compiled_in = joined()

    @brief_errors
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compile at the first call with these arguments, then run or return the kernel.

        Symmetric tensors are legal arguments.
        """
        if self._compiled_in is not joined():
            self.__post_init__()  # drops the kernels, whose memory was freed with their session
        positional, named = tensors_of(args, kwargs)
        try:
            return super().__call__(*positional, **named)
        finally:
            self._compiled_in = joined()  # the first call may open the session

    @brief_errors
    def compile(self, *args: Any, **kwargs: Any) -> Any:
        """Return the compiled kernel for these arguments; see ``tw.compile``."""
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
        """Return the compiled kernels for several tuples or dicts of arguments.

        Kernels are compiled sequentially, because compiling is collective.
        """
        return [self.compile(**c) if isinstance(c, dict) else self.compile(*c) for c in configs]


@brief_errors
def jit(func: Callable[..., Any] | None = None, **options: Any) -> Any:
    """Decorate a function like ``tilelang.jit``, in lazy or eager style, for a group of ranks.

    Collective: the first call of the decorated function for each set of compile-time arguments.

    Args:
        options: those of ``tilelang.jit``, except ``debug_root_path``.

    Raises:
        TileWeaveError: ``func`` is no function, or ``debug_root_path`` is set.
    """

    if (folder := options.get("debug_root_path")) is not None:
        raise TileWeaveError(
            f"jit: debug_root_path={folder!r}; expected none; `tileweave emit` prints all stages"
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
    """Mark parameters annotated ``X: W.Symmetric[...]`` in the body as tensors.

    In eager style TileLang recognizes its own tensor annotations by name and treats other
    parameters as compile-time values.
    """
    # An indented function parses inside a block. textwrap.dedent would fail for a multi-line string
    # that begins in the first column.
    source = inspect.getsource(f)
    is_indented = source[:1].isspace()
    (tree, *_) = ast.parse(f"if True:\n{source}" if is_indented else source).body
    tree = tree.body[0] if isinstance(tree, ast.If) else tree
    parameters = inspect.signature(f).parameters
    for node in tree.body if isinstance(tree, ast.FunctionDef) else ():
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            kind = node.annotation
            inner = getattr(kind, "func", getattr(kind, "value", None))
            name = getattr(inner, "attr", getattr(inner, "id", ""))
            if name == "Symmetric" and node.target.id in parameters:
                f.__annotations__[node.target.id] = T.ptr
