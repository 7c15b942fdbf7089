"""Tile programs of ``expert_mlp`` that overlap exchange and products, on simulated ranks."""

import functools
import re
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest
import torch

import tileweave as tw
from tests.ops.moe.by_definition import random_ids
from tileweave.ops.core.tiles import Tiles
from tileweave.ops.moe.fused_mlp import mlp_plan
from tileweave.ops.moe.kernels.expert_mlp import ExpertMlpConfig, down, gate_up
from tileweave.ops.moe.segments import segments_of
from tileweave.simulator.simulate import executable_at

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
