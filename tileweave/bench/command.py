"""``tileweave bench``: operators beside their parts and alternatives, in one process, on all
ranks."""

from __future__ import annotations

import atexit
import os
import platform
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from itertools import islice
from pathlib import Path
from typing import Any

import tilelang
import torch
import torch.distributed as dist

from .. import __version__
from ..builtins.errors import TileWeaveError
from ..ops.core.compiled import free_caches
from ..ops.core.groups import group_of
from ..runtime import SymmetricTensor, finalize, init, symmetric
from ..runtime.executor.compile_ahead import compile_ahead
from ..runtime.host.group import Group, from_torchrun
from ..runtime.host.heap import HeapExhausted
from ..runtime.host.measure import interleaved, largest
from ..runtime.host.out_file import out_file
from .case import AGAINST, INPUTS, OURS, Buffers, Case, Checker, by_call, implementations_of
from .figure import DRAWN, draw, require_matplotlib
from .results import Result, load, save, summary, table, wrong_others
from .selection import DTYPE, FAMILIES, BenchOptions, names_of

CPU_OPERATIONS = 1 << 32
"""Limit of a case without a GPU: each implementation runs some 30 times, a few seconds each."""
_SPARE_BYTES = 64 << 20
"""Bytes of the heap for counters and tails."""
_USED = 0.9
"""Part of the free memory of a GPU that operands may use."""


def run(options: BenchOptions) -> bool:
    """Measure, print a table on rank 0, and write the files. Return whether all results of our
    operators are right.

    Collective: under torchrun every process calls it.

    Raises:
        TileWeaveError: an operator, a shape, a type or a file is not legal. Nothing is measured.
    """
    cases = options.cases()
    if options.against is not None and len(ops := {case.op for case in cases}) > 1:
        names = ", ".join(sorted(ops))
        raise TileWeaveError(f"bench: --against for {names}; expected one operator")
    _require_files(options.json, options.figure)
    _require_drawn(options.figure, cases)
    possible = _possible(cases)
    _require_small_without_gpu(possible)
    group = join(possible)
    log = print if group.rank == 0 else _nothing
    if group.device.type == "cpu":
        log("no GPU: gloo and torch on the CPU; these times do not represent the operators")
    gathered = None
    if group.device.type == "cuda":
        gathered = _room(possible)
        cases = _fitting(cases, _free_bytes(group))
    problems = [c.problem(group.world_size, DTYPE) if c.obstacle is None else None for c in cases]
    if group.device.type == "cuda":
        _compile(cases, problems, group, log)
    results: list[Result] = []
    notes: set[str] = set()
    before: Result | Case | None = None
    for case, problem in zip(cases, problems, strict=True):
        if problem is None:
            log("\n".join(table([case], before)), flush=True)
            before = case
            continue
        result, missing = measured(case, problem, group, gathered, options)
        log("\n".join(table([result], before)), flush=True)
        before = result
        absent = [f"{name}: -: {reason}" for name, reason in missing.items()]
        new = [note for note in wrong_others(result) + absent if note not in notes]
        log(*(f"  {note}\n" for note in new), sep="", end="", flush=True)
        notes.update(new)
        results.append(result)
    log("\n".join(summary(results)), flush=True)
    if group.rank == 0:
        _write(options, _machine(group, options), results)
    if group.device.type == "cuda":
        finalize()
    return all(r.is_right(OURS) for r in results)


def measured(
    case: Case, problem: Any, group: Group, gathered: SymmetricTensor | None, options: BenchOptions
) -> tuple[Result, dict[str, str]]:
    """Return the result for one problem, and why implementations are missing."""
    begin = time.perf_counter()
    memory, random = case.family.stage(problem, group)
    buffers, inputs = Buffers(problem, group, gathered, memory), list(islice(random, INPUTS))
    constructors = dict(case.implementations)
    if (against := options.against) is not None:
        family = case.family
        constructors[AGAINST] = lambda b: by_call(b, against, family.arguments, family.error)
    implementations, missing = implementations_of(buffers, inputs[0], options.warmups, constructors)
    checker = Checker(implementations)
    ms = interleaved(
        {name: implementation.call for name, implementation in implementations.items()},
        inputs,
        group,
        warmups=options.warmups,
        runs=options.runs,
        before=lambda name, inputs: implementations[name].prepare(inputs),
        after=checker,
        title=f"{case.op} {case.shape}",
    )
    buffers.close()
    free_caches()  # the heap has room for one case at a time, in one piece
    errors = largest(checker.errors, group)
    choice = case.family.choice(problem, inputs[0])
    seconds = time.perf_counter() - begin
    return Result(case.op, case.shape, choice.name, choice.reason, ms, errors, seconds), missing


def again(file: str, figure: str | None) -> None:
    """Print the results that an earlier run wrote to ``file`` as JSON, and draw them."""
    _require_files(None, figure)
    machine, results = load(file)
    _require_drawn(figure, results)
    print("\n".join([*table(results), *summary(results)]))
    if figure is not None:
        draw(figure, machine, results)


def _write(options: BenchOptions, machine: dict[str, Any], results: list[Result]) -> None:
    if options.json is not None:
        save(options.json, machine, results)
    if options.figure is not None:
        draw(options.figure, machine, results)


def _require_files(json: str | None, figure: str | None) -> None:
    for option, file in (("--json", json), ("--figure", figure)):
        if file is not None:
            out_file(f"bench: {option}", file)
    if figure is not None:
        if Path(figure).suffix != ".png":
            raise TileWeaveError(f"bench: --figure {figure}; expected a name that ends in .png")
        require_matplotlib()


def _require_drawn(figure: str | None, cases: Sequence[Case | Result]) -> None:
    if figure is not None and not any(type(case.shape) in DRAWN for case in cases):
        names = ", ".join(dict.fromkeys(case.op for case in cases))
        drawn = [name for family in FAMILIES if family.kind in DRAWN for name in names_of(family)]
        raise TileWeaveError(
            f"bench: --figure {figure} of {names}; expected one of {', '.join(drawn)}, which are "
            "drawn"
        )


def _possible(cases: list[Case]) -> list[Case]:
    """Return the cases that the ranks can compute; refuse a command that has none."""
    possible = [case for case in cases if case.obstacle is None]
    if not possible:
        case = cases[0]
        raise TileWeaveError(f"bench: {case.op} {case.shape}: {case.obstacle}")
    return possible


def _fitting(cases: Iterable[Case], free_bytes: int) -> list[Case]:
    """Return the cases; those whose operands do not fit in the GPU's memory have an obstacle."""
    return [
        replace(
            case,
            obstacle=f"operands and expected results have {case.device_bytes / (1 << 30):.1f} GiB; "
            f"expected at most {free_bytes / (1 << 30):.1f} GiB, the free memory of a rank",
        )
        if case.obstacle is None and case.device_bytes > free_bytes
        else case
        for case in cases
    ]


def _free_bytes(group: Group) -> int:
    """Return the memory that a rank's operands may use on a GPU, equal on all ranks. Collective."""
    free, _ = torch.cuda.mem_get_info(group.device)
    least = -largest({"free": -free}, group)["free"]
    return int(_USED * least / (group.world_size if group.shares_gpus else 1))


def _require_small_without_gpu(cases: Sequence[Case]) -> None:
    """Refuse cases that would keep a CPU busy for hours, such as the models' shapes."""
    if torch.cuda.is_available():
        return
    for case in cases:
        if case.operations > CPU_OPERATIONS:
            raise TileWeaveError(
                f"bench: {case.op} {case.shape} takes {case.operations:.1e} operations, and torch "
                f"sees no GPU; expected a GPU, or at most {CPU_OPERATIONS:.1e} operations, such as "
                f"`bench {case.op} {case.family.example}`"
            )


def join(cases: list[Case], at_once: int = 1) -> Group:
    """Join the other ranks. Unless its size is given, the heap has room for ``at_once`` operators
    of the largest case, and for what the copies of data alone write."""
    if torch.cuda.is_available():
        max_bytes = max(case.symmetric_bytes for case in cases)
        gathered = max(case.gathered_bytes for case in cases)
        is_set = "TILEWEAVE_HEAP_BYTES" in os.environ
        init(heap_bytes=None if is_set else at_once * max_bytes + gathered + _SPARE_BYTES)
    elif from_torchrun("WORLD_SIZE", 1) > 1 and not dist.is_initialized():
        try:
            dist.init_process_group("gloo")
        except ValueError as error:
            raise TileWeaveError(f"init: {error}; expected the variables of torchrun") from None
        atexit.register(dist.destroy_process_group)
    return group_of("")


def _compile(
    cases: list[Case], problems: list[Any], group: Group, log: Callable[..., None]
) -> None:
    """Compile all kernels, many at a time, before they are needed one after the other."""
    begin = time.perf_counter()
    pairs = [(case, p) for case, p in zip(cases, problems, strict=True) if p is not None]
    count = compile_ahead(
        program for case, p in pairs for program in case.family.programs(p, group)
    ).kernels
    seconds = time.perf_counter() - begin
    log(f"{count} kernels compiled in {seconds:.0f} s", flush=True)


def _room(cases: Iterable[Case]) -> SymmetricTensor | None:
    """Allocate memory for the implementations that only copy, once for all cases: operators would
    otherwise fill the heap before them."""
    max_elements = max(case.gathered_bytes for case in cases) // DTYPE.itemsize
    try:
        return symmetric((max_elements,), DTYPE) if max_elements else None
    except HeapExhausted:
        return None


def _machine(group: Group, options: BenchOptions) -> dict[str, Any]:
    device = group.device
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "ranks": group.world_size,
        "dtype": str(DTYPE).removeprefix("torch."),
        "warmups": options.warmups,
        "runs": options.runs,
        "unit": "ms",
        "versions": {
            "tileweave": __version__,
            "tilelang": tilelang.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
    }


def _nothing(*_: Any, **__: Any) -> None: ...
