"""Kernels with events: their results in the simulator, their code, and their tables."""

import ctypes
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

import tileweave as tw
from tests.examples.programs import inferred
from tileweave.builtins.errors import TileWeaveError
from tileweave.passes import with_trace
from tileweave.passes.device import record_events
from tileweave.passes.ir.events import decode_events
from tileweave.runtime.host import tracer
from tileweave.runtime.kernel import host_functions
from tileweave.runtime.kernel.kernel import Kernel, kernel_to_launch

RANKS, M, N, K = 2, 64, 64, 64


def gemm_reduce_scatter():
    """Return a program with a pipelined loop, TMA stores, and an inferred signal and wait."""
    return inferred("gemm_reduce_scatter", RANKS, RANKS * M, N, K, 64, 64, 16).program


def inputs():
    ones = np.ones((RANKS * M, K)).astype(ml_dtypes.bfloat16)
    return [{"A": ones * (r + 1), "B": ones[:N]} for r in range(RANKS)]


@pytest.mark.parametrize(
    "level", [{}, {"level": "device", "arch": "sm_90a"}, {"level": "device", "arch": "sm_80"}],
    ids=["tile", "sm_90a", "sm_80"],
)  # fmt: skip
def test_the_result_does_not_change(level):
    program = with_trace(gemm_reduce_scatter())
    for out in tw.simulate(program, RANKS, inputs(), schedules=2, epochs=2, **level):
        assert (out["C"].astype(np.float32) == 3 * K).all()


def table_of(program, arch, monkeypatch):
    tables = []
    encode = record_events.encode_events
    monkeypatch.setattr(
        record_events, "encode_events", lambda events: tables.append(events) or encode(events)
    )
    tw.emit(program, arch=arch, world_size=RANKS, pass_configs={"tileweave.trace": True})
    (table,) = tables
    return table


@pytest.mark.parametrize(("arch", "roles"), [("sm_90a", {"", "producer"}), ("sm_80", {""})])
def test_the_table_of_events(arch, roles, monkeypatch):
    table = table_of(gemm_reduce_scatter(), arch, monkeypatch)
    kinds = [entry["kind"] for entry in table]
    assert kinds[0] == "begin" and kinds[-1] == "end"
    assert {entry["role"] for entry in table} == roles
    assert kinds.count("loop_begin") == kinds.count("loop_end") == len(roles)
    assert kinds.count("transfer") == (arch == "sm_90a")
    (signal,) = [e for e in table if e["kind"] == "signal"]
    (wait,) = [e for e in table if e["kind"] == "wait"]
    assert signal["tensor"] == wait["tensor"] == "parts_arrived"
    assert (signal["change"], wait["relation"]) == ("add", "reached")
    lines = [e["loc"] for e in table if e["kind"] in ("loop_begin", "signal", "wait", "transfer")]
    assert all("inferred.py:" in line for line in lines)


def test_ptx_of_a_traced_kernel(ptxas, monkeypatch):
    """Each event reserves one slot of the buffer, and no register is spilled."""
    events = len(table_of(gemm_reduce_scatter(), "sm_90a", monkeypatch))
    ptx = tw.emit(
        gemm_reduce_scatter(), stage="ptx", world_size=RANKS,
        pass_configs={"tileweave.trace": True},
    )  # fmt: skip
    assert ptx.count("atom.relaxed.gpu.global.add.u64") == events
    report = ptxas(ptx)
    assert " 0 bytes spill stores, 0 bytes spill loads" in report, report


def test_host_code_passes_the_table():
    import tilelang
    from tilelang import tvm

    from tileweave.emit import EMIT_HEAP_STRIDE
    from tileweave.passes import run_group

    mod = tvm.IRModule({"program": with_trace(gemm_reduce_scatter())})
    (program,) = run_group(mod, RANKS, EMIT_HEAP_STRIDE).functions.values()
    target = tvm.target.Target({"kind": "cuda", "arch": "sm_90a"})
    with target:
        artifact = tilelang.lower(program, target=target)
    (host,) = artifact.host_mod.functions.values()
    text = host.script()
    (call,) = [line for line in text.splitlines() if "tileweave.begin_launch" in line]
    table = decode_events(call.rsplit('"', 2)[1])
    assert table[0]["kind"] == "begin"


@pytest.fixture
def active():
    """A tracer that records."""
    tracer.activate(tracer.Tracer(SimpleNamespace()))
    yield tracer.active()
    tracer.activate(None)


class _Stream:
    cuda_stream = 17


def test_a_launch_is_numbered(active, monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "current_stream", _Stream)
    capturing = False
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    slot = (ctypes.c_int64 * 2)()
    pointer = ctypes.cast(slot, ctypes.c_void_p)
    for number in range(2):
        host_functions._begin_launch(pointer, "table")
        assert slot[1] == number
    assert [(launch.table, launch.stream) for launch in active.launches] == [
        ("table", "stream 0")
    ] * 2  # fmt: skip
    assert active.launches[0].host_ns <= active.launches[1].host_ns
    capturing = True
    host_functions._begin_launch(pointer, "table")
    assert slot[1] == -1 and len(active.launches) == 2
    tracer.activate(None)
    host_functions._begin_launch(pointer, "table")
    assert slot[1] == -1


def test_a_kernel_runs_as_its_twin_only_in_a_trace_of_its_group(active, monkeypatch):
    kernel, twin = Kernel(None, gemm_reduce_scatter()), object()
    kernel.__dict__["traced"] = twin
    assert kernel_to_launch(kernel, active.session) is twin
    assert kernel_to_launch(kernel, SimpleNamespace()) is kernel
    monkeypatch.setattr("tileweave.runtime.kernel.kernel.capturing", lambda: True)
    with pytest.raises(TileWeaveError, match=r"^reduce_scatter: a CUDA graph is captured inside"):
        kernel_to_launch(kernel, active.session)
    tracer.activate(None)
    assert kernel_to_launch(kernel, active.session) is kernel


def test_freed_memory_is_not_used_by_the_twin(active):
    kernel = Kernel(None, gemm_reduce_scatter(), {"counters": np.zeros(1)})
    twin = kernel.__dict__["traced"] = Kernel(None, kernel.program, kernel.implicit)
    kernel.free()
    assert twin.implicit == {} and "traced" not in kernel.__dict__


@pytest.mark.parametrize("events", [0, -1, 1.5, True])
def test_illegal_sizes_are_refused(events, tmp_path):
    with pytest.raises(TileWeaveError, match=f"trace: events={events}; expected a positive"):
        with tw.trace(tmp_path / "run.json", events=events):
            pass


def test_traces_do_not_nest(active, tmp_path):
    with pytest.raises(TileWeaveError, match="inside of another trace; expected one at a time"):
        with tw.trace(tmp_path / "run.json"):
            pass


def test_another_suffix_is_refused(tmp_path):
    with pytest.raises(TileWeaveError, match="expected a name that ends in"):
        with tw.trace(tmp_path / "run.txt"):
            pass
