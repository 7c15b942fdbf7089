"""benchmarks/transports.py: variants are compiled like the collectives."""

from types import SimpleNamespace
from unittest import mock

from benchmarks import transports


def test_variants_are_compiled_in_the_session_of_the_group(monkeypatch):
    moved = mock.create_autospec(transports.Moved)
    monkeypatch.setattr(transports, "Moved", moved)
    monkeypatch.setattr(transports, "op_cache_of", lambda group: SimpleNamespace(session=group))
    buffers = SimpleNamespace(group="group", compiled=[], into=lambda *_: None)
    transports.implementation_of(buffers, "steps")
    moved.assert_called_once_with("steps", "group")
    assert buffers.compiled == [moved.return_value]
