"""One exchange with the next rank by words of data and a flag, in two buffers in turn.

The number of the launch is the flag. With two ranks, the two buffers suffice: a rank stores in a
buffer again after it has polled what its reader stored after its poll of the earlier words.
"""

import tilelang.language as T

from tileweave import language as W

from .case import Mail, N, Row, State, advance, case, datum, with_fault


def exchange(buffers=2, constant=False, ahead=0, plain=False, scope="sys"):
    @T.prim_func
    def program(
        mail: W.Symmetric((buffers, N), "uint64"),
        state: T.Tensor((1,), "int32"),
        out: T.Tensor((N,), "int32"),
    ):
        with T.Kernel(1, threads=N) as _:
            me, t = W.rank(), T.get_thread_binding()
            peer = (me + 1) % W.world_size()
            epoch = T.alloc_var("int32")
            epoch = state[0]
            half, flag = epoch % buffers, 1 if constant else epoch + 1
            W.ll_st(mail[peer, half, t], datum(epoch, me, t), flag, scope=scope)  # FAULT store
            if plain:
                out[t] = T.Cast("int32", mail[me, half, t])  # FAULT plain
            else:
                out[t] = W.ll_ld(mail[me, half, t], flag + ahead, dtype="int32")  # FAULT load
            T.sync_threads()
            advance(state, epoch)

    return program


with_fault(
    exchange,
    "ll_flag_of_the_next_epoch",
    "deadlock",
    r"polls W\.ll_ld\(mail\[\d, 0, \d+\]\): flag seen 1, flag wanted 2",
    "load|store",
    ahead=1,
)
with_fault(exchange, "ll_constant_flag", "reuse", "the word has this flag", "store", constant=True)
with_fault(exchange, "ll_one_buffer", "reuse deadlock", "mail", "store|load", buffers=1)
with_fault(exchange, "ll_plain_load", "race", "mail", "store|plain", plain=True)
with_fault(exchange, "ll_gpu_scope", "race", "mail", "store|load", scope="gpu")


@case("assertion", "torn", label="assert", expected=lambda e, me, ranks: {})
def ll_torn_pair(
    faulty, mail: W.Symmetric((2,), "uint64"), state: State, out: T.Tensor((2,), "uint64")
):
    """The flag of the second word says nothing about the first word."""
    with T.Kernel(1, threads=1) as _:
        me = W.rank()
        data = T.alloc_local((2,), "uint32")
        pair = T.alloc_local((2,), "uint64")
        data[0] = T.Cast("uint32", 5)
        data[1] = T.Cast("uint32", 6)
        if state[0] == 0:
            W.ll_st(mail[1 - me, 0], data[0:2], 1)
            if faulty:
                W.wait_ge(mail[me, 1], T.Cast("uint64", 1 << 32), sem="relaxed")
                pair[0:2] = W.ld(mail[me, 0], 2, scope="sys", sem="relaxed")
                T.device_assert(pair[0] >= T.Cast("uint64", 1 << 32), "torn")  # FAULT assert
            else:
                data[0:2] = W.ll_ld(mail[me, 0], 1, words=2)
                T.device_assert(data[0] == T.Cast("uint32", 5), "torn")
            state[0] = 1


@case("race", "mail", label="data")
def ll_flag_in_another_word(faulty, mail: Mail, flags: Mail, state: State, out: Row):
    """Data and flag in separate words need release and acquire."""
    with T.Kernel(1, threads=N) as _:
        me, t = W.rank(), T.get_thread_binding()
        peer = (me + 1) % W.world_size()
        epoch = T.alloc_var("int32")
        epoch = state[0]
        sem = "relaxed" if faulty else "release"
        mail[peer, t] = datum(epoch, me, t)  # FAULT data
        W.st(flags[peer, t], epoch + 1, scope="sys", sem=sem)
        W.wait_ge(flags[me, t], epoch + 1)
        out[t] = mail[me, t]  # FAULT data
        W.sync_ranks()
        advance(state, epoch)
