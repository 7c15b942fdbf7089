"""tileweave.integrations.sglang with SGLang; ``make test-engines`` runs it."""

from __future__ import annotations

from tests.engines import sglang_on_ranks as on_ranks


def test_plugin_is_enabled_by_name(two):
    assert two.run(on_ranks.load, None) == [False, False]
    assert two.run(on_ranks.load, "another") == [False, False]
    assert two.run(on_ranks.load, "another, tileweave") == [True, True]
    assert two.run(on_ranks.load, "tileweave") == [True, True]  # again


def test_mlp(two):
    two.run(on_ranks.load, "tileweave")
    for result in two.run(on_ranks.mlp, "Qwen3ForCausalLM", 70):
        if isinstance(result, Exception):
            raise result
        assert result.pop("error") < 2e-2
        calls = ["fused_all_gather_matmul", "fused_matmul_reduce_scatter"]
        assert result == {"rows": 128, "calls": calls}
