"""Count keys in bins that are split over ranks: every rank adds to the bins of all ranks.

A block counts its keys in shared memory, and adds its counts to the owners' bins. The compiler
infers that all additions wait until the owner has cleared the bins, and that the owner waits for
all additions before it reads them.

    python examples/patterns/remote_histogram.py
"""

import numpy as np
import tilelang.language as T

import tileweave as tw
from tileweave import language as W

RANKS = 4
KEYS, BINS, BLOCKS, THREADS = 256, 64, 2, 64  # KEYS: of one rank; BINS: of all ranks


def remote_histogram(keys_per_rank, bins, ranks, blocks, threads):
    own_bins, keys_per_block = bins // ranks, keys_per_rank // blocks

    @T.prim_func
    def program(keys: T.Tensor((keys_per_rank,), "int32"), Y: T.Tensor((own_bins,), "int32")):
        with T.Kernel(blocks, threads=threads) as block:
            totals = W.alloc_symmetric((own_bins,), "int32")
            counts = T.alloc_shared((bins,), "int32")
            me = W.rank()
            for i in T.Parallel(bins):
                counts[i] = 0
            for i in T.Parallel(keys_per_block):
                T.atomic_add(counts[keys[block * keys_per_block + i]], 1)

            if block == 0:
                for i in T.Parallel(own_bins):
                    totals[me, i] = 0
            for step in T.serial(ranks):
                owner = (me + 1 + step) % ranks
                for i in T.Parallel(own_bins):
                    T.atomic_add(totals[owner, i], counts[owner * own_bins + i])
            if block == blocks - 1:
                for i in T.Parallel(own_bins):
                    Y[i] = totals[me, i]

    return program


example = remote_histogram(KEYS, BINS, RANKS, BLOCKS, THREADS)


def inputs(ranks: int, rng: np.random.Generator) -> list[dict]:
    return [{"keys": rng.integers(0, BINS, KEYS).astype(np.int32)} for _ in range(ranks)]


def reference(inputs: list[dict]) -> list[dict]:
    total = sum(np.bincount(rank_inputs["keys"], minlength=BINS) for rank_inputs in inputs)
    return [{"Y": share.astype(np.int32)} for share in np.split(total, len(inputs))]


def main() -> None:
    given = inputs(RANKS, np.random.default_rng(0))
    outputs = tw.simulate(example, world_size=RANKS, inputs=given, schedules=5)
    for output, expected in zip(outputs, reference(given), strict=True):
        assert (output["Y"] == expected["Y"]).all()
    print(f"{RANKS} ranks counted {RANKS * KEYS} keys in {BINS} bins")


if __name__ == "__main__":
    main()
