"""Copies of a plan, of several sizes, that one kernel reads: flags that each of them sets."""

import itertools

import numpy as np
import pytest
import tilelang.language as T

import tileweave as tw
from tileweave import language as W
from tileweave.runtime.plans.steps import CopyValue

pytestmark = pytest.mark.long

ROWS, N, F32 = 8, 16, "float32"


def gather(ranks, starts, height=2):
    """All rows go to each rank's right neighbor at once, to the others in pieces; a kernel reads
    ``height`` at a time."""
    pieces = [slice(*ends) for ends in itertools.pairwise([*starts, ROWS])]

    @T.prim_func
    def collect(
        A: T.Tensor((ROWS, N), F32), S: W.Symmetric((ranks, ROWS, N), F32),
        C: T.Tensor((ranks, ROWS, N), F32),
    ):  # fmt: skip
        with T.Kernel(ranks, ROWS // height, threads=32) as (source, tile):
            rows = T.alloc_fragment((height, N), F32)
            if source == W.rank():
                T.copy(A[tile * height, 0], rows)
            else:
                T.copy(S[W.rank(), source, tile * height, 0], rows)
            T.copy(rows, C[source, tile * height, 0])

    @tw.plan
    def gathered(
        p: tw.PlanBuilder, A: T.Tensor((ROWS, N), F32), S: W.Symmetric((ranks, ROWS, N), F32),
        C: T.Tensor((ranks, ROWS, N), F32),
    ):  # fmt: skip
        for number, peer in enumerate(p.peers()):
            for piece in pieces if number else [slice(0, ROWS)]:
                p.copy(S[peer, p.rank, piece], A[piece], stream="copies")
        p.launch(collect, A, S, C)

    return gathered


def given(ranks):
    rng = np.random.default_rng(ranks)
    return [{"A": rng.standard_normal((ROWS, N), np.float32)} for _ in range(ranks)]


def flags_per_copy(plan, ranks):
    """Return the number of flags that each copy of rank 0 sets."""
    shapes = {p.name: p.shape for p in plan.parameters}
    steps = plan.trace(0, ranks, shapes, {})
    return [step.dst.shape[-1] for step in steps if isinstance(step, CopyValue)]


@pytest.mark.parametrize("ranks", [3, 4])
@pytest.mark.parametrize("starts", [[0, 4, 6], [0, 6], [0, 2, 4, 6]])
def test_right(ranks, starts):
    inputs = given(ranks)
    for actual in tw.simulate(gather(ranks, starts), ranks, inputs, schedules=4, epochs=3):
        np.testing.assert_array_equal(actual["C"], [each["A"] for each in inputs])


@pytest.mark.parametrize(
    ("starts", "flags"),
    [([0], [1, 1]), ([0, 4], [2, 1, 1]), ([0, 4, 6], [4, 2, 1, 1]), ([0, 6], [2, 1, 1])],
)
def test_a_copy_sets_all_flags_of_its_elements(starts, flags):
    assert flags_per_copy(gather(3, starts), 3) == flags


def test_copies_of_one_size_set_one_flag_each():
    assert flags_per_copy(gather(2, [0, 4]), 2) == [1]


def test_each_flag_is_needed():
    mutants = tw.mutate(gather(3, [0, 4, 6]), 3, given(3), schedules=4)
    assert {m.verdict for m in mutants if m.op == "copy_value"} == {"killed"}
    assert all(m.is_accounted_for for m in mutants)


def test_a_read_of_two_copies():
    with pytest.raises(
        tw.LanguageError, match="two copies write parts of a region that is read at once"
    ):
        tw.explain(gather(3, [0, 4, 6], height=4), 3)
