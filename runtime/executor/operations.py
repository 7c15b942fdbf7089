"""Lower the steps of a plan to CUDA operations: driver calls and launches in which only the
addresses of tensors are unknown."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple, Protocol

import torch

from ..host.driver import driver, function
from ..host.tracer import TracedStep, Tracer
from ..kernel.kernel import Kernel
from ..plans.regions import Region, Rows
from ..plans.steps import (
    Copy,
    CopyValue,
    Launch,
    Step,
    WaitStream,
    WaitValue,
    WriteValue,
)

_WAIT, _WRITE = 1, 2
"""CU_STREAM_MEM_OP_WAIT_VALUE_32 and CU_STREAM_MEM_OP_WRITE_VALUE_32. Without flags, the wait ends
when word - value is not negative as a signed integer, and a fence precedes the write."""

_TRACED: dict[type[Step], Any] = {
    Copy: "copy", CopyValue: "write", WriteValue: "write", WaitValue: "wait",
}  # fmt: skip
"""Kind of each step in a trace."""

Action = Callable[[Sequence[torch.Tensor], Sequence[int]], Any]
"""Function that enqueues an operation of a call, given its tensors and their addresses."""


class Place(NamedTuple):
    """Address of byte ``offset`` of the ``index``-th tensor of a call; index -1: ``offset`` is the
    address."""

    index: int
    offset: int

    def after(self, offset: int) -> Place:
        """Return the place of a byte after this one."""
        return Place(self.index, self.offset + offset)

    def address(self, addresses: Sequence[int]) -> int:
        """Return the address in a call whose tensors are at ``addresses``."""
        return self.offset + (addresses[self.index] if self.index >= 0 else 0)


class DriverCall(NamedTuple):
    """Call of the driver function ``name`` in ``stream``, which ``args`` include."""

    name: str
    stream: int
    args: tuple[int | Place, ...]

    def arguments(self, addresses: Sequence[int]) -> tuple[int, ...]:
        """Return the arguments of a call whose tensors are at ``addresses``."""
        return tuple(_address(a, addresses) for a in self.args)

    def action(self) -> Action:
        """Return the function that enqueues it."""
        call, args = function(self.name, self.stream), self.args
        places = [(i, *a) for i, a in enumerate(args) if isinstance(a, Place)]
        if not places:
            return lambda tensors, addresses: call(*args)

        def filled(tensors: Sequence[torch.Tensor], addresses: Sequence[int]) -> None:
            concrete = list(args)
            for i, index, offset in places:
                concrete[i] = addresses[index] + offset
            call(*concrete)

        return filled


class StreamMemOps(NamedTuple):
    """32-bit words that a stream waits for or writes, one after the other.

    Attributes:
        words: (operation, address, value) of each word.
    """

    stream: int
    words: tuple[tuple[int, int | Place, int], ...]
    name = "cuStreamBatchMemOp"

    def arguments(self, addresses: Sequence[int]) -> tuple[int, int, list[Any], int]:
        """Return the arguments of a call whose tensors are at ``addresses``."""
        return self.stream, len(self.words), [self._parameters(w, addresses) for w in self.words], 0

    def _parameters(self, word: tuple[int, int | Place, int], addresses: Sequence[int]) -> Any:
        kind, place, value = word
        bindings = driver()
        parameters = bindings.CUstreamBatchMemOpParams()
        fields = parameters.waitValue if kind == _WAIT else parameters.writeValue
        fields.operation = bindings.CUstreamBatchMemOpType(kind)
        fields.address, fields.value = _address(place, addresses), value
        return parameters

    def action(self) -> Action:
        """Return the function that enqueues it."""
        call = function(self.name, self.stream)
        return lambda tensors, addresses: call(*self.arguments(addresses))


class RowsCopy(NamedTuple):
    """Copy of rows that are not contiguous with each other; ``rows`` in bytes."""

    stream: int
    dst: int | Place
    src: int | Place
    rows: Rows
    name = "cuMemcpy2DAsync"

    def arguments(self, addresses: Sequence[int]) -> tuple[Any, int]:
        """Return the arguments of a call whose tensors are at ``addresses``."""
        bindings = driver()
        copy = bindings.CUDA_MEMCPY2D()
        copy.srcMemoryType = copy.dstMemoryType = bindings.CUmemorytype.CU_MEMORYTYPE_DEVICE
        copy.dstDevice, copy.dstPitch = _address(self.dst, addresses), self.rows.dst_pitch
        copy.srcDevice, copy.srcPitch = _address(self.src, addresses), self.rows.src_pitch
        copy.WidthInBytes, copy.Height = self.rows.width, self.rows.count
        return copy, self.stream

    def action(self) -> Action:
        """Return the function that enqueues it."""
        call = function(self.name, self.stream)
        return lambda tensors, addresses: call(*self.arguments(addresses))


class Launchable(Protocol):
    """Kernel with a function that launches it."""

    @property
    def launch(self) -> Callable[..., Any]: ...


class KernelLaunch(NamedTuple):
    """Launch of a kernel on ``args``, including the implicit ones: numbers, tensors, and places."""

    stream: torch.cuda.Stream
    caller: torch.cuda.Stream
    kernel: Launchable
    args: tuple[Any, ...]

    def action(self) -> Action:
        """Return the function that enqueues it."""
        launch, args = self.kernel.launch, self.args
        places = [(i, a.index) for i, a in enumerate(args) if isinstance(a, Place)]

        def in_callers_stream(tensors: Sequence[torch.Tensor], addresses: Sequence[int]) -> None:
            concrete = list(args)
            for i, index in places:
                concrete[i] = tensors[index]
            launch(*concrete)

        return _in_stream(self.stream, self.caller, in_callers_stream)


class TimedStep(NamedTuple):
    """Operation of a step between two events of its stream, for a trace.

    Attributes:
        place: address of the word that the step writes or waits for, or of the region of a copy
            that the tracer names.
    """

    operation: DriverCall | StreamMemOps | RowsCopy
    step: Copy | CopyValue | WriteValue | WaitValue
    stream: torch.cuda.Stream
    place: int | Place
    nbytes: int
    tracer: Tracer

    @property
    def name(self) -> str:
        return self.operation.name

    def action(self) -> Action:
        """Return the function that enqueues it and lets the tracer record it."""
        enqueue, step = self.operation.action(), self.step
        kind = _TRACED[type(step)]
        region = step.flag if isinstance(step, WaitValue) else step.dst
        value = getattr(step, "value", None)

        def timed(tensors: Sequence[torch.Tensor], addresses: Sequence[int]) -> None:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            host_ns = time.monotonic_ns()
            begin.record(self.stream)
            enqueue(tensors, addresses)
            end.record(self.stream)
            stream = self.tracer.stream(self.stream.cuda_stream)
            address = _address(self.place, addresses)
            self.tracer.steps.append(
                TracedStep(
                    kind, step.title, step.loc, stream, region.parameter.name, address, value,
                    self.nbytes, begin, end, host_ns,
                )
            )  # fmt: skip

        return timed


Operation = DriverCall | StreamMemOps | RowsCopy | KernelLaunch | TimedStep


class Operations:
    """Lowers the steps of a plan to operations.

    Args:
        call_tensors: name -> tensor of one call.
        fixed: names of the tensors with the same address in each call.
        implicit: name -> tensor that the compiler added to a kernel.
        streams: name -> stream; None is the caller's stream.
        event: n -> the driver's handle of the n-th event that calls share.
        tracer: records the steps, if there is one.
    """

    def __init__(
        self,
        call_tensors: Mapping[str, torch.Tensor],
        fixed: Iterable[str],
        implicit: Mapping[str, torch.Tensor],
        streams: Mapping[str | None, torch.cuda.Stream],
        event: Callable[[int], int],
        tracer: Tracer | None = None,
    ) -> None:
        self._tensors, self._streams, self._event = {**call_tensors, **implicit}, streams, event
        self._tracer = tracer
        self._indices = {name: i for i, name in enumerate(call_tensors)}
        self._fixed = {*fixed, *implicit}
        self._events = 0
        self._recorded: dict[str | None, int] = {}
        """Name of a stream -> event recorded after its last operation."""

    def lower(self, steps: Iterable[Step], kernels: Mapping[int, Kernel]) -> list[Operation]:
        """Return the operations of ``steps``.

        Args:
            kernels: ``id`` of a step that launches -> its kernel.
        """
        operations: list[Operation] = []
        for step in steps:
            match step:
                case Copy():
                    copy = self._copy(step, step.rows)
                    elements = step.rows.count * step.rows.width
                    remote = step.dst if step.dst.parameter.symmetric else step.src
                    operations.append(self._timed(copy, step, remote, elements))
                case CopyValue():
                    count = math.prod(step.dst.extent)
                    copy = self._copy(step, Rows(1, count, count, count))
                    operations.append(self._timed(copy, step, step.dst))
                case WriteValue():
                    word = self._word(_WRITE, step, step.dst)
                    operations.append(self._timed(word, step, step.dst))
                case WaitValue():
                    word = self._word(_WAIT, step, step.flag)
                    operations.append(self._timed(word, step, step.flag))
                case WaitStream():
                    operations += self._wait(step)
                case Launch():
                    operations.append(self._launch(step, kernels[id(step)]))
            self._recorded.pop(step.stream, None)
        return list(_batched(operations))

    def _timed(
        self,
        operation: DriverCall | StreamMemOps | RowsCopy,
        step: Copy | CopyValue | WriteValue | WaitValue,
        region: Region,
        elements: int = 0,
    ) -> Operation:
        """Return ``operation``; the tracer records it if there is one."""
        if self._tracer is None:
            return operation
        size = self._tensors[region.parameter.name].itemsize
        return TimedStep(
            operation, step, self._streams[step.stream], self._place(region), elements * size,
            self._tracer,
        )  # fmt: skip

    def _copy(self, step: Copy | CopyValue, rows: Rows) -> DriverCall | RowsCopy:
        stream = self._handle(step.stream)
        dst, src = self._place(step.dst), self._place(step.src)
        size = self._tensors[step.dst.parameter.name].itemsize
        if rows.count == 1:
            return DriverCall("cuMemcpyDtoDAsync", stream, (dst, src, rows.width * size, stream))
        rows = Rows(rows.count, rows.width * size, rows.dst_pitch * size, rows.src_pitch * size)
        return RowsCopy(stream, dst, src, rows)

    def _word(self, kind: int, step: WriteValue | WaitValue, word: Region) -> StreamMemOps:
        value = step.value & 0xFFFFFFFF
        return StreamMemOps(self._handle(step.stream), ((kind, self._place(word), value),))

    def _wait(self, step: WaitStream) -> list[Operation]:
        """Return a wait for an event; all waits for the same point of a stream share the event."""
        stream, other, operations = self._handle(step.stream), self._handle(step.other), []
        if step.other not in self._recorded:
            event = self._recorded[step.other] = self._event(self._events)
            self._events += 1
            operations.append(DriverCall("cuEventRecord", other, (event, other)))
        event = self._recorded[step.other]
        return [*operations, DriverCall("cuStreamWaitEvent", stream, (stream, event, 0))]

    def _launch(self, step: Launch, kernel: Kernel) -> Operation:
        args = [
            self._argument(v.parameter.name) if isinstance(v, Region) else v
            for v in step.arguments.values()
        ]
        args += kernel.added_arguments
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
    """Yield ``operations``, with consecutive word operations of one stream merged."""
    for stream, batch in groupby(operations, lambda o: isinstance(o, StreamMemOps) and o.stream):
        if stream is False:
            yield from batch
        else:
            yield StreamMemOps(stream, tuple(word for o in batch for word in o.words))


def _in_stream(stream: torch.cuda.Stream, caller: torch.cuda.Stream, action: Action) -> Action:
    """Return ``action`` with ``stream`` as torch's current stream, which is ``caller`` else."""

    def in_own_stream(tensors: Sequence[torch.Tensor], addresses: Sequence[int]) -> None:
        torch.cuda.set_stream(stream)
        try:
            action(tensors, addresses)
        finally:
            torch.cuda.set_stream(caller)

    return action if stream is caller else in_own_stream


def _address(place: int | Place, addresses: Sequence[int]) -> int:
    return place.address(addresses) if isinstance(place, Place) else place
