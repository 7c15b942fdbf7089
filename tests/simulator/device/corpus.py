"""Programs of the corpus, the examples and the operators, with inputs for the device level."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from tests.corpus import PROGRAMS
from tests.examples import programs as examples
from tests.examples.programs import EXAMPLES, Instance, example
from tileweave.ops.attention.flash import FlashTiles
from tileweave.ops.attention.problem import AttentionProblem
from tileweave.ops.attention.sp_attention import sp_attention_plan
from tileweave.ops.collectives.all_gather import all_gather_plan, all_gather_program
from tileweave.ops.collectives.all_reduce import all_reduce_plan, one_shot_program, two_shot_program
from tileweave.ops.collectives.all_to_all import (
    AllToAll,
    Parts,
    all_to_all_program,
)
from tileweave.ops.collectives.broadcast import broadcast_program
from tileweave.ops.collectives.reduce_scatter import reduce_scatter_plan, reduce_scatter_program
from tileweave.ops.collectives.vectors import TiledView
from tileweave.ops.core.collective_problem import CollectiveProblem
from tileweave.ops.core.gemm_config import GemmConfig
from tileweave.ops.core.tiles import Tiles
from tileweave.ops.gemm.all_gather_matmul import AllGatherMatmul
from tileweave.ops.gemm.matmul_all_reduce import MatmulAllReduce
from tileweave.ops.gemm.matmul_reduce_scatter import MatmulReduceScatter

RANKS = 2
TILES = {
    "mma": Tiles(16, 16, 16, stages=2, threads=32, group_m=1),
    "wgmma": Tiles(64, 64, 32, stages=2, threads=128, group_m=1),
}
"""Tiles of one warp, and of one warp group with warp specialization."""
GEMMS = AllGatherMatmul, MatmulReduceScatter, MatmulAllReduce


def corpus(name: str) -> Instance:
    case = PROGRAMS[name]
    ranks = RANKS if RANKS in case.ranks else case.ranks[0]
    rng = np.random.default_rng(ranks)
    inputs = case.inputs(rng, ranks, *case.sizes[:1])
    return Instance(case.called(ranks), ranks, inputs)


def pattern(path: str, name: str) -> Instance:
    module = example(path, RANKS)
    sizes = getattr(module, "SIZES", [{}])[0]
    return Instance(
        getattr(module, name),
        module.RANKS,
        module.inputs(module.RANKS, np.random.default_rng(1), **sizes),
    )


def tutorial(path: str, name: str) -> Instance:
    return Instance(getattr(example(path, RANKS), name), RANKS, None)


def tutorial_with_a_bug() -> Instance:
    module = example("tutorial/04_simulate_a_bug.py", RANKS)
    inputs = [
        {
            "shard": np.full((module.ROWS, module.COLUMNS), rank, np.float32),
            "flags": np.zeros(RANKS, np.uint32),
            "epoch": lambda launch: launch,
        }
        for rank in range(RANKS)
    ]
    return Instance(module.all_gather, RANKS, inputs)


def tutorial_with_a_routing() -> Instance:
    module, rng = example("tutorial/07_dispatch.py", RANKS), np.random.default_rng(0)
    inputs = []
    for _ in range(RANKS):
        tokens = rng.standard_normal((module.TOKENS, module.HIDDEN)).astype(np.float32)
        out = np.zeros(module.OUT, np.float32)
        inputs.append({"tokens": tokens, "out": out, **module.routing(rng)})
    return Instance(module.dispatch, RANKS, inputs)


def gemm(operator: type, program: str, tiles: str) -> Instance:
    """Two tiles for each rank along N, and a tail along every axis."""
    t = TILES[tiles]
    rows, N, K = t.M + 8, t.N + 8, 2 * t.K + 8
    transposed = tiles == "wgmma"
    config = GemmConfig(RANKS * rows, N, K, RANKS, "bfloat16", transposed, t, True)
    return Instance(operator.programs[program](config), RANKS, None)


def collective(name: str, transport: str) -> Instance:
    """Rows of 16 elements, two in a tile, of all ranks; by copy engines in two chunks."""
    view = TiledView.of(96, "float32", 16, 128)
    if name == "all_to_all":
        return Instance(_all_to_all(), RANKS, None)
    if transport != "copy_engine":
        return Instance(_program(name, view, RANKS), RANKS, None)
    half = view.rows // 2 // view.height * view.height
    chunks = [slice(0, half), slice(half, view.rows)]
    plans = {
        "all_gather": lambda: all_gather_plan(view, RANKS, chunks, None),
        "reduce_scatter": lambda: reduce_scatter_plan(view, RANKS, chunks),
        "one_shot": lambda: all_reduce_plan(view, RANKS, chunks),
    }
    return Instance(plans[name](), RANKS, None)


def one_word(name: str) -> Instance:
    """One element of each of three ranks: indices without threads, whose steps go backward."""
    return Instance(_program(name, TiledView.of(1, "float32"), 3), 3, None)


def _program(name: str, view: TiledView, ranks: int) -> Any:
    programs = {
        "all_gather": lambda: all_gather_program(view, ranks),
        "reduce_scatter": lambda: reduce_scatter_program(view, ranks),
        "one_shot": lambda: one_shot_program(view, ranks),
        "two_shot": lambda: two_shot_program(view, ranks),
        "broadcast": lambda: broadcast_program(view, ranks, 1),
    }
    return programs[name]()


def _all_to_all() -> Any:
    x = torch.empty((6, 6, 8), device="meta")
    result, axes = AllToAll.result(x, RANKS, 1, 0)
    problem = CollectiveProblem("all_to_all", (6, 6, 8), result, axes, RANKS, torch.float32)
    parts = Parts.of(problem, 64)
    return all_to_all_program(parts)


def attention(causal: bool, layout: str) -> Instance:
    chunks = 2 if layout == "zigzag" else 1
    problem = AttentionProblem(
        batch=1, q_rows=64 * chunks, k_rows=64 * chunks, heads=2, kv_heads=1, dim=32, v_dim=32,
        ranks=RANKS, dtype=torch.bfloat16, causal=causal, layout=layout, scale=0.3,
    )  # fmt: skip
    return Instance(sp_attention_plan(problem, FlashTiles(64, 32, 2, 128)), RANKS, None)


Make = Callable[[], Instance]


def _patterns() -> dict[str, Make]:
    """Return the programs of all files of ``examples/patterns``."""
    results: dict[str, Make] = {}
    for file in sorted((EXAMPLES / "patterns").glob("*.py")):
        path = f"patterns/{file.name}"
        examples = getattr(example(path, RANKS), "examples", None)
        for label, program in (examples or {"example": example(path, RANKS).example}).items():
            name = next(n for n, value in vars(example(path, RANKS)).items() if value is program)
            results[f"{path}:{label}"] = lambda path=path, name=name: pattern(path, name)
    return results


_SIZES = 128, 64, 64, 64, 64, 32
"""M, N, K of one rank, and the tile of the examples with a GEMM."""
_TUTORIALS = {
    "01_first_program": "shift", "02_all_gather": "all_gather",
    "03_gemm_reduce_scatter": "example", "05_copy_engines": "all_gather_gemm",
}  # fmt: skip
INSTANCES: dict[str, Make] = {
    **{f"corpus:{name}": lambda name=name: corpus(name) for name in PROGRAMS},
    **_patterns(),
    **{
        f"tutorial/{file}.py": lambda file=file, name=name: tutorial(f"tutorial/{file}.py", name)
        for file, name in _TUTORIALS.items()
    },
    "tutorial/04_simulate_a_bug.py": tutorial_with_a_bug,
    "tutorial/07_dispatch.py": tutorial_with_a_routing,
    "gemm_reduce_scatter.py": lambda: examples.gemm_reduce_scatter(RANKS, *_SIZES),
    "all_gather_gemm.py": lambda: examples.all_gather_gemm(RANKS, *_SIZES),
    **{
        f"inferred.py:{name}": lambda name=name: examples.inferred(name, RANKS, *_SIZES)
        for name in ("gemm_reduce_scatter", "all_gather_gemm")
    },
    "signal_ping_pong.py": lambda: examples.ping_pong(3),
    "bulk_copy.py:bulk_copy": lambda: examples.bulk_copy("small_ring", 901, 2),
    "bulk_copy.py:load_store_program": lambda: examples.bulk_copy("load_store_program", 901, 2),
    "bulk_copy.py:multicast_program": lambda: examples.bulk_copy("multicast_program", 5, 1),
    **{
        f"{operator.__name__}:{program}:{tiles}": lambda operator=operator, program=program,
        tiles=tiles: gemm(operator, program, tiles)
        for operator in GEMMS for program in operator.programs for tiles in TILES
    },
    **{
        f"{name}:{transport}": lambda name=name, transport=transport: collective(name, transport)
        for name in (
            "all_gather", "reduce_scatter", "one_shot", "two_shot", "broadcast", "all_to_all",
        )
        for transport in ("ldst", "copy_engine")
        if transport == "ldst" or name in ("all_gather", "reduce_scatter", "one_shot")
    },
    **{
        f"{name}:one_word": lambda name=name: one_word(name)
        for name in ("all_gather", "reduce_scatter", "one_shot", "two_shot", "broadcast")
    },
    **{
        f"sp_attention:{layout}:{'causal' if causal else 'full'}":
        lambda causal=causal, layout=layout: attention(causal, layout)
        for layout in ("contiguous", "zigzag") for causal in (True, False)
    },
}  # fmt: skip
"""All programs, by name."""
