"""Attention that exchanges sequence for heads, on ranks that are processes; and refusals."""

from __future__ import annotations

import pytest
import torch

import tileweave as tw
from tests.ops.attention import ulysses_on_ranks
from tests.ops.attention.ulysses_on_ranks import Shape
from tests.ops.core.test_torch import assert_right
from tileweave import ops
from tileweave.ops.attention import ulysses
from tileweave.ops.collectives import transport
from tileweave.runtime.host.group import Group

pytestmark = pytest.mark.long

SHAPES = {
    "as many heads": Shape(),
    "batch": Shape(batch=2),
    "half the heads": Shape(kv_heads=3, heads=6),
    "one head": Shape(kv_heads=1),
    "prefix": Shape(keys=7, kv_heads=3),
    "other width of v": Shape(v_width=5, batch=2),
}


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_values_and_gradients(three, shape, causal):
    assert_right(three.run(ulysses_on_ranks.attend, shape, causal, None, None, False))


@pytest.mark.parametrize("keys", [4, 6])
def test_compiled(three, keys):
    shape = Shape(keys=keys, kv_heads=1)
    assert_right(three.run(ulysses_on_ranks.attend, shape, True, 0.3, None, True))


def test_fewer_queries_than_keys_and_the_other_way_round(three):
    shape = Shape(rows=5, keys=2)
    assert_right(three.run(ulysses_on_ranks.attend, shape, False, 0.5, None, False))


@pytest.mark.parametrize("form", ["group", "name", "mesh"])
def test_part_of_the_world(three, form):
    shape = Shape(heads=4, kv_heads=1)
    *inside, outside = three.run(ulysses_on_ranks.attend, shape, True, None, form, False)
    assert_right(inside)
    assert isinstance(outside, tw.TileWeaveError) and "expected" in str(outside)


def test_ranks_that_disagree_are_told(three):
    for error in three.run(ulysses_on_ranks.differ):
        assert (
            "ulysses_attention: the ranks disagree (rank 0: ulysses_attention of 1 sequences, "
            "q (4, 6, 16), k (4, 6, 16), v (…, 8) float64, full, contiguous, scale 0.25, auto; "
            "rank 1: ulysses_attention of 1 sequences, q (4, 6, 16), k (5, 6, 16)"
        ) in str(error)


def test_memory_order_of_the_result():
    q, k, v = (torch.ones(2, 4, 6, 8) for _ in range(3))
    assert ops.ulysses_attention(q, k, v, causal=True).is_contiguous()


@pytest.mark.parametrize("keys", [4, 6])
@pytest.mark.parametrize("compiled", [False, True])
def test_autocast_lowers_it(keys, compiled):
    """It has the types of scaled_dot_product_attention. Meta tensors are on another device."""
    q, k = torch.randn(1, 4, 2, 8), torch.randn(1, keys, 2, 8)

    def attend(q, k):
        return ops.ulysses_attention(q, k, k, causal=True)

    right = attend(q.bfloat16(), k.bfloat16())
    if compiled:
        attend = torch.compile(attend, backend="aot_eager", fullgraph=True)
    with torch.autocast("cpu", torch.bfloat16):
        actual = attend(q, k)
        assert actual.dtype == torch.bfloat16 and torch.equal(actual, right)
        assert attend(q.to("meta"), k.to("meta")).dtype == torch.float32


def test_the_mask_takes_no_memory():
    assert ulysses._causal_lower_right_bias(1 << 20, 1 << 21).numel() == 0


def ones(*shape, **options):
    return torch.ones(shape, **options)


Q = ones(2, 4, 6, 8)
CPU = torch.device("cpu")
REFUSED = [
    ((ones(4, 6, 8), Q, Q), {}, "q has shape (4, 6, 8); expected four extents"),
    ((Q, Q, ones(2, 4, 6)), {}, "v has shape (2, 4, 6); expected four extents"),
    ((ones(2, 0, 6, 8), Q, Q), {}, "q has shape (2, 0, 6, 8); expected (batch, rows, heads, head_"),
    ((Q.int(), Q, Q), {}, "q is of torch.int32; expected a floating-point type"),
    ((Q, ones(1, 4, 6, 8), Q), {}, "k has shape (1, 4, 6, 8); expected (2, 4, 6, 8) for q of (2, "),
    ((Q, Q, ones(2, 4, 3, 8)), {}, "v has shape (2, 4, 3, 8); expected (2, 4, 6, 8) for q of (2, "),
    ((Q, Q.double(), Q), {}, "k is of torch.float64; expected torch.float32 as q"),
    ((Q, Q, Q.to("meta")), {}, "v is on meta; expected cpu as q"),
    ((Q, Q[:, :3], Q[:, :3]), {}, "k has 3 rows on each rank and causal=True; expected at least 4"),
    ((Q, Q[:, :, :4], Q[:, :, :4]), {}, "q has 6 heads; expected a multiple of the 4 of k and v"),
    ((Q, Q, Q), {"softmax_scale": float("nan")}, "softmax_scale=nan; expected a positive float32"),
    ((Q, Q, Q), {"softmax_scale": "1"}, "softmax_scale='1'; expected a positive float32, or None"),
    ((Q.to(torch.float8_e5m2),) * 3, {}, "q is of torch.float8_e5m2; expected a floating-point ty"),
    ((Q, Q, Q), {"transport": "fast"}, "transport='fast'; expected 'auto', 'copy_engine', 'ldst'"),
    ((Q, Q, Q), {"transport": "ldst"}, "transport='ldst', but the tensors are on cpu; expected cu"),
]  # fmt: skip


@pytest.mark.parametrize(("tensors", "options", "message"), REFUSED)
def test_refused(tensors, options, message):
    with pytest.raises(tw.TileWeaveError) as error:
        ops.ulysses_attention(*tensors, **{"causal": True} | options)
    assert str(error.value).startswith(f"ulysses_attention: {message}")


def test_group_that_is_none():
    with pytest.raises(tw.TileWeaveError, match="group=3; expected None, a ProcessGroup"):
        ops.ulysses_attention(Q, Q, Q, causal=True, group=3)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "ranks", "message"),
    [
        (6, 6, 4, "q has 6 heads; expected a multiple of 4 for 4 ranks"),
        (12, 6, 4, "k has 6 heads; expected a multiple or a divisor of 4 for 4 ranks"),
        (12, 3, 4, "k has 3 heads; expected a multiple or a divisor of 4 for 4 ranks"),
    ],
)
def test_heads_that_ranks_cannot_share(heads, kv_heads, ranks, message):
    q, k = ones(1, 4, heads, 8), ones(1, 4, kv_heads, 8)
    with pytest.raises(tw.TileWeaveError, match=f"^ulysses_attention: {message}$"):
        ulysses.problem_of(q, k, k, True, None, ranks)


@pytest.mark.parametrize(("kv_heads", "copies"), [(8, 1), (4, 1), (2, 2), (1, 4)])
def test_heads_that_several_ranks_get(kv_heads, copies):
    q, k = ones(1, 4, 8, 8), ones(1, 4, kv_heads, 8)
    assert ulysses.copies_of(ulysses.problem_of(q, k, k, True, None, 4)) == copies


def test_all_exchanges_are_looked_at_before_the_first(monkeypatch):
    """Small tensors are sent as words with flags: q is small enough, k is not."""
    monkeypatch.setattr(transport, "obstacle_of_ranks", lambda *_: None)
    monkeypatch.setattr(ulysses, "ranks_of", lambda _: Group(0, 2, 0, CPU, None, None))
    q, k = ones(1, 4, 8, 2), ones(1, 8192, 2, 2)
    with pytest.raises(tw.TileWeaveError) as error:
        ops.ulysses_attention(q, k, k, causal=True, transport="ll")
    message = "transport='ll', but x has 131072 bytes; expected at most 65536"
    assert str(error.value) == f"ulysses_attention: {message}"
