"""Restore the names of a program's variables, because TileLang's compilation renames some."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.stmt_functor import post_order_visit


@contextmanager
def names_kept(func: tirx.PrimFunc) -> Iterator[None]:
    """Restore the names of the variables and buffers of ``func`` at the end of the context.

    When TileLang lowers a ``T.gemm`` to mma, it renames the thread index of the program in place.
    The text of a compiled program would then differ from that of a program loaded from the cache.
    Its cache key, and its digest, which the ranks compare, would differ as well.
    """
    names = names_in(func)
    try:
        yield
    finally:
        for variable, name in names.items():
            if variable.name != name:
                IRBuilder.name(name, variable)


def names_in(func: tirx.PrimFunc) -> dict[tirx.Var | tirx.Buffer, str]:
    """Return the names of the variables and buffers that ``func`` binds or uses."""
    names: dict[tirx.Var | tirx.Buffer, str] = {}

    def visit(node) -> None:
        parts = (getattr(node, part, None) for part in ("var", "loop_var", "buffer"))
        for variable in (node, *parts):
            if isinstance(variable, (tirx.Var, tirx.Buffer)):
                names[variable] = variable.name

    post_order_visit(func.body, visit)
    return names
