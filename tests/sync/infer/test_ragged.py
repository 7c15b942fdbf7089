"""Ragged tensors: random routings, options of reuse, and counters that wrap around.

``TILEWEAVE_ROUTINGS=1000`` tests that many routings of each program instead of a few.
"""

import os

import numpy as np
import pytest
import tilelang.language as T
from tilelang import tvm

import tileweave as tw
from tests.corpus import PROGRAMS
from tests.factory import factory
from tileweave import language as W
from tileweave import passes
from tileweave.emit import EMIT_HEAP_STRIDE
from tileweave.simulator import Executable
from tileweave.simulator.case import Case

ROUTINGS = int(os.environ.get("TILEWEAVE_ROUTINGS", 3))
NAMES = [name for name in PROGRAMS if name.startswith("ragged_")]

pytestmark = pytest.mark.filterwarnings("ignore:.*never waited for:tileweave.SimulationWarning")


def check(case, program, rng, seed, **options):
    inputs = case.inputs(rng, program.world_size)
    out = tw.simulate(program, program.world_size, inputs, seed=seed, **options)
    for rank, tensors in enumerate(case.expected(inputs)):
        for name, value in tensors.items():
            assert np.array_equal(out[rank][name], value), (seed, rank, name)


@pytest.mark.long
@pytest.mark.parametrize(("name", "ranks"), [(n, r) for n in NAMES for r in PROGRAMS[n].ranks])
def test_random_routings(name, ranks):
    case = PROGRAMS[name]
    program, rng = Executable(case.make(ranks), ranks), np.random.default_rng(ranks)
    for seed in range(ROUTINGS):
        check(case, program, rng, seed, resident_blocks=[case.resident, 8][seed % 2])


@pytest.mark.long
@pytest.mark.parametrize("reuse", ["credit", "barrier", "double_buffer"])
@pytest.mark.parametrize("name", NAMES)
def test_reuse(name, reuse):
    """The place of a write is data, and its owner may be, too: the writer waits for that owner."""
    case, ranks = PROGRAMS[name], 2
    func, _ = passes.split_options(case.make(ranks), {"tileweave.reuse": reuse})
    explanation = tw.explain(case.make(ranks), ranks, pass_configs={"tileweave.reuse": reuse})
    expected = {
        "credit": "credit", "barrier": "next launch has started", "double_buffer": "two buffers"
    }[reuse]  # fmt: skip
    assert all(
        expected in text or text.startswith("writers first wait")
        for text in explanation.reuse.values()
    )
    program, rng = Executable(func, ranks), np.random.default_rng(5)
    for seed in range(3):
        check(case, program, rng, seed, epochs=5, resident_blocks=8)


@pytest.mark.parametrize("name", ["ragged_dispatch", "ragged_tiles"])
def test_counters_wrap_around(name, monkeypatch):
    """Totals are kept modulo 2^32: they begin just below it, and cross it in the second launch."""
    case, ranks = PROGRAMS[name], 2

    def wrapping(*arguments):
        machine, start = make(*arguments), np.uint32(0x100000000 - 3)
        for tensors in machine.implicit.values():
            for name in ("inbox_total", "inbox_arrived"):
                for tensor in tensors[name]:
                    tensor.give((Ellipsis,), np.full_like(tensor.data, start))
        return machine

    make = Case.machine
    monkeypatch.setattr(Case, "machine", wrapping)
    program, rng = Executable(case.make(ranks), ranks), np.random.default_rng(0)
    for seed in range(3):
        check(case, program, rng, seed, epochs=4, resident_blocks=8)


def text_of(program, ranks=2):
    mod = tvm.IRModule({"program": program})
    return passes.run_group(mod, ranks, EMIT_HEAP_STRIDE).script()


def test_tensors_without_segments_are_left_alone():
    @T.prim_func
    def program(X: T.Tensor((4,), "float32"), S: W.Symmetric((4,), "float32")):
        with T.Kernel(1, threads=32):
            T.copy(X, S[1 - W.rank(), 0])

    assert "announce" not in text_of(program)


@pytest.mark.parametrize(
    "name", ["ragged_dispatch", pytest.param("ragged_halves", marks=pytest.mark.long)]
)
def test_checked_rows(name):
    """The checks change no result, and come before each write and at the end of the launch."""
    checked = {"tileweave.check_rows": True}
    case, ranks = PROGRAMS[name], 2
    func, _ = passes.split_options(case.make(ranks), checked)
    program, rng = Executable(func, ranks), np.random.default_rng(1)
    check(case, program, rng, 0, resident_blocks=8)
    cuda = tw.emit(case.make(ranks), world_size=ranks, pass_configs=checked)
    assert cuda.index("tw::check_row(") < cuda.index("tw::check_amount(")
    assert "check_row" not in tw.emit(case.make(ranks), world_size=ranks)


def test_explain_lists_what_is_assumed():
    explanation = tw.explain(PROGRAMS["ragged_dispatch"].make(2), 2)
    assumed = (
        "each launch writes row 0 to count - 1 of a segment, each once, where count, at most 4"
    )
    assert explanation.assumed["inbox"].startswith(assumed)
    assert "assumed, and checked by the simulator:\n  inbox  each launch" in str(explanation)
    assert assumed in explanation.html() and assumed in explanation.as_json()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rows": 0, "row": 4}, "rows=0; expected positive constants"),
        ({"rows": 2, "row": (4, -1)}, "row=.*; expected positive constants"),
        ({"segments": (2, 0), "rows": 2, "row": 4}, "segments=.*; expected positive constants"),
        (
            {"rows": 1 << 20, "row": 1 << 10},
            "rows=.*; expected 1 to 536870912 elements in a segment",
        ),
        ({"rows": 2, "row": 4, "dtype": "complex"}, "dtype='complex'"),
    ],
)
def test_refused_allocations(arguments, message):
    with pytest.raises(tw.LanguageError, match=f"alloc_ragged: {message}"):

        @T.prim_func
        def program(Y: T.Tensor((4,), "float32")):
            with T.Kernel(1, threads=32):
                W.alloc_ragged(**arguments)


@pytest.mark.parametrize("op", ["announce", "announced"])
def test_refused_segments(op):
    def use(ref):
        return W.announce(ref, 1) if op == "announce" else W.announced(ref)

    with pytest.raises(tw.LanguageError, match=f"{op}: ref=S; expected a tensor of W.alloc_ragged"):

        @T.prim_func
        def other(S: W.Symmetric((4,), "float32")):
            with T.Kernel(1, threads=32):
                use(S[0, 0])

    with pytest.raises(tw.LanguageError, match=f"{op}: .* expected index 0 on the axis of rows"):

        @T.prim_func
        def row(Y: T.Tensor((4,), "float32")):
            with T.Kernel(1, threads=32):
                inbox = W.alloc_ragged((), rows=2, row=4)
                use(inbox[0, 0, 1, 0])


@factory
def to_both(
    change,
    X: T.Tensor((2, 8), "float32"),
    owners: T.Tensor((2,), "int32"),
    Y: T.Tensor((2, 8), "float32"),
):
    """Each rank sends a row to rank 0, then one to rank 1. ``change`` changes the loaded owner."""
    with T.Kernel(1, threads=32):
        inbox = W.alloc_ragged((), rows=1, row=8)
        owner = T.alloc_shared((1,), "int32")
        me = W.rank()
        change(owner, owners, 0)
        for j in T.Parallel(8):
            inbox[owner[0], me, 0, j] = X[0, j]
        change(owner, owners, 1)
        for j in T.Parallel(8):
            inbox[owner[0], me, 0, j] = X[1, j]
        for peer in T.serial(2):
            W.announce(inbox[peer, me, 0, 0], 1)
        for s in T.serial(2):
            for i in T.serial(W.announced(inbox[me, s, 0, 0])):
                for j in T.Parallel(8):
                    Y[s, j] = inbox[me, s, i, j]


@T.macro
def by_a_copy(owner, owners, number):
    T.copy(owners[number], owner)


@T.macro
def by_a_store(owner, owners, number):
    owner[0] = owners[number]


@pytest.mark.parametrize("change", [by_a_copy, by_a_store])
def test_owner_changes_between_writes(change):
    """A wait for the owner that a load chose covers no later write whose owner the load chooses."""
    rng = np.random.default_rng(0)
    inputs = [
        {"X": rng.standard_normal((2, 8), np.float32), "owners": np.arange(2, dtype=np.int32)}
        for _ in range(2)
    ]
    options = {"epochs": 4, "schedules": 8, "pass_configs": {"tileweave.reuse": "credit"}}
    out = tw.simulate(to_both(change), 2, inputs, **options)
    for reader in range(2):
        rows = [inputs[sender]["X"][reader] for sender in range(2)]
        np.testing.assert_array_equal(out[reader]["Y"], rows)


@factory
def announced_by(selects, X: T.Tensor((1, 8), "float32"), Y: T.Tensor((1, 8), "float32")):
    """Return a program whose threads for which ``selects`` holds announce a row."""
    with T.Kernel(1, threads=32):
        inbox = W.alloc_ragged((), rows=4, row=8)
        for peer in T.serial(2):
            if selects(T.get_thread_binding()):
                W.announce(inbox[peer, W.rank(), 0, 0], 1)
            T.copy(X, inbox[peer, W.rank(), 0, 0])
        T.copy(inbox[W.rank(), 1 - W.rank(), 0, 0], Y)


def test_one_thread_announces():
    inputs = [{"X": np.full((1, 8), rank, np.float32)} for rank in range(2)]
    for rank, out in enumerate(tw.simulate(announced_by(lambda t: t == 5), 2, inputs)):
        assert (out["Y"] == 1 - rank).all()
    with pytest.raises(tw.LanguageError, match="announce: 7 threads call it separately"):
        tw.simulate(announced_by(lambda t: t < 7), 2, inputs)
