"""benchmarks/transports.py: variants are compiled like the collectives."""

from types import SimpleNamespace
from unittest import mock

import pytest

from benchmarks import transports
from tileweave.ops.core.registry import OPERATORS


def test_variants_are_compiled_in_the_session_of_the_group(monkeypatch):
    moved = mock.create_autospec(transports.CompiledOp)
    monkeypatch.setattr(transports, "CompiledOp", moved)
    monkeypatch.setattr(transports, "op_cache_of", lambda group: SimpleNamespace(session=group))
    buffers = SimpleNamespace(group="group", compiled=[], into=lambda *_: None)
    transports.implementation_of(buffers, "steps")
    moved.assert_called_once_with("steps", "group")
    assert buffers.compiled == [moved.return_value]


def test_operators_have_variants():
    """Each default operator has a variant for each transport but ``ll``."""
    for op in transports.OPS:
        names = [variant.name for variant in transports.variants_of(transports.TRANSPORTS, op)]
        served = set(OPERATORS[op].transports()) - {"ll"}
        assert {name.partition(",")[0] for name in names} == served


def test_arguments_are_parsed(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["transports.py", "--help"])
    with pytest.raises(SystemExit, match="0"):
        transports.main()
    assert "all_gather, all_reduce, all_to_all, reduce_scatter" in capsys.readouterr().out
