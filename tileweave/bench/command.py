"""``tileweave bench``: operators beside their parts and alternatives, in one process, on all
ranks."""

from __future__ import annotations

import atexit
import os
import platform
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from itertools import islice
from pathlib import Path
from typing import Any

import tilelang
import torch
import torch.distributed as dist

from .. import __version__
from ..builtins.errors import TileWeaveError
from ..ops.core.cache import free_prepared
from ..ops.core.groups import group_of
from ..passes.ir.sizes import LARGEST
from ..runtime import SymmetricTensor, finalize, init, symmetric
from ..runtime.executor.compile_ahead import compile_ahead
from ..runtime.host.group import Group, from_torchrun
from ..runtime.host.heap import HeapExhausted
from ..runtime.host.measure import interleaved, largest
from ..runtime.host.out_file import out_file
from .attention import ATTENTION, Lengths
from .cases import AttentionCase, Case, CollectiveCase, ProductCase
from .collectives import COLLECTIVES, size_of
from .figure import DRAWN, draw, require_matplotlib
from .implementations import OPERATORS, OURS, Checker, implementations_of
from .results import Result, Shape, load, save, summary, table, wrong_others

MODELS = {
    "llama8b": (4096, 14336),
    "llama70b": (8192, 28672),
    "llama405b": (16384, 53248),
    "qwen72b": (8192, 29568),
}
"""Hidden and inner size of the MLP. All-gather precedes its first product; reduce-scatter and
all-reduce follow its second."""
SIZES = 1, 16, 64, 256
"""Default sizes of a rank's input to a collective, in MiB."""
INPUTS = 3
"""Number of input sets used in turn. It is odd, so that memory that is reused every second call
never holds the right result of an earlier call."""
CPU_OPERATIONS = 1 << 32
"""Limit of a case without a GPU: each implementation runs some 30 times, a few seconds each."""
_SPARE_BYTES = 64 << 20
"""Bytes of the heap for counters and tails."""


@dataclass(frozen=True)
class Wanted:
    """Options of the command line.

    Attributes:
        operators: names of operators and collectives. If empty: with ``sizes`` all collectives,
            with lengths attention, else all GEMM operators.
        shapes: names of models, and ``MxNxK``; for GEMM operators.
        rows: values of M for each model.
        dtype: torch's name of the type.
        warmups, runs: numbers of uncounted and of counted runs.
        json, figure: files to write; None for none.
        command: name of the command, for errors.
        sizes: a rank's input to a collective, in MiB; empty for ``SIZES``.
        attention: options of attention.
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
    sizes: Sequence[int] = ()
    attention: Lengths = field(default_factory=Lengths)

    def cases(self) -> list[Case]:
        """Return the cases: operators by shape, collectives by size, attention by length.

        Raises:
            TileWeaveError: an operator does not exist.
        """
        legal = [*OPERATORS, *((*COLLECTIVES, ATTENTION) if self.command == "bench" else ())]
        for name in self.operators:
            if name not in legal:
                raise TileWeaveError(f"{self.command}: {name}; expected {', '.join(legal)}")
        implied: list[str] = []
        for option, values, theirs in (
            ("sizes", self.sizes, tuple(COLLECTIVES)),
            ("lengths", self.attention.lengths, (ATTENTION,)),
        ):
            if values and self.operators and not set(theirs) & set(self.operators):
                given, expected = ",".join(map(str, values)), ", ".join(theirs)
                raise TileWeaveError(
                    f"bench: --{option} {given}; expected {expected} by name, or no name"
                )
            implied += theirs if values else ()
        names = self.operators or implied or OPERATORS
        return [case for name in names for case in self._subjects(name)]

    def _subjects(self, name: str) -> list[Case]:
        ranks = _world_size()
        if name == ATTENTION:
            return [AttentionCase(name, shape) for shape in self.attention.shapes(ranks)]
        if name in COLLECTIVES:
            return [
                CollectiveCase(name, size_of(mebibytes, ranks)) for mebibytes in self.sizes or SIZES
            ]
        shapes = shapes_of(name, self.shapes, self.rows, self.command)
        return [ProductCase(name, shape) for shape in shapes]


def _world_size() -> int:
    """Return the number of ranks, also before they join a group."""
    if dist.is_initialized():
        return dist.get_world_size()
    return from_torchrun("WORLD_SIZE", 1)


def shapes_of(
    op: str, names: Iterable[str], rows: Iterable[int], command: str = "bench"
) -> list[Shape]:
    """Return the shapes of the command line: names of models, each combined with all ``rows``, or
    ``MxNxK``.

    Raises:
        TileWeaveError: a name is neither.
    """
    shapes = []
    for name in names:
        sizes = name.split("x")
        if name in MODELS:
            hidden, inner = MODELS[name]
            N, K = (inner, hidden) if op == "all_gather_matmul" else (hidden, inner)
            shapes += [Shape(name, M, N, K) for M in rows]
        elif len(sizes) == 3 and all(s.isdecimal() and 0 < int(s) <= LARGEST for s in sizes):
            shapes.append(Shape("", *map(int, sizes)))
        else:
            raise TileWeaveError(
                f"{command}: --shapes {name}; expected {', '.join(MODELS)} or MxNxK (operators "
                "precede the options)"
            )
    return shapes


def run(wanted: Wanted) -> bool:
    """Measure, print a table on rank 0, and write the files. Return whether all results of our
    operators are right.

    Collective: under torchrun every process calls it.

    Raises:
        TileWeaveError: an operator, a shape, a type or a file is not legal. Nothing is measured.
    """
    cases = wanted.cases()
    _require_files(wanted.json, wanted.figure)
    _require_drawn(wanted.figure, cases)
    _require_small_without_gpu(cases)
    group = join(cases)
    dtype = getattr(torch, wanted.dtype)
    problems = [case.problem(group.world_size, dtype) for case in cases]
    log = print if group.rank == 0 else _nothing
    if group.device.type == "cpu":
        log("no GPU: gloo and torch on the CPU; these times do not represent the operators")
    gathered = None
    if group.device.type == "cuda":
        gathered = _room(cases, dtype)
        _compile(cases, problems, group, log)
    results: list[Result] = []
    notes: set[str] = set()
    for case, problem in zip(cases, problems, strict=True):
        result, missing = measured(case, problem, group, gathered, wanted)
        log("\n".join(table([result], results[-1] if results else None)), flush=True)
        absent = [f"{name}: -: {why}" for name, why in missing.items()]
        new = [note for note in wrong_others(result) + absent if note not in notes]
        log(*(f"  {note}\n" for note in new), sep="", end="", flush=True)
        notes.update(new)
        results.append(result)
    log("\n".join(summary(results)), flush=True)
    if group.rank == 0:
        _write(wanted, _machine(group, wanted), results)
    if group.device.type == "cuda":
        finalize()
    return all(r.is_right(OURS) for r in results)


def measured(
    case: Case, problem: Any, group: Group, gathered: SymmetricTensor | None, wanted: Wanted
) -> tuple[Result, dict[str, str]]:
    """Return the result for one problem, and why implementations are missing."""
    begin = time.perf_counter()
    buffers, random = case.stage(problem, group, gathered)
    inputs = list(islice(random, INPUTS))
    implementations, missing = implementations_of(buffers, inputs[0], wanted.warmups, case.makers)
    checker = Checker(implementations)
    ms = interleaved(
        {name: implementation.call for name, implementation in implementations.items()},
        inputs,
        group,
        warmups=wanted.warmups,
        runs=wanted.runs,
        before=lambda name, given: implementations[name].prepare(given),
        after=checker,
        title=f"{case.op} {case.shape}",
    )
    buffers.close()
    free_prepared()  # the heap has room for one case at a time, in one piece
    errors = largest(checker.errors, group)
    how = case.how(problem, inputs[0])
    seconds = time.perf_counter() - begin
    return Result(case.op, case.shape, how.name, how.reason, ms, errors, seconds), missing


def again(file: str, figure: str | None) -> None:
    """Print the results that an earlier run wrote to ``file`` as JSON, and draw them."""
    _require_files(None, figure)
    machine, results = load(file)
    _require_drawn(figure, results)
    print("\n".join([*table(results), *summary(results)]))
    if figure is not None:
        draw(figure, machine, results)


def _write(wanted: Wanted, machine: dict[str, Any], results: list[Result]) -> None:
    if wanted.json is not None:
        save(wanted.json, machine, results)
    if wanted.figure is not None:
        draw(wanted.figure, machine, results)


def _require_files(json: str | None, figure: str | None) -> None:
    for option, file in (("--json", json), ("--figure", figure)):
        if file is not None:
            out_file(f"bench: {option}", file)
    if figure is not None:
        if Path(figure).suffix != ".png":
            raise TileWeaveError(f"bench: --figure {figure}; expected a name that ends in .png")
        require_matplotlib()


def _require_drawn(figure: str | None, given: Sequence[Case | Result]) -> None:
    if figure is not None and not any(type(each.shape) in DRAWN for each in given):
        names = ", ".join(dict.fromkeys(each.op for each in given))
        raise TileWeaveError(
            f"bench: --figure {figure} of {names}; expected one of "
            f"{', '.join([*OPERATORS, ATTENTION])}, which are drawn"
        )


def _require_small_without_gpu(cases: Sequence[Case]) -> None:
    """Refuse cases that would keep a CPU busy for hours, such as the models' shapes."""
    if torch.cuda.is_available():
        return
    for case in cases:
        if case.operations > CPU_OPERATIONS:
            raise TileWeaveError(
                f"bench: {case.op} {case.shape} takes {case.operations:.1e} operations, and torch "
                f"sees no GPU; expected a GPU, or at most {CPU_OPERATIONS:.1e} operations, such as "
                f"`bench {case.op} {case.example}`"
            )


def join(cases: list[Case], at_once: int = 1) -> Group:
    """Join the other ranks. Unless its size is given, the heap has room for ``at_once`` operators
    of the largest case, and for what the copies of data alone write."""
    if torch.cuda.is_available():
        most = max(case.symmetric_bytes for case in cases)
        gathered = max(case.gathered_bytes for case in cases)
        given = "TILEWEAVE_HEAP_BYTES" in os.environ
        init(heap_bytes=None if given else at_once * most + gathered + _SPARE_BYTES)
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
    pairs = zip(cases, problems, strict=True)
    count = compile_ahead(program for case, p in pairs for program in case.programs(p, group))
    seconds = time.perf_counter() - begin
    log(f"{count} kernels compiled, or found compiled, in {seconds:.0f} s", flush=True)


def _room(cases: Iterable[Case], dtype: torch.dtype) -> SymmetricTensor | None:
    """Allocate memory for the implementations that only copy, once for all cases: operators would
    otherwise fill the heap before them."""
    most = max(case.gathered_bytes for case in cases) // dtype.itemsize
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
