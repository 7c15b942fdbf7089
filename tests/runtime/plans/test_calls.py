"""Enqueued and refused calls of plans, with a fake driver and real memory."""

import threading
import types

import numpy as np
import pytest
import tilelang.language as T
import torch
from torch._subclasses import FakeTensorMode

import tileweave as tw
from tests.runtime.plans.fakes import (
    CONFIGS,
    FLAGS,
    INBOX,
    FakeKernel,
    Ranks,
    alone,
    exchange,
    ints,
    kernel,
    m,
    shared,
)
from tileweave.passes import split_options
from tileweave.passes.sync.infer.options import options_of
from tileweave.runtime.executor import calls as plan_streams
from tileweave.runtime.executor import recorded_calls
from tileweave.runtime.host.group import Group
from tileweave.runtime.kernel.launch_order import CallStream


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

    actual = every_rank(rank, 2)
    for me, (log, compiled, inbox, flags) in enumerate(actual):
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
        stock = {n: v for n, v in CONFIGS.items() if n.startswith("tl.")}
        assert [split_options(program, {})[1] for program in compiled] == [stock]
        assert [options_of(program).delays for program in compiled] == [CONFIGS["tileweave.delays"]]
        expected = torch.zeros(2, 4, 8, dtype=torch.int32)
        theirs = torch.arange(32, dtype=torch.int32).reshape(4, 8) + 100 * peer
        expected[:, peer] = theirs[me]
        expected[:, 3, peer : peer + 2] = theirs[0:2, 2:4]
        assert (inbox == expected).all()
        assert flags == [6, 77]


def test_a_captured_call_is_cached_apart(every_rank, monkeypatch):
    """Calls during capture are cached apart from other calls with equal arguments."""
    state = {"capturing": False}
    monkeypatch.setattr(plan_streams, "capturing", lambda: state["capturing"])
    requests, trace = [], exchange.trace

    def traced(*arguments, recorded=False):
        requests.append(recorded)
        return trace(*arguments, recorded=recorded)

    monkeypatch.setattr(exchange, "trace", traced)

    def calls(here, A, inbox, flags, word):
        call = plan_streams.Calls(exchange)
        results, caller = [], here.caller.name
        monkeypatch.setattr(
            plan_streams, "current_stream", lambda device: (caller, state["capturing"])
        )
        for state["capturing"] in (False, True, False, True):
            call(A, inbox, flags, word, 0)
            results.append(requests[:])
            requests.clear()
        return results

    first, captured, *again = alone(monkeypatch, every_rank, calls)
    assert (first[-1], captured[-1]) == (False, True)
    assert again == [[], []]


def test_calls_that_communicate_are_ordered(every_rank, monkeypatch):
    """The operations of a call are enqueued between the two functions of the order of launches."""

    @tw.plan
    def local(p, A: T.Tensor((m, 8), "int32"), B: T.Tensor((m, 8), "int32")):
        p.copy(B, A)

    def calls(here, A, inbox, flags, word):
        def begin(session, stream):
            here.log.append(("begin", stream))
            return stream is not None

        monkeypatch.setattr(recorded_calls, "begin_call", begin)
        monkeypatch.setattr(recorded_calls, "end_call", lambda s: here.log.append(("end", s)))
        plan_streams.Calls(shared)(A, inbox, flags, word)
        plan_streams.Calls(local)(A, A.clone())
        return here.log, here.caller

    log, caller = alone(monkeypatch, every_rank, calls)
    stream = CallStream.of(caller, False)
    assert [log[0], *log[-3:]] == [
        ("begin", stream), ("end", stream), ("begin", None), ("caller 0", "copy")
    ]  # fmt: skip
    assert ("kernel", 1, 2.0) in log[1:-3]


def test_scalars_are_distinct_python_numbers(every_rank, monkeypatch):
    """0.0 and -0.0 are different calls; a NumPy integer would wrap around."""
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
    """Also after a call with tensors of equal shape: a copy from address 0 ends the process."""

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


def test_consecutive_values_are_one_driver_call(every_rank, monkeypatch):
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


def test_streams_that_wait_for_values(every_rank, monkeypatch):
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


def test_recorded_calls_are_reused(every_rank, monkeypatch):
    """Calls on other memory of the same kind reuse steps, kernels and events; others do not."""
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


def test_a_failure_is_reported_as_a_deadlock(every_rank, monkeypatch):
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


@pytest.mark.parametrize("ranks", [1, 2])
def test_views_of_symmetric_memory(every_rank, monkeypatch, ranks):
    """With one rank, torch gives the rank axis, of extent 1, another stride than the heap."""
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
