"""Plans whose copies and kernels are ordered, or refused, for any distribution of steps over ranks.

``TILEWEAVE_PLANS=1000`` tests that many random plans instead of a few.
"""

import itertools
import os
import random

import numpy as np
import pytest
import tilelang.language as T

import tileweave as tw
from tileweave import language as W

PLANS = int(os.environ.get("TILEWEAVE_PLANS", 20))
N, F32 = 16, "float32"
ROW, ROWS = T.Tensor((N,), F32), T.Tensor((2, N), F32)
PART, PARTS = W.Symmetric((N,), F32), W.Symmetric((2, N), F32)


@T.prim_func
def read_all(S: W.Symmetric((N,), F32), Y: T.Tensor((N,), F32)):
    with T.Kernel(1, threads=32) as _:
        t = T.alloc_fragment((N,), F32)
        T.copy(S[W.rank(), 0], t)
        T.copy(t, Y)


@T.prim_func
def write_all(X: T.Tensor((N,), F32), S: W.Symmetric((N,), F32)):
    with T.Kernel(2, threads=32) as b:
        t = T.alloc_fragment((N // 2,), F32)
        T.copy(X[b * (N // 2)], t)
        T.copy(t, S[W.rank(), b * (N // 2)])


@T.prim_func
def collect(S: W.Symmetric((2, N), F32), Y: T.Tensor((2, N), F32)):
    with T.Kernel(2, threads=32) as b:
        t = T.alloc_fragment((N,), F32)
        T.copy(S[W.rank(), b, 0], t)
        T.copy(t, Y[b, 0])


def inputs_of(ranks, **more):
    return [{"X": np.arange(N, dtype=np.float32) + 100 * rank, **more} for rank in range(ranks)]


def run(plan, ranks, inputs=None):
    inputs = inputs or inputs_of(ranks)
    return tw.simulate(plan, ranks, inputs, schedules=10, epochs=3, resident_blocks=64)


def refused(plan, ranks, inputs=None):
    with pytest.raises(tw.TileWeaveError) as error:
        run(plan, ranks, inputs)
    return str(error.value)


@tw.plan
def swap(p, X: ROWS, S: PARTS, Y: ROWS):
    for row in range(2):
        p.copy(S[1 - p.rank, row], X[row], stream="push")
    p.launch(collect, S, Y)


def test_peers_write_what_might_be_the_own_rows():
    inputs = [{"X": np.full((2, N), 1 + rank, np.float32)} for rank in range(2)]
    for rank, out in enumerate(run(swap, 2, inputs)):
        assert np.array_equal(out["Y"], inputs[1 - rank]["X"])


@tw.plan
def fetch(p, X: ROW, S: PART, Y: ROW):
    p.launch(write_all, X, S)
    p.copy(Y, S[(p.rank + 1) % p.world_size])


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_pull_of_kernel_results_in_the_launching_stream(ranks):
    inputs = inputs_of(ranks)
    for rank, out in enumerate(run(fetch, ranks, inputs)):
        assert np.array_equal(out["Y"], inputs[(rank + 1) % ranks]["X"])


@tw.plan
def fetch_first(p, X: ROW, S: PART, Y: ROW):
    p.copy(Y, S[(p.rank + 1) % p.world_size])
    p.launch(write_all, X, S)


@tw.plan
def fetch_both(p, X: ROW, S: PART, Q: PART, Y: ROW, Z: ROW):
    peer = (p.rank + 1) % p.world_size
    p.copy(Q[p.rank], X)
    p.launch(write_all, X, S)
    p.copy(Y, S[peer], stream="one")
    p.copy(Z, Q[peer], stream="two")


@tw.plan
def crossing(p, X: ROW, S: W.Symmetric((4, N), F32), Y: ROW):
    """Rank 0 waits in stream b after its steps in stream a, for which rank 1 waits."""
    if p.rank == 0:
        p.copy(S[0, 3], S[1, 2], stream="a")
        p.copy(S[0, 1], S[1, 0], stream="b")
    elif p.rank == 1:
        p.copy(S[1, 0], X)
        p.copy(S[1, 2], S[0, 1], stream="c")
        p.copy(Y, S[0, 3], stream="d")


@T.prim_func
def pass_on(A: W.Symmetric((N,), F32), B: W.Symmetric((N,), F32)):
    with T.Kernel(1, threads=32) as _:
        for i in T.Parallel(N):
            B[W.rank(), i] = A[W.rank(), i]


@tw.plan
def one_for_two(p, X: ROW, S: PART):
    p.copy(S[(p.rank + 1) % p.world_size], X, stream="push")
    p.launch(pass_on, S, S)


@tw.plan
def beside_the_kernel(p, X: ROW, S: PART, Y: ROW, V: ROW):
    p.copy(S[(p.rank + 1) % p.world_size], X, stream="push")
    p.launch(read_all, S, Y)
    p.copy(V, S[p.rank], stream="out")


@tw.plan
def made_and_pushed(p, X: ROW, S: PART, Q: PART, Y: ROW):
    p.launch(write_all, X, S)
    p.copy(Q[(p.rank + 1) % p.world_size], S[p.rank], stream="push")
    p.copy(Y, Q[p.rank], stream="out")


@T.prim_func
def fill(Y: T.Tensor((N,), F32), number: T.int32):
    with T.Kernel(1, threads=32) as _:
        for i in T.Parallel(N):
            Y[i] = T.Cast("float32", number)


@tw.plan
def no_integer(p, Y: ROW):
    p.launch(fill, Y, 1.9)


@tw.plan
def only_at_root(p, X: ROW, S: PARTS, Y: ROWS):
    p.copy(S[0, p.rank % 2], X, stream="push")
    if p.rank == 0:
        p.launch(collect_at_root, S, Y)


@tw.plan
def launched_twice(p, X: ROW, S: PART, Y: ROW, Z: ROW):
    p.copy(S[(p.rank + 1) % p.world_size], X, stream="push")
    p.launch(read_all, S, Y)
    p.launch(read_all, S, Z)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (
            only_at_root,
            "collect_at_root accesses what the plan copies (S), and rank 1 launches it 0 times; "
            "expected once on every rank in every call, or explicit flags and waits",
        ),
        (
            crossing,
            "p.copy waits for itself, through other ranks; expected an order in which each",
        ),
        (
            one_for_two,
            "launch of pass_on: A and B are both S; expected a tensor for each, because each",
        ),
        (
            beside_the_kernel,
            "read_all accesses S, in a plan whose copies read from peers, or what peers write; ",
        ),
        (
            made_and_pushed,
            "p.copy reads Q[2, 0:16], which copies write, in a plan whose copies wait for what a "
            "kernel writes (S); expected two plans, or explicit flags and waits",
        ),
        (no_integer, "launch of fill: argument number is 1.9; expected an integer (int32)"),
        (
            launched_twice,
            "read_all accesses what the plan copies (S), and rank 0 launches it 2 times",
        ),
        (
            fetch_first,
            "p.copy waits for write_all to write S[1, 0:16], which comes after it in the caller's "
            "stream; expected another stream, or the kernel first",
        ),
        (
            fetch_both,
            "p.copy reads Q[0, 0:16], which copies write, in a plan whose copies wait for what a "
            "kernel writes (S); expected two plans, or explicit flags and waits",
        ),
    ],
)
def test_refused(plan, message):
    error = refused(plan, 3, [{}] * 3 if plan is no_integer else None)
    assert message in error and __file__ in error


def exchange_called(name):
    """Return an all-gather kernel with the name of another program."""

    @T.prim_func
    def exchange(X: T.Tensor((N,), F32), S: W.Symmetric((2, N), F32), Y: T.Tensor((2, N), F32)):
        with T.Kernel(2, threads=32) as b:
            t = T.alloc_fragment((N,), F32)
            T.copy(X, t)
            T.copy(t, S[b, W.rank(), 0])
            T.copy(S[W.rank(), b, 0], t)
            T.copy(t, Y[b, 0])

    return exchange.with_attr("global_symbol", name)


def beside_pushes(p, X, S, Y):
    for r in range(2):
        p.copy(S[r, p.rank], X, stream="push")
    p.launch(collect, S, Y)


def beside_pulls(p, X, S, Y):
    p.copy(S[p.rank, p.rank], X)
    p.copy(Y[p.rank], X)
    p.copy(Y[1 - p.rank], S[1 - p.rank, 1 - p.rank], stream="fetch")


@pytest.mark.parametrize(
    ("say", "name"),
    [(beside_pushes, "collect"), (beside_pulls, "begin"), (beside_pulls, "await_copy")],
)
@pytest.mark.parametrize("first", [False, True])
def test_kernels_of_one_name(say, name, first):
    own = exchange_called(name)

    @tw.plan
    def names(p, X: ROW, S: PARTS, Q: PARTS, Y: ROWS, Z: ROWS):
        if first:
            p.launch(own, X, Q, Z)
        say(p, X, S, Y)
        if not first:
            p.launch(own, X, Q, Z)

    inputs = inputs_of(2)
    right = np.stack([i["X"] for i in inputs])
    for out in run(names, 2, inputs):
        assert np.array_equal(out["Y"], right) and np.array_equal(out["Z"], right)


def in_streams(*streams, wait=False):
    kernel = exchange_called("exchange")

    @tw.plan
    def in_streams(p, X: ROW, S: PARTS, Q: PARTS, Y: ROWS, Z: ROWS):
        for stream, given in zip(streams, ((X, S, Y), (X, Q, Z)), strict=True):
            if wait and stream == streams[-1]:
                p.wait_stream(streams[0], stream=stream)
            p.launch(kernel, *given, stream=stream)

    return in_streams


def test_one_kernel_in_consecutive_streams():
    inputs = inputs_of(2)
    for plan in (in_streams("a", "b", wait=True), in_streams("a", "a")):
        for out in run(plan, 2, inputs):
            assert np.array_equal(out["Z"], [i["X"] for i in inputs])


def test_one_kernel_beside_itself():
    assert (
        "exchange in stream 'a' and in stream 'b', whose counters both use; expected one stream, a "
        "p.wait_stream in between, or two kernels" in refused(in_streams("a", "b"), 2)
    )


@tw.plan
def broadcast(p, X: ROW, S: PART, Y: ROW):
    if p.rank == 0:
        for r in range(p.world_size):
            p.copy(S[r], X, stream="push")
    p.launch(read_all, S, Y)


@T.prim_func
def collect_at_root(S: W.Symmetric((2, N), F32), Y: T.Tensor((2, N), F32)):
    with T.Kernel(2, threads=32) as b:
        if W.rank() == 0:
            t = T.alloc_fragment((N,), F32)
            T.copy(S[W.rank(), b, 0], t)
            T.copy(t, Y[b, 0])


@tw.plan
def gather(p, X: ROW, S: PARTS, Y: ROWS):
    p.copy(S[0, p.rank], X, stream="push")
    p.launch(collect_at_root, S, Y)


@tw.plan
def pull(p, X: ROW, S: PART, Y: ROW):
    if p.rank == 0:
        p.copy(S[0], X)
    elif p.rank == 1:
        p.copy(Y, S[0])


@pytest.mark.parametrize("plan", [broadcast, pull])
def test_ranks_that_copy_nothing(plan):
    inputs = inputs_of(3)
    for rank, out in enumerate(run(plan, 3, inputs)):
        if rank == 1 or plan is broadcast:
            assert np.array_equal(out["Y"], inputs[0]["X"])


def test_ranks_that_read_nothing():
    inputs = inputs_of(2)
    assert np.array_equal(run(gather, 2, inputs)[0]["Y"], [i["X"] for i in inputs])


@tw.plan
def push_ring(p, X: ROW, S: W.Symmetric((3, N), F32), Y: T.Tensor((3, N), F32)):
    """Each rank sends its right neighbor what it has received from the left one."""
    right = (p.rank + 1) % 3
    p.copy(S[p.rank, p.rank], X, stream="own")
    p.copy(S[right, p.rank], X, stream="push")
    p.copy(S[right, (p.rank - 1) % 3], S[p.rank, (p.rank - 1) % 3], stream="push")
    for source in range(3):
        p.copy(Y[source], S[p.rank, source], stream="out")


@tw.plan
def push_all(p, X: ROW, S: W.Symmetric((3, N), F32), Y: T.Tensor((3, N), F32)):
    for r in range(3):
        p.copy(S[r, p.rank], X, stream="push")
    p.copy(Y, S[p.rank], stream="out")


@tw.plan
def behind_the_kernel(p, X: ROW, S: PART, Y: ROW, V: ROW):
    p.copy(S[(p.rank + 1) % p.world_size], X, stream="push")
    p.launch(read_all, S, Y)
    p.wait_stream(None, stream="out")
    p.copy(V, S[p.rank], stream="out")


@pytest.mark.parametrize("plan", [push_ring, push_all])
def test_copies_of_own_memory_that_peers_push_into(plan):
    inputs = inputs_of(3)
    for out in run(plan, 3, inputs):
        assert np.array_equal(out["Y"], [i["X"] for i in inputs])


def test_copies_of_own_memory_after_the_kernel_need_nothing_else():
    inputs = inputs_of(3)
    for rank, out in enumerate(run(behind_the_kernel, 3, inputs)):
        assert np.array_equal(out["Y"], inputs[rank - 1]["X"])
        assert np.array_equal(out["V"], inputs[rank - 1]["X"])


@tw.plan
def late(p, X: ROW, S: PART, Y: ROW, warm: T.int32):
    if not warm:
        p.copy(S[(p.rank + 1) % p.world_size], X, stream="push")
        p.launch(read_all, S, Y)


@pytest.mark.parametrize("first", [0, 1])
def test_some_calls_copy_nothing(first):
    inputs = inputs_of(3, warm=lambda epoch: int(epoch % 2 == first))
    for rank, out in enumerate(run(late, 3, inputs)):
        assert np.array_equal(out["Y"], inputs[rank - 1]["X"])


def of_rows(say):
    """Return a plan that has other steps if ``flag`` is 1."""

    @tw.plan
    def of_rows(p, X: ROW, S: PARTS, Y: ROWS, flag: T.int32):
        for r in p.peers():
            p.copy(S[r, p.rank], X, stream="push")
        say(p, X, S, Y, flag)

    return of_rows


def elsewhere(p, X, S, Y, flag):
    p.copy(S[p.rank, p.rank], X, stream="own" if flag else None)
    p.launch(collect, S, Y)


def behind(p, X, S, Y, flag):
    if not flag:
        p.copy(S[p.rank, p.rank], X)
    p.launch(collect, S, Y)
    if flag:
        p.copy(S[p.rank, p.rank], X)


@T.prim_func
def collect_again(S: W.Symmetric((2, N), F32), Y: T.Tensor((2, N), F32)):
    with T.Kernel(2, threads=32) as b:
        for i in T.Parallel(N):
            Y[b, i] = S[W.rank(), b, i]


def no_kernel(p, X, S, Y, flag):
    p.copy(S[p.rank, p.rank], X)
    if not flag:
        p.launch(collect, S, Y)


def other_kernel(p, X, S, Y, flag):
    p.copy(S[p.rank, p.rank], X)
    p.launch(collect_again if flag else collect, S, Y)


@pytest.mark.parametrize(
    ("say", "message"),
    [
        (elsewhere, "collect: the plan's copies are [("),
        (behind, "which comes after it in the caller's stream; expected another stream, or the"),
        (no_kernel, "p.copy writes S[1, 0, 0:16], which nothing reads in this call, unlike in an"),
        (
            other_kernel,
            "collect accesses what the plan copies (S), and rank 0 launches it 0 times; expected "
            "once on every rank in every call, or explicit flags and waits",
        ),
    ],
)
def test_calls_that_differ(say, message):
    assert message in refused(of_rows(say), 2, inputs_of(2, flag=lambda epoch: epoch % 2))


def consumer(rows, height, blocks, backwards):
    """Return a kernel that reads ``rows`` in tiles, several per block."""

    @T.prim_func
    def consume(S: W.Symmetric((rows, N), F32), Y: T.Tensor((rows, N), F32)):
        with T.Kernel(blocks, threads=32) as block:
            tile = T.alloc_fragment((height, N), F32)
            for i in T.serial(rows // height // blocks):
                at = block + i * blocks
                row = rows - height - at * height if backwards else at * height
                T.copy(S[W.rank(), row, 0], tile)
                T.copy(tile, Y[row, 0])

    return consume


def cut(rng, rows, height):
    inner = [row for row in range(height, rows, height) if rng.random() < 0.5]
    ends = [0, *inner, rows]
    return [slice(*ends) for ends in itertools.pairwise(ends)]


def random_pushes(rng, ranks, rows, height):
    """Return the source rank of each rank's rows, by piece; and the copies of each rank with their
    streams, and whether they come after the kernel."""
    sources, said = {}, {rank: [] for rank in range(ranks)}
    common = cut(rng, rows, height)
    pattern = rng.choice(["any", "left", "slots", "one"])
    for owner in range(ranks):
        for n, piece in enumerate(common if rng.random() < 0.7 else cut(rng, rows, height)):
            source = {"any": rng.randrange(ranks), "left": owner - 1, "slots": n, "one": 0}[pattern]
            sources[owner, piece.start, piece.stop] = source = source % ranks
            stream = rng.choice([None, "a", "b"])
            is_late = stream is not None and rng.random() < 0.2
            said[source].append((owner, piece, stream, is_late))
    for copies in said.values():
        rng.shuffle(copies)
    return sources, said


@pytest.mark.parametrize("seed", range(PLANS))
def test_random_pushes(seed):
    rng = random.Random(seed)
    ranks, height = rng.choice([2, 3]), rng.choice([1, 2])
    rows = height * rng.choice([2, 4, 6])
    tiles = rows // height
    blocks = rng.choice([n for n in range(1, tiles + 1) if tiles % n == 0])
    kernel = consumer(rows, height, blocks, rng.random() < 0.5)
    sources, said = random_pushes(rng, ranks, rows, height)
    shape = T.Tensor((rows, N), F32)

    @tw.plan
    def pushes(p, X: shape, S: W.Symmetric((rows, N), F32), Y: shape):
        for late in (False, True):
            for owner, piece, stream, is_late in said[p.rank]:
                if is_late == late:
                    p.copy(S[owner, piece], X[piece], stream=stream)
            if not late:
                p.launch(kernel, S, Y)

    numbers = np.random.default_rng(seed)
    inputs = [{"X": numbers.standard_normal((rows, N), np.float32)} for _ in range(ranks)]
    actual = tw.simulate(pushes, ranks, inputs, schedules=3, epochs=3, resident_blocks=64)
    for (owner, *ends), source in sources.items():
        piece = slice(*ends)
        assert np.array_equal(actual[owner]["Y"][piece], inputs[source]["X"][piece])
