"""Atomic additions that TileLang vectorizes: the device level runs them lane by lane."""

import numpy as np
import pytest
import tilelang.language as T

import tileweave as tw
from tests.releases import since
from tileweave import language as W
from tileweave.simulator.memory.values import numpy_dtype

N = 128
INPUTS = [
    {"X": np.arange(N, dtype=np.float32) % 16 + rank, "Y": np.zeros(N, np.float32)}
    for rank in range(2)
]


def adds(operand: str, dtype: str):
    """Add ``operand`` to the memory of the peer, and the sum to ``Y``."""

    @T.prim_func
    def program(
        X: T.Tensor((N,), dtype), S: W.Symmetric((N,), dtype), Y: T.Tensor((N,), "float32")
    ):
        with T.Kernel(1, threads=32):
            me = W.rank()
            peer = (me + 1) % 2
            tx = T.get_thread_binding()
            for i in T.Parallel(N):
                S[me, i] = T.Cast(dtype, 0)
            if operand == "vector":
                for i in T.Parallel(N):
                    T.atomic_add(S[peer, i], X[i] * 2)
            elif operand == "constant":
                for i in T.Parallel(N):
                    T.atomic_add(S[peer, i], T.Cast(dtype, 1))
            else:
                T.atomic_addx2(S[peer, tx * 2], X[tx * 2])
            for i in T.Parallel(N):
                T.atomic_add(Y[i], T.Cast("float32", S[me, i]))

    return program


@since("0.1.14", "adds four bfloat16 by an operation that the simulator does not know")
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("operand", ["vector", "constant", "pointer"])
def test_additions(operand, dtype, arch):
    inputs = [{**i, "X": i["X"].astype(numpy_dtype(dtype))} for i in INPUTS]
    outputs = tw.validate(adds(operand, dtype), 2, inputs, arch, epochs=1)
    for output, peer in zip(outputs, reversed(INPUTS), strict=True):
        right = {"vector": 2 * peer["X"], "constant": np.ones(N), "pointer": peer["X"]}[operand]
        right = np.where(np.arange(N) < 64, right, 0) if operand == "pointer" else right
        np.testing.assert_array_equal(output["Y"], right)
