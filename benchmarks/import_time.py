"""Measure the time of ``import tileweave`` after ``import tilelang``, in new processes.

python benchmarks/import_time.py [--runs 9]
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys

PROGRAM = """
import time
begin = time.perf_counter()
import tilelang, torch
middle = time.perf_counter()
import tileweave
print(middle - begin, time.perf_counter() - middle)
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--runs", type=int, default=9)
    options = parser.parse_args()
    runs = [
        subprocess.run(
            [sys.executable, "-c", PROGRAM], check=True, capture_output=True, text=True
        ).stdout.split()
        for _ in range(options.runs)
    ]
    for name, seconds in zip(
        ("tilelang and torch", "tileweave after them"), zip(*runs, strict=True), strict=True
    ):
        median = statistics.median(float(s) for s in seconds)
        print(f"import {name}: {median * 1e3:.0f} ms (median of {options.runs})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
