"""Iterations of a loop in which an access never happens are left out of its footprints."""

import numpy as np
import tilelang.language as T

from tileweave import language as W
from tileweave.passes import for_group
from tileweave.passes.ir.group import heap_tensors
from tileweave.passes.sync.regions.accesses import collect_accesses
from tileweave.passes.sync.regions.footprints import access_footprints
from tileweave.passes.sync.regions.schedule import Timestamps

RANKS, N, STEPS, LAST = 2, 32, 100, 3


def test_only_iterations_that_read_stay():
    @T.prim_func
    def program(S: W.Symmetric((LAST, N), "int32"), Y: T.Tensor((LAST, N), "int32")):
        with T.Kernel(2, threads=N):
            for step in T.serial(STEPS):
                if step >= STEPS - LAST:
                    for i in T.Parallel(N):
                        Y[step - (STEPS - LAST), i] = S[W.rank(), step - (STEPS - LAST), i]

    func = for_group(program, RANKS, 1 << 30, ["group"])
    collected = collect_accesses(func, heap_tensors(func))
    (access,) = collected.accesses
    footprints = access_footprints(access, collected, RANKS)
    numbers = [0, *range(STEPS - LAST, STEPS)]
    assert footprints.mask.squeeze().tolist() == [False, True, True, True]
    assert footprints.low[0].squeeze().tolist()[1:] == [0, 1, 2]
    whole = footprints.extended(footprints.mask)
    np.testing.assert_array_equal(np.flatnonzero(whole), numbers[1:])
    np.testing.assert_array_equal(footprints.taken(whole), footprints.mask)
    timestamps = Timestamps([access], collected, RANKS)
    time = timestamps.of_access(footprints, len(access.loops))[0, 0].ravel()
    assert timestamps.iteration_of(time, 0).tolist() == numbers
