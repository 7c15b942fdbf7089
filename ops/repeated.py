"""Calls like earlier ones from the same thread in the same stream: nothing is checked, and one
native call enqueues all."""

from __future__ import annotations

import threading
from collections.abc import Hashable, Sequence
from functools import partial

import torch

from ..runtime import plan_streams
from ..runtime.kernel import capturing
from ..runtime.native import library
from .made import Made
from .prepared import Prepared
from .remembered import Remembered


class Repeat:
    """What a call did, to be done with other tensors of the same shapes, types and strides.

    Attributes:
        empty: makes memory for a result.
    """

    def __init__(
        self, kept: Prepared, made: Made, inputs: Sequence[torch.Tensor], out: torch.Tensor,
        shape: torch.Size,
    ) -> None:  # fmt: skip
        """
        Args:
            kept: where ``made`` is kept.
            inputs, out: as ``made`` declares them.
            shape: of the result for the caller.
        """
        self._kept, self._made = kept, made
        self._ready, addresses = made.ready(inputs, out)
        self._between = addresses[len(inputs) : -1]
        strides = tuple(torch.empty(shape, device="meta").stride())
        self.empty = partial(
            torch.empty_strided, tuple(shape), strides, dtype=out.dtype, device=out.device
        )

    @property
    def is_valid(self) -> bool:
        """Whether addresses are all that it needs, and ``made`` still has its memory."""
        return self._ready.native and self._ready.is_valid

    def __call__(self, inputs: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        """Compute ``out``."""
        self._kept.use(self._made)
        addresses = [x.data_ptr() for x in inputs]
        self._ready((), [*addresses, *self._between, out.data_ptr()])


class _Thread(threading.local):
    """What is remembered for one thread, whose events a call records and waits for at once."""

    def __init__(self) -> None:
        self.repeats: Remembered[Repeat] = Remembered()


_here = _Thread()


def repeat_of(key: Hashable, device: torch.device) -> Repeat | None:
    """What does a call of which ``key`` says all but the addresses; None if none like it was made
    here, or a CUDA graph is being captured, which may record something else."""
    if not plan_streams.has_driver(device):
        return None
    repeat = _here.repeats.get((key, plan_streams.current_stream(device)))
    return repeat if repeat is not None and repeat.is_valid and not capturing() else None


def repeat_later(
    key: Hashable, kept: Prepared, made: Made, inputs: Sequence[torch.Tensor], out: torch.Tensor,
    shape: torch.Size,
) -> None:  # fmt: skip
    """Let ``repeat_of`` find the call that was just made.

    Args:
        kept, made, inputs, out, shape: as ``Repeat`` takes them.
    """
    device = out.device
    if plan_streams.has_driver(device) and library() is not None and not capturing():
        _here.repeats.put(
            (key, plan_streams.current_stream(device)), Repeat(kept, made, inputs, out, shape)
        )
