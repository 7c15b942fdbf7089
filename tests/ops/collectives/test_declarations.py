"""Declarations of a collective, and what follows from them."""

from __future__ import annotations

import re

import pytest
import torch

import tileweave as tw
from tileweave import ops
from tileweave.ops.collectives import collective
from tileweave.ops.collectives.broadcast import Broadcast
from tileweave.ops.collectives.collective import Collective, checked_problem
from tileweave.ops.core.registry import OPERATORS, operators_of


class ByThreads(Broadcast):
    """Collective with a single program, which computes."""

    dtypes = (torch.float32,)


PROBLEM = checked_problem("broadcast", torch.empty(64, device="meta"), None, 2, [0])


@pytest.mark.parametrize(
    ("transport", "mover"),
    [("copy_engine", "copy engines"), ("ll", "words with flags")],
)
def test_a_transport_without_a_program(transport, mover):
    assert ByThreads.obstacle(PROBLEM, transport) == (
        f"broadcast has no program by {mover}; expected 'ldst', 'nccl'"
    )


def test_a_transport_with_a_program():
    assert ByThreads.obstacle(PROBLEM, "ldst") is None


def test_a_type_with_which_no_program_computes():
    problem = checked_problem(
        "broadcast", torch.empty(64, dtype=torch.int8, device="meta"), None, 2, [0]
    )
    assert ByThreads.obstacle(problem, "ldst") == "x is of torch.int8; expected torch.float32"
    assert Broadcast.obstacle(problem, "ldst") is None


@pytest.mark.parametrize("name", operators_of(Collective))
def test_docstrings_list_the_transports(name):
    """``transport`` is the last argument in the docstring of the function for users."""
    _, _, text = getattr(ops, name).__doc__.partition("        transport: ")
    listed = re.findall(r"``(\w+)``", re.split(r"\bsee\b|\n\n", text)[0])
    assert set(listed) == {*OPERATORS[name].transports(), "nccl", "auto"}


MEMORY = torch.zeros(64)
OVERLAPS = [
    ("all_reduce", MEMORY[:16], MEMORY[:16], False),
    ("all_reduce", MEMORY[:16], MEMORY[16:32], False),
    ("all_reduce", MEMORY[:16], MEMORY[4:20], True),
    ("all_gather", MEMORY[16:32], MEMORY[:32], False),
    ("all_gather", MEMORY[:16], MEMORY[:32], True),
    ("all_gather", MEMORY[8:24], MEMORY[:32], True),
    ("reduce_scatter", MEMORY[:32], MEMORY[16:32], False),
    ("reduce_scatter", MEMORY[:32], MEMORY[:16], True),
]


@pytest.mark.parametrize(("name", "x", "out", "copied"), OVERLAPS)
def test_results_in_the_memory_of_the_input(name, x, out, copied):
    """The calls are those of rank 1 of 2."""
    assert collective.overwrites(checked_problem(name, x, out, 2, ()), 1, x, out) == copied


def test_a_result_that_overlaps_the_input_in_part():
    memory = torch.arange(20.0)
    assert torch.equal(ops.all_reduce(memory[:16], out=memory[4:]), torch.arange(16.0))


@pytest.mark.parametrize("name", ["all_reduce", "reduce_scatter"])
def test_types_that_torch_distributed_does_not_add(name):
    """gloo would fail on each rank, as if it had lost the others."""
    x = torch.zeros(4, 2).to(torch.float8_e4m3fn)
    with pytest.raises(tw.TileWeaveError) as error:
        getattr(ops, name)(x)
    assert str(error.value) == (
        f"{name}: x is of torch.float8_e4m3fn; expected a type that torch.distributed adds, such "
        "as torch.bfloat16"
    )
    assert torch.equal(ops.all_gather(x).view(torch.uint8), x.view(torch.uint8))
