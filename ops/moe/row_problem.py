"""Problem of an exchange of tokens between ranks, checked."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from operator import index
from typing import Any

import torch

from ...builtins.errors import TileWeaveError
from ...runtime.host.group import Group
from ...runtime.kernel.kernel import capturing
from ..core.checks import refused, require_dense, require_like
from ..core.groups import TwoLevels
from .kernels.row_layout import RowLayout
from .routing import INDEX_LIMIT, default_capacity

CHECK_IDS = "TILEWEAVE_CHECK_IDS"
"""Variable of the environment; 1: calls check the experts of all tokens."""
_IDS = (torch.int32, torch.int64)


@dataclass(frozen=True)
class RowProblem:
    """Exchange of rows between the owners of tokens and the ranks of their experts. Its program
    and memory are cached per problem.

    Attributes:
        op: the operator.
        tokens, choices: tokens of a rank, and experts of a token.
        capacity: rows of a rank's experts.
        columns: elements of a row.
        num_experts: experts of all ranks; None if only their tables are known.
        clear_rest: whether rows of the result that have no token become zero.
        is_padded: whether ranks may have fewer tokens, and the others are padding without experts.
    """

    op: str
    tokens: int
    choices: int
    capacity: int
    columns: int
    ranks: int
    dtype: torch.dtype
    num_experts: int | None = None
    clear_rest: bool = True
    is_padded: bool = False

    @property
    def tile_dtype(self) -> str:
        """Type in TileLang's spelling."""
        return str(self.dtype).removeprefix("torch.")

    @property
    def moved(self) -> RowLayout:
        """Layout of rows that are only moved."""
        return RowLayout.opaque(self.columns, self.dtype)

    @property
    def added(self) -> RowLayout:
        """Layout of rows that are added."""
        return RowLayout.of(self.columns, self.tile_dtype)

    def size_obstacle(self, layout: RowLayout, others: int = 0) -> str | None:
        """Return why kernels cannot number the rows, with what is expected; else None.

        Args:
            others: vectors of other rows that kernels number.
        """
        rows = max(max(self.tokens, self.capacity) * layout.vectors, others)
        rows = max(rows, self.ranks * max(self.tokens * self.choices, self.capacity))
        if rows < INDEX_LIMIT:
            return None
        return f"rows have numbers up to {rows}; expected less than 2**31"

    def __str__(self) -> str:
        experts = f", {self.num_experts} experts" * (self.num_experts is not None)
        return (
            f"{self.op} of {self.tokens} tokens of {self.columns} {self.tile_dtype}, "
            f"top-{self.choices}{experts}, capacity {self.capacity}"
        )


def check_tokens(op: str, x: Any, topk_ids: Any, topk_weights: Any, max_tokens: Any = None) -> None:
    """Refuse tokens or choices of a wrong shape, type or device, and more than ``max_tokens``."""
    require_dense(op, x=x, topk_ids=topk_ids, topk_weights=topk_weights)
    if max_tokens is not None and not _is_positive(max_tokens):
        raise refused(op, f"max_tokens={max_tokens!r}", "a positive number of tokens, or None")
    for name, tensor, extents in (
        ("x", x, "(tokens, hidden)"),
        ("topk_ids", topk_ids, "(tokens, k)"),
    ):
        if tensor.ndim != 2 or 0 in tensor.shape[max_tokens is not None :]:
            positive = "both positive" if max_tokens is None else "the second one positive"
            raise refused(op, f"{name} has shape {tuple(tensor.shape)}", f"{extents}, {positive}")
    tokens, choices = topk_ids.shape
    if tokens != x.shape[0]:
        raise refused(
            op, f"topk_ids has shape {(tokens, choices)}",
            f"{(x.shape[0], choices)} for x of shape {tuple(x.shape)}",
        )  # fmt: skip
    if tuple(topk_weights.shape) != (tokens, choices):
        raise refused(
            op, f"topk_weights has shape {tuple(topk_weights.shape)}",
            f"{(tokens, choices)} as topk_ids",
        )  # fmt: skip
    if topk_ids.dtype not in _IDS:
        raise refused(op, f"topk_ids is of {topk_ids.dtype}", " or ".join(map(str, _IDS)))
    if not topk_weights.is_floating_point():
        raise refused(op, f"topk_weights is of {topk_weights.dtype}", "a floating-point type")
    require_like(op, "topk_ids", topk_ids, "x", x, topk_ids.dtype)
    require_like(op, "topk_weights", topk_weights, "x", x, topk_weights.dtype)
    if max_tokens is not None and tokens > max_tokens:
        raise refused(op, f"x has {tokens} tokens", f"at most max_tokens={max_tokens}")


def padded(tensor: torch.Tensor, extent: int | None, value: float = 0) -> torch.Tensor:
    """Return a tensor whose first axis has ``extent`` elements, the new ones with a value."""
    if extent is None or len(tensor) == extent:
        return tensor
    rest = tensor.new_full((extent - len(tensor), *tensor.shape[1:]), value)
    return torch.cat([tensor, rest])


def checked_problem(
    op: str, x: torch.Tensor, topk_ids: torch.Tensor, num_experts: int, capacity: int | None,
    ranks: int,
) -> RowProblem:  # fmt: skip
    """Return the problem of a call whose tensors ``check_tokens`` has accepted.

    Raises:
        TileWeaveError: the number of experts or the capacity is illegal.
    """
    if not _is_positive(num_experts) or num_experts % ranks:
        raise refused(
            op, f"num_experts={num_experts!r}", f"a positive multiple of {ranks} for {ranks} ranks"
        )
    check_capacity(op, capacity)
    tokens, choices = topk_ids.shape
    if capacity is None:
        capacity = default_capacity(tokens, ranks, choices, num_experts // ranks)
    return RowProblem(op, tokens, choices, capacity, x.shape[1], ranks, x.dtype, num_experts)


def check_capacity(op: str, capacity: Any) -> None:
    """Refuse a capacity that is neither None nor a positive integer."""
    if capacity is not None and not _is_positive(capacity):
        raise refused(op, f"capacity={capacity!r}", "a positive number of rows, or None")


def check_num_experts(op: str, num_experts: Any) -> None:
    """Refuse a number of experts that is no integer. ``checked_problem`` refuses other illegal
    ones."""
    if not _is_integer(num_experts):
        raise refused(
            op, f"num_experts={num_experts!r}", "a positive multiple of the number of ranks"
        )


def checks_ids() -> bool:
    """Return whether calls check experts, as ``CHECK_IDS`` says; not while a CUDA graph is being
    captured.

    Raises:
        TileWeaveError: its value is neither 0 nor 1.
    """
    value = os.environ.get(CHECK_IDS, "0")
    if value not in ("0", "1"):
        raise TileWeaveError(f"{CHECK_IDS}={value!r}; expected 0 or 1")
    return value == "1" and not capturing()


def check_ids(op: str, all_ids: torch.Tensor, num_experts: int) -> None:
    """Refuse experts of all ranks, (W, T, k), that are neither in [0, num_experts) nor -1. The host
    waits for them.

    Raises:
        TileWeaveError: the same on all ranks.
    """
    illegal = (all_ids < -1) | (all_ids >= num_experts)
    places = illegal.nonzero().tolist()
    if places:
        rank, token, choice = places[0]
        raise refused(
            op,
            f"topk_ids of rank {rank} has {int(all_ids[rank, token, choice])} for choice {choice} "
            f"of token {token}, the first of {len(places)} numbers that are no expert",
            f"0 to {num_experts - 1}, or -1 for a dropped choice",
        )


def within_node(problem: RowProblem, ranks: Group | TwoLevels) -> tuple[RowProblem, Group]:
    """Return the exchange between the ranks of a node that a problem contains, and these ranks."""
    if not isinstance(ranks, TwoLevels):
        return problem, ranks
    nodes, node = ranks.nodes.world_size, ranks.node
    return replace(problem, tokens=nodes * problem.tokens, ranks=node.world_size), node


def _is_positive(value: Any) -> bool:
    return _is_integer(value) and value > 0


def _is_integer(value: Any) -> bool:
    """Return whether torch converts the value to an int of 64 bits, such as an integer of numpy. A
    boolean is none."""
    if isinstance(value, bool):
        return False
    if isinstance(value, torch.SymInt):
        return True
    try:
        return abs(index(value)) < 1 << 63
    except TypeError:
        return False
