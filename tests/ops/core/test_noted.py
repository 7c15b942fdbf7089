"""Ranks compile what all of them have noted."""

import threading
from unittest import mock

import pytest
import torch

from tileweave.ops.core import noted
from tileweave.ops.core.problem import Problem
from tileweave.ops.gemm.gemm_operator import GemmOperator
from tileweave.runtime.host.group import Group

CPU = torch.device("cpu")


class Notes(threading.local):
    """Notes of ranks that are threads."""

    def __init__(self) -> None:
        self.notes = {}

    def __getattr__(self, name):
        return getattr(self.notes, name)

    def __iter__(self):
        return iter(self.notes)


@pytest.fixture
def ranks(every_rank, monkeypatch):
    """Return a runner of functions on ranks. Chosen is what ``choose`` sees on all of them, in the
    same order, because it is collective."""
    here = threading.local()
    monkeypatch.setattr(noted, "_notes", Notes())
    monkeypatch.setattr(noted, "ranks_of", lambda name: here.group)

    def choose(problem, group, requested, device):
        assert len(set(group.exchange("choose", str(problem)))) == 1
        if problem.rows == 99:
            raise ValueError("no choice")
        return None if problem.rows == 98 else requested

    monkeypatch.setattr(GemmOperator, "choose", choose)

    def run(function):
        def rank(group: Group):
            here.group = group
            return function(group)

        return every_rank(rank)

    return run


def problem(rows):
    return Problem("all_gather_matmul", rows, 64, 64, 2, torch.bfloat16, False)


def note(*rows, device=CPU):
    for n in rows:
        noted.note(problem(n), "", "auto", device)


def taken(group):
    return [p.rows for p, choice in noted.noted_problems(group)]


def test_what_all_have_noted_is_taken_in_one_order(ranks):
    def rank(group):
        note(*((1, 2, 3, 1) if group.rank else (3, 2, 1, 4)))
        first = taken(group)
        note(4, 5)
        return first, taken(group), taken(group), noted.noted_groups()

    assert ranks(rank) == [([3, 2, 1], [4, 5], [], [])] * 2


def test_a_rank_that_has_noted_nothing_takes_nothing(ranks):
    def rank(group):
        if group.rank == 1:
            note(1, 2)
        return taken(group), noted.noted_groups()

    assert ranks(rank) == [([], []), ([], [""])]


def test_problems_without_a_kernel_are_left_out(ranks):
    def rank(group):
        note(1, 98, 99, 2)
        return taken(group), noted.noted_groups()

    assert ranks(rank) == [([1, 2], [])] * 2


def test_tensors_on_another_gpu_are_left_to_their_calls(ranks):
    def rank(group):
        group = Group(group.rank, 2, 0, torch.device("cuda", group.rank), None, group.store)
        note(1, device=torch.device("cuda", group.rank))
        note(2, device=torch.device("cuda", 0))
        return taken(group)

    assert ranks(rank) == [[1]] * 2


def test_sizes_without_a_hint_are_not_noted(ranks):
    node = mock.Mock(hint=24)
    known, unknown = torch.SymInt(node), torch.SymInt(mock.Mock(**{"has_hint.return_value": False}))

    def rank(group):
        note(known, unknown)
        return taken(group)

    assert ranks(rank) == [[24]] * 2
