# REQUIRES: since-0.1.13
# RUN: %python %s | %filecheck %s
"""Statements of T.Pipelined that write a loaded tile before any statement reads it."""

import tilelang.language as T

import tileweave as tw
from tests.verdicts import print_verdict
from tileweave import language as W


def show(name, change, before_gemm=True):
    @T.prim_func
    def program(
        X: T.Tensor((64, 256), "float16"),
        limit: T.Tensor((1,), "int32"),
        Y: T.Tensor((64, 64), "float32"),
    ):
        with T.Kernel(1, threads=128):
            tile = T.alloc_shared((64, 64), "float16")
            other = T.alloc_shared((64, 64), "float16")
            total = T.alloc_fragment((64, 64), "float32")
            W.fence("gpu")
            T.clear(total)
            for k in T.Pipelined(4, num_stages=2):
                T.copy(X[0, k * 64], tile)
                T.copy(X[0, k * 64], other)
                if before_gemm:
                    change(tile, limit)
                T.gemm(tile, other, total)
            T.copy(total, Y)

    with print_verdict(name):
        tw.emit(program, arch="sm_90a")


@T.macro
def overwrite(tile, limit):
    for i, j in T.Parallel(64, 64):
        if i >= limit[0]:
            tile[i, j] = 0


@T.macro
def clear(tile, limit):
    T.clear(tile)


@T.macro
def change(tile, limit):
    for i, j in T.Parallel(64, 64):
        tile[i, j] = T.if_then_else(i < limit[0], tile[i, j], 0)


# TileLang moved both before the wait, or to the producer warps.
# CHECK: overwrite: assignment to tile: overwrites tile, whose load may arrive later; expected a statement that reads tile, too, such as tile[i] = T.if_then_else(condition, tile[i], value), or another tile
# CHECK-NEXT: overwrite --> {{.*}}verify_loop_tiles-overwrites.py:[[# @LINE - 18]]
# CHECK-NEXT: load --> {{.*}}verify_loop_tiles-overwrites.py:[[# @LINE - 32]]
show("overwrite", overwrite)
# CHECK: clear: T.fill: overwrites tile, whose load may arrive later
show("clear", clear)
# CHECK: change: accepted
show("change", change)
# CHECK: not changed: accepted
show("not changed", change, before_gemm=False)
