"""Programs without explicit synchronization on real GPUs: many launches, delays, graphs.

    torchrun --nproc-per-node=2 tests/gpu/inferred.py [--launches 200] [NAME ...]

Each program of tests/corpus/programs is launched back to back, without host synchronization.
Inputs, and dynamic sizes, differ from launch to launch. Then it runs in a CUDA graph, and again
with random sleeps before launches and at every signal and wait of its kernels.
"""

import argparse
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

import tileweave as tw
from tileweave.runtime.executor.compile_ahead import compile_ahead
from tileweave.runtime.kernel.configured import configured
from tileweave.runtime.plans.parameters import parameters_of, shapes_of

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.corpus import PROGRAMS
from tests.corpus.programs import Case
from tests.on_gpus import Verdicts, main, parser_of

SEED = 11
"""Seed of the random sleeps."""


class Run:
    """One program compiled, with inputs and outputs for every launch."""

    def __init__(self, case: Case, launches: int, delays: int | None) -> None:
        ranks, me = tw.world_size(), tw.rank()
        program = case.make(ranks)
        configs = configs_of(delays)
        is_plan = isinstance(program, tw.Plan)
        self.kernel = (
            program.with_configs(configs) if is_plan else tw.compile(program, pass_configs=configs)
        )
        self.delays = delays is not None
        rng = np.random.default_rng(7 if delays is None else delays)
        rounds = [case.inputs(rng, ranks) for _ in range(launches)]
        self.expected = [case.expected(inputs)[me] for inputs in rounds]
        self.tolerance = case.tolerance
        self.arguments: dict[str, list] = {}
        self.symmetric: dict[str, tw.SymmetricTensor] = {}
        self.copies: dict[str, list[torch.Tensor]] = {}
        """Copies of the caller's own symmetric memory after each launch."""
        parameters = list(program.parameters if is_plan else parameters_of(program))
        self.shapes = [
            shapes_of(parameters, {n: v.shape for n, v in inputs[me].items()}, "inputs")
            for inputs in rounds
        ]
        for p in parameters:
            dtype = getattr(torch, p.dtype)
            shapes = [of_launch[p.name] for of_launch in self.shapes]
            if p.name in rounds[0][me]:
                values = [torch.from_numpy(inputs[me][p.name]).cuda() for inputs in rounds]
            else:
                values = [
                    torch.full(s, unwritten(dtype), dtype=dtype, device="cuda") for s in shapes
                ]
            if p.symmetric:
                self.copies[p.name] = values
                values = self._views(p.name, shapes, dtype)
            self.arguments[p.name] = values

    def _views(self, name: str, shapes: list[tuple], dtype: torch.dtype) -> list[torch.Tensor]:
        """Return a symmetric tensor for every launch, all in the same memory."""
        memory = self.symmetric[name] = tw.symmetric((max(map(math.prod, shapes)),), dtype)
        ranks = tw.world_size()
        return [memory.all[:, : math.prod(s)].view(ranks, *s) for s in shapes]

    def launch(self, number: int) -> None:
        self.kernel(*(values[number] for values in self.arguments.values()))
        for name, copies in self.copies.items():
            copies[number].copy_(self.arguments[name][number][tw.rank()])

    def wrong(self, numbers) -> list[int]:
        """Return the launches whose results differ from NumPy."""
        bad = []
        for number in numbers:
            for name, value in self.expected[number].items():
                actual = self.copies.get(name, self.arguments[name])[number].cpu().numpy()
                if not np.allclose(actual, value, rtol=0, atol=self.tolerance):
                    bad.append(number)
        return bad

    def clear(self) -> None:
        for name in self.expected[0]:
            for out in self.copies.get(name, self.arguments[name]):
                out.fill_(unwritten(out.dtype))

    def free(self) -> None:
        torch.cuda.synchronize()
        if not isinstance(self.kernel, tw.Plan):
            self.kernel.free()
        for tensor in self.symmetric.values():
            tensor.free()


def unwritten(dtype: torch.dtype) -> float:
    """Return a value that no program computes."""
    return torch.nan if dtype.is_floating_point else torch.iinfo(dtype).max


def back_to_back(run: Run, launches: int) -> list[int]:
    random = np.random.default_rng(tw.rank() + 1)
    for number in range(launches):
        if run.delays and random.random() < 0.3:
            torch.cuda._sleep(int(random.integers(1, 400_000)))
        run.launch(number)
    torch.cuda.synchronize()
    return run.wrong(range(launches))


def replayed(run: Run, launches: int, replays: int = 5) -> list[int]:
    """Replay the launches from a CUDA graph, back to back."""
    graph = torch.cuda.CUDAGraph()
    run.clear()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        for number in range(launches):
            run.launch(number)
    for _ in range(replays):
        graph.replay()
    torch.cuda.synchronize()
    return run.wrong(range(launches))


def configs_of(delays: int | None) -> dict[str, Any]:
    """Return ``pass_configs``, with sleeps or without."""
    return {} if delays is None else {"tileweave.delays": delays}


def verdicts(options: argparse.Namespace) -> Verdicts:
    ranks = tw.world_size()
    names = [name for name in options.names or PROGRAMS if ranks in PROGRAMS[name].ranks]
    compile_ahead(
        configured(name, PROGRAMS[name].make(ranks), configs_of(delays))
        for name in names
        for delays in (None, SEED)
        if not PROGRAMS[name].sizes
    )
    for name in names:
        wrong = {}
        for what, delays in (("back to back", None), ("delays", SEED)):
            run = Run(PROGRAMS[name], options.launches, delays)
            wrong[what] = back_to_back(run, options.launches)
            if delays is None:
                wrong["graph"] = replayed(run, min(8, options.launches))
            run.free()
        faults = [f"{what} wrong in launches {bad[:5]}" for what, bad in wrong.items() if bad]
        yield name, ", ".join(faults), *wrong


if __name__ == "__main__":
    parser = parser_of(__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--launches", type=int, default=200)
    sys.exit(main(verdicts, parser))
