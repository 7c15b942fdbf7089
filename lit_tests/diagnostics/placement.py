# RUN: %python %s | %filecheck %s
"""elect_leader, order_releases and the passes for pipelined loops refuse builtins in illegal places."""

import tilelang.language as T

import tileweave as tw
from tests.verdicts import print_verdict
from tileweave import language as W

UNORDERED = {"tileweave.verify": "off"}


def refused(program, arch="sm_90a"):
    name = program.attrs["global_symbol"]
    with print_verdict(name):
        tw.emit(program, arch=arch, pass_configs=UNORDERED)


@T.prim_func
def register(F: W.Symmetric((8,), "uint32"), n: T.int32):
    with T.Kernel(1, threads=128):
        count = T.alloc_var("int32", 0)
        if T.get_thread_binding() < n:
            count = 1
        if count == 1:
            W.signal(F[1, 0])


# CHECK: register: signal: called under a condition on a register, a break, a continue or a return, which may differ between threads; expected a call that the whole block reaches, or a condition on the thread index
# LINE: CHECK-NEXT: --> {{.*}}placement.py:
refused(register)


@T.prim_func
def answer(F: W.Symmetric((8,), "uint32")):
    with T.Kernel(1, threads=128):
        if W.atom_add(F[0, 0], 1) == T.uint32(3):
            W.signal(F[1, 0])


# Each thread has its own result.
# CHECK: answer: signal: called under a condition on a register
refused(answer)


@T.prim_func
def part_of_block(S: W.Symmetric((8,), "uint32"), A: T.Tensor((8,), "uint32")):
    with T.Kernel(1, threads=128):
        if T.get_thread_binding() < 64:
            W.put_block(A, S, 8, peer=1)


# CHECK: part_of_block: put_block: called under a condition on the thread index; expected a call that the whole block reaches{{$}}
refused(part_of_block)


def chosen(choose, run, name):
    @T.prim_func
    def program(S: W.Symmetric((4096,), "uint32"), F: W.Symmetric((8,), "uint32"), n: T.int32):
        with T.Kernel(1, threads=128):
            if choose(T.get_thread_binding(), n):
                run(S, F)

    return program.with_attr("global_symbol", name)


@T.macro
def sync_grid(S, F):
    W.sync_grid()


@T.macro
def sync_ranks(S, F):
    W.sync_ranks()


@T.macro
def signal(S, F):
    W.signal(F[1, 0])


@T.macro
def put_warp(S, F):
    W.put_warp(S[W.rank(), 0], S[1, 0], 4096)


# Each thread would arrive at the barrier separately.
# CHECK: first_warp: sync_grid: 32 threads call it separately under a condition on the thread index; expected a call that the whole block reaches, or a condition that holds in one thread, such as if T.get_thread_binding() == 0
# LINE: CHECK-NEXT: --> {{.*}}placement.py:
refused(chosen(lambda tx, n: tx < 32, sync_grid, "first_warp"))

# CHECK: unknown_count: sync_ranks: up to 128 threads call it
refused(chosen(lambda tx, n: tx < n, sync_ranks, "unknown_count"))

# CHECK: lanes: sync_ranks: 4 threads call it
refused(chosen(lambda tx, n: tx % 32 == 0, sync_ranks, "lanes"))

# CHECK: one_thread: accepted
refused(chosen(lambda tx, n: tx == 0, sync_grid, "one_thread"))

# CHECK: one_lane: accepted
refused(chosen(lambda tx, n: tx * 2 + 1 == 75, sync_grid, "one_lane"))

# CHECK: elected: accepted
refused(chosen(lambda tx, n: T.shuffle_elect(128), sync_grid, "elected"))

# CHECK: elected_of_two: sync_grid: up to 2 threads call it
refused(chosen(lambda tx, n: T.shuffle_elect(64), sync_grid, "elected_of_two"))

# CHECK: on_block: accepted
refused(chosen(lambda tx, n: n > 3, sync_grid, "on_block"))

# A signal may be executed by several threads that the program selects.
# CHECK: signals: accepted
refused(chosen(lambda tx, n: tx < 32, signal, "signals"))

# CHECK: half_warp: put_warp: threads 0 to 15 call it under a condition on the thread index; expected whole warps
# LINE: CHECK-NEXT: --> {{.*}}placement.py:
refused(chosen(lambda tx, n: tx < 16, put_warp, "half_warp"))

# CHECK: two_warps: accepted
refused(chosen(lambda tx, n: tx >= 64, put_warp, "two_warps"))


@T.prim_func
def half_done(S: W.Symmetric((128, 128), "float32"), F: W.Symmetric((8,), "uint32")):
    with T.Kernel(1, threads=256):
        tile = T.alloc_shared((128, 128), "float32")
        if T.get_thread_binding() >= 128:
            T.copy(tile, S[1, 0, 0])
            W.signal(F[1, 0])


# CHECK: half_done: signal: releases after T.copy under a condition that does not hold in every thread of the block; expected T.sync_threads() between the two, or a release outside the condition
refused(half_done)


@T.prim_func
def in_condition(F: W.Symmetric((8,), "uint32")):
    with T.Kernel(1, threads=128):
        while W.atom_add(F[0, 0], 1, sem="release") < T.uint32(3):
            pass


# CHECK: in_condition: atom_add: releases in the condition of a loop; expected a release in its body
refused(in_condition)


@T.prim_func
def in_index(A: T.Tensor((8,), "uint32")):
    with T.Kernel(1, threads=128):
        A[W.atom_add(A[0], 1)] = T.uint32(1)


# CHECK: in_index: atom_add: called in an index, which may be evaluated more than once; expected a call before, with its value in a variable
# LINE: CHECK-NEXT: --> {{.*}}placement.py:
refused(in_index)


@T.prim_func
def in_pointer(F: W.Symmetric((8,), "uint32"), A: T.Tensor((8,), "uint32")):
    with T.Kernel(1, threads=128):
        W.wait_ge(F[W.ld(A[0]) % T.uint32(4), 0], 1)


# CHECK: in_pointer: ld: called in an index
refused(in_pointer)


@T.prim_func
def in_bound(A: T.Tensor((8,), "int32")):
    with T.Kernel(1, threads=128):
        for k in T.serial(W.ld(A[0])):
            A[k] = 1


# CHECK: in_bound: ld: called in the bound of a loop, which may be evaluated more than once; expected a call before, with its value in a variable
# LINE: CHECK-NEXT: --> {{.*}}placement.py:
refused(in_bound)


@T.prim_func
def in_remainder(A: T.Tensor((8,), "int32")):
    with T.Kernel(1, threads=128):
        A[1] = W.atom_add(A[0], 1) % 7


# CHECK: in_remainder: atom_add: called in a quotient or remainder of values that TVM cannot prove positive, which may be evaluated
# LINE: CHECK-NEXT: --> {{.*}}placement.py:
refused(in_remainder)


@T.prim_func
def in_unsigned_difference(A: T.Tensor((8,), "uint32")):
    with T.Kernel(1, threads=128):
        A[1] = (T.uint32(7) - W.atom_add(A[0], 1)) % T.uint32(3)


# CHECK: in_unsigned_difference: atom_add: called in a quotient or remainder of values
# LINE: CHECK-NEXT: --> {{.*}}placement.py:
refused(in_unsigned_difference)


@T.prim_func
def in_positive_remainders(A: T.Tensor((8,), "uint32"), B: T.Tensor((8,), "int32")):
    with T.Kernel(1, threads=128):
        A[1] = (W.atom_add(A[0], 1) + T.uint32(2)) % T.uint32(3)
        B[1] = T.max(W.atom_add(B[0], 1), 0) // 7


# CHECK: in_positive_remainders: accepted
refused(in_positive_remainders)


@T.prim_func
def in_absolute(A: T.Tensor((8,), "int32")):
    with T.Kernel(1, threads=128):
        A[1] = T.abs(W.ld(A[0]))


# CHECK: in_absolute: ld: called in an operand of a selection such as T.abs
refused(in_absolute)


@T.prim_func
def on_both_sides(A: T.Tensor((8,), "int32")):
    with T.Kernel(1, threads=128):
        if W.ld(A[0]) != W.ld(A[0]):
            A[1] = 1


# CHECK: on_both_sides: ld: called on both sides of an operator
refused(on_both_sides)


@T.prim_func
def beside_fragment(F: T.Tensor((64,), "float32"), D: T.Tensor((16,), "float32")):
    with T.Kernel(1, threads=128):
        o = T.alloc_fragment((16,), "float32")
        for i in T.Parallel(16):
            o[i] = W.atom_add(F[i], T.float32(1))
        T.copy(o, D)


# CHECK: beside_fragment: atom_add: called in a parallel loop that fills the fragment o, whose elements several
# LINE: CHECK-NEXT: --> {{.*}}placement.py:
refused(beside_fragment)


@T.prim_func
def apart(A: T.Tensor((8,), "int32"), U: T.Tensor((8,), "uint32")):
    with T.Kernel(1, threads=128):
        A[1] = W.ld(A[0]) - W.ld(A[2])
        U[1] = W.atom_add(U[0], 1) % T.uint32(7)


# CHECK: apart: taken
tw.emit(apart, "cuda")
print("apart: taken")


@T.prim_func
def from_variable(F: W.Symmetric((8,), "uint32"), A: T.Tensor((8,), "int32")):
    with T.Kernel(1, threads=128):
        count = T.alloc_var("int32")
        count = W.ld(A[0])
        for k in T.serial(count):
            F[W.rank(), k % W.world_size()] = T.uint32(1)


# CHECK: from_variable: accepted
refused(from_variable)


@T.macro
def nothing(S, F, k):
    pass


def gemm(head, name, tail=nothing):
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
                tail(S, F, k)
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
def send_and_wait(S, F, k):
    W.st(F[1, k], 1)
    W.wait_ge(F[W.rank(), k], 1)


# CHECK: acquiring_load: ld: acquires in T.Pipelined before a load, which overtakes it; expected W.wait_reached or another wait, or T.serial
refused(gemm(load, "acquiring_load"))


@T.macro
def acquire(S, F, k):
    seen = T.atomic_load(F[W.rank(), k], memory_order="acquire")
    F[W.rank(), 7] = seen


# CHECK: acquiring_atomic: T.atomic_load: acquires in T.Pipelined, so loads overtake it; expected W.wait_ge or another wait before the loads, memory_order='relaxed', or T.serial
# LINE: CHECK-NEXT: --> {{.*}}placement.py:
refused(gemm(acquire, "acquiring_atomic"))


@T.macro
def poll(S, F, k):
    while T.atomic_load(F[W.rank(), k], memory_order="acquire") < T.uint32(1):
        T.evaluate(0)


# CHECK: polling_atomic: T.atomic_load: polled by a while loop in T.Pipelined, so loads overtake it; expected W.wait_ge or another wait before the loads, or T.serial
# LINE: CHECK-NEXT: --> {{.*}}placement.py:
refused(gemm(poll, "polling_atomic"))


@T.macro
def look(S, F, k):
    seen = T.atomic_load(F[W.rank(), k], memory_order="relaxed")
    previous = T.atomic_add(F[W.rank(), 6], seen, return_prev=True)
    F[W.rank(), 7] = previous


# A relaxed access orders nothing.
# CHECK: relaxed_atomic: accepted
refused(gemm(look, "relaxed_atomic"))

# CHECK: kept_back: wait_ge: loads of T.Pipelined overtake it, because st before it keeps it in the consumer warps; expected st after the loads
# LINE: CHECK-NEXT: --> {{.*}}placement.py:
refused(gemm(send_and_wait, "kept_back"))


# CHECK: late_wait: wait_ge: called after the loads of T.Pipelined, so loads of the next iteration overtake it; expected a call before the loads, or T.serial
# LINE: CHECK-NEXT: --> {{.*}}placement.py:
refused(gemm(nothing, "late_wait", wait))


@T.macro
def barrier(S, F, k):
    W.sync_grid()


# CHECK: late_barrier: sync_grid: called after the loads of T.Pipelined, so loads of the next iteration overtake it; expected a wait before the loads, or T.serial
refused(gemm(nothing, "late_barrier", barrier))


@T.macro
def late_load(S, F, k):
    if W.ld(F[0, k], scope="sys") == T.uint32(3):
        W.st(F[1, k], 1)


# CHECK: late_condition: ld: called after the loads of T.Pipelined, so loads of the next iteration overtake it; expected a wait before the loads, sem='relaxed', or T.serial
refused(gemm(nothing, "late_condition", late_load), arch="sm_80")


@T.macro
def send(S, F, k):
    W.red_add(F[1, k], 1, sem="release")


# CHECK: late_release: accepted
refused(gemm(nothing, "late_release", send))


@T.macro
def fetch(S, F, k):
    W.get_block(S[1, k * 64, 0], S[W.rank(), k * 64, 0], 64 * 512)


# CHECK: own_fetch: get_block: writes S, which T.Pipelined loads iterations ahead; expected another tensor, or T.serial
# LINE: CHECK-NEXT: --> {{.*}}placement.py:
refused(gemm(fetch, "own_fetch"))

# CHECK: late_fetch: get_block: writes S, which T.Pipelined loads iterations ahead
refused(gemm(nothing, "late_fetch", fetch), arch="sm_80")


@T.macro
def pass_on(S, F, k):
    W.put_block(S[W.rank(), k * 64, 0], S[W.rank() + 1, k * 64, 0], 64 * 512)


# Another rank's copy is not what the loads read.
# CHECK: forward: accepted
refused(gemm(nothing, "forward", pass_on))


@T.prim_func
def own_tensor(S: W.Symmetric((512, 64), "bfloat16"), B: T.Tensor((512, 64), "bfloat16")):
    with T.Kernel(1, threads=128):
        tile = T.alloc_shared((64, 64), "bfloat16")
        for k in T.Pipelined(8, num_stages=3):
            W.get_block(S[1, k * 64, 0], B[k * 64, 0], 64 * 64)
            for i, j in T.Parallel(64, 64):
                tile[i, j] = B[k * 64 + i, j]
            T.copy(tile, S[2, k * 64, 0])


# CHECK: own_tensor: get_block: writes B, which T.Pipelined loads iterations ahead
refused(own_tensor)


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


# CHECK: own_schedule: wait_ge: in stage 2 of T.Pipelined, with order 0, runs after a load that it guards, in stage 0 with order 1; expected a stage and an order that do not exceed those of the loads after it
# LINE: CHECK-NEXT: --> {{.*}}placement.py:
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


# CHECK: prepared: wait_ge: loads of T.Pipelined overtake it, because there is no warp specialization; expected T.serial, or num_stages=0
refused(filled(), arch="sm_80")


@T.prim_func
def prepared_forward(S: W.Symmetric((512, 512), "bfloat16")):
    with T.Kernel(1, threads=128):
        tile = T.alloc_shared((128, 64), "bfloat16")
        for k in T.Pipelined(8, num_stages=3):
            W.put_block(S[W.rank(), 0, k * 64], S[W.rank() + 1, 0, k * 64], 64)
            T.clear(tile)
            if k < 7:
                T.copy(S[W.rank(), 0, k * 64], tile)
            T.copy(tile, S[1, 0, k * 64])


# CHECK: prepared_forward: put_block: writes a tensor that T.Pipelined loads into memory that other statements of the loop write; expected T.serial
refused(prepared_forward, arch="sm_80")

# CHECK: unspecialized: accepted
refused(gemm(wait, "unspecialized"), arch="sm_80")

# CHECK: specialized: accepted
refused(gemm(wait, "specialized"))
