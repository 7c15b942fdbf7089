"""The text of a program does not depend on whether a rank compiled it or loaded it."""

import types

import tilelang
from tilelang import tvm

from tests.corpus import PROGRAMS
from tileweave import passes
from tileweave.runtime.kernel import kernel
from tileweave.runtime.kernel.shared_kernels import SharedKernels

RANKS = 2
TARGET = tvm.target.Target({"kind": "cuda", "arch": "sm_90a"})


def lower(program, **options):
    with TARGET:
        tilelang.lower(program, target=TARGET)


def load(program, **options): ...


def test_a_program_compiled_before_is_called_the_same(monkeypatch):
    """When it is compiled with other options, as for another plan, by mma, where TileLang renames
    the thread index."""
    said = []

    def exchange(topic, value, timeout_s=0.0):
        if topic == "compile":
            said.append(value)
        return [value]

    group = types.SimpleNamespace(world_size=RANKS, local_rank=0, exchange=exchange)
    heap = types.SimpleNamespace(stride=1 << 30)
    monkeypatch.setattr(kernel, "warm", lambda *_: None)
    monkeypatch.setattr(kernel, "_allocate", lambda *_: None)
    for prepare in (lower, load):
        session = types.SimpleNamespace(group=group, heap=heap, kernels=SharedKernels())
        monkeypatch.setattr(tilelang, "compile", prepare)
        program = PROGRAMS["ring_gemm_reduce_scatter"].make(RANKS)
        for configs in ({}, {"tileweave.delays": 11}):
            kernel.compile_kernel(passes.split_options(program, configs)[0], {}, session)
    first, second, *loaded = said
    assert first != second
    assert loaded == [first, second]
