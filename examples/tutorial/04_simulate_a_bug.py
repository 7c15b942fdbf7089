"""Step 4: an all-gather whose signal precedes the data, and the simulator's report of it.

python examples/tutorial/04_simulate_a_bug.py
"""

import numpy as np
import tilelang.language as T

import tileweave as tw
from tileweave import language as W

RANKS, ROWS, COLUMNS = 2, 32, 64


@T.prim_func
def all_gather(
    shard: T.Tensor((ROWS, COLUMNS), "float32"),
    inbox: W.Symmetric((2, RANKS, ROWS, COLUMNS), "float32"),
    flags: W.Symmetric((RANKS,), "uint32"),
    gathered: T.Tensor((RANKS, ROWS, COLUMNS), "float32"),
    epoch: T.int32,
):
    with T.Kernel(RANKS, threads=128) as peer:
        tile = T.alloc_shared((ROWS, COLUMNS), "float32")
        me, half = W.rank(), epoch % 2
        T.copy(shard, tile)
        W.signal(flags[peer, me])
        T.copy(tile, inbox[peer, half, me, 0, 0])
        W.wait_reached(flags[me, peer], T.Cast("uint32", epoch + 1))
        T.copy(inbox[me, half, peer, 0, 0], tile)
        T.copy(tile, gathered[peer, 0, 0])


def inputs(ranks: int, rng: np.random.Generator) -> list[dict]:
    return [
        {
            "shard": rng.standard_normal((ROWS, COLUMNS)).astype(np.float32),
            "flags": np.zeros(ranks, np.uint32),
            "epoch": lambda launch: launch,
        }
        for _ in range(ranks)
    ]


def main() -> None:
    given = inputs(RANKS, np.random.default_rng(0))
    try:
        tw.simulate(all_gather, world_size=RANKS, inputs=given, schedules=20)
        print("20 schedules, no fault")
    except tw.SimulationError as fault:
        print(fault)


if __name__ == "__main__":
    main()
