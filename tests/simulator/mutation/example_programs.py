"""Programs of the examples, in instances small enough for mutation tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

import tileweave as tw
from tests.modules import load_module
from tileweave.simulator import Mutant

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
SIDECARS = Path(__file__).resolve().with_name("equivalent")
SCHEDULES = 5


class Instance(NamedTuple):
    """Small instance of a program of an example."""

    title: str
    program: Any
    ranks: int
    inputs: list[dict[str, Any]]

    def mutants(self) -> list[Mutant]:
        """Return all mutants, explained by the sidecar file of the example, if there is one."""
        sidecar = SIDECARS / f"{self.title.partition('.py')[0]}.json"
        equivalent = sidecar if sidecar.is_file() else None
        return tw.mutate(self.program, self.ranks, self.inputs, SCHEDULES, equivalent=equivalent)


def _example(name: str) -> Any:
    return load_module(EXAMPLES / f"{name}.py")


def instances() -> Iterator[Instance]:
    """Yield all programs of the examples."""
    zeros, rng = np.zeros, np.random.default_rng(0)
    flags = [{"flags": zeros(1, np.uint32), "start": lambda e: 3 * e, "iterations": 3}] * 2
    ping_pong = _example("signal_ping_pong").ping_pong
    yield Instance("signal_ping_pong.py: `ping_pong`, 3 iterations", ping_pong, 2, flags)
    copied = {"src": rng.integers(0, 256, 901).astype(np.uint8), "dst": zeros(901, np.uint8)}
    bulk = _example("bulk_copy")
    title = "bulk_copy.py: `bulk_copy_with(stages=4, chunk=64, ahead=2)`, 901 bytes"
    yield Instance(title, bulk.bulk_copy_with(4, 64, 2), 1, [{**copied, "blocks": 2}])
    title = "bulk_copy.py: `load_store_program`, 901 bytes"
    yield Instance(title, bulk.load_store_program, 1, [{**copied, "blocks": 2}])
    sent = {"src": zeros(5, np.float32), "dst": zeros(5, np.float32), "blocks": 1}
    title = "bulk_copy.py: `multicast_program`, 5 numbers"
    yield Instance(title, bulk.multicast_program, 1, [sent])
    ranks, M, N, K = 3, 48, 64, 16
    inputs = [
        {
            **{n: rng.standard_normal((rows, K)).astype(ml_dtypes.bfloat16)
               for n, rows in (("A", M), ("B", N))},
            "arrived": zeros((2, 2), np.uint32),
            "state": zeros(2, np.uint32),
        }
        for _ in range(ranks)
    ]  # fmt: skip
    program = _example("gemm_reduce_scatter").gemm_reduce_scatter(M, N, K, ranks, 16, 32, 16)
    title = f"gemm_reduce_scatter.py: {M} x {N} x {K * ranks}, tiles of 16 x 32"
    yield Instance(title, program, ranks, inputs)
    N, K = 32, 16
    inputs = [
        {
            **{n: rng.standard_normal((rows, K)).astype(ml_dtypes.bfloat16)
               for n, rows in (("A", M // ranks), ("B", N))},
            "ready": zeros((2, ranks), np.uint32),
            "epoch": lambda e: e,
        }
        for _ in range(ranks)
    ]  # fmt: skip
    plan, _ = _example("all_gather_gemm").all_gather_gemm(M, N, K, ranks, 16, 32, 16)
    title = f"all_gather_gemm.py: {M} x {N * ranks} x {K}, tiles of 16 x 32"
    yield Instance(title, plan, ranks, inputs)
    inferred = _example("inferred")
    plan = inferred.all_gather_gemm(M, N, K, ranks, 16, 32, 16)
    title = f"inferred.py: `all_gather_gemm`, {M} x {N * ranks} x {K}, tiles of 16 x 32"
    yield Instance(title, plan, ranks, [{n: i[n] for n in "AB"} for i in inputs])
    inputs = [
        {n: rng.standard_normal((rows, K)).astype(ml_dtypes.bfloat16)
         for n, rows in (("A", M), ("B", N))}
        for _ in range(ranks)
    ]  # fmt: skip
    program = inferred.gemm_reduce_scatter(M, N, K, ranks, 16, 32, 16)
    title = f"inferred.py: `gemm_reduce_scatter`, {M} x {N} x {K * ranks}, tiles of 16 x 32"
    yield Instance(title, program, ranks, inputs)
