"""Scalar options of the wrong type: all public operators refuse them with a ``TileWeaveError`` that
names the operator, the option, its value and what is legal."""

from __future__ import annotations

import inspect
import re
from contextlib import nullcontext
from typing import get_args

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import tileweave as tw
from tileweave import ops
from tileweave.ops.collectives.collective import Collective
from tileweave.ops.core.registry import OPERATORS, operators_of
from tileweave.ops.core.schema import caller_of, parameters_of, type_mismatch

SCALARS = {str, int, float, bool, torch.dtype}
WRONG = {"list": [1], "dict": {"a": 1}, "tensor": torch.zeros(3)}
TRUTH_VALUES = "no", "", 0, 1, None, np.bool_(True), torch.tensor(True)


def calls() -> dict[str, tuple[dict, torch.Tensor | None]]:
    """Return legal arguments of each operator on one rank, and a tensor for ``out``."""
    x, ids = torch.randn(4, 256), torch.zeros(4, 1, dtype=torch.int32)
    q, (pages, lens) = torch.randn(1, 4, 2, 8), torch.zeros(2, 2, dtype=torch.int32)
    cache = torch.randn(1, 4, 2, 8)
    tokens = {"x": x, "topk_ids": ids, "topk_weights": torch.ones(4, 1)}
    rows, _, handle = ops.dispatch(**tokens, num_experts=1)
    gemm, weights = torch.randn(256, 8), torch.randn(1, 16, 256)
    attention = {"q": q, "k": q, "v": q, "causal": True}
    return {
        **{name: ({"x": x}, getattr(ops, name)(x)) for name in operators_of(Collective)},
        "all_gather_matmul": ({"a_shard": x, "b": gemm}, x.new_empty(4, 8)),
        "matmul_reduce_scatter": ({"a": x, "b": gemm}, x.new_empty(4, 8)),
        "matmul_all_reduce": ({"a": x, "b": gemm}, x.new_empty(4, 8)),
        "all_reduce_rms_norm": ({"x": x, "residual": x, "weight": x[0]}, x.clone()),
        "decode_attention": (
            {
                "q": q[0, :2], "k_cache": cache, "v_cache": cache, "block_table": pages[:, None],
                "seq_lens": lens,
            },
            q.new_empty(2, 2, 8),
        ),
        "dispatch": ({**tokens, "num_experts": 1}, None),
        "combine": ({"y": rows, "handle": handle}, x.clone()),
        "expert_mlp": (
            {**tokens, "w_gate_up": weights, "w_down": torch.randn(1, 256, 8)}, None,
        ),
        "grouped_matmul": (
            {"x": x, "w": weights, "offsets": torch.tensor([4], dtype=torch.int32)},
            x.new_empty(4, 16),
        ),
        "sp_attention": (attention, None),
        "ulysses_attention": (attention, None),
    }  # fmt: skip


def options(name: str) -> list[str]:
    """Return the options of an operator that have a scalar type."""
    names = []
    for p in inspect.signature(getattr(ops, name), eval_str=True).parameters.values():
        types = set(get_args(p.annotation) or (p.annotation,)) - {type(None)}
        if types <= SCALARS:
            names.append(p.name)
    return names


def flags() -> list[tuple[str, str]]:
    """Return the options of public functions and classes that are on or off."""
    return [
        (name, p.name)
        for name in ops.__all__
        for p in inspect.signature(getattr(ops, name), eval_str=True).parameters.values()
        if p.annotation is bool
    ]


CALLS = calls()
OPTIONS = [(name, option) for name in CALLS for option in options(name)]
FLAGS = flags()
WITH_OUT = [(name, option) for name, option in OPTIONS if CALLS[name][1] is not None]


def refusal(name: str, option: str) -> pytest.RaisesExc:
    return pytest.raises(tw.TileWeaveError, match=rf"^{name}: {option}=(?s:.)+; expected ")


def test_all_operators_are_called():
    assert set(CALLS) == set(OPERATORS), "calls() of this file has an entry for each operator"
    assert len(OPTIONS) > 30


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("around", [nullcontext, lambda: FlopCounterMode(display=False)])
def test_the_calls_are_legal(name, around):
    arguments, out = CALLS[name]
    with around():
        getattr(ops, name)(**arguments)
        if out is not None:
            getattr(ops, name)(**arguments, out=out)


@pytest.mark.parametrize("value", WRONG.values(), ids=WRONG)
@pytest.mark.parametrize(("name", "option"), OPTIONS)
def test_eager_calls(name, option, value):
    with refusal(name, option):
        getattr(ops, name)(**CALLS[name][0] | {option: value})


def test_operators_and_others_have_flags():
    assert {("dispatch", "clear_rest"), ("sp_attention", "return_lse")} < set(FLAGS)
    assert {("tune", "transposed"), ("SequenceParallelAttention", "causal")} < set(FLAGS)


@pytest.mark.parametrize("value", TRUTH_VALUES, ids=repr)
@pytest.mark.parametrize(("name", "flag"), FLAGS)
def test_flags_are_not_evaluated_as_conditions(name, flag, value):
    """They are the first arguments that are checked: the others are None here."""
    function = getattr(ops, name)
    others = {
        p.name: None if p.annotation is not bool else True
        for p in inspect.signature(function, eval_str=True).parameters.values()
        if p.default is p.empty
    }
    with pytest.raises(tw.TileWeaveError) as refused:
        function(**others | {flag: value})
    assert str(refused.value) == f"{name}: {flag}={value!r}; expected True or False"


@pytest.mark.parametrize(("name", "option"), OPTIONS)
def test_calls_through_the_dispatcher(name, option):
    with FlopCounterMode(display=False), refusal(name, option):
        getattr(ops, name)(**CALLS[name][0] | {option: [1]})


@pytest.mark.parametrize(("name", "option"), WITH_OUT)
def test_calls_with_out(name, option):
    arguments, out = CALLS[name]
    with refusal(name, option):
        getattr(ops, name)(**arguments | {option: [1]}, out=out)


@pytest.mark.parametrize(("name", "option"), dict(OPTIONS).items())
def test_compiled_calls(name, option):
    """The tracer leaves the call to Python, which raises the error, with one option of each."""
    torch.compiler.reset()
    compiled = torch.compile(
        lambda: getattr(ops, name)(**CALLS[name][0] | {option: [1]}), backend="eager"
    )
    with refusal(name, option):
        compiled()


def test_dynamic_extents_are_legal_numbers():
    torch.compiler.reset()

    def call(x, ids, weights, counted):
        rows, *_ = ops.dispatch(x, ids, weights, num_experts=counted.shape[0], capacity=len(x) + 1)
        return ops.all_reduce_rms_norm(rows, rows, rows[0], eps=len(x) * 1e-3)[0]

    compiled = torch.compile(call, backend="aot_eager", fullgraph=True, dynamic=True)
    for tokens in (4, 6):
        arguments = (
            torch.randn(tokens, 256), torch.zeros(tokens, 1, dtype=torch.int32),
            torch.ones(tokens, 1), torch.ones(3),
        )  # fmt: skip
        assert torch.equal(compiled(*arguments), call(*arguments))


def test_other_errors_are_not_translated(monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("unrelated")

    monkeypatch.setattr(torch, "mm", fail)
    with pytest.raises(RuntimeError, match=r"^unrelated$"):
        ops.matmul_all_reduce(torch.randn(4, 8), torch.randn(8, 8))


def test_types_of_a_schema():
    parameters = parameters_of(
        "f(Tensor x, int n, float? eps, ScalarType? t, Tensor(a!) out) -> ()"
    )
    assert [p.is_written for p in parameters] == [False] * 4 + [True]
    x = torch.zeros(1)
    assert type_mismatch("f", parameters, (x, 1, None, None, x)) is None
    assert type_mismatch("f", parameters, (x, 1, 2, torch.int8, x)) is None
    for n, value, legal in ((0, 1, "a torch.Tensor"), (2, "1", "a number or None")):
        args = [x, 1, 2.0, None, x]
        args[n] = value
        text = f"f: {parameters[n].name}={value!r}; expected {legal}"
        assert re.fullmatch(re.escape(text), str(type_mismatch("f", parameters, args)))


def test_caller_of_a_registered_operator():
    assert caller_of("all_gather_matmul_rows_out") == "all_gather_matmul"
    assert caller_of("all_gather_out") == "all_gather"
    assert caller_of("combine_across") == "combine"
