"""Unordered atomic stores and read-modify-writes take effect in either order, coherently."""

import random

import numpy as np
import pytest
import tilelang.language as T

import tileweave as tw
from tests.corpus.faults.case import zeros_of
from tests.factory import factory
from tileweave import language as W
from tileweave.simulator.memory.clock import Clock
from tileweave.simulator.memory.memory import Access, Memory, Tensor
from tileweave.simulator.memory.order import SYS, BlockOrder, Layout

SEEDS = range(200)
EPOCHS = 3


def run(program, ranks=2, schedules=100, epochs=EPOCHS, seed=0):
    inputs = [zeros_of(program) for _ in range(ranks)]
    return tw.simulate(program, ranks, inputs, schedules, seed, epochs)


def outcomes(program, seeds=range(100)):
    """Return every final state of ``words`` of rank 0."""
    return {tuple(run(program, 2, 1, 1, seed)[0]["words"].tolist()) for seed in seeds}


# A flag that its reader resets: rank 1 sets it, rank 0 waits for it and gives a credit back.


@factory
def reset_flag(
    flags: W.Symmetric((2,), "int32"),
    state: T.Tensor((1,), "int32"),
    *,
    sem="relaxed",
    exchange=False,
    by_all=False,
    adds=False,
):
    with T.Kernel(1, threads=32) as _:
        me, tx = W.rank(), T.get_thread_binding()
        epoch = T.alloc_var("int32")
        epoch = state[0]
        if me == 0:
            if by_all:
                W.wait_eq(flags[0, 0], 1, sem="relaxed")
            if tx == 0:
                W.wait_eq(flags[0, 0], 1, sem="relaxed")
                if exchange:
                    W.atom_exch(flags[0, 0], 0, scope="sys", sem="relaxed")
                else:
                    W.st(flags[0, 0], 0, scope="sys", sem="relaxed")  # the reset
                W.st(flags[1, 1], epoch + 1, scope="sys", sem=sem)
        elif tx == 0:
            if adds:
                W.red_add(flags[0, 0], 1, scope="sys", sem="relaxed")
            else:
                W.st(flags[0, 0], 1, scope="sys", sem="relaxed")  # the set
            W.wait_reached(flags[1, 1], epoch + 1)
        T.sync_threads()
        if tx == 0:
            state[0] = epoch + 1


@pytest.mark.parametrize("how", [{}, {"adds": True}], ids=str)
def test_a_late_reset_loses_an_arrival(how):
    with pytest.raises(tw.SimulationError) as error:
        run(reset_flag(**how))
    report = error.value.report
    assert error.value.kind == "deadlock", report
    assert "lost: " in report and "landed before" in report and "flags[0, 0]" in report, report


@pytest.mark.parametrize("how", [{}, {"exchange": True}, {"adds": True}, {"by_all": True}], ids=str)
def test_a_reset_that_the_credit_releases_loses_nothing(how):
    run(reset_flag("release", **how))


@T.prim_func
def parity(flags: W.Symmetric((2,), "int32"), state: T.Tensor((1,), "int32")):
    with T.Kernel(1, threads=32) as _:
        me, tx = W.rank(), T.get_thread_binding()
        epoch = T.alloc_var("int32")
        epoch = state[0]
        if tx == 0:
            W.st(flags[1 - me, epoch % 2], epoch + 1, scope="sys", sem="relaxed")
            W.wait_eq(flags[me, epoch % 2], epoch + 1, sem="relaxed")
        T.sync_threads()
        if tx == 0:
            state[0] = epoch + 1


def test_a_reset_by_exchange_stays_next_to_the_arrival_that_it_takes():
    run(reset_flag(exchange=True))


def test_flags_of_two_launches_in_turn_have_one_writer_each():
    run(parity, epochs=5)


@T.prim_func
def observed_by_all(words: W.Symmetric((1,), "int32")):
    with T.Kernel(1, threads=32) as _:
        if W.rank() == 0:
            W.wait_eq(words[0, 0], 1, sem="relaxed")
            if T.get_thread_binding() == 0:
                W.st(words[0, 0], 2, scope="sys", sem="relaxed")
        elif T.get_thread_binding() == 0:
            W.st(words[0, 0], 1, scope="sys", sem="relaxed")


def test_a_thread_does_not_overwrite_before_what_all_threads_observed():
    assert outcomes(observed_by_all) == {(2,)}


@factory
def two_plus_two(words: W.Symmetric((2,), "int32"), *, sem="relaxed", fence=False, exchange=False):
    """Rank 0 stores x = 1, y = 2 and rank 1 stores y = 1, x = 2."""
    with T.Kernel(1, threads=32) as _:
        me = W.rank()
        if T.get_thread_binding() == 0:
            W.st(words[0, me], 1, scope="sys", sem=sem)
            if fence:
                W.fence("sys", sem="sc")
            if exchange:
                W.atom_exch(words[0, 1 - me], 2, scope="sys", sem=sem)
            else:
                W.st(words[0, 1 - me], 2, scope="sys", sem=sem)


@pytest.mark.parametrize("how", [{}, {"sem": "release"}, {"exchange": True}], ids=str)
def test_both_first_stores_of_2_plus_2w_may_land_last(how):
    assert outcomes(two_plus_two(**how)) == {(1, 1), (1, 2), (2, 1), (2, 2)}


def test_sc_fences_order_2_plus_2w():
    assert outcomes(two_plus_two(fence=True)) == {(1, 2), (2, 1), (2, 2)}


@T.prim_func
def tickets(words: W.Symmetric((1,), "int32"), drawn: T.Tensor((8,), "int32")):
    with T.Kernel(8, threads=32) as block:
        if T.get_thread_binding() == 0:
            drawn[block] = W.atom_add(words[0, 0], 1, scope="sys", sem="relaxed")


def test_no_ticket_is_drawn_twice():
    for seed in range(30):
        outputs = run(tickets, 2, 1, 1, seed)
        assert sorted(np.concatenate([o["drawn"] for o in outputs])) == list(range(16))


@T.prim_func
def spin_lock(words: W.Symmetric((1,), "int32"), total: W.Symmetric((1,), "int32")):
    with T.Kernel(2, threads=32) as _:
        if T.get_thread_binding() == 0:
            while W.atom_exch(words[0, 0], 1, scope="sys", sem="acquire") != 0:
                pass
            total[0, 0] = total[0, 0] + 1
            W.st(words[0, 0], 0, scope="sys", sem="release")


def test_a_spin_lock_by_exchange_excludes_and_is_free_at_the_end():
    for seed in range(30):
        first = run(spin_lock, 2, 1, 2, seed)[0]
        assert (first["total"].tolist(), first["words"].tolist()) == ([8], [0])


# Coherence of random accesses, by the memory itself.


class Threads:
    """Threads of different ranks that access the words of one tensor."""

    def __init__(self, seed):
        layout = Layout(3, {None: 1}, 1)
        self.memory = Memory(layout, random.Random(seed))
        begin = Clock.start(layout.count)
        self.orders = [BlockOrder.start(layout, r, 0, begin) for r in range(3)]
        self.x = Tensor(self.memory, "x", (2,), np.dtype(np.int32), written=True)
        self.x.give((Ellipsis,), 0)

    def access(self, thread):
        return Access(*self.orders[thread].actor((0,)), SYS, "access", "here:1")

    def store(self, thread, value, words=((0,),), releases=False):
        access, words = self.access(thread), list(words)
        sync = self.orders[thread].release(0, SYS) if releases else {}
        before = self.x.overtaken(words, access)
        self.x.store_words(words, [value] * len(words), access, sync, before=before)

    def add(self, thread):
        """Add one, relaxed, and return the previous value."""
        access = self.access(thread)
        before = self.x.overtaken([(0,)], access)
        entry = self.x.newest((0,), before)
        self.x.store_word(
            (0,), entry.value + 1, access, entry.sync, replaces=True, adds=True, before=before
        )
        return int(entry.value)

    def load(self, thread, acquires=False):
        entry = self.x.load_word((0,), self.access(thread), False)
        if acquires:
            self.orders[thread].acquire((0,), entry.sync, SYS)
        return int(entry.value)

    def values(self):
        """Return the values of the first word in modification order."""
        return [int(entry.value) for entry in self.x.words[0]]


def test_stores_of_one_thread_land_in_order():
    for seed in SEEDS:
        threads = Threads(seed)
        threads.store(1, 9)
        threads.store(0, 1)
        threads.store(0, 2)
        values = threads.values()
        assert values.index(1) < values.index(2)


def test_a_store_ordered_by_release_and_acquire_lands_after():
    for seed in SEEDS:
        threads = Threads(seed)
        threads.store(0, 1)
        threads.store(0, 2, releases=True)
        if threads.load(1, acquires=True) == 2:
            threads.store(1, 3)
            assert threads.values() == [0, 1, 2, 3]


def test_a_load_after_a_store_does_not_see_what_the_store_overwrote():
    seen = set()
    for seed in SEEDS:
        threads = Threads(seed)
        threads.store(1, 9)
        threads.store(0, 1)
        values, value = threads.values(), threads.load(0)
        assert values.index(value) >= values.index(1)
        seen.add((tuple(values), value))
    assert seen == {((0, 9, 1), 1), ((0, 1, 9), 1), ((0, 1, 9), 9)}


def test_a_store_after_a_load_lands_after_what_the_load_saw():
    seen = set()
    for seed in SEEDS:
        threads = Threads(seed)
        threads.store(1, 9)
        value = threads.load(0)
        threads.store(0, 1)
        values = threads.values()
        assert values.index(value) < values.index(1)
        seen.add((value, tuple(values)))
    assert seen == {(9, (0, 9, 1)), (0, (0, 9, 1)), (0, (0, 1, 9))}


def test_loads_of_one_thread_follow_the_modification_order():
    for seed in SEEDS:
        threads = Threads(seed)
        seen = []
        for value in (1, 2, 3):
            threads.store(0, value)
            threads.store(1, 10 + value)
            seen.append(threads.load(2))
        seen.append(threads.load(2))
        places = [threads.values().index(value) for value in seen]
        assert places == sorted(places)


def test_nothing_lands_between_an_addition_and_what_it_read():
    orders = set()
    for seed in SEEDS:
        threads = Threads(seed)
        threads.store(0, 10)
        threads.add(1)
        threads.store(2, 20)
        threads.add(1)
        entries = threads.x.words[0]
        for at, entry in enumerate(entries):
            if entry.replaces:
                assert entry.value == entries[at - 1].value + 1
        orders.add(tuple(threads.values()))
    assert {(0, 10, 11, 20, 21), (0, 1, 2, 10, 20), (0, 20, 10, 11, 12)} <= orders


def test_stores_of_two_words_land_in_one_order():
    orders = set()
    for seed in SEEDS:
        threads = Threads(seed)
        for thread in range(3):
            threads.store(thread, thread + 1, words=((0,), (1,)))
        first, second = ([int(e.value) for e in threads.x.words[w]] for w in (0, 1))
        assert first == second
        orders.add(tuple(first))
    assert len(orders) == 6
