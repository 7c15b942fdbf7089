"""One shift to the right neighbor, ordered by plain stores, fences and loads."""

import tilelang.language as T

from tests.factory import factory
from tileweave import language as W

from .case import Flag, Mail, N, Row, State, advance, begin, datum, with_fault


@factory
def explicit_shift(
    mail: Mail,
    flags: Flag,
    state: State,
    out: Row,
    *,
    barrier_before=True,
    fence="sys",
    store_scope="sys",
    load_sem="acquire",
    load_scope="sys",
):
    with T.Kernel(1, threads=N) as _:
        me, peer, epoch = begin(state)
        for i in T.Parallel(N):
            mail[peer, i] = datum(epoch, me, i)  # FAULT data
        if barrier_before:
            T.sync_threads()
        if T.get_thread_binding() == 0:
            if fence is not None:
                W.fence(fence)  # FAULT fence
            W.st(flags[peer, 0], epoch + 1, scope=store_scope, sem="relaxed")  # FAULT store
        while W.ld(flags[me, 0], scope=load_scope, sem=load_sem) < epoch + 1:  # FAULT load
            pass
        for i in T.Parallel(N):
            out[i] = mail[me, i]  # FAULT data
        W.sync_ranks()
        advance(state, epoch)


with_fault(
    explicit_shift, "signal_before_the_block_barrier", "race", "mail", "data", barrier_before=False
)
with_fault(explicit_shift, "no_fence", "race", "mail", "data", fence=None)
with_fault(explicit_shift, "fence_of_the_block", "race", "mail", "data", fence="cta")
with_fault(explicit_shift, "fence_of_the_gpu", "race", "mail", "data", fence="gpu")
with_fault(
    explicit_shift, "flag_stored_at_gpu_scope", "race", "flags", "store|load", store_scope="gpu"
)
with_fault(explicit_shift, "spin_on_relaxed_loads", "race", "mail", "data", load_sem="relaxed")
with_fault(explicit_shift, "spin_at_gpu_scope", "race", "flags", "store|load", load_scope="gpu")
