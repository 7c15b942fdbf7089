"""The examples of docs/reference/language.md, which are those of docstrings, run as written."""

from __future__ import annotations

import re
from pathlib import Path
from textwrap import indent

import numpy as np

import tileweave as tw
from tests.modules import load_module

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "language.md"
IMPORTS = "import tilelang.language as T\nfrom tileweave import language as W\n\n\n@T.prim_func\n"
HIDDEN = 8


def _example(text: str) -> list[str]:
    """Return the lines of the example that contains ``text``."""
    blocks = re.findall(r"::\n\n((?:    [^\n]*\n)+)", PAGE.read_text())
    (block,) = [block for block in blocks if text in block]
    return [line[4:] for line in block.splitlines()]


def _program(file: Path, parameters: str, lines: list[str]):
    """Return the program ``example`` of one block of 128 threads with these lines."""
    head = f"def example({parameters}):\n    with T.Kernel(1, threads=128) as _:\n"
    known = ["me, peer = W.rank(), 1 - W.rank()", f"hidden = {HIDDEN}"]
    file.write_text(IMPORTS + head + indent("\n".join([*known, *lines]), " " * 8) + "\n")
    return load_module(file).example


def _rows(rank: int) -> np.ndarray:
    return np.arange(4 * HIDDEN, dtype="float32").reshape(4, HIDDEN) + 100 * rank


def test_bulk_copies(tmp_path):
    lines = _example("W.bulk_load(")
    parameters = "A: T.Tensor((4096,), 'float32'), S: W.Symmetric((4096,), 'float32')"
    tile = "tile = T.alloc_shared((4096,), 'float32')"
    program = _program(tmp_path / "bulk.py", parameters, [tile, *lines])
    inputs = [{"A": np.full(4096, rank, "float32")} for rank in range(2)]
    outputs = tw.simulate(program, 2, inputs)
    assert [set(out["S"].tolist()) for out in outputs] == [{1}, {0}]


def test_ragged_tensor(tmp_path):
    allocate, announce, write, loop, read = _example("W.announce(")
    lines = [
        "experts = 2",
        allocate.replace("bfloat16", "float32"),
        f"tile = T.alloc_shared(({HIDDEN},), 'float32')",
        "for dst, e in T.grid(2, 2):",
        "    count = W.rank() + 1",
        f"    {announce}",
        "    for row in T.serial(count):",
        "        t = 2 * dst + e",
        f"        {write}",
        "for e, source in T.grid(2, 2):",
        f"    {loop}",
        f"    {read}",
        "        T.copy(tile, y[e, source, i, 0])",
    ]
    parameters = (
        f"x: T.Tensor((4, {HIDDEN}), 'float32'), y: T.Tensor((2, 2, 2, {HIDDEN}), 'float32')"
    )
    program = _program(tmp_path / "ragged.py", parameters, lines)
    zeros = np.zeros((2, 2, 2, HIDDEN), "float32")
    outputs = tw.simulate(program, 2, [{"x": _rows(rank), "y": zeros} for rank in range(2)])
    for rank, out in enumerate(outputs):
        for source in range(2):
            sent = _rows(source)[2 * rank : 2 * rank + 2]
            for row in range(source + 1):
                assert np.array_equal(out["y"][:, source, row], sent)
