"""Calls of decode_attention by its program, which the simulator runs on one rank; and repeated
calls."""

from __future__ import annotations

import pytest
import torch

import tileweave as tw
from tests.ops.decode.decode_on_ranks import Call
from tests.ops.simulated_calls import (
    MEMORY,
    REPEATED,
    Simulated,
    functions_of,
    record_calls,
    simulated_calls,
)
from tileweave import ops
from tileweave.ops.decode import decode_attention

CALL = Call(lengths=(37, 0), heads=2, kv_heads=1, dim=64, v_dim=64, page_size=16, table=3)
CALLS = {
    "bf16": CALL,
    "fp8": CALL._replace(quantized=True),
    "latent": CALL._replace(dim=576, v_dim=512, latent=True, page_size=32, table=2),
}


@pytest.fixture
def simulated(monkeypatch):
    with simulated_calls(monkeypatch, decode_attention) as calls:
        yield calls


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_the_program_and_torch_return_the_same_and_repeated_calls_enqueue_addresses(
    simulated, monkeypatch, call
):
    record_calls(monkeypatch)
    given = call.arguments(0, 1)
    for name in ("k_cache", "v_cache"):
        if given[name] is not None:
            given[name] = given[name].float().nan_to_num().to(given[name].dtype)
    results = [
        ops.decode_attention(**given, return_lse=True, strategy=strategy)
        for strategy in ("fused", "nccl", "fused", "fused")
    ]
    for one, other in zip(*results[:2], strict=True):
        assert one.dtype == other.dtype
        assert torch.allclose(one.float(), other.float(), rtol=1e-2, atol=1e-2)
    assert simulated == ["decode_attention"] and len(Simulated.enqueued) == 2
    out, lse = results[-1]
    tensors = *(tensor for tensor in given.values() if tensor is not None), lse
    assert Simulated.enqueued[-1] == (*(t.data_ptr() for t in tensors), MEMORY, out.data_ptr())


@pytest.mark.parametrize("is_new", [True, False])
def test_a_repeated_call_checks_nothing(simulated, monkeypatch, is_new):
    record_calls(monkeypatch)
    given = CALL.arguments(0, 1) | {"strategy": "fused"}
    if not is_new:
        given["out"] = torch.empty_like(given["q"])
    ops.decode_attention(**given)
    right = ["call", "decode_attention", *REPEATED, *["mark_written"] * (not is_new)]
    assert functions_of(lambda: ops.decode_attention(**given)) == right
    if not is_new:
        with pytest.raises(tw.TileWeaveError, match="out shares memory with q"):
            ops.decode_attention(**given | {"out": given["q"]})
    assert len(Simulated.enqueued) == 1


@pytest.mark.parametrize("value", [1, "no", None])
def test_only_booleans_ask_for_logarithms(simulated, monkeypatch, value):
    """Also after a call with an equal value."""
    record_calls(monkeypatch)
    given = CALL.arguments(0, 1) | {"strategy": "fused"}
    ops.decode_attention(**given, return_lse=True)
    with pytest.raises(tw.TileWeaveError, match=f"return_lse={value!r}; expected True or False"):
        ops.decode_attention(**given, return_lse=value)
