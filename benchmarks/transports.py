"""Compare variants of the transports of collectives: sizes of copies, and tiles of SMs.

    torchrun --nproc-per-node=2 benchmarks/transports.py [all_gather ...] [--sizes 64 256]
        [--transports copy_engine] [--runs 10]

The variants run in turn with ``auto`` and with copies alone, and every result is checked, as in
``tileweave bench``. A time is the largest of the medians of all ranks. Without a GPU, small
variants run in the simulator.
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import accumulate, islice, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch

import tileweave as tw
from tileweave.bench import collectives
from tileweave.bench.case import Buffers, Checker, Implementation, Missing
from tileweave.bench.command import INPUTS
from tileweave.ops.collectives.all_gather import all_gather_plan, all_gather_program
from tileweave.ops.collectives.all_reduce import all_reduce_plan, two_shot_program
from tileweave.ops.collectives.all_to_all import Parts, all_to_all_program
from tileweave.ops.collectives.collective import checked_problem
from tileweave.ops.collectives.reduce_scatter import reduce_scatter_plan, reduce_scatter_program
from tileweave.ops.collectives.vectors import TiledView, words_of
from tileweave.ops.core.collective_problem import CollectiveProblem
from tileweave.ops.core.compiled import CompiledOp, op_cache_of
from tileweave.ops.core.groups import group_of
from tileweave.ops.core.registry import OPERATORS
from tileweave.runtime.executor.compile_ahead import compile_ahead
from tileweave.runtime.host.measure import interleaved, largest
from tileweave.runtime.plans.parameters import parameters_of

CHUNKS = (
    (1,), (1, 1), (3, 1), (5, 1), (12, 3, 1), (30, 5, 1), (4, 2, 1, 1), (1, 1, 1, 1), (1,) * 8,
)  # fmt: skip
"""Relative lengths of the copies to the last peer."""
PERSISTENT_CHUNKS = (5, 1)
"""Chunks of the variants whose kernel has ``BLOCKS`` persistent blocks, not one for each tile.
Waiting blocks read the same word, so many of them may delay data that arrives."""
BLOCKS = (131, 262, 524)
TRANSPORTS = ("copy_engine", "ldst")
TILES = (1 << 13, 1 << 14, 1 << 15)
"""Bytes of the tile that a block moves."""
HEAP_BYTES = 24 << 30
"""Memory for all variants of one collective at the same time."""

OPS = "all_gather", "all_reduce", "all_to_all", "reduce_scatter"
"""Collectives that have variants."""


class Variant(NamedTuple):
    """Variant of a transport.

    Attributes:
        make: function that returns the tile program or the plan for a problem.
    """

    name: str
    make: Callable[[CollectiveProblem], Any]


def split_rows(rows: int, height: int, chunks: Sequence[int]) -> list[slice]:
    """Split rows in the ratio of ``chunks``, each a multiple of ``height`` rows.

    The last chunk may be shorter. Chunks after the last row are omitted.
    """
    unit = height * -(-rows // (height * sum(chunks)))
    starts = [start for n in accumulate(chunks[:-1], initial=0) if (start := n * unit) < rows]
    return [slice(*ends) for ends in pairwise([*starts, rows])]


def view_of(
    problem: CollectiveProblem, tile: int | None = None, is_split: bool = False
) -> TiledView:
    """Return the elements of a collective in tiles.

    Args:
        is_split: whether each rank has a part of them.
    """
    if problem.op == "all_gather":
        dtype, count = words_of(problem.nbytes)
        return TiledView.of(count, dtype, tile=tile)
    count = problem.elements // problem.ranks if is_split else problem.elements
    return TiledView.of(count, problem.tile_dtype, tile=tile)


def copy_engine_plan(
    chunks: Sequence[int], problem: CollectiveProblem, blocks: int | None = None
) -> Any:
    options = {} if blocks is None else {"blocks": blocks}
    plan_of = {"all_gather": all_gather_plan, "reduce_scatter": reduce_scatter_plan,
               "all_reduce": all_reduce_plan}[problem.op]  # fmt: skip
    view = view_of(problem, is_split=problem.op != "all_gather")
    return plan_of(view, problem.ranks, split_rows(view.rows, view.height, chunks), **options)


def tile_program(tile: int, problem: CollectiveProblem) -> Any:
    if problem.op == "all_to_all":
        return all_to_all_program(Parts.of(problem, tile))
    program = {"all_gather": all_gather_program, "reduce_scatter": reduce_scatter_program,
               "all_reduce": two_shot_program}[problem.op]  # fmt: skip
    view = view_of(problem, tile, is_split=problem.op == "reduce_scatter")
    return program(view, problem.ranks)


def variants_of(transports: Sequence[str], op: str) -> list[Variant]:
    engines = [
        Variant(f"copy_engine, {':'.join(map(str, chunks))}", partial(copy_engine_plan, chunks))
        for chunks in CHUNKS
    ] + [
        Variant(
            f"copy_engine, {blocks} blocks",
            partial(copy_engine_plan, PERSISTENT_CHUNKS, blocks=blocks),
        )
        for blocks in BLOCKS
        if op == "all_gather"
    ]
    by_threads = [
        Variant(f"ldst, tiles of {tile >> 10} KiB", partial(tile_program, tile)) for tile in TILES
    ]
    has_engines = OPERATORS[op].copy_engine_min_ranks is not None and "copy_engine" in transports
    return engines * has_engines + by_threads * ("ldst" in transports)


def implementation_of(buffers: Buffers, steps: Any) -> Implementation:
    compiled = CompiledOp(steps, op_cache_of(buffers.group).session)
    buffers.compiled.append(compiled)
    return buffers.into("result", lambda inputs, out: compiled(inputs.x, out))


def compare(
    problem: CollectiveProblem,
    programs: dict[Variant, Any],
    gathered: tw.SymmetricTensor,
    runs: int,
) -> bool:
    """Time and check all variants. Print a row for each, the fastest first. Return whether all
    results are correct."""
    begin, group = time.perf_counter(), group_of("")
    memory, random = collectives.stage(problem, group)
    buffers = Buffers(problem, group, gathered, memory)
    implementations = {"auto": collectives.IMPLEMENTATIONS["ours"](buffers)}
    with suppress(Missing):
        implementations["copies alone"] = collectives.IMPLEMENTATIONS["exchange/copies"](buffers)
    for variant, steps in programs.items():
        implementations[variant.name] = implementation_of(buffers, steps)
    inputs, checker = list(islice(random, INPUTS)), Checker(implementations)
    ms = interleaved(
        {name: implementation.call for name, implementation in implementations.items()},
        inputs,
        group,
        warmups=3,
        runs=runs,
        before=lambda name, inputs: implementations[name].prepare(inputs),
        after=checker,
    )
    errors = largest(checker.errors, group)
    buffers.close()
    if group.rank == 0:
        print(f"{problem.op}, {problem.nbytes >> 20} MiB, {time.perf_counter() - begin:.0f} s")
        for name in sorted(ms, key=ms.get):
            rate = problem.bytes_sent / ms[name] / 1e6
            ratio = f"{ms['copies alone'] / ms[name]:8.3f}" if "copies alone" in ms else ""
            failed = f"  failed: {errors[name]:.1e}" * (errors[name] > 0)
            print(f"  {name:24} {ms[name]:8.4f} ms {rate:7.1f} GB/s{ratio}{failed}", flush=True)
    return not any(errors.values())


def simulate_variants(op: str, variants: Sequence[Variant], ranks: int = 3) -> None:
    """Simulate all variants of a small problem.

    Raises:
        SimulationError: the simulator reports a fault.
        AssertionError: a result is wrong.
    """
    count = ranks << 14
    x = torch.empty(count, dtype=torch.float32, device="meta")
    problem = checked_problem(op, x, None, ranks, [0] * len(OPERATORS[op].options))
    rng = np.random.default_rng(0)
    inputs = [rng.integers(-8, 9, count).astype(np.float32) for _ in range(ranks)]
    parts = np.stack([values.reshape(ranks, -1) for values in inputs])
    expected = {
        "all_gather": [np.concatenate(inputs)] * ranks,
        "all_to_all": [parts[:, r].ravel() for r in range(ranks)],
        "reduce_scatter": list(parts.sum(0)),
        "all_reduce": [parts.sum(0).ravel()] * ranks,
    }[op]
    for variant in variants:
        steps = variant.make(problem)
        declared, *_ = parameters_of(steps) if not isinstance(steps, tw.Plan) else steps.parameters
        shape = tuple(map(int, declared.shape))
        arguments = [{"x": values.view(declared.dtype).reshape(shape)} for values in inputs]
        outputs = tw.simulate(steps, ranks, arguments, schedules=1)
        for output, values in zip(outputs, expected, strict=True):
            if not np.array_equal(output["out"].ravel().view(np.float32), values):
                raise AssertionError(f"{op}: {variant.name} has a wrong result")
    print(f"{op}: {len(variants)} variants passed on {ranks} simulated ranks")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("ops", nargs="*", default=OPS, metavar="OP", help=", ".join(OPS))
    parser.add_argument("--sizes", type=int, nargs="+", default=[64, 256], help="MiB per rank")
    parser.add_argument("--transports", nargs="+", choices=TRANSPORTS, default=TRANSPORTS)
    parser.add_argument("--runs", type=int, default=10)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("no GPU: nothing is timed; small problems are simulated")
        for op in options.ops:
            simulate_variants(op, variants_of(options.transports, op))
        return 0
    tw.init(heap_bytes=HEAP_BYTES)
    group, begin = group_of(""), time.perf_counter()
    problems = [
        collectives.problem_of(op, collectives.size_of(size, group.world_size), torch.bfloat16)
        for op in options.ops
        for size in options.sizes
    ]
    gathered = tw.symmetric((max(p.ranks * p.elements for p in problems),), torch.bfloat16)
    programs = [
        {v: v.make(problem) for v in variants_of(options.transports, problem.op)}
        for problem in problems
    ]
    auto = [steps for problem in problems for steps in collectives.programs(problem, group)]
    compile_ahead([*auto, *(steps for variants in programs for steps in variants.values())])
    if group.rank == 0:
        print(f"compiled in {time.perf_counter() - begin:.0f} s", flush=True)
    passed = all(
        [
            compare(problem, variants, gathered, options.runs)
            for problem, variants in zip(problems, programs, strict=True)
        ]
    )
    if group.rank == 0:
        print("passed" if passed else "failed")
    tw.finalize()
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
