"""Data that is published or received too weakly: semantics, scopes, and writes in flight."""

from typing import Any

import numpy as np
import tilelang.language as T

from tests.factory import factory
from tileweave import language as W

from ..faults.case import Flag, Mail, N, Row, State, advance, begin, datum
from ..faults.fences import explicit_shift
from ..faults.transfers import bulk_store_only_read
from .case import specimen


@specimen(
    "lightseekorg/tokenspeed#351",
    "A one-shot all-reduce publishes its payload without a release at system scope: TP8 hangs.",
    "refused",
    "race",
    "has sem='relaxed'; expected 'release'",
)
def tokenspeed_351(faulty):
    sem = "relaxed" if faulty else "release"

    @T.prim_func
    def program(
        payload: W.Symmetric((N,), "int32"),
        arrived: W.Symmetric((1,), "int32"),
        state: T.Tensor((1,), "int32"),
        out: T.Tensor((N,), "int32"),
    ):
        with T.Kernel(1, threads=N) as _:
            me = W.rank()
            peer = (me + 1) % W.world_size()
            epoch = T.alloc_var("int32")
            epoch = state[0]
            for i in T.Parallel(N):
                payload[peer, i] = datum(epoch, me, i)
            T.sync_threads()
            if T.get_thread_binding() == 0:
                W.red_add(arrived[peer, 0], 1, scope="sys", sem=sem)  # FAULT
            W.wait_reached(arrived[me, 0], epoch + 1)
            for i in T.Parallel(N):
                out[i] = payload[me, i]
            W.sync_ranks()
            if T.get_thread_binding() == 0:
                state[0] = epoch + 1

    return program


def after_two_increments(epoch: int, me: int, ranks: int) -> dict[str, Any]:
    return {"total": np.full(N, ranks * (epoch + 1)) if me == 0 else np.zeros(N)}


@specimen(
    "ROCm/iris#296",
    "The spin lock of a fused GEMM + all-reduce is freed before the data is visible.",
    "refused",
    "",
    "is written 2 times in one launch",
    after_two_increments,
)
def iris_296(faulty, lock: Flag, total: Mail):
    sem = "relaxed" if faulty else "release"
    with T.Kernel(1, threads=N) as _:
        if T.get_thread_binding() == 0:
            while W.atom_cas(lock[0, 0], 0, 1, scope="sys", sem="acquire") != 0:
                pass
        T.sync_threads()
        for i in T.Parallel(N):  # FAULT
            total[0, i] = total[0, i] + 1
        W.signal(lock[0, 0], 0, op="set", sem=sem)


@specimen(
    "ROCm/iris#462",
    "GEMM + all-reduce signals a lock that peers poll at the scope of one GPU: ranks hang.",
    "refused",
    "race",
    "has scope='gpu'; expected 'sys'",
)
def iris_462(faulty, tile: Mail, locks: Flag, state: State, out: Row):
    scope = "gpu" if faulty else "sys"
    with T.Kernel(1, threads=N) as _:
        me, _, epoch = begin(state)
        left = (me + W.world_size() - 1) % W.world_size()
        for i in T.Parallel(N):
            tile[me, i] = datum(epoch, me, i)
        T.sync_threads()
        if T.get_thread_binding() == 0:
            W.st(locks[me, 0], epoch + 1, scope=scope, sem="release")  # FAULT
        while W.ld(locks[left, 0], scope="sys", sem="acquire") < epoch + 1:
            pass
        for i in T.Parallel(N):
            out[i] = tile[left, i]
        W.sync_ranks()
        advance(state, epoch)


@factory
def start_barrier(
    mine: Mail,
    start: Flag,
    state: State,
    out: Row,
    *,
    store_sem="release",
    load_sem="acquire",
    load_scope="sys",
):
    """Write own input, meet the peer in a start barrier, and read the peer's input."""
    with T.Kernel(1, threads=N) as _:
        me, _, epoch = begin(state)
        right = (me + 1) % W.world_size()
        left = (me + W.world_size() - 1) % W.world_size()
        for i in T.Parallel(N):
            mine[me, i] = datum(epoch, me, i)
        T.sync_threads()
        if T.get_thread_binding() == 0:
            W.st(start[right, 0], epoch + 1, scope="sys", sem=store_sem)  # FAULT store
        while W.ld(start[me, 0], scope=load_scope, sem=load_sem) < epoch + 1:  # FAULT load
            pass
        for i in T.Parallel(N):
            out[i] = mine[left, i]
        W.sync_ranks()
        advance(state, epoch)


@specimen(
    "ROCm/aiter#4786",
    "The start barrier of an all-reduce polls flags of peers by relaxed loads of device scope.",
    "refused",
    "race",
    "has (sem='relaxed'; expected 'acquire'|scope='gpu'; expected 'sys')",
    label="load",
    source=start_barrier,
)
def aiter_4786(faulty):
    return start_barrier(load_sem="relaxed", load_scope="gpu") if faulty else start_barrier()


@specimen(
    "ROCm/aiter#4812",
    "The start barrier stores its flag relaxed: peers read the input of the previous call.",
    "refused",
    "race",
    "has sem='relaxed'; expected 'release'",
    label="store",
    source=start_barrier,
)
def aiter_4812(faulty):
    return start_barrier(store_sem="relaxed") if faulty else start_barrier()


def gathered_sums(epoch: int, me: int, ranks: int) -> dict[str, Any]:
    half = N // ranks
    index = np.arange(N)
    return {"out": ranks * datum(epoch, 0, index) + 100 * (index // half)}


@specimen(
    "vllm-project/vllm#2760",
    "A two-stage all-reduce gathers the sums of peers without a fence after their stage.",
    "refused",
    "race",
    "has sem='relaxed'; expected 'release'",
    gathered_sums,
)
def vllm_2760(faulty, sums: Mail, stage: Flag, state: State, out: Row):
    fenced = not faulty
    half = N // 2
    with T.Kernel(1, threads=half) as _:
        me, _, epoch = begin(state)
        for i in T.Parallel(half):
            sums[me, me * half + i] = 2 * datum(epoch, 0, me * half + i) + 100 * me
        T.sync_threads()
        if T.get_thread_binding() == 0:
            if fenced:
                W.fence("sys")
            W.st(stage[1 - me, 0], epoch + 1, scope="sys", sem="relaxed")  # FAULT
        W.wait_reached(stage[me, 0], epoch + 1)
        for i in T.Parallel(half):
            out[me * half + i] = sums[me, me * half + i]
            out[(1 - me) * half + i] = sums[1 - me, (1 - me) * half + i]
        W.sync_ranks()
        advance(state, epoch)


specimen(
    "tile-ai/tilescale#35",
    "GEMM + reduce-scatter waits only until TMA has read the tile, then signals the peer.",
    "refused",
    "race",
    "has sem='relaxed'; expected 'release'",
    name="tilescale_35",
    label="store|signal",
)(bulk_store_only_read)


@specimen(
    "AMD-AGI/Primus-Turbo#482",
    "Dispatch publishes the tail of a channel by a relaxed store after a fence of the block only.",
    "refused",
    "race",
    "W.fence.* has scope='cta'; expected 'sys'",
    label="fence",
    source=explicit_shift,
)
def primus_turbo_482(faulty):
    return explicit_shift(fence="cta") if faulty else explicit_shift()
