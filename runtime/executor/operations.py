"""The steps of a plan as what CUDA is told: driver calls and launches in which only addresses are
open."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import torch

from ..host.driver import driver, function
from ..kernel.kernel import Kernel
from ..plans.regions import Region, Rows
from ..plans.steps import Copy, CopyValue, Launch, Step, WaitStream, WaitValue, WriteValue

_WAIT, _WRITE = 1, 2
"""CU_STREAM_MEM_OP_WAIT_VALUE_32 and CU_STREAM_MEM_OP_WRITE_VALUE_32. Without flags the first goes
on when the difference is not negative as a signed number, and the second comes after a fence."""

Action = Callable[[Sequence[torch.Tensor], Sequence[int]], Any]
"""Enqueues an operation of a call, given its tensors and their addresses."""


class Place(NamedTuple):
    """``offset`` bytes behind the start of the ``index``-th tensor that a call brings."""

    index: int
    offset: int


class DriverCall(NamedTuple):
    """The driver's function ``name`` in the stream ``on``, which is among ``args``, too."""

    name: str
    on: int
    args: tuple[int | Place, ...]

    def arguments(self, addresses: Sequence[int]) -> tuple[int, ...]:
        """Those of a call whose tensors lie at ``addresses``."""
        return tuple(_address(a, addresses) for a in self.args)

    def action(self) -> Action:
        """What does it."""
        call, args = function(self.name, self.on), self.args
        places = [(i, *a) for i, a in enumerate(args) if isinstance(a, Place)]
        if not places:
            return lambda tensors, addresses: call(*args)

        def filled(tensors: Sequence[torch.Tensor], addresses: Sequence[int]) -> None:
            known = list(args)
            for i, index, offset in places:
                known[i] = addresses[index] + offset
            call(*known)

        return filled


class StreamMemOps(NamedTuple):
    """Words that a stream waits for or writes, one after the other.

    Attributes:
        words: of each the operation, where it lies, and the value.
    """

    on: int
    words: tuple[tuple[int, int | Place, int], ...]
    name = "cuStreamBatchMemOp"

    def arguments(self, addresses: Sequence[int]) -> tuple[int, int, list[Any], int]:
        """Those of a call whose tensors lie at ``addresses``."""
        return self.on, len(self.words), [self._one(w, addresses) for w in self.words], 0

    def _one(self, word: tuple[int, int | Place, int], addresses: Sequence[int]) -> Any:
        kind, place, value = word
        bindings = driver()
        one = bindings.CUstreamBatchMemOpParams()
        what = one.waitValue if kind == _WAIT else one.writeValue
        what.operation = bindings.CUstreamBatchMemOpType(kind)
        what.address, what.value = _address(place, addresses), value
        return one

    def action(self) -> Action:
        """What does it."""
        call = function(self.name, self.on)
        return lambda tensors, addresses: call(*self.arguments(addresses))


class RowsCopy(NamedTuple):
    """A copy of rows that do not touch each other; ``rows`` in bytes."""

    on: int
    dst: int | Place
    src: int | Place
    rows: Rows
    name = "cuMemcpy2DAsync"

    def arguments(self, addresses: Sequence[int]) -> tuple[Any, int]:
        """Those of a call whose tensors lie at ``addresses``."""
        bindings = driver()
        what = bindings.CUDA_MEMCPY2D()
        what.srcMemoryType = what.dstMemoryType = bindings.CUmemorytype.CU_MEMORYTYPE_DEVICE
        what.dstDevice, what.dstPitch = _address(self.dst, addresses), self.rows.dst_pitch
        what.srcDevice, what.srcPitch = _address(self.src, addresses), self.rows.src_pitch
        what.WidthInBytes, what.Height = self.rows.width, self.rows.count
        return what, self.on

    def action(self) -> Action:
        """What does it."""
        call = function(self.name, self.on)
        return lambda tensors, addresses: call(*self.arguments(addresses))


class KernelLaunch(NamedTuple):
    """A kernel on ``args``, its hidden ones too: numbers, tensors, places of tensors."""

    on: torch.cuda.Stream
    caller: torch.cuda.Stream
    kernel: Kernel
    args: tuple[Any, ...]

    def action(self) -> Action:
        """What does it."""
        launch, args = self.kernel.launch, self.args
        places = [(i, a.index) for i, a in enumerate(args) if isinstance(a, Place)]

        def here(tensors: Sequence[torch.Tensor], addresses: Sequence[int]) -> None:
            known = list(args)
            for i, index in places:
                known[i] = tensors[index]
            launch(*known)

        def aside(tensors: Sequence[torch.Tensor], addresses: Sequence[int]) -> None:
            torch.cuda.set_stream(self.on)
            try:
                here(tensors, addresses)
            finally:
                torch.cuda.set_stream(self.caller)

        return here if self.on is self.caller else aside


Operation = DriverCall | StreamMemOps | RowsCopy | KernelLaunch


class Operations:
    """The operations of the steps of a plan.

    Args:
        given: the tensors of such a call, by name.
        fixed: those of them that lie at the same place in each.
        hidden: what its kernels hide, by name.
        streams: by name; None is the caller's.
        event: n -> the n-th of events that calls share, as the driver knows it.
    """

    def __init__(
        self,
        given: Mapping[str, torch.Tensor],
        fixed: Iterable[str],
        implicit: Mapping[str, torch.Tensor],
        streams: Mapping[str | None, torch.cuda.Stream],
        event: Callable[[int], int],
    ) -> None:
        self._tensors, self._streams, self._event = {**given, **implicit}, streams, event
        self._indices = {name: i for i, name in enumerate(given)}
        self._fixed = {*fixed, *implicit}
        self._events = 0
        self._recorded: dict[str | None, int] = {}
        """The event at which a stream still is, by the stream's name."""

    def of(self, steps: Iterable[Step], kernels: Mapping[int, Kernel]) -> list[Operation]:
        """
        Args:
            kernels: by the ``id`` of the step that launches them.
        """
        operations: list[Operation] = []
        for step in steps:
            match step:
                case Copy():
                    operations.append(self._copy(step, step.rows))
                case CopyValue():
                    words = math.prod(step.dst.extent)
                    operations.append(self._copy(step, Rows(1, words, words, words)))
                case WriteValue():
                    operations.append(self._word(_WRITE, step, step.dst))
                case WaitValue():
                    operations.append(self._word(_WAIT, step, step.flag))
                case WaitStream():
                    operations += self._wait(step)
                case Launch():
                    operations.append(self._launch(step, kernels[id(step)]))
            self._recorded.pop(step.stream, None)
        return list(_batched(operations))

    def _copy(self, step: Copy | CopyValue, rows: Rows) -> Operation:
        on = self._handle(step.stream)
        dst, src = self._place(step.dst), self._place(step.src)
        size = self._tensors[step.dst.parameter.name].itemsize
        if rows.count == 1:
            return DriverCall("cuMemcpyDtoDAsync", on, (dst, src, rows.width * size, on))
        rows = Rows(rows.count, rows.width * size, rows.dst_pitch * size, rows.src_pitch * size)
        return RowsCopy(on, dst, src, rows)

    def _word(self, kind: int, step: WriteValue | WaitValue, word: Region) -> StreamMemOps:
        value = step.value & 0xFFFFFFFF
        return StreamMemOps(self._handle(step.stream), ((kind, self._place(word), value),))

    def _wait(self, step: WaitStream) -> list[Operation]:
        """One event serves all who wait for the same point of a stream."""
        on, other, operations = self._handle(step.stream), self._handle(step.other), []
        if step.other not in self._recorded:
            event = self._recorded[step.other] = self._event(self._events)
            self._events += 1
            operations.append(DriverCall("cuEventRecord", other, (event, other)))
        event = self._recorded[step.other]
        return [*operations, DriverCall("cuStreamWaitEvent", on, (on, event, 0))]

    def _launch(self, step: Launch, kernel: Kernel) -> Operation:
        args = [
            self._argument(v.parameter.name) if isinstance(v, Region) else v
            for v in step.arguments.values()
        ]
        args += kernel.implicit_tensors.values()
        return KernelLaunch(self._streams[step.stream], self._streams[None], kernel, tuple(args))

    def _argument(self, name: str) -> torch.Tensor | Place:
        return Place(self._indices[name], 0) if name in self._indices else self._tensors[name]

    def _handle(self, stream: str | None) -> int:
        return self._streams[stream].cuda_stream

    def _place(self, region: Region) -> int | Place:
        name = region.parameter.name
        tensor = self._tensors[name]
        elements = sum(i * stride for i, stride in zip(region.start, tensor.stride(), strict=True))
        offset = elements * tensor.itemsize
        if name in self._fixed:
            return tensor.data_ptr() + offset
        return Place(self._indices[name], offset)


def _batched(operations: Iterable[Operation]) -> Iterator[Operation]:
    """The same, words of one stream that follow each other at once."""
    for batch, each in groupby(operations, lambda o: isinstance(o, StreamMemOps) and o.on):
        if batch is False:
            yield from each
        else:
            yield StreamMemOps(batch, tuple(word for o in each for word in o.words))


def _address(place: int | Place, addresses: Sequence[int]) -> int:
    return addresses[place.index] + place.offset if isinstance(place, Place) else place
