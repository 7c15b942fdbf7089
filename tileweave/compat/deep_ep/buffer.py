"""``Buffer``: arguments of DeepEP, their checks, and the streams of the exchanges.

W is the number of ranks, T the number of tokens of this rank, k the choices of each, E the experts
of all ranks, and H the columns of a token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ...builtins.errors import brief_errors
from ...ops.core.checks import refused, require_dense_or_none
from ...ops.core.groups import group_of, name_of
from ...ops.moe.dispatch import DispatchHandle
from ...ops.moe.row_problem import check_tokens
from . import exchange
from .events import Config, EventOverlap
from .exchange import Handle, Layout

Rows: TypeAlias = "Tensor | tuple[Tensor, Tensor]"
"""Rows, or e4m3 rows and their scales."""
Hook: TypeAlias = "Callable[[], None] | None"
"""Function that lets the current stream wait for the end of a call."""


class Buffer:
    """Exchanges between the ranks of a group. All ranks make the same calls in the same order.

    Args:
        group: a ``ProcessGroup``, its name, or None for the default group.
        num_nvl_bytes, num_rdma_bytes, low_latency_mode, num_qps_per_rank,
            allow_nvlink_for_low_latency_mode, allow_mnnvl, explicitly_destroy: not used. The first
            call with new shapes allocates memory in the symmetric heap, which ``tw.init`` sizes.
        comm: None.

    Attributes:
        num_sms: value of ``set_num_sms``. Not used.

    Raises:
        TileWeaveError: here and in all calls: arguments do not fit, or differ between ranks.
    """

    num_sms = 20

    @brief_errors
    def __init__(
        self, group: Any = None, num_nvl_bytes: int = 0, num_rdma_bytes: int = 0,
        low_latency_mode: bool = False, num_qps_per_rank: int = 24,
        allow_nvlink_for_low_latency_mode: bool = True, allow_mnnvl: bool = False,
        explicitly_destroy: bool = False, comm: Any = None,
    ) -> None:  # fmt: skip
        _require_defaults("Buffer", comm=comm)
        self.group, self._name = group, name_of(group)
        ranks = group_of(self._name)
        self.rank, self.group_size = ranks.rank, ranks.world_size
        self._stream: torch.cuda.Stream | None = None

    def destroy(self) -> None:
        """Do nothing: ``tw.finalize`` frees the symmetric heap."""

    def clean_low_latency_buffer(
        self, num_max_dispatch_tokens_per_rank: int, hidden: int, num_experts: int
    ) -> None:
        """Do nothing: no exchange needs memory that is zero."""

    @staticmethod
    def set_num_sms(new_num_sms: int) -> None:
        """Set ``num_sms``. It limits nothing: the blocks of an exchange run on all free SMs."""
        Buffer.num_sms = new_num_sms

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        """Return a ``Config`` with ``num_sms``."""
        return Config(Buffer.num_sms)

    get_combine_config = get_dispatch_config

    @staticmethod
    def get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int
    ) -> int:
        """Return the bytes of the symmetric heap that low-latency calls use in bf16, without
        padding: for W x tokens x H elements in dispatch, and twice as many in combine."""
        return 3 * num_ranks * num_max_dispatch_tokens_per_rank * hidden * torch.bfloat16.itemsize

    @staticmethod
    def capture() -> EventOverlap:
        """Return an event of the current stream; no event without a GPU."""
        is_available = torch.cuda.is_available()
        return EventOverlap(torch.cuda.current_stream().record_event() if is_available else None)

    def get_comm_stream(self) -> torch.cuda.Stream:
        """Return the stream of calls with ``async_finish`` or ``return_recv_hook``."""
        if self._stream is None:
            self._stream = torch.cuda.Stream()
        return self._stream

    @brief_errors
    def get_dispatch_layout(
        self, topk_idx: Tensor, num_experts: int, previous_event: EventOverlap | None = None,
        async_finish: bool = False, allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, None, Tensor, Tensor, EventOverlap]:  # fmt: skip
        """Return the destinations of this rank's tokens.

        Args:
            topk_idx: (T, k) int64, the experts of each token; -1 for no choice.
            num_experts: E, a multiple of W.
            previous_event, async_finish, allocate_on_comm_stream: see ``dispatch``.

        Returns:
            num_tokens_per_rank: (W,) int32, tokens that each rank receives.
            num_tokens_per_rdma_rank: None.
            num_tokens_per_expert: (E,) int32, choices of each expert.
            is_token_in_rank: (T, W) bool, whether a rank receives a token.
            event: see ``dispatch``.
        """
        op = self.get_dispatch_layout.__name__
        self._require_experts(op, num_experts)
        _require_rows(op, len(topk_idx), topk_idx=topk_idx)
        arguments = topk_idx, num_experts, self.group_size
        layout, event = self._run(exchange.layout_of, arguments, previous_event, async_finish)
        return layout[0], None, *layout[1:], event

    @brief_errors
    def dispatch(
        self, x: Rows, handle: Handle | None = None, num_tokens_per_rank: Tensor | None = None,
        num_tokens_per_rdma_rank: Tensor | None = None, is_token_in_rank: Tensor | None = None,
        num_tokens_per_expert: Tensor | None = None, topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None, expert_alignment: int = 1, num_worst_tokens: int = 0,
        config: Config | None = None, previous_event: EventOverlap | None = None,
        async_finish: bool = False, allocate_on_comm_stream: bool = False,
    ) -> tuple[
        Rows, Tensor | None, Tensor | None, list[int] | None, Handle | None, EventOverlap
    ]:  # fmt: skip
        """Send each token to the ranks of its experts, once to each.

        Without ``handle`` and ``num_worst_tokens``, the host waits for the numbers of tokens. Ranks
        may have different T. ``x`` is copied, if T is less than the largest T, rounded up to a
        power of two, or than ``num_worst_tokens / W``.

        Args:
            x: (T, H) of any type; or e4m3 rows and their scales, (T, H / 128), of 32 bits.
            handle: handle of an earlier call. ``x`` is sent to the same rows, without choices.
            num_tokens_per_rank, is_token_in_rank, num_tokens_per_expert: results of
                ``get_dispatch_layout``; needed without ``handle``.
            topk_idx, topk_weights: (T, k) int64 and float32, which are sent too; None for neither.
            expert_alignment: the numbers of choices of experts are rounded up to a multiple of it.
            num_worst_tokens: number of rows of the result, on all ranks: at least W times the
                largest T. CUDA graphs can capture the call. 0: as many rows as are received.
            previous_event: event that the call waits for; with ``async_finish`` instead of the
                current stream.
            async_finish: run on ``get_comm_stream``, for which the current stream does not wait.
            num_tokens_per_rdma_rank, config, allocate_on_comm_stream: not used.

        Returns:
            recv_x: rows in the form of ``x``, ordered by rank and token. With ``num_worst_tokens``,
                rows past the last one are undefined.
            recv_topk_idx: (rows, k), experts of this rank, numbered from 0; -1 for other experts
                and past the last row. None without ``topk_idx``.
            recv_topk_weights: (rows, k) float32, 0 where ``recv_topk_idx`` is -1.
            num_recv_tokens_per_expert_list: choices of each expert of this rank; empty with
                ``num_worst_tokens``.
            handle: for ``combine``, and other calls with the same choices. With the argument
                ``handle``, this and the three results before are None.
            event: end of the call with ``async_finish``; otherwise no event.
        """
        op, parts = self.dispatch.__name__, x if isinstance(x, tuple) else (x,)
        named = dict(zip(("x", "scales"), parts, strict=False))
        if handle is not None:
            _require_defaults(op, topk_idx=topk_idx, topk_weights=topk_weights)
            _require_rows(op, len(handle.routing.weights), **named)
            arguments = parts, handle
            rows, event = self._run(exchange.send_again, arguments, previous_event, async_finish)
            return _form(rows), None, None, None, None, event
        layout = Layout(num_tokens_per_rank, num_tokens_per_expert, is_token_in_rank)
        if missing := [name for name, tensor in layout._asdict().items() if tensor is None]:
            expected = "the result of get_dispatch_layout, or handle"
            raise refused(op, f"{missing[0]} is None", expected)
        tokens, choices = len(parts[0]), ()
        _require_rows(op, tokens, **named)
        if len(parts) > 1 and parts[1].dtype.itemsize != 4:
            raise refused(op, f"scales are of {parts[1].dtype}", "a type of 32 bits")
        self._require_experts(op, len(num_tokens_per_expert))
        shape = tuple(is_token_in_rank.shape)
        if shape != (tokens, self.group_size):
            expected = f"{(tokens, self.group_size)} for x of shape {tuple(parts[0].shape)}"
            raise refused(op, f"is_token_in_rank has shape {shape}", expected)
        if topk_idx is not None or topk_weights is not None:
            choices = topk_idx, topk_weights
            check_tokens(op, parts[0], *choices, max(1, tokens))
        least = self.group_size * tokens
        if num_worst_tokens and num_worst_tokens < least:
            expected = f"0, or at least {least} for {tokens} tokens and {self.group_size} ranks"
            raise refused(op, f"num_worst_tokens={num_worst_tokens}", expected)
        arguments = parts, layout, choices, num_worst_tokens, self._name
        results, event = self._run(exchange.send, arguments, previous_event, async_finish)
        rows, choices, counts, handle = results
        counts = [-(-n // expert_alignment) * expert_alignment for n in counts]
        return _form(rows), *(choices or (None, None)), counts, handle, event

    @brief_errors
    def combine(
        self, x: Tensor, handle: Handle, topk_weights: Tensor | None = None,
        bias: Tensor | tuple[Tensor, ...] | None = None, config: Config | None = None,
        previous_event: EventOverlap | None = None, async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, EventOverlap]:  # fmt: skip
        """Add the rows of each token, without weights, in fp32.

        ``x`` is copied, unless ``num_worst_tokens`` was given to ``dispatch``.

        Args:
            x: (rows, H) floating-point, results for the rows of ``dispatch``.
            handle: handle of ``dispatch``.
            topk_weights: (rows, k) float32, which are added up, too.
            bias: (T, H), or two of them, added to the result in fp32, after it has been rounded.
            config, allocate_on_comm_stream: not used.
            previous_event, async_finish: see ``dispatch``.

        Returns:
            combined_x: (T, H), in the type of ``x``.
            combined_topk_weights: (T, k) float32; None without ``topk_weights``.
            event: see ``dispatch``.
        """
        op, biases = self.combine.__name__, bias if isinstance(bias, tuple) else (bias,)
        biases = tuple(b for b in biases if b is not None)
        _require_rows(op, handle.rows, x=x, topk_weights=topk_weights)
        for bias in biases:
            _require_rows(op, len(handle.routing.weights), bias=bias)
        arguments = x, topk_weights, biases, handle
        results, event = self._run(exchange.add, arguments, previous_event, async_finish)
        return *results, event

    @brief_errors
    def low_latency_dispatch(
        self, x: Tensor, topk_idx: Tensor, num_max_dispatch_tokens_per_rank: int, num_experts: int,
        cumulative_local_expert_recv_stats: Tensor | None = None,
        dispatch_wait_recv_cost_stats: Tensor | None = None, use_fp8: bool = True,
        round_scale: bool = False, use_ue8m0: bool = False, async_finish: bool = False,
        return_recv_hook: bool = False,
    ) -> tuple[Rows, Tensor, DispatchHandle, EventOverlap, Hook]:  # fmt: skip
        """Send each token to its experts. CUDA graphs can capture the call.

        Each expert has W x ``num_max_dispatch_tokens_per_rank`` rows. Its tokens are the first of
        them, ordered by rank and token; the others are undefined. Results are new tensors, which
        later calls do not overwrite.

        Args:
            x: (T, H) floating-point.
            topk_idx: (T, k) int64, the experts of each token; -1 for no choice.
            num_max_dispatch_tokens_per_rank: the largest T, on all ranks.
            num_experts: E, a multiple of W.
            cumulative_local_expert_recv_stats: (E / W,) int32; ``recv_count`` is added to it.
            dispatch_wait_recv_cost_stats: None.
            use_fp8: send e4m3 and a scale for each 128 columns, see ``quant`` of ``ops.dispatch``.
            round_scale, use_ue8m0: False.
            async_finish: see ``dispatch``.
            return_recv_hook: as ``async_finish``, and return ``hook``. SMs run the exchange
                meanwhile.

        Returns:
            recv_x: (E / W, rows, H). With ``use_fp8`` also scales, (E / W, rows, H / 128) float32,
                whose second axis is contiguous.
            recv_count: (E / W,) int32, tokens of each expert of this rank.
            handle: for ``low_latency_combine``.
            event: see ``dispatch``.
            hook: with ``return_recv_hook``, lets the current stream wait; otherwise None.
        """
        op, most = self.low_latency_dispatch.__name__, num_max_dispatch_tokens_per_rank
        _require_defaults(
            op, dispatch_wait_recv_cost_stats=dispatch_wait_recv_cost_stats,
            round_scale=round_scale, use_ue8m0=use_ue8m0,
        )  # fmt: skip
        self._require_experts(op, num_experts)
        check_tokens(op, x, topk_idx, x.new_empty(topk_idx.shape), most)
        stats = cumulative_local_expert_recv_stats
        arguments = x, topk_idx, most, num_experts, use_fp8, stats, self._name
        is_async = async_finish or return_recv_hook
        results, event = self._run(exchange.send_to_experts, arguments, None, is_async)
        rows, *others = results
        return _form(rows), *others, event, event.current_stream_wait if return_recv_hook else None

    @brief_errors
    def low_latency_combine(
        self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor, handle: DispatchHandle,
        use_logfmt: bool = False, zero_copy: bool = False, async_finish: bool = False,
        return_recv_hook: bool = False, out: Tensor | None = None,
        combine_wait_recv_cost_stats: Tensor | None = None,
    ) -> tuple[Tensor, EventOverlap, Hook]:  # fmt: skip
        """Add the results of each token's experts with weights, as ``ops.combine`` does.

        Args:
            x: (E / W, rows, H), results for the rows of ``low_latency_dispatch``.
            topk_idx: not used: the handle has the experts.
            topk_weights: (T, k) floating-point.
            handle: handle of ``low_latency_dispatch``.
            use_logfmt, zero_copy: False.
            async_finish, return_recv_hook: see ``low_latency_dispatch``.
            out: (T, H), receives the result; None for a new tensor.
            combine_wait_recv_cost_stats: None.

        Returns:
            combined_x: (T, H), in the type of ``x``.
            event, hook: see ``low_latency_dispatch``.
        """
        op = self.low_latency_combine.__name__
        _require_defaults(
            op, combine_wait_recv_cost_stats=combine_wait_recv_cost_stats,
            use_logfmt=use_logfmt, zero_copy=zero_copy,
        )  # fmt: skip
        if topk_weights.shape != handle.weights.shape:
            expected = f"{tuple(handle.weights.shape)} for this handle"
            raise refused(op, f"topk_weights has shape {tuple(topk_weights.shape)}", expected)
        arguments = x, topk_weights, handle, out
        is_async = async_finish or return_recv_hook
        result, event = self._run(exchange.add_of_experts, arguments, None, is_async)
        return result, event, event.current_stream_wait if return_recv_hook else None

    def _require_experts(self, op: str, num_experts: int) -> None:
        if num_experts <= 0 or num_experts % self.group_size:
            expected = f"a positive multiple of {self.group_size} for {self.group_size} ranks"
            raise refused(op, f"num_experts={num_experts}", expected)

    def _run(
        self, function: Callable[..., Any], arguments: tuple[Any, ...],
        previous_event: EventOverlap | None, is_async: bool,
    ) -> tuple[Any, EventOverlap]:  # fmt: skip
        """Return the results of a function, and an event if they are computed on
        ``get_comm_stream``."""
        inputs = _tensors(arguments)
        if not is_async or not inputs[0].is_cuda:
            if previous_event is not None:
                previous_event.current_stream_wait()
            with torch.no_grad():
                return function(*arguments), EventOverlap()
        current, stream = torch.cuda.current_stream(), self.get_comm_stream()
        event = (previous_event or EventOverlap()).event or current.record_event()
        stream.wait_event(event)
        with torch.no_grad(), torch.cuda.stream(stream):
            results = function(*arguments)
        for tensors, user in ((inputs, stream), (_tensors(results), current)):
            for tensor in tensors:
                tensor.record_stream(user)
        return results, EventOverlap(stream.record_event())


def _require_defaults(op: str, **values: Any) -> None:
    """Refuse values that are neither None nor False."""
    for name, value in values.items():
        if value is True:
            raise refused(op, f"{name}=True", "False")
        if value is not None and value is not False:
            raise refused(op, f"{name} is given", "None")


def _require_rows(op: str, rows: int, **tensors: Tensor | None) -> None:
    """Refuse tensors that are no matrices with this number of rows."""
    require_dense_or_none(op, **tensors)
    for name, tensor in tensors.items():
        if tensor is not None and (tensor.ndim != 2 or len(tensor) != rows):
            raise refused(op, f"{name} has shape {tuple(tensor.shape)}", f"({rows}, columns)")


def _form(rows: list[Tensor]) -> Rows:
    """Return rows, or rows and their scales, in the form of the arguments."""
    return rows[0] if len(rows) == 1 else (rows[0], rows[1])


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
