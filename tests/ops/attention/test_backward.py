"""Gradients of attention over a sharded sequence, against those of the reference."""

from __future__ import annotations

import pytest
import torch

import tileweave as tw
from tests.ops.attention import backward_on_ranks as attention_backward_on_ranks
from tests.ops.core.test_torch import assert_right
from tileweave.ops.attention import backward as attention_backward
from tileweave.ops.attention.backward import Rows, by_flash, sp_attention_backward

pytestmark = pytest.mark.long


@pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_values(three, layout, causal, packed):
    some, dtype = packed, torch.float64
    differentiate = attention_backward_on_ranks.differentiate
    assert_right(three.run(differentiate, layout, causal, packed, dtype, some))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_types(three, dtype):
    differentiate = attention_backward_on_ranks.differentiate
    assert_right(three.run(differentiate, "zigzag", True, False, dtype, False))


def test_compiled(three):
    assert three.run(attention_backward_on_ranks.compiled) == [True] * 3


@pytest.mark.parametrize(
    ("width", "v_width", "common"), [(128, 128, 128), (192, 128, 192), (60, 64, 64), (66, 5, 72)]
)
def test_what_flash_attention_gets(monkeypatch, width, v_width, common):
    """Without a GPU: its arguments and the shapes of its results."""
    shapes = []
    real = torch.ops.aten._flash_attention_backward

    def seen(*arguments, **options):
        shapes.extend(tuple(x.shape) for x in arguments[:6])
        assert arguments[11] is True and options == {"scale": 0.5}
        return real(*arguments, **options)

    monkeypatch.setattr(torch.ops.aten, "_flash_attention_backward", seen)
    q, grad, k, v, lse = (
        torch.empty(shape, dtype=dtype, device="meta")
        for shape, dtype in (
            ((2, 16, 4, width), torch.bfloat16), ((2, 16, 4, v_width), torch.bfloat16),
            ((2, 48, 2, width), torch.bfloat16), ((2, 48, 2, v_width), torch.bfloat16),
            ((2, 4, 32), torch.float32),
        )
    )  # fmt: skip
    actual = by_flash(Rows(grad, q, grad, lse[..., :16]), k[:, :40], v[:, :40], True, 0.5)
    of_q, of_k = (2, 16, 4, common), (2, 40, 2, common)
    assert shapes == [of_q, of_q, of_k, of_k, of_q, (2, 4, 16)]
    assert [tuple(x.shape) for x in actual] == [
        (2, 16, 4, width), (2, 40, 2, width), (2, 40, 2, v_width)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"lse": torch.ones(1, 2, 5)}, "lse has shape (1, 2, 5); expected (1, 2, 4)"),
        ({"lse": torch.ones(1, 2, 4).double()}, "lse is of torch.float64; expected torch.float32"),
        ({"out": torch.ones(1, 4, 2, 7)}, "out has shape (1, 4, 2, 7); expected (1, 4, 2, 8)"),
        ({"grad_out": torch.ones(1, 4, 2, 8).half()}, "grad_out is of torch.float16; expected"),
        ({"k": torch.ones(1, 4, 2, 7)}, "k has shape (1, 4, 2, 7); expected (1, 4, 2, 8) for q"),
        ({"layout": "ring"}, "layout='ring'; expected 'contiguous' or 'zigzag'"),
        ({"transport": "fast"}, "transport='fast'; expected 'auto', 'copy_engine', 'ldst'"),
        ({"transport": "ldst"}, "transport='ldst', but the tensors are on cpu; expected cuda"),
    ],
)
def test_refused(changed, message):
    given = {name: torch.ones(1, 4, 2, 8) for name in ("grad_out", "q", "k", "v", "out")}
    given |= {"lse": torch.ones(1, 2, 4), "causal": True} | changed
    with pytest.raises(tw.TileWeaveError) as error:
        sp_attention_backward(**given)
    assert message in str(error.value)


def test_offsets_cannot_be_read_into_a_graph(monkeypatch):
    monkeypatch.setattr(attention_backward, "capturing", lambda: True)
    x, lse, offsets = torch.ones(4, 2, 8), torch.ones(2, 4), torch.tensor([0, 4]).int()
    message = "cu_seqlens_q is given while a CUDA graph is captured; expected none, as the host"
    with pytest.raises(tw.TileWeaveError, match=message):
        sp_attention_backward(
            x, x, x, x, x, lse, causal=True, cu_seqlens_q=offsets, cu_seqlens_k=offsets
        )


@pytest.mark.parametrize(
    ("cu_q", "cu_k", "message"),
    [
        ([0, 3, 5], [0, 3, 6], r"cu_seqlens_q\[-1\]=5; expected 6, the rows of all ranks"),
        ([0, 7, 6], [0, 3, 6], r"cu_seqlens_q\[2\]=6; expected at least cu_seqlens_q\[1\]=7"),
        ([0, 3, 6], [0, 2, 6], "cu_seqlens_k: sequence 0 has 2 keys for 3 queries; expected at l"),
    ],
)
def test_offsets_are_checked(cu_q, cu_k, message):
    """Rows that belong to no sequence would have no gradient."""
    q, lse = torch.zeros(6, 2, 8), torch.zeros(2, 6)
    cu_q, cu_k = (torch.tensor(cu, dtype=torch.int32) for cu in (cu_q, cu_k))
    with pytest.raises(tw.TileWeaveError, match=f"^sp_attention_backward: {message}"):
        sp_attention_backward(
            *(q, q, q, q, q, lse), causal=True, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k
        )
