"""Calls bypass torch's dispatcher only if nothing observes it."""

from __future__ import annotations

import warnings
from contextlib import nullcontext

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.profiler import profile
from torch.utils.flop_counter import FlopCounterMode

import tileweave as tw
from tileweave import ops
from tileweave.ops.core import checks
from tileweave.ops.core.library import needs_dispatcher


class Subclass(torch.Tensor):
    """Tensor whose results of torch functions have its class, too."""


def tensor(**how) -> torch.Tensor:
    return torch.zeros(2, 2, **how)


@pytest.mark.parametrize(
    ("around", "make"),
    [
        (nullcontext, tensor),
        (nullcontext, lambda: torch.nn.Parameter(tensor(), requires_grad=False)),
        (torch.no_grad, lambda: torch.nn.Parameter(tensor())),
        (torch.inference_mode, tensor),
        (torch.inference_mode, lambda: torch.nn.Parameter(tensor())),
        (nullcontext, lambda: tensor()[:1].t()),
    ],
)
def test_nobody_listens(around, make):
    with around():
        assert not needs_dispatcher((make(), "name", None, True, 3, 0.5, torch.float16))


@pytest.mark.parametrize(
    ("around", "make"),
    [
        (nullcontext, lambda: tensor(requires_grad=True)),
        (nullcontext, lambda: torch.nn.Parameter(tensor())),
        (nullcontext, lambda: tensor(device="meta")),
        (nullcontext, lambda: tensor().as_subclass(Subclass)),
        (nullcontext, lambda: tensor(dtype=torch.complex64).conj().imag),
        (nullcontext, lambda: tensor(dtype=torch.complex64).conj()),
        (FakeTensorMode, tensor),
        (lambda: torch.autocast("cpu"), tensor),
        (forward_ad.dual_level, tensor),
        (lambda: FlopCounterMode(display=False), tensor),
        (lambda: torch.device("cpu"), tensor),
        (lambda: profile(acc_events=True), tensor),
    ],
)
def test_somebody_listens(around, make):
    with around():
        assert needs_dispatcher(("name", None, make()))


@pytest.mark.parametrize(
    "transform",
    [
        torch.func.vmap,
        torch.func.grad,
        lambda f: make_fx(f),
        lambda f: torch.jit.trace(f, tensor(), check_trace=False),
    ],
)
def test_transforms_listen(transform):
    heard = []

    def function(x):
        heard.append(needs_dispatcher((x,)))
        return x.sum()

    traced = transform(function)
    if not heard:
        traced(tensor())
    assert heard and all(heard)


@pytest.mark.parametrize("op", [ops.all_gather_matmul, ops.matmul_all_reduce])
@pytest.mark.parametrize("where", ["new", "out"])
def test_both_ways_compute_the_same(op, where):
    """Through the dispatcher, which the profiler shows, and past it."""
    a, b = torch.randn(4, 6), torch.randn(6, 8)
    out = torch.empty(4, 8) if where == "out" else None
    past = op(a, b, out=out).clone()
    with profile(acc_events=True) as profiled:
        through = op(a, b, out=out)
    assert torch.equal(past, through) and torch.allclose(past, a @ b)
    seen = {event.key for event in profiled.key_averages()}
    name = f"tileweave::{op.__name__}{'_out' if where == 'out' else ''}"
    assert name in seen


def dual(function, x):
    with forward_ad.dual_level():
        return function(forward_ad.make_dual(x, torch.ones_like(x)))


@pytest.mark.parametrize(
    ("differentiate", "what"),
    [
        (lambda f, x: torch.func.grad(lambda y: f(y).sum())(x), "torch.func"),
        (lambda f, x: torch.func.jacrev(f)(x), "torch.func"),
        (lambda f, x: torch.func.vmap(torch.func.grad(lambda y: f(y).sum()))(x), "torch.func"),
        (lambda f, x: torch.func.jvp(f, (x,), (x,)), "forward mode"),
        (dual, "forward mode"),
    ],
)
def test_functional_gradients_are_refused(differentiate, what):
    with pytest.raises(tw.TileWeaveError) as error:
        differentiate(ops.all_reduce, torch.ones(2, 2))
    assert str(error.value) == (
        f"all_reduce: {what} differentiates it; expected torch.autograd.grad or backward()"
    )


def test_transforms_of_other_tensors_are_no_reason():
    x, constant = torch.ones(3), torch.ones(2)

    def function(y):
        return (y * ops.all_reduce(constant).sum()).sum()

    assert torch.equal(torch.func.grad(function)(x), 2 * torch.ones(3))
    assert torch.equal(torch.func.vmap(ops.all_reduce)(torch.ones(2, 3)), torch.ones(2, 3))


def test_warnings_name_what_the_user_called(monkeypatch):
    monkeypatch.setattr(checks, "_warned", set())
    q, b = torch.randn(1, 4, 2, 9)[..., 1:], torch.randn(8, 8)[:, 1:4].requires_grad_()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ops.ulysses_attention(q, q, q, causal=True)
        ops.all_gather_matmul(torch.ones(4, 8, requires_grad=True), b).sum().backward()
    assert [str(w.message).partition(" of shape")[0] for w in caught] == [
        "ulysses_attention: x of all_to_all",
        "all_gather_matmul: b",
        "gradient of all_gather_matmul: b of matmul_reduce_scatter",
    ]
    assert {w.filename for w in caught} == {__file__}
