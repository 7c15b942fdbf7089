"""Results of tuning: stored on disk for the machine, and equal on all ranks."""

from __future__ import annotations

import hashlib
import json
import math
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import asdict, astuple, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import tilelang
import torch

from ...builtins.errors import TileWeaveError
from ...builtins.versions import __version__
from ...runtime.host.cache_folder import cache_folder, locked, writable_folder
from ...runtime.host.group import Group
from ..core.problem import Problem
from ..core.registry import OPERATORS
from ..core.strategy import Strategy
from ..core.tiles import Choice, Tiles

_results: WeakKeyDictionary[Group, dict[Problem, Measurement | None]] = WeakKeyDictionary()


@dataclass(frozen=True)
class Measurement:
    """Measured times of a problem in ms: the largest of the ranks' medians.

    Attributes:
        choice: the fastest fused choice with correct results; None if no choice had them.
        fused: time of ``choice``; None without a choice.
        nccl: the time of NCCL and cuBLAS.
    """

    choice: Choice | None
    fused: float | None
    nccl: float

    @property
    def strategy(self) -> Strategy:
        """Faster strategy."""
        if self.fused is None:
            return Strategy("nccl", f"measured: nccl {self.nccl:.3f} ms, fused never right")
        name = "fused" if self.fused <= self.nccl else "nccl"
        return Strategy(name, f"measured: fused {self.fused:.3f} ms, nccl {self.nccl:.3f} ms")

    def __str__(self) -> str:
        """Return the JSON text."""
        return json.dumps(asdict(self))

    @classmethod
    def of(cls, data: Any, problem: Problem) -> Measurement:
        """Create it from parsed JSON.

        Raises:
            ValueError: the data is no measurement, or its choice does not exist.
        """
        operator = OPERATORS[problem.op]
        try:
            choice, fused, nccl = data["choice"], data["fused"], data["nccl"]
            numbers = [nccl]
            if choice is not None:
                choice = Choice(choice["program"], Tiles(**choice["tiles"]))
                numbers += [fused, *astuple(choice.tiles)]
            is_whole = choice is None or all(type(n) is int for n in astuple(choice.tiles))
            is_legal = (
                is_whole
                and all(math.isfinite(n) and n > 0 for n in numbers)
                and (fused is None if choice is None else operator.has_choice(problem, choice))
            )
        except (AttributeError, KeyError, OverflowError, TypeError) as error:
            raise ValueError(f"{error!r} in {data!r}") from None
        if not is_legal:
            raise ValueError(f"{data!r}")
        return cls(choice, fused, nccl)


def tuning_key(problem: Problem) -> Problem:
    """Return the problem whose measurement applies: a bias makes no difference worth measuring."""
    return replace(problem, biased=False) if problem.biased else problem


def table_for(group: Group) -> dict[Problem, Measurement | None]:
    """Return the results that the ranks of a group agreed on; None means that nothing was measured.

    A caller that changes the table does so on every rank, and calls ``recorded_calls.invalidate``.
    """
    return _results.setdefault(group, {})


def agree_on_result(
    problem: Problem, group: Group, tune: Callable[[], Measurement] | None = None
) -> Measurement | None:
    """Return what rank 0 has on disk. If it has nothing, call ``tune`` if given, else return None.
    Collective.

    Raises:
        TileWeaveError: ``tune`` is given on some ranks only.
    """
    own = saved(problem, group) if group.rank == 0 else None
    data = group.exchange("tuned", json.dumps([tune is not None, str(own or "")]))
    may_tune, (stored, *_) = zip(*map(json.loads, data), strict=True)
    if stored:
        return Measurement.of(json.loads(stored), problem)
    if len(set(may_tune)) > 1:
        tuning_ranks = ", ".join(str(rank) for rank, tunes in enumerate(may_tune) if tunes)
        raise TileWeaveError(
            f"{problem}: TILEWEAVE_TUNE is 1 on rank {tuning_ranks} only; expected the same on "
            "every rank"
        )
    return tune() if tune else None


def lookup(problem: Problem, group: Group) -> Measurement | None:
    """Return the agreed result; before the first call, the one on this machine's disk. Not
    collective."""
    problem, results = tuning_key(problem), table_for(group)
    return results[problem] if problem in results else saved(problem, group)


def saved(problem: Problem, group: Group) -> Measurement | None:
    """Return the stored result for such a machine. None if there is none, or, with a warning, if
    the file cannot be read."""
    file = file_of(group)
    try:
        data = _read(file).get(str(problem))
        return None if data is None else Measurement.of(data, problem)
    except ValueError as error:
        _warn(f"{file} is not what tw.tune writes ({error}); {problem} is computed as if untuned")
        return None


def save(problem: Problem, group: Group, measured: Measurement) -> None:
    """Store a result on disk, beside the results of other processes; warn if that fails. One rank
    calls it."""
    file = file_of(group)
    try:
        writable_folder()
        with locked(file.parent), tempfile.TemporaryDirectory(dir=file.parent) as folder:
            try:
                results = _read(file)
            except ValueError:
                results = {}
            results[str(problem)] = asdict(measured)
            written = Path(folder) / file.name
            written.write_text(json.dumps(machine(group) | {"results": results}, indent=1))
            written.replace(file)
    except (OSError, TileWeaveError) as error:
        _warn(f"the results of tuning are lost when the process ends: {error}")


def file_of(group: Group) -> Path:
    """Return the file of results for such machines, beside TileLang's kernels."""
    stamp = hashlib.sha256(json.dumps(machine(group)).encode()).hexdigest()[:16]
    return cache_folder() / f"tuned-{stamp}.json"


def machine(group: Group) -> dict[str, Any]:
    """Return everything except the problem on which a result depends."""
    return {"gpu": _gpu(), "ranks": group.world_size} | {
        "tileweave": __version__, "tilelang": tilelang.__version__, "torch": torch.__version__
    }  # fmt: skip


@cache
def _gpu() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "none"


def _read(file: Path) -> dict[str, Any]:
    """Return the results by problem."""
    try:
        data = json.loads(file.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, RecursionError) as error:
        raise ValueError(str(error)) from None
    results = data.get("results") if isinstance(data, dict) else None
    if not isinstance(results, dict):
        raise ValueError("it holds no results")
    return results


def _warn(message: str) -> None:
    warnings.warn(f"tileweave: {message}", stacklevel=2)
