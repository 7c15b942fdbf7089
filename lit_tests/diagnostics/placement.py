# RUN: %python %s | %filecheck %s
"""What is refused for where it stands: by elect_leader, order_releases and the pipelined-loop passes."""

import tilelang.language as T

import tileweave as tw
from tileweave import language as W


def refused(program, arch="sm_90a"):
    name = program.attrs["global_symbol"]
    try:
        tw.emit(program, arch=arch)
    except tw.LanguageError as error:
        print(f"{name}: {error}")
    else:
        print(f"{name}: accepted")


@T.prim_func
def register(F: W.Symmetric((8,), "uint32"), n: T.int32):
    with T.Kernel(1, threads=128):
        count = T.alloc_var("int32", 0)
        if T.get_thread_binding() < n:
            count = 1
        if count == 1:
            W.signal(F[1, 0])


# CHECK: register: signal: stands under a condition on a register, which may differ between threads; expected a place that the whole block reaches, or a condition on the thread index
# CHECK-NEXT: --> {{.*}}placement.py:
refused(register)


@T.prim_func
def answer(F: W.Symmetric((8,), "uint32")):
    with T.Kernel(1, threads=128):
        if W.atom_add(F[0, 0], 1) == T.uint32(3):
            W.signal(F[1, 0])


# Each thread has its own answer.
# CHECK: answer: signal: stands under a condition on a register
refused(answer)


@T.prim_func
def part_of_block(S: W.Symmetric((8,), "uint32"), A: T.Tensor((8,), "uint32")):
    with T.Kernel(1, threads=128):
        if T.get_thread_binding() < 64:
            W.put_block(A, S, 8, peer=1)


# CHECK: part_of_block: put_block: stands under a condition on the thread index; expected a place that the whole block reaches{{$}}
refused(part_of_block)


@T.prim_func
def half_done(S: W.Symmetric((128, 128), "float32"), F: W.Symmetric((8,), "uint32")):
    with T.Kernel(1, threads=256):
        tile = T.alloc_shared((128, 128), "float32")
        if T.get_thread_binding() >= 128:
            T.copy(tile, S[1, 0, 0])
            W.signal(F[1, 0])


# CHECK: half_done: signal: releases after T.copy under a condition that not every thread of the block takes; expected T.sync_threads() between them, or the release outside the condition
refused(half_done)


@T.prim_func
def in_condition(F: W.Symmetric((8,), "uint32")):
    with T.Kernel(1, threads=128):
        while W.atom_add(F[0, 0], 1, sem="release") < T.uint32(3):
            pass


# CHECK: in_condition: atom_add: releases in the condition of a loop; expected it in the body
refused(in_condition)


def gemm(head, name):
    @T.prim_func
    def program(S: W.Symmetric((512, 512), "bfloat16"), F: W.Symmetric((8,), "uint32")):
        with T.Kernel(4, 4, threads=256) as (bx, by):
            As = T.alloc_shared((128, 64), "bfloat16")
            Bs = T.alloc_shared((64, 128), "bfloat16")
            Cl = T.alloc_fragment((128, 128), "float32")
            T.clear(Cl)
            for k in T.Pipelined(8, num_stages=3):
                head(S, F, k)
                T.copy(S[W.rank(), by * 128, k * 64], As)
                T.copy(S[W.rank(), k * 64, bx * 128], Bs)
                T.gemm(As, Bs, Cl)
            T.copy(Cl, S[W.rank(), by * 128, bx * 128])

    return program.with_attr("global_symbol", name)


@T.macro
def load(S, F, k):
    seen = W.ld(F[0, k])
    W.st(F[0, k], seen + T.uint32(1))


@T.macro
def wait(S, F, k):
    W.wait_ge(F[W.rank(), k], 1)


@T.macro
def wait_and_send(S, F, k):
    W.wait_ge(F[W.rank(), k], 1)
    W.st(F[1, k], 1)


# CHECK: acquiring_load: ld: acquires in T.Pipelined before a load, which overtakes it; expected W.wait_reached or another wait, or T.serial
refused(gemm(load, "acquiring_load"))

# CHECK: kept_back: wait_ge: loads of T.Pipelined overtake it, since something before the loads keeps it in the consumer warps; expected only waits there
# CHECK-NEXT: --> {{.*}}placement.py:
refused(gemm(wait_and_send, "kept_back"))


@T.macro
def wait_scheduled(S, F, k):
    W.wait_ge(F[W.rank(), k], 1)


def scheduled(stage):
    @T.prim_func
    def own_schedule(S: W.Symmetric((512, 512), "bfloat16"), F: W.Symmetric((8,), "uint32")):
        with T.Kernel(1, threads=128):
            tile = T.alloc_shared((128, 64), "bfloat16")
            for k in T.Pipelined(8, num_stages=3, order=[0, 1, 2], stage=stage):
                wait_scheduled(S, F, k)
                T.copy(S[W.rank(), 0, k * 64], tile)
                T.copy(tile, S[1, 0, k * 64])

    return own_schedule


# CHECK: own_schedule: wait: in stage 2 of T.Pipelined, with order 0, runs after a load it guards, in stage 0 with order 1; expected the stage and order of a wait not to exceed those of the loads after it
# CHECK-NEXT: --> {{.*}}placement.py:
refused(scheduled([2, 0, 2]), arch="sm_80")

# CHECK: own_schedule: accepted
refused(scheduled([0, 0, 2]), arch="sm_80")


def filled():
    @T.prim_func
    def prepared(S: W.Symmetric((512, 512), "bfloat16"), F: W.Symmetric((8,), "uint32")):
        with T.Kernel(1, threads=128):
            tile = T.alloc_shared((128, 64), "bfloat16")
            for k in T.Pipelined(8, num_stages=3):
                T.clear(tile)
                wait_scheduled(S, F, k)
                if k < 7:
                    T.copy(S[W.rank(), 0, k * 64], tile)
                T.copy(tile, S[1, 0, k * 64])

    return prepared


# CHECK: prepared: wait_ge: loads of T.Pipelined overtake it, since there is no warp specialisation; expected T.serial, or num_stages=0
refused(filled(), arch="sm_80")

# CHECK: unspecialised: accepted
refused(gemm(wait, "unspecialised"), arch="sm_80")

# CHECK: specialised: accepted
refused(gemm(wait, "specialised"))
