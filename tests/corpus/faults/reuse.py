"""Memory used again in the next epoch, without a barrier at the end."""

import tilelang.language as T

from tests.factory import factory
from tileweave import language as W

from .case import Flag, Mail, N, Row, State, TwoMails, advance, begin, case, datum, with_fault


@factory
def ring(mail: TwoMails, flags: Flag, state: State, out: Row, *, halves=2, turn=1):
    """Each epoch writes one of ``halves`` buffers, and changes it every ``turn`` epochs."""
    with T.Kernel(1, threads=N) as _:
        me, peer, epoch = begin(state)
        half = epoch // turn % halves
        for i in T.Parallel(N):
            mail[peer, half, i] = datum(epoch, me, i)  # FAULT data
        W.signal(flags[peer, 0])
        W.wait_reached(flags[me, 0], epoch + 1)
        for i in T.Parallel(N):
            out[i] = mail[me, half, i]  # FAULT data
        T.sync_threads()
        advance(state, epoch)


_REPORT = (
    r"^store of mail\[.*\noverwrites what an earlier use may still read: it is not ordered after\n"
    r"load of mail\[.*\n.*\nexpected, before the write, a wait for what the reader signals after "
    r"its last read, or W\.sync_ranks\n"
)
with_fault(ring, "single_buffer_without_credit", "reuse", _REPORT, "data", halves=1)
with_fault(ring, "wrong_parity", "reuse", "mail", "data", turn=2)


@factory
def ring_with_credit(
    mail: TwoMails,
    flags: Flag,
    credit: Flag,
    state: State,
    out: Row,
    *,
    waits=True,
    early=False,
    sem="release",
):
    """``ring`` in which the reader returns a credit for each message that it has read."""
    with T.Kernel(1, threads=N) as _:
        me, peer, epoch = begin(state)
        left = (me + W.world_size() - 1) % W.world_size()
        half = epoch % 2
        if waits:
            W.wait_reached(credit[me, 0], epoch - 1)
        for i in T.Parallel(N):
            mail[peer, half, i] = datum(epoch, me, i)  # FAULT data
        W.signal(flags[peer, 0])
        W.wait_reached(flags[me, 0], epoch + 1)
        if early:
            W.signal(credit[left, 0])
        for i in T.Parallel(N):
            out[i] = mail[me, half, i]  # FAULT data
        if not early:
            W.signal(credit[left, 0], sem=sem)
        T.sync_threads()
        advance(state, epoch)


with_fault(ring_with_credit, "credit_before_the_read", "reuse", "mail", "data", 3, early=True)
with_fault(ring_with_credit, "relaxed_credit", "reuse", "mail", "data", 3, sem="relaxed")
with_fault(
    ring_with_credit, "two_buffers_in_a_ring_of_three", "reuse", "mail", "data", 3, waits=False
)


@case("reuse", "mine")
def own_memory_changed_under_a_get(faulty, mine: Mail, flags: Flag, state: State, out: Row):
    """A rank writes its next message while the neighbor may still fetch the last one."""
    with T.Kernel(1, threads=N) as _:
        me, _, epoch = begin(state)
        left = (me + W.world_size() - 1) % W.world_size()
        for i in T.Parallel(N):
            mine[me, i] = datum(epoch, me, i)  # FAULT
        W.signal(flags[(me + 1) % W.world_size(), 0])
        W.wait_reached(flags[me, 0], epoch + 1)
        W.get_block(mine[0, 0], out[0], N, left)  # FAULT
        if not faulty:
            W.sync_ranks()
        T.sync_threads()
        advance(state, epoch)


@case("race reuse", "flags")
def flag_reset_after_use(faulty, mail: TwoMails, flags: Flag, state: State, out: Row):
    """The reset may overwrite the signal of the next epoch."""
    with T.Kernel(1, threads=N) as _:
        me, peer, epoch = begin(state)
        half = epoch % 2
        for i in T.Parallel(N):
            mail[peer, half, i] = datum(epoch, me, i)
        W.signal(flags[peer, 0])  # FAULT
        if faulty:
            W.wait_reached(flags[me, 0], 1)
        else:
            W.wait_reached(flags[me, 0], epoch + 1)
        for i in T.Parallel(N):
            out[i] = mail[me, half, i]
        T.sync_threads()
        if T.get_thread_binding() == 0:
            if faulty:
                flags[me, 0] = 0  # FAULT
            state[0] = epoch + 1
