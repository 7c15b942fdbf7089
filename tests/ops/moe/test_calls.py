"""Calls of dispatch and combine by their programs, which the simulator runs on one rank; and
repeated calls."""

from __future__ import annotations

import pytest
import torch

import tileweave as tw
from tests.ops.moe import moe_on_ranks
from tests.ops.moe.by_definition import mixture, random_ids
from tests.ops.moe.simulated_kernels import simulate_kernels
from tests.ops.simulated_calls import (
    MEMORY,
    REPEATED,
    Simulated,
    functions_of,
    record_calls,
    simulated_calls,
)
from tileweave import ops
from tileweave.ops.core.registry import OPERATORS
from tileweave.ops.moe import local_kernels, row_exchange
from tileweave.ops.moe.kernels.grouped_gemm import grouped_gemm
from tileweave.ops.moe.kernels.quantize import quantize_program
from tileweave.ops.moe.kernels.routing import routing_program


@pytest.fixture
def simulated(monkeypatch):
    with simulated_calls(monkeypatch, row_exchange) as calls:
        yield calls


def inputs(dtype=torch.float32, hidden=24, seed=4):
    generator = torch.Generator().manual_seed(seed)
    ids = random_ids(1, 5, 3, 4, generator)[0]
    x, weights = torch.randn(5, hidden, generator=generator), torch.rand(5, 3, generator=generator)
    return x.to(dtype), ids, weights


@pytest.mark.parametrize("hidden", [24, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_programs_and_torch_return_the_same_bits(simulated, dtype, hidden):
    """They add in different orders, so sums are exact."""
    x, ids, weights = inputs(dtype, hidden)
    x, weights = (x * 4).round(), (weights * 8).round() / 8
    results = []
    for transport in ("ldst", "nccl"):
        rows, offsets, handle = ops.dispatch(
            x, ids, weights, num_experts=4, capacity=6, transport=transport
        )
        results.append((rows, offsets, ops.combine(rows, handle)))
    assert simulated == ["dispatch", "combine"]
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))
    assert results[0][2].any()


def test_one_program_for_all_numbers_of_tokens(simulated, monkeypatch):
    built = []
    for op in (OPERATORS["dispatch"], OPERATORS["combine"]):

        def program(problem, build=op.program):
            built.append((problem.op, problem.is_padded))
            return build(problem)

        monkeypatch.setattr(op, "program", staticmethod(program))
    x, ids, weights = inputs()
    sums = torch.where((ids >= 0) & (ids < 4), weights, 0).sum(-1, keepdim=True)
    for tokens in (5, 3, 0, 4):
        of_call = (tensor[:tokens] for tensor in (x, ids, weights))
        rows, _, handle = ops.dispatch(*of_call, num_experts=4, max_tokens=5, transport="ldst")
        out = torch.full((tokens, 24), torch.nan)
        assert ops.combine(rows, handle, out=out) is out
        assert torch.equal(out, ops.combine(rows, handle))
        assert torch.allclose(out, (x * sums)[:tokens], atol=1e-6)
    assert simulated == ["dispatch", "combine", "combine"] * 4
    assert built == [("dispatch", True), ("combine", True)]


def test_gradients_by_programs(simulated):
    x, ids, weights = inputs(seed=1)
    gate_up, down = torch.randn(4, 12, 24) / 4, torch.randn(4, 24, 6) / 2
    given = [tensor.requires_grad_() for tensor in (x, weights, gate_up, down)]
    out = ops.expert_mlp(x, ids, weights, gate_up, down, transport="ldst")
    right = mixture(x[None], ids[None], weights[None], gate_up, down)[0]
    assert torch.allclose(out, right, atol=1e-5)
    gradients = (torch.autograd.grad(result.square().sum(), given) for result in (out, right))
    for actual, expected in zip(*gradients, strict=True):
        assert torch.allclose(actual, expected, atol=1e-4)
    assert simulated == ["dispatch", "combine", "dispatch", "combine"]


def test_quantized_mlp_by_programs(simulated, monkeypatch):
    """All steps but the quantization of tokens run as kernels in the simulator."""
    simulate_kernels(monkeypatch)
    x, ids, weights = inputs(torch.bfloat16, 144)
    tensors, scales = moe_on_ranks.quantized_layer(
        moe_on_ranks.Layer(per_rank=4, hidden=144, width=128), 0, torch.bfloat16
    )
    options = {"capacity": 6, "quant": "fp8_1x128"} | scales
    out, right = (
        ops.expert_mlp(x, ids, weights, *tensors[2:], transport=transport, **options)
        for transport in ("ldst", "nccl")
    )
    assert simulated == ["dispatch", "dispatch", "combine"] and out.any()
    assert torch.equal(out, right)
    built = [build for build, *_ in local_kernels._KERNELS]
    assert built == [routing_program, grouped_gemm, quantize_program, grouped_gemm]
    monkeypatch.undo()
    by_torch = ops.expert_mlp(x, ids, weights, *tensors[2:], **options)
    assert (out - by_torch).float().norm() < 1e-2 * out.float().norm()


def test_a_repeated_call_enqueues_addresses(simulated, monkeypatch):
    record_calls(monkeypatch)
    x, ids, weights = inputs()
    for _ in range(2):
        rows, _, handle = ops.dispatch(x, ids, weights, num_experts=4, transport="ldst")
    assert simulated == ["dispatch"]
    tables = (table.data_ptr() for table in handle.tables[:2])
    assert Simulated.enqueued == [(x.data_ptr(), *tables, MEMORY, rows.data_ptr())]
    y, out = torch.ones(rows.shape), torch.empty(x.shape)
    ops.combine(y, handle, out=torch.empty(x.shape))
    ops.combine(y, handle, out=out)
    read = (tensor.data_ptr() for tensor in (y, weights, *handle.tables))
    assert Simulated.enqueued[1:] == [(*read, MEMORY, out.data_ptr())]
    assert simulated == ["dispatch", "combine"]
    with pytest.raises(tw.TileWeaveError, match="out shares memory with y"):
        ops.combine(y, handle, out=y[:5])


def test_a_repeated_combine_checks_nothing(simulated, monkeypatch):
    record_calls(monkeypatch)
    x, ids, weights = inputs()
    rows, _, handle = ops.dispatch(x, ids, weights, num_experts=4, transport="ldst")
    ops.combine(rows, handle)
    right = ["call", "combine", "as_read", *REPEATED]
    assert functions_of(lambda: ops.combine(rows, handle)) == right
    with pytest.raises(tw.TileWeaveError, match="y has shape"):
        ops.combine(rows[1:], handle)
