"""Signals and waits whose numbers do not match: reports, and unusual programs that are correct."""

import re
import warnings

import numpy as np
import pytest
import tilelang.language as T

import tileweave as tw
from tests.factory import factory
from tests.releases import needs_lines
from tileweave import language as W

THREADS = 32


def run(program, ranks=2, epochs=4, schedules=10, **values):
    """Simulate with integer tensors that start at zero; warnings are errors."""
    inputs = [
        {
            **{
                b.name: np.zeros([int(n) for n in b.shape[b.name == "flags" :]], str(b.dtype))
                for b in program.buffer_map.values()
            },
            "epoch": lambda e: e,
            **values,
        }
        for _ in range(ranks)
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error", tw.SimulationWarning)
        return tw.simulate(program, ranks, inputs, epochs=epochs, schedules=schedules)


def fault(program, **arguments):
    with pytest.raises(tw.SimulationError) as error:
        run(program, **arguments)
    return error.value


def between_neighbours(step, dtype="int32"):
    """Each rank does ``step(flags, me, peer, epoch)`` once a launch."""

    @T.prim_func
    def program(flags: W.Symmetric((4,), dtype), epoch: T.int32):
        with T.Kernel(1, threads=THREADS) as _:
            me = W.rank()
            step(flags, me, (me + 1) % W.world_size(), epoch)

    return program


def ahead_by(window):
    """A rank may run ahead by ``window`` launches: the excess grows until a rank has to wait."""

    @T.macro
    def step(flags, me, peer, epoch):
        W.signal(flags[peer, 0])
        W.wait_reached(flags[me, 0], T.max(epoch + 1 - window, 0))

    return between_neighbours(step)


@T.macro
def ping_pong(flags, me, peer, epoch):
    """Flags are set, not counted; each iteration overwrites the last one."""
    for turn in T.serial(3):
        W.signal(flags[peer, turn % 2], epoch * 3 + turn + 1, op="set")
        W.wait_ge(flags[me, turn % 2], epoch * 3 + turn + 1)


@T.macro
def every_second_launch(flags, me, peer, epoch):
    W.signal(flags[peer, 0])
    if epoch % 2 == 1:
        W.wait_reached(flags[me, 0], epoch + 1)


@T.macro
def growing_work(flags, me, peer, epoch):
    """Each launch has more arrivals, and waits for all of them."""
    for _ in T.serial(epoch + 1):
        W.signal(flags[peer, 0])
    W.wait_reached(flags[me, 0], (epoch + 1) * (epoch + 2) // 2)


@T.macro
def several_targets(flags, me, peer, epoch):
    """Rank 0 waits for the first of two arrivals, then both ranks wait for both."""
    W.signal(flags[0, 0])
    if me == 0:
        W.wait_reached(flags[0, 0], epoch * 2 + 1)
    W.wait_gt(flags[0, 0], epoch * 2 + 1)


@T.macro
def first_of_two(flags, me, peer, epoch):
    """A wait for the first of two arrivals: the excess is constant."""
    W.signal(flags[0, 0])
    W.wait_reached(flags[0, 0], epoch * 2 + 1)


@T.macro
def counted_down(flags, me, peer, epoch):
    """A word that is also decremented is no counter."""
    W.signal(flags[me, 0], 2)
    W.wait_ge(flags[me, 0], epoch + 1)
    W.signal(flags[me, 0], -1)


@pytest.mark.parametrize("window", [1, 2, 3, 4])
def test_credits_are_legal(window):
    run(ahead_by(window), epochs=6)


@pytest.mark.parametrize(
    "step",
    [
        ping_pong, every_second_launch, growing_work, several_targets, first_of_two, counted_down,
    ],
    ids=lambda step: step.name if hasattr(step, "name") else str(step),
)  # fmt: skip
def test_unusual_counters_are_legal(step):
    run(between_neighbours(step))


@factory
def tickets(permits, lock: W.Symmetric((2,), "int32")):
    """A lock, or a semaphore with several permits, that serves tickets in order."""
    with T.Kernel(1, threads=32):
        ticket = T.alloc_var("int32")
        if T.get_thread_binding() == 0:
            ticket = W.atom_add(lock[0, 0], 1, scope="sys")
            W.wait_reached(lock[0, 1], ticket - permits + 1, scope="sys")
            W.red_add(lock[0, 1], 1, scope="sys", sem="release")


@pytest.mark.parametrize(("permits", "epochs"), [(1, 4), (3, 2), (3, 3)])
def test_a_counter_of_tickets_is_legal(permits, epochs):
    inputs = [{"lock": np.zeros(2, np.int32)} for _ in range(3)]
    tw.simulate(tickets(permits), 3, inputs, schedules=80, epochs=epochs)


def test_a_counter_that_wraps_around():
    @T.macro
    def step(flags, me, peer, epoch):
        W.signal(flags[peer, 0])
        W.wait_reached(flags[me, 0], T.Cast("uint32", epoch - 1))

    start = np.array([2**32 - 2, 0, 0, 0], np.uint32)
    run(between_neighbours(step, "uint32"), flags=start)


@T.macro
def twice(flags, me, peer, epoch):
    W.signal(flags[peer, 1])
    W.signal(flags[peer, 1])
    W.wait_reached(flags[me, 1], epoch + 1)


@needs_lines
def test_a_duplicate_arrival_is_reported_with_its_launch():
    error = fault(between_neighbours(twice), epochs=3)
    assert error.kind == "arrival" and error.seed == 0
    lines = error.report.splitlines()
    assert lines[0].startswith("flags[1, 1] receives more arrivals than are waited for")
    assert lines[1:4] == [
        f"  up to launch {e}: {2 * e + 2} arrivals, {e + 1} waited for, {e + 1} over"
        for e in range(3)
    ]
    first = twice_line("W.signal")
    assert [int(n) for n in re.findall(r"arrivals\.py:(\d+)", error.report)] == [
        first, first + 1, first + 2,
    ]  # fmt: skip
    assert "3 times, last by rank 0, block 0, " in error.report


def twice_line(text):
    """Return the number of the first line of ``twice`` with this text."""
    source = open(__file__).read().splitlines()
    start = source.index("def twice(flags, me, peer, epoch):")
    return next(n for n in range(start, len(source)) if text in source[n]) + 1


def test_two_launches_show_a_duplicate_arrival():
    assert fault(between_neighbours(twice), epochs=2).kind == "arrival"
    run(between_neighbours(twice), epochs=1)  # it may still be a credit


@T.macro
def equal_and_set(flags, me, peer, epoch):
    W.signal(flags[peer, 0], 2, op="set")
    W.wait_eq(flags[me, 0], 1)


def test_a_word_that_is_set_may_come_back():
    assert fault(between_neighbours(equal_and_set)).kind == "deadlock"


@T.macro
def one_short(flags, me, peer, epoch):
    if me > 0:
        W.signal(flags[0, 0])
        W.signal(flags[me, 3])
    if epoch < 0:
        W.atom_add(flags[0, 0], 1, scope="sys")
    if me == 0:
        W.wait_reached(flags[0, 0], 3)


@needs_lines
def test_a_lost_arrival_is_reported_with_possible_senders():
    error = fault(between_neighbours(one_short), ranks=3, epochs=1)
    assert error.kind == "deadlock"
    assert "waits at W.wait_reached(flags[0, 0]): value seen 2, value wanted reached 3" in (
        error.report
    )
    assert "    1 missing\n" in error.report
    could = [line for line in error.report.splitlines() if "could signal it: " in line]
    assert len(could) == 3
    assert re.search(r"W\.signal --> .*, so far twice, last by rank [12], block 0, ", could[0])
    assert re.search(r"W\.signal --> .*, so far never; other words of flags twice", could[1])
    assert re.search(r"W\.atom_add --> .*, so far never$", could[2])


@T.macro
def waits_only(flags, me, peer, epoch):
    W.wait_reached(flags[me, 0], 1)


def test_a_lost_arrival_without_possible_senders():
    assert "no line of the program signals flags" in fault(between_neighbours(waits_only)).report


@T.macro
def to_nobody(flags, me, peer, epoch):
    W.signal(flags[peer, 0])
    W.wait_reached(flags[me, 0], epoch + 1)
    W.signal(flags[peer, 2])
    W.signal(flags[peer, 3])


@needs_lines
def test_signals_without_a_wait():
    program = between_neighbours(to_nobody)
    inputs = [{"flags": np.zeros(4, np.int32), "epoch": lambda e: e} for _ in range(2)]
    with pytest.warns(tw.SimulationWarning) as actual:
        tw.simulate(program, 2, inputs)
    texts = sorted(str(w.message) for w in actual)
    assert len(texts) == 2
    for text, word in zip(texts, (2, 3), strict=True):
        assert text.startswith(
            f"program: each of 2 words (flags[0, {word}], ..) is signalled, but never waited for "
            "or read: W.signal --> "
        )
        assert re.search(r"test_arrivals\.py:\d+$", text)


@pytest.mark.parametrize("look", ["load", "atomic", "plain", "tile"])
def test_a_signal_that_is_read_is_consumed(look):
    @T.prim_func
    def program(flags: W.Symmetric((4,), "int32"), out: T.Tensor((4,), "int32"), epoch: T.int32):
        with T.Kernel(1, threads=THREADS) as _:
            me = W.rank()
            W.signal(flags[me, 1], scope="gpu")
            T.sync_threads()
            if look == "tile":
                tile = T.alloc_shared((4,), "int32")
                T.copy(flags[me, 0], tile)
                T.copy(tile, out[0])
            elif T.get_thread_binding() == 0:
                if look == "load":
                    out[0] = W.ld(flags[me, 1])
                elif look == "atomic":
                    out[0] = W.atom_add(flags[me, 1], 0)
                else:
                    out[0] = flags[me, 1]

    run(program, ranks=1, epochs=1)
