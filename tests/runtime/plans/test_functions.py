"""Functions that ``tw.plan`` accepts and refuses."""

import functools

import pytest
import tilelang.language as T
import torch

import tileweave as tw
from tests.runtime.plans.fakes import FLAGS, STANDARD, m


def test_declarations():
    @tw.plan
    def fine(p: tw.PlanBuilder, A: T.Tensor((m, 8), "int32"), S: FLAGS, x: T.float32):
        """Nothing."""

    assert repr(fine) == "tw.plan fine(A, S, x)"
    assert [(p.dtype, p.symmetric) for p in fine.parameters] == [
        ("int32", False), ("uint32", True), ("float32", False),
    ]  # fmt: skip
    with pytest.raises(tw.TileWeaveError, match=r"parameter A; expected T.Tensor"):

        @tw.plan
        def bare(p, A):
            """Nothing."""

    with pytest.raises(tw.TileWeaveError, match="makes it a string"):

        @tw.plan
        def strings(p, A: "T.Tensor((4,), 'int32')"):
            """Nothing."""

    with pytest.raises(tw.TileWeaveError, match="expected one for the steps"):

        @tw.plan
        def empty():
            """Nothing."""


def without_steps(A: FLAGS, B: FLAGS): ...
def by_position(p, A: FLAGS, /): ...
def any_number(p, *A: FLAGS): ...
def any_name(p, **A: FLAGS): ...
def steps_by_name(*, p, A: FLAGS): ...
def of_torch(p, A: FLAGS, x: torch.int32): ...


def generator(p, A: FLAGS):
    yield


async def coroutine(p, A: FLAGS): ...


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (without_steps, "parameter A comes first; expected one for the steps before it"),
        (by_position, "parameter A: buffer; expected .* and a name to call it by"),
        (any_number, r"parameter \*A: buffer; expected .* and a name to call it by"),
        (any_name, r"parameter \*\*A: buffer; expected .* and a name to call it by"),
        (steps_by_name, "parameter p comes first; expected one for the steps before it"),
        (of_torch, "parameter x: torch.int32; expected .* scalar type such as T.int32"),
        (
            generator,
            "appends its steps only when it is iterated or awaited; expected a plain function",
        ),
        (
            coroutine,
            "appends its steps only when it is iterated or awaited; expected a plain function",
        ),
        (functools.partial(by_position), "plan: functools.partial.*; expected a function"),
        (tw.plan(lambda p: None), "plan: tw.plan <lambda>.*; expected a function"),
        (3, "plan: 3; expected a function"),
    ],
)
def test_refused_functions(function, message):
    with pytest.raises(tw.TileWeaveError, match=message):
        tw.plan(function)


def test_functions_that_plans_are_made_of():
    rows = STANDARD["A"]

    class Of:
        def method(self, p, A: rows): ...

    @functools.wraps(Of().method)
    def wrapper(*args, **kwargs): ...

    def by_name(p, *, A: rows): ...

    for function in (Of().method, wrapper, by_name):
        plan = tw.plan(function)
        assert [q.name for q in plan.parameters] == ["A"]
        assert plan.trace(0, 1, {"A": (4, 8)}, {}) == []
