"""Programs that were wrong at f1ce1b62: the generator finds them again without their fix."""

from pathlib import Path

import pytest

from tests.modules import load_module
from tileweave.passes import pipeline

from .check import check

KNOWN = sorted(p for p in Path(__file__).with_name("known").glob("*.py") if p.stem != "__init__")


@pytest.mark.parametrize("file", KNOWN, ids=lambda file: file.stem)
def test_found_without_fix(file, monkeypatch):
    known = load_module(file)
    kept = tuple(p for p in pipeline.PIPELINE if p.name not in known.FIXES)
    assert len(kept) == len(pipeline.PIPELINE) - len(known.FIXES)
    monkeypatch.setattr(pipeline, "PIPELINE", kept)
    verdict = check(file, known.RANKS, known.ARCH)
    assert verdict.outcome == "device", verdict.why


REFUSED = "rows_of_fragment_changed", "rows_of_fragment_written"


@pytest.mark.parametrize("file", KNOWN, ids=lambda file: file.stem)
def test_right_or_refused(file):
    known = load_module(file)
    verdict = check(file, known.RANKS, known.ARCH)
    assert verdict.outcome == ("refused" if file.stem in REFUSED else "right"), verdict.why
