"""FX pass: fuse all-reduces, for which Inductor has no pattern."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.fx import Graph, Node

from ...builtins.errors import TileWeaveError
from ...ops.core.groups import ranks_of
from ...ops.core.problem import checked_problem
from ...ops.gemm.matmul_all_reduce import NAME

_c10d, _aten = torch.ops._c10d_functional, torch.ops.aten
RESHAPES = (_aten.reshape.default, _aten.view.default)


class _Match(NamedTuple):
    """All-reduce of a product.

    Attributes:
        wait: waits for the all-reduce; its users read the sum.
        source: argument of the all-reduce: the product, or its reshape.
        product: ``mm`` of two operands.
    """

    wait: Node
    source: Node
    product: Node


def arguments(node: Node) -> list[Any]:
    """Return all arguments of a call, in the order of the operator's schema."""
    names = [argument.name for argument in node.target._schema.arguments]
    return [*node.args, *[node.kwargs.get(name) for name in names[len(node.args) :]]]


def wait_of(collective: Node) -> Node | None:
    """Return the node that waits for a collective, if no other node reads its result."""
    users = [*collective.users]
    is_awaited = [user.target for user in users] == [_c10d.wait_tensor.default]
    return users[0] if is_awaited else None


def fuse_all_reduces(graph: Graph) -> None:
    """Replace all-reduces of products by an operator of TileWeave.

    Before:
        y = wait(all_reduce(mm(a, b), "sum"))
    After:
        y = matmul_all_reduce(a, b)
    """
    operator = torch.ops.tileweave.matmul_all_reduce.default
    for node in graph.find_nodes(op="call_function", target=_c10d.all_reduce.default):
        match = _match(node)
        if isinstance(match, str):
            continue
        wait, source, product = match
        with graph.inserting_before(wait):
            options = arguments(node)[2], "auto", None, None, None, None
            fused = graph.call_function(operator, (*product.args, *options))
            fused.meta = dict(product.meta)
            if source is not product:
                fused = graph.call_function(source.target, (fused, *source.args[1:]))
                fused.meta = dict(source.meta)
        wait.replace_all_uses_with(fused)
        for old in dict.fromkeys((wait, node, source, product)):
            graph.erase_node(old)


def reason_of_all_reduce(node: Node) -> str:
    """Return why an all-reduce is not fused with the product before it."""
    match = _match(node)
    return match if isinstance(match, str) else "it was added after the passes of TileWeave"


def _match(node: Node) -> _Match | str:
    """Return the match of an all-reduce, or why it has none."""
    source, reduce_op, group = arguments(node)
    if reduce_op != "sum":
        return f"reduce_op={reduce_op!r}; expected 'sum'"
    wait = wait_of(node)
    if wait is None:
        return "more than one node reads its result"
    product = source.args[0] if source.target in RESHAPES else source
    if product.target is not _aten.mm.default:
        return f"its input is no product of two matrices: {product.target}"
    if len(product.users) > 1 or len(source.users) > 1:
        return "the product has another user"
    a, b = (operand.meta["val"] for operand in product.args)
    try:
        checked_problem(NAME, a, b, ranks_of(group).world_size)
    except TileWeaveError as error:
        return str(error)
    if not a.is_contiguous() or not (b.is_contiguous() or b.t().is_contiguous()):
        return "an operand of the product would have to be copied"
    return _Match(wait, source, product)
