"""FX passes: give all-gathers the form that Inductor fuses."""

from __future__ import annotations

import operator

import torch
from torch.fx import Graph, Node

from .all_reduces import RESHAPES, wait_of

_c10d, _aten = torch.ops._c10d_functional, torch.ops.aten
_GATHER = _c10d.all_gather_into_tensor.default
_WAIT = _c10d.wait_tensor.default
MOVES = frozenset((
    operator.getitem, _aten.split.Tensor, _aten.split_with_sizes.default, _aten.slice.Tensor,
    _aten.cat.default, *RESHAPES,
))  # fmt: skip
"""What moves elements."""
_MERGED = MOVES | {_GATHER, _WAIT, _aten.view.dtype}


def merge_gathers(graph: Graph) -> None:
    """Merge equal all-gathers, so that the products of gate and up, or of q, k and v, share one:
    Inductor fuses a gather only with the products that read one and the same node.

    Before:
        g0 = all_gather(x); w0 = wait(g0); y0 = mm(w0, b0)
        g1 = all_gather(x); w1 = wait(g1); y1 = mm(w1, b1)
    After:
        g0 = all_gather(x); w0 = wait(g0); y0 = mm(w0, b0); y1 = mm(w0, b1)

    Two results that the user gets, or views of two, stay two: the user may write to one of them.
    """
    results = _results(graph)
    first: dict[tuple[str, ...], Node] = {}
    gathered: set[Node] = set()
    for node in list(graph.nodes):
        inputs = node.all_input_nodes
        if node.target not in _MERGED or not (
            node.target is _GATHER or (inputs and gathered.issuperset(inputs))
        ):
            continue
        key = str(node.target), str(node.args), str(node.kwargs)
        equal = first.setdefault(key, node)
        if equal is node or (equal in results and node in results):
            gathered.add(node)
            continue
        node.replace_all_uses_with(equal)
        graph.erase_node(node)


def _results(graph: Graph) -> set[Node]:
    """Return the nodes that the user gets, and the nodes of which these are views; the other
    outputs are kept for the gradients."""
    output = graph.output_node()
    values = output.args[0] if isinstance(output.args[0], (tuple, list)) else output.args
    places = output.meta.get("user_visible_output_idxs", range(len(values)))
    results: set[Node] = set()
    pending = [values[n] for n in places if isinstance(values[n], Node)]
    while pending:
        node = pending.pop()
        results.add(node)
        if node.target is operator.getitem or getattr(node.target, "is_view", False):
            pending += node.all_input_nodes
    return results


def flatten_gathers(graph: Graph) -> None:
    """Gather rows where all readers reshape what is gathered, such as a batch of one sequence.

    Before:
        w = wait(all_gather(x)); y = mm(reshape(reshape(w, [1, m, k]), [m, k]), b)
    After:
        w = wait(all_gather(reshape(x, [-1, k]))); y = mm(w, b)
    """
    for node in graph.find_nodes(op="call_function", target=_GATHER):
        x, *options = node.args
        value = x.meta["val"]
        shape, wait = (-1, value.shape[-1]), wait_of(node)
        if value.ndim < 3 or wait is None:
            continue
        if not all(_is_reshape(r) and r.meta["val"].shape[-1] == shape[-1] for r in wait.users):
            continue
        with graph.inserting_before(node):
            rows = graph.call_function(_aten.reshape.default, (x, shape))
        rows.meta["val"] = value.reshape(shape)
        node.args = rows, *options
        for gathered in (node, wait):
            gathered.meta["val"] = gathered.meta["val"].reshape(shape)
        for reader in list(wait.users):
            for view in filter(_is_reshape, [*reader.users, reader]):
                if view.meta["val"].shape == wait.meta["val"].shape:
                    view.replace_all_uses_with(wait)
                if not view.users:
                    graph.erase_node(view)


def _is_reshape(node: Node) -> bool:
    return node.target in RESHAPES
