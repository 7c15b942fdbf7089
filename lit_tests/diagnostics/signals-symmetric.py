# RUN: %python %s | %filecheck %s
"""What signals, waits, barriers and symmetric tensors refuse when a program is traced."""

import tilelang.language as T

import tileweave as tw
from tileweave import language as W


def refused(name, statement):
    try:

        @T.prim_func
        def program(F: W.Symmetric((8,), "uint32"), A: T.Tensor((8,), "float32"), n: T.int32):
            with T.Kernel(1, threads=128):
                tile = T.alloc_shared((8,), "uint32")
                statement(F, A, tile, n)

    except tw.LanguageError as error:
        print(f"{name}: {error}")
    else:
        print(f"{name}: accepted")


# CHECK: type: signal: A has type float32; expected uint32, int32, uint64, int64
# CHECK-NEXT: --> {{.*}}signals-symmetric.py:
refused("type", lambda F, A, t, n: W.signal(A[0]))

# CHECK: space: wait_eq: ref=tile is in shared.dyn memory; expected a global-memory tensor
refused("space", lambda F, A, t, n: W.wait_eq(t[0], 1))

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
