"""Conditions around writes: a write waits for the readers of the previous launch only where it
happens, and its wait covers no write that happens elsewhere."""

import numpy as np
import pytest
import tilelang.language as T

import tileweave as tw
from tests.factory import factory
from tileweave import language as W

N, BLOCKS, F32 = 8, 2, "float32"


@factory
def exchange(write, read, X: T.Tensor((BLOCKS, N), F32), Y: T.Tensor((BLOCKS, N), F32)):
    with T.Kernel(BLOCKS, threads=64) as block:
        S = W.alloc_symmetric((BLOCKS, N), F32)
        tx = T.get_thread_binding()
        write(X, S, block, tx)
        read(S, Y, block)


def right():
    return (W.rank() + 1) % W.world_size()


@T.macro
def rank_and_threads(X, S, block, tx):
    for peer in T.serial(W.world_size()):
        if tx < N and peer != W.rank() and W.rank() == 0:
            S[peer, block, tx] = X[block, tx]


@T.macro
def rank_inside_threads(X, S, block, tx):
    for peer in T.unroll(W.world_size()):
        if tx >= 64 - N:
            if peer != W.rank():
                if W.rank() == 0:
                    S[peer, block, tx - (64 - N)] = X[block, tx - (64 - N)]


@T.macro
def peer_inside_threads(X, S, block, tx):
    if W.rank() == 0:
        for peer in T.serial(W.world_size()):
            if tx == 5:
                if peer != W.rank():
                    for j in T.serial(N):
                        S[peer, block, j] = X[block, j]


@T.macro
def rank_in_a_parallel_loop(X, S, block, tx):
    for peer in T.serial(W.world_size()):
        if peer != W.rank():
            for j in T.Parallel(N):
                if W.rank() == 0:
                    S[peer, block, j] = X[block, j]


@T.macro
def rank_inside_a_warp(X, S, block, tx):
    for peer in T.serial(W.world_size()):
        if tx // 32 == 1:
            if W.rank() == 0 and peer != W.rank():
                W.put_warp(X[block, 0], S[peer, block, 0], N)


@T.macro
def read_by_others(S, Y, block):
    if W.rank() != 0:
        for j in T.Parallel(N):
            Y[block, j] = S[W.rank(), block, j]


@T.macro
def in_some_iterations(X, S, block, tx):
    for peer in T.serial(W.world_size()):
        for i, j in T.Parallel(2, N):
            if i == 1 and W.rank() != 0 and peer == (W.rank() + 1) % W.world_size():
                S[peer, block, j] = X[block, j]


@T.macro
def read_from_the_left(S, Y, block):
    if (W.rank() + W.world_size() - 1) % W.world_size() != 0:
        for j in T.Parallel(N):
            Y[block, j] = S[W.rank(), block, j]


@T.macro
def to_the_copy_of_rank_0(X, S, block, tx):
    if tx < N and W.rank() == 1:
        S[0, block, tx] = X[block, tx]


@T.macro
def past_the_end(X, S, block, tx):
    """The second block writes nothing, to another rank than the first."""
    tile = T.alloc_shared((BLOCKS, N), F32)
    T.copy(X, tile)
    T.copy(tile, S[(W.rank() + 1 + block) % W.world_size(), block * BLOCKS, 0])


@T.macro
def past_the_end_then_inside(X, S, block, tx):
    """The wait of the first write does not cover the second write of the second block."""
    tile = T.alloc_shared((BLOCKS, N // 2), F32)
    T.copy(X[0, 0], tile)
    T.copy(tile, S[right(), block * BLOCKS, 0])
    for j in T.Parallel(N // 2):
        S[right(), block, N // 2 + j] = X[block, N // 2 + j]


@T.macro
def read_by_all(S, Y, block):
    for j in T.Parallel(N):
        Y[block, j] = S[0, block, j]


@T.macro
def read_own(S, Y, block):
    for j in T.Parallel(N):
        Y[block, j] = S[W.rank(), block, j]


def from_rank_0(ranks):
    return {reader: 0 for reader in range(1, ranks)}


def from_rank_1(ranks):
    return {reader: 1 for reader in range(ranks)}


def from_all_but_rank_0(ranks):
    return {(sender + 1) % ranks: sender for sender in range(1, ranks)}


def from_all(ranks):
    return {(sender + 1) % ranks: sender for sender in range(ranks)}


CASES = [
    (rank_and_threads, read_by_others, from_rank_0),
    (rank_inside_threads, read_by_others, from_rank_0),
    (peer_inside_threads, read_by_others, from_rank_0),
    (rank_in_a_parallel_loop, read_by_others, from_rank_0),
    (rank_inside_a_warp, read_by_others, from_rank_0),
    (to_the_copy_of_rank_0, read_by_all, from_rank_1),
    (in_some_iterations, read_from_the_left, from_all_but_rank_0),
    (past_the_end, read_own, from_all),
    (past_the_end_then_inside, read_own, from_all),
]
"""What writes, what reads, and the sender of each reader."""


def check(write, read, sender_of, ranks, **options):
    rng = np.random.default_rng(ranks)
    inputs = [{"X": rng.standard_normal((BLOCKS, N), np.float32)} for _ in range(ranks)]
    out = tw.simulate(exchange(write, read), ranks, inputs, epochs=3, **options)
    for reader, sender in sender_of(ranks).items():
        np.testing.assert_array_equal(out[reader]["Y"], inputs[sender]["X"])


@pytest.mark.parametrize(("ranks", "reuse"), [(2, "barrier"), (3, "credit")])
@pytest.mark.parametrize(("write", "read", "sender_of"), CASES)
def test_waits_where_the_write_happens(write, read, sender_of, ranks, reuse):
    check(write, read, sender_of, ranks, schedules=2, pass_configs={"tileweave.reuse": reuse})


@pytest.mark.long
@pytest.mark.parametrize(("write", "read", "sender_of"), CASES)
def test_at_the_device_level(write, read, sender_of):
    options = {"level": "device", "pass_configs": {"tileweave.reuse": "credit"}}
    check(write, read, sender_of, 3, **options)
