"""Every builtin in the simulator, in a program whose result NumPy knows."""

import numpy as np
import pytest
import tilelang.language as T
from tvm.tirx.stmt_functor import post_order_visit

import tileweave as tw
from tileweave import language as W
from tileweave.builtins.spec import BUILTINS, builtin_of

N = 32
START = np.array([12, 12, 0, 0], np.int32)


def atomic(name, values, expected):
    @T.prim_func
    def program(A: T.Tensor((4,), "int32"), old: T.Tensor((N,), "int32")):
        with T.Kernel(1, threads=N) as _:
            t = T.get_thread_binding()
            if name.startswith("atom"):
                old[t] = getattr(W, name)(A[0], values(t))
            else:
                getattr(W, name)(A[0], values(t))

    return (
        program,
        1,
        [dict(A=START, old=np.zeros(N, np.int32))],
        lambda r: {"A": [expected, 12, 0, 0]},
    )


def atom_cas():
    @T.prim_func
    def program(A: T.Tensor((4,), "int32"), old: T.Tensor((N,), "int32")):
        with T.Kernel(1, threads=N) as _:
            t = T.get_thread_binding()
            old[t] = W.atom_cas(A[0], t + 10, t + 11)

    # Threads 2 to 31 each find what the one before left.
    return program, 1, [dict(A=START, old=np.zeros(N, np.int32))], lambda r: {"A": [42, 12, 0, 0]}


def words():
    @T.prim_func
    def program(A: T.Tensor((4,), "int32"), out: T.Tensor((4,), "int32")):
        with T.Kernel(1, threads=N) as _:
            if T.get_thread_binding() == 0:
                W.prefetch(A[3])
                W.st(A[2], 7)
                W.fence("gpu")
                W.fence_proxy_async()
                out[0:4] = W.ld(A[0], 4)

    zeros = np.zeros(4, np.int32)
    return program, 1, [dict(A=START, out=zeros)], lambda r: {"out": [12, 12, 7, 0]}


def ranks():
    @T.prim_func
    def program(out: T.Tensor((2,), "int32")):
        with T.Kernel(1, threads=N) as _:
            if T.get_thread_binding() == 0:
                out[0] = W.rank()
                out[1] = W.world_size()

    return program, 3, [{}] * 3, lambda r: {"out": [r, 3]}


def ll():
    """Words with flags: scalars, pairs of words, and vectors of smaller elements."""

    @T.prim_func
    def program(
        X: T.Tensor((N,), "float32"), H: T.Tensor((N,), "float16"),
        S: W.Symmetric((3, N), "uint64"), Y: T.Tensor((2, N), "float32"),
        Z: T.Tensor((N,), "float16"),
    ):  # fmt: skip
        with T.Kernel(1, threads=N // 4) as _:
            me, t = W.rank(), T.get_thread_binding()
            peer = (me + 1) % W.world_size()
            for i in T.Parallel(N):
                W.ll_st(S[peer, 0, i], X[i], 3)
            for i in T.serial(2):
                W.ll_st(S[peer, 1, 4 * t + 2 * i], X[4 * t + 2 * i : 4 * t + 2 * i + 2], t + 1)
            W.ll_st(S[peer, 2, 2 * t], H[4 * t : 4 * t + 4], 3)
            for i in T.Parallel(N):
                Y[0, i] = W.ll_ld(S[me, 0, i], 3, dtype="float32", peer=peer) + 1
            for i in T.serial(2):
                first = 4 * t + 2 * i
                Y[1, first : first + 2] = W.ll_ld(S[me, 1, first], t + 1, words=2, dtype="float32")
            Z[4 * t : 4 * t + 4] = W.ll_ld(S[me, 2, 2 * t], 3, words=2, dtype="float16")

    inputs = [
        dict(
            X=np.arange(N, dtype=np.float32) * (r + 1),
            H=np.arange(N).astype(np.float16) - r,
            S=np.zeros((3, N), np.uint64),
        )
        for r in range(3)
    ]

    def expected(r):
        X, H = inputs[r - 1]["X"], inputs[r - 1]["H"]
        return {"Y[0]": X + 1, "Y[1]": X, "Z": H, "S[0] >> np.uint64(32)": np.full(N, 3)}

    return program, 3, inputs, expected


def recorded():
    """Times, which only grow, and events, which change nothing."""

    @T.prim_func
    def program(flags: W.Symmetric((1,), "int32"), out: T.Tensor((1,), "int32")):
        with T.Kernel(1, threads=N) as _:
            if T.get_thread_binding() == 0:
                begin = W.globaltimer()
                W.record(1)
                W.signal(flags[1 - W.rank(), 0])
                W.wait_ge(flags[W.rank(), 0], 1)
                W.record(2, begin, flags[W.rank(), 0], 0, 1)
                out[0] = T.Cast("int32", W.globaltimer() > begin)

    return program, 2, [{"flags": np.zeros(1, np.int32)}] * 2, lambda r: {"out": [1]}


def signals():
    """Flags of all relations; each rank signals the next."""

    @T.prim_func
    def program(flags: W.Symmetric((7,), "int32"), out: T.Tensor((1,), "int32")):
        with T.Kernel(1, threads=N) as _:
            me = W.rank()
            for i in T.serial(7):
                W.signal(flags[(me + 1) % W.world_size(), i], -3 if i > 4 else 3)
            W.wait_eq(flags[me, 0], 3)
            W.wait_ne(flags[me, 1], 0)
            W.wait_ge(flags[me, 2], 3)
            W.wait_gt(flags[me, 3], 2)
            W.wait_reached(flags[me, 4], 3)
            W.wait_le(flags[me, 5], -3)
            W.wait_lt(flags[me, 6], -2)
            if T.get_thread_binding() == 0:
                out[0] = flags[me, 0] + flags[me, 6]

    return program, 2, [dict(flags=np.zeros(7, np.int32))] * 2, lambda r: {"out": [0]}


def barriers():
    @T.prim_func
    def program(S: W.Symmetric((3,), "int32"), out: T.Tensor((3, 3), "int32")):
        with T.Kernel(3, threads=N) as block:
            me, t = W.rank(), T.get_thread_binding()
            if t == 0:
                S[me, block] = me * 3 + block
            W.sync_grid()
            if block == 0:
                if t == 0:
                    out[0, 0] = S[me, 2]
                W.sync_ranks()
                if t == 0:
                    out[0, 1] = S[(me + 1) % W.world_size(), 1]
            W.barrier_blocks()
            if t == 0:
                out[1, block] = S[(me + 1) % W.world_size(), 2 - block]
            W.barrier_blocks()

    def expected(r):
        other = 3 - 3 * r
        return {"out[0, :2]": [r * 3 + 2, other + 1], "out[1]": [other + 2, other + 1, other]}

    return program, 2, [{}] * 2, expected


def put_and_get():
    @T.prim_func
    def program(
        src: T.Tensor((N,), "int32"),
        S: W.Symmetric((4, N), "int32"),
        out: T.Tensor((2, N), "int32"),
    ):
        with T.Kernel(1, threads=N) as _:
            me = W.rank()
            peer = (me + 1) % W.world_size()
            W.put_block(src[0], S[peer, 0, 0], N)
            W.put_warp(src[0], S[me, 1, 3], N - 3, peer)
            W.sync_ranks()
            W.get_block(S[peer, 0, 0], out[0, 0], N)
            W.get_warp(S[me, 1, 3], out[1, 3], N - 3, peer)

    inputs = [dict(src=np.arange(N, dtype=np.int32) + 100 * r) for r in range(3)]

    def expected(r):
        return {"S[0]": inputs[r - 1]["src"], "S[1, 3:]": inputs[r - 1]["src"][:-3],
                "out[0]": inputs[r]["src"], "out[1, 3:]": inputs[r]["src"][:-3]}  # fmt: skip

    return program, 3, inputs, expected


def bulk():
    @T.prim_func
    def program(
        A: T.Tensor((N,), "float32"),
        S: W.Symmetric((N,), "float32"),
        total: T.Tensor((N,), "float32"),
    ):
        with T.Kernel(1, threads=N) as _:
            tile = T.alloc_shared((N,), "float32")
            full = T.alloc_barrier(N)
            W.bulk_load(tile, A[0], N, full[0])
            T.mbarrier_arrive(full[0])
            T.mbarrier_wait_parity(full[0], 0)
            W.bulk_store(S[(W.rank() + 1) % W.world_size(), 0], tile, N)
            W.bulk_reduce(total[0], tile, N)
            W.bulk_commit()
            W.bulk_wait(0)

    inputs = [
        dict(A=np.arange(N, dtype=np.float32) * (r + 1), total=np.ones(N, np.float32))
        for r in range(2)
    ]
    return program, 2, inputs, lambda r: {"S": inputs[1 - r]["A"], "total": inputs[r]["A"] + 1}


def multimem():
    @T.prim_func
    def program(
        S: W.Symmetric((N,), "float32"), everywhere: T.Tensor((N,), "float32"),
        src: T.Tensor((N,), "float32"), out: T.Tensor((N,), "float32"),
    ):  # fmt: skip
        with T.Kernel(1, threads=N) as _:
            t = T.get_thread_binding()
            S[W.rank(), t] = src[t]
            W.sync_ranks()
            if t < 4:
                out[t * 4 : t * 4 + 4] = W.multimem_ld_reduce(everywhere[t * 4], 4, op="add")
            if t >= 16:
                out[t] = W.multimem_ld_reduce(everywhere[t], op="add")
            W.sync_ranks()
            if W.rank() == 0:
                if t < 16:
                    W.multimem_red(everywhere[t], T.Cast("float32", 1), op="add")
                else:
                    W.multimem_st(everywhere[t], T.Cast("float32", t))

    inputs = [dict(src=np.arange(N, dtype=np.float32) * (r + 1), everywhere="S") for r in range(3)]

    def expected(r):
        S = np.where(np.arange(N) < 16, inputs[r]["src"] + 1, np.arange(N))
        return {"out": sum(i["src"] for i in inputs), "S": S, "everywhere": S}

    return program, 3, inputs, expected


def rank_uniform():
    @T.prim_func
    def program(count: T.Tensor((1,), "int32"), out: T.Tensor((N,), "int32")):
        with T.Kernel(1, threads=N) as _:
            t = T.get_thread_binding()
            if t < W.rank_uniform(count[0]):
                out[t] = 1

    inputs = [{"count": np.full(1, 2, np.int32), "out": np.zeros(N, np.int32)} for _ in range(2)]
    return program, 2, inputs, lambda r: {"out": (np.arange(N) < 2).astype(np.int32)}


PROGRAMS = {
    "atom_add": lambda: atomic("atom_add", lambda t: t, 12 + sum(range(N))),
    "atom_min": lambda: atomic("atom_min", lambda t: t - 5, -5),
    "atom_max": lambda: atomic("atom_max", lambda t: t, N - 1),
    "atom_and": lambda: atomic("atom_and", lambda t: 14 - t % 4, 8),
    "atom_or": lambda: atomic("atom_or", lambda t: t, 31),
    "atom_xor": lambda: atomic("atom_xor", lambda t: t, 12 ^ int(np.bitwise_xor.reduce(range(N)))),
    "atom_exch": lambda: atomic("atom_exch", lambda t: 0 * t + 3, 3),
    "atom_cas": atom_cas,
    "red_add": lambda: atomic("red_add", lambda t: t, 12 + sum(range(N))),
    "red_min": lambda: atomic("red_min", lambda t: t - 5, -5),
    "red_max": lambda: atomic("red_max", lambda t: t, N - 1),
    "red_and": lambda: atomic("red_and", lambda t: 14 - t % 4, 8),
    "red_or": lambda: atomic("red_or", lambda t: t, 31),
    "red_xor": lambda: atomic("red_xor", lambda t: t, 12 ^ int(np.bitwise_xor.reduce(range(N)))),
    "words": words,
    "ranks": ranks,
    "rank_uniform": rank_uniform,
    "ll": ll,
    "recorded": recorded,
    "signals": signals,
    "barriers": barriers,
    "put_and_get": put_and_get,
    "bulk": bulk,
    "multimem": multimem,
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_program(name):
    program, world_size, inputs, expected = PROGRAMS[name]()
    out = tw.simulate(program, world_size, inputs, epochs=1, schedules=5)
    for rank in range(world_size):
        for what, value in expected(rank).items():
            actual = eval(what, {"np": np}, out[rank])
            np.testing.assert_array_equal(actual, value, f"{what} of rank {rank}")


_INSERTED = {"tileweave.context", "tileweave.delay"}
"""Put in by passes."""
_RAGGED = {n for n, spec in BUILTINS.items() if spec.announces or spec.checks}
"""Builtins of programs without explicit synchronization: ragged.py of the corpus."""


def test_every_builtin_is_in_a_program():
    observed = set()
    for make in PROGRAMS.values():
        post_order_visit(
            make()[0].body,
            lambda node: observed.add(node.op.name) if builtin_of(node) else None,
        )
    assert set(BUILTINS) - _INSERTED - _RAGGED - observed == set()


MULTICAST = [dict(src=np.arange(N, dtype=np.float32) + r) for r in range(2)]


def test_a_multicast_tensor_of_its_own_has_a_copy_on_each_rank():
    @T.prim_func
    def program(dst: T.Tensor((N,), "float32"), src: T.Tensor((N,), "float32")):
        with T.Kernel(1, threads=N) as _:
            if W.rank() == 1:
                t = T.get_thread_binding()
                W.multimem_st(dst[t], src[t])

    for out in tw.simulate(program, 2, MULTICAST, epochs=1):
        assert (out["dst"] == MULTICAST[1]["src"]).all()


@T.prim_func
def reduce_too_early(
    S: W.Symmetric((N,), "float32"), everywhere: T.Tensor((N,), "float32"),
    src: T.Tensor((N,), "float32"), out: T.Tensor((N,), "float32"),
):  # fmt: skip
    with T.Kernel(1, threads=N) as _:
        t = T.get_thread_binding()
        S[W.rank(), t] = src[t]
        out[t] = W.multimem_ld_reduce(everywhere[t], op="add")


def test_a_load_reduce_before_the_others_have_written_races():
    inputs = [{**i, "everywhere": "S", "S": np.zeros(N, np.float32)} for i in MULTICAST]
    with pytest.raises(tw.SimulationError, match="multimem_ld_reduce") as error:
        tw.simulate(reduce_too_early, 2, inputs, epochs=1, schedules=5)
    assert error.value.kind == "race"


def test_a_multicast_address_stands_for_a_symmetric_tensor():
    inputs = [{**i, "everywhere": "out"} for i in MULTICAST]
    with pytest.raises(tw.TileWeaveError, match=r"expected a symmetric tensor.*: S"):
        tw.simulate(reduce_too_early, 2, inputs)


def test_ordinary_accesses_of_a_multicast_address_are_refused():
    @T.prim_func
    def program(dst: T.Tensor((N,), "float32")):
        with T.Kernel(1, threads=N) as _:
            t = T.get_thread_binding()
            W.multimem_st(dst[t], dst[t])

    with pytest.raises(tw.SimulationError, match=r"tensor dst in multicast memory") as error:
        tw.simulate(program, 2)
    assert error.value.kind == "unsupported"
