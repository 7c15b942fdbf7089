"""Variants of the transports of collectives: pieces of copy engines, tiles of SMs.

    torchrun --nproc-per-node=2 benchmarks/transports.py [all_gather ...] [--sizes 64 256]
        [--transports copy_engine] [--runs 10]

Interleaved, checked, beside what ``auto`` takes and copies alone, as ``tileweave bench`` does it:
of each rank the median, of these the largest. Without a GPU small ones run in the simulator.
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
from tileweave.ops.collectives.all_to_all import Parts, all_to_all_plan, all_to_all_program
from tileweave.ops.collectives.collective import Moved, checked
from tileweave.ops.collectives.reduce_scatter import reduce_scatter_plan, reduce_scatter_program
from tileweave.ops.collectives.vectors import Lines, words_of
from tileweave.ops.core.collective_problem import CollectiveProblem
from tileweave.ops.core.groups import group_of
from tileweave.ops.core.registry import OPERATORS
from tileweave.runtime.executor.compile_ahead import compile_ahead
from tileweave.runtime.host.measure import interleaved, largest
from tileweave.runtime.plans.parameters import parameters_of

PIECES = (
    (1,), (1, 1), (3, 1), (5, 1), (12, 3, 1), (30, 5, 1), (4, 2, 1, 1), (1, 1, 1, 1), (1,) * 8,
)  # fmt: skip
"""How long those of the last peer are, in one unit."""
WALKED = (5, 1)
"""Pieces of the variants whose kernel has ``BLOCKS``, not one for each tile: those that wait read
the same word, and all of them together may hold up what arrives."""
BLOCKS = (131, 262, 524)
OPS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
"""Collectives whose programs have such variants."""
TRANSPORTS = ("copy_engine", "ldst", "tma")
TILES = (1 << 13, 1 << 14, 1 << 15)
"""Bytes that a block moves at a time."""
HEAP_BYTES = 24 << 30
"""All variants of one collective are ready at a time."""


class Variant(NamedTuple):
    """One way to do it.

    Attributes:
        make: the tile program or the plan for a problem.
    """

    name: str
    make: Callable[[CollectiveProblem], Any]


def cut(rows: int, height: int, pieces: Sequence[int]) -> list[slice]:
    """Rows in pieces whose lengths are as ``pieces``, of whole tiles of ``height`` rows; the last
    one may be less, and those behind the end are left out."""
    unit = height * -(-rows // (height * sum(pieces)))
    starts = [start for n in accumulate(pieces[:-1], initial=0) if (start := n * unit) < rows]
    return [slice(*ends) for ends in pairwise([*starts, rows])]


def lines_of(
    problem: CollectiveProblem, tile: int | None = None, shared_out: bool = False
) -> Lines:
    """What moves as lines.

    Args:
        shared_out: whether each rank has a part of them.
    """
    if problem.op == "all_gather":
        dtype, count = words_of(problem.nbytes)
        return Lines.of(count, dtype, tile=tile)
    count = problem.elements // problem.ranks if shared_out else problem.elements
    return Lines.of(count, problem.tile_dtype, tile=tile)


def by_engines(pieces: Sequence[int], problem: CollectiveProblem, blocks: int | None = None) -> Any:
    walked = {} if blocks is None else {"blocks": blocks}
    if problem.op == "all_to_all":
        parts = Parts.of(problem)
        return all_to_all_plan(parts, cut(parts.rows, parts.height, pieces), **walked)
    plan_of = {"all_gather": all_gather_plan, "reduce_scatter": reduce_scatter_plan,
               "all_reduce": all_reduce_plan}[problem.op]  # fmt: skip
    lines = lines_of(problem, shared_out=problem.op != "all_gather")
    return plan_of(lines, problem.ranks, cut(lines.rows, lines.height, pieces), **walked)


def by_tiles(transport: str, tile: int, problem: CollectiveProblem) -> Any:
    if problem.op == "all_to_all":
        return all_to_all_program(Parts.of(problem, tile), transport)
    program = {"all_gather": all_gather_program, "reduce_scatter": reduce_scatter_program,
               "all_reduce": two_shot_program}[problem.op]  # fmt: skip
    lines = lines_of(problem, tile, shared_out=problem.op == "reduce_scatter")
    return program(lines, problem.ranks, transport)


def variants_of(transports: Sequence[str], op: str) -> list[Variant]:
    engines = [
        Variant(f"copy_engine, {':'.join(map(str, pieces))}", partial(by_engines, pieces))
        for pieces in PIECES
    ] + [
        Variant(f"copy_engine, {blocks} blocks", partial(by_engines, WALKED, blocks=blocks))
        for blocks in BLOCKS
        if op in ("all_gather", "all_to_all")
    ]
    engines = engines if "copy_engine" in transports else []
    return engines + [
        Variant(f"{transport}, tiles of {tile >> 10} KiB", partial(by_tiles, transport, tile))
        for transport in transports
        if transport != "copy_engine"
        for tile in TILES
    ]


def implementation_of(buffers: Buffers, steps: Any) -> Implementation:
    compiled = Moved(steps)
    buffers.compiled.append(compiled)
    return buffers.into("result", lambda inputs, out: compiled(inputs.x, out))


def compare(
    problem: CollectiveProblem,
    programs: dict[Variant, Any],
    gathered: tw.SymmetricTensor,
    runs: int,
) -> bool:
    """Time and check all variants; prints a row of each, the fastest first."""
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
        before=lambda name, given: implementations[name].prepare(given),
        after=checker,
    )
    errors = largest(checker.errors, group)
    buffers.close()
    if group.rank == 0:
        print(f"{problem.op}, {problem.nbytes >> 20} MiB, {time.perf_counter() - begin:.0f} s")
        for name in sorted(ms, key=ms.get):
            rate = problem.sent / ms[name] / 1e6
            ratio = f"{ms['copies alone'] / ms[name]:8.3f}" if "copies alone" in ms else ""
            wrong = f"  wrong: {errors[name]:.1e}" * (errors[name] > 0)
            print(f"  {name:24} {ms[name]:8.4f} ms {rate:7.1f} GB/s{ratio}{wrong}", flush=True)
    return not any(errors.values())


def simulated(op: str, variants: Sequence[Variant], ranks: int = 3) -> None:
    """Variants of a small one in the simulator; a fault raises, and so does a wrong result."""
    count = ranks << 14
    x = torch.empty(count, dtype=torch.float32, device="meta")
    problem = checked(op, x, None, ranks, [0] * len(OPERATORS[op].options))
    rng = np.random.default_rng(0)
    given = [rng.integers(-8, 9, count).astype(np.float32) for _ in range(ranks)]
    every = torch.from_numpy(np.stack(given))
    right = [OPERATORS[op].expected(every, rank, *problem.options).numpy() for rank in range(ranks)]
    for variant in variants:
        steps = variant.make(problem)
        declared, *_ = parameters_of(steps) if not isinstance(steps, tw.Plan) else steps.parameters
        words = [g.view(declared.dtype).reshape(tuple(map(int, declared.shape))) for g in given]
        found = tw.simulate(steps, ranks, [{"x": w} for w in words], schedules=1)
        for mine, wanted in zip(found, right, strict=True):
            if not np.array_equal(mine["out"].ravel().view(np.float32), wanted):
                raise AssertionError(f"{op}: {variant.name} is wrong")
    print(f"{op}: {len(variants)} variants, right on {ranks} simulated ranks")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("ops", nargs="*", default=OPS, metavar="OP")
    parser.add_argument("--sizes", type=int, nargs="+", default=[64, 256], help="MiB of a rank")
    parser.add_argument("--transports", nargs="+", choices=TRANSPORTS, default=TRANSPORTS)
    parser.add_argument("--runs", type=int, default=10)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("no GPU: nothing was timed; small ones are simulated")
        for op in options.ops:
            simulated(op, variants_of(options.transports, op))
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
    compile_ahead([*auto, *(steps for each in programs for steps in each.values())])
    if group.rank == 0:
        print(f"compiled in {time.perf_counter() - begin:.0f} s", flush=True)
    ok = all(
        [
            compare(problem, made, gathered, options.runs)
            for problem, made in zip(problems, programs, strict=True)
        ]
    )
    if group.rank == 0:
        print("right" if ok else "wrong")
    tw.finalize()
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
