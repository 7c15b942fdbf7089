# RUN: %python %s | %filecheck %s
"""Messages about operations that the compiler inserted name the user's access instead."""

import tilelang.language as T

import tileweave as tw
from tests.verdicts import print_verdict
from tileweave import language as W


def refused(program, **configs):
    name = program.attrs["global_symbol"]
    with print_verdict(name):
        tw.emit(program, stage="tile", world_size=2, pass_configs=configs)


def pipelined(name, first, last):
    """Build a loop that reads S after the loads of X, or before them."""

    @T.prim_func
    def program(
        S: W.Symmetric((64, 64), "float16"), X: T.Tensor((64, 64), "float16"),
        Y: T.Tensor((64, 64), "float32"),
    ):  # fmt: skip
        with T.Kernel(1, threads=128):
            tile = T.alloc_shared((64, 16), "float16")
            a = T.alloc_shared((64, 16), "float16")
            b = T.alloc_fragment((64, 16), "float16")
            c = T.alloc_fragment((64, 64), "float32")
            for k in T.serial(4):
                T.copy(X[0, k * 16], tile)
                T.copy(tile, S[(W.rank() + 1) % 2, 0, k * 16])
            T.clear(c)
            for k in T.Pipelined(4, num_stages=2):
                if first:
                    T.copy(S[W.rank(), 0, k * 16], b)
                T.copy(X[0, k * 16], a)
                if last:
                    T.copy(S[W.rank(), 0, k * 16], b)
                T.gemm(a, b, c, transpose_B=True)
            T.copy(c, Y)

    return program.with_attr("global_symbol", name)


# CHECK: after_loads: the wait that the compiler inserts for the read of S: called after the loads of T.Pipelined, so loads of the next iteration overtake it; expected a call before the loads, or T.serial (the compiler keeps it beside the read of S, which you can move)
# LINE: CHECK-NEXT: --> {{.*}}inserted.py:[[# @LINE - 8]]
refused(pipelined("after_loads", False, True))

# CHECK: before_loads: accepted
refused(pipelined("before_loads", True, False))


@T.prim_func
def explicit(F: W.Symmetric((8,), "uint32"), X: T.Tensor((64, 64), "float16")):
    with T.Kernel(1, threads=128):
        a = T.alloc_shared((64, 16), "float16")
        for k in T.Pipelined(4, num_stages=2):
            T.copy(X[0, k * 16], a)
            W.wait_reached(F[W.rank(), 0], k)
        W.signal(F[0, 0])


# An explicit wait keeps its name.
# CHECK: explicit: wait_reached: called after the loads of T.Pipelined, so loads of the next iteration overtake it; expected a call before the loads, or T.serial{{$}}
refused(explicit, **{"tileweave.verify": "off"})


@T.prim_func
def shown(S: W.Symmetric((64, 64), "float16"), X: T.Tensor((64, 64), "float16")):
    with T.Kernel(1, threads=128):
        tile = T.alloc_shared((64, 64), "float16")
        T.copy(X, tile)
        T.copy(tile, S[(W.rank() + 1) % 2, 0, 0])
        T.copy(S[W.rank(), 0, 0], tile)
        T.copy(tile, X)


# Annotations that only messages need are not printed with the program.
# CHECK: wait_reached
# CHECK-NOT: tileweave.origin
# CHECK: the end
print(tw.emit(shown, stage="tile", world_size=2))
print("the end")
