# REQUIRES: since-0.1.13
# RUN: %python %s | %filecheck %s
"""A builtin that is lost or that other threads execute is refused; dead code and copies are legal."""

import tilelang.language as T
from tvm import tirx

import tileweave as tw
from tests.verdicts import print_verdict
from tileweave import language as W
from tileweave.passes import pipeline
from tileweave.passes.ir.marks import calls_of
from tileweave.passes.ir.walk import flatten, rewrite_children

UNORDERED = {"tileweave.verify": "off"}
STOCK = pipeline.PIPELINE
LAST = next(i for i, p in enumerate(STOCK) if p.name == "record_events")


def check(name, program, faulty=None, without="", arch="sm_90a"):
    """Compile ``program`` with the pass ``faulty`` after the device passes, or without one."""
    added = [pipeline.Pass(faulty, "device", "for a test")] if faulty else []
    passes = [*STOCK[:LAST], *added, *STOCK[LAST:]]
    pipeline.PIPELINE = [p for p in passes if p.name != without]
    with print_verdict(name):
        tw.emit(program.with_attr("global_symbol", name), arch=arch, pass_configs=UNORDERED)
    pipeline.PIPELINE = STOCK


def on_builtins(change):
    """Return a pass that replaces each statement with a builtin, by a function of the thread index."""

    def faulty(func):
        threads = []

        def visit(stmt):
            if isinstance(stmt, tirx.AttrStmt) and stmt.attr_key == "thread_extent":
                if stmt.node.thread_tag == "threadIdx.x":
                    threads.append(stmt.node.var)
            return change(stmt, *threads) if calls_of(stmt) else rewrite_children(stmt, visit)

        return func.with_body(visit(func.body))

    return faulty


def below(count):
    return on_builtins(lambda stmt, tx: tirx.IfThenElse(tx < count, stmt, None))


def gemm(threads, what):
    @T.prim_func
    def program(
        F: W.Symmetric((8,), "uint32"),
        B: T.Tensor((512, 512), "bfloat16"),
        C: T.Tensor((2, 512, 512), "bfloat16"),
    ):
        with T.Kernel(4, 4, threads=threads) as (bx, by):
            As = T.alloc_shared((128, 64), "bfloat16")
            Bs = T.alloc_shared((64, 128), "bfloat16")
            Cl = T.alloc_fragment((128, 128), "float32")
            for u in T.serial(2):
                T.clear(Cl)
                for k in T.Pipelined(8, num_stages=2):
                    T.copy(B[by * 128, k * 64], As)
                    T.copy(B[k * 64, bx * 128], Bs)
                    T.gemm(As, Bs, Cl)
                T.copy(Cl, C[u, by * 128, bx * 128])
            if what == "signal":
                W.signal(F[1, 0])
            if what == "red":
                W.red_add(F[1, 0], 1)
            if what == "elected":
                if T.shuffle_elect(0):
                    W.red_add(F[1, 0], 1)

    return program


# CHECK: signal: accepted
check("signal", gemm(128, "signal"))

# Such a guard selects none of the consumers, or half of them.
# CHECK: signal_below: signal: after TileLang's lowering no thread executes it; expected thread 0 of the program, as with tl.disable_warp_specialized
# LINE: CHECK-NEXT: --> {{.*}}verify_threads-builtins.py:
check("signal_below", gemm(128, "signal"), below(128))

# CHECK: red_below: red_add: after TileLang's lowering threads 0 to 127 of the program execute it; expected threads 0 to 255 of the program
check("red_below", gemm(256, "red"), below(256))

# CHECK: red: accepted
check("red", gemm(256, "red"))

# The first warp of the block is a producer.
# CHECK: elected: red_add: after TileLang's lowering no thread executes it
check("elected", gemm(256, "elected"))

# CHECK: elected_80: accepted
check("elected_80", gemm(256, "elected"), arch="sm_80")


@T.prim_func
def plain(F: W.Symmetric((8,), "uint32")):
    with T.Kernel(4, threads=128):
        W.wait_ge(F[W.rank(), 0], 1)
        W.red_add(F[1, 0], 1)


# CHECK: removed: wait_ge: after TileLang's lowering no thread executes it; expected threads 0 to 127 of the program
# LINE: CHECK-NEXT: --> {{.*}}verify_threads-builtins.py:
check("removed", plain, on_builtins(lambda stmt, tx: tirx.Evaluate(0)))

# Fewer threads may execute a wait.
# CHECK: first_half: red_add: after TileLang's lowering threads 0 to 63
check("first_half", plain, below(64))

# Copies of a statement count as one builtin.
# CHECK: twice: accepted
check("twice", plain, on_builtins(lambda stmt, tx: flatten([stmt, stmt])))


@T.prim_func
def dead(F: W.Symmetric((8,), "uint32"), n: T.int32):
    with T.Kernel(4, threads=128) as bx:
        if bx > 3:
            W.red_add(F[1, 0], 1)
        for k in T.serial(0):
            W.signal(F[1, 1])
        half = bx // 2
        if half == 2:
            W.wait_ge(F[W.rank(), 0], 1)
        if T.get_thread_binding() > 128:
            W.red_add(F[1, 2], 1)
        if n > 4:
            if n < 3:
                W.red_add(F[1, 3], 1)


# Dead code may vanish.
# CHECK: dead: accepted
check("dead", dead)


@T.prim_func
def copied(F: W.Symmetric((8,), "uint32"), A: T.Tensor((64, 128), "uint32")):
    with T.Kernel(4, threads=128):
        tile = T.alloc_shared((128,), "uint32")
        for k in T.unroll(4):
            if T.get_thread_binding() % 4 == k:
                W.red_add(F[1, k], 1)
        for k in T.Pipelined(64, num_stages=3):
            T.copy(A[k, 0], tile)
            if k == 0:
                W.red_add(F[1, 4], 1)
            W.red_add(F[1, 5], tile[T.get_thread_binding()])
        for i in T.Parallel(8):
            W.signal(F[1, i])


# TileLang unrolls, pipelines or divides these loops.
# CHECK: copied: accepted
check("copied", copied)

# CHECK: copied_80: accepted
check("copied_80", copied, arch="sm_80")


@T.prim_func
def two_kernels(F: W.Symmetric((8,), "uint32")):
    with T.Kernel(1, threads=128):
        W.red_add(F[1, 0], 1)
    with T.Kernel(1, threads=(32, 2)):
        W.red_add(F[1, 1], 1)
        W.put_warp(F[W.rank(), 0], F[1, 0], 8)


# CHECK: two_kernels: accepted
check("two_kernels", two_kernels)


@T.prim_func
def two_axes(F: W.Symmetric((8,), "uint32")):
    with T.Kernel(1, threads=(32, 2)):
        W.red_add(F[1, 1], 1)


# CHECK: two_axes: red_add: after TileLang's lowering threads (0, 0, 0), (0, 1, 0), (1, 0, 0), (1, 1, 0), ... of the program execute it; expected threads (0, 0, 0), (0, 1, 0), (1, 0, 0), (1, 1, 0), ... of the program
check("two_axes", two_axes, below(16))


@T.prim_func
def early(F: W.Symmetric((8,), "uint32"), B: T.Tensor((512, 64), "bfloat16")):
    with T.Kernel(1, threads=128):
        tile = T.alloc_shared((64, 64), "bfloat16")
        total = T.alloc_fragment((64, 64), "float32")
        W.red_add(F[1, 0], 1)
        T.clear(total)
        for k in T.Pipelined(8, num_stages=2):
            T.copy(B[k * 64, 0], tile)
            T.gemm(tile, tile, total)
        T.copy(total, B[0, 0])


# CHECK: early: accepted
check("early", early)


@T.prim_func
def claimed(
    F: W.Symmetric((8,), "uint32"),
    B: T.Tensor((2, 512, 64), "bfloat16"),
    C: T.Tensor((64, 64), "bfloat16"),
):
    with T.Kernel(1, threads=128):
        tile = T.alloc_shared((64, 64), "bfloat16")
        total = T.alloc_fragment((64, 64), "float32")
        ticket = T.alloc_var("uint32")
        ticket = W.atom_add(F[0, 0], 1)
        T.clear(total)
        for k in T.Pipelined(8, num_stages=2):
            T.copy(B[ticket % 2, k * 64, 0], tile)
            T.gemm(tile, tile, total)
        T.copy(total, C)
        W.st(F[0, 1], ticket)


# TileLang gives producers and consumers a ticket each, by two atomic operations.
# CHECK: claimed: atom_add: after TileLang's lowering two threads of the block execute it for one thread of the program; expected threads 0 to 127 of the program
check("claimed", claimed)

# CHECK: claimed_80: accepted
check("claimed_80", claimed, arch="sm_80")

# The producers also run the statements before the loop.
# CHECK: unguarded: red_add: after TileLang's lowering threads that are not the program's execute it; expected threads 0 to 127 of the program
check("unguarded", early, without="exclude_producer_threads")
