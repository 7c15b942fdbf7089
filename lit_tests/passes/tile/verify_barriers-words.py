# RUN: %python %s | %filecheck %s
"""Barriers are refused if their words are too few, overlap, or are changed by other statements."""

import tilelang.language as T

import tileweave as tw
from tests.verdicts import print_verdict
from tileweave import language as W

UNORDERED = {"tileweave.verify": "off"}


def refused(name, run, ranks=2, threads=128):
    @T.prim_func
    def program(B: W.Symmetric((6,), "uint32"), U: T.Tensor((2, 2), "uint32"), n: T.int32):
        with T.Kernel(4, threads=threads) as block:
            run(B, U, W.rank(), n, block)

    show(name, program, ranks)


def show(name, program, ranks=2):
    with print_verdict(name):
        tw.emit(program, world_size=ranks, stage="tile", pass_configs=UNORDERED)


# CHECK: few: sync_ranks: barrier=B[W.rank(), 3] has 3 words up to the end of B; expected 4
# LINE: CHECK-NEXT: --> {{.*}}verify_barriers-words.py:[[# @LINE - 11]]
refused("few", lambda B, U, me, n, block: W.sync_ranks(B[me, 3]))

# CHECK: enough: accepted
refused("enough", lambda B, U, me, n, block: W.sync_ranks(B[me, 2]))

# CHECK: few_of_four: barrier_blocks: barrier=B[W.rank(), 2] has 4 words up to the end of B; expected 6
refused("few_of_four", lambda B, U, me, n, block: W.barrier_blocks(B[me, 2]), ranks=4)

# CHECK: last: accepted
refused("last", lambda B, U, me, n, block: W.sync_grid(U[1, 1]))


def in_loop(name, first):
    @T.prim_func
    def program(B: W.Symmetric((6,), "uint32")):
        with T.Kernel(4, threads=128) as block:
            for i in T.serial(2):
                if block == i:
                    W.sync_ranks(B[W.rank(), i * 4 + first])

    show(name, program)


# Each iteration needs more words than are left.
# CHECK: loop_few: sync_ranks: barrier=B[{{.*}}] has 3 words up to the end of B; expected 4
in_loop("loop_few", 3)

# The iterations that reach the barrier are known only at run time.
# CHECK: loop_open: accepted
in_loop("loop_open", 2)

# CHECK: place_open: accepted
refused("place_open", lambda B, U, me, n, block: W.sync_ranks(B[me, n]))


def two(name, one, other):
    @T.prim_func
    def program(B: W.Symmetric((6,), "uint32"), U: T.Tensor((2, 2), "uint32")):
        with T.Kernel(4, threads=128):
            one(B, U, W.rank())
            other(B, U, W.rank())

    show(name, program)


# CHECK: overlap: sync_ranks: barrier=B[W.rank(), 1] (4 words) overlaps the words of sync_grid, B[W.rank(), 2] (1 word); expected separate words, or the same first word
# LINE: CHECK-NEXT: barrier --> {{.*}}verify_barriers-words.py
# LINE: CHECK-NEXT: other barrier --> {{.*}}verify_barriers-words.py
two("overlap", lambda B, U, me: W.sync_grid(B[me, 2]), lambda B, U, me: W.sync_ranks(B[me, 1]))

# CHECK: apart: accepted
two("apart", lambda B, U, me: W.sync_grid(B[me, 4]), lambda B, U, me: W.sync_ranks(B[me, 0]))

# CHECK: same: accepted
two("same", lambda B, U, me: W.sync_grid(B[me, 0]), lambda B, U, me: W.barrier_blocks(B[me, 0]))

# CHECK: other_tensor: accepted
two("other_tensor", lambda B, U, me: W.sync_grid(U[0, 1]), lambda B, U, me: W.sync_ranks(B[me, 0]))


def written(name, write):
    @T.prim_func
    def program(B: W.Symmetric((6,), "uint32"), U: T.Tensor((2, 2), "uint32")):
        with T.Kernel(4, threads=128):
            W.barrier_blocks(B[W.rank(), 1])
            if T.get_thread_binding() == 0:
                write(B, U, W.rank())

    show(name, program)


# CHECK: signalled: signal: writes B[{{.*}}, 4], a word of barrier_blocks with barrier=B[W.rank(), 1] (4 words); expected only barriers to change it in this kernel
# LINE: CHECK-NEXT: write --> {{.*}}verify_barriers-words.py
# LINE: CHECK-NEXT: barrier --> {{.*}}verify_barriers-words.py:
written("signalled", lambda B, U, me: W.signal(B[1 - me, 4]))

# CHECK: added: red_add: writes B[W.rank(), 1], a word of barrier_blocks with
written("added", lambda B, U, me: W.red_add(B[me, 1], 1))

# CHECK: beside: accepted
written("beside", lambda B, U, me: W.signal(B[1 - me, 5]))

# CHECK: looked_at: accepted
written("looked_at", lambda B, U, me: W.wait_ge(B[me, 1], 0))


@T.prim_func
def stored(U: T.Tensor((4,), "uint32"), V: T.Tensor((4,), "uint32")):
    with T.Kernel(4, threads=128):
        W.sync_grid(U[2])
        if T.get_thread_binding() == 0:
            U[2] = 0


# CHECK: stored: assignment to U: writes U[2], a word of sync_grid with
show("stored", stored)


@T.prim_func
def copied(U: T.Tensor((4,), "uint32"), V: T.Tensor((4,), "uint32")):
    with T.Kernel(4, threads=128):
        W.sync_grid(U[2])
        T.copy(V[0:2], U[1:3])


# CHECK: copied: T.copy: writes U[1], a word of sync_grid with
show("copied", copied)


@T.prim_func
def copied_beside(U: T.Tensor((4,), "uint32"), V: T.Tensor((4,), "uint32")):
    with T.Kernel(4, threads=128):
        W.sync_grid(U[2])
        T.copy(V[0:2], U[0:2])


# CHECK: copied_beside: accepted
show("copied_beside", copied_beside)


@T.prim_func
def zeroed_before(U: T.Tensor((4,), "uint32"), V: T.Tensor((4,), "uint32")):
    with T.Kernel(1, threads=128):
        if T.get_thread_binding() == 0:
            U[2] = 0
    with T.Kernel(4, threads=128):
        W.sync_grid(U[2])


# CHECK: zeroed_before: accepted
show("zeroed_before", zeroed_before)
