"""Calls of all_reduce_rms_norm by its program, which the simulator runs on one rank; and repeated
calls."""

from __future__ import annotations

import re
import threading

import pytest
import torch

import tileweave as tw
from tests.ops.simulated_calls import (
    MEMORY,
    REPEATED,
    Simulated,
    functions_of,
    record_calls,
    simulated_calls,
)
from tileweave import ops
from tileweave.ops.core import checks
from tileweave.ops.norm import all_reduce_rms_norm


@pytest.fixture
def simulated(monkeypatch):
    with simulated_calls(monkeypatch, all_reduce_rms_norm) as calls:
        yield calls


@pytest.fixture
def native(monkeypatch):
    """Let calls be recorded."""
    record_calls(monkeypatch)


def given(dtype=torch.bfloat16, shape=(2, 2, 200)):
    torch.manual_seed(3)
    x, residual = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
    return x, residual, torch.randn(shape[-1]).to(dtype), torch.randn(shape[-1]).to(dtype)


@pytest.mark.parametrize("quant", [None, "fp8", "fp8_1x128"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_program_and_torch_return_the_same(simulated, dtype, quant):
    """The mean is added in another order, which may change a last bit."""
    x, residual, weight, bias = given(dtype)
    options = {"bias": bias, "quant": quant, "scale": torch.tensor(0.1) if quant == "fp8" else None}
    program, right = (
        ops.all_reduce_rms_norm(x, residual, weight, 1e-5, strategy=strategy, **options)
        for strategy in ("one_shot", "nccl")
    )
    assert simulated == ["all_reduce_rms_norm_local"]
    assert torch.equal(program[-1], right[-1])
    assert [t.dtype for t in program] == [t.dtype for t in right]
    step = 0.07 if quant else 2**-7
    for one, other in zip(program, right, strict=True):
        assert torch.allclose(one.float(), other.float(), rtol=step, atol=1e-6)


@pytest.mark.parametrize("valid", [0, 3, 9])
def test_rows_that_are_not_valid_keep_their_values(simulated, valid):
    x, residual, weight, _ = given(shape=(4, 200))
    number = torch.tensor([valid], dtype=torch.int32)
    for strategy in ("one_shot", "nccl"):
        out, residual_out = torch.full_like(x, 7), torch.full_like(x, 8)
        ops.all_reduce_rms_norm(
            x, residual, weight, num_tokens=number, out=out, residual_out=residual_out,
            strategy=strategy,
        )  # fmt: skip
        right = ops.all_reduce_rms_norm(x, residual, weight, strategy="nccl")
        assert torch.allclose(out[:valid].float(), right[0][:valid].float(), rtol=2**-7)
        assert torch.equal(residual_out[:valid], right[1][:valid])
        if strategy == "nccl":  # simulated programs return tensors of their own
            assert (out[valid:] == 7).all() and (residual_out[valid:] == 8).all()


@pytest.mark.parametrize(
    ("number", "message"),
    [
        (torch.ones(2, dtype=torch.int32), "num_tokens has shape (2,); expected one element"),
        (torch.ones(1), "num_tokens is of torch.float32; expected torch.int32"),
        (3, "num_tokens"),
    ],
)
def test_numbers_that_are_refused(number, message):
    x, residual, weight, _ = given(shape=(4, 200))
    with pytest.raises(tw.TileWeaveError, match=re.escape(message)):
        ops.all_reduce_rms_norm(x, residual, weight, num_tokens=number)


def test_a_program_works_in_place(simulated):
    x, residual, weight, _ = given()
    right = ops.all_reduce_rms_norm(x, residual, weight, strategy="one_shot")
    actual = ops.all_reduce_rms_norm(
        x, residual, weight, out=x, residual_out=residual, strategy="one_shot"
    )
    assert actual[0] is x and actual[1] is residual
    assert torch.equal(x, right[0]) and torch.equal(residual, right[1])


def test_a_repeated_call_enqueues_addresses(simulated, native):
    x, residual, weight, bias = given()
    for _ in range(3):
        out, scales, residual_out = ops.all_reduce_rms_norm(
            x, residual, weight, bias=bias, quant="fp8_1x128", strategy="one_shot"
        )
    assert len(simulated) == 1 and len(Simulated.enqueued) == 2
    tensors = x, residual, weight, bias, residual_out, scales
    assert Simulated.enqueued[-1] == (*(t.data_ptr() for t in tensors), MEMORY, out.data_ptr())
    other = ops.all_reduce_rms_norm(x, residual, weight, eps=1e-3, strategy="one_shot")
    assert len(simulated) == 2 and len(other) == 2


@pytest.mark.parametrize("is_new", [True, False])
def test_a_repeated_call_checks_nothing(simulated, native, is_new):
    x, residual, weight, _ = given()
    memory = {} if is_new else {"out": torch.empty_like(x), "residual_out": residual}

    def call():
        return ops.all_reduce_rms_norm(x, residual, weight, strategy="one_shot", **memory)

    call()
    right = ["call", "all_reduce_rms_norm", *([] if is_new else ["_completed"]), *REPEATED]
    assert functions_of(call) == right + ["mark_written"] * (not is_new)
    assert len(Simulated.enqueued) == 1


X, RESIDUAL, OUT, RESIDUAL_OUT = range(0, 8, 2)
"""Rows of the memory of ``repeated`` at which tensors of two rows begin."""


@pytest.fixture
def repeated(simulated, native):
    """Return a function that calls the operator on rows of one memory, after two such calls."""
    memory, weight = torch.zeros(8, 200, dtype=torch.bfloat16), given()[2]

    def call(*begins):
        x, residual, out, residual_out = (memory[row : row + 2] for row in begins)
        ops.all_reduce_rms_norm(
            x, residual, weight, out=out, residual_out=residual_out, strategy="one_shot"
        )

    for _ in range(2):
        call(X, RESIDUAL, OUT, RESIDUAL_OUT)
    assert len(Simulated.enqueued) == 1
    return call


@pytest.mark.parametrize(
    ("begins", "message"),
    [
        ((X, RESIDUAL, X + 1, RESIDUAL_OUT), "out shares memory with x; expected the same"),
        ((X, RESIDUAL, RESIDUAL + 1, RESIDUAL_OUT), "out shares memory with residual; expected"),
        ((X, RESIDUAL, OUT, X + 1), "residual_out shares memory with x; expected the same"),
        ((X, RESIDUAL, OUT, OUT), "out shares memory with residual_out; expected memory of its"),
    ],
)
def test_a_repeated_call_refuses_memory_that_overlaps(repeated, begins, message):
    with pytest.raises(tw.TileWeaveError, match=message):
        repeated(*begins)
    assert len(Simulated.enqueued) == 1


@pytest.mark.parametrize(
    "begins",
    [(X, RESIDUAL, X, RESIDUAL), (X, RESIDUAL, RESIDUAL, X), (X, X, OUT, RESIDUAL_OUT)],
)
def test_a_repeated_call_may_be_in_place(repeated, begins):
    repeated(*begins)
    assert len(Simulated.enqueued) == 2


def test_arguments_with_gaps_are_copied(simulated, native):
    x, residual, weight, _ = given(shape=(4, 200))
    wide = torch.zeros(4, 400, dtype=x.dtype)
    wide[:, :200] = x
    right = ops.all_reduce_rms_norm(x, residual, weight, strategy="one_shot")
    for _ in range(2):
        with pytest.warns(UserWarning, match="x of shape .* is copied in each call") as _:
            checks._warned.clear()
            actual = ops.all_reduce_rms_norm(wide[:, :200], residual, weight, strategy="one_shot")
        assert torch.equal(actual[0], right[0])
    assert not Simulated.enqueued


@pytest.mark.parametrize("eps", [True, "1"])
def test_numbers_of_another_type_are_refused_after_an_equal_one(simulated, native, eps):
    x, residual, weight, _ = given()
    for _ in range(2):
        ops.all_reduce_rms_norm(x, residual, weight, 1.0, strategy="one_shot")
    assert len(Simulated.enqueued) == 1
    with pytest.raises(tw.TileWeaveError, match=f"eps={eps!r}; expected a number"):
        ops.all_reduce_rms_norm(x, residual, weight, eps, strategy="one_shot")
    assert len(Simulated.enqueued) == 1


class Subclass(torch.Tensor):
    """Subclass of tensors."""


OTHERS = {
    "meta": lambda x: x.to("meta"),
    "negative": lambda x: torch._neg_view(-x),
    "subclass": lambda x: x.as_subclass(Subclass),
    "gap": lambda x: torch.cat([x, x], -1)[..., : x.shape[-1]],
    "unaligned": lambda x: torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape),
}
"""Tensors of the same values and shape that no recorded call accepts."""


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
@pytest.mark.filterwarnings("ignore:all_reduce_rms_norm. x of shape:UserWarning")
def test_a_repeated_call_is_of_equal_tensors(simulated, native, other):
    x, residual, weight, _ = given()

    def call(x):
        return ops.all_reduce_rms_norm(x, residual.to(x.device), weight.to(x.device))

    right = call(x)
    call(x)
    assert len(Simulated.enqueued) == 1
    results = call(other(x))
    assert len(Simulated.enqueued) == 1
    assert results[0].is_meta or all(map(torch.equal, results, right))


@pytest.mark.parametrize("context", [torch.autocast, torch.profiler.profile])
def test_observed_calls_are_not_repeated(simulated, native, context):
    x, residual, weight, _ = given()
    for _ in range(2):
        ops.all_reduce_rms_norm(x, residual, weight, strategy="one_shot")
    assert len(Simulated.enqueued) == 1
    with context("cpu") if context is torch.autocast else context() as profile:
        ops.all_reduce_rms_norm(x, residual, weight, strategy="one_shot")
    if context is not torch.autocast:
        names = [event.name for event in profile.events()]
        assert "tileweave::all_reduce_rms_norm" in names


def test_a_thread_repeats_its_own_calls_only(simulated, native):
    x, residual, weight, _ = given()
    enqueued = []

    def call():
        for _ in range(2):
            ops.all_reduce_rms_norm(x, residual, weight, strategy="one_shot")
            enqueued.append(len(Simulated.enqueued))

    call()
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    assert enqueued == [0, 1, 1, 2]
