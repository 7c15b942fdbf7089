"""tileweave.integrations.transformers: tiny models on processes with gloo."""

from __future__ import annotations

import sys

import pytest

from tests.integrations import transformers_on_ranks as on_ranks
from tileweave.integrations.transformers import enable


@pytest.mark.parametrize(
    ("name", "parallel", "calls"),
    [
        ("llama", {"tp_size": 2}, (0, 0, 4)),
        ("qwen3_moe", {"tp_size": 2, "ep_size": 2, "ep_implementation": "tileweave"}, (2, 0, 2)),
        ("gpt_oss", {"tp_size": 2, "ep_size": 2, "ep_implementation": "tileweave"}, (0, 2, 0)),
    ],
)
def test_model(two, tmp_path, name, parallel, calls):
    for result in two.run(on_ranks.compare, name, str(tmp_path), (2, 5), parallel):
        if isinstance(result, Exception):
            raise result
        assert result.pop("error") < 1e-4
        assert tuple(result.values()) == calls


@pytest.mark.parametrize("name", ["qwen3_moe", pytest.param("gpt_oss", marks=pytest.mark.long)])
def test_ranks_with_different_batches(two, name):
    for error in two.run(on_ranks.experts, name, [5, 0, 3]):
        if isinstance(error, Exception):
            raise error
        assert error < 1e-5


def test_another_release_is_one_warning(monkeypatch):
    layers = "tileweave.integrations.transformers.layers"
    monkeypatch.setitem(sys.modules, layers, None)
    message = f"tileweave.integrations.transformers is not enabled: .*{layers}"
    with pytest.warns(RuntimeWarning, match=message) as caught:
        enable()
    assert len(caught) == 1 and caught[0].filename == __file__
