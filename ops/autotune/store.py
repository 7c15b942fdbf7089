"""What tuning found out: kept on disk for the machine, and the same on all ranks."""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, astuple, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import tilelang
import torch
from tilelang import env

from ...builtins.errors import TileWeaveError
from ...builtins.versions import __version__
from ...runtime.host.group import Group
from ..core.operator import OPERATORS, Choice
from ..core.problem import Problem
from ..core.strategy import Strategy
from ..core.tiles import Tiles

_known: WeakKeyDictionary[Group, dict[Problem, Measured | None]] = WeakKeyDictionary()


@dataclass(frozen=True)
class Measured:
    """How long a problem takes; of each rank the median, of these the largest, in ms.

    Attributes:
        choice: the fastest that gave right results while communicating; None if none did.
        fused: its time; None if there is none.
        nccl: the time of NCCL and cuBLAS.
    """

    choice: Choice | None
    fused: float | None
    nccl: float

    @property
    def strategy(self) -> Strategy:
        """The faster one."""
        if self.fused is None:
            return Strategy("nccl", f"measured: nccl {self.nccl:.3f} ms, fused never right")
        name = "fused" if self.fused <= self.nccl else "nccl"
        return Strategy(name, f"measured: fused {self.fused:.3f} ms, nccl {self.nccl:.3f} ms")

    def __str__(self) -> str:
        """As ``json``."""
        return json.dumps(asdict(self))

    @classmethod
    def of(cls, said: Any, problem: Problem) -> Measured:
        """From what ``json`` made of it.

        Raises:
            ValueError: it is none, or is of a choice that there is not.
        """
        operator = OPERATORS[problem.op]
        try:
            choice, fused, nccl = said["choice"], said["fused"], said["nccl"]
            numbers = [nccl]
            if choice is not None:
                choice = Choice(choice["program"], Tiles(**choice["tiles"]))
                numbers += [fused, *astuple(choice.tiles)]
            is_whole = choice is None or all(type(n) is int for n in astuple(choice.tiles))
            is_legal = (
                is_whole
                and all(math.isfinite(n) and n > 0 for n in numbers)
                and (fused is None if choice is None else operator.may_take(problem, choice))
            )
        except (AttributeError, KeyError, OverflowError, TypeError) as error:
            raise ValueError(f"{error!r} in {said!r}") from None
        if not is_legal:
            raise ValueError(f"{said!r}")
        return cls(choice, fused, nccl)


def measured_as(problem: Problem) -> Problem:
    """The one whose measurement serves: a bias makes no difference worth measuring."""
    return replace(problem, biased=False) if problem.biased else problem


def table_for(group: Group) -> dict[Problem, Measured | None]:
    """What the ranks of a group have agreed on; None is that nothing was measured. Who changes it
    does so on every rank, and forgets what was decided by it (``remembered.invalidate``)."""
    return _known.setdefault(group, {})


def agreed(
    problem: Problem, group: Group, tune: Callable[[], Measured] | None = None
) -> Measured | None:
    """What rank 0 has on disk; if it has nothing and ``tune``, what that measures. Collective.

    Raises:
        TileWeaveError: some ranks may tune, and others may not.
    """
    mine = saved(problem, group) if group.rank == 0 else None
    said = group.exchange("tuned", json.dumps([tune is not None, str(mine or "")]))
    may, (found, *_) = zip(*map(json.loads, said), strict=True)
    if found:
        return Measured.of(json.loads(found), problem)
    if len(set(may)) > 1:
        those = ", ".join(str(rank) for rank, tunes in enumerate(may) if tunes)
        raise TileWeaveError(
            f"{problem}: TILEWEAVE_TUNE is 1 on rank {those} only; expected the same on every rank"
        )
    return tune() if tune else None


def lookup(problem: Problem, group: Group) -> Measured | None:
    """What is agreed on, before the first call what this machine has on disk. Not collective."""
    problem, known = measured_as(problem), table_for(group)
    return known[problem] if problem in known else saved(problem, group)


def saved(problem: Problem, group: Group) -> Measured | None:
    """What was measured on such a machine; None, with a warning if that cannot be read, if nothing
    was."""
    file = file_of(group)
    try:
        said = _read(file).get(str(problem))
        return None if said is None else Measured.of(said, problem)
    except ValueError as error:
        _warn(f"{file} is not what tw.tune writes ({error}); {problem} is computed as if untuned")
        return None


def save(problem: Problem, group: Group, measured: Measured) -> None:
    """Put it on disk, for one rank, beside what others put there; a warning if that cannot be."""
    file = file_of(group)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with _alone_in(file.parent), tempfile.TemporaryDirectory(dir=file.parent) as folder:
            try:
                results = _read(file)
            except ValueError:
                results = {}
            results[str(problem)] = asdict(measured)
            made = Path(folder) / file.name
            made.write_text(json.dumps(machine(group) | {"results": results}, indent=1))
            made.replace(file)
    except OSError as error:
        _warn(f"what was tuned is forgotten when the process ends: {error}")


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """While no other process is, nor another thread."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def file_of(group: Group) -> Path:
    """Where results of such machines are kept, beside TileLang's kernels."""
    stamp = hashlib.sha256(json.dumps(machine(group)).encode()).hexdigest()[:16]
    return Path(str(env.TILELANG_CACHE_DIR)) / "tileweave" / f"tuned-{stamp}.json"


def machine(group: Group) -> dict[str, Any]:
    """All that a result depends on beside its problem."""
    return {"gpu": _gpu(), "ranks": group.world_size} | {
        "tileweave": __version__, "tilelang": tilelang.__version__, "torch": torch.__version__
    }  # fmt: skip


@cache
def _gpu() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "none"


def _read(file: Path) -> dict[str, Any]:
    """Results by problem."""
    try:
        said = json.loads(file.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, RecursionError) as error:
        raise ValueError(str(error)) from None
    results = said.get("results") if isinstance(said, dict) else None
    if not isinstance(results, dict):
        raise ValueError("it holds no results")
    return results


def _warn(what: str) -> None:
    warnings.warn(f"tileweave: {what}", stacklevel=2)
