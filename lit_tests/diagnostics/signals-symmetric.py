# RUN: %python %s | %filecheck %s
"""Signals, waits, barriers and symmetric tensors refuse illegal operands when they are traced."""

import tilelang.language as T

import tileweave as tw
from tests.verdicts import print_verdict
from tileweave import language as W


def refused(name, statement):
    with print_verdict(name):

        @T.prim_func
        def program(F: W.Symmetric((8,), "uint32"), A: T.Tensor((8,), "float32"), n: T.int32):
            with T.Kernel(1, threads=128):
                tile = T.alloc_shared((8,), "uint32")
                statement(F, A, tile, n)


# CHECK: type: signal: A has type float32; expected uint32, int32, uint64, int64
# LINE: CHECK-NEXT: --> {{.*}}signals-symmetric.py:
refused("type", lambda F, A, t, n: W.signal(A[0]))

# CHECK: space: wait_eq: ref=tile is in shared.dyn memory; expected a global-memory tensor
refused("space", lambda F, A, t, n: W.wait_eq(t[0], 1))

# CHECK: range: signal: value=8589934592; expected a value of type uint32, -2147483648 to 4294967295
refused("range", lambda F, A, t, n: W.signal(F[0, 0], 1 << 33))

# CHECK: negative: accepted
refused("negative", lambda F, A, t, n: W.signal(F[0, 0], -1))

# CHECK: float: signal: value=A[0] has type float32; expected an integer, such as T.Cast('uint32', ...)
refused("float", lambda F, A, t, n: W.signal(F[0, 0], A[0]))

# CHECK: index: signal: ref=F[0, 8] has index 8 on axis 1; expected less than 8
refused("index", lambda F, A, t, n: W.signal(F[0, 8]))

# CHECK: words: sync_grid: barrier=A has type float32; expected type uint32
refused("words", lambda F, A, t, n: W.sync_grid(A[0]))

# CHECK: own_words: sync_grid: barrier=tile is in shared.dyn memory; expected a global-memory tensor
refused("own_words", lambda F, A, t, n: W.sync_grid(t[0]))

# CHECK: op: signal: op='max'; expected 'add' or 'set'
refused("op", lambda F, A, t, n: W.signal(F[0, 0], op="max"))

# CHECK: scope: signal: scope='device'; expected 'cta' or 'gpu' or 'sys'
refused("scope", lambda F, A, t, n: W.signal(F[0, 0], scope="device"))

# CHECK: sem: signal: sem='acquire'; expected 'relaxed' or 'release'
refused("sem", lambda F, A, t, n: W.signal(F[0, 0], sem="acquire"))

# CHECK: wait sem: wait_reached: sem='release'; expected 'relaxed' or 'acquire'
refused("wait sem", lambda F, A, t, n: W.wait_reached(F[0, 0], 1, sem="release"))

# CHECK: value: wait_ge: value=1.5; expected a value of type uint32
refused("value", lambda F, A, t, n: W.wait_ge(F[0, 0], 1.5))

# CHECK: text: wait_ge: value='one'; expected a value of type uint32
refused("text", lambda F, A, t, n: W.wait_ge(F[0, 0], "one"))

# CHECK: words: signal: too many positional arguments; expected signal(ref, value=1, *,
refused("words", lambda F, A, t, n: W.signal(F[0, 0], 1, "set"))

# CHECK: barrier: sync_grid: barrier=tile is in shared.dyn memory; expected a global-memory tensor
refused("barrier", lambda F, A, t, n: W.sync_grid(t[0]))

# CHECK: right: accepted
refused("right", lambda F, A, t, n: W.signal(F[0, 0], n))

# CHECK: Symmetric: dtype='float4_e2m1fn'; expected elements of 1, 2, 4, 8 or 16 bytes
try:
    W.Symmetric((8,), "float4_e2m1fn")
except tw.LanguageError as error:
    print(error)


@T.prim_func
def local_words(U: T.Tensor((8,), "uint32"), F: W.Symmetric((8,), "uint32")):
    with T.Kernel(1, threads=128):
        W.sync_ranks(F[W.rank(), 0])
        W.sync_grid(U[0])


def refused_words(name, barrier):
    with print_verdict(name):

        @T.prim_func
        def program(U: T.Tensor((8,), "uint32")):
            with T.Kernel(1, threads=128):
                barrier(U[0])


# CHECK: ranks: sync_ranks: barrier=U is not a symmetric tensor; expected this rank's copy of a W.Symmetric tensor, such as B[W.rank(), 0]
refused_words("ranks", W.sync_ranks)
# CHECK: blocks: barrier_blocks: barrier=U is not a symmetric tensor; expected this rank's copy of a W.Symmetric tensor, such as B[W.rank(), 0]
refused_words("blocks", W.barrier_blocks)
