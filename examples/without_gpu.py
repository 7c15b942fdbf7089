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
from tilelang import tvm  # noqa: F401, makes its own tvm visible
from tvm import tirx
from tvm.tirx.stmt_functor import ir_transform

import tileweave as tw

RANKS, SIZE, BLOCK = 4, 128, 32


def without_signal(program):
    """The same program, but for its signal."""

    def drop(stmt):
        op = getattr(stmt.value, "op", None)
        return tirx.Evaluate(0) if getattr(op, "name", "") == "tileweave.signal" else None

    return program.with_body(ir_transform(program.body, None, drop, ["tirx.Evaluate"]))


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
        tw.simulate(without_signal(program), RANKS, inputs, timeline=wrong)
    except tw.SimulationError as fault:
        print(f"{fault}\ndrawn: {wrong}")
        return 0
    print("the missing signal was not noticed")
    return 1


if __name__ == "__main__":
    sys.exit(main())
