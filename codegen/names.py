"""Keep the names of a program's variables, because TileLang renames some while it compiles."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.stmt_functor import post_order_visit


@contextmanager
def names_kept(func: tirx.PrimFunc) -> Iterator[None]:
    """On leaving, give the variables and buffers of ``func`` the names back that they had.

    To lower a ``T.gemm`` by mma, TileLang binds the thread index by another name, in place. The
    program would then read otherwise where it was compiled than where it was loaded from the
    cache, and so would its digest, which the ranks compare, and its key in that cache.
    """
    names = names_in(func)
    try:
        yield
    finally:
        for named, name in names.items():
            if named.name != name:
                IRBuilder.name(name, named)


def names_in(func: tirx.PrimFunc) -> dict[tirx.Var | tirx.Buffer, str]:
    """Return the names of the variables and buffers that ``func`` binds or uses."""
    found: dict[tirx.Var | tirx.Buffer, str] = {}

    def visit(node) -> None:
        for named in (node, *(getattr(node, part, None) for part in ("var", "loop_var", "buffer"))):
            if isinstance(named, (tirx.Var, tirx.Buffer)):
                found[named] = named.name

    post_order_visit(func.body, visit)
    return found
