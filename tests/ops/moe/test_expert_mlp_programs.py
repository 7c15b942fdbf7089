"""Tile programs of ``expert_mlp`` that overlap exchange and products, on simulated ranks."""

import functools
import re
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest
import tilelang.language as T
import torch

import tileweave as tw
from tests.ops.moe.by_definition import random_ids
from tileweave.ops.core.tiles import Tiles
from tileweave.ops.moe.fused_mlp import mlp_plan
from tileweave.ops.moe.kernels.expert_mlp import ExpertMlpConfig, down, gate_up
from tileweave.ops.moe.segments import segments_of
from tileweave.runtime import PlanBuilder, plan
from tileweave.simulator.simulate import executable_at

SIDECARS = Path(__file__).with_name("equivalent")
BF16 = ml_dtypes.bfloat16
LAUNCHES = 3
TILES = Tiles(16, 32, 16, stages=2, threads=64)
HIDDEN, WIDTH = 64, 32


class Shape(NamedTuple):
    """Extents of a simulated layer."""

    ranks: int = 2
    tokens: int = 20
    choices: int = 2
    per_rank: int = 2
    senders: int = 2
    blocks: int = 5
    tiles: Tiles = TILES

    @property
    def config(self) -> ExpertMlpConfig:
        return ExpertMlpConfig(
            self.tokens, self.choices, self.per_rank, HIDDEN, WIDTH, self.ranks, "bfloat16",
            self.tiles, self.tiles, self.senders, self.blocks,
        )  # fmt: skip


class Layer(NamedTuple):
    """Inputs of all ranks."""

    x: np.ndarray
    ids: torch.Tensor
    topk_weights: np.ndarray
    gate_up: np.ndarray
    down: np.ndarray


def layer_of(shape: Shape, seed: int) -> Layer:
    rng = np.random.default_rng(seed)
    ranks, per_rank = shape.ranks, shape.per_rank
    generator = torch.Generator().manual_seed(seed)
    ids = random_ids(ranks, shape.tokens, shape.choices, ranks * per_rank, generator)

    def numbers(*extents):
        return (rng.standard_normal(extents) * extents[-1] ** -0.5).astype(BF16)

    return Layer(
        numbers(ranks, shape.tokens, HIDDEN) * BF16(8), ids,
        rng.random((ranks, shape.tokens, shape.choices)).astype(np.float32),
        numbers(ranks, per_rank, 2 * WIDTH, HIDDEN), numbers(ranks, per_rank, HIDDEN, WIDTH),
    )  # fmt: skip


@functools.cache
def executable(shape: Shape) -> Any:
    return executable_at(mlp_plan(shape.config), shape.ranks, "tile", "sm_90a")


def inputs_of(shape: Shape, layer: Layer) -> list[dict[str, np.ndarray]]:
    config, num_experts = shape.config, shape.ranks * shape.per_rank
    inputs = []
    for r, ids in enumerate(layer.ids):
        tables = segments_of(ids, r, shape.ranks, num_experts, config.capacity)
        inputs.append({
            "x": layer.x[r], **{name: t.numpy() for name, t in tables._asdict().items()},
            "topk_weights": layer.topk_weights[r], "w_gate_up": layer.gate_up[r],
            "w_down": layer.down[r],
        })  # fmt: skip
    return inputs


def check(shape: Shape, seed: int, schedules: int = 1) -> None:
    layer = layer_of(shape, seed)
    outputs = tw.simulate(
        executable(shape), shape.ranks, inputs_of(shape, layer), schedules, seed, epochs=LAUNCHES
    )
    for output, right in zip(outputs, expected(shape, layer), strict=True):
        np.testing.assert_allclose(output["out"].astype(np.float32), right, rtol=2e-2, atol=1e-2)


def wide(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float32)


def expected(shape: Shape, layer: Layer) -> np.ndarray:
    """Return the results of all ranks, by definition."""
    total = np.zeros(layer.x.shape, np.float32)
    for r, t, c in np.ndindex(*layer.ids.shape):
        owner, e = divmod(int(layer.ids[r, t, c]), shape.per_rank)
        if 0 <= owner < shape.ranks:
            products = wide(layer.gate_up[owner, e]) @ wide(layer.x[r, t])
            gate, up = np.split(products, 2)
            hidden = wide((gate / (1 + np.exp(-gate)) * up).astype(BF16))
            result = wide((wide(layer.down[owner, e]) @ hidden).astype(BF16))
            total[r, t] += layer.topk_weights[r, t, c] * result
    return total


SHAPES = [
    Shape(1),
    Shape(2),
    pytest.param(Shape(3, tokens=37, choices=3), marks=pytest.mark.long),
    pytest.param(Shape(4, tokens=5, choices=4, per_rank=1), marks=pytest.mark.long),
]


@pytest.mark.parametrize("shape", SHAPES)
def test_results(shape):
    for seed in range(4):
        check(shape, seed)


def test_device_functions():
    """Producers and consumers agree on the order of tiles, which they compute from the counts."""
    shape = Shape(2, tokens=70, tiles=Tiles(64, 64, 32, stages=2, threads=128), blocks=4)
    tw.validate(mlp_plan(shape.config), 2, inputs_of(shape, layer_of(shape, 1)))


def called_twice(config: ExpertMlpConfig) -> Any:
    """Return the plan of two calls with other tokens."""
    kernels = gate_up(config), down(config)
    x = T.Tensor((config.tokens, config.hidden), config.dtype)
    sent = T.Tensor((config.tokens * config.choices,), "int32")
    counts = T.Tensor((config.ranks, config.per_rank), "int32")
    place = T.Tensor((config.tokens, config.choices), "int32")
    topk_weights = T.Tensor((config.tokens, config.choices), "float32")
    segments = config.per_rank, config.ranks
    rows = *segments, config.capacity, config.width

    @plan
    def expert_mlps(
        p: PlanBuilder,
        x0: x, sent0: sent, counts0: counts, place0: place, topk_weights0: topk_weights, out0: x,
        x1: x, sent1: sent, counts1: counts, place1: place, topk_weights1: topk_weights, out1: x,
        w_gate_up: config.gate_up_gemm.w, w_down: config.down_gemm.w,
        received: T.Tensor(segments, "int32"), activations: T.Tensor(rows, config.dtype),
    ):  # fmt: skip
        p.launch(kernels[0], x0, sent0, counts0, w_gate_up, received, activations)
        p.launch(kernels[1], activations, received, w_down, place0, topk_weights0, out0)
        p.launch(kernels[0], x1, sent1, counts1, w_gate_up, received, activations)
        p.launch(kernels[1], activations, received, w_down, place1, topk_weights1, out1)

    return expert_mlps


@pytest.mark.long
def test_every_mutant_is_accounted_for():
    """Calls without exchange alternate with calls in which all tokens go to both ranks. Each of two
    senders stores one row of a segment."""
    shape = Shape(2, tokens=2, per_rank=1, blocks=4)
    layer = layer_of(shape, 1)
    ids = torch.tensor([[[0, -1], [0, -1]], [[1, -1], [1, -1]]], dtype=layer.ids.dtype)
    exchanged = torch.tensor([[[0, 1], [0, 1]], [[1, 0], [1, 0]]], dtype=layer.ids.dtype)
    calls = [inputs_of(shape, layer._replace(ids=chosen)) for chosen in (ids, exchanged)]
    weights = "w_gate_up", "w_down"
    inputs = [
        {
            f"{name}{n}": v
            for n in range(2)
            for name, v in calls[n][r].items()
            if name not in weights
        }
        | {name: calls[0][r][name] for name in weights}
        for r in range(2)
    ]
    mutants = tw.mutate(
        called_twice(shape.config), 2, inputs, schedules=20, epochs=2,
        equivalent=SIDECARS / "expert_mlp.json",
    )  # fmt: skip
    assert [(m.line, m.name, m.verdict, m.why) for m in mutants if not m.is_accounted_for] == []
    verdicts = [m.verdict for m in mutants]
    assert (verdicts.count("killed"), verdicts.count("explained")) == (130, 45)


SPILLED = {"gate_up": 0, "down": 16}
"""Limit of the bytes that a thread spills: the state of the loops over segments, once per tile."""


@pytest.mark.parametrize("build", [gate_up, down], ids=lambda build: build.__name__)
def test_emitted_kernels(ptxas, build):
    """The TMA loads tiles, one warp group loads, and one signal follows a tile of results."""
    config = ExpertMlpConfig(1024, 8, 8, 7168, 2048, 4, "bfloat16")
    source = tw.emit(build(config), world_size=4)
    loaded = {"gate_up": "inbox", "down": "activations"}[build.__name__]
    assert f"tl::tma_load({loaded}_desc" in source and "tl::tma_load(weights_desc" in source
    assert "__launch_bounds__(384, 1)" in source and "tl::wgmma_ss<" in source
    assert source.count("tw::Op::add, tw::Scope::sys, tw::Sem::release>((&(inbox_arrived") == (
        build is gate_up
    )
    said = ptxas(tw.emit(build(config), "ptx", world_size=4))
    spills = [int(n) for n in re.findall(r"(\d+) bytes spill", said)]
    assert spills and max(spills) <= SPILLED[build.__name__] and "serialized" not in said
