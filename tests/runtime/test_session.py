"""``tw.init`` refuses illegal settings, and everything else asks for it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import types

import pytest
import torch

import tileweave as tw
from tests import warm
from tests.groups import one_rank, open_sessions
from tileweave.runtime import lifecycle
from tileweave.runtime.host import session
from tileweave.runtime.host.heap import Heap
from tileweave.runtime.kernel import host_functions

barrier = sys.modules["tileweave.runtime.kernel.barrier"]


@pytest.fixture(autouse=True)
def down(monkeypatch):
    """Hide session, GPUs and variables of this machine."""
    open_sessions(monkeypatch)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for variable in ("TILEWEAVE_HEAP_BYTES", "TILEWEAVE_TIMEOUT_S"):
        monkeypatch.delenv(variable, raising=False)


def message_of(call, *args, **kwargs) -> str:
    with pytest.raises(tw.TileWeaveError) as error:
        call(*args, **kwargs)
    return str(error.value)


def test_init_without_a_gpu_says_so():
    assert message_of(tw.init).startswith(
        "init: this process sees no CUDA device; expected one GPU a rank"
    )


@pytest.mark.parametrize("release", ["2.10.1+cu128", "2.16.0", "2.16.0a0+git1", "3.0", "unknown"])
def test_torch_that_is_not_supported(monkeypatch, release):
    monkeypatch.setattr(torch, "__version__", release)
    assert message_of(tw.init) == f"init: torch is {release}; expected 2.11 to 2.15"


@pytest.mark.parametrize("release", ["2.11.0", "2.15.0+cu132", "2.13.1rc2", "2.12.0a0+git1"])
def test_torch_that_is_supported(monkeypatch, release):
    monkeypatch.setattr(torch, "__version__", release)
    assert "sees no CUDA device" in message_of(tw.init)


@pytest.mark.parametrize("value", ["", "many", "1 GiB", "-1", "0", "65535", "nan", "inf", "1e30"])
def test_heap_bytes_that_are_refused(monkeypatch, value):
    """Illegal sizes are refused before a GPU is needed, so on any machine."""
    monkeypatch.setenv("TILEWEAVE_HEAP_BYTES", value)
    assert message_of(tw.init) == (
        f"init: TILEWEAVE_HEAP_BYTES={value!r}; expected a number from 65536 to 1.1259e+15"
    )


@pytest.mark.parametrize("value", ["", "soon", "30 s", "-0.5", "nan", "inf", "1e10"])
def test_timeouts_that_are_refused(monkeypatch, value):
    monkeypatch.setenv("TILEWEAVE_TIMEOUT_S", value)
    assert message_of(tw.init) == (
        f"init: TILEWEAVE_TIMEOUT_S={value!r}; expected a number from 0 to 1e+09"
    )


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("TILEWEAVE_HEAP_BYTES", "65536"),
        ("TILEWEAVE_HEAP_BYTES", "2e9"),
        ("TILEWEAVE_TIMEOUT_S", "0"),
        ("TILEWEAVE_TIMEOUT_S", "0.5"),
    ],
)
def test_variables_that_are_taken(monkeypatch, variable, value):
    monkeypatch.setenv(variable, value)
    assert "sees no CUDA device" in message_of(tw.init)


@pytest.mark.parametrize("heap_bytes", [-1, 0, "large"])
def test_the_argument_goes_before_the_variable(monkeypatch, heap_bytes):
    monkeypatch.setenv("TILEWEAVE_HEAP_BYTES", "many")
    assert message_of(tw.init, heap_bytes=heap_bytes) == (
        f"init: heap_bytes={heap_bytes!r}; expected a number from 65536 to 1.1259e+15"
    )
    assert "sees no CUDA device" in message_of(tw.init, heap_bytes=1 << 20)


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        (tw.rank, ()),
        (tw.world_size, ()),
        (tw.symmetric, ((4,), torch.int32)),
        (tw.barrier, ()),
    ],
    ids=["rank", "world_size", "symmetric", "barrier"],
)
def test_before_init(function, arguments):
    assert message_of(function, *arguments) == (
        "tileweave: the runtime is not up; expected tw.init() before this"
    )


def test_finalize_without_init_does_nothing():
    assert tw.finalize() is None


@pytest.mark.parametrize(
    ("shape", "taken"),
    [(4, (4,)), ((4, 2), (4, 2)), ([4, 2], (4, 2)), (torch.Size([4]), (4,)), (2.5, (2.5,))],
)
def test_shapes_of_symmetric(monkeypatch, shape, taken):
    """A shape is an extent or a sequence of extents; the heap refuses other values."""

    class FakeSession:
        class heap:
            allocate = staticmethod(lambda shape, dtype: (shape, dtype))

    open_sessions(monkeypatch, FakeSession)
    assert tw.symmetric(shape, torch.int32) == (taken, torch.int32)


def test_a_session_that_cannot_compile_is_not_up(monkeypatch):
    """Otherwise the next ``tw.init`` would do nothing."""
    group = one_rank()
    closed = []
    watchdog = types.SimpleNamespace(close=lambda: closed.append("watchdog"))
    monkeypatch.setattr(lifecycle, "join", lambda process_group: group)
    monkeypatch.setattr(lifecycle, "Context", lambda *_, **__: types.SimpleNamespace(record=None))
    monkeypatch.setattr(lifecycle, "Watchdog", lambda *_: watchdog)
    monkeypatch.setattr(Heap, "close", lambda heap: closed.append("heap"))
    monkeypatch.setattr(host_functions, "open_session", lambda session: None)

    def prepare(session):
        raise tw.TileWeaveError("no nvcc")

    monkeypatch.setattr(lifecycle, "prepare", prepare)
    for _ in range(2):
        assert message_of(tw.init, heap_bytes=1 << 20) == "no nvcc"
        assert session.joined() is None
    assert closed == ["watchdog", "heap"] * 2


def test_the_native_part_s_variable_is_judged_before_anything_is_up(monkeypatch):
    monkeypatch.setenv("TILEWEAVE_NATIVE", "2")
    monkeypatch.setattr(lifecycle, "join", lambda group: pytest.fail("joined"))
    assert message_of(tw.init) == "TILEWEAVE_NATIVE='2'; expected 0 or 1"


@pytest.mark.parametrize(
    ("name", "value", "mine"),
    [
        ("heap_bytes", "70000", "80000"),
        ("tileweave", "9.9", tw.__version__),
        ("TILEWEAVE_TIMEOUT_S", "7", "30"),
        ("TILEWEAVE_TUNE", "1", "0"),
    ],
)
def test_ranks_with_different_settings_are_refused(monkeypatch, name, value, mine):
    class Differing:
        @staticmethod
        def exchange(topic: str, text: str) -> list[str]:
            return [text, json.dumps(json.loads(text) | {name: value})]

    for variable in ("TILEWEAVE_TIMEOUT_S", "TILEWEAVE_TUNE"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(lifecycle, "join", lambda group: Differing)
    variable = " (TILEWEAVE_HEAP_BYTES)" if name == "heap_bytes" else ""
    assert message_of(tw.init, heap_bytes=80000) == (
        f"init: the ranks differ (rank 0: {name}={mine}; rank 1: {name}={value}); expected the "
        f"same {name}{variable} on every rank"
    )


FORK = """
import os, sys
import torch
import torch.distributed as dist
import tileweave as tw
from tileweave import ops

def child(what):
    pid = os.fork()
    if pid == 0:
        try:
            what()
        except tw.TileWeaveError as error:
            sys.stdout.write(str(error))
            sys.stdout.flush()
        os._exit(0)
    os.waitpid(pid, 0)

child(lambda: ops.all_reduce(torch.ones(2)))
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)
child(lambda: ops.all_reduce(torch.ones(2)))
print(float(ops.all_reduce(torch.ones(2)).sum()))
"""


def test_a_process_that_a_rank_has_forked_is_no_rank(tmp_path):
    """A process that was forked before torch.distributed was initialized is not refused."""
    command = [*warm.python(), "-c", FORK, str(tmp_path / "store")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert re.fullmatch(
        r"tileweave: process \d+ was forked from process \d+, and is no rank; expected calls from "
        r"the process that torchrun started \(.*\)2\.0\n",
        done.stdout,
    ), done.stdout + done.stderr
