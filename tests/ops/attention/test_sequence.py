"""Layouts of sharded sequences: the rows that each rank stores, attends to and computes."""

from __future__ import annotations

import pytest
import tilelang.language as T
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tilelang import tvm

import tileweave as tw
from tileweave import ops
from tileweave.ops.attention.sequence import PARTS, Sharding, owners_from

LAYOUTS = sorted(PARTS)
EXAMPLES = settings(max_examples=60)


@st.composite
def shardings(draw):
    return Sharding(draw(st.sampled_from(LAYOUTS)), draw(st.integers(1, 8)))


def lengths(sharding, most=4):
    return st.integers(0, most).map(lambda size: size * sharding.chunks)


def held(sharding, rank, length):
    """Return the positions that a rank stores, by slices only."""
    chunks = list(torch.arange(length).tensor_split(sharding.chunks))
    mine = [chunks[rank], *([chunks[-1 - rank]] if sharding.layout == "zigzag" else [])]
    return torch.cat(mine)


@EXAMPLES
@given(st.data())
def test_a_rank_holds_its_chunks(data):
    sharding = data.draw(shardings())
    whole = data.draw(st.lists(lengths(sharding), min_size=1, max_size=4))
    begins = torch.tensor([0, *whole]).cumsum(0)
    dim = data.draw(st.integers(-2, 1))
    x = torch.arange(int(begins[-1])).reshape(-1, 1) * torch.tensor([1, -1])
    x = x if dim % 2 == 0 else x.t()
    form = {"layout": sharding.layout, "dim": dim}
    if len(whole) > 1 or data.draw(st.booleans()):
        form["cu_seqlens"] = begins.int()
    shards = [ops.shard_sequence(x, rank, sharding.ranks, **form) for rank in range(sharding.ranks)]
    for rank, shard in enumerate(shards):
        rows = [begin + held(sharding, rank, n) for begin, n in zip(begins, whole, strict=False)]
        assert shard.equal(x.index_select(dim, torch.cat(rows)))
    assert ops.unshard_sequence(shards, **form).equal(x)


def test_gradients_go_back_to_their_rows():
    x = torch.randn(2, 12, 3, dtype=torch.float64, requires_grad=True)

    def there_and_back(x):
        shards = [ops.shard_sequence(x, rank, 3, "zigzag") for rank in range(3)]
        return ops.unshard_sequence([shard * (r + 1) for r, shard in enumerate(shards)], "zigzag")

    assert torch.autograd.gradcheck(there_and_back, x)


@EXAMPLES
@given(st.data())
def test_what_a_query_sees_is_a_prefix_of_what_an_owner_holds(data):
    sharding = data.draw(shardings())
    length = data.draw(lengths(sharding, 6).filter(bool))
    limit = data.draw(st.integers(-3, length + 3))
    for owner in range(sharding.ranks):
        sees = held(sharding, owner, length) < limit
        count = sharding.visible(limit, owner, length)
        assert sees.tolist() == [True] * count + [False] * (len(sees) - count)
        many = sharding.visible(torch.tensor([limit]), owner, length, torch.clamp)
        assert many.tolist() == [count]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_numbers_may_be_expressions_of_tile_programs(layout):
    names = {"row": 5, "rank": 2, "length": 64, "limit": 37}
    variables = {name: tvm.tirx.Var(name, "int32") for name in names}
    numbers = {variables[name]: T.int32(number) for name, number in names.items()}

    def value(expression):
        known = tvm.tirx.stmt_functor.substitute(expression, numbers)
        return int(tvm.arith.Analyzer().simplify(known))

    row, rank, length, limit = variables.values()
    sharding = Sharding(layout, 4)
    assert value(sharding.position(row, rank, length)) == sharding.position(5, 2, 64)
    assert value(sharding.visible(limit, rank, length, T.clamp)) == sharding.visible(37, 2, 64)


@EXAMPLES
@given(st.data())
def test_schedule_is_all_that_is_seen(data):
    sharding, causal = data.draw(shardings()), data.draw(st.booleans())
    q_length, k_length = sorted(data.draw(lengths(sharding).filter(bool)) for _ in range(2))
    p, j = torch.arange(q_length)[:, None], torch.arange(k_length)
    sees = (j <= p + k_length - q_length) if causal else torch.ones(q_length, k_length).bool()
    rows, columns = q_length // sharding.chunks, k_length // sharding.chunks
    actual = torch.zeros(sharding.chunks, sharding.chunks, dtype=torch.long)
    for rank in range(sharding.ranks):
        visits = ops.attention_schedule(
            rank, sharding.ranks, sharding.layout, causal=causal, q_length=q_length,
            k_length=k_length,
        )  # fmt: skip
        order = [visit.owner for visit in visits]
        assert order == sorted(order, key=owners_from(rank, sharding.ranks).index)
        for visit in visits:
            assert visit.query * rows in held(sharding, rank, q_length)
            assert visit.key * columns in held(sharding, visit.owner, k_length)
            actual[visit.query, visit.key] += visit.pairs
    blocks = sees.reshape(sharding.chunks, rows, sharding.chunks, columns)
    assert actual.equal(blocks.sum((1, 3)))


def test_zigzag_is_the_same_work_for_all():
    def work(layout):
        return [
            sum(v.pairs for v in ops.attention_schedule(r, 4, layout, causal=True, q_length=64))
            for r in range(4)
        ]

    assert len(set(work("zigzag"))) == 1
    assert work("contiguous") == sorted(set(work("contiguous")))
    assert owners_from(2, 4) == [2, 1, 0, 3]


X = torch.zeros(2, 12, 3)
REFUSED = {
    "layout": (lambda: ops.shard_sequence(X, 0, 2, "striped"),
               "layout='striped'; expected 'contiguous' or 'zigzag'"),
    "rank": (lambda: ops.shard_sequence(X, 2, 2), "rank=2; expected 0 to 1 for world_size=2"),
    "ranks": (lambda: ops.shard_sequence(X, 0, 0), "world_size=0; expected a positive number"),
    "dim": (lambda: ops.shard_sequence(X, 0, 2, dim=3),
            r"dim=3; expected an axis of x of shape \(2, 12, 3\)"),
    "length": (lambda: ops.shard_sequence(X, 0, 4, "zigzag"),
               r"x of shape \(2, 12, 3\): 12 rows; expected a multiple of 8 for 4 ranks and "
               "layout='zigzag'"),
    "one of many": (lambda: shard_packed([0, 4, 10, 12]),
                    "cu_seqlens: sequence 1 has length 6; expected a multiple of 4 for 2 ranks"),
    "begin": (lambda: shard_packed([4, 8, 12]), r"cu_seqlens\[0\]=4; expected 0"),
    "order": (lambda: shard_packed([0, 8, 4, 12]),
              r"cu_seqlens\[2\]=4; expected at least cu_seqlens\[1\]=8"),
    "end": (lambda: shard_packed([0, 4, 8]),
            r"cu_seqlens\[-1\]=8; expected 12, the rows of all ranks"),
    "shape": (lambda: shard_packed([0]), r"cu_seqlens has shape \(1,\); expected \(batch \+ 1,\)"),
    "type": (lambda: shard_packed([0.0, 12.0]),
             "cu_seqlens is of torch.float32; expected torch.int32"),
    "no shard": (lambda: ops.unshard_sequence([]), "shards is empty; expected a tensor of each"),
    "uneven": (lambda: ops.unshard_sequence([X, X[:1]]),
               r"shards\[1\] has shape \(1, 12, 3\); expected \(2, 12, 3\) as shards\[0\]"),
    "odd": (lambda: ops.unshard_sequence([X[:, :3]] * 2, "zigzag"),
            r"2 shards of shape \(2, 3, 3\): 6 rows; expected a multiple of 4 for 2 ranks"),
    "causal": (lambda: schedule(q_length=8, k_length=4),
               "k_length=4; expected at least q_length=8, as causal=True"),
    "schedule": (lambda: schedule(q_length=9), "q_length=9; expected a multiple of 2"),
}  # fmt: skip


def shard_packed(begins):
    return ops.shard_sequence(X, 0, 2, "zigzag", cu_seqlens=torch.tensor(begins))


def schedule(**lengths):
    return ops.attention_schedule(0, 2, causal=True, **lengths)


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    call, message = REFUSED[name]
    with pytest.raises(tw.TileWeaveError, match=f"_(sequence|schedule): {message}"):
        call()
