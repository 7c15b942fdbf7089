"""Thread-local memory that TileLang computes in the consumer warps only."""

import importlib.util
from pathlib import Path

import pytest

import tileweave as tw

PATTERN = Path(__file__).parents[2] / "examples" / "patterns" / "packed_dispatch.py"
SERIAL, PIPELINED = "T.serial(D // block_K)", "T.Pipelined(D // block_K, num_stages=2)"


def test_an_array_that_only_consumers_compute_is_refused(tmp_path):
    text = PATTERN.read_text()
    assert SERIAL in text
    path = tmp_path / "pipelined.py"
    path.write_text(text.replace(SERIAL, PIPELINED))
    spec = importlib.util.spec_from_file_location("pipelined", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with pytest.raises(tw.LanguageError, match=r"^(begin|first|received): TileLang moves"):
        tw.emit(module.example, arch="sm_90a", world_size=4)
    assert tw.emit(module.example, arch="sm_80", world_size=4)
