"""Compile every operator, corpus program and example to CUDA, and print the counts as JSON.

    python tools/emit_programs.py [--arch sm_90a] [--ptx NAME ...] [--jobs 2]

A program that the installed TileLang cannot compile is refused by a LanguageError. Any other error
is a failure, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import warnings
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tilelang import tvm

import tileweave as tw
from tests.simulator.device.corpus import INSTANCES, Instance
from tileweave.passes import needs_sizes
from tileweave.runtime import Plan
from tileweave.runtime.plans.parameters import shapes_of
from tileweave.runtime.plans.steps import Launch
from tileweave.runtime.plans.sync_push import ENTRY_BARRIER


def programs(instance: Instance) -> Iterator[tuple[Any, dict[str, int]]]:
    """Yield the kernels of a plan, or the program itself, with the sizes of dynamic extents."""
    program, inputs = instance.program, (instance.inputs or [{}])[0]
    shapes = {name: value.shape for name, value in inputs.items() if hasattr(value, "shape")}
    if not isinstance(program, Plan):
        shapes_by_name = {b.name: b.shape for b in program.buffer_map.values()}
        sizes = {
            str(extent): shapes[name][axis]
            for name, extents in shapes_by_name.items() if name in shapes
            for axis, extent in enumerate(extents[-len(shapes[name]) :])
            if isinstance(extent, tvm.tirx.Var)
        }  # fmt: skip
        yield program, sizes if needs_sizes(program) else {}
        return
    declared = shapes_of(program.parameters, shapes, program.name)
    scalars = {p.name: 0 for p in program.parameters if p.shape is None}
    for step in program.trace(0, instance.ranks, declared, scalars):
        if isinstance(step, Launch) and step.number > ENTRY_BARRIER:
            yield step.program, {}


def emit(name: str, arch: str, stages: tuple[str, ...]) -> tuple[str, str]:
    """Compile one program; return "emitted", "refused" or "failed", and the message."""
    warnings.simplefilter("ignore", tw.SyncWarning)
    try:
        instance = INSTANCES[name]()
        for stage in stages:
            for program, sizes in programs(instance):
                tw.emit(program, stage, arch, instance.ranks, sizes=sizes)
    except tw.TileWeaveError as refusal:
        return "refused", str(refusal)
    except Exception as error:
        return "failed", " ".join(f"{type(error).__name__}: {error}".split())[:300]
    return "emitted", ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--arch", default="sm_90a")
    parser.add_argument("--ptx", nargs="*", default=[], help="also compile these programs to PTX")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    options = parser.parse_args()
    report: dict[str, Any] = {"emitted": 0, "refused": {}, "failed": {}}
    with ProcessPoolExecutor(options.jobs, multiprocessing.get_context("spawn")) as pool:
        results = {
            name: pool.submit(
                emit, name, options.arch, ("cuda", "ptx") if name in options.ptx else ("cuda",)
            )
            for name in INSTANCES
        }
        for name, result in results.items():
            verdict, message = result.result()
            if verdict == "emitted":
                report["emitted"] += 1
            else:
                report[verdict][name] = message
    print(json.dumps(report, indent=1))
    return 1 if report["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
