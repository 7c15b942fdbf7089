"""GEMM + reduce-scatter on four simulated ranks; then again with one signal missing.

    python examples/without_gpu.py [--timeline build/gemm_reduce_scatter]

The first part checks the program against NumPy in several interleavings. The second takes the
signal out of a smaller instance and shows what the simulator says. Both are drawn as pages for a
browser: ``<timeline>.html`` and ``<timeline>_without_signal.html``.
"""

import argparse
import sys
from pathlib import Path

from gemm_reduce_scatter import gemm_reduce_scatter, simulated, simulated_inputs

import tileweave as tw
from tileweave.simulator.mutation import changed

RANKS, SIZE, BLOCK = 4, 128, 32


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--timeline", type=Path, default=Path("build/gemm_reduce_scatter"))
    path = parser.parse_args().timeline
    path.parent.mkdir(parents=True, exist_ok=True)
    if not simulated():
        print("wrong: relative error above 1e-2")
        return 1

    program = gemm_reduce_scatter(SIZE, SIZE // 2, SIZE // RANKS, RANKS, BLOCK, BLOCK, BLOCK)
    inputs = simulated_inputs(SIZE, SIZE // 2, SIZE // RANKS, RANKS, BLOCK)
    right, wrong = f"{path}.html", f"{path}_without_signal.html"
    tw.simulate(program, RANKS, inputs, timeline=right)
    print(f"right; a smaller instance, drawn: {right}\n\nthe same without its signal:")
    try:
        tw.simulate(changed(program, RANKS, "signal drop"), RANKS, inputs, timeline=wrong)
    except tw.SimulationError as fault:
        print(f"{fault}\ndrawn: {wrong}")
        return 0
    print("the missing signal was not noticed")
    return 1


if __name__ == "__main__":
    sys.exit(main())
