"""Every mutant of the examples is killed by the simulator, or explained."""

import pytest

from .example_programs import SIDECARS, instances

pytestmark = pytest.mark.long

INSTANCES = {instance.title: instance for instance in instances()}
COUNTS = {
    "signal_ping_pong.py: `ping_pong`, 3 iterations": (17, 18),
    "bulk_copy.py: `bulk_copy_with(stages=4, chunk=64, ahead=2)`, 901 bytes": (8, 1),
    "bulk_copy.py: `load_store_program`, 901 bytes": (0, 0),
    "bulk_copy.py: `multicast_program`, 5 numbers": (0, 4),
    "gemm_reduce_scatter.py: 48 x 64 x 48, tiles of 16 x 32": (29, 6),
    "all_gather_gemm.py: 48 x 96 x 16, tiles of 16 x 32": (14, 2),
    "inferred.py: `all_gather_gemm`, 48 x 96 x 16, tiles of 16 x 32": (33, 10),
    "inferred.py: `gemm_reduce_scatter`, 48 x 32 x 48, tiles of 16 x 32": (26, 5),
}
"""Mutants that are killed, and explained."""


def test_every_instance_is_counted():
    assert INSTANCES.keys() == COUNTS.keys()
    sidecars = {sidecar.stem for sidecar in SIDECARS.iterdir()}
    assert sidecars <= {title.partition(".py")[0] for title in COUNTS}


@pytest.mark.parametrize("title", COUNTS)
def test_every_mutant_is_accounted_for(title):
    mutants = INSTANCES[title].mutants()
    assert [(m.line, m.name, m.verdict, m.why) for m in mutants if not m.is_accounted_for] == []
    verdicts = [m.verdict for m in mutants]
    assert (verdicts.count("killed"), verdicts.count("explained")) == COUNTS[title]
