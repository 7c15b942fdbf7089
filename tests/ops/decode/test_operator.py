"""ops.decode_attention on ranks that are processes: values; refusals."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import tileweave as tw
from tests.ops.core.test_torch import assert_right
from tests.ops.decode import decode_on_ranks
from tests.ops.decode.decode_on_ranks import FP8, Call
from tests.ops.meshes import NODES
from tileweave import ops

LONG = pytest.mark.long
LATENT = Call(heads=3, kv_heads=1, dim=576, v_dim=512, latent=True)
CALLS = {
    "bf16": Call(),
    "fp16, contiguous": Call((37, 0, 5, 64), dtype=torch.float16, sharding="contiguous", table=6),
    "fp32, any tokens": Call((7,), dtype=torch.float32, sharding="local", returns_lse=False),
    "one head, out": Call((9, 50), 1, 1, where="out"),
    "values of another size": Call(v_dim=16, where="out", returns_lse=False),
    "latent": LATENT,
    "fp8": Call(quantized=True),
    "fp8, latent": LATENT._replace(quantized=True, lengths=(33, 2)),
    "nothing": Call((0, 0)),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_values(three, call):
    assert_right(three.run(decode_on_ranks.values, call))


def test_example(three):
    assert_right(three.run(decode_on_ranks.example))


@LONG
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_compiled(three, call):
    assert_right(three.run(decode_on_ranks.values, call, None, True))


@LONG
@pytest.mark.parametrize("form", ["group", "name", "mesh"])
def test_part_of_the_world(three, form):
    *inside, outside = three.run(decode_on_ranks.values, Call(), form)
    assert_right(inside)
    assert isinstance(outside, tw.TileWeaveError) and "expected" in str(outside)


@LONG
@pytest.mark.parametrize("nodes", NODES)
def test_several_nodes(four, nodes):
    assert_right(four.run(decode_on_ranks.on_mesh, Call(), NODES[nodes]))


@LONG
@pytest.mark.parametrize(
    ("what", "shown"),
    [("table", "33 in a sequence"), ("sharding", "local, scale"), ("heads", "10 heads of 32 to")],
)
def test_ranks_that_disagree_are_told(three, what, shown):
    for error in three.run(decode_on_ranks.differ, what):
        start = "decode_attention: the ranks disagree (rank 0: decode_attention of 4 sequences"
        assert str(error).startswith(start) and shown in str(error)


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_one_process(call):
    assert all(decode_on_ranks.one_rank(call._replace(table=16)).values())


GIVEN = Call().arguments(0, 1)
Q, CACHE = GIVEN["q"], GIVEN["k_cache"]
ONE = torch.ones(1)
REFUSED = [
    ({"q": None}, "q=None; expected a dense torch.Tensor"),
    ({"seq_lens": [1]}, "seq_lens=[1]; expected a dense torch.Tensor"),
    ({"k_scale": 2.0}, "k_scale=2.0; expected a dense torch.Tensor"),
    ({"q": Q[0, 0, 0]}, "q has shape (); expected (batch, heads, dim), all positive"),
    ({"q": Q[0]}, "q has shape (6, 32); expected (batch, heads, dim), all positive"),
    ({"q": Q[..., :0]}, "q has shape (4, 6, 0); expected (batch, heads, dim), all positive"),
    ({"q": Q[:0]}, "q has shape (0, 6, 32); expected (batch, heads, dim), all positive"),
    ({"q": Q.int()}, "q is of torch.int32; expected a floating-point type of 16 bits or more"),
    ({"q": Q[..., :16]}, "k_cache has shape (64, 4, 2, 32); expected (pages, page_size, kv_heads"),
    ({"k_cache": CACHE[0]}, "k_cache has shape (4, 2, 32); expected (pages, page_size, kv_heads,"),
    ({"k_cache": CACHE.half()}, "k_cache is of torch.float16; expected torch.bfloat16 as q"),
    ({"v_cache": CACHE[:1]}, "v_cache has shape (1, 4, 2, 32); expected (64, 4, 2, v_dim) as k_c"),
    ({"v_cache": CACHE.half()}, "v_cache is of torch.float16; expected torch.bfloat16 as k_cache"),
    ({"v_cache": None}, "v_cache is None, and k_cache has shape (64, 4, 2, 32); expected v_cache"),
    ({"q": Q[:, :3]}, "k_cache has 2 heads; expected a number that divides the 3 heads of q"),
    ({"block_table": GIVEN["block_table"][:1]}, "block_table has shape (1, 16); expected (4, pag"),
    ({"block_table": GIVEN["block_table"].long()}, "block_table is of torch.int64; expected torc"),
    ({"seq_lens": GIVEN["seq_lens"][:3]}, "seq_lens has shape (3,); expected (4,) for q of shape"),
    ({"seq_lens": GIVEN["seq_lens"].to("meta")}, "seq_lens is on meta; expected cpu as q"),
    ({"scale": 0}, "scale=0; expected a positive finite number"),
    ({"scale": [1.0]}, "scale=[1.0]; expected a positive finite number"),
    ({"scale": [1.0], "out": torch.empty_like(Q)}, "scale=[1.0]; expected a positive finite num"),
    ({"scale": 1j}, "scale=1j; expected a positive finite number"),
    ({"scale": torch.inf}, "scale=inf; expected a positive finite number"),
    ({"sharding": ["local"]}, "sharding=['local']; expected 'interleaved', 'contiguous', 'local'"),
    ({"sharding": "heads"}, "sharding='heads'; expected 'interleaved', 'contiguous', 'local'"),
    ({"k_scale": ONE}, "k_scale is given, and k_cache is of torch.bfloat16; expected k_scale for"),
    (
        {"k_cache": CACHE.to(FP8), "v_cache": CACHE.to(FP8)},
        "k_scale is None, and k_cache is of torch.float8_e4m3fn; expected k_scale for caches of to",
    ),
    ({"out": Q[:1]}, "out has shape (1, 6, 32); expected (4, 6, 32) for q of shape (4, 6, 32)"),
    ({"out": Q.half()}, "out is of torch.float16; expected torch.bfloat16 as q"),
    ({"out": Q}, "out shares memory with q; expected memory of its own"),
    ({"k_cache": CACHE.transpose(1, 2).contiguous().transpose(1, 2)}, "k_cache has strides (256,"),
    ({"strategy": ["nccl"]}, "strategy=['nccl']; expected 'auto', 'fused', 'nccl'"),
    ({"strategy": "flash"}, "strategy='flash'; expected 'auto', 'fused', 'nccl'"),
    ({"strategy": "fused"}, "strategy='fused', but the tensors are on cpu; expected cuda"),
]  # fmt: skip


@pytest.mark.parametrize(("changed", "message"), REFUSED)
def test_refused(changed, message):
    with pytest.raises(tw.TileWeaveError) as error:
        ops.decode_attention(**(GIVEN | changed))
    assert str(error.value).startswith(f"decode_attention: {message}")


def test_scale_of_numpy():
    given = GIVEN | {"strategy": "nccl"}
    expected = ops.decode_attention(**given, scale=0.5)
    assert torch.equal(ops.decode_attention(**given, scale=np.float32(0.5)), expected)


@pytest.mark.parametrize("name", ["q", "k_cache", "out"])
def test_no_gradient(name):
    given = GIVEN | {"out": torch.empty_like(Q)}
    given[name] = given[name].clone().requires_grad_()
    with pytest.raises(tw.TileWeaveError) as error:
        ops.decode_attention(**given)
    assert str(error.value) == (
        f"decode_attention: {name} requires a gradient; expected torch.no_grad(), as there is no "
        "gradient"
    )
    with torch.no_grad():
        ops.decode_attention(**given)
