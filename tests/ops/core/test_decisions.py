"""An equal call reuses its decision; any other call decides again."""

from __future__ import annotations

import types

import pytest
import torch

import tileweave as tw
from tests.groups import one_rank, open_sessions
from tileweave.ops.core import call, checks
from tileweave.ops.core.tiles import LARGE, Choice
from tileweave.ops.gemm import gemm_operator
from tileweave.runtime.executor import recorded_calls
from tileweave.runtime.executor.recorded_calls import CallCache

WAY = Choice("stores", LARGE)
ALONE = one_rank()


@pytest.fixture
def join(monkeypatch):
    """Begin a session."""
    monkeypatch.setattr(gemm_operator, "obstacle", lambda *_: None)
    monkeypatch.setattr(checks, "_warned", set())
    recorded_calls.invalidate()
    yield lambda: open_sessions(monkeypatch, types.SimpleNamespace(group=ALONE, name=""))
    recorded_calls.invalidate()


@pytest.fixture
def decided(monkeypatch, join):
    """Record the problems that were decided."""
    join()
    problems = []

    def choose(requested, problem, group):
        problems.append(problem)
        return WAY

    monkeypatch.setattr(gemm_operator, "choice_of", choose)
    return problems


def bf16(*shape):
    return torch.randn(shape).bfloat16()


def made(a, b, out=None, requested="auto", bias=None, op="matmul_reduce_scatter"):
    return call.decided(op, (a, b, bias, None, None), out, ("", requested, None))


def test_only_the_first_call_decides(decided):
    a, b = bf16(16, 8), bf16(8, 24)
    first, second = made(a, b), made(c := bf16(16, 8), d := bf16(8, 24))
    assert len(decided) == 1
    decision = second[1]
    assert (decision.problem, decision.group, decision.choice) == (decided[0], ALONE, WAY)
    (*first, x), (*second, y) = (gemm_operator.operands_of(*each) for each in (first, second))
    assert first[0] is a and second[0] is c and second[1] is d
    assert x.data_ptr() != y.data_ptr() and y.shape == (16, 24)


def test_that_nccl_is_faster_is_remembered(decided, monkeypatch):
    monkeypatch.setattr(gemm_operator, "choice_of", lambda _, problem, __: decided.append(problem))
    for _ in range(2):
        assert made(bf16(16, 8), bf16(8, 24))[1].choice is None
    assert len(decided) == 1


def test_what_keeps_it_from_being_fused_is_asked_for_again(decided, monkeypatch):
    requests = []
    monkeypatch.setattr(gemm_operator, "obstacle", lambda *_: requests.append(1) or "it rains")
    for _ in range(2):
        assert made(bf16(16, 8), bf16(8, 24))[1].choice == "nccl"
    assert len(requests) == 2 and not decided


def test_another_operator_decides(decided):
    """The other calls that decide again are those of test_fast_path.py."""
    for op in ("matmul_reduce_scatter", "matmul_all_reduce"):
        made(bf16(16, 8), bf16(8, 24), op=op)
    assert len(decided) == 2


def test_a_graph_remembers_nothing(decided, monkeypatch):
    """A captured call may be refused; the decision of a first call may then differ."""
    monkeypatch.setattr(call, "capturing", lambda: True)
    for _ in range(2):
        made(bf16(16, 8), bf16(8, 24))
    assert len(decided) == 2


def test_what_must_be_copied_is_copied_each_time(decided):
    b, memory = bf16(8, 24), bf16(16 * 8 + 1)
    aside = memory[1:].view(16, 8)
    made(bf16(16, 8), b)
    with pytest.warns(UserWarning, match="it is copied in each call"):
        copied, *_ = gemm_operator.operands_of(*made(aside, b))
    assert len(decided) == 2
    assert copied.data_ptr() % 16 == 0 and torch.equal(copied, aside)


def test_what_is_refused_is_refused_again(decided):
    made(bf16(16, 8), bf16(8, 24), out=bf16(16, 24))
    for _ in range(2):
        with pytest.raises(tw.TileWeaveError, match="out has shape"):
            made(bf16(16, 8), bf16(8, 24), out=bf16(16, 25))
        with pytest.raises(tw.TileWeaveError, match="out has strides"):
            made(bf16(16, 8), bf16(8, 24), out=bf16(16 * 24 + 1)[1:].view(16, 24))


def test_the_oldest_make_room(monkeypatch):
    monkeypatch.setattr(recorded_calls, "_MAX_CALLS", 2)
    cache = CallCache()
    for key in "abbc":
        cache.put(key, key)
    assert [cache.get(key) for key in "abc"] == [None, "b", "c"]


def test_without_a_key_nothing_is_remembered():
    cache = CallCache()
    cache.put(None, "a")
    assert not cache
