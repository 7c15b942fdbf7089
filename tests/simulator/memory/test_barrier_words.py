"""Words of barriers: each fault is reported with ranks, line and legal values; its twin
is clean."""

import re

import numpy as np
import pytest
import tilelang.language as T

import tileweave as tw
from tests.factory import factory
from tests.lines import place_of
from tests.releases import names_line
from tileweave import language as W

N = 32
BLOCKS = 3
RANKS = 2
WORDS = 8
EPOCHS = 3


@factory
def barrier_blocks(
    words: W.Symmetric((WORDS,), "uint32"),
    mail: W.Symmetric((2, BLOCKS, N), "int32"),
    out: T.Tensor((BLOCKS, N), "int32"),
    first: T.int32,
    place: T.int32,
    epoch: T.int32,
    *,
    change="",
):
    """Each block writes to the next rank, passes a barrier and reads its own part.

    The start of the words, and other changes by block 1, are known only at run time.
    """
    with T.Kernel(BLOCKS, threads=N) as block:
        me = W.rank()
        peer = (me + 1) % W.world_size()
        for i in T.Parallel(N):
            mail[peer, epoch % 2, block, i] = me * 100 + i + epoch
        W.barrier_blocks(words[me, first])  # BARRIER
        if block == 1 and T.get_thread_binding() == 0:
            if change == "store":
                words[me, place] = 0  # CHANGE store
            if change == "set":
                W.st(words[me, place], T.uint32(0))  # CHANGE set
            if change == "add":
                W.red_add(words[me, place], 1)  # CHANGE add
            if change == "signal":
                W.signal(words[peer, place])  # CHANGE signal
        for i in T.Parallel(N):
            out[block, i] = mail[me, epoch % 2, block, i]


@factory
def sync_grid(
    words: T.Tensor((WORDS,), "uint32"),
    mail: T.Tensor((2, BLOCKS, N), "int32"),
    out: T.Tensor((BLOCKS, N), "int32"),
    first: T.int32,
    place: T.int32,
    epoch: T.int32,
    *,
    change="",
):
    """``barrier_blocks`` within each rank, with ``W.sync_grid``."""
    with T.Kernel(BLOCKS, threads=N) as block:
        for i in T.Parallel(N):
            mail[epoch % 2, block, i] = W.rank() * 100 + i + epoch
        W.sync_grid(words[first])  # BARRIER
        if block == 1 and T.get_thread_binding() == 0:
            if change == "store":
                words[place] = 0  # CHANGE store
            if change == "set":
                W.st(words[place], T.uint32(0))  # CHANGE set
            if change == "add":
                W.red_add(words[place], 1)  # CHANGE add
        for i in T.Parallel(N):
            out[block, i] = mail[epoch % 2, (block + 1) % BLOCKS, i]


@factory
def two_barriers(words: W.Symmetric((WORDS,), "uint32"), place: T.int32):
    with T.Kernel(1, threads=N):
        W.sync_ranks(words[W.rank(), 0])  # FIRST
        W.sync_grid(words[W.rank(), place])  # SECOND


def zeros(value=0, **scalars):
    words = np.zeros(WORDS, np.uint32)
    words[:] = value
    return [{"words": words.copy(), **scalars} for _ in range(RANKS)]


def simulate(program, inputs, **arguments):
    return tw.simulate(program, RANKS, inputs, schedules=20, epochs=EPOCHS, **arguments)


def fault_of(program, inputs, **arguments):
    with pytest.raises(tw.SimulationError) as error:
        simulate(program, inputs, **arguments)
    return error.value


def started(words, first=0, place=WORDS - 1):
    """Return inputs of ``barrier_blocks`` and ``sync_grid``: ``words`` and then zeros, or none."""
    inputs = zeros(first=first, place=place, epoch=lambda epoch: epoch)
    for values in inputs:
        if words is None:
            del values["words"]
        else:
            values["words"][: len(words)] = words
    return inputs


@pytest.mark.parametrize(
    ("make", "words", "report"),
    [
        (sync_grid, [5], r"finds 5 in words\[0\]; expected 0, the blocks that have arrived"),
        (sync_grid, [(1 << 31) + 2], r"finds 2 in words\[0\]; expected 0, the blocks"),
        (barrier_blocks, [1], r"finds 1 in words\[\d, 0\]; expected 0, the blocks"),
        (barrier_blocks, [0, 3], r"finds 0 in words\[\d, [23]\]; expected 3, the arrivals of rank"),
        (
            barrier_blocks,
            [0, 0, 1, 1],
            r"finds 1 in words\[\d, [23]\]; expected 0, the arrivals of rank",
        ),
    ],
)
def test_not_zero(make, words, report):
    fault = fault_of(make(), started(words))
    assert fault.kind == "arrival"
    assert re.search(report, fault.report), fault.report
    assert "zeroed once, and only barriers change them" in fault.report
    assert names_line(fault.report, place_of(make, "# BARRIER"))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (sync_grid, [0]),
        (sync_grid, [1 << 31]),  # as an odd number of barriers leaves it
        (barrier_blocks, [0, 0, 0, 0]),
        (barrier_blocks, [1 << 31, 7, 7, 7]),  # as 7 barriers leave them
        (barrier_blocks, [0, 0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF]),
    ],
)
def test_zero_or_as_a_barrier_leaves_them(make, words):
    outputs = simulate(make(), started(words))
    for rank in range(RANKS):
        source = rank if make is sync_grid else 1 - rank
        expected = np.tile(source * 100 + np.arange(N) + EPOCHS - 1, (BLOCKS, 1))
        np.testing.assert_array_equal(outputs[rank]["out"], expected)
        left = [int(word) for word in outputs[rank]["words"]]
        assert left[0] == (words[0] + (1 << 31)) % (1 << 32)
        if make is barrier_blocks:
            assert left[1] == left[3 - rank] == (words[1] + EPOCHS) % (1 << 32)


@pytest.mark.parametrize("make", [sync_grid, barrier_blocks])
def test_never_written(make):
    fault = fault_of(make(), started(None))
    assert fault.kind == "poison"
    assert re.match(
        rf"W\.{make.__name__} counts in words\[.*0\], which is uninitialized, by rank \d, block ",
        fault.report,
    ), fault.report
    assert "expected an input of zeros" in fault.report
    assert names_line(fault.report, place_of(make, "# BARRIER"))


@factory
def one_barrier_for_each_block(
    words: W.Symmetric((BLOCKS * 4,), "uint32"),
    mail: W.Symmetric((BLOCKS, N), "int32"),
    out: T.Tensor((BLOCKS, N), "int32"),
):
    """Block ``b`` of each rank meets block ``b`` of the other ranks, at its own words."""
    with T.Kernel(BLOCKS, threads=N) as block:
        me, t = W.rank(), T.get_thread_binding()
        mail[(me + 1) % RANKS, block, t] = me * 100 + block
        W.sync_ranks(words[me, block * 4])
        out[block, t] = mail[me, block, t]
        W.sync_ranks(words[me, block * 4])


@pytest.mark.parametrize("level", ["tile", "device"])
def test_each_block_may_count_in_words_of_its_own(level):
    inputs = [{"words": np.zeros(BLOCKS * 4, np.uint32)} for _ in range(RANKS)]
    outputs = simulate(one_barrier_for_each_block(), inputs, level=level)
    for rank, tensors in enumerate(outputs):
        expected = (1 - rank) * 100 + np.arange(BLOCKS)
        assert (tensors["out"] == expected[:, None]).all()
        words = tensors["words"].reshape(BLOCKS, 4)
        assert (words[:, [1, 3 - rank]] == 2 * EPOCHS).all()


@pytest.mark.parametrize("make", [sync_grid, barrier_blocks])
def test_device_functions_count_in_the_same_words(make):
    fault = fault_of(make("store"), started([0], place=0), level="device")
    assert "only barriers may change its words" in fault.report


def test_too_few():
    fault = fault_of(barrier_blocks(), started([0], first=WORDS - 3, place=0))
    assert fault.kind == "bounds"
    assert re.match(
        r"W\.barrier_blocks by rank \d, block \d \(\d\) in launch 0 counts in 4 words of words "
        rf"from \[\d, {WORDS - 3}\], where 3 are left; expected 4 of them\n",
        fault.report,
    ), fault.report
    simulate(barrier_blocks(), started([0], first=WORDS - 4, place=0))
    simulate(sync_grid(), started([0], first=WORDS - 1, place=0))


def test_overlapping():
    fault = fault_of(two_barriers(), zeros(place=3))
    assert fault.kind == "arrival"
    assert re.match(
        r"W\.sync_grid by rank \d, block 0 \(0\) in launch 0 counts in 1 word of words from "
        r"\[\d, 3\], and another barrier in 4 from \[\d, 0\], which overlap; expected words of its "
        r"own, or the same first word\n",
        fault.report,
    ), fault.report
    for mark in ("# FIRST", "# SECOND"):
        assert names_line(fault.report, place_of(two_barriers, mark))
    simulate(two_barriers(), zeros(place=4))
    simulate(two_barriers(), zeros(place=0))


@factory
def one_place(words: W.Symmetric((WORDS,), "uint32"), place: T.int32):
    """All barriers start at the same word; block 0 synchronizes ranks while the other
    blocks wait."""
    with T.Kernel(BLOCKS, threads=N) as block:
        W.sync_grid(words[W.rank(), place])
        if block == 0:
            W.sync_ranks(words[W.rank(), place])
        W.barrier_blocks(words[W.rank(), place])


def test_one_place_for_all_barriers():
    for values in simulate(one_place(), zeros(place=2)):
        assert sorted(values["words"].tolist()) == [0] * (WORDS - 2) + [2 * EPOCHS] * 2


@pytest.mark.parametrize("change", ["store", "add", "set"])
@pytest.mark.parametrize("make", [sync_grid, barrier_blocks])
def test_written_while_blocks_may_be_counting(make, change):
    fault = fault_of(make(change), started([0], place=0))
    assert fault.kind in ("race", "reuse"), fault.report
    assert f"W.{make.__name__} (only barriers may change its words)" in fault.report
    for mark in ("# BARRIER", f"# CHANGE {change}"):
        assert names_line(fault.report, place_of(make, mark))
    simulate(make(change), started([0], place=WORDS - 1))


@pytest.mark.filterwarnings("ignore::tileweave.SimulationWarning")
@pytest.mark.parametrize("change", ["add", "signal"])
def test_an_arrival_too_many(change):
    fault = fault_of(barrier_blocks(change), started([0], place=2))
    assert fault.kind in ("race", "reuse", "arrival"), fault.report
    for mark in ("# BARRIER", f"# CHANGE {change}"):
        assert names_line(fault.report, place_of(barrier_blocks, mark))
    simulate(barrier_blocks(change), started([0], place=WORDS - 1))


def zeroed_between(value):
    """A kernel between the barriers stores to the word."""

    @T.prim_func
    def program(words: T.Tensor((4,), "uint32"), value: T.uint32):
        with T.Kernel(1, threads=N):
            if T.get_thread_binding() == 0:
                words[1] = value  # STORE
        with T.Kernel(BLOCKS, threads=N):
            W.sync_grid(words[1])  # BARRIER

    return program, [{"value": value} for _ in range(RANKS)]


def test_made_ready_by_a_kernel_before():
    simulate(*zeroed_between(0))
    fault = fault_of(*zeroed_between(3))
    assert fault.kind == "arrival"
    assert "finds 3 in words[1]; expected 0" in fault.report
    assert "last written: store of words[1]" in fault.report
    for mark in ("# STORE", "# BARRIER"):
        assert names_line(fault.report, place_of(zeroed_between, mark))


def side_by_side(kind, words, ordered=False):
    """Two kernels, one in a stream beside the other.

    Args:
        words: ``own`` or ``shared`` ones of the program, or those of the ``process``.
        ordered: whether the second kernel follows the first.
    """
    of_process, shared = words == "process", words != "own"
    blocks = 1 if kind == "sync_ranks" else BLOCKS

    @T.prim_func
    def meet(words: W.Symmetric((WORDS,), "uint32"), first: T.int32):
        with T.Kernel(blocks, threads=N):
            if of_process:
                getattr(W, kind)()  # BARRIER
            else:
                getattr(W, kind)(words[W.rank(), first])  # BARRIER

    @tw.plan
    def plan(p: tw.PlanBuilder, words: W.Symmetric((WORDS,), "uint32")):
        p.launch(meet, words, 0)
        if ordered:
            p.wait_stream(None, stream="side")
        p.launch(meet, words, 0 if shared else 4, stream="side")

    return plan


@pytest.mark.parametrize("kind", ["sync_grid", "sync_ranks", "barrier_blocks"])
@pytest.mark.parametrize("words", ["shared", "process"])
def test_kernels_side_by_side(kind, words):
    fault = fault_of(side_by_side(kind, words), zeros())
    assert fault.kind == "arrival"
    name = "words" if words == "shared" else "the process"
    assert re.match(
        rf"W\.{kind} by rank \d, block \d \(\d\).* in launch \d counts in words of {name} in which "
        r"block \d of .*stream.* may be counting in launch \d, since nothing orders the two; "
        "expected words of its own for each kernel that may run beside another, or an order",
        fault.report,
    ), fault.report
    simulate(side_by_side(kind, words, ordered=True), zeros())


@pytest.mark.parametrize("kind", ["sync_grid", "sync_ranks", "barrier_blocks"])
def test_kernels_side_by_side_with_words_of_their_own(kind):
    simulate(side_by_side(kind, "own"), zeros())


def written_by_a_stream(first):
    @T.prim_func
    def meet(words: T.Tensor((WORDS,), "uint32")):
        with T.Kernel(BLOCKS, threads=N):
            W.sync_grid(words[0])

    @tw.plan
    def plan(
        p: tw.PlanBuilder, words: T.Tensor((WORDS,), "uint32"), source: T.Tensor((WORDS,), "uint32")
    ):
        p.launch(meet, words)
        p.copy(words[first:], source[first:], stream="side")

    inputs = [{"words": np.zeros(WORDS, np.uint32), "source": np.zeros(WORDS, np.uint32)}]
    return plan, inputs * RANKS


def test_written_by_a_stream_beside():
    fault = fault_of(*written_by_a_stream(0))
    assert fault.kind in ("race", "reuse")
    assert "W.sync_grid (only barriers may change its words)" in fault.report
    simulate(*written_by_a_stream(1))
