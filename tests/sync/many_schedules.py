"""Run a thousand schedules of every program on all cores of a machine.

Usage: python -m tests.sync.many_schedules [--schedules 1000] [--seconds 600]

Prints the number of schedules that ``--seconds`` cut off, and the first fault of each program.
"""

import argparse
import os
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context

import torch

from tests.corpus import PROGRAMS

from .test_programs import run

PART = 50


def part(name: str, ranks: int, first: int, deadline: float) -> tuple[str, int, int, str]:
    """Run ``PART`` schedules. Return how many have run, and the fault."""
    if time.time() > deadline:
        return name, ranks, 0, ""
    torch.set_num_threads(1)
    try:
        run(name, ranks, range(first, first + PART))
    except Exception as error:
        return name, ranks, PART, f"from schedule {first} on: {type(error).__name__}: {error}"
    return name, ranks, PART, ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--schedules", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0, help="the seed of the first one")
    parser.add_argument("--seconds", type=float, default=3600)
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    options = parser.parse_args()
    deadline = time.time() + options.seconds
    tasks = [
        (name, ranks, first)
        for first in range(options.first, options.first + options.schedules, PART)
        for name in options.names or PROGRAMS
        for ranks in PROGRAMS[name].ranks
    ]
    done: Counter[tuple[str, int]] = Counter()
    wrong: dict[tuple[str, int], str] = {}
    with ProcessPoolExecutor(options.workers, get_context("spawn")) as pool:
        for future in as_completed(pool.submit(part, *task, deadline) for task in tasks):
            name, ranks, count, fault = future.result()
            done[name, ranks] += count
            if fault:
                wrong.setdefault((name, ranks), fault)
    cases = sorted({(name, ranks) for name, ranks, _ in tasks})
    for case in cases:
        if done[case] < options.schedules or case in wrong:
            print(*case, f"{done[case]} of {options.schedules} schedules", wrong.get(case, ""))
    print(f"{sum(done.values())} schedules of {len(cases)} programs and sizes, {len(wrong)} wrong")
    return 1 if wrong or min(done.values()) < options.schedules else 0


if __name__ == "__main__":
    sys.exit(main())
