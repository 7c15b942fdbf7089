"""Step 7: dispatch. Every rank sends its tokens to the ranks of their experts.

python examples/tutorial/07_dispatch.py
"""

import numpy as np
import tilelang.language as T

import tileweave as tw
from tileweave import language as W

RANKS, EXPERTS, TOKENS, HIDDEN = 4, 2, 8, 32  # EXPERTS: of each rank
OUT = EXPERTS, RANKS, TOKENS, HIDDEN


@T.prim_func
def dispatch(
    tokens: T.Tensor((TOKENS, HIDDEN), "float32"),
    expert: T.Tensor((TOKENS,), "int32"),
    row: T.Tensor((TOKENS,), "int32"),
    counts: T.Tensor((RANKS, EXPERTS), "int32"),
    received: T.Tensor((EXPERTS, RANKS), "int32"),
    out: T.Tensor(OUT, "float32"),
):
    with T.Kernel(1 + EXPERTS, threads=32) as block:
        inbox = W.alloc_ragged(EXPERTS, rows=TOKENS, row=HIDDEN)
        token = T.alloc_fragment((HIDDEN,), "float32")
        me = W.rank()
        if block == 0:
            for rank in T.serial(RANKS):
                for e in T.serial(EXPERTS):
                    W.announce(inbox[rank, e, me, 0, 0], counts[rank, e])
            for t in T.serial(TOKENS):
                T.copy(tokens[t, 0], token)
                T.copy(token, inbox[expert[t] // EXPERTS, expert[t] % EXPERTS, me, row[t], 0])
        else:
            e = block - 1
            for source in T.serial(RANKS):
                count = W.announced(inbox[me, e, source, 0, 0])
                received[e, source] = count
                for i in T.serial(count):
                    T.copy(inbox[me, e, source, i, 0], token)
                    T.copy(token, out[e, source, i, 0])


def routing(rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Return a random expert of each token, its row there, and the rows of each expert."""
    expert = rng.integers(0, RANKS * EXPERTS, TOKENS).astype(np.int32)
    row = np.array([np.sum(expert[:t] == expert[t]) for t in range(TOKENS)], np.int32)
    counts = np.bincount(expert, minlength=RANKS * EXPERTS).astype(np.int32)
    return {"expert": expert, "row": row, "counts": counts.reshape(RANKS, EXPERTS)}


def inputs(ranks: int, rng: np.random.Generator) -> list[dict]:
    tokens = rng.standard_normal((ranks, TOKENS, HIDDEN)).astype(np.float32)
    return [{"tokens": x, "out": np.zeros(OUT, np.float32), **routing(rng)} for x in tokens]


def main() -> None:
    given = inputs(RANKS, np.random.default_rng(0))
    outputs = tw.simulate(dispatch, world_size=RANKS, inputs=given, schedules=10)
    for rank, output in enumerate(outputs):
        for e in range(EXPERTS):
            for source, sent in enumerate(given):
                rows = sent["tokens"][sent["expert"] == rank * EXPERTS + e]
                assert (output["out"][e, source, : len(rows)] == rows).all()
        print(f"rank {rank}: its experts receive {output['received'].sum(axis=1)} tokens")

    given[0]["counts"][0, 0] += 1
    try:
        tw.simulate(dispatch, world_size=RANKS, inputs=given)
    except tw.SimulationError as error:
        print(error.kind, "-", error.report.splitlines()[0])


if __name__ == "__main__":
    main()
