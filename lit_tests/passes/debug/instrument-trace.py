# RUN: %python %s | %filecheck %s
"""A traced kernel begins with a record, whose launch the host numbers."""

import tilelang.language as T

import tileweave as tw
from tileweave import language as W


@T.prim_func
def two_kernels(F: W.Symmetric((1,), "uint32")):
    with T.Kernel(1, threads=32):
        W.signal(F[W.rank(), 0])
    with T.Kernel(1, threads=32):
        W.wait_reached(F[W.rank(), 0], 1)


def show(name, **options):
    print("TEST:", name)
    configs = {"tileweave.verify": "off", **options}
    print(tw.emit(two_kernels, "tile", world_size=2, pass_configs=configs))


# Both kernels have a record before anything else. The host binds the number of the launch once.
# CHECK-LABEL: TEST: traced
# CHECK: T.call_packed("tileweave.begin_launch", tileweave_launches, "two_kernels")
# CHECK-NOT: tileweave.begin_launch
# CHECK: "tl.launch_threads"
# CHECK-NEXT: T.tileweave.record(0, T.int64(0), {{.*}}, T.int64(0), T.int64(0), tileweave_context, tileweave_launch)
# CHECK: T.tileweave.signal(
# CHECK: "tl.launch_threads"
# CHECK-NEXT: T.tileweave.record(0,
# CHECK: T.tileweave.wait_reached(
show("traced", **{"tileweave.trace": True})

# CHECK-LABEL: TEST: plain
# CHECK-NOT: record
# CHECK-NOT: begin_launch
# CHECK: TEST: end
show("plain")
print("TEST: end")
