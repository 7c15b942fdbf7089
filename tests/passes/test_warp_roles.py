"""Recognition of the producer and consumer warps of a lowered kernel."""

import pytest
from tilelang import tvm
from tvm import tirx

from tileweave.passes.ir.warp_roles import SCOPE, roles_of

PRODUCERS, THREADS = 128, 384


def kernel(make_part):
    """Return a kernel of 128 producers and 256 consumers, and its specialized part.

    Args:
        make_part: thread index -> specialized statement.
    """
    thread = tirx.Var("tx", "int32")
    scope = tirx.AttrStmt([PRODUCERS, THREADS - PRODUCERS], SCOPE, 0, make_part(thread))
    axis = tirx.IterVar(tvm.ir.Range(0, THREADS), thread, tirx.IterVar.ThreadIndex, "threadIdx.x")
    return tirx.PrimFunc([], tirx.AttrStmt(axis, "thread_extent", THREADS, scope)), scope


def branch(condition, *cases):
    cases = cases or (tirx.Evaluate(1), tirx.Evaluate(2))
    return tirx.IfThenElse(condition, *cases)


@pytest.mark.parametrize(
    "condition", [lambda t: t < 128, lambda t: tirx.Not(t >= 128), lambda t: t // 128 < 1]
)
def test_the_split_is_recognized_by_its_threads(condition):
    func, scope = kernel(lambda thread: branch(condition(thread)))
    assert [s.same_as(scope.body) for s in roles_of(func).splits_in(scope)] == [True]


@pytest.mark.parametrize(
    "condition",
    [lambda t: t < 256, lambda t: t < 64, lambda t: t >= 128, lambda t: tirx.Var("n", "int32") < 1],
)
def test_other_branches_are_no_splits(condition):
    func, scope = kernel(lambda thread: branch(condition(thread)))
    assert roles_of(func).splits_in(scope) == []


def test_a_split_in_each_case_of_another_branch():
    def part(thread):
        cases = (branch(thread < 128), branch(thread < 128))
        return branch(tirx.Var("n", "int32") < 1, *cases)

    func, scope = kernel(part)
    roles = roles_of(func)
    assert len(roles.splits_in(scope)) == 2
    changed = roles.rewrite_splits(scope.body, lambda split: split.else_case)
    assert [int(case.value) for case in (changed.then_case, changed.else_case)] == [2, 2]


def test_guards_of_consumers():
    thread = []
    func, _ = kernel(lambda t: thread.append(t) or branch(t < 128))
    roles = roles_of(func)
    assert roles.is_of_consumers(thread[0] >= 128) and roles.is_of_consumers(thread[0] == 200)
    assert not roles.is_of_consumers(thread[0] < 256)


def test_a_kernel_without_specialization_has_no_roles():
    func, _ = kernel(lambda thread: branch(thread < 128))
    assert roles_of(tirx.PrimFunc([], func.body.body.body)) is None
