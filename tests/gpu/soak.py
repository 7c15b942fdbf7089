"""Random operators and inferred programs for a long time; every result is verified.

    torchrun --nproc-per-node=2 tests/gpu/soak.py [MINUTES] [--seed S] [--visit V]

A visit draws a compiled problem and makes many launches with new inputs: back to back, on a side
stream, or from a CUDA graph. Some problems have ``tileweave.delays``; ranks sleep at random. The
results stay on the GPU, which compares them with exact sums; the host reads one number a visit.
Without a GPU the operators run with gloo.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch

from tileweave.ops.core.groups import group_of
from tileweave.runtime.executor.compile_ahead import compile_ahead

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.on_gpus import GPU, Verdicts, main, parser_of, say
from tests.soak_mixtures import Grouped, Mixture
from tests.soak_problems import DEVICE, Data, Draw, Exchange, Gemm, Inferred

HEAP_BYTES = 4 << 30
FIRST, MORE, MOST = 32, 16, 256
"""Number of problems at first, more of them after every ``VISITS`` visits, and the largest."""
VISITS = 64
LAUNCHES = 64 if GPU else 8
"""Launches of a visit that captures no graph."""
REPLAYS = 8
WRONG_SHOWN = 10
MODES = ("back to back", "side stream", "graph")
KINDS: dict[str, type] = {
    "gemm": Gemm, "collective": Exchange, "inferred": Inferred, "mixture": Mixture,
    "grouped": Grouped,
}  # fmt: skip
NEED_GPU = ("inferred",)


def drawn(seed: int, index: int) -> Draw:
    """Return problem number ``index`` of a seed, the same on all ranks."""
    rng = random.Random(f"{seed} {index}")
    kinds = [kind for name, kind in KINDS.items() if GPU or name not in NEED_GPU]
    return rng.choice(kinds).draw(rng)


class Results:
    """Comparison on the GPU of the results of one visit.

    Attributes:
        first: index of the first wrong element of each result, and what it is and should be;
            negative if the result is right.
    """

    def __init__(self, most: int) -> None:
        self.first = torch.full((most, 3), -1.0, dtype=torch.float64, device=DEVICE)
        self.names: list[str] = []

    def add(self, launch: int, data: Data, slot: int) -> None:
        """Enqueue the comparison of what the launch with the inputs of ``slot`` wrote."""
        for name, actual, right, tolerance in data.results(slot):
            actual, right = actual.flatten(), right.flatten()
            if tolerance:
                differs = ~((actual - right).abs() <= tolerance)
            else:
                differs = actual != right
            index = torch.where(differs, _indices(len(actual)), len(actual)).min()
            at = index.clamp(max=len(actual) - 1).view(1)
            row = torch.cat([at.double(), actual[at].double(), right[at].double()])
            self.first[len(self.names)] = torch.where(index < len(actual), row, -1.0)
            self.names.append(f"launch {launch}, {name}")

    def wrong(self) -> list[str]:
        """Return what is wrong. Waits for all launches."""
        if not (self.first[:, 0] >= 0).any().item():
            return []
        rows = zip(self.names, self.first.tolist(), strict=False)
        return [
            f"{name}: first wrong element {int(index)} is {actual:g}, expected {right:g}"
            for name, (index, actual, right) in rows
            if index >= 0
        ]


_known_indices: dict[int, torch.Tensor] = {}


def _indices(count: int) -> torch.Tensor:
    """Return 0 to ``count`` - 1 on the device."""
    size = 1 << max(count - 1, 0).bit_length()
    if size not in _known_indices:
        _known_indices[size] = torch.arange(size, device=DEVICE)
    return _known_indices[size][:count]


@dataclass
class Soak:
    """Visits of the problems of one seed. All ranks make the same ones.

    Attributes:
        problems: the problems so far, in the order in which they are drawn.
        launches: launches of this rank.
        wrong: wrong results of this rank.
        used: numbers of the visited problems.
        compile_s, visits_s: seconds of compiling ahead, and of visits.
    """

    seed: int
    problems: list[Draw] = field(default_factory=list)
    launches: int = 0
    wrong: int = 0
    used: set[int] = field(default_factory=set)
    compile_s: float = 0.0
    visits_s: float = 0.0

    def grow(self, count: int) -> None:
        """Draw problems until there are ``count``, and compile the new ones in parallel."""
        start, new = time.monotonic(), range(len(self.problems), count)
        self.problems += [drawn(self.seed, index) for index in new]
        if GPU:
            compile_ahead(p for index in new for p in self.problems[index].programs())
        self.compile_s += time.monotonic() - start

    def visit(self, number: int) -> None:
        """Make the launches of visit ``number``, which depends on the seed and the number only."""
        self.grow(min(MOST, FIRST + number // VISITS * MORE))
        start = time.monotonic()
        rng = random.Random(f"{self.seed} visit {number}")
        index = rng.randrange(len(self.problems))
        problem, mode = self.problems[index], rng.choice(MODES if GPU else MODES[:1])
        if mode == "graph" and not problem.capturable:
            mode = "side stream"
        place = f"visit {number}, problem {index}: {problem.name}, {mode}"
        delays = random.Random(f"{self.seed} {number} {group_of('').rank}")
        try:
            data = problem.data()
            if mode == "graph":
                wrong = self._replayed(data, rng, delays)
            else:
                wrong = self._launched(data, rng, delays, mode == "side stream")
        except Exception:
            say(f"soak: seed {self.seed}, {place}: raised")
            raise
        self.used.add(index)
        for text in wrong[: max(0, WRONG_SHOWN - self.wrong)]:
            say(f"soak: WRONG: seed {self.seed}, {place}: rank {group_of('').rank}, {text}")
        self.wrong += len(wrong)
        self.visits_s += time.monotonic() - start

    def _launched(
        self, data: Data, rng: random.Random, delays: random.Random, aside: bool
    ) -> list[str]:
        """Launch without host synchronization; return what is wrong."""
        data.fill(rng.randrange(1 << 40))
        results = Results(LAUNCHES * len(data.results(0)))
        side = torch.cuda.Stream() if aside else None
        for launch in range(LAUNCHES):
            slot = rng.randrange(data.launches)
            sleep(delays)
            if side is not None and rng.random() < 0.5:
                side.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(side):
                    data.launch(slot)
                torch.cuda.current_stream().wait_stream(side)
            else:
                data.launch(slot)
            results.add(launch, data, slot)
        self.launches += LAUNCHES
        return results.wrong()

    def _replayed(self, data: Data, rng: random.Random, delays: random.Random) -> list[str]:
        """Replay a graph of all slots with new inputs each time; return what is wrong."""
        data.fill(rng.randrange(1 << 40))
        data.launch(0)  # compiles, which a capture may not
        results = Results(REPLAYS * data.launches * len(data.results(0)))
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for slot in range(data.launches):
                data.launch(slot)
        for replay in range(REPLAYS):
            data.fill(rng.randrange(1 << 40))
            sleep(delays)
            graph.replay()
            for slot in range(data.launches):
                results.add(replay * data.launches + slot, data, slot)
        self.launches += 1 + REPLAYS * data.launches
        return results.wrong()


def sleep(delays: random.Random) -> None:
    """Delay the GPU of this rank, now and then."""
    if GPU and delays.random() < 0.1:
        torch.cuda._sleep(delays.randrange(1, 400_000))


def soak(seed: int, minutes: float, first: int = 0, same: bool = False) -> tuple[Soak, int]:
    """Make visits until the time of rank 0 is over; return them, and the wrong results of all.

    Args:
        first: number of the first visit.
        same: repeat this visit only.
    """
    group, number = group_of(""), first
    soaked = Soak(int(group.exchange("soak: seed", str(seed))[0]))
    end = time.monotonic() + 60 * minutes
    shown = time.monotonic()
    while True:
        going = str(time.monotonic() < end)
        if group.exchange("soak", going, timeout_s=3600.0)[0] != "True":
            break
        soaked.visit(number)
        number += not same
        if group.rank == 0 and time.monotonic() - shown > 60:
            shown = time.monotonic()
            say(f"soak: {number - first} visits, {soaked.launches} launches, wrong {soaked.wrong}")
    wrong = sum(map(int, group.exchange("soak: wrong", str(soaked.wrong))))
    return soaked, wrong


def verdicts(options: argparse.Namespace) -> Verdicts:
    if not GPU:
        say(f"{', '.join(NEED_GPU)}, side streams, graphs: not run: no GPU")
    visit = options.visit
    soaked, wrong = soak(options.seed, options.minutes, visit or 0, visit is not None)
    group = group_of("")
    if group.rank == 0:
        per_minute = soaked.launches / max(soaked.visits_s / 60, 1e-9)
        say(
            f"launches {soaked.launches}, problems {len(soaked.used)}, ranks {group.world_size}, "
            f"wrong {wrong}, seed {soaked.seed}"
        )
        say(
            f"{per_minute:.0f} launches a minute of visits, {soaked.visits_s:.0f} s of visits, "
            f"{soaked.compile_s:.0f} s of compiling"
        )
    yield "soak", f"{wrong} wrong results" if wrong else ""


if __name__ == "__main__":
    parser = parser_of(__doc__)
    parser.add_argument("minutes", nargs="?", type=float, default=3.0, metavar="MINUTES")
    parser.add_argument("--seed", type=int, default=time.time_ns() // 10**9)
    parser.add_argument("--visit", type=int, help="repeat this visit only, after a wrong result")
    sys.exit(main(verdicts, parser, heap_bytes=HEAP_BYTES))
