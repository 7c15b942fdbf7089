"""Every mutant of the examples is killed by the simulator, or explained."""

from pathlib import Path

import pytest

import tileweave as tw
from tests.examples import programs as examples
from tileweave.simulator import Mutant

pytestmark = pytest.mark.long

SIDECARS = Path(__file__).resolve().with_name("equivalent")
CASES = {
    "signal_ping_pong.py: `ping_pong`, 3 iterations": (lambda: examples.ping_pong(3), 17, 18),
    "bulk_copy.py: `bulk_copy_with(stages=4, chunk=64, ahead=2)`, 901 bytes":
        (lambda: examples.bulk_copy("small_ring", 901, 2), 8, 1),
    "bulk_copy.py: `load_store_program`, 901 bytes":
        (lambda: examples.bulk_copy("load_store_program", 901, 2), 0, 0),
    "bulk_copy.py: `multicast_program`, 5 numbers":
        (lambda: examples.bulk_copy("multicast_program", 5, 1), 0, 4),
    "gemm_reduce_scatter.py: 48 x 64 x 48, tiles of 16 x 32":
        (lambda: examples.gemm_reduce_scatter(3, 48, 64, 16, 16, 32, 16), 29, 6),
    "all_gather_gemm.py: 48 x 96 x 16, tiles of 16 x 32":
        (lambda: examples.all_gather_gemm(3, 48, 32, 16, 16, 32, 16), 14, 2),
    "inferred.py: `all_gather_gemm`, 48 x 96 x 16, tiles of 16 x 32":
        (lambda: examples.inferred("all_gather_gemm", 3, 48, 32, 16, 16, 32, 16), 33, 10),
    "inferred.py: `gemm_reduce_scatter`, 48 x 32 x 48, tiles of 16 x 32":
        (lambda: examples.inferred("gemm_reduce_scatter", 3, 48, 32, 16, 16, 32, 16), 26, 5),
}  # fmt: skip
"""Instances of the examples, with the number of mutants that are killed, and explained."""


def mutants(title: str) -> tuple[int, list[Mutant]]:
    """Return the number of ranks and all mutants, explained by the example's sidecar, if any."""
    program, ranks, inputs = CASES[title][0]()
    sidecar = SIDECARS / f"{title.partition('.py')[0]}.json"
    equivalent = sidecar if sidecar.is_file() else None
    return ranks, tw.mutate(program, ranks, inputs, schedules=5, equivalent=equivalent)


def test_every_sidecar_belongs_to_an_example():
    assert {s.stem for s in SIDECARS.iterdir()} <= {title.partition(".py")[0] for title in CASES}


@pytest.mark.parametrize("title", CASES)
def test_every_mutant_is_accounted_for(title):
    _, results = mutants(title)
    assert [(m.line, m.name, m.verdict, m.why) for m in results if not m.is_accounted_for] == []
    verdicts = [m.verdict for m in results]
    assert (verdicts.count("killed"), verdicts.count("explained")) == CASES[title][1:]
