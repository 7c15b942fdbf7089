# REQUIRES: since-0.1.13
# RUN: %python %s | %filecheck %s
"""Builtins around T.Pipelined in an outer loop run in the program's threads, in all parts."""

import tilelang.language as T

from tests import verdicts
from tileweave import language as W


@T.macro
def nothing(S, F, u):
    pass


def show(name, before=nothing, after=nothing, behind=nothing, threads=256, **options):
    @T.prim_func
    def program(
        S: W.Symmetric((512, 512), "bfloat16"),
        F: W.Symmetric((8,), "uint32"),
        B: T.Tensor((512, 512), "bfloat16"),
        C: T.Tensor((2, 512, 512), "bfloat16"),
    ):
        with T.Kernel(4, 4, threads=threads) as (bx, by):
            As = T.alloc_shared((128, 64), "bfloat16")
            Bs = T.alloc_shared((64, 128), "bfloat16")
            Cl = T.alloc_fragment((128, 128), "float32")
            for u in T.serial(2):
                before(S, F, u)
                T.clear(Cl)
                for k in T.Pipelined(8, num_stages=2):
                    T.copy(B[by * 128, k * 64], As)
                    T.copy(B[k * 64, bx * 128], Bs)
                    T.gemm(As, Bs, Cl)
                T.copy(Cl, C[u, by * 128, bx * 128])
                after(S, F, u)
            behind(S, F, 0)

    verdicts.show_unordered(program, name, **options)


@T.macro
def send(S, F, u):
    W.put_block(S[W.rank(), 0, 0], S[W.rank() + 1, 0, 0], 512)
    W.red_add(F[1, 0], 1)
    W.signal(F[1, 1])
    W.sync_grid()
    if T.get_thread_binding() == 37:
        W.st(F[1, 2], W.atom_add(F[0, 3], 1))


# After the outer loop, the program's threads are those after the producers. A guard by the number of
# the program's threads would select none of 128 and half of 256, so there is none.
# CHECK-LABEL: TEST: behind_128{{$}}
# CHECK: __launch_bounds__(256
# CHECK: for (int u = 0; u < 2; ++u) {
# CHECK: tl::wgmma_ss
# CHECK: {{^ }} if (128 <= ((int)threadIdx.x)) {
# CHECK-NEXT: tw::put_block({{.*}}, (((int)threadIdx.x) - 128), 128);
# CHECK-NEXT: tw::red_add
# CHECK: if (((int)threadIdx.x) == 128) {
# CHECK-NEXT: tw::signal
# CHECK: if (((int)threadIdx.x) == 128) {
# CHECK: tw::sync_grid
# CHECK: if (((int)threadIdx.x) == 165) {
# CHECK-NEXT: tw::st<
# CHECK-SAME: tw::atom_add
show("behind_128", behind=send, threads=128)

# CHECK-LABEL: TEST: behind_256{{$}}
# CHECK: __launch_bounds__(384
# CHECK: tl::wgmma_ss
# CHECK: {{^ }} if (128 <= ((int)threadIdx.x)) {
# CHECK-NEXT: tw::put_block({{.*}}, (((int)threadIdx.x) - 128), 256);
# CHECK-NEXT: tw::red_add
# CHECK-NOT: < 256
# CHECK: tw::signal
# CHECK-NOT: < 256
# CHECK: tw::sync_grid
show("behind_256", behind=send)

# Without warp specialization there are no guards.
# CHECK-LABEL: TEST: unspecialized sm_80
# CHECK: __launch_bounds__(256
# CHECK: mma
# CHECK-NOT: threadIdx.x) < 256
# CHECK: tw::put_block({{.*}}, ((int)threadIdx.x), 256);
# CHECK-NEXT: tw::red_add
# CHECK: if (((int)threadIdx.x) == 0) {
# CHECK-NEXT: tw::signal
show("unspecialized", behind=send, arch="sm_80")


@T.macro
def count(S, F, u):
    W.red_add(F[1, u], 1)
    W.signal(F[1, 2 + u])


# In the loop before the specialized part, the producers are after the program's threads.
# CHECK-LABEL: TEST: before{{$}}
# CHECK: for (int u = 0; u < 2; ++u) {
# CHECK: if (((int)threadIdx.x) < 256) {
# CHECK-NEXT: tw::red_add
# CHECK: if (((int)threadIdx.x) == 0) {
# CHECK-NEXT: tw::signal
# CHECK: if (((int)threadIdx.x) < 128) {
# CHECK: } else {
# CHECK: tl::wgmma_ss
show("before", before=count)

# After it the program's threads are the consumers.
# CHECK-LABEL: TEST: after{{$}}
# CHECK: for (int u = 0; u < 2; ++u) {
# CHECK: tl::wgmma_ss
# CHECK-NOT: < 256
# CHECK: tw::red_add
# CHECK: if (((int)threadIdx.x) == 128) {
# CHECK-NEXT: tw::signal
show("after", after=count)


def infer(name, threads, blocks):
    rows, columns = 64, 64 * blocks

    @T.prim_func
    def program(
        x: T.Tensor((2, rows, columns), "bfloat16"),
        w: T.Tensor((columns, columns), "bfloat16"),
        y: T.Tensor((2, rows, columns), "bfloat16"),
    ):
        with T.Kernel(blocks, threads=threads) as b:
            mail = W.alloc_symmetric((2, rows, columns), "bfloat16")
            A = T.alloc_shared((rows, 64), "bfloat16")
            B = T.alloc_shared((64, 64), "bfloat16")
            C = T.alloc_shared((rows, 64), "bfloat16")
            acc = T.alloc_fragment((rows, 64), "float32")
            for u in T.serial(2):
                T.clear(acc)
                for k in T.Pipelined(blocks, num_stages=2):
                    T.copy(x[u, 0, k * 64], A)
                    T.copy(w[k * 64, b * 64], B)
                    T.gemm(A, B, acc)
                T.copy(acc, C)
                T.copy(C, mail[(W.rank() + 1) % 4, u, 0, b * 64])
                T.copy(mail[W.rank(), u, 0, b * 64], C)
                T.copy(C, y[u, 0, b * 64])

    verdicts.show(program, name)


# An inferred program keeps the end of its launch: the credit and the next epoch.
# CHECK-LABEL: TEST: one_block{{$}}
# CHECK: tl::wgmma_ss
# CHECK: if (128 <= ((int)threadIdx.x)) {
# CHECK: if (((int)threadIdx.x) == 128) {
# CHECK: tw::signal<{{.*}}finished
# CHECK: tw::st<{{.*}}launches
infer("one_block", 128, 1)

# With several blocks, one thread reads a counter to find the last block.
# CHECK-LABEL: TEST: four_blocks{{$}}
# CHECK: tl::wgmma_ss
# CHECK: if (128 <= ((int)threadIdx.x)) {
# CHECK: if (((int)threadIdx.x) == 128) {
# CHECK: tw::atom_add<{{.*}}launches
# CHECK: tw::signal<{{.*}}finished
# CHECK: tw::st<{{.*}}launches
infer("four_blocks", 128, 4)
