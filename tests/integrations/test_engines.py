"""Entry points of engines: when they enable an integration. tests/engines runs them with the
engines."""

from __future__ import annotations

import warnings

import pytest
import torch

from tileweave.integrations import engines

ENTRY_POINTS = [
    (engines.vllm, "VLLM_PLUGINS", "0.33.1+cu130", "0.34.0", "0.33"),
    (engines.sglang, "SGLANG_PLUGINS", "0.5.23", "0.5.24", "0.5.23"),
]


@pytest.mark.parametrize(("enable", "variable", "_", "other", "tested"), ENTRY_POINTS)
def test_another_release_is_one_warning(monkeypatch, enable, variable, _, other, tested):
    monkeypatch.setenv(variable, "tileweave")
    monkeypatch.setattr(engines, "version", lambda _: other)
    message = f"is not enabled: {enable.__name__} is {other}; expected {tested}$"
    with pytest.warns(RuntimeWarning, match=message) as caught:
        enable()
    assert len(caught) == 1


@pytest.mark.parametrize(("enable", "variable", "release", "other", "_"), ENTRY_POINTS)
def test_other_hooks_are_one_warning(monkeypatch, enable, variable, release, other, _):
    monkeypatch.setenv(variable, "another, tileweave")
    monkeypatch.setattr(engines, "version", lambda _: release)
    message = f"is not enabled: No module named '{enable.__name__}'"
    with pytest.warns(RuntimeWarning, match=message) as caught:
        enable()
    assert len(caught) == 1


@pytest.mark.parametrize("names", [None, "", "another"])
@pytest.mark.parametrize(("enable", "variable"), [e[:2] for e in ENTRY_POINTS])
def test_nothing_is_enabled_unless_named(monkeypatch, enable, variable, names):
    monkeypatch.delenv(variable, raising=False)
    if names is not None:
        monkeypatch.setenv(variable, names)
    monkeypatch.setattr(engines, "import_module", None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        enable()


@pytest.mark.parametrize(
    ("count", "total"), [(1, 64), (64, 64), (1000, 1024), (1025, 1088), (8191, 8192), (9000, 9216)]
)
def test_padded_rows(count, total):
    rows = torch.rand(count, 3)
    y = engines.padded(rows)
    assert len(y) == total
    assert torch.equal(y[:count], rows) and not y[count:].any()
