"""What plans record and refuse, and what they enqueue. The driver, the streams and the kernels are
fakes; memory is not: the ranks are threads whose heaps lie side by side, and copies copy."""

import ctypes
import functools
import sys
import threading
import time
import types
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import tilelang.language as T
import torch
from torch._subclasses import FakeTensorMode

import tileweave as tw
from tileweave import language as W
from tileweave.runtime.executor import calls as plan_streams
from tileweave.runtime.executor import operations
from tileweave.runtime.executor.recorded_calls import invalidate, recorded_calls
from tileweave.runtime.host.group import Group
from tileweave.runtime.host.heap import Heap, HeapExhausted
from tileweave.runtime.host.memory import PAGE, Memory
from tileweave.runtime.kernel.kernel import Kernel
from tileweave.runtime.plans import traced_plan as plans
from tileweave.runtime.plans.regions import Region, Rows
from tileweave.runtime.plans.steps import Copy, CopyValue, Launch, WaitStream, WaitValue, WriteValue

INBOX, FLAGS = W.Symmetric((2, 4, 8), "int32"), W.Symmetric((2,), "uint32")
m = T.dynamic("m")


@T.prim_func
def kernel(inbox: INBOX, out: T.Tensor((m, 8), "int32"), scale: T.float32, epoch: T.int32):
    with T.Kernel(1, threads=32):
        out[0, 0] = inbox[W.rank(), epoch % 2, 0, 0] * T.Cast("int32", scale)


def declared(body, **annotations):
    """A plan of ``body`` with these parameters."""
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


def test_steps_in_their_order_forked_and_joined():
    def body(p, A, inbox, flags, word, epoch):
        for peer in p.peers():
            p.copy(inbox[peer, epoch % 2], A, stream="copies")
            p.write_value(flags[peer, 1], epoch + 1, stream="copies")
        p.copy_value(flags[0, 0], word[0], stream="words")
        p.wait_stream("words", stream="copies")
        p.wait_value(flags[p.rank, 0], epoch, stream="copies")
        p.wait_value(word[0], -1)
        p.launch(kernel, inbox, A, 2.0, epoch)

    steps = trace(body, rank=2)
    assert [(type(s), s.stream, getattr(s, "other", "")) for s in (*steps[:2], *steps[-2:])] == [
        (WaitStream, "copies", None), (WaitStream, "words", None),
        (WaitStream, None, "copies"), (WaitStream, None, "words"),
    ]  # fmt: skip
    middle = steps[2:-2]
    assert [type(s) for s in middle] == [
        *[Copy, WriteValue] * 3, CopyValue, WaitStream, WaitValue, WaitValue, Launch
    ]  # fmt: skip
    assert [s.dst.rank for s in middle[:6:2]] == [3, 0, 1]
    assert [s.number for s in middle] == list(range(1, 12))
    assert middle[0].dst.key == (3, 1, slice(0, 4), slice(0, 8))
    assert middle[1].value == 6
    assert [(s.flag.key, s.value) for s in middle[-3:-1]] == [((2, 0), 5), ((0,), -1)]
    assert str(middle[0].dst) == "inbox[3, 1, 0:4, 0:8]"
    assert middle[-1].arguments["scale"] == 2.0
    assert middle[0].loc.startswith(f"{__file__}:")


@pytest.mark.parametrize(
    ("dst", "src", "rows"),
    [
        ("inbox[1, 0]", "A", Rows(1, 32, 32, 32)),
        ("inbox[1, 0, 1:3]", "A[0:2]", Rows(1, 16, 16, 16)),
        ("inbox[1, 0, 2, 1:7]", "A[0, 0:6]", Rows(1, 6, 6, 6)),
        ("inbox[1, 0, 0:2, 0:4]", "A[0:2, 4:8]", Rows(2, 4, 8, 8)),
        ("inbox[1, :, 0]", "A[0:2]", Rows(2, 8, 32, 8)),
        ("inbox[1, :, :, 3]", "A2", Rows(8, 1, 8, 1)),
        ("inbox[1, 0, 0, 0]", "A[1, 1]", Rows(1, 1, 1, 1)),
    ],
)
def test_rows_of_a_copy(dst, src, rows):
    def body(p, **tensors):
        p.copy(eval(dst, tensors), eval(src, tensors))

    shapes = {"A": (4, 8), "A2": (2, 4), "inbox": (4, 2, 4, 8)}
    symmetric = {"inbox": True}
    p = plans.PlanBuilder(0, 4)
    body(p, **{
        n: Region.of(plans.Parameter(n, "int32", s, symmetric.get(n, False)), s)
        for n, s in shapes.items()
    })  # fmt: skip
    assert p.steps[0].rows == rows


REFUSED = [
    (lambda p, A, *_: p.copy(A[0:2], A[1:3]), "copy: src=A[1:3, 0:8] overlaps dst=A[0:2, 0:8]; "
     "expected regions apart"),
    (lambda p, A, inbox, *_: p.copy(inbox[1, 0, 0:2], A), "src=A[0:4, 0:8] has shape (4, 8); "
     "expected (2, 8) of dst=inbox[1, 0, 0:2, 0:8]"),
    (lambda p, A, inbox, flags, *_: p.copy(flags[1], inbox[0, 0, 0, 0:2]), "has dtype int32; "
     "expected uint32"),
    (lambda p, A, inbox, *_: p.copy(inbox[:, 0, 0], A), "dst=inbox[0:4, 0, 0, 0:8] is in several "
     "ranks' memory; expected an index of one rank"),
    (lambda p, A, inbox, *_: p.copy(inbox[0, 0:2, 0:2, 0:4], inbox[1, 0:2, 0:2, 0:4]),
     "expected rows at one distance"),
    (lambda p, A, *_: p.copy(A, 3), "copy: src=3; expected a tensor of the plan"),
    (lambda p, A, *_: A[4], "A[0:4, 0:8]: index 4 of axis 0; expected 0 to 3"),
    (lambda p, A, *_: A[-1], "index -1 of axis 0; expected 0 to 3"),
    (lambda p, A, *_: A[0:5], "slice 0:5 of axis 0; expected a part of 0:4 in steps of 1"),
    (lambda p, A, *_: A[0:4:2], "slice 0:4:2 of axis 0"),
    (lambda p, A, *_: A[0, 0, 0], "3 indices; expected at most 2"),
    (lambda p, A, *_: A[1.5], "index 1.5 of axis 0; expected an integer or a slice"),
    (lambda p, A, inbox, flags, *_: p.write_value(flags[1], 3), "dst=flags[1, 0:2] of uint32; "
     "expected one element of int32 or uint32"),
    (lambda p, A, inbox, flags, *_: p.write_value(flags[1, 0], 0.5), "value=0.5; expected an "
     "integer"),
    (lambda p, A, inbox, flags, *_: p.copy_value(flags[1, 0], flags[2, 0]), "src=flags[2, 0]; "
     "expected own memory, of rank 0"),
    (lambda p, A, inbox, flags, *_: p.wait_value(flags[0], 3), "wait_value: flag=flags[0, 0:2] of "
     "uint32; expected one element of int32 or uint32"),
    (lambda p, A, inbox, flags, *_: p.wait_value(3, 3), "wait_value: flag=3; expected a tensor of "
     "the plan"),
    (lambda p, A, inbox, flags, *_: p.wait_value(flags[2, 0], 3), "wait_value: flag=flags[2, 0]; "
     "expected own memory, of rank 0"),
    (lambda p, A, inbox, flags, *_: p.wait_value(flags[0, 0], "3"), "wait_value: value='3'; "
     "expected an integer"),
    (lambda p, A, inbox, flags, *_: p.copy_value(flags[1, 0], A[0, 0]), "src=A[0, 0] has dtype "
     "int32; expected uint32"),
    (lambda p, A, inbox, *_: p.launch(kernel, inbox, A, 2.0), "3 arguments; expected 4: inbox, "
     "out, scale, epoch"),
    (lambda p, A, inbox, *_: p.launch(kernel, A, A, 2.0, 1), "inbox=A; expected a W.Symmetric"),
    (lambda p, A, inbox, *_: p.launch(kernel, inbox, inbox, 2.0, 1), "out=inbox; expected a "
     "T.Tensor"),
    (lambda p, A, inbox, *_: p.launch(kernel, inbox, A[0:2], 2.0, 1), "out=A[0:2, 0:8]; expected "
     "a whole tensor"),
    (lambda p, A, inbox, flags, word, _: p.launch(kernel, inbox, word, 2.0, 1), "of uint32; "
     "expected int32"),
    (lambda p, A, inbox, *_: p.launch(kernel, inbox, A, A, 1), "scale=A[0:4, 0:8]; expected a "
     "number (float32)"),
    (lambda p, A, inbox, *_: p.launch(kernel, inbox, A, torch.tensor(2.0), 1), "scale=tensor(2.); "
     "expected a number (float32)"),
    (lambda p, A, inbox, *_: p.launch(kernel, inbox, A, 2.0, 1 << 31), "epoch=2147483648; expected "
     "-2147483648 to 2147483647 (int32)"),
    (lambda p, A, *_: p.launch(len, A), "kernel=<built-in function len>; expected a T.prim_func"),
    (lambda p, A, *_: p.wait_stream("nobody"), "other='nobody' has no steps"),
    (lambda p, A, *_: p.wait_stream(["a"]), "other=['a'] has no steps"),
    (lambda p, A, *_: A[torch.tensor([0, 1])], "index tensor([0, 1]) of axis 0; expected an "
     "integer or a slice"),
    (lambda p, A, *_: A[int], "index <class 'int'> of axis 0; expected an integer or a slice"),
    (lambda p, A, *_: A[A], "index A[0:4, 0:8] of axis 0; expected an integer or a slice"),
    (lambda p, A, *_: A[0 : 4 : torch.ones(2)], "index tensor([1., 1.]) of axis 0; expected"),
    (lambda p, A, inbox, flags, *_: p.write_value(flags[1, 0], torch.tensor([1, 2])),
     "value=tensor([1, 2]); expected an integer"),
    (lambda p, A, inbox, flags, *_: p.write_value(flags[1, 0], flags[0, 0]),
     "value=flags[0, 0]; expected an integer"),
    (lambda p, A, inbox, *_: p.copy(inbox[1, 0], A, stream=3), "stream=3; expected a name, or "
     "None"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "message"), REFUSED)
def test_refused_steps(body, message):
    with pytest.raises(tw.TileWeaveError) as error:
        trace(body)
    assert message in str(error.value)
    assert f" --> {__file__}:" in str(error.value)


def test_kernels_get_tensors_of_their_shape():
    @T.prim_func
    def small(out: T.Tensor((3, 8), "int32")):
        with T.Kernel(1, threads=32):
            out[0, 0] = 1

    with pytest.raises(tw.TileWeaveError, match=r"out has shape \(4, 8\); expected \(3, 8\)"):
        trace(lambda p, A, *_: p.launch(small, A))


def test_what_is_left_out():
    """Of a plan and of its kernel: what is annotated None."""
    extra = T.Tensor((1,), "uint32")

    def made(factor):
        @T.prim_func
        def scaled(A: T.Tensor((4, 8), "int32"), factor: factor, out: T.Tensor((4, 8), "int32")):
            with T.Kernel(1, threads=32):
                out[0, 0] = A[0, 0]

        @tw.plan
        def f(
            p: tw.PlanBuilder,
            A: T.Tensor((4, 8), "int32"),
            factor: factor,
            out: T.Tensor((4, 8), "int32"),
        ):
            p.launch(scaled, A, factor, out)

        shapes = {"A": (4, 8), "factor": (1,), "out": (4, 8)}
        (step,) = f.trace(0, 1, {q.name: shapes[q.name] for q in f.parameters}, {})
        return [q.name for q in f.parameters], list(step.arguments)

    assert made(extra) == (["A", "factor", "out"],) * 2
    assert made(None) == (["A", "out"],) * 2


def test_declarations():
    @tw.plan
    def fine(p: tw.PlanBuilder, A: T.Tensor((m, 8), "int32"), S: FLAGS, x: T.float32):
        """Nothing."""

    assert repr(fine) == "tw.plan fine(A, S, x)"
    assert [(p.dtype, p.symmetric) for p in fine.parameters] == [
        ("int32", False), ("uint32", True), ("float32", False),
    ]  # fmt: skip
    with pytest.raises(tw.TileWeaveError, match=r"parameter A; expected T.Tensor"):

        @tw.plan
        def bare(p, A):
            """Nothing."""

    with pytest.raises(tw.TileWeaveError, match="makes it a string"):

        @tw.plan
        def strings(p, A: "T.Tensor((4,), 'int32')"):
            """Nothing."""

    with pytest.raises(tw.TileWeaveError, match="expected one for the steps"):

        @tw.plan
        def empty():
            """Nothing."""


def without_steps(A: FLAGS, B: FLAGS): ...
def by_position(p, A: FLAGS, /): ...
def any_number(p, *A: FLAGS): ...
def any_name(p, **A: FLAGS): ...
def steps_by_name(*, p, A: FLAGS): ...
def of_torch(p, A: FLAGS, x: torch.int32): ...


def generator(p, A: FLAGS):
    yield


async def coroutine(p, A: FLAGS): ...


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (without_steps, "parameter A comes first; expected one for the steps before it"),
        (by_position, "parameter A: buffer; expected .* and a name to call it by"),
        (any_number, r"parameter \*A: buffer; expected .* and a name to call it by"),
        (any_name, r"parameter \*\*A: buffer; expected .* and a name to call it by"),
        (steps_by_name, "parameter p comes first; expected one for the steps before it"),
        (of_torch, "parameter x: torch.int32; expected .* scalar type such as T.int32"),
        (
            generator,
            "appends its steps only when it is iterated or awaited; expected a plain function",
        ),
        (
            coroutine,
            "appends its steps only when it is iterated or awaited; expected a plain function",
        ),
        (functools.partial(by_position), "plan: functools.partial.*; expected a function"),
        (tw.plan(lambda p: None), "plan: tw.plan <lambda>.*; expected a function"),
        (3, "plan: 3; expected a function"),
    ],
)
def test_refused_functions(function, message):
    with pytest.raises(tw.TileWeaveError, match=message):
        tw.plan(function)


def test_functions_that_plans_are_made_of():
    rows = STANDARD["A"]

    class Of:
        def method(self, p, A: rows): ...

    @functools.wraps(Of().method)
    def wrapper(*args, **kwargs): ...

    def by_name(p, *, A: rows): ...

    for function in (Of().method, wrapper, by_name):
        plan = tw.plan(function)
        assert [q.name for q in plan.parameters] == ["A"]
        assert plan.trace(0, 1, {"A": (4, 8)}, {}) == []


class FakeStream:
    """Remembers what it is given, in the log of all streams."""

    def __init__(self, log: list, name: str) -> None:
        self.log, self.name = log, name
        self.cuda_stream = id(self)
        self.device = "cpu"


class FakeEvent:
    """Exists for the driver once it was recorded."""

    cuda_event = 0

    def record(self, stream: FakeStream) -> None:
        self.cuda_event = id(self)


class FakeKernel(Kernel):
    """Does what its program does."""

    def __init__(self, program: Any, log: list) -> None:
        super().__init__(None, program)
        self.log = log

    @property
    def launch(self) -> Any:
        return self

    def __call__(self, inbox, out, scale, epoch) -> None:
        self.log.append(("kernel", epoch, scale))


class Ranks:
    """Fakes of what a rank has, one of each a thread."""

    def __init__(self, ranks: int, monkeypatch) -> None:
        self.ranks, self.here = ranks, threading.local()
        self._bytes = torch.zeros(ranks * 2 * PAGE, dtype=torch.uint8)
        for name, value in (
            ("current", lambda: self.here.session),
            ("current_stream", lambda device: self.here.caller.name),
            ("compile", self.compile),
        ):
            monkeypatch.setattr(plan_streams, name, value)
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
        self.here.session = types.SimpleNamespace(group=group, heap=heap, watchdog=watchdog)
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

    def compile(self, program: Any, pass_configs: dict[str, Any]) -> FakeKernel:
        self.here.compiled.append(pass_configs)
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


def test_calls(every_rank, monkeypatch):
    world = Ranks(2, monkeypatch)

    def rank(group: Group) -> tuple:
        world.join(group)
        heap, calls = world.here.session.heap, plan_streams.Calls(exchange)
        A = torch.arange(32, dtype=torch.int32).reshape(4, 8) + 100 * group.rank
        inbox, flags = heap.allocate((2, 4, 8), torch.int32), heap.allocate((2,), torch.uint32)
        word = torch.tensor([77], dtype=torch.uint32)
        group.meet("made")
        calls(A, inbox, flags.all, word, epoch=4)
        calls(A=A, inbox=inbox.all, flags=flags, word=word, epoch=5)
        group.meet("done")
        return world.here.log, world.here.compiled, inbox.local.clone(), flags.local.tolist()

    found = every_rank(rank, 2)
    for me, (log, compiled, inbox, flags) in enumerate(found):
        peer = 1 - me
        once = [
            ("side 1", "wait", "caller 0"),
            ("side 1", "copy"),
            ("side 1", "copy of rows"),
            ("side 1", "write", 5),
            ("side 1", "copy"),
            ("kernel", 4, 2.0),
            ("caller 0", "wait", "side 1"),
        ]
        assert log[:7] == once
        assert len(log) == 14
        assert compiled == [CONFIGS]
        expected = torch.zeros(2, 4, 8, dtype=torch.int32)
        theirs = torch.arange(32, dtype=torch.int32).reshape(4, 8) + 100 * peer
        expected[:, peer] = theirs[me]
        expected[:, 3, peer : peer + 2] = theirs[0:2, 2:4]
        assert (inbox == expected).all()
        assert flags == [6, 77]


@T.prim_func
def other(inbox: INBOX, out: T.Tensor((m, 8), "int32"), scale: T.float32, epoch: T.int32):
    with T.Kernel(1, threads=32):
        out[0, 1] = inbox[W.rank(), epoch % 2, 0, 0]


def test_every_rank_compiles_what_any_rank_launches(every_rank, monkeypatch):
    """In one order, as compiling and hidden memory are collective."""
    world, compiled = Ranks(3, monkeypatch), []

    def record(program, **_):
        compiled.append(program)
        return FakeKernel(program, world.here.log)

    monkeypatch.setattr(plan_streams, "compile", record)

    @tw.plan
    def uneven(p: tw.PlanBuilder, inbox: INBOX, out: T.Tensor((m, 8), "int32")):
        if p.rank != 0:
            p.launch(other, inbox, out, 0.5, 3)
        if p.rank != 1:
            p.launch(kernel, inbox, out, 0.5, 3)

    def rank(group: Group) -> int:
        world.join(group)
        inbox = world.here.session.heap.allocate((2, 4, 8), torch.int32)
        plan_streams.Calls(uneven)(inbox, ints(4, 8))
        return len(world.here.log)

    assert every_rank(rank, 3) == [1, 1, 2]
    assert len(compiled) == 6 and compiled.count(kernel) == compiled.count(other) == 3
    launches = uneven.launches(3, {"inbox": (2, 4, 8), "out": (4, 8)}, {})
    assert [step.program for step in launches] == [kernel, other]


def test_compiled_ahead_of_calls(every_rank, monkeypatch):
    """With hidden memory; what does not fit leaves nothing."""
    world = Ranks(1, monkeypatch)

    def compiled(program, **_):
        made = FakeKernel(program, world.here.log)
        world.here.compiled.append(program)
        made.implicit = {"held": world.here.session.heap.allocate((PAGE // 2 + 1,), torch.uint8)}
        return made

    monkeypatch.setattr(plan_streams, "compile", compiled)

    def launching(*kernels):
        @tw.plan
        def plan(p: tw.PlanBuilder, inbox: INBOX, out: T.Tensor((4, 8), "int32")):
            for each in kernels:
                p.launch(each, inbox, out, 0.5, 3)

        return plan

    def rank(group: Group) -> None:
        world.join(group)
        heap = world.here.session.heap
        inbox = heap.allocate((2, 4, 8), torch.int32)
        free = heap._free.largest
        with pytest.raises(HeapExhausted):
            launching(kernel, other).compile()
        assert heap._free.largest == free and world.here.compiled == [kernel, other]
        plan = launching(other)
        plan.compile()
        assert heap._free.largest < free and world.here.log == []
        plan(inbox, ints(4, 8))
        assert world.here.compiled == [kernel, other, other] and len(world.here.log) == 1
        plan.free()
        assert heap._free.largest == free

    every_rank(rank, 1)


def test_steps_that_the_compiler_adds_launch_their_own_kernels(every_rank, monkeypatch):
    """They have one number, whatever they launch: a kernel that waits for two words is not one
    that waits for four."""
    world, ran = Ranks(1, monkeypatch), []

    class Named(FakeKernel):
        def __call__(self, inbox, out, scale, epoch):
            ran.append((str(self.program.attrs["global_symbol"]), epoch))

    monkeypatch.setattr(
        plan_streams, "compile", lambda program, **_: Named(program, world.here.log)
    )

    @tw.plan
    def several(p: tw.PlanBuilder, inbox: INBOX, out: T.Tensor((m, 8), "int32")):
        for epoch, program in enumerate((kernel, other, kernel)):
            p.launch(program, inbox, out, 0.5, epoch)

    trace = several.trace
    monkeypatch.setattr(
        several,
        "trace",
        lambda *args, **options: [
            replace(s, number=-2) if isinstance(s, Launch) else s for s in trace(*args, **options)
        ],
    )

    def rank(group: Group) -> int:
        world.join(group)
        inbox = world.here.session.heap.allocate((2, 4, 8), torch.int32)
        calls = plan_streams.Calls(several)
        calls(inbox, ints(4, 8))
        (ready,) = recorded_calls(world.here.session).values()
        return len(ready.kernels)

    assert every_rank(rank, 1) == [2]
    assert ran == [("kernel", 0), ("other", 1), ("kernel", 2)]


ints = functools.partial(torch.zeros, dtype=torch.int32)


def test_kernels_compiled_before(every_rank, monkeypatch):
    world = Ranks(1, monkeypatch)

    @tw.plan
    def plan(p, inbox: W.Symmetric((2, 4, 8), "int32"), out: T.Tensor((m, 8), "int32")):
        p.launch(world.here.kernel, inbox, out, 0.5, 3, stream="side")

    def rank(group: Group) -> tuple[list, list]:
        world.join(group)
        world.here.kernel = FakeKernel(kernel, world.here.log)
        inbox = world.here.session.heap.allocate((2, 4, 8), torch.int32)
        plan_streams.Calls(plan)(inbox, ints(4, 8))
        return world.here.log, world.here.compiled

    ((log, compiled),) = every_rank(rank, 1)
    assert log == [
        ("side 1", "wait", "caller 0"), ("current", "side 1"), ("kernel", 3, 0.5),
        ("current", "caller 0"), ("caller 0", "wait", "side 1"),
    ]  # fmt: skip
    assert compiled == []


@tw.plan
def shared(
    p: tw.PlanBuilder,
    A: T.Tensor((m, 8), "int32"),
    inbox: INBOX,
    flags: FLAGS,
    word: T.Tensor((1,), "uint32"),
):
    """Three streams start at the same point of the caller's."""
    p.copy(inbox[p.rank, 0], A, stream="rows")
    p.copy_value(flags[p.rank, 0], word[0], stream="words")
    p.write_value(flags[p.rank, 1], -1, stream="values")
    p.launch(kernel, inbox, A, 2.0, 1)


def alone(monkeypatch, every_rank, function):
    """What ``function(here, A, inbox, flags, word)`` returns on a group's only rank."""
    world = Ranks(1, monkeypatch)

    def rank(group: Group) -> Any:
        world.join(group)
        heap = world.here.session.heap
        inbox, flags = heap.allocate((2, 4, 8), torch.int32), heap.allocate((2,), torch.uint32)
        A = torch.arange(32, dtype=torch.int32).reshape(4, 8)
        return function(world.here, A, inbox, flags, torch.tensor([7], dtype=torch.uint32))

    (found,) = every_rank(rank, 1)
    if isinstance(found, Exception):
        raise found
    return found


def test_what_a_graph_records_may_be_something_else(every_rank, monkeypatch):
    """Calls while one is captured are kept apart from others, alike as they are."""
    state = {"capturing": False}
    monkeypatch.setattr(plan_streams, "capturing", lambda: state["capturing"])
    asked, trace = [], exchange.trace

    def traced(*arguments, recorded=False):
        asked.append(recorded)
        return trace(*arguments, recorded=recorded)

    monkeypatch.setattr(exchange, "trace", traced)

    def calls(here, A, inbox, flags, word):
        call = plan_streams.Calls(exchange)
        found, caller = [], here.caller.name
        monkeypatch.setattr(
            plan_streams, "current_stream", lambda device: (caller, state["capturing"])
        )
        for state["capturing"] in (False, True, False, True):
            call(A, inbox, flags, word, 0)
            found.append(asked[:])
            asked.clear()
        return found

    first, captured, *again = alone(monkeypatch, every_rank, calls)
    assert (first[-1], captured[-1]) == (False, True)
    assert again == [[], []]


def test_scalars_are_python_s_numbers_each_its_own(every_rank, monkeypatch):
    """0.0 equals -0.0, but is another; a number of NumPy would wrap around."""
    seen = []

    @tw.plan
    def plan(p, inbox: INBOX, A: T.Tensor((m, 8), "int32"), scale: T.float32, epoch: T.int32):
        seen.append((str(scale), epoch + 1))
        p.launch(kernel, inbox, A, scale, epoch)

    def calls(here, A, inbox, flags, word):
        call = plan_streams.Calls(plan)
        for scale in (0.0, -0.0, float("nan"), float("nan")):
            call(inbox, A, scale, np.uint8(255))
        with pytest.raises(tw.TileWeaveError) as refused:
            call(inbox, A, 0.0, 1 << 31)
        assert str(refused.value) == (
            "plan: epoch=2147483648; expected -2147483648 to 2147483647 (int32)"
        )
        return [str(scale) for _, _, scale in here.log]

    assert alone(monkeypatch, every_rank, calls) == ["0.0", "-0.0", "nan", "nan"]
    assert set(seen) == {("0.0", 256), ("-0.0", 256), ("nan", 256)}


def test_tensors_without_memory_are_refused(every_rank, monkeypatch):
    """Also behind a call whose tensors looked alike: a copy from address 0 ends the process."""

    def calls(here, A, inbox, flags, word):
        call, said = plan_streams.Calls(shared), []
        call(A, inbox, flags, word)
        with FakeTensorMode():
            fake = torch.zeros(4, 8, dtype=torch.int32)
        for bad in (
            fake,
            A.to_sparse(),
            A.to_sparse_csr(),
            torch.nested.nested_tensor([A]),
            A[None],
        ):
            with pytest.raises(tw.TileWeaveError) as error:
                call(bad, inbox, flags, word)
            said.append(str(error.value))
        return said

    *without, axes = alone(monkeypatch, every_rank, calls)
    assert axes == "shared: A has shape (1, 4, 8); expected 2 axes"
    assert [s.partition(" is a ")[2].partition(" of ")[0] for s in without] == [
        "FakeTensor", "Tensor", "Tensor", "Tensor"
    ]  # fmt: skip
    assert all(s.endswith("without memory of its own; expected a dense tensor") for s in without)


def test_threads_trace_one_plan(monkeypatch):
    """More calls than it remembers."""
    monkeypatch.setattr(plans, "_TRACES", 4)
    plan, failed = declared(lambda p, epoch: None, epoch=T.int32), []

    def traces(first):
        try:
            for epoch in range(first, 8000, 8):
                plan.trace(0, 1, {}, {"epoch": epoch})
        except Exception as error:
            failed.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=traces, args=(first,)) for first in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert failed == []
    assert len(plan._traces) == 4


def test_threads_launch_the_very_same_program(every_rank, monkeypatch):
    """One of them comes while the other makes it."""
    split, took = plans.split_options, iter((0.1, 0.5))

    def slowly(*given):
        time.sleep(next(took))
        return split(*given)

    monkeypatch.setattr(plans, "split_options", slowly)
    sizes = {"A": (4, 8), "inbox": (2, 4, 8), "flags": (2,), "word": (1,)}
    made = exchange.with_configs({})

    def launched(group: Group) -> list:
        group.meet("begin")
        steps = made.trace(group.rank, 2, sizes, {"epoch": 4})
        return [s.program for s in steps if isinstance(s, plans.Launch)]

    (first,), (second,) = every_rank(launched, 2)
    assert first is second


def test_a_plan_may_ask_for_the_steps_of_another():
    inner, found = declared(lambda p: None), []
    outer = declared(lambda p: found.append(inner.trace(0, 1, {}, {})))
    thread = threading.Thread(target=outer.trace, args=(0, 1, {}, {}), daemon=True)
    thread.start()
    thread.join(timeout=30)
    assert found and not thread.is_alive()


def test_words_that_follow_each_other_are_one_call(every_rank, monkeypatch):
    @tw.plan
    def plan(p, flags: FLAGS, word: T.Tensor((1,), "uint32")):
        p.wait_value(word[0], 3)
        p.write_value(word[0], 0)
        p.write_value(flags[p.rank, 0], 1, stream="side")
        p.write_value(flags[p.rank, 1], 2)

    batches = []
    monkeypatch.setattr(
        Ranks, "cuStreamBatchMemOp", lambda self, on, stream, count, *_: batches.append((on, count))
    )

    def calls(here, A, inbox, flags, word):
        plan_streams.Calls(plan)(flags, word)

    alone(monkeypatch, every_rank, calls)
    assert [(on.split()[0], count) for on, count in batches] == [
        ("caller", 2), ("side", 1), ("caller", 1)
    ]  # fmt: skip


def test_streams_that_wait_for_words(every_rank, monkeypatch):
    @tw.plan
    def plan(p, flags: FLAGS, word: T.Tensor((1,), "uint32")):
        p.wait_value(flags[p.rank, 1], -2, stream="side")
        p.wait_value(word[0], 3)

    def calls(here, A, inbox, flags, word):
        call = plan_streams.Calls(plan)
        flags.local[1] = 5
        call(flags, word)
        call(flags, torch.tensor([9], dtype=torch.uint32))
        return here.log

    log = alone(monkeypatch, every_rank, calls)
    assert log == [
        step
        for seen in (7, 9)
        for step in (
            ("side 1", "wait", "caller 0"),
            ("side 1", "wait for value", 5, (1 << 32) - 2),
            ("caller 0", "wait for value", seen, 3),
            ("caller 0", "wait", "side 1"),
        )
    ]


def test_words_that_streams_wait_for_are_told():
    @tw.plan
    def plan(p, word: T.Tensor((2,), "uint32")):
        p.wait_value(word[1], 3)
        p.write_value(word[1], 0)

    assert [(o.kind, o.flag, o.per_block, o.reason) for o in tw.explain(plan, 2).ops] == [
        ("wait", "word", 1, "explicit in the program"),
        ("signal", "word", 1, "explicit in the program"),
    ]


def test_a_plan_whose_streams_wait_for_words_orders_itself():
    def body(p, A, inbox, flags, word, epoch):
        for peer in p.peers():
            p.copy(inbox[peer, 0], A, stream="copies")
        p.wait_value(word[0], 1, stream="copies")
        p.launch(kernel, inbox, A, 2.0, epoch)

    assert not [s for s in trace(body) if isinstance(s, CopyValue)]


def test_what_is_known_of_a_call_is_not_found_again(every_rank, monkeypatch):
    """Steps, kernels and events serve calls on other memory of the same kind, and only those."""
    prepared = []
    made = plan_streams.RecordedCall
    monkeypatch.setattr(plan_streams, "RecordedCall", lambda *a: prepared.append(1) or made(*a))

    def calls(here, A, inbox, flags, word):
        call, counts = plan_streams.Calls(shared), []

        def after(*args):
            call(*args)
            counts.append(len(prepared))
            return inbox.local[0].clone(), flags.local.tolist()

        assert torch.equal(after(A, inbox, flags, word)[0], A)
        assert after(A, inbox, flags, word)[1] == [7, (1 << 32) - 1]
        other, nine = A + 5, torch.tensor([9], dtype=torch.uint32)
        rows, words = after(other, inbox.all, flags, nine)
        assert torch.equal(rows, other)
        assert words[0] == 9
        assert counts == [1, 1, 1]
        assert here.log[:10] == here.log[10:20] == here.log[20:]
        assert len(here.records) == 3 * 4
        assert len(set(here.records)) == 4

        elsewhere = inbox._heap.allocate((2, 4, 8), torch.int32)
        call(A, elsewhere, flags, word)
        assert torch.equal(elsewhere.local[0], A)
        here.caller = Ranks.new_stream(types.SimpleNamespace(here=here), "other")
        here.log.clear()
        after(A, inbox, flags, word)
        assert here.log[0] == ("side 1", "wait", here.caller.name)
        assert counts == [1, 1, 1, 3]
        with pytest.raises(tw.TileWeaveError, match=r"A is of torch\.float32"):
            call(A.float(), inbox, flags, word)
        with pytest.raises(tw.TileWeaveError, match="expected a contiguous tensor"):
            call(ints(8, 4).T, inbox, flags, word)
        assert len(set(here.records)) == 4

    alone(monkeypatch, every_rank, calls)


def test_threads_share_no_events(every_rank, monkeypatch):
    def calls(here, A, inbox, flags, word):
        call, mine = plan_streams.Calls(shared), dict(vars(here))

        def elsewhere():
            vars(here).update(mine)
            call(A, inbox, flags, word)

        call(A, inbox, flags, word)
        first = set(here.records)
        here.records.clear()
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        assert len(here.records) == 4
        assert not first & set(here.records)

    alone(monkeypatch, every_rank, calls)


def test_threads_compile_a_kernel_once(every_rank, monkeypatch):
    """One of them comes while the other does."""

    def calls(here, A, inbox, flags, word):
        call, mine, found = plan_streams.Calls(shared), dict(vars(here)), []

        def slowly(program, pass_configs):
            time.sleep(0.3)
            return compiled(program, pass_configs)

        def elsewhere():
            vars(here).update(mine)
            found.append(call.recorded_call((A, inbox, flags, word), {})[0].kernels)

        compiled = plan_streams.compile
        monkeypatch.setattr(plan_streams, "compile", slowly)
        threads = [threading.Thread(target=elsewhere) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(here.compiled) == 1
        (first,), (second,) = found
        assert first is second

    alone(monkeypatch, every_rank, calls)


def test_a_number_of_another_type_is_another_call(every_rank, monkeypatch):
    def calls(here, A, inbox, flags, word):
        call = plan_streams.Calls(exchange)
        call(A, inbox, flags, word, 1)
        length = len(here.log)
        with pytest.raises(tw.TileWeaveError, match=r"epoch=1\.0; expected an integer"):
            call(A, inbox, flags, word, 1.0)
        assert len(here.log) == length
        call(A, inbox, flags, word, 2)
        assert here.log[-1] == ("kernel", 2, 2.0)

    alone(monkeypatch, every_rank, calls)


def test_a_freed_kernel_is_compiled_anew(every_rank, monkeypatch):
    def calls(here, A, inbox, flags, word):
        call = plan_streams.Calls(shared)
        call(A, inbox, flags, word)
        call.free()
        call(A, inbox, flags, word)
        assert len(here.compiled) == 2
        for _, k in call._kernels.values():
            k.free()
        (ready,) = recorded_calls(here.session).values()
        assert not ready.is_valid

    alone(monkeypatch, every_rank, calls)


def test_a_freed_plan_drops_only_its_own_calls(every_rank, monkeypatch):
    def calls(here, A, inbox, flags, word):
        freed, kept = plan_streams.Calls(shared), plan_streams.Calls(shared)
        for call in (freed, kept):
            call(A, inbox, flags, word)
        freed.free()
        (key,) = recorded_calls(here.session)
        assert key[0] is kept

    alone(monkeypatch, every_rank, calls)


def test_invalidated_calls_are_recorded_again(every_rank, monkeypatch):
    def calls(here, A, inbox, flags, word):
        call = plan_streams.Calls(shared)
        first, again = (call.recorded_call((A, inbox, flags, word), {})[0] for _ in range(2))
        invalidate()
        second, _, _ = call.recorded_call((A, inbox, flags, word), {})
        assert first is again and first is not second
        assert len(here.compiled) == 1

    alone(monkeypatch, every_rank, calls)


def test_a_failure_is_told_as_a_deadlock_if_it_is_one(every_rank, monkeypatch):
    def calls(here, A, inbox, flags, word):
        state = []

        def raise_if_deadlocked():
            if state:
                raise tw.DeadlockError("rank 0 gave up")

        def launch(*args):
            state.append(1)
            raise RuntimeError("unspecified launch failure")

        here.session.watchdog.raise_if_deadlocked = raise_if_deadlocked
        call = plan_streams.Calls(shared)
        monkeypatch.setattr(FakeKernel, "__call__", launch)
        with pytest.raises(tw.DeadlockError, match="gave up"):
            call(A, inbox, flags, word)

    alone(monkeypatch, every_rank, calls)


def test_kernels_are_compiled_before_a_graph_is_captured(every_rank, monkeypatch):
    world = Ranks(1, monkeypatch)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)

    def rank(group: Group) -> list:
        world.join(group)
        heap = world.here.session.heap
        inbox, flags = heap.allocate((2, 4, 8), torch.int32), heap.allocate((2,), torch.uint32)
        word = torch.zeros(1, dtype=torch.uint32)
        with pytest.raises(tw.TileWeaveError, match="kernel is not compiled yet; expected"):
            plan_streams.Calls(exchange)(ints(4, 8), inbox, flags, word, 0)
        return world.here.log

    assert every_rank(rank, 1) == [[]]


@pytest.mark.parametrize("ranks", [1, 2])
def test_views_of_symmetric_memory(every_rank, monkeypatch, ranks):
    """With one rank, torch gives the rank axis, of extent 1, another stride than the heap's."""
    world = Ranks(ranks, monkeypatch)

    def rank(group: Group) -> tuple:
        world.join(group)
        heap, calls = world.here.session.heap, plan_streams.Calls(exchange)
        memory, flags = heap.allocate((100,), torch.int32), heap.allocate((2,), torch.uint32)
        inbox = memory.all[:, :64].view(ranks, 2, 4, 8)
        calls(ints(4, 8), inbox, flags, torch.zeros(1, dtype=torch.uint32), 0)
        group.meet("done")
        return inbox.stride(0) * 4 == heap.stride, len(world.here.log) > 0

    assert every_rank(rank, ranks) == [(ranks > 1, True)] * ranks


def test_refused_calls(every_rank, monkeypatch):
    world = Ranks(1, monkeypatch)

    def rank(group: Group) -> list[tuple]:
        world.join(group)
        heap, calls = world.here.session.heap, plan_streams.Calls(exchange)
        good = {
            "A": ints(4, 8),
            "inbox": heap.allocate((2, 4, 8), torch.int32),
            "flags": heap.allocate((2,), torch.uint32),
            "word": torch.zeros(1, dtype=torch.uint32),
            "epoch": 0,
        }
        calls(**good)
        length, messages = len(world.here.log), []
        for change, expected in (
            ({"A": torch.zeros(4, 8)}, "A is of torch.float32; expected torch.int32"),
            ({"A": ints(8, 4).T}, "and strides (1, 4); expected a contiguous tensor"),
            ({"A": ints(4, 9)}, "A has shape (4, 9); expected (4, 8)"),
            ({"A": ints(4, 8, device="meta")}, "A is on meta; expected cpu"),
            ({"A": [1]}, "A=[1]; expected a torch tensor"),
            ({"A": good["inbox"]}, "A=SymmetricTensor(shape=(2, 4, 8)"),
            ({"inbox": ints(1, 2, 4, 8)}, "expected a tw.symmetric"),
            ({"inbox": good["inbox"].local}, "inbox=torch tensor (2, 4, 8); expected a tw.symm"),
            ({"flags": heap.allocate((3,), torch.uint32)}, "flags has shape (3,); expected (2,)"),
            ({"epoch": 1.5}, "epoch=1.5; expected an integer (int32)"),
            ({"more": 1}, "got an unexpected keyword argument 'more'; expected (A, inbox"),
        ):
            try:
                calls(**(good | change))
                messages.append((expected, "nothing was refused"))
            except tw.TileWeaveError as error:
                messages.append((expected, str(error)))
        assert len(world.here.log) == length
        return messages

    (messages,) = every_rank(rank, 1)
    assert len(messages) == 11
    for expected, message in messages:
        assert message.startswith("exchange: ")
        assert expected in message


def test_a_call_without_the_runtime():
    with pytest.raises(tw.TileWeaveError, match=r"expected tw.init\(\)"):
        exchange(1, 2, 3, 4, 5)
