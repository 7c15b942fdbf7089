"""FX pass: fuse an all-reduce, the residual and RMSNorm in graphs without gradients."""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, Node

from ...builtins.errors import TileWeaveError
from ...ops.core.groups import ranks_of
from ...ops.norm.all_reduce_rms_norm import ONE_SHOT, AllReduceRmsNorm
from ...ops.norm.problem import Inputs, checked_problem
from .all_reduces import arguments

_c10d, _aten = torch.ops._c10d_functional, torch.ops.aten
_CAST = torch.ops.prims.convert_element_type.default
_MOST_ROWS = 256
"""Up to these rows this operator was measured to be faster than what it replaces; from 1024 rows on
``matmul_all_reduce`` was (benchmarks/LOG.md)."""


class _Match(NamedTuple):
    """RMSNorm after an all-reduce: ``r = residual + sum``, ``n = rms_norm(r) * weight``.

    Attributes:
        total, normalized: r and n.
        inner: nodes between the all-reduce and n, in this order.
    """

    residual: Node
    weight: Node
    eps: float
    total: Node
    normalized: Node
    inner: list[Node]


class _Differs(Exception):
    """Raised where the graph is no RMSNorm."""


def fuse_rms_norms(graph: Graph) -> None:
    """Replace all-reduces of few rows, with the residual and the norm after them.

    Before:
        r = residual + wait(all_reduce(x, "sum")); n = rms_norm(r) * weight
    After:
        n, r = all_reduce_rms_norm(x, residual, weight)
    """
    for node in graph.find_nodes(op="call_function", target=_c10d.all_reduce.default):
        match = _match(node)
        if match is not None and _obstacle(node, match) is None:
            _replace(graph, node, match)


def obstacle_of_norm(node: Node) -> str | None:
    """Return why an all-reduce is not fused with the norm after it; None if there is no norm."""
    match = _match(node)
    return None if match is None else _obstacle(node, match)


def _match(node: Node) -> _Match | None:
    """Return the residual and the norm after an all-reduce; None if there are none."""
    try:
        return _matched(node)
    except _Differs:
        return None


def _matched(node: Node) -> _Match:
    inner: list[Node] = []

    def user_of(node: Node, *targets: Any) -> Node:
        """Return the only user of a node."""
        user = next(iter(node.users), None)
        if user is None or len(node.users) > 1 or user.target not in targets or user.kwargs:
            raise _Differs
        inner.append(user)
        return user

    def step(node: Node, *targets: Any) -> Node:
        """Return the only user of a node, or that of its cast."""
        user = user_of(node, *targets, _CAST)
        return step(user, *targets) if user.target is _CAST else user

    def other_operand(user: Node) -> Any:
        """Return the operand of the latest node that the one before it has not computed."""
        first, second = user.args
        return second if first is inner[-2] else first

    wait = user_of(node, _c10d.wait_tensor.default)
    total = user_of(wait, _aten.add.Tensor)
    residual = other_operand(total)
    wide = next((user for user in total.users if user.target is _CAST), total)
    square = next((user for user in wide.users if user.target is _aten.pow.Tensor_Scalar), None)
    if square is None or square.args[1] != 2:
        raise _Differs
    inner += [square] if wide is total else [wide, square]
    mean = step(square, _aten.mean.dim)
    shifted = step(mean, _aten.add.Scalar, _aten.add.Tensor)
    scaled = step(step(shifted, _aten.rsqrt.default), _aten.mul.Tensor)
    value = total.meta["val"]
    axes = [axis % value.ndim for axis in mean.args[1]]
    keeps_axis = mean.args[2:] == (True,)  # else the means of rows would scale columns
    if other_operand(scaled) is not wide or axes != [value.ndim - 1] or not keeps_axis:
        raise _Differs
    product = step(scaled, _aten.mul.Tensor)
    weight, eps = other_operand(product), shifted.args[1]
    if product.meta["val"].dtype != value.dtype:
        user_of(product, _CAST)
    normalized = inner.pop()
    own = {*inner, normalized}
    if any(not own.issuperset(n.users) for n in inner if n is not total):
        raise _Differs
    return _Match(residual, weight, eps, total, normalized, inner)


def _obstacle(node: Node, match: _Match) -> str | None:
    """Return why the operator would be slower than the match, or give other results; else None."""
    source, reduce_op, group = arguments(node)
    nodes = source, match.residual, match.weight
    if reduce_op != "sum":
        return f"reduce_op={reduce_op!r}; expected 'sum'"
    if not all(isinstance(n, Node) for n in nodes):
        return "the residual or the weight is a number"
    if match.weight.op not in ("placeholder", "get_attr"):  # it may be computed after the sum
        return "the weight is computed in the graph"
    inputs = Inputs(*[n.meta["val"] for n in nodes])
    try:
        problem = checked_problem(inputs, match.eps, None, ranks_of(group).world_size)
    except TileWeaveError as error:
        return str(error)
    if not isinstance(problem.tokens, int) or problem.tokens > _MOST_ROWS:
        return f"{problem.tokens} rows; expected at most {_MOST_ROWS}"
    if obstacle := problem.obstacle():
        return obstacle
    device = inputs.x.device
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (9, 0):
        return f"{torch.cuda.get_device_name(device)}; expected sm_90 or newer"
    if not (inputs.x.is_contiguous() and inputs.residual.is_contiguous()):
        return "an input is not contiguous"
    # In the other program each rank receives the sum with the residual of the row's owner.
    if AllReduceRmsNorm.fastest(problem) != ONE_SHOT:
        return f"{problem.tokens} rows, for which another program is faster"
    return None


def _replace(graph: Graph, node: Node, match: _Match) -> None:
    norm_operator = torch.ops.tileweave.all_reduce_rms_norm.default
    source, _, group = arguments(node)
    with graph.inserting_before(match.total):
        tensors = source, match.residual, match.weight, None, None, None
        fused = graph.call_function(norm_operator, (*tensors, match.eps, None, group, "auto"))
        fused.meta["val"] = [match.normalized.meta["val"], match.total.meta["val"]]
        for n, old in enumerate((match.normalized, match.total)):
            new = graph.call_function(operator.getitem, (fused, n))
            new.meta = dict(old.meta)
            old.replace_all_uses_with(new)
    for old in (match.normalized, *reversed(match.inner), node):
        graph.erase_node(old)
