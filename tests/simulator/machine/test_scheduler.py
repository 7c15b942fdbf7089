"""Order in which blocks run, and the report if no block can run."""

import re

import numpy as np
import pytest
import tilelang.language as T
import torch

import tileweave as tw
from tests.factory import factory
from tileweave import language as W


def fault(program, ranks, inputs, **arguments):
    with pytest.raises(tw.SimulationError) as error:
        tw.simulate(program, ranks, inputs, **arguments)
    return error.value


@T.prim_func
def tickets(count: T.Tensor((1,), "uint32"), order: T.Tensor((16,), "uint32")):
    with T.Kernel(16, threads=32) as block:
        if T.get_thread_binding() == 0:
            order[block] = W.atom_add(count[0], 1)


def order_of(seed):
    inputs = [{"count": np.zeros(1, np.uint32)}]
    return tuple(tw.simulate(tickets, 1, inputs, epochs=1, seed=seed)[0]["order"].tolist())


def test_a_seed_is_a_schedule():
    orders = {seed: order_of(seed) for seed in range(10)}
    assert len(set(orders.values())) == 10
    assert all(order_of(seed) == order for seed, order in orders.items())
    assert all(sorted(order) == list(range(16)) for order in orders.values())


@factory
def waits_for_the_last(blocks, flag: T.Tensor((1,), "uint32"), epoch: T.uint32):
    with T.Kernel(blocks, threads=32) as block:
        if block == blocks - 1:
            W.signal(flag[0])
        else:
            W.wait_reached(flag[0], epoch + 1)


def test_a_wait_for_a_block_that_has_no_room():
    inputs = [{"flag": np.zeros(1, np.uint32), "epoch": lambda e: e}]
    error = fault(waits_for_the_last(6), 1, inputs, resident_blocks=4)
    assert error.kind == "deadlock"
    assert "blocks 4 to 5 have not started: 4 fit at a time" in error.report
    assert "value seen 0, value wanted reached 1" in error.report
    tw.simulate(waits_for_the_last(6), 1, inputs, resident_blocks=6, schedules=10)


def test_as_many_blocks_fit_as_the_compiler_assumes():
    inputs = [{"flag": np.zeros(1, np.uint32), "epoch": lambda e: e}]
    tw.simulate(waits_for_the_last(13), 1, inputs)
    few = {"tileweave.resident_blocks": 12}
    error = fault(waits_for_the_last(13), 1, inputs, pass_configs=few)
    assert error.kind == "deadlock"
    assert "blocks 12 to 12 have not started: 12 fit at a time (resident_blocks)" in error.report
    tw.simulate(waits_for_the_last(13), 1, inputs, pass_configs=few, resident_blocks=13)


@T.prim_func
def meets_but_one(count: T.int32, who: T.int32):
    with T.Kernel(1, threads=32) as _:
        if W.rank() != who:
            W.sync_ranks()


def test_a_rank_missing_from_a_barrier():
    inputs = [{"count": 0, "who": 2}] * 3
    error = fault(meets_but_one, 3, inputs)
    assert error.kind == "deadlock"
    assert "not arrived: rank 2" in error.report
    assert "rank 2 has finished its 3 launches" in error.report
    tw.simulate(meets_but_one, 3, [{"count": 0, "who": -1}] * 3, schedules=5)


@T.prim_func
def two_blocks_meet(count: T.int32):
    with T.Kernel(2, threads=32) as _:
        W.sync_ranks()


def test_a_rank_barrier_is_for_one_block_of_a_launch():
    error = fault(two_blocks_meet, 2, [{"count": 0}] * 2)
    assert error.kind == "arrival"


@T.prim_func
def polls(flag: W.Symmetric((1,), "uint32"), data: W.Symmetric((1,), "int32"),
          out: T.Tensor((1,), "int32"), wanted: T.uint32):  # fmt: skip
    with T.Kernel(1, threads=32) as _:
        if T.get_thread_binding() == 0:
            data[1 - W.rank(), 0] = 5
            W.st(flag[1 - W.rank(), 0], 1, scope="sys", sem="release")
            seen = T.alloc_var("uint32")
            seen = 0
            while seen != wanted:
                seen = W.ld(flag[W.rank(), 0], scope="sys")
            out[0] = data[W.rank(), 0]


def test_loops_that_poll():
    inputs = [{"flag": np.zeros(1, np.uint32), "wanted": 1} for _ in range(2)]
    out = tw.simulate(polls, 2, inputs, epochs=1, schedules=20)
    assert [o["out"].tolist() for o in out] == [[5], [5]]
    for values in inputs:
        values["wanted"] = 2
    error = fault(polls, 2, inputs, epochs=1)
    assert error.kind == "deadlock"
    assert "polls in a loop" in error.report


@T.prim_func
def part_of_a_block(count: T.int32):
    with T.Kernel(1, threads=64) as _:
        if T.get_thread_binding() < 10:
            T.sync_threads()


def test_a_block_barrier_that_not_all_threads_reach():
    assert fault(part_of_a_block, 1, [{"count": 0}]).kind == "deadlock"


def test_inputs_that_do_not_fit():
    for inputs, words in (
        ([{}], "expected one for each rank"),
        ([{"count": 0, "who": 0, "x": 1}] * 3, "input 'x'"),
        ([{"count": 0}] * 3, "no value for who"),
        ({"count": 0, "who": 0}, "expected a list with one dict a rank"),
        ([{"count": 0, "who": "x"}] * 3, "who='x'; expected a number or a function"),
        ([{"count": 2**40, "who": 0}] * 3, "count=1099511627776; expected -2147483648 to"),
    ):
        with pytest.raises(tw.TileWeaveError, match=words):
            tw.simulate(meets_but_one, 3, inputs)
    with pytest.raises(tw.TileWeaveError, match="expected uint32"):
        tw.simulate(tickets, 1, [{"count": np.zeros(2, np.uint32)}])


rows = T.dynamic("rows")


@T.prim_func
def reads_own(S: W.Symmetric((rows,), "float32"), out: T.Tensor((rows,), "float32")):
    with T.Kernel(1, threads=32):
        for i in T.Parallel(32):
            if i < rows:
                out[i] = S[W.rank(), i]


def test_a_symmetric_tensor_has_one_shape():
    given = [{"S": np.zeros(n, np.float32)} for n in (4, 1)]
    with pytest.raises(tw.TileWeaveError, match=r"S of rank 1 has shape \(1,\); expected \(4,\)"):
        tw.simulate(reads_own, 2, given)


@pytest.mark.parametrize(
    ("name", "value"), [("world_size", 2.0), ("schedules", "3"), ("epochs", None), ("epochs", 0)]
)
def test_how_often_is_a_number(name, value):
    arguments = {"world_size": 1, name: value}
    said = f"simulate: {name}={value!r}; expected an integer from 1"
    with pytest.raises(tw.TileWeaveError, match=re.escape(said)):
        tw.simulate(reads_own, **arguments)


@pytest.mark.parametrize("size", [-1, 4.0, "4", 1 << 31, 10**30])
def test_extents_are_whole_numbers(size):
    with pytest.raises(
        tw.TileWeaveError, match=r"extent rows=.*; expected a whole number from 0 on"
    ):
        tw.simulate(reads_own, 1, [{"rows": size}])


@T.prim_func
def copies(given: T.Tensor((4,), "bfloat16"), out: T.Tensor((4,), "bfloat16")):
    with T.Kernel(1, threads=32):
        for i in T.Parallel(4):
            out[i] = given[i]


def test_tensors_of_torch_that_numpy_has_no_type_for():
    given = torch.arange(4).bfloat16().requires_grad_()
    (actual,) = tw.simulate(copies, 1, [{"given": given}])
    assert actual["out"].tolist() == [0, 1, 2, 3]
