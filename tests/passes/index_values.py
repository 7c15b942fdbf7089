"""Values of index expressions in nested loops."""

import numpy as np
from tvm import tirx

from tileweave.passes.sync.regions.space import IterationSpace, Loop


def in_loops(body, extents):
    """Return ``body`` in a loop for each variable, which has the values below its extent."""
    for variable, extent in extents.items():
        body = tirx.For(variable, 0, extent, tirx.ForKind.SERIAL, body)
    return body


def values_of(expr, extents):
    """Return the values of ``expr`` in all iterations of the loops."""
    loops = [Loop(v, tirx.const(0, "int32"), tirx.const(n, "int32")) for v, n in extents.items()]
    space = IterationSpace(1, loops, {})
    return np.broadcast_to(space.evaluate(expr), space.shape)
