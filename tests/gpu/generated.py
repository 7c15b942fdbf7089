"""Generated programs between real GPUs: those that the compiler accepts are right.

    torchrun --nproc-per-node=2 tests/gpu/generated.py [FAMILY ...] [--programs 16] [--launches 20]

The families are those of tests/generated, whose programs run on the simulator. Here each program is
launched back to back with several inputs, between random sleeps. Its results must be those of the
reference. The refused programs are printed.
"""

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator
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
from tests.modules import load_module
from tests.on_gpus import Verdicts, main, parser_of, say

INPUTS = 3
"""Inputs of a program, which its launches have in turn."""


def on_gpu(values: np.ndarray, dtype: str) -> torch.Tensor:
    return torch.from_numpy(values.astype(np.float64)).to(getattr(torch, dtype)).cuda()


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
        {name: on_gpu(given[n % INPUTS][0][name], dtype) for name, _, dtype in parameters}
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
                right = on_gpu(given[number % INPUTS][1][name], dtype)
                if not torch.equal(tensors[name].double(), right.double()):
                    return f"launch {number}: {name} is wrong"
    return ""


def verdicts(options: argparse.Namespace) -> Verdicts:
    with tempfile.TemporaryDirectory() as own:
        # The place of a program is a part of it, so all ranks load the files of rank 0.
        folder = group_of("").exchange("generated: folder", own)[0]
        for family in options.checks or FAMILIES:
            programs, loaded = [], []
            for seed in range(options.first, options.first + options.programs):
                program = random_program(family, seed)
                if program.ranks == tw.world_size():
                    file = Path(folder) / f"{family}_{seed}.py"
                    if not tw.rank():
                        file.write_text(program.text)
                    programs.append((seed, program))
            group_of("").meet("generated: files")
            for seed, _ in programs:
                loaded.append(load_module(Path(folder) / f"{family}_{seed}.py").program)
            compile_ahead(loaded)
            faults, refused = [], 0
            for (seed, program), function in zip(programs, loaded, strict=True):
                try:
                    kernel = tw.compile(function)
                except tw.TileWeaveError as error:
                    if not tw.rank():
                        say(f"{family} {seed}: refused: {str(error).splitlines()[0]}")
                    refused += 1
                    continue
                if fault := fault_of(kernel, program, options.launches):
                    say(f"{family} {seed}: {fault}")
                    faults.append(f"{seed}: {fault}")
                kernel.free()
            right = len(programs) - refused
            fault = "; ".join(faults) if right else "all programs are refused"
            yield family, fault, f"{right} accepted, {refused} refused"


if __name__ == "__main__":
    parser = parser_of(__doc__, FAMILIES)
    parser.add_argument("--programs", type=int, default=16, help="programs of each family")
    parser.add_argument("--first", type=int, default=0, help="seed of the first program")
    parser.add_argument("--launches", type=int, default=20)
    sys.exit(main(verdicts, parser))
