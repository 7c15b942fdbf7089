"""Step 2: all-gather. Every rank writes its rows to all ranks.

python examples/tutorial/02_all_gather.py
"""

import numpy as np
import tilelang.language as T

import tileweave as tw
from tileweave import language as W

RANKS, ROWS, COLUMNS, BLOCK = 4, 64, 64, 32


@T.prim_func
def all_gather(
    shard: T.Tensor((ROWS, COLUMNS), "float32"),
    gathered: W.Symmetric((RANKS, ROWS, COLUMNS), "float32"),
):
    with T.Kernel(ROWS // BLOCK, RANKS, threads=128) as (block, peer):
        tile = T.alloc_shared((BLOCK, COLUMNS), "float32")
        T.copy(shard[block * BLOCK, 0], tile)
        T.copy(tile, gathered[peer, W.rank(), block * BLOCK, 0])


def main() -> None:
    random = np.random.default_rng(0)
    shards = [random.standard_normal((ROWS, COLUMNS)).astype(np.float32) for _ in range(RANKS)]
    inputs = [{"shard": shard} for shard in shards]
    outputs = tw.simulate(all_gather, world_size=RANKS, inputs=inputs, schedules=10)
    for rank, output in enumerate(outputs):
        assert (output["gathered"] == np.stack(shards)).all()
        print(f"rank {rank} has the rows of all {RANKS} ranks")


if __name__ == "__main__":
    main()
