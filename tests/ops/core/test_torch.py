"""The torch operators on ranks that are processes: values, gradients, groups, ranks that differ.

Tensors are on the CPU, so that the collectives are gloo's; the fused kernels have tests of their
own (test_programs.py, tests/gpu/ops.py).
"""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import torch.distributed as dist

import tileweave as tw
from tests.ops import on_ranks
from tests.ops.autotune import tuned_on_ranks
from tests.ops.collectives.exchanges import EXCHANGES
from tileweave.ops.core import groups
from tileweave.ops.core.registry import operators_of
from tileweave.ops.gemm.gemm_operator import GemmOperator

pytestmark = pytest.mark.long

OPERATORS = [*operators_of(GemmOperator)]


def assert_right(outcomes):
    for rank, outcome in enumerate(outcomes):
        if isinstance(outcome, Exception):
            raise outcome
        assert all(outcome.values()), (rank, outcome)


@pytest.mark.parametrize("where", ["new", "out"])
@pytest.mark.parametrize("order", ["row-major", "transposed"])
@pytest.mark.parametrize("operator", OPERATORS)
def test_values(three, operator, order, where):
    assert_right(three.run(on_ranks.product, operator, order, where))


@pytest.mark.parametrize(("out_dtype", "biased"), [(None, True), (torch.float16, False)])
def test_fp8(three, out_dtype, biased):
    assert_right(three.run(on_ranks.fp8, out_dtype, biased))


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("keep", [False, True], ids=["product", "product and rows"])
def test_gradients(three, keep, compiled):
    assert_right(three.run(on_ranks.gradients, keep, compiled))


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_gradients_of_a_sum(three, compiled):
    assert_right(three.run(on_ranks.gradients_of_a_sum, compiled))


@pytest.mark.parametrize("where", ["new", "out"])
@pytest.mark.parametrize("what", EXCHANGES)
def test_exchanges(three, what, where):
    assert_right(three.run(on_ranks.exchange, what, where))


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("what", EXCHANGES)
def test_gradients_of_exchanges(three, what, compiled):
    assert_right(three.run(on_ranks.gradients_of_exchange, what, compiled))


@pytest.mark.parametrize(
    ("what", "form"), [("all_gather", "group"), ("reduce_scatter", "name"), ("all_to_all", "mesh")]
)
def test_exchanges_in_a_part_of_the_world(three, what, form):
    *inside, outside = three.run(on_ranks.exchange, what, "new", form)
    assert_right(inside)
    assert isinstance(outside, tw.TileWeaveError) and "expected" in str(outside)


def test_ranks_that_exchange_other_shapes_are_told(three):
    for error in three.run(on_ranks.exchange_differs):
        assert "all_gather: the ranks disagree (rank 0: all_gather of (2, 3) float32" in str(error)


@pytest.mark.parametrize("form", ["group", "name", "mesh"])
@pytest.mark.parametrize("operator", OPERATORS)
def test_part_of_the_world(three, operator, form):
    *inside, outside = three.run(on_ranks.product, operator, "row-major", "new", form)
    assert_right(inside)
    assert isinstance(outside, tw.TileWeaveError) and "expected" in str(outside)


def test_strides_along_extents_of_one(three):
    assert_right(three.run(on_ranks.strides))


def test_groups_that_are_gone_are_forgotten(three):
    for left_open in three.run(on_ranks.groups_that_come_and_go):
        assert left_open <= 2


def test_a_group_with_the_name_of_another_exchanges_anew(monkeypatch):
    """Another rank has only asked for the members, and received the answer of the second group."""
    store = dist.HashStore()
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)
    monkeypatch.setattr(groups, "_generations", Counter())
    first, second, third, other = (groups._StoreOf("tp") for _ in range(4))
    first.set("said", "3")
    assert not second.check(["said"])
    second.set("said", "4")
    monkeypatch.setattr(groups, "_generations", Counter())
    assert other.get("said") == b"3" and third.get("said") == b"4"


def test_ranks_that_disagree_are_told(three):
    for error in three.run(on_ranks.differ):
        assert str(error) == (
            "matmul_reduce_scatter: the ranks disagree ("
            "rank 0: matmul_reduce_scatter of (18, 8) x (8, 16) float32, nccl; "
            "rank 1: matmul_reduce_scatter of (18, 8) x (8, 17) float32, nccl; "
            "rank 2: matmul_reduce_scatter of (18, 8) x (8, 18) float32, nccl); "
            "expected the same shapes, types, memory order and strategy on every rank"
        )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("op", ["all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"])
def test_tune(three, op, dtype):
    """Inputs, results and times are real; the tuned programs are torch's product, right
    or wrong."""
    first, *others = three.run(tuned_on_ranks.tune, op, dtype)
    if isinstance(first, Exception):
        raise first
    assert others == [first] * 2
    assert first["winner"] in ("right", "as right") and first["result is right"]
    assert first["reasons"] == {
        "right": "", "as right": "", "wrong": "relative error inf; expected at most 0.01",
    }  # fmt: skip
