"""GEMM + all-reduce by multimem operations: bits, mutants, device functions, and how it is
requested."""

from __future__ import annotations

from collections import Counter
from math import ceil

import numpy as np
import pytest
import torch

import tileweave as tw
from tests.ops.collectives.test_multimem import AT_ONCE, PULLED, STORED, sum_in_order
from tests.ops.gemm.test_programs import DTYPES, RESIDENT, TILES, exact
from tileweave import ops
from tileweave.ops.autotune import tuner
from tileweave.ops.core import strategy
from tileweave.ops.core.gemm_config import GemmConfig
from tileweave.ops.core.operator import Choice
from tileweave.ops.core.problem import Problem
from tileweave.ops.core.tiles import LARGE, SMALL, DeviceSpec, PersistentSchedule
from tileweave.ops.gemm.kernels import gemm_all_reduce
from tileweave.ops.gemm.kernels.gemm_all_reduce import gemm_ar_multimem
from tileweave.ops.gemm.matmul_all_reduce import MatmulAllReduce

LONG = pytest.mark.long
UNUSED_SIGNALS = "ignore:.*never waited for:tileweave.SimulationWarning"
"""Blocks signal to all ranks, and only the owner of a tile waits."""


@pytest.fixture
def few_sms(monkeypatch):
    """Each block computes several tiles."""
    monkeypatch.setattr(gemm_all_reduce, "DEVICE", DeviceSpec(5))


def inputs_of(config: GemmConfig) -> list[dict[str, np.ndarray]]:
    """Return integers whose products are exact in fp32, but not in ``config.out_dtype``."""
    rng = np.random.default_rng(config.ranks)
    dtype = DTYPES[config.dtype]
    shapes = {"A": (config.M, config.K), "B": (config.K, config.N)}
    inputs = [
        {name: rng.integers(-40, 41, shape).astype(dtype) for name, shape in shapes.items()}
        for _ in range(config.ranks)
    ]
    if config.biased:
        bias = rng.integers(-99, 100, config.N).astype(dtype)
        inputs = [given | {"bias": bias} for given in inputs]
    return inputs


def sum_of(config: GemmConfig, inputs: list[dict[str, np.ndarray]]) -> np.ndarray:
    """Return the result: rounded products, each tile with the bias in its owner's product, added in
    the order of the ranks."""
    products = [exact(given["A"], given["B"]) for given in inputs]
    rows, columns = config.grid(config.M)
    for index in range(rows * columns if config.biased else 0):
        m, n = config.origin(index, config.M)
        tile = slice(m, m + TILES.M), slice(n, n + TILES.N)
        products[index % config.ranks][tile] += inputs[0]["bias"][tile[1]].astype(np.float32)
    return sum_in_order([product.astype(DTYPES[config.out_dtype]) for product in products])


CASES = [
    (1, (24, 40, 24), "bfloat16", True),
    (2, (32, 48, 16), "float16", False),
    (3, (40, 56, 24), "bfloat16", True),
    pytest.param(4, (72, 56, 8), "bfloat16", True, marks=LONG),
    pytest.param(4, (8, 8, 8), "float16", False, marks=LONG),
]
"""ranks; M, N, K; type; whether there is a bias."""


@pytest.mark.filterwarnings(UNUSED_SIGNALS)
@pytest.mark.parametrize(("ranks", "sizes", "dtype", "biased"), CASES)
def test_bits(few_sms, ranks, sizes, dtype, biased):
    config = GemmConfig(*sizes, ranks, dtype, False, TILES, biased)
    inputs = inputs_of(config)
    outputs = tw.simulate(gemm_ar_multimem(config), ranks, inputs, 2, resident_blocks=RESIDENT)
    right = sum_of(config, inputs)
    for rank, output in enumerate(outputs):
        assert np.array_equal(output["C"], right), rank


@pytest.mark.filterwarnings(UNUSED_SIGNALS)
@LONG
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_device_functions(few_sms, ranks, arch):
    """In several waves; tests/simulator/device/corpus.py has the program with one."""
    config = GemmConfig(40, 56, 24, ranks, "bfloat16", False, TILES, True)
    assert PersistentSchedule.for_tiles(ceil(12 / ranks) * ranks, 5).waves == 3
    tw.validate(gemm_ar_multimem(config), ranks, inputs_of(config), arch, resident_blocks=RESIDENT)


@pytest.mark.filterwarnings(UNUSED_SIGNALS)
@LONG
def test_every_mutant_is_accounted_for():
    """The same mutants survive as for the two-shot all-reduce."""
    config = GemmConfig(40, 32, 16, 3, "bfloat16", False, TILES)
    mutants = tw.mutate(gemm_ar_multimem(config), 3, inputs_of(config), schedules=5)
    expected = sum(map(Counter, (PULLED, AT_ONCE, STORED)), Counter())
    assert Counter(m.name for m in mutants if not m.is_accounted_for) == expected
    assert [m.verdict for m in mutants].count("killed") >= 60


@LONG
@pytest.mark.parametrize("tiles", [LARGE, SMALL], ids=str)
def test_ptxas_keeps_tensor_cores_asynchronous(ptxas, tiles):
    config = GemmConfig(1000, 8200, 1800, 8, "bfloat16", True, tiles, True)
    ptx = tw.emit(gemm_ar_multimem(config), stage="ptx", world_size=8)
    assert "wgmma.mma_async" in ptx and "serialized" not in ptxas(ptx)


def problem_of(rows: int, dtype: torch.dtype = torch.bfloat16) -> Problem:
    return Problem("matmul_all_reduce", rows, 8192, 8192, 4, dtype, True)


@pytest.mark.parametrize("rows", [16, 1024, 16384])
def test_fused_never_chooses_it(rows):
    """Neither the prediction, nor tuning, nor a result of tuning that is stored."""
    problem = problem_of(rows)
    choices = [*MatmulAllReduce.options(problem), *MatmulAllReduce.candidates(problem)]
    assert "multicast" in MatmulAllReduce.programs
    assert "multicast" not in {choice.program for choice in choices}
    assert not MatmulAllReduce.has_choice(problem, Choice("multicast", LARGE))


@pytest.mark.parametrize(
    ("rows", "dtype", "tiles"),
    [(16, torch.bfloat16, SMALL), (1024, torch.bfloat16, LARGE), (8192, torch.float16, LARGE)],
)
def test_choice(rows, dtype, tiles):
    """It needs no tuning, and so no exchange between ranks."""
    choice = tuner.choice_of("multicast", problem_of(rows, dtype), group=None)
    assert choice == Choice("multicast", tiles)


def test_strategy_of(monkeypatch):
    a, b = torch.ones(24, 8).bfloat16(), torch.ones(8, 16).bfloat16()
    monkeypatch.setattr(strategy, "obstacle", lambda *_: None)
    said = ops.strategy_of(ops.matmul_all_reduce, a, b, strategy="multicast")
    assert said == ("multicast", "asked for")
