"""tileweave.integrations.vllm with vLLM; ``make test-engines`` runs it."""

from __future__ import annotations

import pytest

from tests.engines import vllm_on_ranks as on_ranks


def test_plugin_is_enabled_by_name(two):
    assert two.run(on_ranks.load, None) == [[], []]
    assert two.run(on_ranks.load, "another") == [[], []]
    layer = ["tileweave.integrations.vllm.RowParallelLinear"]
    assert two.run(on_ranks.load, "another,tileweave") == [layer, layer]
    assert two.run(on_ranks.load, "tileweave") == [layer, layer]  # again


@pytest.mark.parametrize(
    ("shape", "strategy", "compiles", "options", "rows"),
    [
        ((5,), "fused", False, {}, [64]),
        ((64,), "fused", True, {}, [64]),
        ((70,), "fused", True, {"skip_bias_add": True}, [128]),
        ((2, 40), "fused", False, {}, [128]),
        ((5,), "nccl", False, {}, []),
        ((70,), "nccl", True, {}, []),
        ((0,), None, False, {}, []),
        ((5,), None, False, {"input_is_parallel": False}, []),
    ],
)
def test_layer(two, shape, strategy, compiles, options, rows):
    two.run(on_ranks.load, "tileweave")
    for result in two.run(on_ranks.layer, shape, strategy, compiles, options):
        if isinstance(result, Exception):
            raise result
        assert result.pop("error") < 1e-5
        assert result == {"decides": strategy is not None, "rows": rows}
