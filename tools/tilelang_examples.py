"""Run the kernels of TileLang's examples in the simulator, and print a table of their results.

    python tools/tilelang_examples.py CHECKOUT [--limit SECONDS] [PATTERN ...]

CHECKOUT is a folder with TileLang's repository. ``tilelang_examples.txt`` names the examples, each
with a call of a function of it, or its arguments; PATTERN is a part of such a line. An example that
ends with an error fails: most of them compare with a reference of their own.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import runpy
import sys
from multiprocessing.connection import Connection
from pathlib import Path

import tilelang.language as T
import torch

from tileweave import interpret
from tileweave.cpu_devices import cuda_is_cpu
from tileweave.simulator import LEVELS

CASES = Path(__file__).with_suffix(".txt")
ARCH = "sm_90a"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--limit", type=float, default=60, help="seconds of one run")
    parser.add_argument("patterns", nargs="*")
    options = parser.parse_intermixed_args()
    torch.set_num_threads(1)
    lines = [line for line in CASES.read_text().splitlines() if line and line[0] != "#"]
    print("| example | " + " | ".join(LEVELS) + " | verdict |\n|" + "---|" * (2 + len(LEVELS)))
    right = dict.fromkeys(LEVELS, 0)
    for line in lines:
        if not options.patterns or any(pattern in line for pattern in options.patterns):
            faults = {
                level: _fault(options.checkout.resolve(), line, level, options.limit)
                for level in LEVELS
            }
            for level, fault in faults.items():
                right[level] += not fault
            cells = ["-" if fault else "runs" for fault in faults.values()]
            verdict = "; ".join(dict.fromkeys(filter(None, faults.values()))) or "right"
            print(f"| `{line}` | {' | '.join(cells)} | {verdict} |", flush=True)
    print("\nright: " + ", ".join(f"{count} at level {level}" for level, count in right.items()))


def _fault(checkout: Path, line: str, level: str, limit: float) -> str:
    """Run an example in a process of its own; return the first line of its error, or ""."""
    receive, send = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(
        target=_run, args=(checkout / "examples", line, level, send)
    )
    process.start()
    send.close()
    fault = f"longer than {limit:.0f} s"
    if receive.poll(limit):
        try:
            fault = receive.recv()
        except EOFError:
            fault = "the process ended"
    process.kill()
    process.join()
    return fault


def _run(examples: Path, line: str, level: str, pipe: Connection) -> None:
    """Run an example with its output discarded; send the first line of its error, or ""."""
    name, _, call = line.partition(" ")
    path = examples / name
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    os.chdir(path.parent)
    is_script = not call or call.startswith("-")
    sys.argv = [str(path), *call.split()] if is_script else [str(path)]
    sys.path[:0] = [str(path.parent), str(examples)]
    torch.manual_seed(0)
    fault = ""
    try:
        with interpret(level, ARCH) as calls, cuda_is_cpu(ARCH):
            names = runpy.run_path(str(path), run_name="__main__" if is_script else "example")
            if not is_script:
                eval(call, names | {"T": T})
        if not calls:
            fault = "no kernel was called"
    except BaseException as error:
        text = str(error).strip().splitlines() or [""]
        fault = f"{type(error).__name__}: {text[0][:120]}"
    pipe.send(fault.replace("|", "/"))


if __name__ == "__main__":
    main()
