"""A repeated call of dispatch or expert_mlp is one native call on memory of its own.

The simulator runs the kernels, also those of the native call: a stand-in finds their tensors by the
addresses that it receives.
"""

from __future__ import annotations

import ctypes
import sys
import types

import pytest
import torch

import tileweave as tw
from tests.ops.moe.by_definition import mixture, random_ids
from tests.ops.moe.simulated_kernels import simulate_kernels
from tests.ops.simulated_calls import Simulated, record_calls, simulated_calls
from tileweave import ops
from tileweave.ops.collectives import transport
from tileweave.ops.core import call
from tileweave.ops.core.compiled import CompiledOp
from tileweave.ops.moe import call_sequence, row_exchange
from tileweave.ops.moe.call_sequence import Recorder
from tileweave.ops.moe.local_kernels import LocalKernel
from tileweave.runtime.executor import recorded_calls
from tileweave.runtime.executor.operations import KernelLaunch, Place
from tileweave.runtime.executor.recorded_calls import RecordedCall

dispatch_module = sys.modules["tileweave.ops.moe.dispatch"]
EXPERTS, TOKENS, CHOICES, HIDDEN, WIDTH = 4, 5, 3, 64, 64


def recorded_call(self, inputs, out):
    """Record a launch of the program in the simulator."""
    tensors = *inputs, out

    def enqueue(*addresses):
        self._run(*map(tensor_at, addresses, tensors))
        return 0

    places = tuple(Place(i, 0) for i in range(len(tensors)))
    launch = KernelLaunch(None, None, LocalKernel(self._run), places)
    call = RecordedCall(self._session, None, [launch], [self._kernel], enqueue)
    return call, [tensor.data_ptr() for tensor in tensors]


def tensor_at(address, like):
    memory = (ctypes.c_uint8 * like.nbytes).from_address(address)
    return torch.frombuffer(memory, dtype=torch.uint8).view(like.dtype).view(like.shape)


@pytest.fixture
def native(monkeypatch):
    """Yield the numbers of kernels that native calls enqueued."""
    enqueued = []

    def enqueuer_of(parts):
        def enqueue(*addresses):
            enqueued.append(sum(len(part.operations) for part in parts))
            for part in parts:
                places = zip(part.places, part.tensors, strict=True)
                tensors = [tensor_at(place.address(addresses), like) for place, like in places]
                for launch in part.operations:
                    args = (tensors[a.index] if isinstance(a, Place) else a for a in launch.args)
                    launch.kernel.launch(*args)
            return 0

        return enqueue

    with simulated_calls(monkeypatch, row_exchange):
        simulate_kernels(monkeypatch)
        record_calls(monkeypatch)
        monkeypatch.setattr(transport, "obstacle_of_ranks", lambda *_: None)
        monkeypatch.setattr(CompiledOp, "recorded_call", recorded_call)
        monkeypatch.setattr(call_sequence, "op_cache_of", call.op_cache_of)
        monkeypatch.setattr(call_sequence, "enqueuer_of", enqueuer_of)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda _: types.SimpleNamespace())
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        yield enqueued


class Layer:
    """Arguments of calls with equal shapes; each instance has other values."""

    def __init__(self, seed, tokens=TOKENS):
        generator = torch.Generator().manual_seed(seed)

        def random(*shape):
            return torch.randn(shape, generator=generator).bfloat16()

        self.x, self.weights = random(tokens, HIDDEN), random(tokens, CHOICES).float()
        self.ids = random_ids(1, tokens, CHOICES, EXPERTS, generator)[0]
        self.gate_up = random(EXPERTS, 2 * WIDTH, HIDDEN) / 8
        self.down = random(EXPERTS, HIDDEN, WIDTH) / 8

    def dispatch(self, **options):
        arguments = self.x, self.ids, self.weights
        rows, offsets, handle = ops.dispatch(*arguments, **{"num_experts": EXPERTS} | options)
        assert handle.weights is self.weights
        return rows, offsets, handle.dropped, *handle.tables

    def expert_mlp(self, **options):
        arguments = self.x, self.ids, self.weights, self.gate_up, self.down
        return (ops.expert_mlp(*arguments, **options),)


KERNELS = {"dispatch": 3, "expert_mlp": 6}


@pytest.mark.parametrize("capacity", [None, 7])
@pytest.mark.parametrize("op", KERNELS)
def test_a_repeated_call_is_one_native_call(native, op, capacity):
    getattr(Layer(0), op)(capacity=capacity)
    assert native == []
    Simulated.calls.clear()
    results = [getattr(Layer(seed), op)(capacity=capacity) for seed in (1, 2)]
    assert native == [KERNELS[op]] * 2
    for seed, repeated in zip((1, 2), results, strict=True):
        recorded_calls.invalidate()
        expected = getattr(Layer(seed), op)(capacity=capacity)
        for actual, right in zip(repeated, expected, strict=True):
            assert torch.equal(actual, right) and actual.stride() == right.stride()
            assert actual.data_ptr() % 16 == 0
    assert len(native) == 2


def test_weights_of_another_type_are_converted(native):
    """The weights of ``combine`` are fp32."""
    results = []
    for seed in (0, 1):
        layer = Layer(seed)
        layer.weights = layer.weights.bfloat16()
        results = layer.expert_mlp()[0]
    right = mixture(
        layer.x.float()[None], layer.ids[None], layer.weights.float()[None], layer.gate_up.float(),
        layer.down.float(),
    )[0]  # fmt: skip
    assert native == [KERNELS["expert_mlp"]]
    assert torch.allclose(results.float(), right, atol=0.05)


@pytest.mark.parametrize("op", KERNELS)
def test_one_native_call_for_all_numbers_of_tokens(native, op):
    for tokens in (3, 5, 0, 4):
        results = getattr(Layer(1, tokens), op)(max_tokens=5)
    assert native == [KERNELS[op]] * 3
    recorded_calls.invalidate()
    expected = getattr(Layer(1, 4), op)(max_tokens=5)
    assert all(torch.equal(*pair) for pair in zip(results, expected, strict=True))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_experts": 4.0}, "num_experts=4.0; expected"),
        ({"clear_rest": 1}, "clear_rest=1; expected True or False"),
        ({"capacity": [6]}, r"capacity=\[6\]; expected"),
        ({"transport": "nvl"}, "transport='nvl'; expected"),
    ],
)
def test_illegal_options_are_refused_after_a_legal_call(native, options, message):
    Layer(0).dispatch()
    with pytest.raises(tw.TileWeaveError, match=message):
        Layer(0).dispatch(**options)


def test_experts_are_checked_if_asked_for(native, monkeypatch):
    layer = Layer(0)
    layer.dispatch()
    monkeypatch.setenv("TILEWEAVE_CHECK_IDS", "1")
    layer.ids[0, 0] = EXPERTS
    for _ in range(2):
        with pytest.raises(tw.TileWeaveError, match="topk_ids of rank 0 has 4 for choice 0"):
            layer.dispatch()
    assert native == []


@pytest.mark.parametrize("op", KERNELS)
def test_a_call_with_a_gradient_is_not_native(native, op):
    getattr(Layer(0), op)()
    layer = Layer(0)
    layer.x.requires_grad_()
    assert getattr(layer, op)()[0].requires_grad
    assert native == []


def test_a_call_that_copies_an_operand_is_not_native(native):
    layer = Layer(0)
    layer.ids = layer.ids.t().contiguous().t()
    first, second = layer.dispatch(), layer.dispatch()
    assert native == [] and all(map(torch.equal, first, second))


def test_a_call_that_cannot_be_recorded_is_not_tried_again(native, monkeypatch):
    recorders = []

    def recorder(*arguments):
        recorders.append(arguments)
        return Recorder(*arguments)

    monkeypatch.setattr(dispatch_module, "Recorder", recorder)
    layer = Layer(0)
    for _ in range(3):
        layer.dispatch(transport="nccl")
    assert native == [] and len(recorders) == 1


def test_a_call_whose_operator_lost_its_memory_is_recorded_again(native):
    layer = Layer(0)
    first = layer.dispatch()
    operators = call.op_cache_of(None).operators
    for operator in list(operators.values()):
        operator._kernel.free()
    operators.clear()
    results = [layer.dispatch() for _ in range(2)]
    assert native == [KERNELS["dispatch"]]
    assert all(torch.equal(*pair) for result in results for pair in zip(first, result, strict=True))


def test_a_call_uses_its_operators(native):
    """All ranks evict the same operator: the one whose latest use is the oldest."""
    Layer(0).dispatch()
    operators = call.op_cache_of(None).operators.values()
    before = [operator.last_used for operator in operators]
    Layer(0).dispatch()
    after = [operator.last_used for operator in operators]
    assert min(after) > max(before)
    assert after == sorted(after)


def test_a_graph_records_no_native_call(native, monkeypatch):
    Layer(0).dispatch()
    monkeypatch.setattr(call, "current_stream", lambda device: (7, True))
    monkeypatch.setattr(call, "capturing", lambda: True)
    for _ in range(2):
        Layer(0).dispatch()
    assert native == []


MODES = [torch.enable_grad, torch.no_grad, torch.inference_mode]


@pytest.mark.parametrize("op", KERNELS)
@pytest.mark.parametrize("first", MODES)
@pytest.mark.parametrize("second", MODES)
def test_results_belong_to_the_mode_of_the_call(native, op, first, second):
    with first():
        getattr(Layer(0), op)()
    with second():
        results = getattr(Layer(0), op)()
    assert native == [KERNELS[op]]
    assert {x.is_inference() for x in results} == {second is torch.inference_mode}
    assert not any(x.requires_grad for x in results)


def test_weights_that_require_a_gradient_need_none_without_one(native):
    layer = Layer(0)
    layer.gate_up.requires_grad_()
    with torch.no_grad():
        for _ in range(2):
            layer.expert_mlp()
    assert native == [KERNELS["expert_mlp"]]
    assert layer.expert_mlp()[0].requires_grad
    assert KERNELS["expert_mlp"] not in native[1:]


@pytest.mark.parametrize("op", KERNELS)
def test_a_profiled_call_passes_the_dispatcher(native, op):
    for _ in range(2):
        getattr(Layer(0), op)()
    with torch.profiler.profile() as profile:
        getattr(Layer(0), op)()
    assert native == [KERNELS[op]]
    assert f"tileweave::{op}" in [event.name for event in profile.events()]


@pytest.mark.parametrize("op", KERNELS)
def test_a_call_in_another_stream_is_recorded_again(native, monkeypatch, op):
    stream = 7
    monkeypatch.setattr(call, "current_stream", lambda device: (stream, False))
    counts = []
    for stream in (7, 7, 8, 8, 7):  # noqa: B007
        getattr(Layer(0), op)()
        counts.append(len(native))
    assert counts == [0, 1, 1, 2, 3]


@pytest.mark.parametrize("op", KERNELS)
def test_no_call_is_repeated_after_the_session(native, op):
    getattr(Layer(0), op)()
    recorded_calls.invalidate()
    getattr(Layer(0), op)()
    assert native == []
