"""FX passes: separate biases from products, which Inductor fuses with collectives without them."""

from __future__ import annotations

import torch
from torch._inductor.fx_passes.micro_pipeline_tp import find_all_gather_patterns
from torch.fx import Graph, Node

from ...ops.core.groups import ranks_of
from .all_reduces import RESHAPES, arguments, wait_of
from .gather_forms import MOVES

_c10d, _aten = torch.ops._c10d_functional, torch.ops.aten
_REDUCTIONS = (_c10d.all_reduce.default, _c10d.reduce_scatter_tensor.default)


def add_biases_to_sums(graph: Graph) -> None:
    """Add biases after reductions. DTensor divides a bias, which all ranks have, by their number.

    Before:
        y = wait(reduce_scatter(addmm(bias / ranks, a, b), "sum"))
    After:
        y = wait(reduce_scatter(mm(a, b), "sum")) + bias
    """
    for node in graph.find_nodes(op="call_function", target=_aten.addmm.default):
        part, reduction = node.args[0], _reduction_of(node)
        if reduction is None or node.kwargs or part.target is not _aten.div.Tensor:
            continue
        _, reduce_op, *_, group = arguments(reduction)
        bias, parts = part.args
        wait = wait_of(reduction)
        is_equal = isinstance(bias, Node) and parts == ranks_of(group).world_size
        if reduce_op != "sum" or not is_equal or wait is None:
            continue
        _drop_bias(node)
        _add(wait, bias)


def add_biases_to_gathered_products(graph: Graph) -> None:
    """Add biases after products with gathered operands.

    Before:
        y = addmm(bias, wait(all_gather(x)), b)
    After:
        y = mm(wait(all_gather(x)), b) + bias
    """
    gathers = find_all_gather_patterns(graph)
    gathered = {g.res_node for g in gathers if g.gather_dim < g.res_node.meta["val"].ndim - 1}
    for node in graph.find_nodes(op="call_function", target=_aten.addmm.default):
        bias, a, _ = node.args
        source = a.args[0] if a.target in RESHAPES else a
        if source in gathered and not node.kwargs:
            _add_to_product(_drop_bias(node), bias)


def _reduction_of(product: Node) -> Node | None:
    """Return the reduction that alone reads a product, or whole rows of it."""
    moved, pending, readers = {product}, [product], set()
    while pending:
        for user in pending.pop().users:
            if user.target not in MOVES:
                readers.add(user)
            elif user not in moved:
                moved.add(user)
                pending.append(user)
    values = [node.meta["val"] for node in moved]
    columns = {v.shape[-1] for v in values if isinstance(v, torch.Tensor)}
    is_whole = all(moved.issuperset(node.all_input_nodes) for node in moved - {product})
    reader, *others = readers
    if others or len(columns) > 1 or not is_whole or reader.target not in _REDUCTIONS:
        return None
    return reader


def _drop_bias(node: Node) -> Node:
    """Replace a product with a bias by one without, which is returned."""
    bias, *operands = node.args
    graph = node.graph
    with graph.inserting_before(node):
        product = graph.call_function(_aten.mm.default, tuple(operands))
    product.meta = dict(node.meta)
    node.replace_all_uses_with(product)
    graph.erase_node(node)
    if not bias.users and bias.op == "call_function":
        graph.erase_node(bias)
    return product


def _add_to_product(product: Node, bias: Node) -> None:
    """Add a bias to a product, or to its reshape, because Inductor fuses a product between
    reshapes."""
    shape = product.meta["val"].shape
    reshape = next((u for u in product.users if u.target in RESHAPES), None)
    if reshape is None or reshape.meta["val"].shape[-1] != shape[-1]:
        _add(product, bias)
        return
    total = _add(reshape, bias)
    if len(product.users) > 1:
        with product.graph.inserting_after(total):
            rows = product.graph.call_function(_aten.reshape.default, (total, list(shape)))
        rows.meta = dict(product.meta)
        product.replace_all_uses_with(rows, delete_user_cb=lambda user: user is not reshape)


def _add(node: Node, bias: Node) -> Node:
    """Let the users of a node read its sum with a bias; return the sum."""
    with node.graph.inserting_after(node):
        total = node.graph.call_function(_aten.add.Tensor, (node, bias))
    total.meta = dict(node.meta)
    node.replace_all_uses_with(total, delete_user_cb=lambda user: user is not total)
    return total
