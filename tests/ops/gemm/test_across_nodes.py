"""GEMM operators on a mesh of nodes and ranks of a node; both levels are gloo's here."""

from __future__ import annotations

import pytest
import torch

from tests.ops.core.test_torch import assert_right
from tests.ops.gemm import mesh_on_ranks
from tests.ops.meshes import NODES, THREE, recorded_mesh
from tileweave.ops.core.epilogue import NO_EPILOGUE
from tileweave.ops.core.registry import OPERATORS, operators_of
from tileweave.ops.gemm.gemm_operator import GemmOperator

GEMMS = list(operators_of(GemmOperator))


@pytest.mark.parametrize("op", GEMMS)
def test_values_and_gradients(four, op):
    assert_right(four.run(mesh_on_ranks.gradients, op, NODES["2 x 2"], False))


@pytest.mark.long
@pytest.mark.parametrize("where", ["new", "out"])
@pytest.mark.parametrize("nodes", NODES)
@pytest.mark.parametrize("op", GEMMS)
def test_values(four, op, nodes, where):
    assert_right(four.run(mesh_on_ranks.values, op, NODES[nodes], where))


@pytest.mark.long
@pytest.mark.parametrize("where", ["new", "out"])
@pytest.mark.parametrize("nodes", NODES)
def test_rows(four, nodes, where):
    assert_right(four.run(mesh_on_ranks.rows, NODES[nodes], where))


@pytest.mark.long
@pytest.mark.parametrize("nodes", NODES)
def test_gradients_of_rows(four, nodes):
    assert_right(four.run(mesh_on_ranks.gradients_of_rows, NODES[nodes]))


@pytest.mark.long
@pytest.mark.parametrize("op", GEMMS)
def test_fp8(four, op):
    assert_right(four.run(mesh_on_ranks.fp8, op))


@pytest.mark.long
@pytest.mark.parametrize("nodes", THREE)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("op", GEMMS)
def test_three_ranks(three, op, compiled, nodes):
    assert_right(three.run(mesh_on_ranks.gradients, op, THREE[nodes], compiled))


@pytest.mark.long
def test_refusals(four):
    for rows, fused, out, strategy in four.run(mesh_on_ranks.refusals):
        assert rows == (
            "matmul_reduce_scatter: a has shape (6, 8); expected a multiple of 4 rows for 4 ranks"
        )
        assert fused == (
            "matmul_all_reduce: strategy='fused', but the tensors are on cpu; expected cuda"
        )
        assert out == "all_gather_matmul: out has shape (8, 8); expected (32, 8)"
        assert strategy == "nccl: the tensors are on cpu; expected cuda"


@pytest.mark.parametrize(
    ("op", "rows", "expected"),
    [
        ("all_gather_matmul", (4, 24), "start start multiply wait multiply wait multiply"),
        ("matmul_reduce_scatter", (24, 4), "multiply start multiply start multiply wait wait"),
        (
            "matmul_all_reduce",
            (23, 23),
            "multiply start multiply start multiply wait wait start start move wait move wait move",
        ),
    ],
)
def test_nodes_exchange_while_the_node_multiplies(op, rows, expected):
    """No wait comes before the last product that does not need it."""
    log, (a, c) = [], (torch.zeros(n, 8) for n in rows)
    calls = (lambda *_: log.append("multiply")), (lambda *_: log.append("move"))
    operands = a, torch.zeros(8, 8), c, NO_EPILOGUE
    OPERATORS[op].across(*calls, *operands, recorded_mesh(log))
    assert " ".join(log) == expected
