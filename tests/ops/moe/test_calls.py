"""Calls of dispatch and combine by their programs, which the simulator runs on one rank; and
repeated calls."""

from __future__ import annotations

import types

import ml_dtypes
import numpy as np
import pytest
import torch

import tileweave as tw
from tests.groups import one_rank, open_sessions
from tests.ops.moe.by_definition import mixture, random_ids
from tileweave import ops
from tileweave.ops.core import call
from tileweave.ops.core.cache import OpCache
from tileweave.ops.core.compiled import CompiledOp
from tileweave.ops.moe import row_exchange
from tileweave.runtime.executor import recorded_calls
from tileweave.runtime.executor.recorded_calls import RecordedCall
from tileweave.runtime.kernel.kernel import Kernel
from tileweave.runtime.plans.parameters import parameters_of

MEMORY = 0xABC0


class Simulated(CompiledOp):
    """Kernel that the simulator runs."""

    enqueued: list
    calls: list

    def __init__(self, steps, session):
        self._session, self.memory, self.run = session, [], self._run
        self._steps, self._names = steps, [p.name for p in parameters_of(steps)]
        self._kernel = Kernel(None, None, {"counter": torch.zeros(1)})

    def _run(self, *tensors):
        *inputs, out = tensors
        arrays = [_array(tensor) for tensor in inputs]
        given = dict(zip(self._names, arrays, strict=False))
        result = tw.simulate(self._steps, 1, [given], epochs=1)[0][self._names[-1]]
        _array(out)[...] = result
        Simulated.calls.append(self._steps.attrs["global_symbol"])

    def recorded_call(self, inputs, out):
        def enqueue(*addresses):
            Simulated.enqueued.append(addresses)
            return 0

        recorded = RecordedCall(self._session, (None, False), [], [self._kernel], enqueue)
        return recorded, [*(t.data_ptr() for t in inputs), MEMORY, out.data_ptr()]


def _array(tensor: torch.Tensor) -> np.ndarray:
    """Return the memory of a tensor as an array."""
    tensor = tensor.detach()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


@pytest.fixture
def simulated(monkeypatch):
    """Run the programs of a session of one rank in the simulator. Return the names of those that
    ran."""
    watchdog = types.SimpleNamespace(raise_if_deadlocked=lambda: None)
    session = types.SimpleNamespace(group=one_rank(), watchdog=watchdog, name="")
    open_sessions(monkeypatch, session)
    cache = OpCache(session)
    monkeypatch.setattr(row_exchange, "prepared", lambda _: cache)
    monkeypatch.setattr(row_exchange, "obstacle_of_ranks", lambda *_: None)
    for name in ("__init__", "recorded_call"):
        monkeypatch.setattr(CompiledOp, name, getattr(Simulated, name))
    monkeypatch.setattr(CompiledOp, "_run", Simulated._run, raising=False)
    Simulated.calls, Simulated.enqueued = [], []
    recorded_calls.invalidate()
    yield Simulated.calls
    recorded_calls.invalidate()


def inputs(dtype=torch.float32, hidden=24, seed=4):
    generator = torch.Generator().manual_seed(seed)
    ids = random_ids(1, 5, 3, 4, generator)[0]
    x, weights = torch.randn(5, hidden, generator=generator), torch.rand(5, 3, generator=generator)
    return x.to(dtype), ids, weights


@pytest.mark.parametrize("hidden", [24, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_programs_and_torch_return_the_same_bits(simulated, dtype, hidden):
    x, ids, weights = inputs(dtype, hidden)
    results = []
    for transport in ("ldst", "nccl"):
        rows, offsets, handle = ops.dispatch(
            x, ids, weights, num_experts=4, capacity=6, transport=transport
        )
        results.append((rows, offsets, ops.combine(rows, handle)))
    assert simulated == ["dispatch", "combine"]
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))
    assert results[0][2].any()


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


def test_a_repeated_call_enqueues_addresses(simulated, monkeypatch):
    monkeypatch.setattr(call, "has_driver", lambda device: True)
    monkeypatch.setattr(call, "current_stream", lambda device: (7, False))
    monkeypatch.setattr(call, "library", lambda: "native")
    x, ids, weights = inputs()
    for _ in range(2):
        rows, _, handle = ops.dispatch(x, ids, weights, num_experts=4, transport="ldst")
    assert simulated == ["dispatch"]
    tables = (table.data_ptr() for table in handle.tables[:2])
    assert Simulated.enqueued == [(x.data_ptr(), *tables, MEMORY, rows.data_ptr())]
    y, out = torch.ones(rows.shape), torch.empty(x.shape)
    ops.combine(y, handle, out=torch.empty(x.shape))
    ops.combine(y, handle, out=out)
    tables = weights.data_ptr(), handle.tables.place.data_ptr()
    assert Simulated.enqueued[1:] == [(y.data_ptr(), *tables, MEMORY, out.data_ptr())]
    assert simulated == ["dispatch", "combine"]
    with pytest.raises(tw.TileWeaveError, match="out shares memory with y"):
        ops.combine(y, handle, out=y[:5])
