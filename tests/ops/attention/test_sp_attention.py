"""Attention over a sharded sequence: the fused plan in the simulator, and the operator."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.weak import WeakTensorKeyDictionary

import tileweave as tw
from tileweave import ops
from tileweave.ops.attention.flash import FlashTiles, packed_tiles, tiles_for
from tileweave.ops.attention.kernels.flash_attention import FAST_MATH
from tileweave.ops.attention.module import SequenceParallelAttention
from tileweave.ops.attention.problem import AttentionProblem
from tileweave.ops.attention.reference import reference_attention
from tileweave.ops.attention.sequence import PARTS
from tileweave.ops.attention.sp_attention import SpAttention, rows_for, sp_attention_plan
from tileweave.runtime.plans.steps import Copy, Launch


def asked(ranks, layout, q_chunk, more=0, **options):
    """Return a problem of small heads; ``q_chunk`` rows in a chunk of queries, ``more`` in one of
    keys."""
    parts = PARTS[layout]
    facts = {
        "batch": 1, "q_rows": q_chunk * parts, "k_rows": (q_chunk + more) * parts, "heads": 2,
        "kv_heads": 1, "dim": 16, "v_dim": 16, "ranks": ranks, "dtype": torch.float32,
        "causal": True, "layout": layout, "scale": 0.3,
    }  # fmt: skip
    return AttentionProblem(**facts | options)


def inputs_of(problem, seed):
    """Return q, k and v of every rank, and as arguments of the plan."""
    generator = torch.Generator().manual_seed(seed)

    def new(rows, heads, dim):
        x = torch.randn(problem.batch, rows, heads, dim, generator=generator)
        return x.to(problem.dtype)

    each = [
        (
            new(problem.q_rows, problem.heads, problem.dim),
            new(problem.k_rows, problem.kv_heads, problem.dim),
            new(problem.k_rows, problem.kv_heads, problem.v_dim),
        )
        for _ in range(problem.ranks)
    ]
    parts = problem.sharding.parts
    given = [
        {
            "Q": q.view(problem.batch, parts, -1, problem.heads, problem.dim).numpy(),
            "K": k.flatten(2).numpy(),
            "V": v.flatten(2).numpy(),
        }
        for q, k, v in each
    ]
    return each, given


def check(problem, tiles, seed=0, schedules=1):
    each, given = inputs_of(problem, seed)
    actual = tw.simulate(
        sp_attention_plan(problem, tiles), problem.ranks, given, schedules=schedules, epochs=2,
        seed=seed,
    )  # fmt: skip
    ks, vs = [k for _, k, _ in each], [v for _, _, v in each]
    for rank, (q, _, _) in enumerate(each):
        out, lse = reference_attention(problem, rank, q, ks, vs)
        np.testing.assert_allclose(actual[rank]["Out"].reshape(out.shape), out, atol=2e-4)
        np.testing.assert_allclose(actual[rank]["LSE"].reshape(lse.shape), lse, atol=2e-4)


@given(
    ranks=st.integers(1, 3), layout=st.sampled_from(sorted(PARTS)), q_chunk=st.integers(1, 20),
    more=st.sampled_from([0, 0, 1, 9, 17]), causal=st.booleans(), batch=st.sampled_from([1, 1, 2]),
    kv_heads=st.sampled_from([1, 2]), v_dim=st.sampled_from([16, 32]), seed=st.integers(0, 99),
)  # fmt: skip
@settings(max_examples=8)
def test_values(ranks, layout, q_chunk, more, causal, batch, kv_heads, v_dim, seed):
    problem = asked(
        ranks, layout, q_chunk, more, causal=causal, batch=batch, kv_heads=kv_heads, v_dim=v_dim
    )
    check(problem, FlashTiles(16, 16, 2, 128), seed)


def packed_of(ranks, layout, lengths, **options):
    """Return the offsets of sequences with these numbers of rows in a chunk of q and of k."""
    parts = PARTS[layout]
    q, k = (sum(n) for n in zip(*lengths, strict=True))
    problem = asked(ranks, layout, q, k - q, batch=len(lengths), packed=True, **options)
    offsets = [
        torch.tensor([0, *n]).cumsum(0).int() * ranks * parts for n in zip(*lengths, strict=True)
    ]
    return problem, offsets


def check_packed(problem, offsets, tiles, seed=0, schedules=1):
    generator = torch.Generator().manual_seed(seed)

    def new(rows, heads, dim):
        return [torch.randn(rows, heads, dim, generator=generator) for _ in range(problem.ranks)]

    qs = new(problem.q_rows, problem.heads, problem.dim)
    ks = new(problem.k_rows, problem.kv_heads, problem.dim)
    vs = new(problem.k_rows, problem.kv_heads, problem.v_dim)
    given = [
        {
            "Q": q[None, None].numpy(),
            "K": k.flatten(1)[None].numpy(),
            "V": v.flatten(1)[None].numpy(),
            "work": packed_tiles(problem, tiles, rank, *offsets).numpy(),
        }
        for rank, (q, k, v) in enumerate(zip(qs, ks, vs, strict=True))
    ]
    plan = sp_attention_plan(problem, tiles)
    actual = tw.simulate(plan, problem.ranks, given, schedules=schedules, epochs=2, seed=seed)
    for rank, q in enumerate(qs):
        out, lse = reference_attention(problem, rank, q, ks, vs, *offsets)
        np.testing.assert_allclose(actual[rank]["Out"].reshape(out.shape), out, atol=2e-4)
        np.testing.assert_allclose(actual[rank]["LSE"].reshape(lse.shape), lse, atol=2e-4)


@given(
    ranks=st.integers(1, 3), layout=st.sampled_from(sorted(PARTS)), causal=st.booleans(),
    lengths=st.lists(
        st.tuples(st.integers(0, 18), st.integers(1, 18)), min_size=1, max_size=4
    ).filter(lambda lengths: any(q for q, _ in lengths)),
    seed=st.integers(0, 99),
)  # fmt: skip
@settings(max_examples=8)
def test_packed_values(ranks, layout, causal, lengths, seed):
    lengths = [(min(n), max(n)) for n in lengths] if causal else lengths
    problem, offsets = packed_of(ranks, layout, lengths, causal=causal)
    check_packed(problem, offsets, FlashTiles(16, 16, 2, 128), seed)


def test_packed_schedules():
    problem, offsets = packed_of(2, "zigzag", [(9, 9), (0, 3), (20, 24)], heads=1)
    check_packed(problem, offsets, FlashTiles(16, 16, 2, 128), schedules=5)


def test_packed_tiles():
    """Two sequences of 20 and of 40 rows on each rank.

    Tiles that attend to most keys come first; unused entries are last.
    """
    problem, offsets = packed_of(2, "zigzag", [(10, 10), (20, 26)])
    tiles = packed_tiles(problem, FlashTiles(16, 16, 2, 128), 1, *offsets).tolist()
    # The second sequence begins at row 20; its second part is chunk 2 of 4.
    assert tiles[0] == [20 + 20 + 16, 4, 2 * 20 + 16 + 1 + 4 * 6, 20, 26]
    assert [tile[1] for tile in tiles] == [4, 16, 4, 16, 10, 10, 0]
    rows = [row + i for row, valid, *_ in tiles for i in range(valid)]
    assert sorted(rows) == list(range(problem.q_rows))


def test_tiles_are_not_those_of_other_offsets():
    """Tiles are reused until offsets change, also if torch does not count the change."""
    problem, (cu_q, cu_k) = packed_of(2, "zigzag", [(10, 10), (20, 26)])
    made = object.__new__(SpAttention)
    made.problem, made.tiles = problem, FlashTiles(16, 16, 2, 128)
    made._work = WeakTensorKeyDictionary()
    first = made._cached_tiles(0, cu_q, cu_k)
    assert made._cached_tiles(0, cu_q, cu_k) is first
    cu_q[1] += 4
    second = made._cached_tiles(0, cu_q, cu_k)
    assert torch.equal(second, packed_tiles(problem, made.tiles, 0, cu_q, cu_k))
    cu_q.numpy()[1] -= 4
    with pytest.raises(RuntimeError, match="cu_seqlens were changed by what torch does not count"):
        made._cached_tiles(0, cu_q, cu_k)


@pytest.mark.parametrize("layout", PARTS)
def test_schedules(layout):
    """Many interleavings of a problem with several tiles along every axis."""
    check(asked(2, layout, 24, heads=1), FlashTiles(16, 16, 2, 128), schedules=5)


@pytest.mark.parametrize("ranks", [2, 4])
def test_who_gets_what(ranks):
    """Contiguous and causal: keys go to later ranks only.

    Zigzag: whole keys go to earlier ranks, the first chunk to later ones.
    """

    def copied(layout):
        problem = asked(ranks, layout, 32)
        plan = sp_attention_plan(problem, FlashTiles(16, 16, 2, 128))
        shapes = {p.name: tuple(p.shape) for p in plan.parameters}
        return {
            (rank, step.dst.start[0]): step.dst.shape[0]
            for rank in range(ranks)
            for step in plan.trace(rank, ranks, shapes, {})
            if isinstance(step, Copy) and step.dst.parameter.name == "all_K"
        }

    every = [(one, other) for one in range(ranks) for other in range(ranks)]
    assert copied("contiguous") == {(a, b): 32 for a, b in every if a <= b}
    assert copied("zigzag") == {(a, b): 32 if a < b else 64 for a, b in every}


def test_rows_end_where_tiles_do():
    problem = asked(2, "zigzag", 10, 12)
    tiles = FlashTiles(16, 16, 2, 128)
    assert rows_for(problem, tiles, 1, 0) == 38  # 22 of the first chunk, 12 of the second


@pytest.mark.parametrize(
    ("q_chunk", "chunk", "dim", "expected"),
    [(64, 64, 128, 64), (128, 128, 192, 128), (4096, 4096, 128, 192), (2048, 2048, 192, 192)],
)
def test_tiles(q_chunk, chunk, dim, expected):
    problem = asked(4, "zigzag", q_chunk, chunk - q_chunk, dim=dim, v_dim=128)
    assert tiles_for(problem).M == expected


@pytest.mark.long
@pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
def test_registers_suffice(ptxas, packed):
    """Three warp groups attend, and ptxas reports whether it serializes products.

    They do not wait, and the wait of another warp must not use their registers.
    """
    problem = asked(
        4, "zigzag", 2048, heads=32, kv_heads=8, dim=128, v_dim=128, dtype=torch.bfloat16,
        packed=packed,
    )  # fmt: skip
    plan = sp_attention_plan(problem, tiles_for(problem))
    shapes = {p.name: tuple(p.shape) for p in plan.parameters}
    *_, launch = (s for s in plan.trace(0, 4, shapes, {}) if isinstance(s, Launch))
    said = ptxas(tw.emit(launch.program, stage="ptx", world_size=4, pass_configs=FAST_MATH))
    assert "serialized" not in said
    assert set(re.findall(r"(\d+) bytes spill", said)) == {"0"}


def qkv(*shape, dtype=torch.bfloat16):
    return [torch.randn(shape).to(dtype) for _ in "qkv"]


def test_without_gpus():
    """torch computes the result, with gradients; the module is the operator."""
    q, k, v = (x.requires_grad_() for x in qkv(2, 24, 2, 16, dtype=torch.float32))
    out, lse = ops.sp_attention(q, k, v, causal=True, return_lse=True)
    right = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), is_causal=True
    ).transpose(1, 2)
    torch.testing.assert_close(out, right)
    assert lse.shape == (2, 2, 24) and not lse.requires_grad
    weight = torch.randn_like(out)
    gradients = torch.autograd.grad((out * weight).sum(), (q, k, v))
    expected = torch.autograd.grad((right * weight).sum(), (q, k, v))
    for one, other in zip(gradients, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)
    assert torch.equal(SequenceParallelAttention(causal=True)(q, k, v), out)


def test_compiled():
    q, k, v = qkv(1, 16, 2, 64)

    def f(q, k, v):
        return ops.sp_attention(q, k, v, causal=True, layout="zigzag") * 2

    compiled = torch.compile(f, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(q, k, v), f(q, k, v))
    torch.library.opcheck(
        torch.ops.tileweave.sp_attention.default,
        (q, k, v, True, "zigzag", None, None, None, None, None, "", "auto"),
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"strategy": "fused"}, "strategy='fused', but the tensors are on cpu; expected cuda"),
        ({"strategy": "ring"}, "strategy='ring'; expected 'auto', 'fused', 'nccl'"),
        ({"layout": "striped"}, "layout='striped'; expected 'contiguous' or 'zigzag'"),
    ],
)
def test_refused(options, message):
    with pytest.raises(tw.TileWeaveError, match=message):
        ops.sp_attention(*qkv(1, 16, 2, 64), causal=True, **options)


def test_explain_says_what_attention_waits_for():
    problem = asked(4, "zigzag", 64, dim=64, v_dim=64, dtype=torch.bfloat16)
    explanation = tw.explain(sp_attention_plan(problem, FlashTiles(64, 64, 2, 128)), 4)
    waits = [
        (o.tensor, o.reason)
        for o in explanation.ops
        if (o.kernel, o.kind) == ("flash_attention", "wait")
    ]
    assert waits == [(t, "T.copy reads the result of writes") for t in "KV"]
    assert explanation.reuse == dict.fromkeys(
        "KV", "copies wait until the readers' ranks have begun the same call"
    )


def attention(q, k, v):
    return ops.sp_attention(q, k, v, causal=True)


def test_second_gradients_are_refused():
    x = [torch.randn(1, 4, 2, 8, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    first = torch.autograd.grad(attention(*x).pow(3).sum(), x, create_graph=True)
    with pytest.raises(tw.TileWeaveError, match="a gradient of its gradient is asked for; expecte"):
        torch.autograd.grad(sum(g.pow(2).sum() for g in first), x)


def test_compiled_for_fp64():
    x = [torch.randn(1, 4, 2, 8, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    compiled = torch.compile(attention, backend="aot_eager", fullgraph=True)
    gradients = [torch.autograd.grad(f(*x).pow(3).sum(), x) for f in (attention, compiled)]
    for right, gradient in zip(*gradients, strict=True):
        assert torch.allclose(gradient, right)
