"""Builtins on W.alloc_symmetric memory, in programs that signal explicitly and in inferred ones."""

import numpy as np
import pytest
import tilelang.language as T

import tileweave as tw
from tests.factory import factory
from tileweave import language as W

N, RANKS = 64, 3
F32 = "float32"


@factory
def explicit(X: T.Tensor((N,), F32), Y: T.Tensor((N,), F32), *, waits=True):
    with T.Kernel(1, threads=32):
        S = W.alloc_symmetric((N,), F32)
        F = W.alloc_symmetric((2,), "uint32")
        me, right = W.rank(), (W.rank() + 1) % RANKS
        W.put_block(X[0], S[me, 0], N, peer=right)
        W.signal(F[right, 1], 1)
        if waits:
            W.wait_reached(F[me, 1], 1)
        W.get_block(S[me, 0], Y[0], N, peer=me)
        W.sync_ranks()


@T.prim_func
def inferred(X: T.Tensor((N,), F32), Y: T.Tensor((N,), F32)):
    with T.Kernel(1, threads=32):
        S = W.alloc_symmetric((N,), F32)
        W.put_block(X[0], S[W.rank(), 0], N, peer=(W.rank() + 1) % RANKS)
        W.get_block(S[W.rank(), 0], Y[0], N, peer=W.rank())


@pytest.mark.parametrize("program", [explicit(), inferred], ids=["explicit", "inferred"])
def test_shift(program):
    inputs = [{"X": np.full(N, rank, np.float32)} for rank in range(RANKS)]
    for seed in range(10):
        out = tw.simulate(program, RANKS, inputs, seed=seed, epochs=1)
        for rank in range(RANKS):
            assert (out[rank]["Y"] == (rank - 1) % RANKS).all()


def test_flags_in_scratch_memory_order_what_they_signal():
    """Without the wait, both the compiler and the simulator report a fault."""
    program = explicit(waits=False)
    with pytest.raises(tw.LanguageError, match="get_block reads S"):
        tw.emit(program, world_size=RANKS)
    inputs = [{"X": np.zeros(N, np.float32)} for _ in range(RANKS)]
    with pytest.raises(tw.TileWeaveError, match="race"):
        for seed in range(10):
            tw.simulate(program, RANKS, inputs, seed=seed, epochs=1)
