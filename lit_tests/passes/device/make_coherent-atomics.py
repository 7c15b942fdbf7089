# RUN: %python %s | %filecheck %s
"""TileLang's atomic operations on symmetric tensors have system scope; others do not change."""

import tilelang.language as T

import tileweave as tw
from tests.verdicts import print_verdict
from tests.verdicts import show_unordered as show
from tileweave import language as W

OFF = {"tileweave.verify": "off"}


@T.prim_func
def elements(
    S: W.Symmetric((128,), "int32"), L: T.Tensor((128,), "int32"), A: T.Tensor((128,), "int32")
):
    with T.Kernel(1, threads=128):
        peer, tx = 1 - W.rank(), T.get_thread_binding()
        W.sync_ranks()
        T.atomic_add(S[peer, tx], 1)
        A[tx] = T.atomic_add(S[peer, tx], 1, memory_order="acq_rel", return_prev=True)
        T.atomic_max(S[peer, tx], 2, memory_order="release")
        T.atomic_or(S[peer, tx], 4)
        T.atomic_store(S[peer, tx], A[tx])
        A[tx] = T.atomic_load(S[peer, tx], memory_order="acquire")
        T.atomic_add(L[tx], 1)


# Parameters are read again after an acquire, so loads do not use the read-only cache.
# CHECK-LABEL: TEST: elements
# CHECK-NOT: __restrict__
# CHECK: tw::system::atomic_add<tw::Type::s32, 0>((&(S[{{.*}}])), 1);
# CHECK: A[{{.*}}] = tw::system::atomic_add_ret<tw::Type::s32, 4>((&(S[{{.*}}])), 1);
# CHECK: tw::system::atomic_max<tw::Type::s32, 3>((&(S[{{.*}}])), 2);
# CHECK: tw::system::atomic_or<tw::Type::s32, 0>((&(S[{{.*}}])), 4);
# CHECK: tw::system::atomic_store<tw::Type::s32, 5>((&(S[{{.*}}])), A[{{.*}}]);
# CHECK: A[{{.*}}] = tw::system::atomic_load<tw::Type::s32, 2>((&(S[{{.*}}])));
# CHECK: {{^ *}}AtomicAdd((&(L[{{.*}}])), 1);
show(elements, world_size=2)


@T.prim_func
def tiles(S: W.Symmetric((128, 64), "bfloat16"), A: T.Tensor((128, 64), "bfloat16")):
    with T.Kernel(1, threads=128):
        peer = 1 - W.rank()
        tile = T.alloc_shared((128, 64), "bfloat16")
        T.copy(A, tile)
        W.sync_ranks()
        T.atomic_add(S[peer, 0, 0], tile)
        T.atomic_add(S[peer, 0, 0], tile, use_tma=True)
        W.sync_ranks()


# A TMA reduction has no other scope.
# CHECK-LABEL: TEST: tiles
# CHECK: tw::system::atomic_addx2<tw::Type::bf16, 0>((&(S[{{.*}}])), *(uint1*)(tile
# CHECK: tl::tma_store_add
show(tiles, world_size=2)


@T.prim_func
def without_builtins(S: W.Symmetric((128,), "float32")):
    with T.Kernel(1, threads=128):
        T.atomic_add(W.unordered(S[0, T.get_thread_binding()], reason="a sum for the host"), 1.0)


# CHECK-LABEL: TEST: without_builtins
# CHECK: tw::system::atomic_add<tw::Type::f32, 0>(
show(without_builtins, world_size=2)


def refused(name, dtype, operation):
    @T.prim_func
    def program(S: W.Symmetric((128,), dtype), A: T.Tensor((128,), dtype)):
        with T.Kernel(1, threads=128):
            W.sync_ranks()
            operation(S, A, T.get_thread_binding())

    with print_verdict(name):
        tw.emit(program, world_size=2, pass_configs=OFF)


# CHECK: bytes: T.atomic_add: symmetric tensor S has type int8; expected uint32, int32, uint64,
refused("bytes", "int8", lambda S, A, tx: T.atomic_add(S[0, tx], 1))
# SINCE_0_1_13: CHECK: old vector: T.atomic_addx2: return_prev=True for symmetric tensor S; expected T.atomic_add of
refused(
    "old vector", "float32",
    lambda S, A, tx: T.evaluate(T.atomic_addx2(S[0, tx * 2], A[tx * 2], return_prev=True)),
)  # fmt: skip
