"""Cross-entropy of logits whose vocabulary is split over ranks, and its gradient.

Ranks exchange three numbers for each token, and the compiler infers that one counter awaits those
of all ranks; the backward pass needs no exchange.

    python examples/patterns/cross_entropy.py
"""

import numpy as np
import tilelang.language as T

import tileweave as tw
from tileweave import language as W

RANKS = 4
TOKENS, VOCABULARY, BLOCK = 16, 128, 8


def cross_entropy_forward(tokens, share, ranks, block):
    """loss and lse (tokens,): lse - logit of the label, and the log-sum-exp of all logits."""

    @T.prim_func
    def forward(
        logits: T.Tensor((tokens, share), "float32"),
        labels: T.Tensor((tokens,), "int32"),
        loss: T.Tensor((tokens,), "float32"),
        lse: T.Tensor((tokens,), "float32"),
    ):
        with T.Kernel(tokens // block, threads=128) as index:
            parts = W.alloc_symmetric((ranks, 3, tokens), "float32")
            own = T.alloc_shared((3, block), "float32")
            seen = T.alloc_shared((ranks, 3, block), "float32")
            row = T.alloc_fragment((block, share), "float32")
            highest = T.alloc_fragment((block,), "float32")
            total = T.alloc_fragment((block,), "float32")
            target = T.alloc_fragment((block,), "float32")
            me, first = W.rank(), index * block

            T.copy(logits[first, 0], row)
            T.reduce_max(row, highest, dim=1)
            for i, j in T.Parallel(block, share):
                row[i, j] = T.exp(row[i, j] - highest[i])
            T.reduce_sum(row, total, dim=1)
            for i, j in T.Parallel(block, share):
                is_label = me * share + j == labels[first + i]
                row[i, j] = T.if_then_else(is_label, logits[first + i, j], 0.0)
            T.reduce_sum(row, target, dim=1)
            T.copy(highest, own[0, :])
            T.copy(total, own[1, :])
            T.copy(target, own[2, :])

            for step in T.serial(ranks):
                T.copy(own, parts[(me + 1 + step) % ranks, me, 0, first])
            T.copy(parts[me, 0:ranks, 0:3, first : first + block], seen)
            for i in T.Parallel(block):
                highest[i], total[i], target[i] = seen[0, 0, i], 0.0, 0.0
                for source in T.serial(ranks - 1):
                    highest[i] = T.max(highest[i], seen[1 + source, 0, i])
                for source in T.serial(ranks):
                    total[i] += seen[source, 1, i] * T.exp(seen[source, 0, i] - highest[i])
                    target[i] += seen[source, 2, i]
                lse[first + i] = highest[i] + T.log(total[i])
                loss[first + i] = highest[i] + T.log(total[i]) - target[i]

    return forward


def cross_entropy_backward(tokens, share, block):
    """grad (tokens, share): (softmax - 1 at the label) * grad_loss."""

    @T.prim_func
    def backward(
        logits: T.Tensor((tokens, share), "float32"),
        labels: T.Tensor((tokens,), "int32"),
        lse: T.Tensor((tokens,), "float32"),
        grad_loss: T.Tensor((tokens,), "float32"),
        grad: T.Tensor((tokens, share), "float32"),
    ):
        with T.Kernel(tokens // block, threads=128) as index:
            first = index * block
            for i, j in T.Parallel(block, share):
                is_label = W.rank() * share + j == labels[first + i]
                softmax = T.exp(logits[first + i, j] - lse[first + i])
                softmax -= T.if_then_else(is_label, 1.0, 0.0)
                grad[first + i, j] = softmax * grad_loss[first + i]

    return backward


forward = cross_entropy_forward(TOKENS, VOCABULARY // RANKS, RANKS, BLOCK)
backward = cross_entropy_backward(TOKENS, VOCABULARY // RANKS, BLOCK)


@tw.plan
def example(
    p: tw.PlanBuilder,
    logits: T.Tensor((TOKENS, VOCABULARY // RANKS), "float32"),
    labels: T.Tensor((TOKENS,), "int32"),
    grad_loss: T.Tensor((TOKENS,), "float32"),
    loss: T.Tensor((TOKENS,), "float32"),
    lse: T.Tensor((TOKENS,), "float32"),
    grad: T.Tensor((TOKENS, VOCABULARY // RANKS), "float32"),
):
    p.launch(forward, logits, labels, loss, lse)
    p.launch(backward, logits, labels, lse, grad_loss, grad)


def inputs(ranks, rng):
    logits = rng.standard_normal((TOKENS, VOCABULARY)).astype(np.float32)
    labels = rng.integers(0, VOCABULARY, TOKENS).astype(np.int32)
    grad_loss = np.full(TOKENS, 1 / TOKENS, np.float32)
    return [
        {"logits": share, "labels": labels, "grad_loss": grad_loss}
        for share in np.split(logits, ranks, axis=1)
    ]


def reference(inputs):
    logits = np.concatenate([rank["logits"] for rank in inputs], axis=1).astype(np.float64)
    labels, tokens = inputs[0]["labels"], np.arange(len(logits))
    lse = np.log(np.exp(logits).sum(axis=1))
    grad = np.exp(logits - lse[:, None])
    grad[tokens, labels] -= 1
    grad *= inputs[0]["grad_loss"][:, None]
    loss = lse - logits[tokens, labels]
    return [
        {"loss": loss, "lse": lse, "grad": share} for share in np.split(grad, len(inputs), axis=1)
    ]


def main():
    given = inputs(RANKS, np.random.default_rng(0))
    outputs = tw.simulate(example, world_size=RANKS, inputs=given, schedules=3)
    for output, expected in zip(outputs, reference(given), strict=True):
        for name, value in expected.items():
            np.testing.assert_allclose(output[name], value, rtol=1e-4, atol=1e-6)
    print(f"loss and gradient of {TOKENS} tokens are right on {RANKS} ranks")


if __name__ == "__main__":
    main()
