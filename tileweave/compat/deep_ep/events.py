"""Small classes of DeepEP's interface."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Config:
    """Sizes of DeepEP's kernels. None of them is used: the operators choose their own."""

    num_sms: int = 20
    num_max_nvl_chunked_send_tokens: int = 6
    num_max_nvl_chunked_recv_tokens: int = 256
    num_max_rdma_chunked_send_tokens: int = 6
    num_max_rdma_chunked_recv_tokens: int = 256

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Return 0: all memory is in the symmetric heap."""
        return 0

    get_rdma_buffer_size_hint = get_nvl_buffer_size_hint


class EventOverlap:
    """Event of a stream, or no event, for which nothing waits. ``with`` waits at its end.

    Attributes:
        event: None for no event.
        extra_tensors: tensors that this object keeps.
    """

    def __init__(self, event: torch.cuda.Event | None = None, extra_tensors: Any = None) -> None:
        self.event, self.extra_tensors = event, extra_tensors

    def current_stream_wait(self) -> None:
        """Let the current stream wait for the event."""
        if self.event is not None:
            torch.cuda.current_stream().wait_event(self.event)

    def __enter__(self) -> EventOverlap:
        return self

    def __exit__(self, *_: Any) -> None:
        self.current_stream_wait()
