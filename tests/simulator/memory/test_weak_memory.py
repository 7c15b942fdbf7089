"""Values that loads may return: tearing of words, fences and atomic accesses."""

import random

import numpy as np
import pytest
import tilelang.language as T

import tileweave as tw
from tests.factory import factory
from tests.simulator.memory.world import World, kind_of
from tileweave import language as W
from tileweave.simulator.memory.order import GPU, SYS


def words_seen(store):
    """Return every pair that one load of both words may return after ``store(world,
    word, value)``."""
    seen = set()
    for seed in range(60):
        world = World()
        world.memory.rng = random.Random(seed)
        writer, reader = world.blocks[0, 0], world.blocks[1, 0]
        store(world, lambda w=world, o=writer: w.access(o, (0,), SYS))
        words = [(2,), (3,)]
        entries = world.data.load_words(words, world.access(reader, (0,), SYS), False)
        seen.add(tuple(int(entry.value) for entry in entries))
    return seen


def test_a_store_of_two_words_is_seen_completely_or_not_at_all():
    def twice(world, access):
        for value in (1, 2):
            world.data.store_words([(2,), (3,)], [value, value], access(), {})

    assert words_seen(twice) == {(0, 0), (1, 1), (2, 2)}


def test_two_stores_of_a_word_each_may_be_seen_in_any_order():
    def each(world, access):
        for word in ((2,), (3,)):
            world.data.store_word(word, 1, access(), {})

    assert words_seen(each) == {(0, 0), (0, 1), (1, 0), (1, 1)}


def test_a_later_store_of_one_word_implies_the_whole_store_before_it():
    def then_one(world, access):
        world.data.store_words([(2,), (3,)], [1, 1], access(), {})
        world.data.store_word((2,), 2, access(), {})

    assert words_seen(then_one) == {(0, 0), (1, 1), (2, 1)}


@factory
def dekker(
    sem,
    up: W.Symmetric((2,), "int32"),
    data: W.Symmetric((1,), "int32"),
    out: T.Tensor((1,), "int32"),
):
    """Each rank raises its flag and enters if it does not see the flag of the other rank."""
    with T.Kernel(1, threads=32):
        me = W.rank()
        if T.get_thread_binding() == 0:
            W.st(up[0, me], 1, scope="sys")
            W.fence("sys", sem)
            out[0] = W.ld(up[0, 1 - me], scope="sys", sem="relaxed")
            if out[0] == 0:
                data[0, 0] = me


@factory
def iriw(sem, up: W.Symmetric((2,), "int32"), out: T.Tensor((2,), "int32")):
    """Two ranks write a word each; two other ranks read both, in opposite order."""
    with T.Kernel(1, threads=32):
        me = W.rank()
        if T.get_thread_binding() == 0:
            if me < 2:
                W.st(up[0, me], 1, scope="sys")
            else:
                out[0] = W.ld(up[0, me - 2], scope="sys", sem="relaxed")
                W.fence("sys", sem)
                out[1] = W.ld(up[0, 3 - me], scope="sys", sem="relaxed")


def outcomes(program, ranks, shapes, seeds):
    """Return the possible values of ``out`` of all ranks, or the fault."""
    inputs = [{n: np.zeros(s, np.int32) for n, s in shapes.items()} for _ in range(ranks)]
    observed = set()
    for seed in range(seeds):
        try:
            outputs = tw.simulate(program, ranks, inputs, seed=seed, epochs=1)
            observed.add(tuple(tuple(o["out"].tolist()) for o in outputs))
        except tw.SimulationError as error:
            observed.add(error.kind)
    return observed


@pytest.mark.parametrize(("sem", "kinds"), [("sc", set()), ("acq_rel", {"race"})])
def test_only_sc_fences_exclude_each_other_by_flags(sem, kinds):
    observed = outcomes(dekker(sem), 2, {"up": (2,), "data": (1,), "out": (1,)}, 40)
    assert observed == {((0,), (1,)), ((1,), (0,)), ((1,), (1,))} | kinds


@pytest.mark.parametrize(("sem", "differs"), [("sc", False), ("acq_rel", True)])
def test_readers_agree_about_the_order_of_independent_writes_only_with_sc(sem, differs):
    observed = {o[2:] for o in outcomes(iriw(sem), 4, {"up": (2,), "out": (2,)}, 80)}
    assert (((1, 0), (1, 0)) in observed) == differs
    assert ((1, 0), (1, 1)) in observed


def test_sc_fences_are_ordered_only_if_their_scopes_include_each_other():
    for one, other, fault in ((SYS, SYS, None), (GPU, SYS, "race"), (SYS, GPU, "race")):
        world = World()
        world.store((0, 0), thread_groups=(0,))
        published = world.blocks[0, 0].fence(0, one, {})
        world.blocks[1, 0].fence(0, other, published)
        assert kind_of(lambda w=world: w.load((1, 0), thread_groups=(0,))) == fault


@factory
def led_to(scope, sem, x: W.Symmetric((2,), "int32"), out: T.Tensor((1,), "int32")):
    """Rank 0 loads a word and then asks rank 1 to change it."""
    with T.Kernel(1, threads=32):
        if T.get_thread_binding() == 0:
            if W.rank() == 0:
                out[0] = W.ld(x[0, 0], scope="sys", sem="relaxed")
                W.st(x[0, 1], 1, scope="sys", sem="release" if sem == "acquire" else sem)
            else:
                W.wait_ge(x[0, 1], 1, scope="sys", sem=sem)
                W.st(x[0, 0], 5, scope=scope)


@pytest.mark.parametrize(
    ("scope", "sem", "why"),
    [
        ("sys", "relaxed", "what followed the load led to the store"),
        ("gpu", "relaxed", "not at scopes that include each other"),
        ("sys", "acquire", None),
    ],
)
def test_the_reason_why_atomic_accesses_conflict_is_true(scope, sem, why):
    inputs = [{"x": np.zeros(2, np.int32)} for _ in range(2)]
    if why is None:
        tw.simulate(led_to(scope, sem), 2, inputs, schedules=20, epochs=1)
        return
    with pytest.raises(tw.SimulationError, match="race") as error:
        tw.simulate(led_to(scope, sem), 2, inputs, schedules=20, epochs=1)
    (reason,) = (x for x in error.value.report.splitlines() if x.startswith("both are atomic"))
    assert why in reason


@factory
def taken(how, sem, x: W.Symmetric((2,), "int32"), out: T.Tensor((1,), "int32")):
    """Rank 1 changes a word that rank 0 stored, and acknowledges it; rank 0 stores again."""
    polls, adds = how == "polled exchange", how == "addition"
    with T.Kernel(1, threads=32):
        if T.get_thread_binding() == 0:
            if W.rank() == 0:
                W.st(x[1, 0], 1, scope="sys")
                W.wait_eq(x[0, 1], 1, sem="acquire" if sem == "release" else sem)
                W.st(x[1, 0], 2, scope="sys")
            else:
                W.wait_ge(x[1, 0], 1, sem="relaxed")
                if polls:
                    while W.atom_exch(x[1, 0], 0, scope="sys") == 0:
                        pass
                elif adds:
                    W.red_add(x[1, 0], 1, scope="sys")
                else:
                    out[0] = W.atom_exch(x[1, 0], 0, scope="sys")
                W.st(x[0, 1], 1, scope="sys", sem=sem)


@pytest.mark.parametrize(
    ("how", "sem", "is_reported"),
    [
        ("exchange", "relaxed", True),
        ("addition", "relaxed", True),
        ("exchange", "release", False),
        ("addition", "release", False),
        ("polled exchange", "relaxed", False),
    ],
)
def test_a_relaxed_change_may_land_after_what_it_led_to(how, sem, is_reported):
    """An exchange in a loop that polls is never late: what follows the loop depends on it."""
    inputs = [{"x": np.zeros(2, np.int32), "out": np.zeros(1, np.int32)} for _ in range(2)]
    if not is_reported:
        tw.simulate(taken(how, sem), 2, inputs, schedules=20, epochs=1)
        return
    with pytest.raises(tw.SimulationError, match=r"race: W\.st of x") as error:
        tw.simulate(taken(how, sem), 2, inputs, schedules=20, epochs=1)
    assert "may be late and replace the value of the later one" in error.value.report


def test_commutative_changes_of_several_blocks_need_no_order():
    @T.prim_func
    def program(x: T.Tensor((2,), "int32"), last: T.Tensor((1,), "int32")):
        with T.Kernel(3, threads=4) as block:
            tx = T.get_thread_binding()
            for k in T.serial(3):
                W.red_max(x[0], block * 4 + tx + k, scope="gpu")
                W.red_min(x[1], -(block * 4) - tx - k, scope="gpu")
            W.atom_exch(last[0], block, scope="gpu")

    inputs = [{"x": np.zeros(2, np.int32), "last": np.zeros(1, np.int32)}]
    (outputs,) = tw.simulate(program, 1, inputs, schedules=20, epochs=1)
    assert outputs["x"].tolist() == [13, -13]


def vector_by_vector(lanes, dtype):
    """Rank 0 stores vectors of equal elements at rank 1, which loads them relaxed."""

    @T.prim_func
    def program(S: W.Symmetric((lanes,), dtype)):
        with T.Kernel(1, threads=32):
            v = T.alloc_local((lanes,), dtype)
            if T.get_thread_binding() == 0:
                if W.rank() == 0:
                    for k in T.serial(3):
                        for i in T.vectorized(lanes):
                            v[i] = k + 1
                        W.st(S[1, 0], v[0:lanes], scope="sys")
                else:
                    for _ in T.serial(6):
                        v[0:lanes] = W.ld(S[1, 0], lanes, scope="sys", sem="relaxed")
                        T.device_assert(v[0] == v[lanes - 1], "torn")

    return program


@pytest.mark.parametrize(("lanes", "dtype"), [(2, "int32"), (4, "int32"), (2, "int64")])
def test_vectors_are_loaded_and_stored_whole(lanes, dtype):
    inputs = [{"S": np.zeros(lanes, dtype)} for _ in range(2)]
    tw.simulate(vector_by_vector(lanes, dtype), 2, inputs, schedules=20, epochs=1)


@factory
def iterations(sem, state: T.Tensor((2,), "uint32"), *, meets=True, polls=False):
    """The last block advances the iteration, which all blocks have read before they counted."""
    with T.Kernel(4, threads=32) as _:
        seen = T.alloc_var("uint32")
        if polls:
            while W.ld(state[0], sem="relaxed") > 9:
                seen = 0
        else:
            seen = W.ld(state[0], sem="relaxed")
        T.assume(seen >= 0)
        if meets:
            T.sync_threads()
        if T.get_thread_binding() == 0:
            before = W.atom_add(state[1], 1, sem=sem)
            if before == 3:
                W.st(state[1], 0)
                W.st(state[0], 1)


@pytest.mark.parametrize(
    ("sem", "polls", "kind"),
    [
        ("acq_rel", False, None),
        ("release", False, "race"),
        ("acquire", False, "race"),
        ("relaxed", False, "race"),
        ("relaxed", True, None),
    ],
)
def test_a_load_may_see_the_store_it_led_to(sem, polls, kind):
    """Load buffering: without order, the load may come after the store that waited for its block.

    If a loop polls, what follows depends on the value that it has read.
    """
    inputs = [{"state": np.zeros(2, np.uint32)}]
    program = iterations(sem, polls=polls)
    assert kind_of(lambda: tw.simulate(program, 1, inputs, schedules=20)) == kind


def test_two_loads_of_unrelated_words_may_be_relaxed():
    """The store does not depend on what follows the load, so it may have been earlier."""

    @T.prim_func
    def program(state: T.Tensor((2,), "uint32")):
        with T.Kernel(4, threads=32) as block:
            if T.get_thread_binding() == 0:
                seen = W.ld(state[0], sem="relaxed")
                if block == 0:
                    W.st(state[0], seen + 1)

    inputs = [{"state": np.zeros(2, np.uint32)}]
    assert kind_of(lambda: tw.simulate(program, 1, inputs, schedules=50)) is None
