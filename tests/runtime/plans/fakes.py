"""Fakes of the driver, streams and kernels, and plans for them.

Memory is real: ranks are threads whose heaps are adjacent, and copies copy.
"""

import ctypes
import functools
import threading
import types
from typing import Any

import tilelang.language as T
import torch

import tileweave as tw
from tileweave import language as W
from tileweave.runtime.executor import calls as plan_streams
from tileweave.runtime.executor import operations, recorded_calls
from tileweave.runtime.host.group import Group
from tileweave.runtime.host.heap import Heap
from tileweave.runtime.host.memory import PAGE, Memory
from tileweave.runtime.kernel.kernel import Kernel
from tileweave.runtime.plans import traced_plan as plans

INBOX, FLAGS = W.Symmetric((2, 4, 8), "int32"), W.Symmetric((2,), "uint32")
m = T.dynamic("m")


@T.prim_func
def kernel(inbox: INBOX, out: T.Tensor((m, 8), "int32"), scale: T.float32, epoch: T.int32):
    with T.Kernel(1, threads=32):
        out[0, 0] = inbox[W.rank(), epoch % 2, 0, 0] * T.Cast("int32", scale)


def declared(body, **annotations):
    """Return a plan of ``body`` with these parameters."""
    parameters = [plans.Parameter.of(name, kind) for name, kind in annotations.items()]
    return tw.Plan("f", parameters, body, "here:1")


STANDARD = {
    "A": T.Tensor((m, 8), "int32"), "inbox": INBOX, "flags": FLAGS,
    "word": T.Tensor((1,), "uint32"), "epoch": T.int32,
}  # fmt: skip


def trace(body, rank=0, world_size=4, **annotations):
    plan = declared(body, **(annotations or STANDARD))
    shapes = {"A": (4, 8), "inbox": (2, 4, 8), "flags": (2,), "word": (1,)}
    return plan.trace(rank, world_size, shapes, {"epoch": 5})


class FakeStream:
    """Stream with a name; all streams share one log."""

    def __init__(self, log: list, name: str) -> None:
        self.log, self.name = log, name
        self.cuda_stream = id(self)
        self.stream_id = 1
        self.device = "cpu"


class FakeEvent:
    """Event that exists for the driver once it was recorded."""

    cuda_event = 0

    def record(self, stream: FakeStream) -> None:
        self.cuda_event = id(self)


class FakeKernel(Kernel):
    """Kernel that logs its launches."""

    def __init__(self, program: Any, log: list) -> None:
        super().__init__(None, program)
        self.log = log

    @property
    def launch(self) -> Any:
        return self

    def __call__(self, inbox, out, scale, epoch) -> None:
        self.log.append(("kernel", epoch, scale))


class Ranks:
    """Fakes of each rank's session, driver and streams; each rank is a thread."""

    def __init__(self, ranks: int, monkeypatch) -> None:
        self.ranks, self.here = ranks, threading.local()
        self._bytes = torch.zeros(ranks * 2 * PAGE, dtype=torch.uint8)
        for name, value in (
            ("current", lambda group: self.here.session),
            ("current_stream", lambda device: self.here.caller.name),
            ("compile", self.compile),
        ):
            monkeypatch.setattr(plan_streams, name, value)
        # Ranks are threads, so their calls are not those of one process.
        monkeypatch.setattr(recorded_calls, "begin_call", lambda *_: False)
        monkeypatch.setattr(operations, "function", self.function)
        monkeypatch.setattr(operations, "driver", lambda: self)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: self.here.caller)
        monkeypatch.setattr(torch.cuda, "Stream", lambda device, priority: self.new_stream())
        monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
        monkeypatch.setattr(torch.cuda, "set_stream", self.set_stream)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    CUmemorytype = types.SimpleNamespace(CU_MEMORYTYPE_DEVICE="device")
    CUDA_MEMCPY2D = types.SimpleNamespace
    CUstreamBatchMemOpType = staticmethod({1: "wait", 2: "write"}.get)

    def new_stream(self, name: str = "side") -> FakeStream:
        stream = FakeStream(self.here.log, f"{name} {len(self.here.streams)}")
        self.here.streams[stream.cuda_stream] = stream
        return stream

    def join(self, group: Group) -> None:
        self.here.log, self.here.streams, self.here.compiled = [], {}, []
        self.here.recorded, self.here.records = {}, []
        self.here.caller = self.new_stream("caller")
        heap = Heap(group, Memory(self._bytes.data_ptr(), 2 * PAGE, PAGE, self._bytes), 1 << 16)
        watchdog = types.SimpleNamespace(raise_if_deadlocked=lambda: None)
        self.here.session = types.SimpleNamespace(
            group=group, heap=heap, watchdog=watchdog, name="", label="the default group"
        )
        group.meet("up")

    def set_stream(self, stream: FakeStream) -> None:
        self.here.log.append(("current", stream.name))

    def function(self, name: str, stream: int) -> Any:
        return functools.partial(getattr(self, name), self.here.streams[stream].name)

    def cuMemcpyDtoDAsync(self, on: str, dst: int, src: int, nbytes: int, stream: int) -> None:
        self.here.log.append((on, "copy"))
        assert self.here.streams[stream].name == on
        ctypes.memmove(dst, src, nbytes)

    def cuMemcpy2DAsync(self, on: str, what: Any, stream: int) -> None:
        self.here.log.append((on, "copy of rows"))
        assert self.here.streams[stream].name == on
        assert (what.srcMemoryType, what.dstMemoryType) == ("device", "device")
        for row in range(what.Height):
            dst, src = what.dstDevice + row * what.dstPitch, what.srcDevice + row * what.srcPitch
            ctypes.memmove(dst, src, what.WidthInBytes)

    def CUstreamBatchMemOpParams(self) -> types.SimpleNamespace:
        word = types.SimpleNamespace()
        return types.SimpleNamespace(word=word, waitValue=word, writeValue=word)

    def cuStreamBatchMemOp(
        self, on: str, stream: int, count: int, words: list[types.SimpleNamespace], flags: int
    ) -> None:
        assert (self.here.streams[stream].name, count, flags) == (on, len(words), 0)
        for word in (w.word for w in words):
            at = ctypes.c_uint32.from_address(word.address)
            if word.operation == "write":
                self.here.log.append((on, "write", word.value))
                at.value = word.value
            else:
                assert word.operation == "wait"
                self.here.log.append((on, "wait for value", at.value, word.value))

    def cuEventRecord(self, on: str, event: int, stream: int) -> None:
        assert event and self.here.streams[stream].name == on
        self.here.recorded[event] = on
        self.here.records.append(event)

    def cuStreamWaitEvent(self, on: str, stream: int, event: int, flags: int) -> None:
        assert (self.here.streams[stream].name, flags) == (on, 0)
        self.here.log.append((on, "wait", self.here.recorded[event]))

    def compile(self, program: Any, group: Any) -> FakeKernel:
        self.here.compiled.append(program)
        return FakeKernel(program, self.here.log)


CONFIGS = {"tileweave.delays": 3, "tl.disable_tma_lower": True}


@tw.plan(pass_configs=CONFIGS)
def exchange(
    p: tw.PlanBuilder,
    A: T.Tensor((m, 8), "int32"),
    inbox: W.Symmetric((2, 4, 8), "int32"),
    flags: W.Symmetric((2,), "uint32"),
    word: T.Tensor((1,), "uint32"),
    epoch: T.int32,
):
    for peer in p.peers():
        p.copy(inbox[peer, epoch % 2, p.rank], A[peer], stream="copies")
        p.copy(inbox[peer, :, 3, p.rank : p.rank + 2], A[0:2, 2:4], stream="copies")
        p.write_value(flags[peer, 0], epoch + 1, stream="copies")
        p.copy_value(flags[peer, 1], word[0], stream="copies")
    p.launch(kernel, inbox, A, 2.0, epoch)


@T.prim_func
def other(inbox: INBOX, out: T.Tensor((m, 8), "int32"), scale: T.float32, epoch: T.int32):
    with T.Kernel(1, threads=32):
        out[0, 1] = inbox[W.rank(), epoch % 2, 0, 0]


ints = functools.partial(torch.zeros, dtype=torch.int32)


@tw.plan
def shared(
    p: tw.PlanBuilder,
    A: T.Tensor((m, 8), "int32"),
    inbox: INBOX,
    flags: FLAGS,
    word: T.Tensor((1,), "uint32"),
):
    """Three streams start at the same point of the caller's stream."""
    p.copy(inbox[p.rank, 0], A, stream="rows")
    p.copy_value(flags[p.rank, 0], word[0], stream="words")
    p.write_value(flags[p.rank, 1], -1, stream="values")
    p.launch(kernel, inbox, A, 2.0, 1)


def alone(monkeypatch, every_rank, function):
    """Return the result of ``function(here, A, inbox, flags, word)`` on the only rank."""
    world = Ranks(1, monkeypatch)

    def rank(group: Group) -> Any:
        world.join(group)
        heap = world.here.session.heap
        inbox, flags = heap.allocate((2, 4, 8), torch.int32), heap.allocate((2,), torch.uint32)
        A = torch.arange(32, dtype=torch.int32).reshape(4, 8)
        return function(world.here, A, inbox, flags, torch.tensor([7], dtype=torch.uint32))

    (actual,) = every_rank(rank, 1)
    if isinstance(actual, Exception):
        raise actual
    return actual
