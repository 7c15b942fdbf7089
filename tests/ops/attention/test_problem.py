"""Problems of attention over a sharded sequence: legal and refused arguments."""

from __future__ import annotations

import pytest
import torch

import tileweave as tw
from tests.ops.attention import on_ranks as attention_on_ranks
from tileweave.ops.attention import problem as attention_problem
from tileweave.ops.attention.problem import (
    AttentionProblem,
    assert_offsets,
    checked_attention,
    checked_maxima,
    obstacle,
)

FP16 = torch.float16


def zeros(*shape, dtype=FP16, device="cpu"):
    return torch.zeros(shape, dtype=dtype, device=device)


def offsets(*values, dtype=torch.int32):
    return torch.tensor(values, dtype=dtype)


def dense(q=(2, 8, 4, 64), k=(2, 8, 2, 64), v=None, ranks=2, **options):
    options = {"causal": True} | options
    q, k, v = (zeros(*x) if isinstance(x, tuple) else x for x in (q, k, v or k))
    return checked_attention(q, k, v, ranks, **options)


def packed(q=(8, 4, 64), k=(10, 2, 64), cu_q=(0, 4, 16), cu_k=(0, 4, 20), ranks=2, **options):
    """Return two sequences, of 4 and 12 queries and of 4 and 16 keys."""
    cu_q, cu_k = (offsets(*x) if isinstance(x, tuple) else x for x in (cu_q, cu_k))
    return dense(q, k, ranks=ranks, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, **options)


def read(cu_q=(0, 4, 16), cu_k=(0, 4, 20), max_q=None, max_k=None, **options):
    problem = packed(layout="zigzag", **options)
    return checked_maxima(problem, offsets(*cu_q), offsets(*cu_k), max_q, max_k)


def test_a_batch():
    problem = dense(v=(2, 8, 2, 128), layout="zigzag")
    assert problem == AttentionProblem(
        2, 8, 8, 4, 2, 64, 128, 2, FP16, True, "zigzag", 0.125, False, "sp_attention"
    )
    assert problem.shape == (2, 8, 4, 128) and problem.lse_shape == (2, 4, 8)
    assert (problem.q_total, problem.k_total, problem.group) == (16, 16, 2)
    assert checked_maxima(problem) == (16, 16)


def test_packed_sequences():
    problem = packed(softmax_scale=2)
    assert (problem.batch, problem.packed, problem.scale) == (2, True, 2.0)
    assert problem.shape == (8, 4, 64) and problem.lse_shape == (4, 8)
    assert (problem.q_total, problem.k_total) == (16, 20)
    assert read() == (12, 16)
    assert read(max_q=12, max_k=999) == (12, 999)


def test_problems_differ_in_all_that_ranks_must_agree_on():
    every = [
        dense(), dense(causal=False), dense(layout="zigzag"), dense(softmax_scale=0.1), packed(),
        dense(q=(2, 6, 4, 64)), dense(q=(2, 8, 2, 64)), dense(v=(2, 8, 2, 128)),
        dense(op="ulysses_attention"),
    ]  # fmt: skip
    assert len(set(every)) == len(set(map(str, every))) == len(every)


SHAPES = {
    "layout": (lambda: dense(layout="striped"),
               "layout='striped'; expected 'contiguous' or 'zigzag'"),
    "q": (lambda: dense(q=(8, 4, 64)),
          r"q has shape \(8, 4, 64\); expected \(batch, rows, heads, head_dim\), or cu_seqlens_q"),
    "packed q": (lambda: packed(q=(2, 8, 4, 64)),
                 r"expected \(rows, heads, head_dim\), as cu_seqlens_q is given"),
    "nothing": (lambda: dense(k=(2, 0, 2, 64)), r"k has shape \(2, 0, 2, 64\); expected \(batch,"),
    "type": (lambda: dense(q=zeros(2, 8, 4, 64, dtype=torch.int32)),
             "q is of torch.int32; expected a floating-point type"),
    "types": (lambda: dense(k=zeros(2, 8, 2, 64, dtype=torch.float32)),
              "k is of torch.float32; expected torch.float16 as q"),
    "device": (lambda: dense(k=zeros(2, 8, 2, 64, device="meta")),
               "k is on meta; expected cpu as q"),
    "batch of k": (lambda: dense(k=(3, 8, 2, 64)),
                   r"k has shape \(3, 8, 2, 64\); expected \(2, 8, 2, 64\) for q of \(2, 8, 4, 64"),
    "head_dim of k": (lambda: dense(k=(2, 8, 2, 128)), r"expected \(2, 8, 2, 64\) for q of"),
    "rows of v": (lambda: dense(v=(2, 6, 2, 64)),
                  r"v has shape \(2, 6, 2, 64\); expected \(2, 8, 2, 64\) for q of"),
    "heads of v": (lambda: dense(v=(2, 8, 1, 64)), r"v has shape .*; expected \(2, 8, 2, 64\)"),
    "heads": (lambda: dense(q=(2, 8, 5, 64)), "q has 5 heads; expected a multiple of the 2 of k"),
    "rows of q": (lambda: dense(q=(2, 7, 4, 64), layout="zigzag"),
                  "q has 7 rows on each rank, 14 in all; expected a multiple of 4 for 2 ranks and "
                  "layout='zigzag'"),
    "rows of k": (lambda: dense(k=(2, 9, 2, 64), layout="zigzag"),
                  "k has 9 rows on each rank, 18 in all; expected a multiple of 4"),
    "causal": (lambda: dense(q=(2, 10, 4, 64)),
               "k has 8 rows on each rank and causal=True; expected at least 10 as q"),
    "scale": (lambda: dense(softmax_scale=-1.0),
              "softmax_scale=-1.0; expected a positive float32, or None"),
    "no float32": (lambda: dense(softmax_scale=1e39), "39; expected a positive float32, or None"),
    "too long": (lambda: dense(softmax_scale=10**400), "0; expected a positive float32, or None"),
    "8 bits": (lambda: dense(zeros(2, 8, 4, 64).to(torch.float8_e4m3fn)),
               "q is of torch.float8_e4m3fn; expected a floating-point type of 16 bits or more"),
    "no number": (lambda: dense(softmax_scale=float("nan")), "softmax_scale=nan; expected"),
    "one of two": (lambda: packed(cu_k=None),
                   "cu_seqlens_k is None and cu_seqlens_q is given; expected both or none"),
    "one maximum": (lambda: packed(max_seqlen_k=16),
                    "max_seqlen_q is None and max_seqlen_k is given; expected both or none"),
    "maximum alone": (lambda: dense(max_seqlen_q=16),
                      "max_seqlen_q=16 without cu_seqlens_q; expected None"),
    "maximum": (lambda: packed(max_seqlen_q=0, max_seqlen_k=16),
                "max_seqlen_q=0; expected a positive int"),
    "no int": (lambda: packed(max_seqlen_q=12, max_seqlen_k=16.0),
               "max_seqlen_k=16.0; expected a positive int"),
    "offsets": (lambda: packed(cu_k=offsets(0, 4, 20, dtype=torch.int64)),
                "cu_seqlens_k is of torch.int64; expected torch.int32"),
    "axes of offsets": (lambda: packed(cu_q=zeros(1, 3, dtype=torch.int32)),
                        r"cu_seqlens_q has shape \(1, 3\); expected \(batch \+ 1,\)"),
    "place of offsets": (lambda: packed(cu_q=zeros(3, dtype=torch.int32, device="meta")),
                         "cu_seqlens_q is on meta; expected cpu as q"),
    "batches": (lambda: packed(cu_k=(0, 4, 8, 20)),
                r"cu_seqlens_k has shape \(4,\); expected \(3,\) as cu_seqlens_q"),
}  # fmt: skip


@pytest.mark.parametrize("name", SHAPES)
def test_refused(name):
    call, message = SHAPES[name]
    with pytest.raises(tw.TileWeaveError, match=f"^sp_attention: .*{message}"):
        call()


VALUES = {
    "begin": ({"cu_q": (4, 8, 16)}, r"cu_seqlens_q\[0\]=4; expected 0"),
    "order": ({"cu_k": (0, 24, 20)},
              r"cu_seqlens_k\[2\]=20; expected at least cu_seqlens_k\[1\]=24"),
    "order of q": ({"cu_q": (0, 8, 4, 16), "cu_k": (0, 4, 8, 20), "causal": False},
                   r"cu_seqlens_q\[2\]=4; expected at least cu_seqlens_q\[1\]=8"),
    "end": ({"cu_q": (0, 4, 12)}, r"cu_seqlens_q\[-1\]=12; expected 16, the rows of all ranks"),
    "a sequence": ({"cu_k": (0, 6, 20)},
                   "cu_seqlens_k: sequence 0 has length 6; expected a multiple of 4 for 2 ranks"),
    "longest q": ({"max_q": 11, "max_k": 16},
                  "max_seqlen_q=11; expected at least 12, the longest sequence"),
    "longest k": ({"max_q": 12, "max_k": 12}, "max_seqlen_k=12; expected at least 16"),
    "causal": ({"cu_q": (0, 8, 16)},
               "cu_seqlens_k: sequence 0 has 4 keys for 8 queries; expected at least 8, as "
               "causal=True"),
    "no key": ({"cu_k": (0, 0, 20), "causal": False},
               "cu_seqlens_k: sequence 0 has 0 keys for 4 queries; expected at least 1, as "
               "causal=False"),
}  # fmt: skip


@pytest.mark.parametrize("name", VALUES)
def test_refused_values_by_the_host_and_by_the_gpu(name):
    given, message = VALUES[name]
    with pytest.raises(tw.TileWeaveError, match=f"^sp_attention: {message}"):
        read(**given)
    given = {"cu_q": (0, 4, 16), "cu_k": (0, 4, 20), "max_q": 12, "max_k": 20} | given
    problem = packed(layout="zigzag", causal=given.get("causal", True))
    maxima = (given["max_q"], given["max_k"])
    with pytest.raises(RuntimeError, match="sp_attention: cu_seqlens; expected offsets from 0 to"):
        assert_offsets(problem, offsets(*given["cu_q"]), offsets(*given["cu_k"]), maxima)


def test_the_gpu_takes_what_is_right():
    assert_offsets(packed(layout="zigzag"), offsets(0, 4, 16), offsets(0, 4, 20), (12, 16))
    lengths = {"cu_q": (0, 0, 16), "cu_k": (0, 0, 20), "causal": False}
    assert read(**lengths) == (16, 20)
    assert_offsets(packed(causal=False), offsets(0, 0, 16), offsets(0, 0, 20), (16, 20))


@pytest.fixture
def asserted(monkeypatch):
    """Count the assertions that are enqueued on the GPU."""
    calls = []
    monkeypatch.setattr(torch, "_assert_async", lambda right, message: calls.append(message))
    return calls


def without_values():
    """Return offsets that the host cannot read."""
    return [zeros(3, dtype=torch.int32, device="meta") for _ in range(2)]


def test_with_maxima_the_host_never_waits_for_offsets_on_a_gpu(asserted):
    assert checked_maxima(packed(), *without_values(), 12, 16) == (12, 16)
    with pytest.raises(NotImplementedError, match="meta"):
        checked_maxima(packed(), *without_values())
    assert len(asserted) == 1


def test_offsets_are_asserted_once_until_they_change(asserted):
    problem, q, k = packed(), offsets(0, 4, 16), offsets(0, 4, 20)

    def told(of=problem, maxima=(12, 16)):
        before = len(asserted)
        attention_problem._assert_once(of, q, k, maxima)
        return len(asserted) > before

    assert [told(), told()] == [True, False]
    q[1] = 8
    assert [told(), told()] == [True, False]
    assert [told(packed(causal=False)), told(maxima=(12, 20)), told()] == [True, True, False]
    with torch.inference_mode():
        k = offsets(0, 4, 20)
    assert [told(), told()] == [True, True]
    assert all(len(message) < 256 for message in asserted)


def test_a_graph_asserts_in_each_replay_and_needs_maxima(asserted, monkeypatch):
    monkeypatch.setattr(attention_problem, "capturing", lambda: True)
    cu = without_values()
    for _ in range(2):
        checked_maxima(packed(), *cu, 12, 16)
    with pytest.raises(tw.TileWeaveError, match="max_seqlen_q is None while a CUDA graph is"):
        checked_maxima(packed(), *cu)
    assert len(asserted) == 2


@pytest.mark.parametrize(
    ("shape", "dtype", "found"),
    [((64, 64), FP16, None), ((192, 128), torch.bfloat16, None),
     ((192, 192), FP16, "head_dim of q and k/of v is 192/192; expected 64/64, 128/128, 192/128"),
     ((64, 64), torch.float32, "q is of torch.float32; expected torch.bfloat16 or torch.float16")],
)  # fmt: skip
def test_what_there_are_kernels_for(shape, dtype, found):
    q, k, v = (zeros(1, 4, 2, width, dtype=dtype) for width in (shape[0], *shape))
    assert obstacle(checked_attention(q, k, v, 2, causal=False)) == found


def test_ranks_that_differ_are_told(three):
    for error in three.run(attention_on_ranks.differ):
        assert isinstance(error, tw.TileWeaveError)
        assert "sp_attention: the ranks disagree (rank 0: sp_attention of 1 sequences" in str(error)
        assert "full, contiguous" in str(error) and "causal, contiguous" in str(error)
