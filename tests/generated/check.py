"""Verdict on a generated program at the three levels: NumPy, tiles, device functions."""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import tileweave as tw
from tests.modules import load_module

from .reference import inputs_of, results_of

ARCHITECTURES = ("sm_90a", "sm_80")


class Verdict(NamedTuple):
    """Outcome of one program.

    Attributes:
        outcome: ``right``; ``refused`` in TileWeave's words, with a line; ``unsupported`` by the
            simulator; ``raw``, an error of TileLang or one without a line; ``tile``, wrong at the
            tile level; or ``device``: accepted, and wrong at the device level.
        why: error or difference.
    """

    outcome: str
    why: str = ""

    @property
    def is_fault(self) -> bool:
        return self.outcome not in ("right", "refused", "unsupported")

    @property
    def kind(self) -> str:
        """Outcome and message, without names, numbers and places."""
        message = re.split(r" of |: store|: load|\[|\(|=", self.why.partition("\n")[0])[0]
        return f"{self.outcome} {re.sub(r'[A-Za-z]?[0-9]+', '#', message)}"


def check(
    file: Path, ranks: int, arch: str, seed: int = 0, reference: str | None = None
) -> Verdict:
    """Return the verdict on the program of ``file`` for one architecture.

    ``tw.validate`` lowers it as ``tw.emit`` does, runs both levels and compares them. So the tile
    level runs alone only to tell whether it is the one that is wrong.

    Args:
        reference: text of a program that computes the same; None for that of ``file``.
    """
    text = file.read_text() if reference is None else reference
    inputs = inputs_of(text, ranks, seed)
    expected = results_of(text, ranks, inputs)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = None
        try:
            program = load_module(file).program
            actual = tw.validate(program, ranks, inputs, arch)
        except tw.SimulationError as error:
            if error.kind == "unsupported":
                return Verdict("unsupported", str(error))
            return _tile_fault(program, ranks, inputs, expected) or Verdict("device", str(error))
        except Exception as error:
            return _refusal(error)
    difference = _difference(actual, expected)
    return Verdict("device", difference) if difference else Verdict("right")


def _tile_fault(program: Any, ranks: int, inputs: Any, expected: Any) -> Verdict | None:
    try:
        actual = tw.simulate(program, ranks, inputs, epochs=2)
    except tw.SimulationError as error:
        return Verdict("tile", str(error))
    difference = _difference(actual, expected)
    return Verdict("tile", difference) if difference else None


def _refusal(error: Exception) -> Verdict:
    text = str(error)
    ours = isinstance(error, tw.TileWeaveError) and re.search(r"--> \S+:\d+", text)
    return Verdict("refused" if ours else "raw", f"{type(error).__name__}: {text}")


def _difference(actual: Sequence[dict], expected: Sequence[dict]) -> str:
    for rank, tensors in enumerate(expected):
        for name, want in tensors.items():
            have = actual[rank][name]
            differs = have.astype(np.float64) != want.astype(np.float64)
            if differs.any():
                first = tuple(int(i) for i in np.argwhere(differs)[0])
                return (
                    f"{name} of rank {rank}: {int(differs.sum())} of {differs.size} elements "
                    f"differ, the first at {list(first)}: {have[first]}; expected {want[first]}"
                )
    return ""
