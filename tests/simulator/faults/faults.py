"""Small faulty programs, each a known bug of this field, with its correct twin.

A case is one factory: ``make(True)`` is the faulty program and ``make(False)`` the correct one, so
that they differ only by what ``faulty`` touches. ``# FAULT`` marks the lines that a report about
the faulty one must name. All memory starts at zero, unless the case says otherwise.
"""

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tilelang.language as T

from tileweave import language as W
from tileweave.builtins.symmetric import is_symmetric

N = 64
"""Elements of a message, and threads of a block: one element a thread."""

EPOCHS = 3
Expected = Callable[[int, int, int], dict[str, Any]]


def datum(epoch, sender, i):
    """Element ``i`` of what ``sender`` sends in ``epoch``."""
    return epoch * 1000 + sender * 100 + i


def from_left(epoch: int, me: int, ranks: int) -> dict[str, Any]:
    """Each rank ends with what its left neighbour sent."""
    return {"out": datum(epoch, (me - 1) % ranks, np.arange(N))}


@dataclass(frozen=True)
class Case:
    """A fault: how to make it and its correct twin, and what must be said of it.

    Args:
        make: the program, faulty or not.
        kinds: what the fault may be called, according to which of its effects a schedule meets.
        report: a regular expression that the report must match.
        expected: what the twin must leave at a rank, by parameter, given the last epoch, the rank
            and the number of ranks.
        source: the function whose ``# FAULT`` lines count.
        label: counts only the lines marked ``# FAULT <label>``; several labels with ``|`` between.
        start: initial values by parameter; None leaves a symmetric tensor unwritten.
    """

    name: str
    make: Callable[[bool], Any]
    kinds: tuple[str, ...]
    report: str
    expected: Expected
    source: Callable[..., Any]
    ranks: int = 2
    label: str = ""
    start: dict[str, Any] = field(default_factory=dict)

    @property
    def lines(self) -> list[int]:
        """Numbers of the lines in this file that the report must name."""
        text, first = inspect.getsourcelines(self.source)
        mark = re.compile(rf"# FAULT ({self.label})$" if self.label else r"# FAULT$")
        return [first + n for n, line in enumerate(text) if mark.search(line.rstrip())]

    def inputs(self, program) -> list[dict[str, np.ndarray]]:
        """One dict a rank: zeros, or what ``start`` says."""
        values = {}
        for buffer in program.buffer_map.values():
            shape = [int(n) for n in buffer.shape[1 if is_symmetric(buffer) else 0 :]]
            value = self.start.get(buffer.name, 0)
            if value is not None:
                values[buffer.name] = np.full(shape, value, str(buffer.dtype))
        return [{name: value.copy() for name, value in values.items()} for _ in range(self.ranks)]


CASES: dict[str, Case] = {}


def add_case(make, kinds: str, report: str, expected: Expected = from_left, **more: Any) -> None:
    more = {"name": make.__name__, "source": make, **more}
    CASES[more["name"]] = Case(
        make=make, kinds=tuple(kinds.split()), report=report, expected=expected, **more
    )


def case(kinds: str, report: str, expected: Expected = from_left, **more: Any):
    """Put the factory below into the table."""

    def put(make):
        add_case(make, kinds, report, expected, **more)
        return make

    return put


# One shift to the right neighbour, by the builtins for flags. The barrier at the end makes the next
# epoch safe: only what happens within an epoch can go wrong.


def shift(
    early=False,
    signallers=8,
    to=1,
    signal_words={},  # noqa: B006
    waits=True,
    flag=0,
    advance=1,
    ahead=1,
    wait_words={},  # noqa: B006
):
    @T.prim_func
    def program(
        mail: W.Symmetric((N,), "int32"),
        flags: W.Symmetric((2,), "int32"),
        state: T.Tensor((1,), "int32"),
        out: T.Tensor((N,), "int32"),
    ):
        with T.Kernel(1, threads=N) as _:
            me = W.rank()
            peer = (me + 1) % W.world_size()
            epoch = T.alloc_var("int32")
            epoch = state[0]
            if early:
                W.signal(flags[peer, 0])
            for i in T.Parallel(N):
                mail[peer, i] = datum(epoch, me, i)  # FAULT data
            if not early:
                if me < signallers:
                    W.signal(flags[(me + to) % W.world_size(), 0], **signal_words)  # FAULT signal
            if waits:
                W.wait_reached(flags[me, flag], epoch * advance + ahead, **wait_words)  # FAULT wait
            for i in T.Parallel(N):
                out[i] = mail[me, i]  # FAULT data
            W.sync_ranks()
            if T.get_thread_binding() == 0:
                state[0] = epoch + 1

    return program


def with_fault(
    skeleton,
    name: str,
    kinds: str,
    report: str,
    label: str,
    ranks: int = 2,
    expected: Expected = from_left,
    **fault: Any,
) -> None:
    """A case of a skeleton that is correct by itself and faulty with these arguments."""

    def make(faulty):
        return skeleton(**fault) if faulty else skeleton()

    more = dict(name=name, source=skeleton, label=label, ranks=ranks)
    add_case(make, kinds, report, expected, **more)


with_fault(shift, "flag_before_data", "race", "mail", "data", early=True)
with_fault(shift, "relaxed_signal", "race", "mail", "data", signal_words={"sem": "relaxed"})
with_fault(shift, "relaxed_wait", "race", "mail", "data", wait_words={"sem": "relaxed"})
with_fault(shift, "gpu_scope_signal", "race", "flags", "signal|wait", signal_words={"scope": "gpu"})
with_fault(shift, "cta_scope_signal", "race", "flags", "signal|wait", signal_words={"scope": "cta"})
with_fault(shift, "gpu_scope_wait", "race", "flags", "signal|wait", wait_words={"scope": "gpu"})
with_fault(shift, "no_wait", "race", "mail", "data", waits=False)
with_fault(shift, "no_signal", "deadlock", "flags", "wait", signallers=0)
with_fault(shift, "signal_in_one_branch", "deadlock", "flags", "wait", signallers=1)
with_fault(shift, "signal_to_oneself", "race", "mail", "data", to=0)
with_fault(shift, "signal_to_the_wrong_rank", "race", "mail", "data", ranks=3, to=2)
with_fault(shift, "wait_for_the_wrong_flag", "deadlock", "flags", "wait", flag=1)
with_fault(shift, "count_too_high", "deadlock", "flags", "wait", ahead=2)
with_fault(shift, "count_off_by_an_epoch", "race", "mail", "data", ahead=0)
with_fault(shift, "epoch_not_advanced", "race", "mail", "data", advance=0)


# The same shift by plain stores, fences and loads: the program orders everything itself.


def shift_by_hand(
    meets_before=True, fence="sys", store_scope="sys", load_sem="acquire", load_scope="sys"
):
    @T.prim_func
    def program(
        mail: W.Symmetric((N,), "int32"),
        flags: W.Symmetric((1,), "int32"),
        state: T.Tensor((1,), "int32"),
        out: T.Tensor((N,), "int32"),
    ):
        with T.Kernel(1, threads=N) as _:
            me = W.rank()
            peer = (me + 1) % W.world_size()
            epoch = T.alloc_var("int32")
            epoch = state[0]
            for i in T.Parallel(N):
                mail[peer, i] = datum(epoch, me, i)  # FAULT data
            if meets_before:
                T.sync_threads()
            if T.get_thread_binding() == 0:
                if fence is not None:
                    W.fence(fence)
                W.st(flags[peer, 0], epoch + 1, scope=store_scope, sem="relaxed")  # FAULT store
            while W.ld(flags[me, 0], scope=load_scope, sem=load_sem) < epoch + 1:  # FAULT load
                pass
            for i in T.Parallel(N):
                out[i] = mail[me, i]  # FAULT data
            W.sync_ranks()
            if T.get_thread_binding() == 0:
                state[0] = epoch + 1

    return program


with_fault(shift_by_hand, "signal_before_the_block_met", "race", "mail", "data", meets_before=False)
with_fault(shift_by_hand, "no_fence", "race", "mail", "data", fence=None)
with_fault(shift_by_hand, "fence_of_the_block", "race", "mail", "data", fence="cta")
with_fault(shift_by_hand, "fence_of_the_gpu", "race", "mail", "data", fence="gpu")
with_fault(
    shift_by_hand, "flag_stored_at_gpu_scope", "race", "flags", "store|load", store_scope="gpu"
)
with_fault(shift_by_hand, "spin_on_relaxed_loads", "race", "mail", "data", load_sem="relaxed")
with_fault(shift_by_hand, "spin_at_gpu_scope", "race", "flags", "store|load", load_scope="gpu")


@case("race", "mail")
def wait_by_one_thread(faulty):
    """One thread waits; the others go on to read before they have met it."""

    @T.prim_func
    def program(
        mail: W.Symmetric((N,), "int32"),
        flags: W.Symmetric((1,), "int32"),
        state: T.Tensor((1,), "int32"),
        out: T.Tensor((N,), "int32"),
    ):
        with T.Kernel(1, threads=N) as _:
            me = W.rank()
            peer = (me + 1) % W.world_size()
            epoch = T.alloc_var("int32")
            epoch = state[0]
            for i in T.Parallel(N):
                mail[peer, i] = datum(epoch, me, i)  # FAULT
            W.signal(flags[peer, 0])
            if T.get_thread_binding() == 0:
                W.wait_reached(flags[me, 0], epoch + 1)
            if not faulty:
                T.sync_threads()
            for i in T.Parallel(N):
                out[i] = mail[me, i]  # FAULT
            W.sync_ranks()
            if T.get_thread_binding() == 0:
                state[0] = epoch + 1

    return program


@case("race", "mail")
def load_before_the_wait(faulty):
    """The tile is fetched first and the wait stands behind it."""

    @T.prim_func
    def program(
        mail: W.Symmetric((N,), "int32"),
        flags: W.Symmetric((1,), "int32"),
        state: T.Tensor((1,), "int32"),
        out: T.Tensor((N,), "int32"),
    ):
        with T.Kernel(1, threads=N) as _:
            me = W.rank()
            peer = (me + 1) % W.world_size()
            tile = T.alloc_shared((N,), "int32")
            epoch = T.alloc_var("int32")
            epoch = state[0]
            for i in T.Parallel(N):
                tile[i] = datum(epoch, me, i)
            T.copy(tile, mail[peer, 0])  # FAULT
            W.signal(flags[peer, 0])
            if not faulty:
                W.wait_reached(flags[me, 0], epoch + 1)
            T.copy(mail[me, 0], tile)  # FAULT
            if faulty:
                W.wait_reached(flags[me, 0], epoch + 1)
            T.copy(tile, out[0])
            W.sync_ranks()
            if T.get_thread_binding() == 0:
                state[0] = epoch + 1

    return program


@case("race", "mail")
def bulk_store_only_read(faulty):
    """`.read` frees the shared memory; a relaxed signal does not wait for the data to arrive."""
    sem = "relaxed" if faulty else "release"

    @T.prim_func
    def program(
        mail: W.Symmetric((N,), "int32"),
        flags: W.Symmetric((1,), "int32"),
        state: T.Tensor((1,), "int32"),
        out: T.Tensor((N,), "int32"),
    ):
        with T.Kernel(1, threads=N) as _:
            me = W.rank()
            peer = (me + 1) % W.world_size()
            tile = T.alloc_shared((N,), "int32")
            epoch = T.alloc_var("int32")
            epoch = state[0]
            for i in T.Parallel(N):
                tile[i] = datum(epoch, me, i)
            W.bulk_store(mail[peer, 0], tile, N)  # FAULT
            W.bulk_commit()
            W.bulk_wait(0, read=True)
            W.signal(flags[peer, 0], sem=sem)
            W.wait_reached(flags[me, 0], epoch + 1)
            for i in T.Parallel(N):
                out[i] = mail[me, i]  # FAULT
            W.sync_ranks()
            if T.get_thread_binding() == 0:
                state[0] = epoch + 1

    return program


@case("race", "mail")
def tile_store_and_relaxed_flag(faulty):
    """A tile copy to a peer is a TMA store: nothing publishes it but a release."""
    sem = "relaxed" if faulty else "release"

    @T.prim_func
    def program(
        mail: W.Symmetric((N,), "int32"),
        flags: W.Symmetric((1,), "int32"),
        state: T.Tensor((1,), "int32"),
        out: T.Tensor((N,), "int32"),
    ):
        with T.Kernel(1, threads=N) as _:
            me = W.rank()
            peer = (me + 1) % W.world_size()
            tile = T.alloc_shared((N,), "int32")
            epoch = T.alloc_var("int32")
            epoch = state[0]
            for i in T.Parallel(N):
                tile[i] = datum(epoch, me, i)
            T.copy(tile, mail[peer, 0])  # FAULT
            T.sync_threads()
            if T.get_thread_binding() == 0:
                W.st(flags[peer, 0], epoch + 1, scope="sys", sem=sem)
            W.wait_reached(flags[me, 0], epoch + 1)
            for i in T.Parallel(N):
                out[i] = mail[me, i]  # FAULT
            W.sync_ranks()
            if T.get_thread_binding() == 0:
                state[0] = epoch + 1

    return program


@case("race", "mail")
def put_block_and_relaxed_flag(faulty):
    """`put_block` does not publish: the flag after it must."""
    sem = "relaxed" if faulty else "release"

    @T.prim_func
    def program(
        mine: T.Tensor((N,), "int32"),
        mail: W.Symmetric((N,), "int32"),
        flags: W.Symmetric((1,), "int32"),
        state: T.Tensor((1,), "int32"),
        out: T.Tensor((N,), "int32"),
    ):
        with T.Kernel(1, threads=N) as _:
            me = W.rank()
            peer = (me + 1) % W.world_size()
            epoch = T.alloc_var("int32")
            epoch = state[0]
            for i in T.Parallel(N):
                mine[i] = datum(epoch, me, i)
            T.sync_threads()
            W.put_block(mine[0], mail[0, 0], N, peer)  # FAULT
            W.signal(flags[peer, 0], sem=sem)
            W.wait_reached(flags[me, 0], epoch + 1)
            for i in T.Parallel(N):
                out[i] = mail[me, i]  # FAULT
            W.sync_ranks()
            if T.get_thread_binding() == 0:
                state[0] = epoch + 1

    return program


@case("race", "mine")
def put_block_before_the_block_met(faulty):
    """Threads write what other threads put: they must meet in between."""

    @T.prim_func
    def program(
        mine: T.Tensor((N,), "int32"),
        mail: W.Symmetric((N,), "int32"),
        flags: W.Symmetric((1,), "int32"),
        state: T.Tensor((1,), "int32"),
        out: T.Tensor((N,), "int32"),
    ):
        with T.Kernel(1, threads=N) as _:
            me = W.rank()
            peer = (me + 1) % W.world_size()
            epoch = T.alloc_var("int32")
            epoch = state[0]
            for i in T.Parallel(N):
                mine[i] = datum(epoch, me, i)  # FAULT
            if not faulty:
                T.sync_threads()
            W.put_block(mine[0], mail[0, 0], N, peer)  # FAULT
            W.signal(flags[peer, 0])
            W.wait_reached(flags[me, 0], epoch + 1)
            for i in T.Parallel(N):
                out[i] = mail[me, i]
            W.sync_ranks()
            if T.get_thread_binding() == 0:
                state[0] = epoch + 1

    return program


def reversed_from_left(epoch: int, me: int, ranks: int) -> dict[str, Any]:
    return {"out": from_left(epoch, me, ranks)["out"][::-1]}


@case("race", "fetched", reversed_from_left)
def get_block_before_the_block_met(faulty):
    """What other threads fetched is there only after the block has met."""

    @T.prim_func
    def program(
        mine: W.Symmetric((N,), "int32"),
        flags: W.Symmetric((1,), "int32"),
        state: T.Tensor((1,), "int32"),
        fetched: T.Tensor((N,), "int32"),
        out: T.Tensor((N,), "int32"),
    ):
        with T.Kernel(1, threads=N) as _:
            me = W.rank()
            left = (me + W.world_size() - 1) % W.world_size()
            epoch = T.alloc_var("int32")
            epoch = state[0]
            for i in T.Parallel(N):
                mine[me, i] = datum(epoch, me, i)
            W.signal(flags[(me + 1) % W.world_size(), 0])
            W.wait_reached(flags[me, 0], epoch + 1)
            W.get_block(mine[0, 0], fetched[0], N, left)  # FAULT
            if not faulty:
                T.sync_threads()
            for i in T.Parallel(N):
                out[i] = fetched[N - 1 - i]  # FAULT
            W.sync_ranks()
            if T.get_thread_binding() == 0:
                state[0] = epoch + 1

    return program


@case("race", "mine")
def get_block_before_the_signal(faulty):
    """The peer's data is fetched before the peer says that it is there."""

    @T.prim_func
    def program(
        mine: W.Symmetric((N,), "int32"),
        flags: W.Symmetric((1,), "int32"),
        state: T.Tensor((1,), "int32"),
        out: T.Tensor((N,), "int32"),
    ):
        with T.Kernel(1, threads=N) as _:
            me = W.rank()
            left = (me + W.world_size() - 1) % W.world_size()
            epoch = T.alloc_var("int32")
            epoch = state[0]
            for i in T.Parallel(N):
                mine[me, i] = datum(epoch, me, i)  # FAULT
            W.signal(flags[(me + 1) % W.world_size(), 0])
            if not faulty:
                W.wait_reached(flags[me, 0], epoch + 1)
            W.get_block(mine[0, 0], out[0], N, left)  # FAULT
            if faulty:
                W.wait_reached(flags[me, 0], epoch + 1)
            W.sync_ranks()
            if T.get_thread_binding() == 0:
                state[0] = epoch + 1

    return program


def from_rank_0_at_2(epoch: int, me: int, ranks: int) -> dict[str, Any]:
    return {"out": datum(epoch, 0, np.arange(N)) if me == 2 else np.zeros(N)}


@case("race", "mail", from_rank_0_at_2, ranks=3)
def relaxed_relay(faulty):
    """Rank 0 writes at rank 2 and tells rank 1, who tells rank 2: each step must hand on."""
    sem = "relaxed" if faulty else "acquire"

    @T.prim_func
    def program(
        mail: W.Symmetric((N,), "int32"),
        flags: W.Symmetric((1,), "int32"),
        state: T.Tensor((1,), "int32"),
        out: T.Tensor((N,), "int32"),
    ):
        with T.Kernel(1, threads=N) as _:
            me = W.rank()
            epoch = T.alloc_var("int32")
            epoch = state[0]
            if me == 0:
                for i in T.Parallel(N):
                    mail[2, i] = datum(epoch, me, i)  # FAULT
                W.signal(flags[1, 0])
            if me == 1:
                W.wait_reached(flags[1, 0], epoch + 1, sem=sem)
                W.signal(flags[2, 0])
            if me == 2:
                W.wait_reached(flags[2, 0], epoch + 1)
                for i in T.Parallel(N):
                    out[i] = mail[2, i]  # FAULT
            W.sync_ranks()
            if T.get_thread_binding() == 0:
                state[0] = epoch + 1

    return program


# Many to one, and many to many.


def sum_at_rank_0(epoch: int, me: int, ranks: int) -> dict[str, Any]:
    senders = range(1, ranks)
    total = sum(datum(epoch, sender, np.arange(N)) for sender in senders)
    return {"out": total if me == 0 else np.zeros(N)}


def many_to_one(missing=0, stride=1, op="add"):
    """Every rank sends to its slot at rank 0, where one counter serves all."""

    @T.prim_func
    def program(
        board: W.Symmetric((3, N), "int32"),
        flags: W.Symmetric((1,), "int32"),
        state: T.Tensor((1,), "int32"),
        out: T.Tensor((N,), "int32"),
    ):
        with T.Kernel(1, threads=N) as _:
            me = W.rank()
            epoch = T.alloc_var("int32")
            epoch = state[0]
            if me > 0:
                for i in T.Parallel(N):
                    board[0, me * stride, i] = datum(epoch, me, i)  # FAULT write
                W.signal(flags[0, 0], 1, op=op)
            else:
                W.wait_reached(flags[0, 0], epoch * 2 + 2 - missing)  # FAULT wait
                for i in T.Parallel(N):
                    out[i] = board[0, 1, i] + board[0, 2, i]  # FAULT read
            W.sync_ranks()
            if T.get_thread_binding() == 0:
                state[0] = epoch + 1

    return program


to_rank_0 = {"ranks": 3, "expected": sum_at_rank_0}
with_fault(many_to_one, "count_too_low", "race", "board", "write|read", **to_rank_0, missing=1)
with_fault(many_to_one, "two_writers_of_one_slot", "race", "board", "write", **to_rank_0, stride=0)
with_fault(
    many_to_one, "set_where_add_is_meant", "deadlock", "flags", "wait", **to_rank_0, op="set"
)


def nothing(epoch: int, me: int, ranks: int) -> dict[str, Any]:
    return {}


@case("race", "flags", nothing)
def plain_store_to_a_polled_flag(faulty):
    """A plain store to a flag races with those who poll it, whatever is released after it."""

    @T.prim_func
    def program(flags: W.Symmetric((1,), "int32"), state: T.Tensor((1,), "int32")):
        with T.Kernel(1, threads=N) as _:
            me = W.rank()
            peer = (me + 1) % W.world_size()
            epoch = T.alloc_var("int32")
            epoch = state[0]
            if T.get_thread_binding() == 0:
                if faulty:
                    flags[peer, 0] = epoch  # FAULT
                else:
                    W.st(flags[peer, 0], epoch, scope="sys")
            W.signal(flags[peer, 0], epoch + 1, op="set")
            W.wait_ge(flags[me, 0], epoch + 1)  # FAULT
            W.sync_ranks()
            if T.get_thread_binding() == 0:
                state[0] = epoch + 1

    return program


@case("arrival", "passed by 1", nothing, ranks=3)
def counter_passes_the_awaited_value(faulty):
    """`wait_eq` on a counter of two arrivals: both may come between two looks."""

    @T.prim_func
    def program(flags: W.Symmetric((1,), "int32"), state: T.Tensor((1,), "int32")):
        with T.Kernel(1, threads=N) as _:
            me = W.rank()
            epoch = T.alloc_var("int32")
            epoch = state[0]
            if me > 0:
                W.signal(flags[0, 0])
            elif faulty:
                W.wait_eq(flags[0, 0], epoch * 2 + 1)  # FAULT
            else:
                W.wait_reached(flags[0, 0], epoch * 2 + 2)
            W.sync_ranks()
            if T.get_thread_binding() == 0:
                state[0] = epoch + 1

    return program


def twice_counted(extra=0, own=False):
    """All ranks count at rank 0, and meet; the counter says nothing that the barrier does not."""

    @T.prim_func
    def program(flags: W.Symmetric((1,), "int32"), state: T.Tensor((1,), "int32")):
        with T.Kernel(1, threads=N) as _:
            me = W.rank()
            epoch = T.alloc_var("int32")
            epoch = state[0]
            for _ in T.serial(1 + extra):
                if own or me > 0:
                    W.signal(flags[0, 0])  # FAULT
            if me == 0:
                W.wait_reached(flags[0, 0], epoch * 2 + 2)  # FAULT
            W.sync_ranks()
            if T.get_thread_binding() == 0:
                state[0] = epoch + 1

    return program


at_rank_0 = {"ranks": 3, "expected": nothing}
with_fault(twice_counted, "duplicate_arrival", "arrival", "over", "", **at_rank_0, extra=1)
with_fault(twice_counted, "own_arrival_not_counted", "arrival", "over", "", **at_rank_0, own=True)


@case("deadlock", "1 missing", nothing, ranks=3)
def increment_in_two_steps(faulty):
    """Load, add, store: one of two arrivals may be lost."""

    @T.prim_func
    def program(flags: W.Symmetric((1,), "int32"), state: T.Tensor((1,), "int32")):
        with T.Kernel(1, threads=N) as _:
            me = W.rank()
            epoch = T.alloc_var("int32")
            epoch = state[0]
            if me > 0:
                if T.get_thread_binding() == 0:
                    if faulty:
                        seen = W.ld(flags[0, 0], scope="sys", sem="relaxed")
                        W.st(flags[0, 0], seen + 1, scope="sys")
                    else:
                        W.red_add(flags[0, 0], 1, scope="sys")
            else:
                W.wait_reached(flags[0, 0], epoch * 2 + 2)  # FAULT
            W.sync_ranks()
            if T.get_thread_binding() == 0:
                state[0] = epoch + 1

    return program


@case("arrival race", "flags|mail")
def every_thread_signals(faulty):
    """Under a condition on the thread index each thread that reaches it signals."""
    signallers = 2 if faulty else 1

    @T.prim_func
    def program(
        mail: W.Symmetric((N,), "int32"),
        flags: W.Symmetric((1,), "int32"),
        state: T.Tensor((1,), "int32"),
        out: T.Tensor((N,), "int32"),
    ):
        with T.Kernel(1, threads=N) as _:
            me = W.rank()
            peer = (me + 1) % W.world_size()
            epoch = T.alloc_var("int32")
            epoch = state[0]
            for i in T.Parallel(N):
                mail[peer, i] = datum(epoch, me, i)
            if T.get_thread_binding() < signallers:
                W.signal(flags[peer, 0])  # FAULT
            W.wait_reached(flags[me, 0], epoch + 1)
            for i in T.Parallel(N):
                out[i] = mail[me, i]
            W.sync_ranks()
            if T.get_thread_binding() == 0:
                state[0] = epoch + 1

    return program


def sum_of_all(epoch: int, me: int, ranks: int) -> dict[str, Any]:
    return {"out": sum(datum(epoch, r, np.arange(N)) for r in range(ranks))}


@case("race", "board", sum_of_all, ranks=3)
def rank_missing_in_the_barrier(faulty):
    """All tell all, but the last rank is not waited for."""
    heard = 2 if faulty else 3

    @T.prim_func
    def program(
        board: W.Symmetric((3, N), "int32"),
        flags: W.Symmetric((3,), "int32"),
        state: T.Tensor((1,), "int32"),
        out: T.Tensor((N,), "int32"),
    ):
        with T.Kernel(1, threads=N) as _:
            me = W.rank()
            epoch = T.alloc_var("int32")
            epoch = state[0]
            for peer in T.serial(3):
                for i in T.Parallel(N):
                    board[peer, me, i] = datum(epoch, me, i)  # FAULT
                W.signal(flags[peer, me])
            for other in T.serial(heard):
                W.wait_reached(flags[me, other], epoch + 1, other)
            for i in T.Parallel(N):
                out[i] = board[me, 0, i] + board[me, 1, i] + board[me, 2, i]  # FAULT
            W.sync_ranks()
            if T.get_thread_binding() == 0:
                state[0] = epoch + 1

    return program


@case("deadlock", "flags")
def circular_waits(faulty):
    """Each rank waits for its neighbour before it sends."""

    @T.prim_func
    def program(
        mail: W.Symmetric((N,), "int32"),
        flags: W.Symmetric((1,), "int32"),
        state: T.Tensor((1,), "int32"),
        out: T.Tensor((N,), "int32"),
    ):
        with T.Kernel(1, threads=N) as _:
            me = W.rank()
            peer = (me + 1) % W.world_size()
            epoch = T.alloc_var("int32")
            epoch = state[0]
            if faulty:
                W.wait_reached(flags[me, 0], epoch + 1)  # FAULT
            for i in T.Parallel(N):
                mail[peer, i] = datum(epoch, me, i)
            W.signal(flags[peer, 0])
            if not faulty:
                W.wait_reached(flags[me, 0], epoch + 1)
            for i in T.Parallel(N):
                out[i] = mail[me, i]
            W.sync_ranks()
            if T.get_thread_binding() == 0:
                state[0] = epoch + 1

    return program


@case("deadlock", "sync_ranks", nothing)
def barrier_of_one_rank(faulty):
    """A barrier that not every rank reaches."""
    reaching = 1 if faulty else 2

    @T.prim_func
    def program(out: T.Tensor((N,), "int32")):
        with T.Kernel(1, threads=N) as _:
            if W.rank() < reaching:
                W.sync_ranks()  # FAULT
            for i in T.Parallel(N):
                out[i] = i

    return program


# Several blocks of a rank.

BLOCKS = 3


def sum_of_parts(epoch: int, me: int, ranks: int) -> dict[str, Any]:
    return {"out": sum(datum(0, part, np.arange(N)) for part in range(BLOCKS))}


def last_arriver(sem="acq_rel", scope="gpu"):
    """The last block to arrive adds what the others left."""

    @T.prim_func
    def program(
        parts: T.Tensor((BLOCKS, N), "int32"),
        arrived: T.Tensor((1,), "int32"),
        out: T.Tensor((N,), "int32"),
    ):
        with T.Kernel(BLOCKS, threads=N) as block:
            ticket = T.alloc_shared((1,), "int32")
            for i in T.Parallel(N):
                parts[block, i] = datum(0, block, i)  # FAULT data
            if T.get_thread_binding() == 0:
                ticket[0] = W.atom_add(arrived[0], 1, sem=sem, scope=scope)  # FAULT count
            T.sync_threads()
            if ticket[0] % BLOCKS == BLOCKS - 1:
                for i in T.Parallel(N):
                    out[i] = parts[0, i] + parts[1, i] + parts[2, i]  # FAULT data

    return program


alone = {"ranks": 1, "expected": sum_of_parts}
with_fault(
    last_arriver, "last_arriver_only_releases", "race", "parts", "data", **alone, sem="release"
)
with_fault(
    last_arriver, "last_arriver_only_acquires", "race", "parts", "data", **alone, sem="acquire"
)
with_fault(last_arriver, "last_arriver_relaxed", "race", "parts", "data", **alone, sem="relaxed")
with_fault(
    last_arriver, "last_arriver_at_block_scope", "race", "arrived", "count", **alone, scope="cta"
)


def both_parts_from_left(epoch: int, me: int, ranks: int) -> dict[str, Any]:
    left = (me - 1) % ranks
    return {"out": np.stack([datum(epoch, left, np.arange(N)) + 10000 * b for b in range(2)])}


@case("race", "mail", both_parts_from_left)
def wait_by_some_blocks(faulty):
    """Block 1 reads what only block 0 has waited for."""
    waiting = 1 if faulty else 2

    @T.prim_func
    def program(
        mail: W.Symmetric((2, N), "int32"),
        flags: W.Symmetric((1,), "int32"),
        state: T.Tensor((2,), "int32"),
        out: T.Tensor((2, N), "int32"),
    ):
        with T.Kernel(2, threads=N) as block:
            me = W.rank()
            peer = (me + 1) % W.world_size()
            epoch = T.alloc_var("int32")
            epoch = state[block]
            for i in T.Parallel(N):
                mail[peer, block, i] = datum(epoch, me, i) + 10000 * block  # FAULT
            W.signal(flags[peer, 0])
            if block < waiting:
                W.wait_reached(flags[me, 0], epoch * 2 + 2)
            for i in T.Parallel(N):
                out[block, i] = mail[me, block, i]  # FAULT
            W.barrier_blocks()
            if T.get_thread_binding() == 0:
                state[block] = epoch + 1

    return program


def barrier_between(kind="barrier_blocks", only_block_0=False):
    """Each block writes its part at the peer, the barrier, each reads its own."""

    @T.prim_func
    def program(
        mail: W.Symmetric((2, N), "int32"),
        state: T.Tensor((2,), "int32"),
        out: T.Tensor((2, N), "int32"),
    ):
        with T.Kernel(2, threads=N) as block:
            me = W.rank()
            peer = (me + 1) % W.world_size()
            epoch = T.alloc_var("int32")
            epoch = state[block]
            for i in T.Parallel(N):
                mail[peer, block, i] = datum(epoch, me, i) + 10000 * block  # FAULT data
            if only_block_0:
                if block == 0:
                    W.sync_ranks()
            else:
                getattr(W, kind)()
            for i in T.Parallel(N):
                out[block, i] = mail[me, block, i]  # FAULT data
            W.barrier_blocks()
            if T.get_thread_binding() == 0:
                state[block] = epoch + 1

    return program


with_fault(
    barrier_between,
    "barrier_of_the_grid_across_ranks",
    "race",
    "mail",
    "data",
    expected=both_parts_from_left,
    kind="sync_grid",
)
with_fault(
    barrier_between,
    "barrier_of_ranks_by_one_block",
    "race",
    "mail",
    "data",
    expected=both_parts_from_left,
    only_block_0=True,
)


@case("deadlock", "flags", both_parts_from_left)
def waiting_blocks_fill_the_gpu(faulty):
    """Four blocks fit; they wait for blocks that come after them in launch order."""
    first_sender = 4 if faulty else 0
    first_reader = 0 if faulty else 2

    @T.prim_func
    def program(
        mail: W.Symmetric((2, 2, N), "int32"),
        flags: W.Symmetric((1,), "int32"),
        state: T.Tensor((6,), "int32"),
        out: T.Tensor((2, N), "int32"),
    ):
        with T.Kernel(6, threads=N) as block:
            me = W.rank()
            peer = (me + 1) % W.world_size()
            epoch = T.alloc_var("int32")
            epoch = state[block]
            half = epoch % 2
            part = block % 2
            if block >= first_sender and block < first_sender + 2:
                for i in T.Parallel(N):
                    mail[peer, half, part, i] = datum(epoch, me, i) + 10000 * part
                W.signal(flags[peer, 0])
            else:
                W.wait_reached(flags[me, 0], epoch * 2 + 2)  # FAULT
                if block < first_reader + 2:
                    for i in T.Parallel(N):
                        out[part, i] = mail[me, half, part, i]
            T.sync_threads()
            if T.get_thread_binding() == 0:
                state[block] = epoch + 1

    return program


TILE = 48


@case("race", "mail")
def tail_not_counted(faulty):
    """The reader waits for the elements of whole tiles; the clipped last tile comes later."""
    counted = N // TILE * TILE if faulty else N

    @T.prim_func
    def program(
        mail: W.Symmetric((N,), "int32"),
        flags: W.Symmetric((1,), "int32"),
        state: T.Tensor((2,), "int32"),
        out: T.Tensor((N,), "int32"),
    ):
        with T.Kernel(2, threads=N) as block:
            me = W.rank()
            peer = (me + 1) % W.world_size()
            epoch = T.alloc_var("int32")
            epoch = state[block]
            for i in T.Parallel(TILE):
                if block * TILE + i < N:
                    mail[peer, block * TILE + i] = datum(epoch, me, block * TILE + i)  # FAULT
            W.signal(flags[peer, 0], T.min(TILE, N - block * TILE))
            if block == 0:
                W.wait_reached(flags[me, 0], epoch * N + counted)
                for i in T.Parallel(N):
                    out[i] = mail[me, i]  # FAULT
            W.barrier_blocks()
            if T.get_thread_binding() == 0:
                state[block] = epoch + 1

    return program


# Words and memory of one rank.


@case("race", "state", lambda epoch, me, ranks: {"out": datum(epoch, 0, np.arange(N))}, ranks=1)
def epoch_advanced_under_the_readers(faulty):
    """One thread advances the epoch while others may not have read it yet."""

    @T.prim_func
    def program(state: T.Tensor((1,), "int32"), out: T.Tensor((N,), "int32")):
        with T.Kernel(1, threads=N) as _:
            epoch = T.alloc_var("int32")
            epoch = state[0]  # FAULT
            for i in T.Parallel(N):
                out[i] = datum(epoch, W.rank(), i)
            if not faulty:
                T.sync_threads()
            if T.get_thread_binding() == 0:
                state[0] = epoch + 1  # FAULT

    return program


def twice_an_epoch_at_rank_0(epoch: int, me: int, ranks: int) -> dict[str, Any]:
    return {"count": [(epoch + 1) * 2 if me == 0 else 0]}


@case("race", "count", twice_an_epoch_at_rank_0)
def plain_and_atomic_increments(faulty):
    """A plain store loses what an atomic adds at the same time."""

    @T.prim_func
    def program(count: W.Symmetric((1,), "int32")):
        with T.Kernel(1, threads=N) as _:
            if T.get_thread_binding() == 0:
                if W.rank() == 0:
                    if faulty:
                        count[0, 0] = count[0, 0] + 1  # FAULT
                    else:
                        W.red_add(count[0, 0], 1, scope="sys")
                else:
                    W.red_add(count[0, 0], 1, scope="sys")  # FAULT
            W.sync_ranks()

    return program


@case("race", "count", twice_an_epoch_at_rank_0)
def gpu_scope_atomics_across_ranks(faulty):
    """Atomics of two GPUs are atomic to each other only at sys scope."""
    scope = "gpu" if faulty else "sys"

    @T.prim_func
    def program(count: W.Symmetric((1,), "int32")):
        with T.Kernel(1, threads=N) as _:
            if T.get_thread_binding() == 0:
                W.red_add(count[0, 0], 1, scope=scope)  # FAULT
            W.sync_ranks()

    return program


@case("poison", "mail|out", lambda e, me, n: {"out": np.arange(N)}, ranks=1, start={"mail": None})
def slot_nobody_writes(faulty):
    """Memory that was never written reaches an output."""

    @T.prim_func
    def program(mail: W.Symmetric((N,), "int32"), out: T.Tensor((N,), "int32")):
        with T.Kernel(1, threads=N) as _:
            if not faulty:
                for i in T.Parallel(N):
                    mail[W.rank(), i] = i
            for i in T.Parallel(N):
                out[i] = mail[W.rank(), i]  # FAULT

    return program


@case("poison", "mail|out", start={"mail": None})
def tail_not_written(faulty):
    """Whole tiles are sent, the tail is not, and the reader takes it all."""
    sent = N // TILE * TILE if faulty else N

    @T.prim_func
    def program(
        mail: W.Symmetric((N,), "int32"),
        state: T.Tensor((1,), "int32"),
        out: T.Tensor((N,), "int32"),
    ):
        with T.Kernel(1, threads=N) as _:
            me = W.rank()
            epoch = T.alloc_var("int32")
            epoch = state[0]
            for i in T.Parallel(sent):
                mail[(me + 1) % W.world_size(), i] = datum(epoch, me, i)
            W.sync_ranks()
            for i in T.Parallel(N):
                out[i] = mail[me, i]  # FAULT
            W.sync_ranks()
            if T.get_thread_binding() == 0:
                state[0] = epoch + 1

    return program


@case("bounds", "mail")
def neighbour_of_the_last_rank(faulty):
    """The last rank has no rank after it, unless the ring is closed."""
    ring = 3 if faulty else 2

    @T.prim_func
    def program(
        mail: W.Symmetric((N,), "int32"),
        state: T.Tensor((1,), "int32"),
        out: T.Tensor((N,), "int32"),
    ):
        with T.Kernel(1, threads=N) as _:
            me = W.rank()
            epoch = T.alloc_var("int32")
            epoch = state[0]
            for i in T.Parallel(N):
                mail[(me + 1) % ring, i] = datum(epoch, me, i)  # FAULT
            W.sync_ranks()
            for i in T.Parallel(N):
                out[i] = mail[me, i]
            W.sync_ranks()
            if T.get_thread_binding() == 0:
                state[0] = epoch + 1

    return program


# Memory used again in the next epoch: no barrier at the end.


def ring(halves=2, turn=1):
    """Each epoch writes one of ``halves``, changing every ``turn`` epochs."""

    @T.prim_func
    def program(
        mail: W.Symmetric((2, N), "int32"),
        flags: W.Symmetric((1,), "int32"),
        state: T.Tensor((1,), "int32"),
        out: T.Tensor((N,), "int32"),
    ):
        with T.Kernel(1, threads=N) as _:
            me = W.rank()
            peer = (me + 1) % W.world_size()
            epoch = T.alloc_var("int32")
            epoch = state[0]
            half = epoch // turn % halves
            for i in T.Parallel(N):
                mail[peer, half, i] = datum(epoch, me, i)  # FAULT data
            W.signal(flags[peer, 0])
            W.wait_reached(flags[me, 0], epoch + 1)
            for i in T.Parallel(N):
                out[i] = mail[me, half, i]  # FAULT data
            T.sync_threads()
            if T.get_thread_binding() == 0:
                state[0] = epoch + 1

    return program


with_fault(ring, "single_buffer_without_credit", "reuse", "mail", "data", halves=1)
with_fault(ring, "wrong_parity", "reuse", "mail", "data", turn=2)


def ring_with_credit(waits=True, early=False, sem="release"):
    """As ``ring``; the reader gives back a credit for each message it has read."""

    @T.prim_func
    def program(
        mail: W.Symmetric((2, N), "int32"),
        flags: W.Symmetric((1,), "int32"),
        credit: W.Symmetric((1,), "int32"),
        state: T.Tensor((1,), "int32"),
        out: T.Tensor((N,), "int32"),
    ):
        with T.Kernel(1, threads=N) as _:
            me = W.rank()
            peer = (me + 1) % W.world_size()
            left = (me + W.world_size() - 1) % W.world_size()
            epoch = T.alloc_var("int32")
            epoch = state[0]
            half = epoch % 2
            if waits:
                W.wait_reached(credit[me, 0], epoch - 1)
            for i in T.Parallel(N):
                mail[peer, half, i] = datum(epoch, me, i)  # FAULT data
            W.signal(flags[peer, 0])
            W.wait_reached(flags[me, 0], epoch + 1)
            if early:
                W.signal(credit[left, 0])
            for i in T.Parallel(N):
                out[i] = mail[me, half, i]  # FAULT data
            if not early:
                W.signal(credit[left, 0], sem=sem)
            T.sync_threads()
            if T.get_thread_binding() == 0:
                state[0] = epoch + 1

    return program


with_fault(ring_with_credit, "credit_before_the_read", "reuse", "mail", "data", 3, early=True)
with_fault(ring_with_credit, "relaxed_credit", "reuse", "mail", "data", 3, sem="relaxed")
with_fault(
    ring_with_credit, "two_buffers_in_a_ring_of_three", "reuse", "mail", "data", 3, waits=False
)


@case("reuse", "mine")
def own_memory_changed_under_a_get(faulty):
    """A rank writes its next message while the neighbour may still fetch the last."""

    @T.prim_func
    def program(
        mine: W.Symmetric((N,), "int32"),
        flags: W.Symmetric((1,), "int32"),
        state: T.Tensor((1,), "int32"),
        out: T.Tensor((N,), "int32"),
    ):
        with T.Kernel(1, threads=N) as _:
            me = W.rank()
            left = (me + W.world_size() - 1) % W.world_size()
            epoch = T.alloc_var("int32")
            epoch = state[0]
            for i in T.Parallel(N):
                mine[me, i] = datum(epoch, me, i)  # FAULT
            W.signal(flags[(me + 1) % W.world_size(), 0])
            W.wait_reached(flags[me, 0], epoch + 1)
            W.get_block(mine[0, 0], out[0], N, left)  # FAULT
            if not faulty:
                W.sync_ranks()
            T.sync_threads()
            if T.get_thread_binding() == 0:
                state[0] = epoch + 1

    return program


@case("race reuse", "flags")
def flag_reset_after_use(faulty):
    """The reset may wipe out the next epoch's signal."""

    @T.prim_func
    def program(
        mail: W.Symmetric((2, N), "int32"),
        flags: W.Symmetric((1,), "int32"),
        state: T.Tensor((1,), "int32"),
        out: T.Tensor((N,), "int32"),
    ):
        with T.Kernel(1, threads=N) as _:
            me = W.rank()
            peer = (me + 1) % W.world_size()
            epoch = T.alloc_var("int32")
            epoch = state[0]
            half = epoch % 2
            for i in T.Parallel(N):
                mail[peer, half, i] = datum(epoch, me, i)
            W.signal(flags[peer, 0])  # FAULT
            if faulty:
                W.wait_reached(flags[me, 0], 1)
            else:
                W.wait_reached(flags[me, 0], epoch + 1)
            for i in T.Parallel(N):
                out[i] = mail[me, half, i]
            T.sync_threads()
            if T.get_thread_binding() == 0:
                if faulty:
                    flags[me, 0] = 0  # FAULT
                state[0] = epoch + 1

    return program
