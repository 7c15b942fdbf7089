# RUN: %python %s | %filecheck %s
"""Multimem operations on symmetric tensors become accesses to the copy of each rank."""

import tilelang.language as T
from tilelang import tvm
from tvm import tirx

from tests import verdicts
from tileweave import language as W
from tileweave.passes import run_group

RANKS, N = 2, 64


def program(use, dtype):
    @T.prim_func
    def p(S: W.Symmetric((N, N), dtype), M: T.Tensor((N,), dtype)):
        with T.Kernel(1, threads=32):
            x = T.alloc_local((8,), dtype)
            use(S, M, x)

    return p


def show(use, dtype, ranks=RANKS):
    print("TEST:", use.name)
    mod = tvm.IRModule({"p": program(use, dtype)})
    print(run_group(mod, ranks, 1 << 20, ["group"]).script())


@T.macro
def load_vector(S, M, x):
    x[0:8] = W.multimem_ld_reduce(S[:, 1, 8], 8, op="add")


# The copies are added in the order of the ranks, in float32, and the sum is rounded once.
# CHECK-LABEL: TEST: load_vector
# CHECK: x[0:8] = T.Cast("bfloat16x8", T.Cast("float32x8", S[0, 1, 8:16]) + T.Cast("float32x8", S[1, 1, 8:16]) + T.Cast("float32x8", S[2, 1, 8:16]))
# CHECK-NOT: multimem
show(load_vector, "bfloat16", ranks=3)


@T.macro
def load_scalar(S, M, x):
    M[0] = W.multimem_ld_reduce(S[:, 1, 2], op="min") + 1


# CHECK-LABEL: TEST: load_scalar
# CHECK: M[0] = T.min(S[0, 1, 2], S[1, 1, 2]) + 1
show(load_scalar, "int32")


@T.macro
def load_acquire(S, M, x):
    M[0] = W.multimem_ld_reduce(S[:, 1, 2], op="add", sem="acquire", scope="gpu")


# CHECK-LABEL: TEST: load_acquire
# CHECK: M[0] = T.tileweave.ld(T.access_ptr(S[0, 1, 2], 1, 1), 1, "gpu", "acquire") + T.tileweave.ld(T.access_ptr(S[1, 1, 2], 1, 1), 1, "gpu", "acquire")
show(load_acquire, "float32")


@T.macro
def share_sum(S, M, x):
    W.multimem_st(S[:, 1, 8], W.multimem_ld_reduce(S[:, 2, 8], 2, op="max"))


# The value is loaded before the first store, which may change it.
# CHECK-LABEL: TEST: share_sum
# CHECK: value: T.float16x2 = T.Cast("float16x2", T.max(T.Cast("float32x2", S[0, 2, 8:10]), T.Cast("float32x2", S[1, 2, 8:10])))
# CHECK-NEXT: S[T.tileweave.rank(), 1, 8:10] = value
# CHECK-NEXT: S[(T.tileweave.rank() + 1) % 2, 1, 8:10] = value
show(share_sum, "float16")


@T.macro
def store_release(S, M, x):
    W.multimem_st(S[:, 1, 2], 1, sem="release")


# CHECK-LABEL: TEST: store_release
# CHECK: value: T.uint32 = T.uint32(1)
# CHECK-NEXT: T.tileweave.st(T.access_ptr(S[T.tileweave.rank(), 1, 2], 1, 2), value, "sys", "release")
# CHECK-NEXT: T.tileweave.st(T.access_ptr(S[(T.tileweave.rank() + 1) % 2, 1, 2], 1, 2), value, "sys", "release")
show(store_release, "uint32")


@T.macro
def add(S, M, x):
    W.multimem_red(S[:, 1, 8], x[0:2], op="add")


# CHECK-LABEL: TEST: add
# CHECK: for lane in T.vectorized(2):
# CHECK-NEXT: T.atomic_add_elem_op(T.access_ptr(S[T.tileweave.rank(), 1, 8 + lane], 1, 3), x[lane])
# CHECK-NEXT: for lane in T.vectorized(2):
# CHECK-NEXT: T.atomic_add_elem_op(T.access_ptr(S[(T.tileweave.rank() + 1) % 2, 1, 8 + lane], 1, 3), x[lane])
show(add, "float32")


@T.macro
def add_twice(S, M, x):
    x_2 = tirx.BufferLoad(x, [tirx.Ramp(0, 1, 2)])
    W.multimem_red(S[:, 1, 8], x_2 + x_2, op="add")


# CHECK-LABEL: TEST: add_twice
# CHECK: vector = T.sblock_alloc_buffer((2,), scope="local")
# CHECK: vector[0:2] = x_2 + x_2
# CHECK-NEXT: for lane in T.vectorized(2):
# CHECK-NEXT: T.atomic_add_elem_op(T.access_ptr(S[T.tileweave.rank(), 1, 8 + lane], 1, 3), vector[lane])
show(add_twice, "float32")


@T.macro
def add_release(S, M, x):
    W.multimem_red(S[:, 1, 8], x[0:4], op="add", sem="release")


# CHECK-LABEL: TEST: add_release
# CHECK: T.tileweave.red_add(T.access_ptr(S[T.tileweave.rank(), 1, 8], 1, 3), x[0:2], "bf16x2", "sys", "release")
# CHECK-NEXT: T.tileweave.red_add(T.access_ptr(S[T.tileweave.rank(), 1, 10], 1, 3), x[2:4], "bf16x2", "sys", "release")
# CHECK-NEXT: T.tileweave.red_add(T.access_ptr(S[(T.tileweave.rank() + 1) % 2, 1, 8], 1, 3), x[0:2], "bf16x2", "sys", "release")
# CHECK-NEXT: T.tileweave.red_add(T.access_ptr(S[(T.tileweave.rank() + 1) % 2, 1, 10], 1, 3), x[2:4], "bf16x2", "sys", "release")
show(add_release, "bfloat16")


@T.macro
def change_bits(S, M, x):
    W.multimem_red(S[:, 1, 2], 3, op="or")


# CHECK-LABEL: TEST: change_bits
# CHECK: T.tileweave.red_or(T.access_ptr(S[T.tileweave.rank(), 1, 2], 1, 3), value, "u32", "sys", "relaxed")
# CHECK-NEXT: T.tileweave.red_or(T.access_ptr(S[(T.tileweave.rank() + 1) % 2, 1, 2], 1, 3), value, "u32", "sys", "relaxed")
show(change_bits, "uint32")


@T.macro
def mapped(S, M, x):
    W.multimem_st(M[1], W.multimem_ld_reduce(M[0], op="add"))


# A tensor that the user maps to a multicast object keeps its operations.
# CHECK-LABEL: TEST: mapped
# CHECK: T.tileweave.multimem_st(T.access_ptr(M[1], 1, 2), T.tileweave.multimem_ld_reduce(T.access_ptr(M[0], 1, 1), 1, "f32", "add", "sys", "relaxed"), "f32", "sys", "relaxed")
show(mapped, "float32")


@T.prim_func
def all_reduce(X: T.Tensor((N, N), "bfloat16"), Y: T.Tensor((N, N), "bfloat16")):
    with T.Kernel(N // 8, threads=64) as block:
        S = W.alloc_symmetric((N, N), "bfloat16")
        tile = T.alloc_fragment((8, N), "bfloat16")
        T.copy(X[block * 8, 0], tile)
        T.copy(tile, S[W.rank(), block * 8, 0])
        for i, j in T.Parallel(8, N // 8):
            m, n = block * 8 + i, j * 8
            Y[m, n : n + 8] = W.multimem_ld_reduce(S[:, m, n], 8, op="add")


# The inference orders the accesses, and threads load 16 bytes from each rank. No multicast is
# required.
# CHECK-LABEL: TEST: inferred
# CHECK-NOT: multimem
# CHECK: tw::signal<
# CHECK: tw::wait_reached<
# CHECK: uint4 [[FIRST:.*]] = *(uint4*)(S +
# CHECK: __bfloat1622float2((reinterpret_cast<__nv_bfloat162*>(&[[FIRST]]))[0]);
# CHECK: uint4 {{.*}} = *(uint4*)(S + {{.*}} + (int64_t)536870912));
# CHECK: __float22bfloat162_rn
# CHECK: *(uint4*)(Y +
verdicts.show(all_reduce, "inferred", world_size=RANKS)
# CHECK-LABEL: TEST: host
# CHECK-NOT: require_multicast
verdicts.show(all_reduce, "host", world_size=RANKS, stage="tile")
