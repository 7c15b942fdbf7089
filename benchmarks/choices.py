"""Programs, tiles and bands of one operator that multiplies, side by side.

    torchrun --nproc-per-node=4 benchmarks/choices.py matmul_all_reduce
        [--shapes 16384x4096x14336 ...] [--programs two_phase ...] [--bands 4 8 16] [--runs 10]

Interleaved and checked, as ``tileweave bench`` does it, beside NCCL + cuBLAS: of each rank the
median, of these the largest. ``tw.tune`` keeps the fastest; this shows how far the others are.
Without a GPU it tells what would be measured.
"""

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

import torch

import tileweave as tw
from tileweave.ops.groups import group_of
from tileweave.ops.operators import OPERATORS, Choice, Operator
from tileweave.ops.problem import Problem
from tileweave.ops.tiles import LARGE, SMALL
from tileweave.ops.trial import TOLERANCE, Trial, problem_of, relative_error
from tileweave.runtime.compile_ahead import compile_ahead
from tileweave.runtime.measure import interleaved, largest

HEAP_BYTES = 32 << 30
"""All choices of one problem are ready at a time."""
INPUTS = 3


def choices_of(problem: Problem, programs: Sequence[str], bands: Sequence[int]) -> Iterator[Choice]:
    """What the table picks from, and large and small tiles in each of ``bands``."""
    kind = OPERATORS[problem.op]
    every = [
        Choice(program, replace(tiles, band=band))
        for program in kind.programs
        for tiles in (LARGE, SMALL)
        for band in bands
    ]
    for choice in dict.fromkeys([*kind.options(problem), *every]):
        if choice.program in programs or not programs:
            yield choice


def made(problem: Problem, choice: Choice) -> Operator | None:
    """None where it does not compile, or not into the heap."""
    try:
        return OPERATORS[problem.op](problem, choice)
    except Exception as error:
        print(f"  left out: {choice}: {error}"[:300], flush=True)
        return None


def compare(problem: Problem, choices: Sequence[Choice], runs: int) -> bool:
    """Time and check all of them; prints a row of each, the fastest first."""
    begin, group = time.perf_counter(), group_of("")
    kind, trial = OPERATORS[problem.op], Trial(problem, group)
    found = {choice: made(problem, choice) for choice in choices}
    operators = {str(choice): operator for choice, operator in found.items() if operator}
    inputs = [trial.inputs() for _ in range(INPUTS)]
    rights = [trial.right_of(*given) for given in inputs]
    errors = dict.fromkeys([*operators, "nccl"], 0.0)

    def call(operator: Operator, number: int) -> None:
        operator(*inputs[number], trial.c, *trial.epilogue.tensors)

    def after(name: str, number: int, _: None) -> None:
        errors[name] = max(errors[name], relative_error(trial.c, rights[number]))

    contenders = {name: partial(call, operator) for name, operator in operators.items()}
    contenders["nccl"] = lambda number: kind.unfused(
        *inputs[number], trial.c, group, trial.epilogue
    )
    ms = interleaved(
        contenders, range(INPUTS), group, warmups=3, runs=runs,
        before=lambda name, number: trial.c.fill_(float("nan")), after=after,
    )  # fmt: skip
    errors = largest(errors, group)
    for operator in operators.values():
        operator.free()
    if group.rank == 0:
        print(f"{problem}, {time.perf_counter() - begin:.0f} s; the table: {kind.table(problem)}")
        for name in sorted(ms, key=ms.get):
            wrong = f"  wrong: {errors[name]:.1e}" * (errors[name] > TOLERANCE)
            print(f"  {ms[name]:8.4f} ms  {name}{wrong}", flush=True)
    return all(error <= TOLERANCE for error in errors.values())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("op", choices=OPERATORS)
    parser.add_argument("--shapes", nargs="+", default=["4096x8192x28672"], help="of all ranks")
    parser.add_argument("--programs", nargs="+", default=[], help="default: all of them")
    parser.add_argument("--bands", type=int, nargs="+", default=[4, 8, 16])
    parser.add_argument("--runs", type=int, default=10)
    options = parser.parse_args()
    ranks = 4
    if torch.cuda.is_available():
        tw.init(heap_bytes=HEAP_BYTES)
        ranks = group_of("").world_size
    problems = [
        problem_of(options.op, *map(int, shape.split("x")), ranks, torch.bfloat16)
        for shape in options.shapes
    ]
    choices = [list(choices_of(p, options.programs, options.bands)) for p in problems]
    if not torch.cuda.is_available():
        for problem, every in zip(problems, choices, strict=True):
            print(problem, *every, sep="\n  ")
        return 0
    programs = []
    for problem, every in zip(problems, choices, strict=True):
        for choice in every:
            with suppress(Exception):
                programs += OPERATORS[problem.op].launched(problem, choice)
    compile_ahead(programs)
    if group_of("").rank == 0:
        print(f"{len(programs)} compiled", flush=True)
    # Every problem is measured, also behind a wrong one.
    right = [compare(p, every, options.runs) for p, every in zip(problems, choices, strict=True)]
    tw.finalize()
    return 0 if all(right) else 1


if __name__ == "__main__":
    sys.exit(main())
