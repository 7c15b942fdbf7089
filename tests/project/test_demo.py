"""`make demo` on a machine without a GPU."""

import re
import sys
from pathlib import Path

import pytest

import tileweave as tw
from tileweave.simulator.mutation import changed

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
README = (EXAMPLES.parent / "README.md").read_text()


def _without_numbers(text: str) -> str:
    return re.sub(r"\d+", "#", text)


@pytest.fixture
def demo(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    import without_gpu

    yield without_gpu
    for name in ("without_gpu", "gemm_reduce_scatter"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("right", [True, False])
def test_demo(demo, right, tmp_path, monkeypatch, capsys):
    """The first part is an example, which tests/simulator/test_examples.py runs."""
    monkeypatch.setattr(demo, "simulated", lambda: right)
    monkeypatch.setattr("sys.argv", ["without_gpu.py", "--timeline", str(tmp_path / "new" / "a")])
    assert demo.main() == (0 if right else 1)
    out = capsys.readouterr().out
    if right:
        assert "deadlock: no block or stream can continue\n" in out
        assert "waits at W.wait_reached(arrived[" in out and "    3 missing\n" in out
        shown = re.search(r"^the same without its signal:\n(.*?)^  \.\.\.$", README, re.M | re.S)[1]
        printed = _without_numbers(out.replace(f"{EXAMPLES.parent}/", "")).splitlines()
        assert [x for x in _without_numbers(shown).splitlines() if x not in printed] == []
        for name in ("a.html", "a_without_signal.html"):
            assert str(tmp_path / "new" / name) in out
            assert "<svg" in (tmp_path / "new" / name).read_text()
    else:
        assert out == "wrong: relative error above 1e-2\n"


def test_an_unknown_change(demo):
    program = demo.gemm_reduce_scatter(64, 32, 32, 2, 32, 32, 32)
    with pytest.raises(tw.TileWeaveError, match=r"'signal lost'; expected .*signal drop or "):
        changed(program, 2, "signal lost")
