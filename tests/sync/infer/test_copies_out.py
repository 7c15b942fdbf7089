"""Copies of a plan that read results of a kernel beside them: their waits, and refusals."""

import pytest
import tilelang.language as T

import tileweave as tw
from tests.releases import names_line
from tileweave import language as W
from tileweave.runtime.plans.parameters import Parameter
from tileweave.runtime.plans.steps import Copy, Launch, WaitValue, WriteValue
from tileweave.runtime.plans.sync_push import WAIT

ROWS, N, F32 = 8, 16, "float32"
GIVEN = T.Tensor((ROWS, N), F32)
MINE = W.Symmetric((ROWS, N), F32)
SENT = W.Symmetric((ROWS, N), F32)


@T.prim_func
def write_rows(X: GIVEN, S: MINE):
    with T.Kernel(ROWS, threads=32) as row:
        tile = T.alloc_shared((1, N), F32)
        T.copy(X[row, 0], tile)
        T.copy(tile, S[W.rank(), row, 0])


@T.prim_func
def write_half(X: GIVEN, S: MINE):
    with T.Kernel(1, threads=32):
        tile = T.alloc_shared((ROWS // 2, N), F32)
        T.copy(X[0, 0], tile)
        T.copy(tile, S[W.rank(), ROWS // 2, 0])


@T.prim_func
def read_first(X: GIVEN, S: MINE, R: SENT):
    """Block 0 waits for the data of all other blocks, which arrives through the peer."""
    with T.Kernel(ROWS, threads=32) as row:
        tile = T.alloc_shared((1, N), F32)
        if row == 0:
            every = T.alloc_shared((ROWS, N), F32)
            T.copy(R[W.rank(), 0, 0], every)
            T.copy(every[0:1, :], S[W.rank(), 0, 0])
        else:
            T.copy(X[row, 0], tile)
            T.copy(tile, S[W.rank(), row, 0])


@T.prim_func
def read_part(X: GIVEN, S: MINE, R: SENT):
    with T.Kernel(1, threads=32):
        tile = T.alloc_shared((ROWS, N), F32)
        T.copy(X, tile)
        T.copy(tile, S[W.rank(), 0, 0])
        T.copy(R[W.rank(), 0, 0], tile[0:1, :])


@T.prim_func
def read_at_once(X: GIVEN, S: MINE, R: SENT, Y: GIVEN):
    """All blocks wait, each of them after it has written its part."""
    with T.Kernel(ROWS, threads=32) as row:
        tile = T.alloc_shared((1, N), F32)
        T.copy(X[row, 0], tile)
        T.copy(tile, S[W.rank(), row, 0])
        T.copy(R[W.rank(), row, 0], tile)
        T.copy(tile, Y[row, 0])


@T.prim_func
def read_last(X: GIVEN, S: MINE, R: SENT, Y: GIVEN):
    with T.Kernel(2 * ROWS, threads=32) as block:
        tile = T.alloc_shared((1, N), F32)
        if block < ROWS:
            T.copy(X[block, 0], tile)
            T.copy(tile, S[W.rank(), block, 0])
        else:
            T.copy(R[W.rank(), block - ROWS, 0], tile)
            T.copy(tile, Y[block - ROWS, 0])


@T.prim_func
def pass_on(S: MINE, R: SENT):
    with T.Kernel(ROWS, threads=32) as row:
        tile = T.alloc_shared((1, N), F32)
        T.copy(R[W.rank(), row, 0], tile)
        T.copy(tile, S[W.rank(), row, 0])


def steps_of(body, ranks=2, rank=0, recorded=False, **configs):
    """Return the steps of a plan whose parameters are X, S, R and Y."""
    parameters = {"X": GIVEN, "S": MINE, "R": SENT, "Y": GIVEN}
    given = [Parameter.of(name, kind) for name, kind in parameters.items()]
    plan = tw.Plan("f", given, body, "here:1", configs)
    shapes = {name: (ROWS, N) for name in parameters}
    return plan.trace(rank, ranks, shapes, {}, recorded=recorded)


def explicit_and_waiting_steps(body, **options):
    """Return the explicit steps of the plan, and the waiting ones."""
    return [s for s in steps_of(body, **options) if s.number > 0 or s.number == WAIT]


def test_a_copy_waits_for_the_kernel_that_writes_its_source():
    def body(p, X, S, R, Y):
        p.launch(write_rows, X, S)
        for peer in p.peers():
            for rows in (slice(0, 4), slice(4, 8)):
                p.copy(R[peer, rows], S[p.rank, rows], stream="copies")

    steps = explicit_and_waiting_steps(body, rank=1)
    assert [type(s) for s in steps] == [Launch, *[WaitValue, WriteValue, Copy] * 2]
    for half, (wait, clear) in enumerate(zip(steps[1::3], steps[2::3], strict=True)):
        assert {(s.stream, s.number) for s in (wait, clear)} == {("copies", WAIT)}
        assert wait.flag == clear.dst
        assert (wait.flag.start, wait.value, clear.value) == ((1, half), 4, 0)  # rows, each is 1

    steps = explicit_and_waiting_steps(body, rank=1, recorded=True)
    assert [type(s) for s in steps] == [Launch, *[Launch, Copy] * 2]
    for half, wait in enumerate(steps[1::2]):
        assert (wait.stream, wait.number) == ("copies", WAIT)
        assert (wait.arguments["index"], wait.arguments["value"]) == (half, 4)


def launch_first(p, X, S, R, Y):
    p.launch(read_last, X, S, R, Y)
    p.copy(R[1 - p.rank], S[p.rank], stream="copies")


def launch_last(p, X, S, R, Y):
    p.copy(R[1 - p.rank], S[p.rank], stream="copies")
    p.launch(read_last, X, S, R, Y)


def send_first(p, X, S, R, Y):
    p.copy(R[1 - p.rank], X, stream="send")
    p.launch(pass_on, S, R)
    p.copy(Y, S[1 - p.rank], stream="fetch")


def fetch_first(p, X, S, R, Y):
    p.launch(pass_on, S, R)
    p.copy(Y, S[1 - p.rank], stream="fetch")
    p.copy(R[1 - p.rank], X, stream="send")


@pytest.mark.parametrize(
    ("body", "streams"),
    [
        (launch_first, {"copies"}),
        (launch_last, set()),
        (send_first, {"fetch"}),
        (fetch_first, set()),
    ],
)
def test_streams_wait_for_earlier_steps_by_themselves(body, streams):
    """Later steps may be queued after them in a queue of the GPU."""
    steps = explicit_and_waiting_steps(body)
    assert {s.stream for s in steps if isinstance(s, WaitValue)} == streams
    assert bool(streams) != any(isinstance(s, Launch) and s.number == WAIT for s in steps)


def test_several_copies_of_one_source_wait_once():
    def body(p, X, S, R, Y):
        p.launch(write_rows, X, S)
        for peer in p.peers():
            p.copy(R[peer], S[p.rank], stream="copies")

    expected = [Launch, WaitValue, WriteValue, Copy, Copy]
    assert [type(s) for s in explicit_and_waiting_steps(body, ranks=3)] == expected


def test_a_copy_after_the_kernel_in_its_stream_waits_for_nothing():
    def body(p, X, S, R, Y):
        p.launch(write_rows, X, S)
        p.copy(R[1 - p.rank], S[p.rank])

    assert [type(s) for s in explicit_and_waiting_steps(body)] == [Launch, Copy]


def test_tensors_that_the_kernel_only_reads_need_no_wait():
    def body(p, X, S, R, Y):
        p.launch(read_last, X, S, R, Y)
        p.copy(R[1 - p.rank], S[p.rank], stream="there")
        p.wait_stream(None, stream="back")
        p.copy(Y, R[p.rank], stream="back")

    waits = [s for s in explicit_and_waiting_steps(body) if isinstance(s, WaitValue)]
    assert [s.stream for s in waits] == ["there"]


def test_a_step_that_waits_for_a_kernel_needs_a_free_sm():
    def body(p, X, S, R, Y):
        p.launch(read_at_once, X, S, R, Y)
        p.copy(R[1 - p.rank], S[p.rank], stream="copies")

    assert explicit_and_waiting_steps(body, **{"tileweave.resident_blocks": ROWS + 1})
    with pytest.raises(tw.LanguageError, match=f"expected at most {ROWS - 1} blocks"):
        explicit_and_waiting_steps(body, **{"tileweave.resident_blocks": ROWS})


def to_and_from(p, X, S, R, Y):
    p.launch(write_half, X, S)
    p.copy(S[1 - p.rank, 0:4], S[p.rank, 4:8], stream="copies")


def two_streams(p, X, S, R, Y):
    p.launch(write_rows, X, S)
    p.copy(R[1 - p.rank], S[p.rank], stream="one")
    p.copy(Y, S[p.rank], stream="other")


def behind_its_reader(p, X, S, R, Y):
    p.launch(read_last, X, S, R, Y)
    p.copy(R[1 - p.rank], S[p.rank])


def read_in_part(p, X, S, R, Y):
    p.launch(read_part, X, S, R)
    p.copy(R[1 - p.rank], S[p.rank], stream="copies")


def of_what_comes_later(p, X, S, R, Y):
    p.launch(read_first, X, S, R)
    p.copy(R[1 - p.rank], S[p.rank], stream="copies")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            to_and_from,
            "p.copy reads S, and p.copy writes S, beside one kernel; expected two tensors",
        ),
        (
            two_streams,
            "p.copy reads S in streams 'one' and 'other', and the kernel signals to one of "
            "them; expected one stream",
        ),
        (
            behind_its_reader,
            "read_last waits for a copy to R[1, 0:8, 0:16], which comes after it in the caller's "
            "stream; expected another stream, or the copy first",
        ),
        (
            read_in_part,
            "p.copy writes R, of which the kernel of its owner reads only a part; expected reads "
            "of all of it",
        ),
        (
            of_what_comes_later,
            "a circular wait: block 0 of rank 0 waits for block 0 of rank 1, which waits for block "
            "0 of rank 0; expected each block to write",
        ),
    ],
)
def test_refused(body, message):
    with pytest.raises(tw.TileWeaveError) as error:
        steps_of(body)
    assert message in str(error.value)
    assert names_line(str(error.value), "test_copies_out.py:")
