"""A writer need not wait for launches of its readers if it has received their data."""

import pytest
import tilelang.language as T

import tileweave as tw
from tileweave import language as W

RANKS, N = 3, 32


def replied(distance=1, reads=lambda block, rank: True, blocks=1, late=False, times=lambda rank: 1):
    """Each rank writes to its left neighbor, reads what its right one has written, and writes to a
    third rank.

    Args:
        distance: distance to the third rank.
        reads: block, rank -> whether it reads.
        late: whether it reads after the write to the third rank.
        times: rank -> number of reads.
    """

    @T.prim_func
    def program(S: W.Symmetric((blocks, N), "int32"), Y: T.Tensor((blocks, N), "int32")):
        with T.Kernel(blocks, threads=N) as block:
            asked = W.alloc_symmetric((N,), "int32")
            me = W.rank()
            if block == 0:
                for i in T.Parallel(N):
                    asked[(me + RANKS - 1) % RANKS, i] = i + me
            for _ in T.serial(0 if late else times(me)):
                if reads(block, me):
                    for i in T.Parallel(N):
                        Y[block, i] = asked[me, i]
            for i in T.Parallel(N):
                S[(me + distance) % RANKS, block, i] = i + me
            if late:
                for i in T.Parallel(N):
                    Y[block, i] = asked[me, i]

    return program


def waits(program) -> bool:
    return "started" in tw.explain(program, RANKS).flags


def test_a_writer_with_data_of_the_reader_does_not_wait():
    assert not waits(replied())
    assert not waits(replied(blocks=2))
    assert "writers first wait for what the readers write" in str(tw.explain(replied(), RANKS))


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"distance": 2}, id="data of another rank"),
        pytest.param({"late": True}, id="read after the write"),
        pytest.param({"reads": lambda block, rank: block == 1, "blocks": 2}, id="another block"),
        pytest.param({"reads": lambda block, rank: rank != 1}, id="not on every rank"),
        pytest.param({"times": lambda rank: rank}, id="zero times on one rank"),
        pytest.param({"times": lambda rank: T.min(rank, 1)}, id="zero or one time"),
    ],
)
def test_a_writer_without_data_of_the_reader_waits(options):
    assert waits(replied(**options))


@pytest.mark.parametrize("blocks", [1, 2])
def test_right_in_every_schedule(blocks):
    """The caller reads the received data after each launch."""
    program = replied(blocks=blocks)

    @tw.plan
    def called(
        p: tw.PlanBuilder, S: W.Symmetric((blocks, N), "int32"), Y: T.Tensor((blocks, N), "int32"),
        actual: T.Tensor((blocks, N), "int32"),
    ):  # fmt: skip
        p.launch(program, S, Y)
        p.copy(actual, S[p.rank])

    out = tw.simulate(called, RANKS, schedules=20, epochs=4)
    for rank, tensors in enumerate(out):
        assert (tensors["actual"][:, 0] == (rank - 1) % RANKS).all()
        assert (tensors["Y"][:, 0] == (rank + 1) % RANKS).all()
