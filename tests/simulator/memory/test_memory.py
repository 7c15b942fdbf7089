"""The simulator's memory: what is ordered, what is a fault, and of which kind."""

import random

import numpy as np
import pytest
import tilelang.language as T

import tileweave as tw
from tileweave import language as W
from tileweave.simulator.memory.clock import Clock
from tileweave.simulator.memory.memory import Access, Memory, Tensor
from tileweave.simulator.memory.order import CTA, GPU, SYS, BlockOrder, Layout


class World:
    """Two ranks of two blocks and a tensor both can reach."""

    def __init__(self):
        self.layout = Layout(2, [(None, 2)], 2)
        self.memory = Memory(self.layout, random.Random(0))
        start = Clock.start(self.layout.count)
        self.blocks = {
            (r, b): BlockOrder.start(self.layout, r, b, start) for r in (0, 1) for b in (0, 1)
        }
        self.data = Tensor(self.memory, "data", (8,), np.dtype(np.int32), written=True)
        self.flag = Tensor(self.memory, "flag", (1,), np.dtype(np.int32), written=True)
        for tensor in (self.data, self.flag):
            tensor.give((Ellipsis,), 0)

    def access(self, order, thread_groups=(0, 1), scope=0, epoch=0):
        agent, time, view = order.actor(thread_groups)
        return Access(agent, time, view, scope, "access", "here:1", epoch)

    def store(self, place, value=1, thread_groups=(0, 1), epoch=0):
        self.data.write(
            (slice(0, 8),), value, self.access(self.blocks[place], thread_groups, epoch=epoch)
        )

    def load(self, place, thread_groups=(0, 1), epoch=0):
        access = self.access(self.blocks[place], thread_groups, epoch=epoch)
        return self.data.read((slice(0, 8),), access)[0]

    def release(self, place, level=SYS, thread_groups=(0,)):
        order = self.blocks[place]
        access = self.access(order, thread_groups, level)
        self.flag.store_word((0,), 1, access, order.release(thread_groups[0], level))

    def acquire(self, place, level=SYS, thread_groups=(0, 1)):
        order = self.blocks[place]
        sync = self.flag.load_word((0,), self.access(order, thread_groups, level), True).sync
        order.acquire(thread_groups, sync, level)


def kind_of(action):
    try:
        action()
    except tw.SimulationError as error:
        return error.kind
    return None


@pytest.mark.parametrize(
    ("reader", "released", "acquired", "fault"),
    [
        ((0, 1), GPU, GPU, None),
        ((0, 1), CTA, GPU, "race"),
        ((0, 1), SYS, SYS, None),
        ((1, 0), SYS, SYS, None),
        ((1, 0), GPU, SYS, "race"),
        ((1, 0), SYS, GPU, "race"),
    ],
)
def test_scopes_must_include_each_other(reader, released, acquired, fault):
    world = World()
    world.store((0, 0))
    world.blocks[0, 0].barrier((0, 1))
    kind = kind_of(lambda: (world.release((0, 0), released), world.acquire(reader, acquired),
                            world.load(reader)))  # fmt: skip
    assert kind == fault


def test_a_release_without_a_block_barrier_publishes_its_own_thread_only():
    world = World()
    world.store((0, 0))
    world.release((0, 0))
    world.acquire((1, 0))
    assert kind_of(lambda: world.load((1, 0))) == "race"
    world = World()
    world.store((0, 0), thread_groups=(0,))
    world.release((0, 0))
    world.acquire((1, 0))
    assert kind_of(lambda: world.load((1, 0))) is None


def test_an_acquire_by_one_thread_orders_that_thread_until_the_block_meets():
    world = World()
    world.store((0, 0))
    world.blocks[0, 0].barrier((0, 1))
    world.release((0, 0))
    world.acquire((1, 0), thread_groups=(0,))
    assert kind_of(lambda: world.load((1, 0), thread_groups=(0,))) is None
    assert kind_of(lambda: world.load((1, 0))) == "race"
    world.blocks[1, 0].barrier((0, 1))
    assert kind_of(lambda: world.load((1, 0))) is None


def test_a_pair_of_read_and_write_is_called_the_same_whichever_comes_first():
    for read, written, kind in ((0, 0, "race"), (1, 0, "race"), (0, 1, "reuse")):
        world = World()
        world.load((1, 0), epoch=read)
        assert kind_of(lambda w=world, e=written: w.store((0, 0), epoch=e)) == kind
        world = World()
        world.store((0, 0), epoch=written)
        assert kind_of(lambda w=world, e=read: w.load((1, 0), epoch=e)) == kind


def test_two_writes_race():
    world = World()
    world.store((1, 0))
    assert kind_of(lambda: world.store((0, 0), epoch=1)) == "race"


def test_overwriting_what_was_read_in_the_same_launch_is_reuse():
    world = World()
    world.store((1, 0))
    world.load((1, 0))
    world.blocks[1, 0].barrier((0, 1))
    world.release((1, 0))
    world.acquire((0, 0))
    world.load((1, 0))
    assert kind_of(lambda: world.store((0, 0))) == "reuse"


def test_every_reader_counts_not_only_the_last():
    world = World()
    world.load((1, 0))
    world.load((0, 1))
    world.blocks[0, 1].barrier((0, 1))
    world.release((0, 1))
    world.acquire((0, 0))
    assert kind_of(lambda: world.store((0, 0), epoch=1)) == "reuse"


def test_atomic_accesses_do_not_race_at_scopes_that_include_each_other():
    world = World()
    world.release((0, 0), SYS)
    assert kind_of(lambda: world.release((1, 0), SYS)) is None
    world = World()
    world.release((0, 0), GPU)
    assert kind_of(lambda: world.release((0, 1), GPU)) is None
    assert kind_of(lambda: world.release((1, 0), SYS)) == "race"


def test_a_relaxed_load_may_find_a_former_value_but_never_an_older_one_than_before():
    seen, last = set(), {}
    for seed in range(40):
        world = World()
        world.memory.rng = random.Random(seed)
        writer, reader = world.blocks[0, 0], world.blocks[1, 0]
        for value in (1, 2, 3):
            world.flag.store_word((0,), value, world.access(writer, (0,), SYS), {})
        values = [
            int(world.flag.load_word((0,), world.access(reader, (0,), SYS), False)[0])
            for _ in range(4)
        ]
        assert values == sorted(values)
        seen.add(values[0])
        last[seed] = values[-1]
    assert seen == {0, 1, 2, 3}


def words_seen(store, seeds=60):
    """Every pair of words that one load of both may see after ``store(world, word, value)``."""
    seen = set()
    for seed in range(seeds):
        world = World()
        world.memory.rng = random.Random(seed)
        writer, reader = world.blocks[0, 0], world.blocks[1, 0]
        store(world, lambda w=world, o=writer: w.access(o, (0,), SYS))
        words = [(2,), (3,)]
        found = world.data.load_words(words, world.access(reader, (0,), SYS), False)
        seen.add(tuple(int(entry.value) for entry in found))
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


def dekker(sem):
    """Each rank raises its flag and enters where it does not see the other's."""

    @T.prim_func
    def program(
        up: W.Symmetric((2,), "int32"),
        data: W.Symmetric((1,), "int32"),
        out: T.Tensor((1,), "int32"),
    ):
        with T.Kernel(1, threads=32):
            me = W.rank()
            if T.get_thread_binding() == 0:
                W.st(up[0, me], 1, scope="sys")
                W.fence("sys", sem)
                out[0] = W.ld(up[0, 1 - me], scope="sys", sem="relaxed")
                if out[0] == 0:
                    data[0, 0] = me

    return program


def iriw(sem):
    """Two ranks write a word each, and two others read both, in opposite order."""

    @T.prim_func
    def program(up: W.Symmetric((2,), "int32"), out: T.Tensor((2,), "int32")):
        with T.Kernel(1, threads=32):
            me = W.rank()
            if T.get_thread_binding() == 0:
                if me < 2:
                    W.st(up[0, me], 1, scope="sys")
                else:
                    out[0] = W.ld(up[0, me - 2], scope="sys", sem="relaxed")
                    W.fence("sys", sem)
                    out[1] = W.ld(up[0, 3 - me], scope="sys", sem="relaxed")

    return program


def outcomes(program, ranks, shapes, seeds):
    """What ``out`` of all ranks may be, or the fault instead."""
    inputs = [{n: np.zeros(s, np.int32) for n, s in shapes.items()} for _ in range(ranks)]
    found = set()
    for seed in range(seeds):
        try:
            outputs = tw.simulate(program, ranks, inputs, seed=seed, epochs=1)
            found.add(tuple(tuple(o["out"].tolist()) for o in outputs))
        except tw.SimulationError as error:
            found.add(error.kind)
    return found


@pytest.mark.parametrize(("sem", "kinds"), [("sc", set()), ("acq_rel", {"race"})])
def test_only_sc_fences_exclude_each_other_by_flags(sem, kinds):
    found = outcomes(dekker(sem), 2, {"up": (2,), "data": (1,), "out": (1,)}, 40)
    assert found == {((0,), (1,)), ((1,), (0,)), ((1,), (1,))} | kinds


@pytest.mark.parametrize(("sem", "differs"), [("sc", False), ("acq_rel", True)])
def test_readers_agree_about_the_order_of_independent_writes_only_with_sc(sem, differs):
    found = {o[2:] for o in outcomes(iriw(sem), 4, {"up": (2,), "out": (2,)}, 80)}
    assert (((1, 0), (1, 0)) in found) == differs
    assert ((1, 0), (1, 1)) in found


def test_sc_fences_are_ordered_only_if_their_scopes_include_each_other():
    for one, other, fault in ((SYS, SYS, None), (GPU, SYS, "race"), (SYS, GPU, "race")):
        world = World()
        world.store((0, 0), thread_groups=(0,))
        published = world.blocks[0, 0].fence(0, one, {})
        world.blocks[1, 0].fence(0, other, published)
        assert kind_of(lambda w=world: w.load((1, 0), thread_groups=(0,))) == fault


def led_to(scope, sem):
    """Rank 0 loads a word and then asks rank 1 to change it."""

    @T.prim_func
    def program(x: W.Symmetric((2,), "int32"), out: T.Tensor((1,), "int32")):
        with T.Kernel(1, threads=32):
            if T.get_thread_binding() == 0:
                if W.rank() == 0:
                    out[0] = W.ld(x[0, 0], scope="sys", sem="relaxed")
                    W.st(x[0, 1], 1, scope="sys", sem="release" if sem == "acquire" else sem)
                else:
                    W.wait_ge(x[0, 1], 1, scope="sys", sem=sem)
                    W.st(x[0, 0], 5, scope=scope)

    return program


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


def test_bulk_stores_are_complete_after_a_full_wait_only():
    for complete, fault in ((True, None), (False, "race")):
        world = World()
        order = world.blocks[0, 0]
        agent, time, view = order.bulk_actor((0, 1))
        world.data.write((slice(0, 8),), 1, Access(agent, time, view, 0, "bulk", "here:1"))
        if complete:
            order.complete_bulk((0, 1), time)
        order.barrier((0, 1))
        world.release((0, 0))
        world.acquire((1, 0))
        assert kind_of(lambda w=world: w.load((1, 0))) == fault


def test_fences_make_relaxed_accesses_release_and_acquire():
    world = World()
    writer, reader = world.blocks[0, 0], world.blocks[1, 0]
    world.store((0, 0), thread_groups=(0,))
    writer.fence(0, SYS)
    world.flag.store_word((0,), 1, world.access(writer, (0,), SYS), writer.fences[0])
    sync = world.flag.load_word((0,), world.access(reader, (0,), SYS), True).sync
    reader.note_seen(0, sync)
    assert kind_of(lambda: world.load((1, 0), thread_groups=(0,))) == "race"
    reader.fence(0, SYS)
    assert kind_of(lambda: world.load((1, 0), thread_groups=(0,))) is None


def exchange(flag_first=False, sem="release", wait_sem="acquire", scope="sys", one_waits=False,
             barrier_after=True, target=1):  # fmt: skip
    """Each rank sends to its right neighbour once and reads what came from the left."""

    @T.prim_func
    def program(mail: W.Symmetric((64,), "int32"), flag: W.Symmetric((1,), "uint32"),
                out: T.Tensor((64,), "int32")):  # fmt: skip
        with T.Kernel(1, threads=64) as _:
            peer = (W.rank() + 1) % W.world_size()
            if flag_first:
                W.signal(flag[peer, 0])
            for i in T.Parallel(64):
                mail[peer, i] = W.rank()
            if not flag_first:
                W.signal(flag[peer, 0], scope=scope, sem=sem)
            if one_waits:
                if T.get_thread_binding() == 0:
                    W.wait_reached(flag[W.rank(), 0], target, scope=scope, sem=wait_sem)
                if barrier_after:
                    T.sync_threads()
            else:
                W.wait_reached(flag[W.rank(), 0], target, scope=scope, sem=wait_sem)
            for i in T.Parallel(64):
                out[i] = mail[W.rank(), i]

    return program


EXCHANGES = [
    ({}, None),
    ({"one_waits": True}, None),
    ({"flag_first": True}, ("poison", "race", "reuse")),
    ({"sem": "relaxed"}, ("race",)),
    ({"wait_sem": "relaxed"}, ("race",)),
    ({"scope": "gpu"}, ("race",)),
    ({"one_waits": True, "barrier_after": False}, ("race",)),
    ({"target": 2}, ("deadlock",)),
]


@pytest.mark.parametrize(("change", "faults"), EXCHANGES, ids=lambda v: str(v))
def test_exchange(change, faults):
    inputs = [{"flag": np.zeros(1, np.uint32)} for _ in range(3)]
    for seed in range(20):
        arguments = dict(epochs=1, seed=seed)
        if faults is None:
            out = tw.simulate(exchange(**change), 3, inputs, **arguments)
            assert [o["out"].tolist() for o in out] == [[r] * 64 for r in (2, 0, 1)]
            continue
        with pytest.raises(tw.SimulationError) as error:
            tw.simulate(exchange(**change), 3, inputs, **arguments)
        assert error.value.kind in faults
        assert "test_memory.py" in error.value.report
        assert f"seed={seed}" in error.value.report


def last_arriver(sem):
    """Four blocks write a part each; the last one adds them up."""

    @T.prim_func
    def program(parts: T.Tensor((4,), "int32"), count: T.Tensor((1,), "uint32"),
                total: T.Tensor((1,), "int32")):  # fmt: skip
        with T.Kernel(4, threads=32) as block:
            if T.get_thread_binding() == 0:
                parts[block] = block + 1
                arrived = W.atom_add(count[0], 1, sem=sem)
                if arrived % T.uint32(4) == T.uint32(3):
                    total[0] = parts[0] + parts[1] + parts[2] + parts[3]

    return program


@pytest.mark.parametrize("sem", ["acq_rel", "release", "relaxed", "acquire"])
def test_a_last_arriver_needs_acq_rel(sem):
    inputs = [{"count": np.zeros(1, np.uint32)}]
    for seed in range(20):

        def run(seed=seed):
            return tw.simulate(last_arriver(sem), 1, inputs, epochs=1, seed=seed)[0]["total"]

        if sem == "acq_rel":
            assert run().tolist() == [10]
        else:
            assert kind_of(run) == "race"


def test_reuse_needs_two_launches_to_show():
    inputs = [{"flag": np.zeros(1, np.uint32)} for _ in range(2)]

    @T.prim_func
    def program(mail: W.Symmetric((8,), "int32"), flag: W.Symmetric((1,), "uint32"),
                out: T.Tensor((8,), "int32"), epoch: T.uint32):  # fmt: skip
        with T.Kernel(1, threads=32) as _:
            peer = 1 - W.rank()
            for i in T.Parallel(8):
                mail[peer, i] = W.rank()
            W.signal(flag[peer, 0])
            W.wait_reached(flag[W.rank(), 0], epoch + 1)
            for i in T.Parallel(8):
                out[i] = mail[W.rank(), i]

    for values in inputs:
        values["epoch"] = lambda e: e
    assert kind_of(lambda: tw.simulate(program, 2, inputs, schedules=20, epochs=1)) is None
    kinds = {kind_of(lambda s=s: tw.simulate(program, 2, inputs, seed=s)) for s in range(20)}
    assert kinds == {"reuse"}


@T.prim_func
def read_wait(S: W.Symmetric((64,), "float32"), flag: W.Symmetric((1,), "uint32"),
              out: T.Tensor((64,), "float32"), full: T.int32):  # fmt: skip
    with T.Kernel(1, threads=32) as _:
        tile = T.alloc_shared((64,), "float32")
        peer = (W.rank() + 1) % W.world_size()
        T.fill(tile, 1.0)
        T.sync_threads()
        if T.get_thread_binding() == 0:
            W.bulk_store(S[peer, 0], tile, 64)
            W.bulk_commit()
            if full == 1:
                W.bulk_wait(0)
            else:
                W.bulk_wait(0, read=True)
            W.fence("cta")
            W.red_add(flag[peer, 0], 1, scope="sys")
        W.wait_reached(flag[W.rank(), 0], 1)
        for i in T.Parallel(64):
            out[i] = S[W.rank(), i]


def test_relaxed_red_after_a_narrow_fence_does_not_publish():
    inputs = [{"flag": np.zeros(1, np.uint32), "full": 1} for _ in range(2)]
    assert kind_of(lambda: tw.simulate(read_wait, 2, inputs, epochs=1)) == "race"


@T.prim_func
def overwritten(S: W.Symmetric((64,), "float32"), waits: T.int32):
    with T.Kernel(1, threads=32) as _:
        tile = T.alloc_shared((64,), "float32")
        T.fill(tile, 1.0)
        W.bulk_store(S[W.rank(), 0], tile, 64)
        W.bulk_commit()
        if waits == 1:
            W.bulk_wait(0, read=True)
        T.fill(tile, 2.0)


@pytest.mark.parametrize("waits", [0, 1])
def test_shared_memory_under_a_bulk_store(waits):
    inputs = [{"waits": waits}]
    assert kind_of(lambda: tw.simulate(overwritten, 1, inputs)) == (None if waits else "reuse")


@T.prim_func
def stored_tile(S: W.Symmetric((64,), "float32"), flag: W.Symmetric((1,), "uint32"),
                out: T.Tensor((64,), "float32"), meets: T.int32):  # fmt: skip
    """Thread 0 signals; which thread issued the store of the tile nobody says."""
    with T.Kernel(1, threads=32) as _:
        tile = T.alloc_shared((64,), "float32")
        peer = (W.rank() + 1) % W.world_size()
        T.fill(tile, 1.0)
        T.copy(tile, S[peer, :])
        T.tma_store_wait(0, read=False)
        if meets == 1:
            T.sync_threads()
        if T.get_thread_binding() == 0:
            W.fence("sys")
            W.red_add(flag[peer, 0], 1, scope="sys")
        W.wait_reached(flag[W.rank(), 0], 1)
        for i in T.Parallel(64):
            out[i] = S[W.rank(), i]


@pytest.mark.parametrize("meets", [0, 1])
def test_who_waits_for_a_bulk_store_of_the_block_is_not_who_signals(meets):
    inputs = [{"flag": np.zeros(1, np.uint32), "meets": meets} for _ in range(2)]
    kind = kind_of(lambda: tw.simulate(stored_tile, 2, inputs, epochs=1))
    assert kind == (None if meets else "race")


@T.prim_func
def loaded(src: T.Tensor((64,), "float32"), out: T.Tensor((64,), "float32"), waits: T.int32):
    with T.Kernel(1, threads=32) as _:
        tile = T.alloc_shared((64,), "float32")
        full = T.alloc_barrier([32])
        W.bulk_load(tile, src[0], 64, full[0])
        T.mbarrier_arrive(full[0])
        if waits == 1:
            T.mbarrier_wait_parity(full[0], 0)
        T.copy(tile, out)


@pytest.mark.parametrize("waits", [0, 1])
def test_a_load_is_there_for_who_waited(waits):
    inputs = [{"src": np.ones(64, np.float32), "waits": waits}]
    assert kind_of(lambda: tw.simulate(loaded, 1, inputs)) == (None if waits else "poison")


@T.prim_func
def ends(S: W.Symmetric((64,), "float32"), waits: T.int32):
    with T.Kernel(1, threads=32) as _:
        tile = T.alloc_shared((64,), "float32")
        T.fill(tile, 1.0)
        W.bulk_store(S[W.rank(), 0], tile, 64)
        W.bulk_commit()
        if waits == 1:
            W.bulk_wait(0, read=True)


@pytest.mark.parametrize("waits", [0, 1])
def test_a_block_outlives_the_reads_of_its_bulk_stores(waits):
    kind = kind_of(lambda: tw.simulate(ends, 1, [{"waits": waits}]))
    assert kind == (None if waits else "reuse")


def rounds(sem, meets=True, polls=False):
    """The last of all blocks moves the round on, which all have read before they counted."""

    @T.prim_func
    def program(state: T.Tensor((2,), "uint32")):
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

    return program


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
    """Load buffering: without order the load may come after the store that waited for its block.
    Where a loop polls, what follows depends on what it saw."""
    inputs = [{"state": np.zeros(2, np.uint32)}]
    program = rounds(sem, polls=polls)
    assert kind_of(lambda: tw.simulate(program, 1, inputs, schedules=20)) == kind


def test_two_loads_of_unrelated_words_may_be_relaxed():
    """Nothing that followed the load led to the store: it may as well have been earlier."""

    @T.prim_func
    def program(state: T.Tensor((2,), "uint32")):
        with T.Kernel(4, threads=32) as block:
            if T.get_thread_binding() == 0:
                seen = W.ld(state[0], sem="relaxed")
                if block == 0:
                    W.st(state[0], seen + 1)

    inputs = [{"state": np.zeros(2, np.uint32)}]
    assert kind_of(lambda: tw.simulate(program, 1, inputs, schedules=50)) is None
