"""A new builtin needs only a declaration; passes and simulator handle it correctly."""

import numpy as np
import pytest
import tilelang.language as T
from tilelang import tvm

import tileweave as tw
from tests.factory import factory
from tileweave import passes
from tileweave.builtins import language as W
from tileweave.builtins.atomics import INTEGER_TYPES
from tileweave.builtins.declaration.declare import builtin
from tileweave.builtins.declaration.qualifiers import RedSem, Scope
from tileweave.builtins.spec import BUILTINS, Element, Int64, Read, ReadWrite, Write
from tileweave.passes.ir.group import heap_tensors
from tileweave.passes.sync.regions.accesses import collect_accesses
from tileweave.passes.sync.verify.events import collect_events
from tileweave.simulator.frontend import functions

N = 32
STRIDE = 1 << 40


@pytest.fixture
def declared():
    """Remove the declarations of a test."""
    before = dict(BUILTINS)
    yield
    BUILTINS.clear()
    BUILTINS.update(before)


@pytest.fixture
def red_mul(declared):
    """Declare ``W.red_mul`` as an experiment would."""

    @builtin(types=INTEGER_TYPES, combines="mul")
    def red_mul(
        ref: ReadWrite, value: Element, *, scope: Scope = "gpu", sem: RedSem = "relaxed"
    ) -> None:
        """Multiply an integer by ``value``. Otherwise like ``red_add``."""

    return red_mul


@pytest.fixture
def put_sum(declared):
    """Declare a copy that adds, by all threads of the block."""

    @builtin(level="block", moves="size", combines="add")
    def put_sum(src: Read, dst: Write, size: Int64) -> None:
        """Add ``size`` elements to a peer's memory."""

    return put_sum


def grouped(func, stages=passes.FOR_GROUP):
    mod = tvm.IRModule({"program": func})
    (func,) = passes.run_group(mod, 2, STRIDE, stages).functions.values()
    return func


@factory
def exchange(
    publish,
    sem,
    S: W.Symmetric((N,), "float32"),
    F: W.Symmetric((1,), "uint32"),
    out: T.Tensor((N,), "float32"),
):
    with T.Kernel(1, threads=N):
        me = W.rank()
        for i in T.Parallel(N):
            S[1 - me, i] = i
        if T.get_thread_binding() == 0:
            publish(F[1 - me, 0], 3, scope="sys", sem=sem)
        W.wait_ne(F[me, 0], 0)
        T.sync_threads()
        for i in T.Parallel(N):
            out[i] = S[me, i]
        W.sync_ranks()


def test_events_are_those_of_its_declaration(red_mul):
    func = grouped(exchange(red_mul, "release"))
    _, events = collect_events(func, heap_tensors(func))
    (event,) = [e for e in events if e.op == "W.red_mul"]
    assert (event.kind, event.sem, event.scope) == ("signal", "release", "sys")
    assert event.value is None and not event.adds  # waits cannot count this reduction


def ordered(func):
    mod = tvm.IRModule({"program": grouped(func, ["group", "sync", "debug"])})
    return passes.run("tile", mod).script()


def test_a_release_is_ordered_after_the_block(red_mul):
    before, op, _ = ordered(exchange(red_mul, "release")).partition("T.tileweave.red_mul")
    assert op and "complete_bulk_stores" in before and "tvm_storage_sync" in before
    before, op, _ = ordered(exchange(red_mul, "relaxed")).partition("T.tileweave.red_mul")
    assert op and "complete_bulk_stores" not in before


def test_it_is_verified(red_mul):
    grouped(exchange(red_mul, "release"))
    with pytest.raises(tw.LanguageError, match=r"W\.red_mul.* has sem='relaxed'"):
        grouped(exchange(red_mul, "relaxed"))


def test_accesses_are_those_of_its_declaration(put_sum):
    @T.prim_func
    def program(S: W.Symmetric((N,), "float32"), D: W.Symmetric((N,), "float32")):
        with T.Kernel(1, threads=N):
            put_sum(S[W.rank(), 0], D[1 - W.rank(), 0], 16)
            W.sync_ranks()

    func = grouped(program)
    accesses = collect_accesses(func, heap_tensors(func)).accesses
    assert [(a.op, a.kind, a.tensor.name) for a in accesses] == [
        ("W.put_sum", "read", "S"), ("W.put_sum", "add", "D"),
    ]  # fmt: skip
    assert [int(a.extents[-1]) for a in accesses] == [16, 16]


@factory
def products(publish, A: T.Tensor((1,), "int32")):
    with T.Kernel(1, threads=N):
        if T.get_thread_binding() < 4:
            publish(A[0], 3)


def test_the_simulator_needs_its_operation_only(red_mul, monkeypatch):
    start = [{"A": np.array([2], np.int32)}]
    with pytest.raises(tw.SimulationError, match=r"W\.red_mul, which combines by 'mul'"):
        tw.simulate(products(red_mul), 1, start)
    monkeypatch.setitem(functions.REDUCTIONS, "mul", np.multiply)
    (done,) = tw.simulate(products(red_mul), 1, start, epochs=1)
    assert done["A"].tolist() == [2 * 3**4]
