"""Generated programs between real GPUs: those that the compiler accepts are right.

    torchrun --nproc-per-node=2 tests/gpu/generated.py [FAMILY ...] [--programs 16] [--launches 20]

The families are those of tests/generated, whose programs run on the simulator. Here each program is
launched back to back with several inputs, between random sleeps. Its results must be those of the
reference. The refused programs are printed.
"""

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import count, islice
from pathlib import Path

import numpy as np
import torch

import tileweave as tw
from tileweave.ops.core.groups import group_of
from tileweave.runtime.executor.compile_ahead import compile_ahead

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.generated.programs import FAMILIES, Program, random_program
from tests.generated.reference import Unsuitable, inputs_of, is_output, parameters_of, results_of
from tests.gpu.lowering import as_torch
from tests.modules import load_module
from tests.on_gpus import Verdicts, main, parser_of, say

INPUTS = 3
"""Inputs of a program, which its launches have in turn."""


def exact_inputs(program: Program) -> Iterator[tuple[dict, dict]]:
    """Yield inputs and results of this rank; the results are exact and defined."""
    for seed in count():
        with suppress(Unsuitable):
            inputs = inputs_of(program.reference, program.ranks, seed)
            results = results_of(program.reference, program.ranks, inputs)
            yield inputs[tw.rank()], results[tw.rank()]


def fault_of(kernel: Callable, program: Program, launches: int) -> str:
    """Launch the program; return "" or the first result that is wrong."""
    sleep = np.random.default_rng(tw.rank())
    parameters = parameters_of(program.reference)
    given = list(islice(exact_inputs(program), INPUTS))
    calls = [
        {name: as_torch(given[n % INPUTS][0][name], dtype) for name, _, dtype in parameters}
        for n in range(launches)
    ]
    torch.cuda.synchronize()
    for tensors in calls:
        if sleep.random() < 0.3:
            torch.cuda._sleep(int(sleep.integers(1, 400_000)))
        kernel(*tensors.values())
    torch.cuda.synchronize()
    for number, tensors in enumerate(calls):
        for name, _, dtype in parameters:
            if is_output(name):
                right = as_torch(given[number % INPUTS][1][name], dtype)
                if not torch.equal(tensors[name].double(), right.double()):
                    return f"launch {number}: {name} is wrong"
    return ""


def programs_of(family: str, seeds: Iterable[int], folder: Path) -> dict[int, Program]:
    """Return the programs for this number of ranks, by seed. Rank 0 writes their files."""
    programs = {seed: random_program(family, seed) for seed in seeds}
    programs = {seed: p for seed, p in programs.items() if p.ranks == tw.world_size()}
    if tw.rank() == 0:
        for seed, program in programs.items():
            file_of(folder, family, seed).write_text(program.text)
    group_of("").meet(f"generated: {family}")
    return programs


def file_of(folder: Path, family: str, seed: int) -> Path:
    return folder / f"{family}_{seed}.py"


def verdict_of(
    family: str, programs: Mapping[int, Program], folder: Path, launches: int
) -> tuple[str, ...]:
    """Run the programs of a family; return its verdict."""
    loaded = [load_module(file_of(folder, family, seed)).program for seed in programs]
    compile_ahead(loaded)
    faults, accepted = [], 0
    for (seed, program), function in zip(programs.items(), loaded, strict=True):
        try:
            kernel = tw.compile(function)
        except tw.TileWeaveError as error:
            if tw.rank() == 0:
                say(f"{family} {seed}: refused: {str(error).splitlines()[0]}")
            continue
        accepted += 1
        if fault := fault_of(kernel, program, launches):
            faults.append(f"{seed}: {fault}")
        kernel.free()
    fault = "; ".join(faults) if accepted else "all programs are refused"
    return family, fault, f"{accepted} of {len(programs)} accepted"


def verdicts(options: argparse.Namespace) -> Verdicts:
    seeds = range(options.first, options.first + options.programs)
    with tempfile.TemporaryDirectory() as own:
        # The place of a program is a part of it, so all ranks load the files of rank 0.
        folder = Path(group_of("").exchange("generated: folder", own)[0])
        for family in options.checks or FAMILIES:
            programs = programs_of(family, seeds, folder)
            yield verdict_of(family, programs, folder, options.launches)


if __name__ == "__main__":
    parser = parser_of(__doc__, FAMILIES)
    parser.add_argument("--programs", type=int, default=16, help="programs of each family")
    parser.add_argument("--first", type=int, default=0, help="seed of the first program")
    parser.add_argument("--launches", type=int, default=20)
    sys.exit(main(verdicts, parser))
