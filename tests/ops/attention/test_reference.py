"""The reference of attention over a sharded sequence, against torch's attention of the
whole one."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import tileweave as tw
from tests.ops.attention import on_ranks as attention_on_ranks
from tests.ops.core.test_torch import assert_right
from tileweave import ops
from tileweave.ops.attention import reference as attention_reference
from tileweave.ops.attention.problem import checked_attention
from tileweave.ops.attention.reference import reference_attention
from tileweave.ops.attention.sequence import PARTS, Sharding

LAYOUTS = sorted(PARTS)


@st.composite
def cases(draw):
    """Return whole sequences and their options of attention."""
    sharding = Sharding(draw(st.sampled_from(LAYOUTS)), draw(st.integers(1, 4)))
    causal, packed = draw(st.booleans()), draw(st.booleans())
    size = st.integers(1, 3)
    count = draw(st.integers(1, 3))
    lengths = [
        sorted(draw(size) * sharding.chunks for _ in range(2))
        for _ in range(count if packed else 1)
    ]
    if packed and draw(st.booleans()):  # no queries
        lengths.insert(draw(st.integers(0, count)), [0, draw(st.integers(0, 1)) * sharding.chunks])
    kv_heads, group, dim, v_dim = (draw(st.integers(1, 3)) for _ in range(4))
    torch.manual_seed(draw(st.integers(0, 99)))
    heads = (kv_heads * group, kv_heads, kv_heads)
    rows = [sum(n) for n in zip(*lengths, strict=True)]
    shapes = zip((rows[0], rows[1], rows[1]), heads, (dim, dim, v_dim), strict=True)
    batch = () if packed else (count,)
    tensors = [torch.randn(*batch, *shape) for shape in shapes]
    return sharding, causal, packed, lengths, tensors


def whole(q, k, v, causal, scale):
    """Return the result and the logarithms of the sums of one sequence, by torch."""
    sees = torch.ones(len(q), len(k)).bool()
    if causal:
        sees = torch.arange(len(k)) <= torch.arange(len(q))[:, None] + len(k) - len(q)
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    k, v = (x.repeat_interleave(len(q) // len(k), 0) for x in (k, v))
    out = F.scaled_dot_product_attention(q, k, v, sees, scale=scale)
    lse = (q @ k.transpose(1, 2) * scale).where(sees, -torch.inf).logsumexp(-1)
    return out.transpose(0, 1), lse


@settings(max_examples=60)
@given(cases())
def test_all_ranks_together_attend_as_one(case):
    sharding, causal, packed, lengths, tensors = case
    dim = 0 if packed else 1
    begins = [None, None]
    if packed:
        begins = [torch.tensor([0, *n]).cumsum(0).int() for n in zip(*lengths, strict=True)]
    layout, ranks = sharding.layout, sharding.ranks
    shards = [
        [ops.shard_sequence(x, rank, ranks, layout, dim, cu) for rank in range(ranks)]
        for x, cu in zip(tensors, (begins[0], begins[1], begins[1]), strict=True)
    ]
    options = {"cu_seqlens_q": begins[0], "cu_seqlens_k": begins[1]}
    results = []
    for rank in range(ranks):
        q, k, v = (of[rank] for of in shards)
        problem = checked_attention(
            q, k, v, ranks, causal=causal, layout=layout, softmax_scale=0.7, **options
        )
        out, lse = reference_attention(problem, rank, q, *shards[1:], **options)
        assert out.shape == problem.shape and lse.shape == problem.lse_shape
        results.append((out, lse))
    out, lse = (
        ops.unshard_sequence(parts, layout, axis, begins[0])
        for parts, axis in zip(zip(*results, strict=True), (dim, dim + 1), strict=True)
    )
    if packed:
        cuts = [[n[0] for n in lengths], *[[n[1] for n in lengths]] * 2]
        every = zip(*(x.split(n) for x, n in zip(tensors, cuts, strict=True)), strict=True)
    else:
        every = zip(*tensors, strict=True)
    expected, sums = zip(*(whole(*one, causal, 0.7) for one in every), strict=True)
    together = (
        (torch.cat(expected), torch.cat(sums, 1)) if packed else map(torch.stack, (expected, sums))
    )
    for x, y in zip((out, lse), together, strict=True):
        torch.testing.assert_close(x, y)


@pytest.mark.long
@pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_and_gradients(three, layout, packed):
    assert_right(three.run(attention_on_ranks.attend_and_differentiate, layout, packed))


def test_alone_in_bf16_some_queries_at_a_time(monkeypatch):
    q, k, v = (torch.randn(2, 10, heads, 8).bfloat16() for heads in (4, 2, 2))
    module = ops.SequenceParallelAttention(
        causal=False, layout="zigzag", return_lse=True, reference=True
    )
    out, lse = module(q, k, v)
    assert out.dtype == torch.bfloat16 and lse.dtype == torch.float32
    expected, sums = zip(
        *(whole(*one, False, 8**-0.5) for one in zip(q.float(), k.float(), v.float(), strict=True)),
        strict=True,
    )
    torch.testing.assert_close(out.float(), torch.stack(expected), rtol=2**-8, atol=1e-5)
    torch.testing.assert_close(lse, torch.stack(sums))
    monkeypatch.setattr(attention_reference, "_MAX_SCORES", 100)
    for again, before in zip(module(q, k, v), (out, lse), strict=True):
        torch.testing.assert_close(again, before)


def test_refused():
    q = torch.zeros(4, 2, 8)
    module = ops.SequenceParallelAttention(causal=True, reference=True)
    with pytest.raises(tw.TileWeaveError, match=r"q has shape \(4, 2, 8\); expected \(batch"):
        module(q, q, q)
    cu = torch.tensor([0, 5], dtype=torch.int32)
    with pytest.raises(tw.TileWeaveError, match=r"cu_seqlens_q\[-1\]=5; expected 4"):
        module(q, q, q, cu, cu, 5, 5)


def test_capture(monkeypatch):
    """The host computes positions, which a graph would not repeat."""
    monkeypatch.setattr(attention_reference, "capturing", lambda: True)
    problem = checked_attention(*[torch.zeros(1, 8, 2, 4)] * 3, ranks=2, causal=False)
    with pytest.raises(tw.TileWeaveError, match=r"sp_attention: .*while a CUDA graph is captured"):
        attention_reference.attend_gathered(problem, *[torch.zeros(1, 8, 2, 4)] * 3, *[None] * 5)
