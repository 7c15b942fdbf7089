"""``tileweave.compat.deep_ep`` on ranks that are processes, and what it refuses."""

from __future__ import annotations

import inspect
from unittest import mock

import pytest
import torch

import tileweave as tw
from tests.ops.core.test_torch import assert_right
from tests.ops.moe import deep_ep_on_ranks as on_ranks
from tileweave.compat.deep_ep import Buffer, Config, EventOverlap


@pytest.mark.parametrize("counts", [[5, 5], [0, 7], [0, 0]])
def test_exchange(two, counts):
    assert_right(two.run(on_ranks.exchange, counts))


def test_exchange_of_four(four):
    assert_right(four.run(on_ranks.exchange, [3, 8, 0, 5]))
    assert_right(four.run(on_ranks.low_latency, [3, 8, 0, 5], False, True))


def test_fp8(two):
    assert_right(two.run(on_ranks.quantized_exchange, [5, 3]))


def test_num_worst_tokens(two):
    assert_right(two.run(on_ranks.worst, [6, 2]))


@pytest.mark.parametrize(("use_fp8", "has_hook"), [(False, False), (True, True)])
def test_low_latency(two, use_fp8, has_hook):
    assert_right(two.run(on_ranks.low_latency, [6, 2], use_fp8, has_hook))


def test_ranks_that_disagree(two):
    for message in two.run(on_ranks.unequal_worst_tokens):
        assert "capacity 20" in message and "capacity 21" in message


X, IDS = torch.ones(2, 128), torch.tensor([[0, 1], [1, -1]])
WEIGHTS = torch.ones(IDS.shape)


def dispatched(**options):
    buffer = Buffer()
    layout = buffer.get_dispatch_layout(IDS, 2)
    names = "num_tokens_per_rank", "num_tokens_per_expert", "is_token_in_rank"
    given = dict(zip(names, (layout[0], *layout[2:4]), strict=True))
    return buffer.dispatch(**({"x": X} | given | options))


def combined(x, **options):
    return Buffer().combine(x, dispatched()[4], **options)


def low_latency(**options):
    return Buffer().low_latency_dispatch(X, IDS, 2, 2, **options)


def low_latency_combined(weights=WEIGHTS, **options):
    rows, _, handle, *_ = low_latency(use_fp8=False)
    return Buffer().low_latency_combine(rows, IDS, weights, handle, **options)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Buffer(comm=1), "Buffer: comm is given; expected None"),
        (lambda: Buffer().get_dispatch_layout(IDS, 0), "num_experts=0; expected a positive mult"),
        (lambda: dispatched(is_token_in_rank=None), "is_token_in_rank is None; expected the resul"),
        (
            lambda: dispatched(x=torch.ones(3, 128)),
            r"is_token_in_rank has shape \(2, 1\); expected \(3, 1\) for x of shape \(3, 128\)",
        ),
        (lambda: dispatched(topk_idx=IDS), "topk_weights=None; expected a dense"),
        (lambda: dispatched(num_worst_tokens=1), "num_worst_tokens=1; expected 0, or at least 2"),
        (
            lambda: dispatched(x=(X, X[:1])),
            r"scales has shape \(1, 128\); expected \(2, columns\)",
        ),
        (lambda: dispatched(x=(X, X.double())), "scales are of torch.float64; expected a type of"),
        (lambda: dispatched(handle=dispatched()[4], topk_idx=IDS), "topk_idx is given; expected N"),
        (lambda: combined(X[:1]), r"x has shape \(1, 128\); expected \(2, columns\)"),
        (lambda: low_latency(use_ue8m0=True), "use_ue8m0=True; expected False"),
        (
            lambda: low_latency(dispatch_wait_recv_cost_stats=X),
            "dispatch_wait_recv_cost_stats is given; expected None",
        ),
        (lambda: low_latency_combined(use_logfmt=True), "use_logfmt=True; expected False"),
        (
            lambda: low_latency_combined(WEIGHTS[:1]),
            r"topk_weights has shape \(1, 2\); expected \(2, 2\) for this handle",
        ),
    ],
)
def test_refused(call, message):
    with pytest.raises(tw.TileWeaveError, match=message):
        call()


def test_streams(monkeypatch):
    """With stand-ins for CUDA: what waits for what, and which streams use the tensors."""
    cuda, x = mock.MagicMock(), mock.MagicMock(torch.Tensor, is_cuda=True)
    monkeypatch.setattr(torch, "cuda", cuda)
    current, stream = cuda.current_stream.return_value, cuda.Stream.return_value
    result, event = Buffer()._run(lambda x: [x], (x,), None, True)
    assert result == [x] and x.record_stream.mock_calls == [mock.call(stream), mock.call(current)]
    stream.wait_event.assert_called_once_with(current.record_event.return_value)
    event.current_stream_wait()
    current.wait_event.assert_called_once_with(stream.record_event.return_value)
    Buffer()._run(lambda x: [x], (x,), EventOverlap("previous"), True)
    stream.wait_event.assert_called_with("previous")
    _, event = Buffer()._run(lambda x: [x], (x,), EventOverlap("previous"), False)
    current.wait_event.assert_called_with("previous")
    assert event.event is None


def test_settings(monkeypatch):
    monkeypatch.setattr(Buffer, "num_sms", 20)
    Buffer.set_num_sms(24)
    assert Buffer.get_dispatch_config(8) == Buffer.get_combine_config(8) == Config(num_sms=24)
    assert Config().get_nvl_buffer_size_hint(14336, 8) == 0
    assert Buffer.get_low_latency_rdma_size_hint(128, 7168, 8, 256) == 3 * 8 * 128 * 7168 * 2


PARAMETERS = {
    "__init__": "group num_nvl_bytes num_rdma_bytes low_latency_mode num_qps_per_rank "
    "allow_nvlink_for_low_latency_mode allow_mnnvl explicitly_destroy comm",
    "get_dispatch_layout": "topk_idx num_experts previous_event async_finish "
    "allocate_on_comm_stream",
    "dispatch": "x handle num_tokens_per_rank num_tokens_per_rdma_rank is_token_in_rank "
    "num_tokens_per_expert topk_idx topk_weights expert_alignment num_worst_tokens config "
    "previous_event async_finish allocate_on_comm_stream",
    "combine": "x handle topk_weights bias config previous_event async_finish "
    "allocate_on_comm_stream",
    "low_latency_dispatch": "x topk_idx num_max_dispatch_tokens_per_rank num_experts "
    "cumulative_local_expert_recv_stats dispatch_wait_recv_cost_stats use_fp8 round_scale "
    "use_ue8m0 async_finish return_recv_hook",
    "low_latency_combine": "x topk_idx topk_weights handle use_logfmt zero_copy async_finish "
    "return_recv_hook out combine_wait_recv_cost_stats",
}
"""Those of the methods of ``deep_ep.Buffer`` 1.2.1."""


@pytest.mark.parametrize("method", PARAMETERS)
def test_parameters_of_deep_ep(method):
    names = list(inspect.signature(getattr(Buffer, method)).parameters)
    assert names == ["self", *PARAMETERS[method].split()]
