# RUN: %python %s | %filecheck %s
"""A symmetric tensor has one TMA descriptor for all ranks; its rank stride is that of the heap."""

import tilelang
import tilelang.language as T
from tilelang import tvm

from tests.verdicts import show_unordered
from tileweave import language as W
from tileweave import passes

UNORDERED = {"tileweave.verify": "off"}


@T.prim_func
def store(A: T.Tensor((128, 64), "bfloat16"), S: W.Symmetric((128, 64), "bfloat16"), peer: T.int32):
    with T.Kernel(1, threads=128):
        tile = T.alloc_shared((128, 64), "bfloat16")
        T.copy(A, tile)
        T.copy(tile, S[peer, 0, 0])


def host(name, program):
    """Return the host code, which encodes the descriptors, and the kernel from stock TileLang."""
    target = tvm.target.Target({"kind": "cuda", "arch": "sm_90a"})
    with target:
        artifact = tilelang.lower(program, target=target)
    print("TEST:", name)
    print(artifact.host_mod.script())
    print(artifact.kernel_source)


def in_group(world_size):
    """Compile ``store`` for a group with heaps at a distance of 1 MiB."""
    unordered, _ = passes.split_options(store, UNORDERED)
    mod = tvm.IRModule({"store": unordered})
    (program,) = passes.run_group(mod, world_size, 1 << 20).functions.values()
    return program


# One descriptor with extents and byte strides; the last stride is the rank's, a constant of the group.
# CHECK-LABEL: TEST: four
# SINCE_0_1_13: CHECK: T.call_packed("__tvm_tensormap_create_tiled", S_desc, 9, 3, S, 64, 128, 4, 2, 128, 1048576, 64, 128, 1,
# SINCE_0_1_13: CHECK-NEXT: T.call_packed("store_kernel", A, S_desc, peer,
# SINCE_0_1_13: CHECK: tl::tma_store(S_desc, (&(tile[0])), 0, 0, peer);
# SINCE_0_1_13: CHECK-NEXT: tl::tma_store_arrive
host("four", in_group(4))

# CHECK-LABEL: TEST: two
# SINCE_0_1_13: CHECK: T.call_packed("__tvm_tensormap_create_tiled", S_desc, 9, 3, S, 64, 128, 2, 2, 128, 1048576, 64, 128, 1,
host("two", in_group(2))

# CHECK-LABEL: TEST: alone
# SINCE_0_1_13: CHECK: T.call_packed("__tvm_tensormap_create_tiled", S_desc, 9, 3, S, 64, 128, 1, 2, 128, 1048576, 64, 128, 1,
host("alone", in_group(1))

# Stock tilelang.lower has no group: size and stride come from the tensor at each launch.
# CHECK-LABEL: TEST: no_group
# CHECK: world_size = {{.*}}store_S_shape
# CHECK: heap_stride_2 = {{.*}}store_S_strides
# SINCE_0_1_13: CHECK: T.call_packed("__tvm_tensormap_create_tiled", S_desc, 9, 3, S, 64, 128, world_size, 2, 128, heap_stride_2 * T.int64(2),
# SINCE_0_1_13: CHECK: tl::tma_store(S_desc, (&(tile[0])), 0, 0, peer);
host("no_group", store)


@T.prim_func
def elements(S: W.Symmetric((8, 16), "float32"), B: W.Symmetric((16,), "uint8"), peer: T.int32):
    with T.Kernel(1, threads=32):
        S[peer, 3, 5] = 1.0
        B[peer, 5] = T.uint8(1)
        S[W.rank(), 0, 0] = 2.0


# The rank axis uses 64-bit arithmetic in elements of each type, without a table or a bounds check.
# CHECK-LABEL: TEST: elements
# CHECK: S[((((int64_t)peer) * (int64_t)268435456) + (int64_t)53)] =
# CHECK: B[((((int64_t)peer) * (int64_t)1073741824) + (int64_t)5)] =
# CHECK-NEXT: }
# CHECK-NOT: if
# CHECK: S[(((int64_t)rank) * (int64_t)268435456)] =
show_unordered(elements)


ROWS, COLUMNS = T.dynamic("rows"), T.dynamic("columns")


@T.prim_func
def last_row(A: T.Tensor((128,), "int8"), S: W.Symmetric((ROWS, COLUMNS), "int8")):
    with T.Kernel(1, threads=128):
        for i in T.Parallel(128):
            A[i] = W.ld(S[W.rank(), ROWS - 1, i])


# Rows of dynamic extents can also be after more than 2^31 elements.
# CHECK-LABEL: TEST: last_row
# CHECK: (((int64_t)rows) - (int64_t)1) * ((int64_t)columns)
show_unordered(last_row, stage="cuda")
