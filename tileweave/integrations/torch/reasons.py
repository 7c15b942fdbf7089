"""Collectives of FX graphs, and why they are not fused."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, Node

from .all_reduces import RESHAPES, arguments, reason_of_all_reduce
from .rms_norms import obstacle_of_norm

_aten = torch.ops.aten
_PRODUCTS = (_aten.mm.default, _aten._scaled_mm.default)
_LEAST_COLUMNS = 1024
"""Inductor does not fuse gathers of fewer columns of each rank."""


class Collective(NamedTuple):
    """Call of a collective in a graph.

    Attributes:
        node: the call.
        group: name of its group.
    """

    node: Node
    group: Any


def collectives(graph: Graph) -> Iterator[Collective]:
    """Yield the collectives of a graph."""
    for node in graph.nodes:
        if getattr(node.target, "namespace", "") != "_c10d_functional":
            continue
        names = [argument.name for argument in node.target._schema.arguments]
        if "group_name" in names:
            group = arguments(node)[names.index("group_name")]
            yield Collective(node, group)


def describe(node: Node) -> str:
    """Return the operator of a node and the shape of its first tensor, if that is known: Inductor
    has just inserted some nodes."""
    source = node.all_input_nodes[0]
    if "force_stride_order" in str(source.target):
        source = source.all_input_nodes[0]
    value = source.meta.get("val")
    return _name(node) if value is None else f"{_name(node)} of {tuple(value.shape)}"


def reason(collective: Collective, graph: Graph) -> str:
    """Return why a collective that Inductor has left is not fused."""
    c10d, node = torch.ops._c10d_functional, collective.node
    reasons: dict[Any, Callable[[Node, Graph], str]] = {
        c10d.all_gather_into_tensor.default: _reason_of_gather,
        c10d.all_reduce.default: _reason_of_all_reduce,
        c10d.reduce_scatter_tensor.default: _reason_of_scatter,
    }
    if node.target not in reasons:
        return "TileWeave does not fuse it"
    return reasons[node.target](node, graph)


def _reason_of_all_reduce(node: Node, _: Graph) -> str:
    of_product, of_norm = reason_of_all_reduce(node), obstacle_of_norm(node)
    return of_product if of_norm is None else f"{of_product}; with the norm after it: {of_norm}"


def _reason_of_gather(node: Node, graph: Graph) -> str:
    from torch._inductor.fx_passes.micro_pipeline_tp import find_all_gather_patterns

    match = next((m for m in find_all_gather_patterns(graph) if m.ag_node is node), None)
    if match is None:
        return f"Inductor does not know this use of its result: {_names(node.users)}"
    gathered, shape = match.res_node, node.meta["val"].shape
    products = [user for user in _through_reshapes(gathered) if user.target in _PRODUCTS]
    left = [p for p in products if p.args[0] in (gathered, *gathered.users)]
    if not left:
        users = _names(_through_reshapes(gathered))
        return f"no product has the gathered tensor on its left; its users: {users}"
    if match.gather_dim == len(shape) - 1:
        if shape[-1] < _LEAST_COLUMNS:
            return f"it gathers {shape[-1]} columns of each rank; expected {_LEAST_COLUMNS} or more"
        if others := [user for user in _through_reshapes(gathered) if user not in left]:
            return f"the gathered tensor has another user: {_names(others)}"
    return f"Inductor does not fuse it with its users: {_names(left)}"


def _reason_of_scatter(node: Node, graph: Graph) -> str:
    from torch._inductor.fx_passes.micro_pipeline_tp import find_reduce_scatter_patterns

    matches = find_reduce_scatter_patterns(graph)
    match = next((m for m in matches if m.reduce_scatter_node is node), None)
    if match is None:
        return f"Inductor does not know this use of its result: {_names(node.users)}"
    source = match.input_node
    product = source.args[0] if source.target in RESHAPES else source
    if product.target not in _PRODUCTS:
        return f"its input is no product of matrices: {_names([product])}"
    if len(source.users) > 1:
        return f"the product has another user: {_names(source.users)}"
    return "Inductor does not fuse it"


def _through_reshapes(node: Node) -> list[Node]:
    """Return the users of a node; a reshape stands for its own users."""
    return [
        inner
        for user in node.users
        for inner in (_through_reshapes(user) if user.target in RESHAPES else [user])
    ]


def _name(node: Node) -> str:
    schema = getattr(node.target, "_schema", None)
    return node.op if node.op != "call_function" else schema.name if schema else str(node.target)


def _names(nodes: Iterable[Node]) -> str:
    return ", ".join(map(_name, nodes)) or "none"
