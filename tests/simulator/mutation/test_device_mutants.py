"""Every mutant of small device functions is killed by the simulator, or is a listed equivalent."""

import functools
import json
import sys

import pytest

import tileweave as tw
from tests.releases import (
    needs_bulk_copies,
    needs_consumer_barriers,
    needs_device_lines,
    needs_lines,
)
from tests.simulator.device.programs import RANKS, gemm_reduce_scatter, inputs
from tileweave.cli.main import main

from .device_programs import NAMES, exchange, exchanged, instance

COUNTS = {"gemm sm_80": (11, 0), "gemm sm_90a": (37, 0), "exchange": (21, 4)}
"""Mutants that are killed, and explained."""


@functools.cache
def mutants(name):
    return instance(name).mutants()


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=needs_device_lines if n == "exchange" else ()) for n in NAMES]
)
def test_every_mutant_is_accounted_for(name):
    found = mutants(name)
    assert [(m.line, m.name, m.verdict, m.why) for m in found if not m.is_accounted_for] == []
    verdicts = [m.verdict for m in found]
    assert (verdicts.count("killed"), verdicts.count("explained")) == COUNTS[name]


@pytest.mark.parametrize(
    ("name", "mutant", "kind"),
    [
        ("gemm sm_80", "sync_threads drop", "race"),
        ("gemm sm_80", "cp_async_commit drop", "race"),
        ("gemm sm_80", "cp_async_wait drop", "race"),
        ("gemm sm_80", "cp_async_wait n=2", "race"),
        ("gemm sm_90a", "mbarrier_init drop", "poison"),
        ("gemm sm_90a", "mbarrier_init threads=2", "deadlock"),
        ("gemm sm_90a", "mbarrier_init#3 threads=127", "arrival"),
        ("gemm sm_90a", "mbarrier_init_fence drop", "race"),
        ("gemm sm_90a", "mbarrier_expect_tx bytes+16", "deadlock"),
        ("gemm sm_90a", "mbarrier_arrive_expect_tx bytes-16", "deadlock"),
        ("gemm sm_90a", "mbarrier_arrive drop", "deadlock"),
        ("gemm sm_90a", "mbarrier_wait_parity drop", "race"),
        ("gemm sm_90a", "mbarrier_wait_parity parity flipped", "deadlock"),
        ("gemm sm_90a", "wgmma_fence drop", "race"),
        ("gemm sm_90a", "wgmma_commit drop", "race"),
        ("gemm sm_90a", "wgmma_wait drop", "race"),
        ("gemm sm_90a", "wgmma_wait n=1", "race"),
        ("gemm sm_90a", "sync_threads drop", "race"),
        pytest.param(
            "gemm sm_90a", "sync_threads threads=96", "deadlock", marks=needs_consumer_barriers
        ),
        pytest.param(
            "gemm sm_90a", "sync_threads threads=160", "deadlock", marks=needs_consumer_barriers
        ),
        ("gemm sm_90a", "tma_store_wait drop", "reuse"),
        ("gemm sm_90a", "tma_store_wait n=1", "reuse"),
        pytest.param("exchange", "fence_proxy_async drop", "race", marks=needs_device_lines),
        pytest.param("exchange", "complete_bulk_stores drop", "race", marks=needs_bulk_copies),
        pytest.param("exchange", "complete_bulk_stores read=True", "race", marks=needs_bulk_copies),
        ("exchange", "signal drop", "deadlock"),
        ("exchange", "signal sem=relaxed", "race"),
        ("exchange", "signal scope=gpu", "race"),
        ("exchange", "signal value+1", "race"),
        ("exchange", "wait_reached drop", "race"),
        ("exchange", "wait_reached sem=relaxed", "race"),
        ("exchange", "wait_reached scope=gpu", "race"),
        ("exchange", "wait_reached target-1", "race"),
    ],
)
def test_fault_is_killed(name, mutant, kind):
    found = [m for m in mutants(name) if m.name == mutant]
    assert found, [m.name for m in mutants(name)]
    assert {m.verdict for m in found if m.verdict != "explained"} == {"killed"}
    assert kind in {m.why.partition(":")[0] for m in found}


@needs_device_lines
def test_redundant_barriers():
    """One barrier follows another, and nothing follows the last one."""
    found = tw.mutate(exchange(redundant=True), 2, exchanged(), 1, level="device")
    first, last = [m for m in found if m.op in ("sync_threads#2", "sync_threads#3")]
    assert (first.verdict, first.why) == (
        "explained", "proven: the same barrier follows immediately"
    )  # fmt: skip
    assert last.verdict == "survived" and not last.is_accounted_for


@needs_device_lines
def test_explanations_of_other_levels_are_not_used(tmp_path):
    case, statement = instance("gemm sm_80"), "T.copy(C_tile, C)"
    reasons = {"gemm.program": {statement: {"sync_threads drop": "wrong"}}}
    for key, verdict in (("level=device, arch=sm_90a", "killed"),
                         ("level=device, arch=sm_80", "wrong explanation")):  # fmt: skip
        sidecar = tmp_path / "reasons.json"
        sidecar.write_text(json.dumps({key: reasons}, indent=1))
        found = case.mutants(equivalent=sidecar)
        (mutant,) = [m for m in found if m.statement == statement and m.name == "sync_threads drop"]
        assert mutant.verdict == verdict
        assert len([m for m in found if m.verdict == "wrong explanation"]) == (verdict != "killed")


def test_unknown_level_in_a_sidecar_file_is_refused(tmp_path):
    sidecar = tmp_path / "reasons.json"
    sidecar.write_text(json.dumps({"level=device, arch=sm90": {}}))
    with pytest.raises(tw.TileWeaveError, match="'level=device, arch=sm90'; expected level=dev"):
        instance("gemm sm_80").mutants(equivalent=sidecar)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"level": "ptx"}, "level='ptx'; expected 'tile' or 'device'"),
        ({"level": "device", "arch": "sm_70"}, "arch='sm_70'; expected 'sm_80' or 'sm_90a'"),
    ],
)
def test_wrong_arguments(wrong, message):
    with pytest.raises(tw.TileWeaveError, match=message):
        tw.mutate(exchange(), 2, exchanged(), **wrong)


def test_time_limit():
    case = instance("gemm sm_80")
    with pytest.raises(tw.TileWeaveError, match="11 mutants, of which 0 have ended; expected at"):
        case.mutants(most_seconds=0.01)


def test_time_limit_looks_at_the_estimate(monkeypatch):
    """A test continues while its estimate is below the limit."""
    module = sys.modules["tileweave.simulator.mutation.mutate"]  # the package has the function
    monkeypatch.setattr(module, "_SILENT", 0.0)
    assert len(instance("gemm sm_80").mutants(most_seconds=600)) == 11


@pytest.mark.long
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_inferred_synchronization(arch):
    """The counters and flags that the compiler inserts are lowered, too."""
    found = tw.mutate(
        gemm_reduce_scatter(128), RANKS, inputs(128), schedules=1, epochs=3, level="device",
        arch=arch,
    )  # fmt: skip
    assert [(m.line, m.name, m.verdict, m.why) for m in found if not m.is_accounted_for] == []
    assert {"signal", "wait_reached", "atom_add", "sync_threads"} <= {m.op for m in found}


PROGRAM = """
import tilelang.language as T

@T.prim_func
def turn(X: T.Tensor((64,), "float32"), Y: T.Tensor((64,), "float32")):
    with T.Kernel(1, threads=64):
        tile = T.alloc_shared((64,), "float32")
        for i in T.Parallel(64):
            tile[i] = X[i]
        for i in T.Parallel(64):
            Y[i] = tile[63 - i]
        T.sync_threads()
"""


@needs_lines
def test_command_line(tmp_path, capsys):
    file = tmp_path / "turn.py"
    file.write_text(PROGRAM)
    options = ["--ranks", "1", "--schedules", "1", "--level", "device"]
    with pytest.raises(SystemExit) as status:
        main(["mutate", str(file), *options])
    assert status.value.code == 1
    killed, survived, summary = capsys.readouterr().out.splitlines()
    assert killed.startswith("turn.py:11: sync_threads drop: killed: race: turn.py:9, turn.py:11")
    assert "sync_threads#2 drop: survived: no fault" in survived
    assert summary == (
        "turn at the device level of sm_90a: 1 ranks, 1 schedules: 1 killed, 1 survived"
    )
    reasons = {"turn": {"Y[i] = tile[63 - i]": {"sync_threads#2 drop": "nothing follows"}}}
    sidecar = file.with_suffix(".equivalent.json")
    sidecar.write_text(json.dumps({"level=device, arch=sm_90a": reasons}))
    assert main(["mutate", str(file), *options]) == 0
    assert "explained: nothing follows" in capsys.readouterr().out
