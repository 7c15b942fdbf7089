"""``tileweave bench``: the operators beside what they are made of, in one process, on all ranks."""

from __future__ import annotations

import atexit
import os
import platform
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import tilelang
import torch
import torch.distributed as dist

from . import __version__, ops
from .bench_contenders import OPERATORS, OURS, Arena, Inputs, Judge, contenders_of, product_program
from .bench_figure import draw, require_matplotlib
from .bench_results import (
    Result,
    Shape,
    load,
    save,
    summary,
    table_head,
    table_row,
    wrong_others,
)
from .builtins.errors import TileWeaveError
from .ops.groups import group_of
from .ops.operators import OPERATORS as FUSED
from .ops.problem import Problem
from .ops.strategy import chosen
from .ops.trial import Trial, problem_of
from .ops.tuner import choice_of
from .runtime import SymmetricTensor, finalize, init, symmetric
from .runtime.compile_ahead import compile_ahead
from .runtime.group import Group
from .runtime.heap import HeapExhausted
from .runtime.measure import interleaved, largest

MODELS = {
    "llama8b": (4096, 14336),
    "llama70b": (8192, 28672),
    "llama405b": (16384, 53248),
    "qwen72b": (8192, 29568),
}
"""Hidden and inner size of the MLP. All-gather goes before its first product, reduce-scatter and
all-reduce behind its second."""
INPUTS = 3
"""Sets of inputs that take turns. Odd: what memory that is used every second call still holds of
other inputs is not taken for right."""
_SPARE_BYTES = 64 << 20
"""Of the heap, for counters and tails."""


@dataclass(frozen=True)
class Wanted:
    """What a command line asks for.

    Attributes:
        operators: names; none for all.
        shapes: names of models, and ``MxNxK``.
        rows: of each model.
        dtype: torch's name of it.
        warmups, runs: rounds that do not count, and that do.
        json, figure: files to be written.
        command: what refuses it.
    """

    operators: Sequence[str]
    shapes: Sequence[str]
    rows: Sequence[int]
    dtype: str = "bfloat16"
    warmups: int = 5
    runs: int = 20
    json: str | None = None
    figure: str | None = None
    command: str = "bench"

    def cases(self) -> list[tuple[str, Shape]]:
        """Operators and shapes.

        Raises:
            TileWeaveError: one that there is not.
        """
        for name in self.operators:
            if name not in OPERATORS:
                legal = ", ".join(OPERATORS)
                raise TileWeaveError(f"{self.command}: {name}; expected {legal}")
        return [
            (op, shape)
            for op in self.operators or OPERATORS
            for shape in shapes_of(op, self.shapes, self.rows, self.command)
        ]


def shapes_of(
    op: str, names: Iterable[str], rows: Iterable[int], command: str = "bench"
) -> list[Shape]:
    """The shapes of the command line: names of models, each with all ``rows``, or ``MxNxK``.

    Raises:
        TileWeaveError: neither.
    """
    found = []
    for name in names:
        sizes = name.split("x")
        if name in MODELS:
            hidden, inner = MODELS[name]
            N, K = (inner, hidden) if op == "all_gather_matmul" else (hidden, inner)
            found += [Shape(name, M, N, K) for M in rows]
        elif len(sizes) == 3 and all(s.isdecimal() and int(s) > 0 for s in sizes):
            found.append(Shape("", *map(int, sizes)))
        else:
            raise TileWeaveError(
                f"{command}: --shapes {name}; expected {', '.join(MODELS)} or MxNxK (operators "
                "stand before the options)"
            )
    return found


def run(wanted: Wanted) -> bool:
    """Measure, print a table on rank 0, and write what is wanted; whether all of ours is right.

    Collective: under torchrun every process calls it.

    Raises:
        TileWeaveError: an operator, a shape, a type or a file that cannot be. Nothing is measured.
    """
    cases = wanted.cases()
    _require_files(wanted.json, wanted.figure)
    group = join(cases)
    dtype = getattr(torch, wanted.dtype)
    problems = [problem_of(op, s.M, s.N, s.K, group.world_size, dtype) for op, s in cases]
    say = print if group.rank == 0 else _nothing
    if group.device.type == "cpu":
        say("no GPU: gloo and torch.mm on the CPU; these times say nothing of operators")
    gathered = None
    if group.device.type == "cuda":
        gathered = _room(problems, dtype)
        _compile(problems, group, say)
    results: list[Result] = []
    notes: set[str] = set()
    for (op, shape), problem in zip(cases, problems, strict=True):
        result, missing = measured(op, shape, problem, group, gathered, wanted)
        if not results:
            say(table_head())
        say(table_row(result), flush=True)
        absent = [f"{name}: -: {why}" for name, why in missing.items()]
        new = [note for note in wrong_others(result) + absent if note not in notes]
        say(*(f"  {note}\n" for note in new), sep="", end="", flush=True)
        notes.update(new)
        results.append(result)
    say("\n".join(summary(results)), flush=True)
    if group.rank == 0:
        _write(wanted, _machine(group, wanted), results)
    if group.device.type == "cuda":
        finalize()
    return all(r.is_right(OURS) for r in results)


def measured(
    op: str,
    shape: Shape,
    problem: Problem,
    group: Group,
    gathered: SymmetricTensor | None,
    wanted: Wanted,
) -> tuple[Result, dict[str, str]]:
    """The result for one problem, and why contenders are missing."""
    begin = time.perf_counter()
    trial = Trial(problem, group)
    inputs = [Inputs.random(trial) for _ in range(INPUTS)]
    arena = Arena(problem, group, gathered, trial.c)
    contenders, missing = contenders_of(arena, inputs[0], wanted.warmups)
    judge = Judge(contenders)
    ms = interleaved(
        {name: contender.call for name, contender in contenders.items()},
        inputs,
        group,
        warmups=wanted.warmups,
        runs=wanted.runs,
        before=lambda name, given: contenders[name].prepare(given),
        after=judge,
        title=f"{op} {shape}",
    )
    errors = largest(judge.errors, group)
    strategy = ops.strategy_of(getattr(ops, op), inputs[0].a, inputs[0].b)
    seconds = time.perf_counter() - begin
    return Result(op, shape, strategy.name, strategy.reason, ms, errors, seconds), missing


def again(file: str, figure: str | None) -> None:
    """Print what an earlier run has written to ``file`` as JSON, and draw it."""
    _require_files(None, figure)
    machine, results = load(file)
    print("\n".join([table_head(), *map(table_row, results), *summary(results)]))
    if figure is not None:
        draw(figure, machine, results)


def _write(wanted: Wanted, machine: dict[str, Any], results: list[Result]) -> None:
    if wanted.json is not None:
        save(wanted.json, machine, results)
    if wanted.figure is not None:
        draw(wanted.figure, machine, results)


def _require_files(json: str | None, figure: str | None) -> None:
    for option, file in (("--json", json), ("--figure", figure)):
        if file is not None and not Path(file).parent.is_dir():
            raise TileWeaveError(f"bench: {option} {file}; expected a name in a folder that exists")
    if figure is not None:
        if Path(figure).suffix != ".png":
            raise TileWeaveError(f"bench: --figure {figure}; expected a name that ends in .png")
        require_matplotlib()


def join(cases: list[tuple[str, Shape]], at_once: int = 1) -> Group:
    """Meet the other ranks, with a heap for so many of the largest operator, and the gathered rows,
    unless its size is given."""
    if torch.cuda.is_available():
        most = max(_symmetric_bytes(op, shape) for op, shape in cases)
        gathered = max((s.M * s.K * 2 for op, s in cases if _gathers(op)), default=0)
        given = "TILEWEAVE_HEAP_BYTES" in os.environ
        init(heap_bytes=None if given else at_once * most + gathered + _SPARE_BYTES)
    elif int(os.environ.get("WORLD_SIZE", "1")) > 1 and not dist.is_initialized():
        dist.init_process_group("gloo")
        atexit.register(dist.destroy_process_group)
    return group_of("")


def _gathers(op: str) -> bool:
    return op == "all_gather_matmul"


def _symmetric_bytes(op: str, shape: Shape) -> int:
    """What an operator takes on each rank, without counters and tails: of 2-byte numbers."""
    taken = {
        "all_gather_matmul": shape.M * shape.K,
        "matmul_reduce_scatter": 2 * shape.M * shape.N,
        "matmul_all_reduce": 3 * shape.M * shape.N,
    }
    return 2 * taken[op]


def _compile(problems: Iterable[Problem], group: Group, say: Callable[..., None]) -> None:
    """All kernels, many at a time, before they are needed one after the other."""
    begin = time.perf_counter()
    count = compile_ahead(program for p in problems for program in _programs(p, group))
    seconds = time.perf_counter() - begin
    say(f"{count} kernels compiled, or found compiled, in {seconds:.0f} s", flush=True)


def _programs(problem: Problem, group: Group) -> list[Any]:
    """What our contenders for a problem launch."""
    programs = [product_program(problem)]
    if chosen("auto", problem, group.device, group).name == "fused":
        choice = choice_of("auto", problem, group)
        if choice is not None:
            programs.append(FUSED[problem.op].program(problem, choice))
    return programs


def _room(problems: Iterable[Problem], dtype: torch.dtype) -> SymmetricTensor | None:
    """Where copies alone gather, for all problems: operators would fill the heap before them."""
    most = max((p.M * p.K for p in problems if p.gathers), default=0)
    try:
        return symmetric((most,), dtype) if most else None
    except HeapExhausted:
        return None


def _machine(group: Group, wanted: Wanted) -> dict[str, Any]:
    device = group.device
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "ranks": group.world_size,
        "dtype": wanted.dtype,
        "warmups": wanted.warmups,
        "runs": wanted.runs,
        "unit": "ms",
        "versions": {
            "tileweave": __version__,
            "tilelang": tilelang.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
    }


def _nothing(*_: Any, **__: Any) -> None: ...
