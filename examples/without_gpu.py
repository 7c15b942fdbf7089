"""Simulate GEMM + reduce-scatter on four ranks, then the same program without its signal.

    python examples/without_gpu.py [--timeline build/gemm_reduce_scatter]

The first part compares the result with NumPy in several interleavings. The second removes the
signal from a smaller instance and prints the report of the simulator. Both runs of the smaller
instance are drawn: ``<timeline>.html`` and ``<timeline>_without_signal.html``.
"""

import argparse
import sys
from pathlib import Path

from gemm_reduce_scatter import gemm_reduce_scatter, simulated, simulated_inputs

import tileweave as tw
from tileweave.simulator.mutation import changed

RANKS, SIZE, BLOCK = 4, 128, 32


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--timeline", type=Path, default=Path("build/gemm_reduce_scatter"))
    path = parser.parse_args(argv).timeline
    path.parent.mkdir(parents=True, exist_ok=True)
    if not simulated():
        print("wrong: relative error above 1e-2")
        return 1

    program = gemm_reduce_scatter(SIZE, SIZE // 2, SIZE // RANKS, RANKS, BLOCK, BLOCK, BLOCK)
    inputs = simulated_inputs(SIZE, SIZE // 2, SIZE // RANKS, RANKS, BLOCK)
    drawing, drawing_of_fault = f"{path}.html", f"{path}_without_signal.html"
    tw.simulate(program, RANKS, inputs, timeline=drawing)
    print(f"passed; drawing of a smaller instance: {drawing}\n\nthe same without its signal:")
    without_signal = changed(program, RANKS, "signal drop")
    try:
        tw.simulate(without_signal, RANKS, inputs, timeline=drawing_of_fault)
    except tw.SimulationError as fault:
        print(f"{fault}\ndrawing: {drawing_of_fault}")
        return 0
    print("failed: the simulator reports no fault without the signal")
    return 1


if __name__ == "__main__":
    sys.exit(main())
