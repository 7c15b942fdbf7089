"""All interleavings of small programs: their number, their results, the faults in one of many."""

import importlib.util
import math
import random
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import tilelang.language as T

import tileweave as tw
from tests.factory import factory
from tests.releases import RECORDS_LINES, names_line
from tileweave import language as W
from tileweave.simulator import Executable
from tileweave.simulator.case import Case
from tileweave.simulator.explore.exhaustive import Exploring
from tileweave.simulator.explore.search import Node, Search
from tileweave.simulator.inputs.inputs import checked_inputs

from ..memory.test_store_order import two_plus_two
from ..memory.test_weak_memory import iriw
from .test_scheduler import polls

EXAMPLES = Path(__file__).parents[3] / "examples"


def zeros(ranks, dtype=np.uint32, **sizes):
    return [{n: np.zeros(s, dtype) for n, s in sizes.items()} for _ in range(ranks)]


def explore(program, ranks, inputs, epochs=1, **arguments):
    return tw.simulate(program, ranks, inputs, epochs=epochs, exhaustive=True, **arguments)


def fault_of(program, ranks, inputs, epochs=1, **arguments):
    with pytest.raises(tw.SimulationError) as error:
        explore(program, ranks, inputs, epochs, **arguments)
    return error.value


def line_of(name, text):
    """Return ``file:line`` of the first line of a program in this file with this text."""
    lines = Path(__file__).read_text().splitlines()
    first = lines.index(next(line for line in lines if line.startswith(f"def {name}(")))
    offset = next(n for n, line in enumerate(lines[first:]) if text in line)
    return f"{Path(__file__).resolve()}:{first + 1 + offset}"


class EveryOrder(Search):
    """Search without reduction: all orders of all steps, and all values of all loads."""

    def new_node(self, enabled):
        return Node(enabled, {}, backtrack=set(enabled))

    def reverse_races(self, node):
        pass

    def is_past(self, event, past):
        return True


class EveryAtomicOrder(EveryOrder):
    """Search of all orders of the steps that access words atomically."""

    def new_node(self, enabled):
        return Node(enabled, {})

    def reverse_races(self, node):
        if node.step.footprint:
            node.backtrack |= node.enabled


def outcomes_of(program, ranks, inputs, search=Search, epochs=1):
    """Return all results, with the number of interleavings; or the kind of the fault."""
    executable = Executable(program, ranks)
    case = Case(executable, checked_inputs(executable, inputs), epochs)
    try:
        result = Exploring(case, 132, 10_000).run(search)
    except tw.SimulationError as error:
        return error.kind, 0
    assert result.complete
    results = {
        tuple(rank[name].tobytes() for rank in outputs for name in sorted(rank))
        for outputs in result.outcomes
    }
    return results, result.interleavings


@T.prim_func
def count_alone(count: T.Tensor((1,), "uint32")):
    with T.Kernel(1, threads=32) as _:
        if T.get_thread_binding() == 0:
            W.atom_add(count[0], 1)


@T.prim_func
def take_ticket(count: W.Symmetric((1,), "uint32"), ticket: T.Tensor((1,), "uint32")):
    with T.Kernel(1, threads=32) as _:
        if T.get_thread_binding() == 0:
            ticket[0] = W.atom_add(count[0, 0], 1, scope="sys")


@T.prim_func
def exchange(
    mail: W.Symmetric((32,), "int32"), flag: W.Symmetric((1,), "uint32"),
    out: T.Tensor((32,), "int32"),
):  # fmt: skip
    with T.Kernel(1, threads=32) as _:
        for i in T.Parallel(32):
            mail[1 - W.rank(), i] = i
        W.signal(flag[1 - W.rank(), 0])
        W.wait_reached(flag[W.rank(), 0], 1)
        for i in T.Parallel(32):
            out[i] = mail[W.rank(), i]


def test_independent_ranks_have_one_interleaving():
    result = explore(count_alone, 2, zeros(2, count=1), epochs=3)
    assert (result.interleavings, result.complete, len(result.outcomes)) == (1, True, 1)
    assert str(result) == (
        "the only interleaving of count_alone for 2 ranks is free of races and deadlocks"
    )


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_atomic_additions_to_one_word_have_every_order(ranks):
    result = explore(take_ticket, ranks, zeros(ranks, count=1))
    assert result.interleavings == len(result.outcomes) == math.factorial(ranks)
    orders = {tuple(int(r["ticket"][0]) for r in outputs) for outputs in result.outcomes}
    assert all(sorted(order) == list(range(ranks)) for order in orders)
    assert str(result) == (
        f"all {math.factorial(ranks)} interleavings of take_ticket for {ranks} ranks are free of "
        "races and deadlocks"
    )


def test_launches_of_a_rank_are_in_order():
    result = explore(take_ticket, 2, zeros(2, count=1), epochs=2)
    assert result.interleavings == math.comb(4, 2)


@T.prim_func
def take_tickets(count: T.Tensor((1,), "uint32"), ticket: T.Tensor((3,), "uint32")):
    with T.Kernel(3, threads=32) as block:
        if T.get_thread_binding() == 0:
            ticket[block] = W.atom_add(count[0], 1)


@pytest.mark.parametrize(("resident_blocks", "orders"), [(3, 6), (2, 4), (1, 1)])
def test_blocks_that_wait_for_room_start_after_any_that_ends(resident_blocks, orders):
    # With room for two, block 2 cannot be first: it starts after block 0 or block 1.
    result = explore(take_tickets, 1, zeros(1, count=1), resident_blocks=resident_blocks)
    assert len(result.outcomes) == orders


def test_a_signal_and_its_wait_have_one_interleaving():
    result = explore(exchange, 2, zeros(2, flag=1))
    assert (result.interleavings, result.cut_short) == (1, 0)


@T.prim_func
def meet(count: T.int32):
    with T.Kernel(2, threads=32) as _:
        W.barrier_blocks()
        W.barrier_blocks()


def test_arrivals_at_a_barrier_have_one_interleaving():
    result = explore(meet, 3, [{"count": 0}] * 3, epochs=2)
    assert (result.interleavings, result.cut_short) == (1, 0)


@T.prim_func
def lock_and_count(lock: W.Symmetric((1,), "uint32"), count: W.Symmetric((1,), "uint32"),
                   seen: T.Tensor((1,), "uint32")):  # fmt: skip
    with T.Kernel(1, threads=32) as _:
        if T.get_thread_binding() == 0:
            while W.atom_cas(lock[0, 0], 0, 1, scope="sys", sem="acquire") != 0:
                T.evaluate(0)
            seen[0] = count[0, 0]
            count[0, 0] = seen[0] + 1
            W.st(lock[0, 0], 0, scope="sys", sem="release")


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_polling_loop_is_a_wait(ranks):
    result = explore(lock_and_count, ranks, zeros(ranks, lock=1, count=1))
    assert result.interleavings == len(result.outcomes) == math.factorial(ranks)


def test_a_polling_loop_that_never_ends():
    inputs = zeros(2, flag=1)
    result = explore(polls, 2, [{**values, "wanted": 1} for values in inputs])
    assert result.interleavings == 1
    error = fault_of(polls, 2, [{**values, "wanted": 2} for values in inputs])
    assert error.kind == "deadlock"
    assert "rank 0, block 0 (0) in launch 0 polls in a loop" in error.report


@T.prim_func
def poll_in_turn(flag: W.Symmetric((2,), "uint32")):
    with T.Kernel(1, threads=32) as _:
        if T.get_thread_binding() == 0:
            if W.rank() == 0:
                while W.ld(flag[0, 0], scope="sys", sem="acquire") != 1:
                    T.evaluate(0)
                while W.ld(flag[0, 1], scope="sys", sem="acquire") != 1:
                    T.evaluate(0)
            else:
                W.st(flag[0, 2 - W.rank()], 1, scope="sys", sem="release")


def test_polling_loops_that_end_in_turn():
    result = explore(poll_in_turn, 3, zeros(3, flag=2))
    assert (result.interleavings, result.complete) == (1, True)


@T.prim_func
def count_polls(flag: W.Symmetric((1,), "uint32"), polls: T.Tensor((1,), "int32")):
    with T.Kernel(1, threads=32) as _:
        if T.get_thread_binding() == 0:
            W.st(flag[1 - W.rank(), 0], 1, scope="sys", sem="release")
            count = T.alloc_var("int32")
            count = 0
            while W.ld(flag[W.rank(), 0], scope="sys", sem="acquire") != 1:
                count = count + 1
            polls[0] = count


def test_a_loop_that_counts_its_iterations_has_no_end_of_interleavings():
    result = explore(count_polls, 2, zeros(2, flag=1), max_interleavings=10)
    assert (result.complete, len(result.outcomes)) == (False, 10)


@T.prim_func
def threads_in_branches(word: T.Tensor((2,), "uint32"), out: T.Tensor((2,), "uint32")):
    with T.Kernel(1, threads=64) as _:
        if T.get_thread_binding() == 0:
            W.wait_reached(word[1], 1)
            out[0] = W.atom_add(word[0], 1)
        else:
            if T.get_thread_binding() == 32:
                W.signal(word[1])
                out[1] = W.atom_add(word[0], 1)


def test_threads_of_a_block_in_branches_interleave():
    result = explore(threads_in_branches, 1, zeros(1, word=2))
    assert result.interleavings == 2
    assert {tuple(o[0]["out"].tolist()) for o in result.outcomes} == {(0, 1), (1, 0)}


# Comparison with all orders.


@T.prim_func
def store_buffers(x: W.Symmetric((2,), "uint32"), out: T.Tensor((1,), "uint32")):
    with T.Kernel(1, threads=32) as _:
        if T.get_thread_binding() == 0:
            W.st(x[0, W.rank()], 1, scope="sys", sem="relaxed")
            out[0] = W.ld(x[0, 1 - W.rank()], scope="sys", sem="relaxed")


@factory
def message(store, load, x: W.Symmetric((2,), "uint32"), out: T.Tensor((2,), "uint32")):
    with T.Kernel(1, threads=32) as _:
        if T.get_thread_binding() == 0:
            if W.rank() == 0:
                W.st(x[0, 0], 1, scope="sys", sem="relaxed")
                W.st(x[0, 1], 1, scope="sys", sem=store)
            else:
                out[0] = W.ld(x[0, 1], scope="sys", sem=load)
                out[1] = W.ld(x[0, 0], scope="sys", sem="relaxed")


@T.prim_func
def wait_between(x: W.Symmetric((2,), "uint32"), out: T.Tensor((2,), "uint32")):
    with T.Kernel(1, threads=32) as _:
        if T.get_thread_binding() == 0:
            if W.rank() == 0:
                W.wait_reached(x[0, 0], 1)
                out[0] = W.atom_add(x[0, 0], 10, scope="sys")
            else:
                W.signal(x[0, 0])
                out[1] = W.atom_add(x[0, 0], 1, scope="sys")


@pytest.mark.parametrize(
    ("program", "sizes", "results"),
    [
        pytest.param(store_buffers, {"x": 2, "out": 1}, 4, id="store-buffers"),
        pytest.param(message("relaxed", "relaxed"), {"x": 2, "out": 2}, 4, id="relaxed-message"),
        pytest.param(message("release", "acquire"), {"x": 2, "out": 2}, 3, id="message"),
        pytest.param(wait_between, {"x": 2, "out": 2}, 2, id="wait-between"),
        pytest.param(take_ticket, {"count": 1}, 2, id="tickets"),
    ],
)
def test_the_results_are_those_of_every_order(program, sizes, results):
    reduced, count = outcomes_of(program, 2, zeros(2, **sizes))
    every, orders = outcomes_of(program, 2, zeros(2, **sizes), EveryOrder)
    assert reduced == every and len(reduced) == results
    assert count < orders


@T.prim_func
def rare_deadlock(ticket: W.Symmetric((1,), "uint32"), others: W.Symmetric((5,), "int32"),
                  flag: W.Symmetric((1,), "uint32")):  # fmt: skip
    """Wait for a flag that no rank signals, if the last rank came first, ..., and rank 0 last."""
    with T.Kernel(1, threads=32) as _:
        if T.get_thread_binding() == 0:
            own = T.alloc_var("int32")
            own = T.cast(W.atom_add(ticket[0, 0], 1, scope="sys"), "int32")
            for peer in T.serial(W.world_size()):
                others[peer, W.rank()] = own + W.rank() - (W.world_size() - 1)
        W.sync_ranks()
        if T.get_thread_binding() == 0:
            in_order = T.alloc_var("int32")
            in_order = 0
            for peer in T.serial(W.world_size()):
                if others[W.rank(), peer] == 0:
                    in_order = in_order + 1
            if in_order == W.world_size():
                W.wait_reached(flag[W.rank(), 0], 1)


def test_a_deadlock_in_one_of_all_orders_of_tickets():
    ranks, inputs = 4, zeros(4, ticket=1, flag=1)
    tw.simulate(rare_deadlock, ranks, inputs, schedules=10, epochs=1)
    error = fault_of(rare_deadlock, ranks, inputs)
    assert error.kind == "deadlock"
    line = line_of("rare_deadlock", "W.wait_reached")
    assert "waits at W.wait_reached(flag[0, 0]): value seen 0" in error.report
    assert error.report.count(f"--> {line}") == (ranks if RECORDS_LINES else 0)
    assert 1 < error.interleavings <= math.factorial(ranks)
    note = f"interleaving {error.interleavings} of an exhaustive exploration"
    assert note in error.report and error.seed is None


@T.prim_func
def value_returns(flag: W.Symmetric((1,), "uint32")):
    """Rank 1 misses the value 1, if rank 0 resets the flag before."""
    with T.Kernel(1, threads=32) as _:
        if T.get_thread_binding() == 0:
            if W.rank() == 0:
                W.st(flag[1, 0], 1, scope="sys", sem="release")
                W.st(flag[1, 0], 0, scope="sys", sem="release")
            else:
                W.wait_eq(flag[1, 0], 1)


def test_a_value_that_a_wait_may_miss():
    error = fault_of(value_returns, 2, zeros(2, flag=1))
    assert error.kind == "deadlock"
    assert names_line(error.report, f"--> {line_of('value_returns', 'W.wait_eq')}")


@T.prim_func
def fences_in_any_order(x: W.Symmetric((1,), "int32"), out: T.Tensor((1,), "int32")):
    """The fences order the two accesses only if that of rank 0 comes first."""
    with T.Kernel(1, threads=32) as _:
        if T.get_thread_binding() == 0:
            if W.rank() == 0:
                x[0, 0] = 1
                W.fence("sys", sem="sc")
            else:
                W.fence("sys", sem="sc")
                out[0] = x[0, 0]


def test_a_race_in_one_order_of_fences():
    error = fault_of(fences_in_any_order, 2, zeros(2, dtype=np.int32, x=1))
    assert (error.kind, error.interleavings) == ("race", 2)
    line = line_of("fences_in_any_order", "out[0] = x[0, 0]")
    assert names_line(error.report, f"--> {line}")


@T.prim_func
def late_reader(mail: W.Symmetric((8,), "int32"), flag: W.Symmetric((1,), "uint32"),
                out: T.Tensor((8,), "int32"), epoch: T.uint32):  # fmt: skip
    with T.Kernel(1, threads=32) as _:
        for i in T.Parallel(8):
            mail[1 - W.rank(), i] = i
        W.signal(flag[1 - W.rank(), 0])
        W.wait_reached(flag[W.rank(), 0], epoch + 1)
        for i in T.Parallel(8):
            out[i] = mail[W.rank(), i]


def test_a_fault_and_its_trace(tmp_path):
    inputs = [{**values, "epoch": lambda epoch: epoch} for values in zeros(2, flag=1)]
    explore(late_reader, 2, inputs, timeline=tmp_path / "last.json")
    file = tmp_path / "fault.json"
    error = fault_of(late_reader, 2, inputs, epochs=3, timeline=file)
    assert error.kind == "reuse"
    line = line_of("late_reader", "mail[1 - W.rank(), i] = i")
    assert names_line(error.report, f"--> {line}")
    assert '"reuse"' in file.read_text() and (tmp_path / "last.json").exists()


def example(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / "patterns" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_one_shot_all_reduce():
    program = example("one_shot_all_reduce").one_shot_all_reduce(16, 8, 2)
    values = np.arange(2 * 16 * 8).reshape(2, 16, 8).astype(ml_dtypes.bfloat16)
    result = explore(program, 2, [{"X": X} for X in values], epochs=2)
    assert result.complete and result.interleavings > 1
    ((first, second),) = result.outcomes
    total = values.astype(np.float32).sum(0)
    assert (first["Y"].astype(np.float32) == total).all() and (second["Y"] == first["Y"]).all()


@T.prim_func
def all_gather(shard: T.Tensor((32, 8), "float32"),
               gathered: W.Symmetric((2, 32, 8), "float32")):  # fmt: skip
    with T.Kernel(2, threads=32) as peer:
        tile = T.alloc_shared((32, 8), "float32")
        T.copy(shard, tile)
        T.copy(tile, gathered[peer, W.rank(), 0, 0])


def test_an_all_gather():
    shards = np.random.default_rng(0).standard_normal((2, 32, 8)).astype(np.float32)
    result = explore(all_gather, 2, [{"shard": shard} for shard in shards])
    assert result.complete and result.interleavings > 1
    (outputs,) = result.outcomes
    assert all((rank["gathered"] == shards).all() for rank in outputs)


@T.prim_func
def double(x: W.Symmetric((2, 32), "int32"), out: T.Tensor((2, 32), "int32")):
    with T.Kernel(2, threads=32) as source:
        for i in T.Parallel(32):
            out[source, i] = 2 * x[W.rank(), source, i]


@tw.plan
def gather_and_double(
    p: tw.PlanBuilder, own: T.Tensor((32,), "int32"), x: W.Symmetric((2, 32), "int32"),
    out: T.Tensor((2, 32), "int32"),
):  # fmt: skip
    for peer in p.peers():
        p.copy(x[peer, p.rank], own, stream="copies")
    p.copy(x[p.rank, p.rank], own)
    p.launch(double, x, out)


def test_a_plan_with_copies():
    own = np.arange(64, dtype=np.int32).reshape(2, 32)
    result = explore(gather_and_double, 2, [{"own": values} for values in own], epochs=2)
    assert result.complete and len(result.outcomes) == 1
    assert (result.outcomes[0][0]["out"] == 2 * own).all()


def test_the_bound_is_reported():
    inputs = zeros(3, count=1)
    result = explore(take_ticket, 3, inputs, max_interleavings=5)
    assert (result.interleavings, result.complete) == (5, False)
    assert str(result) == (
        "5 interleavings of take_ticket for 3 ranks explored, not all; these are free of races "
        "and deadlocks"
    )
    assert explore(take_ticket, 3, inputs, max_interleavings=6).complete


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"schedules": 2}, "schedules=2 with exhaustive=True; expected 1"),
        ({"seed": 3}, "seed=3 with exhaustive=True; expected 0"),
        ({"level": "device"}, "level='device' with exhaustive=True; expected 'tile'"),
        ({"max_interleavings": 0}, "max_interleavings=0; expected an integer from 1 on"),
    ],
)
def test_arguments_that_are_refused(arguments, text):
    with pytest.raises(tw.TileWeaveError, match=text):
        explore(take_ticket, 2, zeros(2, count=1), **arguments)


@pytest.mark.parametrize(
    ("how", "results"), [({}, 4), ({"exchange": True}, 4), ({"fence": True}, 3)], ids=str
)
def test_stores_of_two_ranks_to_two_words(how, results):
    assert (
        len(explore(two_plus_two(**how), 2, zeros(2, words=2, dtype=np.int32)).outcomes) == results
    )


@pytest.mark.parametrize(("sem", "results"), [("sc", 15), ("acq_rel", 16)])
def test_readers_of_independent_writes(sem, results):
    """Only sc fences exclude that the two readers see the two writes in opposite orders."""
    result = explore(iriw(sem), 4, zeros(4, up=2, out=2, dtype=np.int32))
    assert len(result.outcomes) == results


HEAD = """\
import tilelang.language as T
from tileweave import language as W

@T.prim_func
def program(x: W.Symmetric((2,), "uint32"), r: T.Tensor((3,), "uint32")):
    with T.Kernel(1, threads=32):
        if T.get_thread_binding() == 0:
"""
STATEMENTS = {
    "add": "r[{k}] = W.atom_add(x[0, {a}], {v}, scope='sys', sem='relaxed')",
    "load": "r[{k}] = W.ld(x[0, {a}], scope='sys', sem='relaxed')",
    "acquire": "r[{k}] = W.ld(x[0, {a}], scope='sys', sem='acquire')",
    "store": "W.st(x[0, {a}], {v}, scope='sys', sem='relaxed')",
    "release": "W.st(x[0, {a}], {v}, scope='sys', sem='release')",
    "cas": "r[{k}] = W.atom_cas(x[0, {a}], {v} - 1, {w}, scope='sys', sem='acq_rel')",
    "signal": "W.signal(x[0, {a}])",
    "fence": "W.fence(scope='sys', sem='sc')",
    "eq": "W.wait_eq(x[0, {a}], {v})",
    "reached": "W.wait_reached(x[0, {a}], {v})",
}
MIXES = [
    ["add", "load", "store"], ["load", "store", "acquire", "release"], ["load", "store"],
    ["add", "load", "store", "cas"], ["load", "store", "fence"], ["signal", "reached", "add"],
    ["release", "eq", "signal", "load"], ["store", "release", "eq", "signal", "acquire"],
]  # fmt: skip


def random_program(seed, ranks, folder):
    """Return a program in which each rank executes a few random atomic operations."""
    rng, text = random.Random(seed), HEAD
    mix = rng.choice(MIXES)
    for rank in range(ranks):
        text += f"            if W.rank() == {rank}:\n"
        for k in range(rng.randint(2, 3) if ranks == 2 else 1 + (rank == 0)):
            statement = STATEMENTS[rng.choice(mix)]
            values = {"a": rng.randrange(2), "v": rng.choice([1, 1, 2]), "w": rng.choice([1, 2])}
            text += f"                {statement.format(k=k, **values)}\n"
    path = folder / f"program_{seed}_{ranks}.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.program, text


@pytest.mark.long
@pytest.mark.parametrize(("ranks", "seeds"), [(2, range(40)), (3, range(3))])
def test_random_programs_have_the_results_of_every_order(ranks, seeds, tmp_path):
    faults = 0
    for seed in seeds:
        program, text = random_program(seed, ranks, tmp_path)
        inputs = [{**values, "r": np.full(3, 77, np.uint32)} for values in zeros(ranks, x=2)]
        reduced, _ = outcomes_of(program, ranks, inputs)
        every, _ = outcomes_of(program, ranks, inputs, EveryAtomicOrder)
        faults += isinstance(every, str)
        assert isinstance(reduced, str) == isinstance(every, str), text
        assert isinstance(every, str) or reduced == every, text
    assert faults < len(seeds)
