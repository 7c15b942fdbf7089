"""Scopes of signals and waits, and signals that publish several accesses."""

import re

import numpy as np
import pytest
import tilelang.language as T

import tileweave as tw
from tests.factory import factory
from tileweave import language as W

RANKS, BLOCKS, N = 2, 2, 64
F32 = "float32"


@factory
def exchanged(offset, write, X: T.Tensor((N,), F32), Y: T.Tensor((BLOCKS, N + 4), F32)):
    """The first blocks write rows at the rank after ``offset`` ranks, and the last ones read."""
    with T.Kernel(2 * BLOCKS, threads=32) as block:
        S = W.alloc_symmetric((BLOCKS, N + 4), F32)
        if block < BLOCKS:
            write(X, S, (W.rank() + offset) % RANKS, block)
        if block >= BLOCKS:
            for j in T.Parallel(N + 4):
                Y[block - BLOCKS, j] = S[W.rank(), block - BLOCKS, j]


@T.macro
def by_one_statement(X, S, rank, block):
    for j in T.Parallel(N):
        S[rank, block, j] = X[j]
        if j < 4:
            S[rank, block, N + j] = X[j]


@T.macro
def by_two_statements(X, S, rank, block):
    for j in T.Parallel(N):
        S[rank, block, j] = X[j]
    for j in T.Parallel(4):
        S[rank, block, N + j] = X[j]


@T.macro
def with_a_condition(X, S, rank, block):
    """Only the first block writes the second part in this statement."""
    for j in T.Parallel(N):
        S[rank, block, j] = X[j]
        if block == 0:
            if j < 4:
                S[rank, block, N + j] = X[j]
    if block > 0:
        for j in T.Parallel(4):
            S[rank, block, N + j] = X[j]


@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize(
    ("write", "signals"), [(by_one_statement, 1), (by_two_statements, 2), (with_a_condition, 3)]
)
def test_signals(offset, write, signals):
    program = exchanged(offset, write)
    source = tw.emit(program, world_size=RANKS)
    scopes = re.findall(r"tw::(signal|wait_reached)<[^(]*Scope::(\w+)", source)
    assert [name for name, _ in scopes].count("signal") == signals
    assert {scope for _, scope in scopes} == {"sys" if offset else "gpu"}
    inputs = [{"X": np.arange(N, dtype=np.float32) + 100 * rank} for rank in range(RANKS)]
    out = tw.simulate(program, RANKS, inputs, epochs=3)
    for rank in range(RANKS):
        x = inputs[(rank - offset) % RANKS]["X"]
        assert (out[rank]["Y"] == np.concatenate([x, x[:4]])).all()
