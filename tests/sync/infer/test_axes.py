"""Symmetric tensors with more axes than TMA supports: folding keeps their contents."""

import functools
from dataclasses import replace

import numpy as np
import pytest
import tilelang.language as T
from tvm import tirx
from tvm.target import Target
from tvm.tirx.stmt_functor import post_order_visit

import tileweave as tw
from tests.factory import factory
from tests.releases import needs_bulk_copies
from tileweave import language as W
from tileweave.passes import Pass, for_group, pipeline
from tileweave.passes.ir.implicit import implicit_of, set_implicit
from tileweave.passes.target.fold_axes import fold_axes
from tileweave.runtime.kernel.shared_program import SharedProgram, SizedProgram

RANKS, N = 3, 16
F32 = "float32"


@factory
def sums(X: T.Tensor((N, N), F32), Y: T.Tensor((N, N), F32), *, lead=(), turns=1):
    """Each rank adds what all ranks stored for it, ``turns`` times through the same memory."""
    zeros = (0,) * len(lead)
    with T.Kernel(1, threads=32):
        S = W.alloc_symmetric((RANKS, *lead, N, N), F32)
        tile = T.alloc_shared((N, N), F32)
        total = T.alloc_fragment((N, N), F32)
        me = W.rank()
        T.copy(X, tile)
        for _ in T.serial(turns):
            for r in T.serial(RANKS):
                T.copy(tile, S[((me + r) % RANKS, me, *zeros, 0, 0)])
            T.clear(total)
            for r in T.serial(RANKS):
                T.copy(S[(me, r, *zeros, 0, 0)], tile)
                for i, j in T.Parallel(N, N):
                    total[i, j] += tile[i, j]
            T.copy(total, tile)
        T.copy(tile, Y)


def folded(func):
    """Fold as for a GPU with a TMA, and declare the parameter folded, as the simulator needs it."""
    with Target({"kind": "cuda", "arch": "sm_90a"}) as target:
        func = fold_axes(func, target)
    results = {}

    def visit(node):
        if isinstance(node, (tirx.BufferLoad, tirx.BufferStore)):
            results[node.buffer.data] = node.buffer

    post_order_visit(func.body, visit)
    buffers = {param: results.get(b.data, b) for param, b in func.buffer_map.items()}
    shapes = {b.name: tuple(map(int, b.shape[1:])) for b in buffers.values()}
    assert len(shapes["S"]) == 4
    new = tirx.PrimFunc(func.params, func.body, func.ret_type, buffers, func.attrs, func.span)
    implicit = [replace(h, shape=shapes[h.name]) if h.scratch else h for h in implicit_of(func)]
    return set_implicit(new, implicit)


CASES = {"lead": ((2,), 1), "versions": ((), 2), "both": ((2, 2), 3)}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("fold", [False, True])
def test_simulated(name, fold, monkeypatch):
    lead, turns = CASES[name]
    if fold:
        more = Pass(functools.wraps(fold_axes)(folded), "debug", "for a test", "all")
        monkeypatch.setattr(pipeline, "PIPELINE", (*pipeline.PIPELINE, more))
    rng = np.random.default_rng(0)
    inputs = [{"X": rng.integers(-8, 8, (N, N)).astype(np.float32)} for _ in range(RANKS)]
    expected = sum(i["X"] for i in inputs) * RANKS ** (turns - 1)
    for seed in range(3):
        out = tw.simulate(sums(lead, turns), RANKS, inputs, seed=seed)
        for rank in range(RANKS):
            assert (out[rank]["Y"] == expected).all()


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("arch", ["sm_80", pytest.param("sm_90a", marks=needs_bulk_copies)])
def test_compiles(name, arch):
    source = tw.emit(sums(*CASES[name]), arch=arch, world_size=RANKS)
    assert ("tl::tma_store(S_desc" in source) == (arch == "sm_90a")


def test_extents_that_are_arguments_stay():
    """The axes before them are folded, at a distance that is an argument, too."""
    instances = [SizedProgram(for_group(sums((n,), 1), RANKS, 1 << 30)) for n in (2, 3)]
    shared = SharedProgram.of(instances)
    with Target({"kind": "cuda", "arch": "sm_90a"}) as target:
        func = fold_axes(shared.program, target)
    shapes = set()

    def visit(node):
        if isinstance(node, (tirx.BufferLoad, tirx.BufferStore)) and node.buffer.name == "S":
            shapes.add(tuple(map(str, node.buffer.shape)))

    post_order_visit(func.body, visit)
    sizes = dict(zip(map(str, shared.parameters), shared.arguments(instances[0]), strict=True))
    (lead,) = (name for name, value in sizes.items() if value == 2)
    assert shapes == {tuple(map(str, (RANKS, 2 * RANKS, lead, N, N)))}
