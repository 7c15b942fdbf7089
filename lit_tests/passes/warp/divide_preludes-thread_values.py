# RUN: %python %s | %filecheck %s
"""Values that depend on the thread, computed before a specialized loop, and read before and after."""

import tilelang.language as T

import tileweave as tw
from tileweave import language as W


def show(name, before, after):
    @T.prim_func
    def program(
        A: T.Tensor((2, 64, 64), "float32"),
        X: T.Tensor((256,), "float32"),
        Y: T.Tensor((256,), "float32"),
        Z: T.Tensor((64, 64), "float32"),
    ):
        with T.Kernel(1, threads=128):
            tile = T.alloc_shared((64, 64), "float32")
            total = T.alloc_fragment((64, 64), "float32")
            value = T.alloc_local((1,), "float32")
            thread = T.get_thread_binding()
            W.fence("gpu")
            value[0] = 0
            before(X, Y, value, thread)
            Y[128 + thread] = value[0]
            T.clear(total)
            for k in T.Pipelined(2, num_stages=2):
                T.copy(A[k, 0, 0], tile)
                for i, j in T.Parallel(64, 64):
                    total[i, j] += tile[i, j]
            T.copy(total, Z)
            after(X, Y, value, thread)
            Y[thread] = value[0]

    print("TEST:", name)
    print(tw.emit(program, arch="sm_90a", pass_configs={"tileweave.verify": "off"}))


@T.macro
def load(X, Y, value, thread):
    value[0] = X[thread]


@T.macro
def select(X, Y, value, thread):
    if thread // 32 == 1:
        value[0] = 1


@T.macro
def load_lane(X, Y, value, thread):
    value[0] = X[thread % 32]


@T.macro
def nothing(X, Y, value, thread):
    pass


# The consumers compute and store the value, with the indices that they have after the loop, too.
# CHECK-LABEL: TEST: loaded
# CHECK: if (128 <= ((int)threadIdx.x)) {
# CHECK: value[0] = X[(((int)threadIdx.x) - 128)];
# CHECK: Y[((int)threadIdx.x)] =
# CHECK: if (((int)threadIdx.x) < 128) {
# CHECK: Y[(((int)threadIdx.x) - 128)] =
show("loaded", load, nothing)

# CHECK-LABEL: TEST: selected
# CHECK: if (128 <= ((int)threadIdx.x)) {
# CHECK: if ((((int)threadIdx.x) >> 5) == 5) {
# CHECK: value[0] = 0x1p+0f
# CHECK: Y[((int)threadIdx.x)] =
# CHECK: if (((int)threadIdx.x) < 128) {
show("selected", select, nothing)

# Lanes do not change, because the number of producers is a multiple of 32.
# CHECK-LABEL: TEST: lanes
# CHECK-NOT: 128 <=
# CHECK: value[0] = X[(((int)threadIdx.x) & 31)];
# CHECK: if (((int)threadIdx.x) < 128) {
# CHECK-NEXT: Y[(((int)threadIdx.x) + 128)] =
show("lanes", load_lane, nothing)
