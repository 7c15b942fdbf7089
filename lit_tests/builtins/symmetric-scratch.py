# RUN: %python %s | %filecheck %s
"""Memory of W.alloc_symmetric can be an operand of builtins, like a W.Symmetric parameter."""

import tilelang.language as T

import tileweave as tw
from tests.verdicts import show_unordered
from tileweave import language as W

N = 256


@T.prim_func
def everything(X: T.Tensor((N,), "float32"), Y: T.Tensor((N,), "float32")):
    with T.Kernel(1, threads=128):
        S = W.alloc_symmetric((2, N), "float32")
        F = W.alloc_symmetric((8,), "uint32")
        tile = T.alloc_shared((N,), "float32")
        arrived = T.alloc_barrier(1)
        me, right = W.rank(), (W.rank() + 1) % W.world_size()
        W.sync_ranks(F[me, 0])
        W.put_block(X[0], S[me, 0, 0], N, peer=right)
        W.get_block(S[me, 1, 0], Y[0], N, peer=right)
        W.signal(F[right, 6], 1)
        W.wait_reached(F[me, 6], 1)
        if T.get_thread_binding() == 0:
            W.red_add(F[right, 7], 1, scope="sys")
            Y[0] = T.cast(W.ld(F[me, 7]), "float32")
            W.st(F[me, 7], 0)
        W.bulk_load(tile, S[me, 0, 0], N, arrived)
        if T.get_thread_binding() == 0:
            T.mbarrier_arrive(arrived)
        T.mbarrier_wait_parity(arrived, 0)
        W.bulk_store(S[right, 1, 0], tile, N)
        W.bulk_wait(0)


# CHECK-LABEL: TEST: everything
# CHECK: __global__ void __launch_bounds__
# CHECK: tw::sync_ranks((&(F[(((int64_t)rank) * (int64_t)268435456)]))
# CHECK: tw::put_block((&(X[0])), (&(S[(((((int64_t)rank) + (int64_t)1) & (int64_t)3) * (int64_t)268435456)])), 256
# CHECK: tw::get_block((&(S[((((((int64_t)rank) + (int64_t)1) & (int64_t)3) * (int64_t)268435456) + (int64_t)256)])), (&(Y[0])), 256
# CHECK: tw::signal<{{.*}}(&(F[((((((int64_t)rank) + (int64_t)1) & (int64_t)3) * (int64_t)268435456) + (int64_t)6)]))
# CHECK: tw::wait_reached<{{.*}}(&(F[((((int64_t)rank) * (int64_t)268435456) + (int64_t)6)]))
# CHECK: tw::red_add<{{.*}}(&(F[
# CHECK: tw::ld<{{.*}}(&(F[
# CHECK: tw::st<{{.*}}(&(F[
# CHECK: tw::bulk_load((&(tile[0])), (&(S[(((int64_t)rank) * (int64_t)268435456)])), 256
# CHECK: tw::bulk_store((&(S[{{.*}}(&(tile[0])), 256)
show_unordered(everything)


def refused(name, use):
    try:

        @T.prim_func
        def program(X: T.Tensor((N,), "float32")):
            with T.Kernel(1, threads=128):
                S = W.alloc_symmetric((N,), "float32")
                tile = T.alloc_shared((N,), "float32")
                use(S, tile)

        print(f"{name}: accepted")
    except tw.LanguageError as error:
        print(f"{name}: {error}".splitlines()[0])


# A multimem operation accesses the copies of all ranks, and shared memory is not global memory.
# CHECK: multimem: multimem_st: ref=S is symmetric, and an index selects ranks; expected the copies of all ranks, S[:, ...]
refused("multimem", lambda S, tile: W.multimem_st(S[W.rank(), 0], 1.0))
# CHECK: some: multimem_red: ref=S is symmetric, and an index selects ranks; expected the copies of all ranks, S[:, ...]
refused("some", lambda S, tile: W.multimem_red(S[0:2, 0], 1.0, op="add"))
# CHECK: all: accepted
refused("all", lambda S, tile: W.multimem_st(S[:, 0], 1.0))
# CHECK: shared: put_block: src=tile is in shared{{.*}} memory; expected a global-memory tensor
refused("shared", lambda S, tile: W.put_block(tile[0], S[W.rank(), 0], N, peer=0))
# CHECK: behind: put_block: dst={{.*}} has index 256 on axis 1; expected less than 256
refused("behind", lambda S, tile: W.put_block(S[0, 0], S[0, N], 1, peer=0))
