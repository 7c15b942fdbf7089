"""Steps that plans record and refuse."""

import sys
import threading
import time

import pytest
import tilelang.language as T
import torch

import tileweave as tw
from tests.runtime.plans.fakes import declared, exchange, kernel, trace
from tileweave.runtime.host.group import Group
from tileweave.runtime.plans import traced_plan as plans
from tileweave.runtime.plans.regions import Region, Rows
from tileweave.runtime.plans.steps import Copy, CopyValue, Launch, WaitStream, WaitValue, WriteValue


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
    (lambda p, A, inbox, *_: p.launch(kernel, A, A, 2.0, 1), "inbox is A, a T.Tensor of the "
     "plan; expected a W.Symmetric, as the kernel declares inbox"),
    (lambda p, A, inbox, *_: p.launch(kernel, inbox, inbox, 2.0, 1), "out is inbox, a "
     "W.Symmetric of the plan; expected a T.Tensor"),
    (lambda p, A, inbox, *_: p.launch(kernel, inbox, A[0:2], 2.0, 1), "out is "
     "A[0:2, 0:8]; expected a whole tensor"),
    (lambda p, A, inbox, flags, word, _: p.launch(kernel, inbox, word, 2.0, 1), "of type "
     "uint32; expected int32, as the kernel declares out"),
    (lambda p, A, inbox, *_: p.launch(kernel, inbox, A, A, 1), "scale is "
     "A[0:4, 0:8]; expected a number (float32)"),
    (lambda p, A, inbox, *_: p.launch(kernel, inbox, A, torch.tensor(2.0), 1), "scale "
     "is tensor(2.); expected a number (float32)"),
    (lambda p, A, inbox, *_: p.launch(kernel, inbox, A, 2.0, 1 << 31), "epoch is "
     "2147483648; expected -2147483648 to 2147483647 (int32)"),
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


def test_omitted_parameters():
    """Parameters of a plan and of its kernel that are annotated None are omitted."""
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


def test_threads_trace_one_plan(monkeypatch):
    """The threads make more calls than the plan caches."""
    monkeypatch.setattr(plans, "_MAX_TRACES", 4)
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


def test_threads_launch_one_program(every_rank, monkeypatch):
    """The second thread traces while the first one creates the program."""
    attach, took = plans.with_options, iter((0.1, 0.5))

    def slowly(*given):
        time.sleep(next(took))
        return attach(*given)

    monkeypatch.setattr(plans, "with_options", slowly)
    sizes = {"A": (4, 8), "inbox": (2, 4, 8), "flags": (2,), "word": (1,)}
    made = exchange.with_configs({})

    def launched(group: Group) -> list:
        group.meet("begin")
        steps = made.trace(group.rank, 2, sizes, {"epoch": 4})
        return [s.program for s in steps if isinstance(s, plans.Launch)]

    (first,), (second,) = every_rank(launched, 2)
    assert first is second


def test_a_plan_may_ask_for_the_steps_of_another():
    inner, results = declared(lambda p: None), []
    outer = declared(lambda p: results.append(inner.trace(0, 1, {}, {})))
    thread = threading.Thread(target=outer.trace, args=(0, 1, {}, {}), daemon=True)
    thread.start()
    thread.join(timeout=30)
    assert results and not thread.is_alive()


def test_explain_lists_values_that_streams_wait_for():
    @tw.plan
    def plan(p, word: T.Tensor((2,), "uint32")):
        p.wait_value(word[1], 3)
        p.write_value(word[1], 0)

    assert [(o.kind, o.flag, o.per_block, o.reason) for o in tw.explain(plan, 2).ops] == [
        ("wait", "word", 1, "explicit in the program"),
        ("signal", "word", 1, "explicit in the program"),
    ]


def test_a_plan_whose_streams_wait_for_values_is_explicit():
    def body(p, A, inbox, flags, word, epoch):
        for peer in p.peers():
            p.copy(inbox[peer, 0], A, stream="copies")
        p.wait_value(word[0], 1, stream="copies")
        p.launch(kernel, inbox, A, 2.0, epoch)

    assert not [s for s in trace(body) if isinstance(s, CopyValue)]
