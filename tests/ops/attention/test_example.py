"""examples/sp_attention.py on a CPU: results that agree are right, others are wrong."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from tests.modules import load_module
from tileweave import ops

pytestmark = pytest.mark.long

EXAMPLE = Path(__file__).parents[3] / "examples" / "sp_attention.py"
SMALL = ["--heads", "4", "--kv-heads", "2", "--head-dim", "16", "--runs", "1"]


@pytest.fixture
def example():
    return load_module(EXAMPLE)


def other(q, k, v, *, causal, layout, return_lse, strategy):
    """Return attention of a single rank, which is not the reference of the example."""
    assert strategy == "nccl" and return_lse
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)
    return out.transpose(1, 2).contiguous(), lse


@pytest.mark.parametrize("operator", [other, ops.sp_attention])
@pytest.mark.parametrize("options", [[], ["--full", "--batch", "2"], ["--layout", "contiguous"]])
def test_both_agree(example, operator, options, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(ops, "sp_attention", operator)
    figure = tmp_path / "attention.png"
    assert example.main([*SMALL, "--lengths", "48", "96", *options, "--figure", str(figure)]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("no GPU") and said[-1] == "passed" and len(said) == 4
    assert figure.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("wrong", ["one number", "one lse", "no number"])
def test_one_that_does_not(example, wrong, monkeypatch, capsys):
    def broken(*args, **options):
        out, lse = other(*args, **options)
        if wrong == "one lse":
            lse[0, 1, 2] += 0.1
        else:
            out[0, 5, 1, 3] = torch.nan if wrong == "no number" else out[0, 5, 1, 3] + 0.5
        return out, lse

    monkeypatch.setattr(ops, "sp_attention", broken)
    assert example.main([*SMALL, "--lengths", "64"]) == 1
    assert capsys.readouterr().out.splitlines()[-1].startswith("failed: an error above 2e-02")


def test_a_figure_needs_matplotlib(example, monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    example.draw(str(tmp_path / "a.png"), "", {64: {"fused": 1.0, "reference": 2.0}})
    assert capsys.readouterr().out.startswith("no figure: matplotlib is not installed")
    assert not list(tmp_path.iterdir())
