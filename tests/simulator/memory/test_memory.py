"""Order of accesses in the simulator's memory: faults and their kinds."""

import random

import numpy as np
import pytest
import tilelang.language as T

import tileweave as tw
from tests.factory import factory
from tests.releases import names_line
from tests.simulator.memory.world import World, kind_of
from tileweave import language as W
from tileweave.simulator.memory.order import CTA, GPU, SYS


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


@factory
def exchange(
    mail: W.Symmetric((64,), "int32"),
    flag: W.Symmetric((1,), "uint32"),
    out: T.Tensor((64,), "int32"),
    *,
    flag_first=False,
    sem="release",
    wait_sem="acquire",
    scope="sys",
    one_waits=False,
    barrier_after=True,
    target=1,
):
    """Each rank sends to its right neighbor once and reads the message of the left one."""
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
        assert names_line(error.value.report, "test_memory.py")
        assert f"seed={seed}" in error.value.report


@factory
def last_arriver(
    sem,
    parts: T.Tensor((4,), "int32"),
    count: T.Tensor((1,), "uint32"),
    total: T.Tensor((1,), "int32"),
):
    """Four blocks write one part each; the last one adds them."""
    with T.Kernel(4, threads=32) as block:
        if T.get_thread_binding() == 0:
            parts[block] = block + 1
            arrived = W.atom_add(count[0], 1, sem=sem)
            if arrived % T.uint32(4) == T.uint32(3):
                total[0] = parts[0] + parts[1] + parts[2] + parts[3]


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
