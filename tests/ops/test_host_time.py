"""benchmarks/host_time.py: torch.distributed computes what the operators do."""

import pytest

from benchmarks import host_time
from tests.ops import on_ranks


def test_torch_computes_the_same(three):
    for errors_of_rank in three.run(on_ranks.errors_of_host_time):
        assert errors_of_rank.keys() == {
            "all_gather_matmul", "matmul_reduce_scatter", "all_reduce_rms_norm", "dispatch",
            "combine", "expert_mlp", "decode_attention", "sp_attention",
        }  # fmt: skip
        assert max(errors_of_rank.values()) < 2e-2, errors_of_rank


def test_needs_torchrun(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["host_time.py"])
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(SystemExit, match="2"):
        host_time.main()
    assert "expected torchrun --nproc-per-node=2" in capsys.readouterr().err


def test_arguments_are_parsed(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["host_time.py", "--help"])
    with pytest.raises(SystemExit, match="0"):
        host_time.main()
    assert "torchrun --nproc-per-node=2 benchmarks/host_time.py" in capsys.readouterr().out
