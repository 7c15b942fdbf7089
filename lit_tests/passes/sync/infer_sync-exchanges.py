# REQUIRES: spans
# RUN: %python %s | %filecheck %s
"""Each kind of exchange has its signals and waits, with their counters, granules and numbers."""

import sys
from pathlib import Path

import tileweave as tw

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from tests.corpus import PROGRAMS


def show(name):
    case = PROGRAMS[name]
    explanation = tw.explain(case.make(4), 4, sizes={"M": 20} if case.sizes else {})
    print("PROGRAM", name)
    for op in (o for o in explanation.ops if o.kind in ("signal", "wait")):
        print(f"{op.kind} {op.flag} [{op.granule}] x{op.per_block}")
    for tensor, why in explanation.reuse.items():
        print(f"{tensor}: {why}")


# A put and a read.
# CHECK-LABEL: PROGRAM ring_shift
# CHECK-NEXT: signal started [] x3
# CHECK-NEXT: signal launches [] x1
# CHECK-NEXT: wait started [] x1
# CHECK-NEXT: signal S_arrived [8 x 32] x1
# CHECK-NEXT: wait S_arrived [8 x 32] x1
# CHECK-NEXT: S: writers wait until the owner's next launch has started
show("ring_shift")

# An all-gather by copy engines beside a GEMM.
# CHECK-LABEL: PROGRAM all_gather_gemm
# CHECK-NEXT: wait started [] x3
# CHECK-NEXT: signal gathered_arrived [] x3
# CHECK-NEXT: signal launches [] x1
# CHECK-NEXT: wait gathered_arrived [16 x 32] x1
# CHECK-NEXT: gathered: copies wait until the readers' ranks have begun the same call
show("all_gather_gemm")

# Data-dependent reads of an all-gather: the last block waits for the rest.
# CHECK-LABEL: PROGRAM packed_gather
# CHECK-NEXT: wait started [] x3
# CHECK-NEXT: signal gathered_arrived [] x3
# CHECK-NEXT: signal launches [] x1
# CHECK-NEXT: wait gathered_arrived [1 x 12 x 16] xNone
# CHECK-NEXT: wait gathered_arrived [all] x4
# CHECK-NEXT: gathered: copies wait until the readers' ranks have begun the same call
show("packed_gather")

# An all-gather by loads from the peers: one producer has many readers.
# CHECK-LABEL: PROGRAM all_gather_loads
# CHECK-NEXT: signal launches [] x1
# CHECK-NEXT: signal shared_arrived [8 x 16] x4
# CHECK-NEXT: wait shared_arrived [8 x 16] x4
# CHECK-NEXT: shared: two buffers in turn: every writer waits for its readers' data
show("all_gather_loads")

# Loads from data-dependent places: the waits of readers do not prove which data they have read.
# CHECK-LABEL: PROGRAM scattered_loads
# CHECK-NEXT: signal finished [] x3
# CHECK-NEXT: signal launches [] x1
# CHECK-NEXT: wait finished [] x3
# CHECK-NEXT: signal S_arrived [2 x 16] x4
# CHECK-NEXT: wait S_arrived [2 x 16] x5
# CHECK-NEXT: S: writers wait for a credit: the readers' last launch has finished
show("scattered_loads")

# GEMM + reduce-scatter by staging slots.
# CHECK-LABEL: PROGRAM gemm_reduce_scatter
# CHECK-NEXT: signal launches [] x1
# CHECK-NEXT: signal parts_arrived [16 x 16] x1
# CHECK-NEXT: wait parts_arrived [16 x 16] x3
# CHECK-NEXT: parts: two buffers in turn: every writer waits for its readers' data
show("gemm_reduce_scatter")

# Reduce-scatter by TMA reduce-add into the owner: clearing and completion are counted.
# CHECK-LABEL: PROGRAM gemm_reduce_add
# CHECK-NEXT: signal launches [] x1
# CHECK-NEXT: signal C_cleared [16 x 16] x4
# CHECK-NEXT: wait C_cleared [16 x 16] x1
# CHECK-NEXT: wait C_complete [all] x1
# CHECK-NEXT: signal C_complete [16 x 32] x1
# CHECK-NEXT: C: writers first wait for what the readers write in the same launch
show("gemm_reduce_add")

# Two-shot GEMM + all-reduce.
# CHECK-LABEL: PROGRAM gemm_all_reduce
# CHECK-NEXT: signal launches [] x1
# CHECK-NEXT: signal parts_arrived [16 x 16] x1
# CHECK-NEXT: wait parts_arrived [16 x 16] x3
# CHECK-NEXT: wait C_complete [all] x1
# CHECK-NEXT: signal C_complete [64 x 32] x4
# CHECK-NEXT: C: writers first wait for what the readers write in the same launch
# CHECK-NEXT: parts: two buffers in turn: every writer waits for its readers' data
show("gemm_all_reduce")

# An all-to-all with transpose.
# CHECK-LABEL: PROGRAM all_to_all_transposed
# CHECK-NEXT: signal started [] x3
# CHECK-NEXT: signal launches [] x1
# CHECK-NEXT: wait started [] x1
# CHECK-NEXT: signal R_arrived [1 x 8 x 16] x1
# CHECK-NEXT: wait R_arrived [1 x 8 x 16] x1
# CHECK-NEXT: R: writers wait until the owner's next launch has started
show("all_to_all_transposed")

# A stencil's halo.
# CHECK-LABEL: PROGRAM halo_exchange
# CHECK-NEXT: signal started [] x3
# CHECK-NEXT: wait started [] x1
# CHECK-NEXT: signal halo_arrived [1 x 32] x1
# CHECK-NEXT: wait started [] x1
# CHECK-NEXT: signal halo_arrived [1 x 32] x1
# CHECK-NEXT: wait halo_arrived [1 x 32] x1
# CHECK-NEXT: wait halo_arrived [1 x 32] x1
# CHECK-NEXT: halo: writers wait until the owner's next launch has started
show("halo_exchange")

# Two producers of one granule.
# CHECK-LABEL: PROGRAM two_producers
# CHECK-NEXT: signal finished [] x3
# CHECK-NEXT: signal launches [] x1
# CHECK-NEXT: wait finished [] x1
# CHECK-NEXT: signal S_arrived [4 x 32] x2
# CHECK-NEXT: wait S_arrived [4 x 32] x2
# CHECK-NEXT: S: writers wait for a credit: the readers' last launch has finished
show("two_producers")

# A reader whose tile spans several writers' tiles.
# CHECK-LABEL: PROGRAM wide_reader
# CHECK-NEXT: signal started [] x3
# CHECK-NEXT: signal launches [] x1
# CHECK-NEXT: wait started [] x1
# CHECK-NEXT: signal S_arrived [16 x 32] x1
# CHECK-NEXT: wait S_arrived [16 x 32] x1
# CHECK-NEXT: S: writers wait until the owner's next launch has started
show("wide_reader")

# Tails in both axes.
# CHECK-LABEL: PROGRAM reduce_scatter_tails
# CHECK-NEXT: signal launches [] x1
# CHECK-NEXT: signal Y_cleared [8 x 16] x4
# CHECK-NEXT: wait Y_cleared [8 x 16] x4
# CHECK-NEXT: wait Y_complete [all] x1
# CHECK-NEXT: signal Y_complete [12 x 40] x4
# CHECK-NEXT: Y: writers first wait for what the readers write in the same launch
show("reduce_scatter_tails")

# A tensor used twice in a launch.
# CHECK-LABEL: PROGRAM shift_again
# CHECK-NEXT: signal started [] x3
# CHECK-NEXT: signal finished [] x3
# CHECK-NEXT: signal launches [] x1
# CHECK-NEXT: wait finished [] x1
# CHECK-NEXT: signal S_versions_arrived [1 x 8 x 16] x1
# CHECK-NEXT: wait S_versions_arrived [1 x 8 x 16] x1
# CHECK-NEXT: wait started [] x2
# CHECK-NEXT: signal S_arrived [8 x 16] x2
# CHECK-NEXT: signal S_versions_arrived [1 x 8 x 16] x2
# CHECK-NEXT: wait S_arrived [8 x 16] x2
# CHECK-NEXT: wait S_versions_arrived [1 x 8 x 16] x2
# CHECK-NEXT: S: writers wait until the owner's next launch has started
# CHECK-NEXT: S_versions: writers wait for a credit: the readers' last launch has finished
show("shift_again")

# Blocks that iterate over tiles.
# CHECK-LABEL: PROGRAM persistent
# CHECK-NEXT: signal finished [] x3
# CHECK-NEXT: signal launches [] x1
# CHECK-NEXT: wait finished [] x3
# CHECK-NEXT: signal S_arrived [8 x 32] x3
# CHECK-NEXT: wait S_arrived [8 x 32] x3
# CHECK-NEXT: S: writers wait for a credit: the readers' last launch has finished
show("persistent")

# A dynamic size.
# CHECK-LABEL: PROGRAM dynamic_shift
# CHECK-NEXT: signal started [] x3
# CHECK-NEXT: signal launches [] x1
# CHECK-NEXT: wait started [] x1
# CHECK-NEXT: signal S_arrived [8 x 32] x1
# CHECK-NEXT: wait S_arrived [8 x 32] x1
# CHECK-NEXT: S: writers wait until the owner's next launch has started
show("dynamic_shift")
