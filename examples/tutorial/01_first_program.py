"""Step 1: every rank sends a vector to its right neighbor.

python examples/tutorial/01_first_program.py
"""

import numpy as np
import tilelang.language as T

import tileweave as tw
from tileweave import language as W

RANKS, N = 4, 128


@T.prim_func
def shift(X: T.Tensor((N,), "float32"), Y: T.Tensor((N,), "float32")):
    with T.Kernel(1, threads=N) as _:
        inbox = W.alloc_symmetric((N,), "float32")
        me = W.rank()
        right = (me + 1) % RANKS
        for i in T.Parallel(N):
            inbox[right, i] = X[i]
        for i in T.Parallel(N):
            Y[i] = inbox[me, i]


def main() -> None:
    inputs = [{"X": np.full(N, rank, np.float32)} for rank in range(RANKS)]
    outputs = tw.simulate(shift, world_size=RANKS, inputs=inputs, schedules=20)
    for rank, output in enumerate(outputs):
        left = (rank + RANKS - 1) % RANKS
        assert (output["Y"] == left).all()
        print(f"rank {rank} received {output['Y'][:3]}")


if __name__ == "__main__":
    main()
