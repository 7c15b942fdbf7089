"""Calls of plans compile, share and free kernels."""

import threading
import time
from dataclasses import replace

import pytest
import tilelang.language as T
import torch
from tilelang import tvm

import tileweave as tw
from tests.runtime.plans.fakes import (
    INBOX,
    FakeKernel,
    Ranks,
    alone,
    exchange,
    ints,
    kernel,
    m,
    other,
    shared,
)
from tileweave import language as W
from tileweave.passes.ir.releases import upgrade_ir
from tileweave.runtime.executor import calls as plan_streams
from tileweave.runtime.executor.recorded_calls import invalidate, recorded_calls
from tileweave.runtime.host.group import Group
from tileweave.runtime.host.heap import HeapExhausted
from tileweave.runtime.host.memory import PAGE
from tileweave.runtime.plans.steps import Launch


def test_every_rank_compiles_what_any_rank_launches(every_rank, monkeypatch):
    """All ranks compile in one order, because compiling and implicit memory are collective."""
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
    launches = uneven.launches(3, {"inbox": (2, 4, 8), "out": (4, 8)}, {})
    programs = [step.program for step in launches]
    assert len(compiled) == 6 and [compiled.count(program) for program in programs] == [3, 3]
    for program, source in zip(programs, (kernel, other), strict=True):
        if (upgraded := upgrade_ir(source)) is source:  # as from TileLang 0.1.15 on
            assert program is source
        else:
            assert tvm.ir.structural_equal(program, upgraded)


def test_compiled_ahead_of_calls(every_rank, monkeypatch):
    """Kernels have implicit memory; if it does not fit, none stays allocated."""
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
    """Inserted steps share one number, but a kernel that waits for two flags is not one that waits
    for four."""
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
        (ready,) = (c for key, c in recorded_calls().items() if key[0] is calls)
        return len(ready.kernels)

    assert every_rank(rank, 1) == [2]
    assert ran == [("kernel", 0), ("other", 1), ("kernel", 2)]


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


def test_threads_compile_a_kernel_once(every_rank, monkeypatch):
    """The second thread calls while the first one compiles."""

    def calls(here, A, inbox, flags, word):
        call, mine, results = plan_streams.Calls(shared), dict(vars(here)), []

        def slowly(program, **options):
            time.sleep(0.3)
            return compiled(program, **options)

        def elsewhere():
            vars(here).update(mine)
            results.append(call.recorded_call((A, inbox, flags, word), {})[0].kernels)

        compiled = plan_streams.compile
        monkeypatch.setattr(plan_streams, "compile", slowly)
        threads = [threading.Thread(target=elsewhere) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(here.compiled) == 1
        (first,), (second,) = results
        assert first is second

    alone(monkeypatch, every_rank, calls)


def test_a_freed_kernel_is_compiled_again(every_rank, monkeypatch):
    def calls(here, A, inbox, flags, word):
        call = plan_streams.Calls(shared)
        call(A, inbox, flags, word)
        call.free()
        call(A, inbox, flags, word)
        assert len(here.compiled) == 2
        for _, k in call._kernels.values():
            k.free()
        (ready,) = (c for key, c in recorded_calls().items() if key[0] is call)
        assert not ready.is_valid

    alone(monkeypatch, every_rank, calls)


def test_a_freed_plan_drops_only_its_own_calls(every_rank, monkeypatch):
    def calls(here, A, inbox, flags, word):
        freed, kept = plan_streams.Calls(shared), plan_streams.Calls(shared)
        for call in (freed, kept):
            call(A, inbox, flags, word)
        freed.free()
        (key,) = (key for key in recorded_calls() if key[0] in (freed, kept))
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
