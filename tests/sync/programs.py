"""Programs without a word of synchronisation, each with inputs and what must come out.

They serve the simulator's tests, those on GPUs and the mutation tests.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import tilelang.language as T

import tileweave as tw
from tileweave import language as W

F32 = "float32"


@dataclass(frozen=True)
class Case:
    """A program.

    Attributes:
        make: world size -> T.prim_func.
        inputs: (random generator, world size) -> one dict a rank.
        expected: (the inputs) -> one dict a rank, of the tensors to be compared.
        ranks: world sizes for which it is meant.
        resident: blocks that must run at a time, since they wait for each other.
        unread: symmetric parameters that the caller does not look at.
        mutated: the least world size in which every operation orders something.
        sizes: values of a dynamic extent; ``inputs`` takes one as ``size``, or chooses one.
        recorded: whether ``called`` does it as CUDA graphs record it.
    """

    make: Callable[[int], Any]
    inputs: Callable[[np.random.Generator, int], list[dict[str, Any]]]
    expected: Callable[[list[dict[str, Any]]], list[dict[str, np.ndarray]]]
    ranks: tuple[int, ...] = (1, 2, 3, 4, 5)
    tolerance: float = 0.0
    resident: int = 1
    unread: tuple[str, ...] = ()
    mutated: int = 2
    sizes: tuple[int, ...] = ()
    recorded: bool = False

    def called(self, ranks: int) -> tw.Plan:
        """The program as part of its caller's stream, which after each call reads what it finds in
        own symmetric memory."""
        program = self.make(ranks)
        plan = program if isinstance(program, tw.Plan) else tw.Plan.of_program(program)
        symmetric = [p for p in plan.parameters if p.symmetric and p.name not in self.unread]
        found = [replace(p, name=f"{p.name}_found", symmetric=False) for p in symmetric]

        def body(p: tw.PlanBuilder, *args: Any) -> None:
            plan.body(p, *args[: len(plan.parameters)])
            given = dict(zip([*plan.parameters, *found], args, strict=True))
            for mine, copy in zip(symmetric, found, strict=True):
                p.copy(given[copy], given[mine][p.rank])

        parameters = [*plan.parameters, *found]
        kind = Recorded if self.recorded else tw.Plan
        return kind(plan.name, parameters, body, plan.loc, plan.pass_configs)


class Recorded(tw.Plan):
    """A plan whose steps are those that CUDA graphs record."""

    def trace(self, *arguments: Any, **_: Any) -> list:
        return super().trace(*arguments, recorded=True)


CASES: dict[str, Case] = {}


def case(**more):
    """Register the class ``like``: its functions are the case's."""

    def add(like):
        CASES[like.__name__] = Case(like.make, like.inputs, like.expected, **more)
        return like

    return add


def integers(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Small whole numbers, which float32 adds without rounding."""
    return rng.integers(-8, 8, shape).astype(np.float32)


@case()
class ring_shift:
    """Put to the right neighbour, then read what the left one put."""

    M, N, b = 16, 32, 8

    @staticmethod
    def make(ranks):
        M, N, b = ring_shift.M, ring_shift.N, ring_shift.b

        @T.prim_func
        def program(
            X: T.Tensor((M, N), F32), S: W.Symmetric((M, N), F32), Y: T.Tensor((M, N), F32)
        ):
            with T.Kernel(M // b, threads=32) as row:
                tile = T.alloc_shared((b, N), F32)
                T.copy(X[row * b, 0], tile)
                T.copy(tile, S[(W.rank() + 1) % ranks, row * b, 0])
                T.copy(S[W.rank(), row * b, 0], tile)
                T.copy(tile, Y[row * b, 0])

        return program

    @staticmethod
    def inputs(rng, ranks):
        return [{"X": integers(rng, ring_shift.M, ring_shift.N)} for _ in range(ranks)]

    @staticmethod
    def expected(inputs):
        return [{"Y": inputs[r - 1]["X"]} for r in range(len(inputs))]


@case()
class all_gather_loads:
    """Everyone publishes its rows in own memory and loads the others' from theirs."""

    m, N, b = 8, 32, 8

    @staticmethod
    def make(ranks):
        m, N = all_gather_loads.m, all_gather_loads.N

        @T.prim_func
        def program(X: T.Tensor((m, N), F32), Y: T.Tensor((ranks * m, N), F32)):
            with T.Kernel(2, threads=32) as half:
                shared = W.alloc_symmetric((m, N), F32)
                tile = T.alloc_shared((m, N // 2), F32)
                me = W.rank()
                T.copy(X[0, half * (N // 2)], tile)
                T.copy(tile, shared[me, 0, half * (N // 2)])
                for step in T.serial(ranks):
                    source = (me + step) % ranks
                    T.copy(shared[source, 0, half * (N // 2)], tile)
                    T.copy(tile, Y[source * m, half * (N // 2)])

        return program

    @staticmethod
    def inputs(rng, ranks):
        return [{"X": integers(rng, all_gather_loads.m, all_gather_loads.N)} for _ in range(ranks)]

    @staticmethod
    def expected(inputs):
        return [{"Y": np.concatenate([i["X"] for i in inputs])} for _ in inputs]


def gemm_inputs(m, n, k):
    def inputs(rng, ranks):
        return [{"A": integers(rng, m * ranks, k), "B": integers(rng, n, k)} for _ in range(ranks)]

    return inputs


def total_of(inputs):
    return sum(i["A"] @ i["B"].T for i in inputs)


@case()
class gemm_reduce_scatter:
    """Tiles go to their owners' staging memory; each owner sums its own."""

    m, N, K, b = 16, 32, 16, 16

    @staticmethod
    def make(ranks):
        m, N, K, b = (getattr(gemm_reduce_scatter, n) for n in "mNKb")
        tiles = m // b * (N // b)

        @T.prim_func
        def program(
            A: T.Tensor((m * ranks, K), F32), B: T.Tensor((N, K), F32), C: T.Tensor((m, N), F32)
        ):
            with T.Kernel(tiles * ranks, threads=32) as block:
                parts = W.alloc_symmetric((m * ranks, N), F32)
                A_tile = T.alloc_shared((b, K), F32)
                B_tile = T.alloc_shared((b, K), F32)
                C_tile = T.alloc_shared((b, b), F32)
                total = T.alloc_fragment((b, b), F32)
                me = W.rank()
                owner, tile = W.swizzle_ranks(block, tiles, me, ranks)
                row, column = tile // (N // b), tile % (N // b)
                T.clear(total)
                for k in T.Pipelined(1, num_stages=1):
                    T.copy(A[owner * m + row * b, k * K], A_tile)
                    T.copy(B[column * b, k * K], B_tile)
                    T.gemm(A_tile, B_tile, total, transpose_B=True)
                if owner != me:
                    T.copy(total, C_tile)
                    T.copy(C_tile, parts[owner, me * m + row * b, column * b])
                else:
                    for step in T.serial(ranks - 1):
                        source = (me + 1 + step) % ranks
                        T.copy(parts[me, source * m + row * b, column * b], C_tile)
                        for i, j in T.Parallel(b, b):
                            total[i, j] += C_tile[i, j]
                    T.copy(total, C[row * b, column * b])

        return program

    inputs = staticmethod(gemm_inputs(16, 32, 16))

    @staticmethod
    def expected(inputs):
        m = gemm_reduce_scatter.m
        total = total_of(inputs)
        return [{"C": total[r * m : (r + 1) * m]} for r in range(len(inputs))]


@case()
class gemm_reduce_add:
    """The same by additions into the owner's memory, which the owner clears first."""

    m, N, K, b = 16, 32, 16, 16

    @staticmethod
    def make(ranks):
        m, N, K, b = (getattr(gemm_reduce_add, n) for n in "mNKb")
        tiles = m // b * (N // b)

        @T.prim_func
        def program(
            A: T.Tensor((m * ranks, K), F32), B: T.Tensor((N, K), F32), C: W.Symmetric((m, N), F32)
        ):
            with T.Kernel(tiles * ranks, threads=32) as block:
                A_tile = T.alloc_shared((b, K), F32)
                B_tile = T.alloc_shared((b, K), F32)
                C_tile = T.alloc_shared((b, b), F32)
                total = T.alloc_fragment((b, b), F32)
                me = W.rank()
                owner, tile = W.swizzle_ranks(block, tiles, me, ranks)
                row, column = tile // (N // b), tile % (N // b)
                if block < tiles:
                    T.clear(C_tile)
                    T.copy(C_tile, C[me, block // (N // b) * b, block % (N // b) * b])
                T.clear(total)
                for k in T.Pipelined(1, num_stages=1):
                    T.copy(A[owner * m + row * b, k * K], A_tile)
                    T.copy(B[column * b, k * K], B_tile)
                    T.gemm(A_tile, B_tile, total, transpose_B=True)
                T.copy(total, C_tile)
                T.atomic_add(C[owner, row * b, column * b], C_tile, use_tma=True)

        return program

    inputs = staticmethod(gemm_inputs(16, 32, 16))

    @staticmethod
    def expected(inputs):
        return gemm_reduce_scatter.expected(inputs)


@case()
class gemm_all_reduce:
    """Two phases in one kernel: partial tiles to their owners, sums to everyone."""

    m, N, K, b = 16, 32, 16, 16

    @staticmethod
    def make(ranks):
        m, N, K, b = (getattr(gemm_all_reduce, n) for n in "mNKb")
        tiles = m // b * (N // b)

        @T.prim_func
        def program(
            A: T.Tensor((m * ranks, K), F32),
            B: T.Tensor((N, K), F32),
            C: W.Symmetric((m * ranks, N), F32),
        ):
            with T.Kernel(tiles * ranks, threads=32) as block:
                parts = W.alloc_symmetric((m * ranks, N), F32)
                A_tile = T.alloc_shared((b, K), F32)
                B_tile = T.alloc_shared((b, K), F32)
                C_tile = T.alloc_shared((b, b), F32)
                total = T.alloc_fragment((b, b), F32)
                me = W.rank()
                owner, tile = W.swizzle_ranks(block, tiles, me, ranks)
                row, column = tile // (N // b), tile % (N // b)
                T.clear(total)
                for k in T.Pipelined(1, num_stages=1):
                    T.copy(A[owner * m + row * b, k * K], A_tile)
                    T.copy(B[column * b, k * K], B_tile)
                    T.gemm(A_tile, B_tile, total, transpose_B=True)
                if owner != me:
                    T.copy(total, C_tile)
                    T.copy(C_tile, parts[owner, me * m + row * b, column * b])
                else:
                    for step in T.serial(ranks - 1):
                        source = (me + 1 + step) % ranks
                        T.copy(parts[me, source * m + row * b, column * b], C_tile)
                        for i, j in T.Parallel(b, b):
                            total[i, j] += C_tile[i, j]
                    T.copy(total, C_tile)
                    for step in T.serial(ranks):
                        T.copy(C_tile, C[(me + 1 + step) % ranks, me * m + row * b, column * b])

        return program

    inputs = staticmethod(gemm_inputs(16, 32, 16))

    @staticmethod
    def expected(inputs):
        return [{"C": total_of(inputs)} for _ in inputs]


@case()
class all_to_all_transposed:
    """Rank r gets everyone's r-th column block, transposed."""

    m, n = 16, 8

    @staticmethod
    def make(ranks):
        m, n = all_to_all_transposed.m, all_to_all_transposed.n

        @T.prim_func
        def program(
            X: T.Tensor((m, n * ranks), F32), R: W.Symmetric((ranks, n, m), F32),
            Y: T.Tensor((n, m * ranks), F32),
        ):  # fmt: skip
            with T.Kernel(ranks, threads=32) as block:
                tile = T.alloc_shared((m, n), F32)
                turned = T.alloc_shared((n, m), F32)
                me = W.rank()
                to = (me + 1 + block) % ranks
                T.copy(X[0, to * n], tile)
                for i, j in T.Parallel(n, m):
                    turned[i, j] = tile[j, i]
                T.copy(turned, R[to, me, 0, 0])
                source = (me + ranks - 1 - block) % ranks
                T.copy(R[me, source, 0, 0], turned)
                T.copy(turned, Y[0, source * m])

        return program

    @staticmethod
    def inputs(rng, ranks):
        shape = all_to_all_transposed.m, all_to_all_transposed.n * ranks
        return [{"X": integers(rng, *shape)} for _ in range(ranks)]

    @staticmethod
    def expected(inputs):
        n = all_to_all_transposed.n
        return [
            {"Y": np.concatenate([i["X"][:, r * n : (r + 1) * n].T for i in inputs], axis=1)}
            for r in range(len(inputs))
        ]


@case(unread=("halo",))
class halo_exchange:
    """A three-point stencil over rows that are split between ranks; the ends see zeros."""

    m, N = 8, 32

    @staticmethod
    def make(ranks):
        m, N = halo_exchange.m, halo_exchange.N

        @T.prim_func
        def program(
            X: T.Tensor((m, N), F32), halo: W.Symmetric((2, N), F32), Y: T.Tensor((m, N), F32)
        ):
            with T.Kernel(1, threads=32) as _:
                rows = T.alloc_shared((m + 2, N), F32)
                me = W.rank()
                T.clear(rows)
                T.copy(X, rows[1 : m + 1, 0:N])
                if me > 0:
                    T.copy(rows[1:2, 0:N], halo[me - 1, 1:2, 0:N])
                if me < ranks - 1:
                    T.copy(rows[m : m + 1, 0:N], halo[me + 1, 0:1, 0:N])
                if me > 0:
                    T.copy(halo[me, 0:1, 0:N], rows[0:1, 0:N])
                if me < ranks - 1:
                    T.copy(halo[me, 1:2, 0:N], rows[m + 1 : m + 2, 0:N])
                for i, j in T.Parallel(m, N):
                    Y[i, j] = rows[i, j] + rows[i + 1, j] + rows[i + 2, j]

        return program

    @staticmethod
    def inputs(rng, ranks):
        return [{"X": integers(rng, halo_exchange.m, halo_exchange.N)} for _ in range(ranks)]

    @staticmethod
    def expected(inputs):
        m = halo_exchange.m
        zeros = np.zeros((1, halo_exchange.N), np.float32)
        X = np.concatenate([zeros, *(i["X"] for i in inputs), zeros])
        Y = X[:-2] + X[1:-1] + X[2:]
        return [{"Y": Y[r * m : (r + 1) * m]} for r in range(len(inputs))]


@case()
class two_producers:
    """Two blocks bring the halves of a granule that one block reads whole, and another brings
    several granules."""

    m, N = 8, 32

    @staticmethod
    def make(ranks):
        m, N = two_producers.m, two_producers.N

        @T.prim_func
        def program(X: T.Tensor((m, N), F32), Y: T.Tensor((m, N), F32)):
            with T.Kernel(3, threads=32) as block:
                S = W.alloc_symmetric((m, N), F32)
                tile = T.alloc_shared((4, N // 2), F32)
                whole = T.alloc_shared((4, N), F32)
                right = (W.rank() + 1) % ranks
                if block < 2:
                    for part in T.serial(m // 4):
                        T.copy(X[part * 4, block * (N // 2)], tile)
                        T.copy(tile, S[right, part * 4, block * (N // 2)])
                else:
                    for part in T.serial(m // 4):
                        T.copy(S[W.rank(), part * 4, 0], whole)
                        T.copy(whole, Y[part * 4, 0])

        return program

    @staticmethod
    def inputs(rng, ranks):
        return [{"X": integers(rng, two_producers.m, two_producers.N)} for _ in range(ranks)]

    @staticmethod
    def expected(inputs):
        return ring_shift.expected(inputs)


@case()
class wide_reader:
    """A tile that is read spans several tiles that are written; tails in both axes."""

    M, N = 20, 40

    @staticmethod
    def make(ranks):
        M, N = wide_reader.M, wide_reader.N

        @T.prim_func
        def program(
            X: T.Tensor((M, N), F32), S: W.Symmetric((M, N), F32), Y: T.Tensor((M, N), F32)
        ):
            with T.Kernel(T.ceildiv(N, 16), T.ceildiv(M, 8), threads=32) as (bx, by):
                tile = T.alloc_shared((8, 16), F32)
                wide = T.alloc_shared((16, 32), F32)
                T.copy(X[by * 8, bx * 16], tile)
                T.copy(tile, S[(W.rank() + 1) % ranks, by * 8, bx * 16])
                if (bx % 2 == 1 or bx == 2) and (by % 2 == 1 or by == 2):
                    row, column = by // 2 * 16, bx // 2 * 32
                    T.copy(S[W.rank(), row, column], wide)
                    T.copy(wide, Y[row, column])

        return program

    @staticmethod
    def inputs(rng, ranks):
        return [{"X": integers(rng, wide_reader.M, wide_reader.N)} for _ in range(ranks)]

    @staticmethod
    def expected(inputs):
        return ring_shift.expected(inputs)


@case(resident=2)
class persistent:
    """Two blocks walk over all tiles of the exchange."""

    M, N, b = 40, 32, 8

    @staticmethod
    def make(ranks):
        M, N, b = persistent.M, persistent.N, persistent.b
        tiles = M // b

        @T.prim_func
        def program(X: T.Tensor((M, N), F32), Y: T.Tensor((M, N), F32)):
            with T.Kernel(2, threads=32) as block:
                S = W.alloc_symmetric((M, N), F32)
                tile = T.alloc_shared((b, N), F32)
                for turn in T.serial(T.ceildiv(tiles, 2)):
                    row = turn * 2 + block
                    if row < tiles:
                        T.copy(X[row * b, 0], tile)
                        T.copy(tile, S[(W.rank() + 1) % ranks, row * b, 0])
                for turn in T.serial(T.ceildiv(tiles, 2)):
                    row = turn * 2 + 1 - block
                    if row < tiles:
                        T.copy(S[W.rank(), row * b, 0], tile)
                        T.copy(tile, Y[row * b, 0])

        return program

    @staticmethod
    def inputs(rng, ranks):
        return [{"X": integers(rng, persistent.M, persistent.N)} for _ in range(ranks)]

    @staticmethod
    def expected(inputs):
        return ring_shift.expected(inputs)


@case(resident=4)
class persistent_reduce_scatter:
    """Four blocks walk over all tiles of a GEMM + reduce-scatter."""

    m, N, K, b = 16, 48, 32, 16

    @staticmethod
    def make(ranks):
        m, N, K, b = (getattr(persistent_reduce_scatter, n) for n in "mNKb")
        tiles = m // b * (N // b)

        @T.prim_func
        def program(
            A: T.Tensor((m * ranks, K), F32), B: T.Tensor((N, K), F32), C: T.Tensor((m, N), F32)
        ):
            with T.Kernel(4, threads=32) as block:
                parts = W.alloc_symmetric((m * ranks, N), F32)
                A_tile = T.alloc_shared((b, b), F32)
                B_tile = T.alloc_shared((b, b), F32)
                C_tile = T.alloc_shared((b, b), F32)
                total = T.alloc_fragment((b, b), F32)
                me = W.rank()
                for turn in T.serial(T.ceildiv(tiles * ranks, 4)):
                    number = turn * 4 + block
                    if number < tiles * ranks:
                        owner, tile = W.swizzle_ranks(number, tiles, me, ranks)
                        row, column = tile // (N // b), tile % (N // b)
                        T.clear(total)
                        for k in T.Pipelined(K // b, num_stages=2):
                            T.copy(A[owner * m + row * b, k * b], A_tile)
                            T.copy(B[column * b, k * b], B_tile)
                            T.gemm(A_tile, B_tile, total, transpose_B=True)
                        if owner != me:
                            T.copy(total, C_tile)
                            T.copy(C_tile, parts[owner, me * m + row * b, column * b])
                        else:
                            for step in T.serial(ranks - 1):
                                source = (me + 1 + step) % ranks
                                T.copy(parts[me, source * m + row * b, column * b], C_tile)
                                for i, j in T.Parallel(b, b):
                                    total[i, j] += C_tile[i, j]
                            T.copy(total, C[row * b, column * b])

        return program

    inputs = staticmethod(gemm_inputs(16, 48, 32))

    @staticmethod
    def expected(inputs):
        m = persistent_reduce_scatter.m
        total = total_of(inputs)
        return [{"C": total[r * m : (r + 1) * m]} for r in range(len(inputs))]


@case()
class all_gather_gemm:
    """Copy engines gather the rows of all ranks beside one kernel that multiplies them."""

    m, n, K, b = 16, 16, 32, 16

    @staticmethod
    def make(ranks):
        m, n, K, b = (getattr(all_gather_gemm, name) for name in "mnKb")

        @T.prim_func
        def gemm(
            B: T.Tensor((n, K), F32),
            gathered: W.Symmetric((ranks * m, K), F32),
            C: T.Tensor((ranks * m, n), F32),
        ):
            with T.Kernel(ranks, threads=32) as block:
                A_tile = T.alloc_shared((b, b), F32)
                B_tile = T.alloc_shared((b, b), F32)
                total = T.alloc_fragment((b, b), F32)
                me = W.rank()
                source = (me + ranks - block) % ranks
                T.clear(total)
                for k in T.Pipelined(K // b, num_stages=2):
                    T.copy(gathered[me, source * m, k * b], A_tile)
                    T.copy(B[0, k * b], B_tile)
                    T.gemm(A_tile, B_tile, total, transpose_B=True)
                T.copy(total, C[source * m, 0])

        @tw.plan
        def plan(
            p: tw.PlanBuilder,
            A: T.Tensor((m, K), F32),
            B: T.Tensor((n, K), F32),
            gathered: W.Symmetric((ranks * m, K), F32),
            C: T.Tensor((ranks * m, n), F32),
        ):
            rows = slice(p.rank * m, (p.rank + 1) * m)
            for peer in p.peers():
                p.copy(gathered[peer, rows], A, stream="copies")
            p.copy(gathered[p.rank, rows], A)
            p.launch(gemm, B, gathered, C)

        return plan

    @staticmethod
    def inputs(rng, ranks):
        m, n, K = all_gather_gemm.m, all_gather_gemm.n, all_gather_gemm.K
        return [{"A": integers(rng, m, K), "B": integers(rng, n, K)} for _ in range(ranks)]

    @staticmethod
    def expected(inputs):
        A = np.concatenate([i["A"] for i in inputs])
        return [{"C": A @ i["B"].T} for i in inputs]


@case(resident=3, unread=("products", "parts"), mutated=3)
class copied_reduce_scatter:
    """Copy engines carry partial sums to their owners, while one kernel computes more of them and
    adds up what has come. Blocks walk over the tiles; some tiles lie half behind the end."""

    m, n, K, b = 24, 16, 32, 16

    @staticmethod
    def make(ranks):
        m, n, K, b = (getattr(copied_reduce_scatter, name) for name in "mnKb")
        rows, half = -(-m // b), b // 2

        @T.prim_func
        def gemm(
            A: T.Tensor((ranks, m, K), F32),
            B: T.Tensor((n, K), F32),
            products: W.Symmetric((ranks, m, n), F32),
            parts: W.Symmetric((ranks, m, n), F32),
            C: T.Tensor((m, n), F32),
        ):
            with T.Kernel(2, threads=32) as block:
                A_tile = T.alloc_shared((b, b), F32)
                B_tile = T.alloc_shared((n, b), F32)
                C_tile = T.alloc_shared((half, n), F32)
                total = T.alloc_fragment((b, n), F32)
                me = W.rank()
                for turn in T.serial(T.ceildiv(ranks * rows, 2)):
                    number = turn * 2 + block
                    if number < ranks * rows:
                        owner, row = W.swizzle_ranks(number, rows, me, ranks)
                        T.clear(total)
                        for k in T.Pipelined(K // b, num_stages=2):
                            T.copy(A[owner, row * b, k * b], A_tile)
                            T.copy(B[0, k * b], B_tile)
                            T.gemm(A_tile, B_tile, total, transpose_B=True)
                        if owner != me:
                            for first in T.unroll(0, b, half):
                                T.copy(total[first : first + half, :], C_tile)
                                T.copy(C_tile, products[me, owner, row * b + first, 0])
                        else:
                            for step in T.serial(ranks - 1):
                                for first in T.unroll(0, b, half):
                                    source = (me + 1 + step) % ranks
                                    T.copy(parts[me, source, row * b + first, 0], C_tile)
                                    for i, j in T.Parallel(half, n):
                                        total[first + i, j] += C_tile[i, j]
                            T.copy(total, C[row * b, 0])

        @tw.plan
        def plan(
            p: tw.PlanBuilder,
            A: T.Tensor((ranks, m, K), F32),
            B: T.Tensor((n, K), F32),
            products: W.Symmetric((ranks, m, n), F32),
            parts: W.Symmetric((ranks, m, n), F32),
            C: T.Tensor((m, n), F32),
        ):
            p.launch(gemm, A, B, products, parts, C)
            for peer in p.peers():
                p.copy(parts[peer, p.rank], products[p.rank, peer], stream="copies")

        return plan

    @staticmethod
    def inputs(rng, ranks):
        m, n, K, _ = (getattr(copied_reduce_scatter, name) for name in "mnKb")
        return [{"A": integers(rng, ranks, m, K), "B": integers(rng, n, K)} for _ in range(ranks)]

    @staticmethod
    def expected(inputs):
        total = sum(i["A"] @ i["B"].T for i in inputs)
        return [{"C": total[rank]} for rank in range(len(inputs))]


@case(resident=3, unread=("products", "parts"), mutated=3, recorded=True)
class recorded_reduce_scatter(copied_reduce_scatter):
    """Kernels wait instead of streams."""


@case()
class fetched_by_copies:
    """Each rank's copy engines fetch what the others compute, from their memory, half by half."""

    m, N, b = 16, 32, 4

    @staticmethod
    def make(ranks):
        m, N, b = (getattr(fetched_by_copies, name) for name in "mNb")

        @T.prim_func
        def double(X: T.Tensor((m, N), F32), S: W.Symmetric((m, N), F32)):
            with T.Kernel(m // b, threads=32) as row:
                for i, j in T.Parallel(b, N):
                    S[W.rank(), row * b + i, j] = X[row * b + i, j] * T.float32(2)

        @tw.plan
        def plan(
            p: tw.PlanBuilder,
            X: T.Tensor((m, N), F32),
            S: W.Symmetric((m, N), F32),
            Y: T.Tensor((ranks, m, N), F32),
        ):
            p.launch(double, X, S)
            p.copy(Y[p.rank], S[p.rank])
            for peer in p.peers():
                for half in (slice(0, m // 2), slice(m // 2, m)):
                    p.copy(Y[peer, half], S[peer, half], stream="copies")

        return plan

    @staticmethod
    def inputs(rng, ranks):
        return [{"X": integers(rng, fetched_by_copies.m, fetched_by_copies.N)}
                for _ in range(ranks)]  # fmt: skip

    @staticmethod
    def expected(inputs):
        Y = np.stack([i["X"] * 2 for i in inputs])
        return [{"Y": Y} for _ in inputs]


@case(mutated=3)
class packed_gather:
    """Copy engines gather the rows of all ranks; tiles of them are read, as many and from where as
    other tensors say."""

    m, N, b, tiles = 12, 16, 4, 6

    @staticmethod
    def make(ranks):
        m, N, b, tiles = (getattr(packed_gather, name) for name in ("m", "N", "b", "tiles"))

        @T.prim_func
        def pick(
            first: T.Tensor((3,), "int32"),
            rows: T.Tensor((tiles,), "int32"),
            gathered: W.Symmetric((ranks, m, N), F32),
            Y: T.Tensor((tiles, b, N), F32),
        ):
            with T.Kernel(2, threads=32) as block:
                tile = T.alloc_shared((b, N), F32)
                me, begin = W.rank(), first[block]
                for step in T.Pipelined(first[block + 1] - begin, num_stages=2):
                    owner, row = rows[begin + step] // m, rows[begin + step] % m
                    T.copy(gathered[me, owner, row, 0], tile)
                    T.copy(tile, Y[begin + step, 0, 0])

        @tw.plan
        def plan(
            p: tw.PlanBuilder,
            X: T.Tensor((m, N), F32),
            first: T.Tensor((3,), "int32"),
            rows: T.Tensor((tiles,), "int32"),
            gathered: W.Symmetric((ranks, m, N), F32),
            Y: T.Tensor((tiles, b, N), F32),
        ):
            for peer in p.peers():
                p.copy(gathered[peer, p.rank], X, stream="copies")
            p.copy(gathered[p.rank, p.rank], X)
            p.launch(pick, first, rows, gathered, Y)

        return plan

    @staticmethod
    def inputs(rng, ranks):
        m, N, b, tiles = (getattr(packed_gather, name) for name in ("m", "N", "b", "tiles"))
        # Nobody reads what the rank to the left has.
        owners = [(r + rng.integers(0, 2, tiles)) % ranks for r in range(ranks)]
        return [
            {
                "X": integers(rng, m, N),
                "first": np.array([0, rng.integers(0, tiles + 1), tiles], np.int32),
                "rows": (o * m + rng.integers(0, m - b + 1, tiles)).astype(np.int32),
            }
            for o in owners
        ]

    @staticmethod
    def expected(inputs):
        gathered = np.stack([i["X"] for i in inputs])
        rows = gathered.reshape(-1, packed_gather.N)
        tile = np.arange(packed_gather.b)
        return [{"Y": rows[i["rows"][:, None] + tile], "gathered": gathered} for i in inputs]


@case(resident=4)
class scattered_loads:
    """Everyone publishes its rows in own memory, then loads those that a tensor names from whoever
    has them, if another says so."""

    m, N, b, count = 8, 16, 2, 5

    @staticmethod
    def make(ranks):
        m, N, b, count = (getattr(scattered_loads, name) for name in ("m", "N", "b", "count"))

        @T.prim_func
        def program(
            X: T.Tensor((m, N), F32),
            owners: T.Tensor((m // b, count), "int32"),
            rows: T.Tensor((m // b, count), "int32"),
            Y: T.Tensor((m // b, count, N), F32),
        ):
            with T.Kernel(m // b, threads=32) as block:
                S = W.alloc_symmetric((m, N), F32)
                tile = T.alloc_shared((b, N), F32)
                row = T.alloc_shared((1, N), F32)
                T.copy(X[block * b, 0], tile)
                T.copy(tile, S[W.rank(), block * b, 0])
                for step in T.serial(count):
                    owner = owners[block, step]
                    if owner >= 0:
                        T.copy(S[owner, rows[block, step], 0], row)
                    else:
                        T.clear(row)
                    T.copy(row, Y[block, step, 0])

        return program

    @staticmethod
    def inputs(rng, ranks):
        m, N, b, count = (getattr(scattered_loads, name) for name in ("m", "N", "b", "count"))
        return [
            {
                "X": integers(rng, m, N),
                "owners": rng.integers(-1, ranks, (m // b, count)).astype(np.int32),
                "rows": rng.integers(0, m, (m // b, count)).astype(np.int32),
            }
            for _ in range(ranks)
        ]

    @staticmethod
    def expected(inputs):
        X = np.stack([i["X"] for i in inputs])
        return [
            {"Y": np.where(i["owners"][..., None] < 0, 0, X[i["owners"], i["rows"]])}
            for i in inputs
        ]


@case()
class two_rounds:
    """Two shifts in one launch, through two halves of one tensor and then through another."""

    m, N = 8, 32

    @staticmethod
    def make(ranks):
        m, N = two_rounds.m, two_rounds.N

        @T.prim_func
        def program(X: T.Tensor((m, N), F32), S: W.Symmetric((2, m, N), F32),
                    Y: T.Tensor((m, N), F32)):  # fmt: skip
            with T.Kernel(2, threads=32) as half:
                last = W.alloc_symmetric((m, N), F32)
                tile = T.alloc_shared((m, N // 2), F32)
                column = half * (N // 2)
                right = (W.rank() + 1) % ranks
                T.copy(X[0, column], tile)
                for turn in T.serial(2):
                    T.copy(tile, S[right, turn, 0, column])
                    T.copy(S[W.rank(), turn, 0, column], tile)
                T.copy(tile, last[right, 0, column])
                T.copy(last[W.rank(), 0, column], tile)
                T.copy(tile, Y[0, column])

        return program

    @staticmethod
    def inputs(rng, ranks):
        return [{"X": integers(rng, two_rounds.m, two_rounds.N)} for _ in range(ranks)]

    @staticmethod
    def expected(inputs):
        return [{"Y": inputs[(r - 3) % len(inputs)]["X"]} for r in range(len(inputs))]


@case()
class reduce_scatter_tails:
    """Additions by the TMA into memory that its owner clears; tails in both axes."""

    m, N, b = 12, 40, 16

    @staticmethod
    def make(ranks):
        m, N, b = (getattr(reduce_scatter_tails, n) for n in "mNb")

        @T.prim_func
        def program(X: T.Tensor((ranks, m, N), F32), Y: W.Symmetric((m, N), F32)):
            with T.Kernel(T.ceildiv(N, b), T.ceildiv(m, 8), threads=32) as (bx, by):
                tile = T.alloc_shared((8, b), F32)
                T.clear(tile)
                T.copy(tile, Y[W.rank(), by * 8, bx * b])
                for step in T.serial(ranks):
                    owner = (W.rank() + 1 + step) % ranks
                    T.copy(X[owner, by * 8 : by * 8 + 8, bx * b : bx * b + b], tile)
                    T.atomic_add(Y[owner, by * 8, bx * b], tile, use_tma=True)

        return program

    @staticmethod
    def inputs(rng, ranks):
        m, N = reduce_scatter_tails.m, reduce_scatter_tails.N
        return [{"X": integers(rng, ranks, m, N)} for _ in range(ranks)]

    @staticmethod
    def expected(inputs):
        return [{"Y": total} for total in sum(i["X"] for i in inputs)]


@case()
class reduce_scatter_bulk:
    """The same by rows, with ``W.bulk_reduce``."""

    m, N = 6, 32

    @staticmethod
    def make(ranks):
        m, N = reduce_scatter_bulk.m, reduce_scatter_bulk.N

        @T.prim_func
        def program(X: T.Tensor((ranks, m, N), F32), Y: W.Symmetric((m, N), F32)):
            with T.Kernel(m, threads=32) as row:
                tile = T.alloc_shared((N,), F32)
                me = W.rank()
                for i in T.Parallel(N):
                    Y[me, row, i] = 0.0
                for step in T.serial(ranks):
                    owner = (me + 1 + step) % ranks
                    T.copy(X[owner, row, 0:N], tile)
                    W.bulk_reduce(Y[owner, row, 0], tile, N)
                    W.bulk_commit()
                    W.bulk_wait(0, read=True)

        return program

    @staticmethod
    def inputs(rng, ranks):
        m, N = reduce_scatter_bulk.m, reduce_scatter_bulk.N
        return [{"X": integers(rng, ranks, m, N)} for _ in range(ranks)]

    @staticmethod
    def expected(inputs):
        return reduce_scatter_tails.expected(inputs)


@case()
class own_in_place:
    """Blocks of a grid of three axes load the others' rows from them, and the own ones in place."""

    m, N, b = 16, 32, 8

    @staticmethod
    def make(ranks):
        m, N, b = (getattr(own_in_place, n) for n in "mNb")

        @T.prim_func
        def program(X: T.Tensor((m, N), F32), Y: T.Tensor((ranks * m, N), F32)):
            with T.Kernel(2, m // b, ranks, threads=32) as (bx, by, bz):
                shared = W.alloc_symmetric((m, N), F32)
                tile = T.alloc_shared((b, N // 2), F32)
                me = W.rank()
                row, column = by * b, bx * (N // 2)
                source = (me + bz) % ranks
                if source == me:
                    T.copy(X[row, column], tile)
                    T.copy(tile, shared[me, row, column])
                else:
                    T.copy(shared[source, row, column], tile)
                T.copy(tile, Y[source * m + row, column])

        return program

    @staticmethod
    def inputs(rng, ranks):
        return [{"X": integers(rng, own_in_place.m, own_in_place.N)} for _ in range(ranks)]

    @staticmethod
    def expected(inputs):
        return all_gather_loads.expected(inputs)


@case()
class gather_k:
    """The columns of A are with other ranks, so each round of the pipelined loop waits."""

    M, N, k, b = 16, 16, 32, 16

    @staticmethod
    def make(ranks):
        M, N, k, b = (getattr(gather_k, n) for n in "MNkb")

        @T.prim_func
        def program(
            A: T.Tensor((M, k), F32), B: T.Tensor((N, k * ranks), F32), C: T.Tensor((M, N), F32)
        ):
            with T.Kernel(1, threads=32) as _:
                parts = W.alloc_symmetric((M, k), F32)
                own_tile = T.alloc_shared((M, b), F32)
                A_tile = T.alloc_shared((M, b), F32)
                B_tile = T.alloc_shared((N, b), F32)
                total = T.alloc_fragment((M, N), F32)
                me = W.rank()
                for step in T.serial(k // b):
                    T.copy(A[0, step * b], own_tile)
                    T.copy(own_tile, parts[me, 0, step * b])
                T.clear(total)
                for step in T.Pipelined(k // b * ranks, num_stages=2):
                    source = (me + step // (k // b)) % ranks
                    T.copy(parts[source, 0, step % (k // b) * b], A_tile)
                    T.copy(B[0, source * k + step % (k // b) * b], B_tile)
                    T.gemm(A_tile, B_tile, total, transpose_B=True)
                T.copy(total, C)

        return program

    @staticmethod
    def inputs(rng, ranks):
        M, N, k = gather_k.M, gather_k.N, gather_k.k
        return [{"A": integers(rng, M, k), "B": integers(rng, N, k * ranks)} for _ in range(ranks)]

    @staticmethod
    def expected(inputs):
        A = np.concatenate([i["A"] for i in inputs], axis=1)
        return [{"C": A @ i["B"].T} for i in inputs]


@case(unread=("S",))
class uneven_rounds:
    """Each tile is added up in none to two rounds of none or two, as the rank and the block say;
    nobody writes one that is read in no round."""

    blocks, b, N = 6, 4, 32

    @staticmethod
    def rounds(rank, block):
        return (rank + block) % 3, (rank + block) % 2 * 2

    @staticmethod
    def make(ranks):
        blocks, b, N = (getattr(uneven_rounds, n) for n in ("blocks", "b", "N"))
        rounds = uneven_rounds.rounds
        shape = blocks * b, N

        @T.prim_func
        def program(X: T.Tensor(shape, F32), S: W.Symmetric(shape, F32), Y: T.Tensor(shape, F32)):
            with T.Kernel(blocks, threads=32) as block:
                tile = T.alloc_shared((b, N), F32)
                total = T.alloc_fragment((b, N), F32)
                me, right = W.rank(), (W.rank() + 1) % ranks
                if rounds(right, block)[0] * rounds(right, block)[1] > 0:
                    T.copy(X[block * b, 0], tile)
                    T.copy(tile, S[right, block * b, 0])
                T.clear(total)
                for _ in T.serial(rounds(me, block)[0]):
                    for _ in T.serial(rounds(me, block)[1]):
                        T.copy(S[me, block * b, 0], tile)
                        for i, j in T.Parallel(b, N):
                            total[i, j] += tile[i, j]
                T.copy(total, Y[block * b, 0])

        return program

    @staticmethod
    def inputs(rng, ranks):
        return [{"X": integers(rng, uneven_rounds.blocks * uneven_rounds.b, uneven_rounds.N)}
                for _ in range(ranks)]  # fmt: skip

    @staticmethod
    def expected(inputs):
        out = []
        for r in range(len(inputs)):
            few, many = uneven_rounds.rounds(r, np.arange(uneven_rounds.blocks))
            times = np.repeat(few * many, uneven_rounds.b)[:, None]
            out.append({"Y": times * inputs[r - 1]["X"]})
        return out


@case()
class elementwise:
    """Each thread stores to the right neighbour and loads what the left one stored."""

    M, N = 8, 32

    @staticmethod
    def make(ranks):
        M, N = elementwise.M, elementwise.N

        @T.prim_func
        def program(
            X: T.Tensor((M, N), F32), S: W.Symmetric((M, N), F32), Y: T.Tensor((M, N), F32)
        ):
            with T.Kernel(M // 4, threads=32) as block:
                right = (W.rank() + 1) % ranks
                for i, j in T.Parallel(4, N):
                    S[right, block * 4 + i, j] = X[block * 4 + i, j]
                for i, j in T.Parallel(4, N):
                    Y[block * 4 + i, j] = S[W.rank(), block * 4 + i, j]

        return program

    @staticmethod
    def inputs(rng, ranks):
        return [{"X": integers(rng, elementwise.M, elementwise.N)} for _ in range(ranks)]

    @staticmethod
    def expected(inputs):
        return ring_shift.expected(inputs)


@case()
class data_decides:
    """Conditions and loops that depend on what the left neighbour has put."""

    N = 8

    @staticmethod
    def make(ranks):
        N = data_decides.N

        @T.prim_func
        def program(
            X: T.Tensor((N,), "int32"), S: W.Symmetric((N,), "int32"), Y: T.Tensor((N,), "int32")
        ):
            with T.Kernel(1, threads=32):
                me, i = W.rank(), T.get_thread_binding()
                T.copy(X, S[(me + 1) % ranks, 0])
                if i < N:
                    Y[i] = 0
                    if S[me, i] % 2 == 0:
                        Y[i] = -1
                    for step in T.serial(S[me, N - 1 - i]):
                        Y[i] += step

        return program

    @staticmethod
    def inputs(rng, ranks):
        return [{"X": rng.integers(0, 5, data_decides.N).astype(np.int32)} for _ in range(ranks)]

    @staticmethod
    def expected(inputs):
        sent = [inputs[r - 1]["X"] for r in range(len(inputs))]
        return [{"Y": s % 2 - 1 + s[::-1] * (s[::-1] - 1) // 2} for s in sent]


@case(mutated=3)
class put_and_get:
    """Rows go to the right neighbour by ``W.put_block``; the next one gets them from there."""

    M, N = 4, 32

    @staticmethod
    def make(ranks):
        M, N = put_and_get.M, put_and_get.N

        @T.prim_func
        def program(
            X: T.Tensor((M, N), F32), S: W.Symmetric((M, N), F32), Y: T.Tensor((M, N), F32)
        ):
            with T.Kernel(M, threads=32) as row:
                W.put_block(X[row, 0], S[(W.rank() + 1) % ranks, row, 0], N)
                W.get_block(S[(W.rank() + ranks - 1) % ranks, row, 0], Y[row, 0], N)

        return program

    @staticmethod
    def inputs(rng, ranks):
        return [{"X": integers(rng, put_and_get.M, put_and_get.N)} for _ in range(ranks)]

    @staticmethod
    def expected(inputs):
        return [{"Y": inputs[r - 2 if len(inputs) > 1 else 0]["X"]} for r in range(len(inputs))]


@case()
class bulk_transfers:
    """Rows go to the right neighbour by ``W.bulk_store`` and come in by ``W.bulk_load``."""

    M, N = 4, 32

    @staticmethod
    def make(ranks):
        M, N = bulk_transfers.M, bulk_transfers.N

        @T.prim_func
        def program(
            X: T.Tensor((M, N), F32), S: W.Symmetric((M, N), F32), Y: T.Tensor((M, N), F32)
        ):
            with T.Kernel(M, threads=32) as row:
                tile = T.alloc_shared((N,), F32)
                full = T.alloc_barrier(32)
                T.copy(X[row, 0:N], tile)
                W.bulk_store(S[(W.rank() + 1) % ranks, row, 0], tile, N)
                W.bulk_commit()
                W.bulk_wait(0, read=True)
                W.bulk_load(tile, S[W.rank(), row, 0], N, full[0])
                T.mbarrier_arrive(full[0])
                T.mbarrier_wait_parity(full[0], 0)
                T.copy(tile, Y[row, 0:N])

        return program

    @staticmethod
    def inputs(rng, ranks):
        return [{"X": integers(rng, bulk_transfers.M, bulk_transfers.N)} for _ in range(ranks)]

    @staticmethod
    def expected(inputs):
        return ring_shift.expected(inputs)


@case()
class two_kernels:
    """A plan of two shifts through the same tensor, with a kernel of no rank between them."""

    @staticmethod
    def make(ranks):
        M, N = ring_shift.M, ring_shift.N
        shift, again = ring_shift.make(ranks), ring_shift.make(ranks)

        @T.prim_func
        def double(X: T.Tensor((M, N), F32), Y: T.Tensor((M, N), F32)):
            with T.Kernel(M, threads=32) as row:
                for i in T.Parallel(N):
                    Y[row, i] = 2.0 * X[row, i]

        @tw.plan
        def plan(
            p: tw.PlanBuilder,
            X: T.Tensor((M, N), F32),
            S: W.Symmetric((M, N), F32),
            once: T.Tensor((M, N), F32),
            doubled: T.Tensor((M, N), F32),
            Y: T.Tensor((M, N), F32),
        ):
            p.launch(shift, X, S, once)
            p.launch(double, once, doubled)
            p.launch(again, doubled, S, Y)

        return plan

    inputs = ring_shift.inputs

    @staticmethod
    def expected(inputs):
        return [{"Y": 2 * inputs[(r - 2) % len(inputs)]["X"]} for r in range(len(inputs))]


SIZES = (20, 3, 32)


def rows_for(rng, ranks, size=None):
    """As many rows as ``size`` says, or a random number of them."""
    size = int(rng.choice(SIZES)) if size is None else size
    return [{"X": integers(rng, size, 32)} for _ in range(ranks)]


@case(sizes=SIZES)
class dynamic_shift:
    """Put as many rows as there are to the right neighbour, then read what the left one put."""

    N, b = 32, 8

    @staticmethod
    def make(ranks):
        M, N, b = T.dynamic("M"), dynamic_shift.N, dynamic_shift.b

        @T.prim_func
        def program(
            X: T.Tensor((M, N), F32), S: W.Symmetric((M, N), F32), Y: T.Tensor((M, N), F32)
        ):
            with T.Kernel(T.ceildiv(M, b), threads=32) as row:
                tile = T.alloc_shared((b, N), F32)
                T.copy(X[row * b, 0], tile)
                T.copy(tile, S[(W.rank() + 1) % ranks, row * b, 0])
                T.copy(S[W.rank(), row * b, 0], tile)
                T.copy(tile, Y[row * b, 0])

        return program

    inputs = staticmethod(rows_for)

    @staticmethod
    def expected(inputs):
        return ring_shift.expected(inputs)


@case(sizes=SIZES)
class dynamic_gather:
    """Everyone publishes as many rows as there are and loads the others', tile by tile."""

    N, b = 32, 8

    @staticmethod
    def make(ranks):
        m, N, b = T.dynamic("m"), dynamic_gather.N, dynamic_gather.b

        @T.prim_func
        def program(X: T.Tensor((m, N), F32), Y: T.Tensor((ranks, m, N), F32)):
            with T.Kernel(T.ceildiv(m, b), threads=32) as row:
                shared = W.alloc_symmetric((m, N), F32)
                tile = T.alloc_shared((b, N), F32)
                me = W.rank()
                T.copy(X[row * b, 0], tile)
                T.copy(tile, shared[me, row * b, 0])
                for step in T.serial(ranks):
                    source = (me + step) % ranks
                    T.copy(shared[source, row * b, 0], tile)
                    T.copy(tile, Y[source, row * b, 0])

        return program

    inputs = staticmethod(rows_for)

    @staticmethod
    def expected(inputs):
        return [{"Y": np.stack([i["X"] for i in inputs])} for _ in inputs]


@case(sizes=SIZES)
class dynamic_copies:
    """A plan whose copy engines bring as many rows as there are; a kernel takes them from there."""

    N, b = 32, 8

    @staticmethod
    def make(ranks):
        m, N, b = T.dynamic("m"), dynamic_copies.N, dynamic_copies.b

        @T.prim_func
        def program(rows: W.Symmetric((ranks, m, N), F32), Y: T.Tensor((ranks, m, N), F32)):
            with T.Kernel(T.ceildiv(m, b), ranks, threads=32) as (row, step):
                tile = T.alloc_shared((b, N), F32)
                source = (W.rank() + step) % ranks
                T.copy(rows[W.rank(), source, row * b, 0], tile)
                T.copy(tile, Y[source, row * b, 0])

        @tw.plan
        def plan(
            p: tw.PlanBuilder,
            X: T.Tensor((m, N), F32),
            rows: W.Symmetric((ranks, m, N), F32),
            Y: T.Tensor((ranks, m, N), F32),
        ):
            p.copy(rows[p.rank, p.rank], X)
            for peer in p.peers():
                p.copy(rows[peer, p.rank], X, stream="copies")
            p.launch(program, rows, Y)

        return plan

    inputs = staticmethod(rows_for)

    @staticmethod
    def expected(inputs):
        return dynamic_gather.expected(inputs)


@case(mutated=4)
class shift_again:
    """Three shifts in one launch through the same memory, which the caller reads behind it."""

    m, N = 8, 32

    @staticmethod
    def make(ranks):
        m, N = shift_again.m, shift_again.N

        @T.prim_func
        def program(
            X: T.Tensor((m, N), F32), S: W.Symmetric((m, N), F32), Y: T.Tensor((m, N), F32)
        ):
            with T.Kernel(2, threads=32) as half:
                tile = T.alloc_shared((m, N // 2), F32)
                column = half * (N // 2)
                me, right = W.rank(), (W.rank() + 1) % ranks
                T.copy(X[0, column], tile)
                T.copy(tile, S[right, 0, column])
                T.copy(S[me, 0, column], tile)
                for _ in T.serial(2):
                    T.copy(tile, S[right, 0, column])
                    T.copy(S[me, 0, column], tile)
                T.copy(tile, Y[0, column])

        return program

    @staticmethod
    def inputs(rng, ranks):
        return [{"X": integers(rng, shift_again.m, shift_again.N)} for _ in range(ranks)]

    @staticmethod
    def expected(inputs):
        shifted = [inputs[(r - 3) % len(inputs)]["X"] for r in range(len(inputs))]
        return [{"Y": x, "S": x} for x in shifted]


@case()
class ring_all_reduce:
    """Reduce-scatter and all-gather around the ring through memory for one chunk."""

    m, N = 4, 32

    @staticmethod
    def make(ranks):
        m, N = ring_all_reduce.m, ring_all_reduce.N

        @T.prim_func
        def program(X: T.Tensor((ranks * m, N), F32), Y: T.Tensor((ranks * m, N), F32)):
            with T.Kernel(2, threads=32) as half:
                S = W.alloc_symmetric((m, N), F32)
                got = T.alloc_shared((m, N // 2), F32)
                own = T.alloc_shared((m, N // 2), F32)
                column = half * (N // 2)
                me, right = W.rank(), (W.rank() + 1) % ranks
                T.copy(X[me * m, column], got)
                for step in T.serial(ranks - 1):
                    chunk = (me + 2 * ranks - 1 - step) % ranks
                    T.copy(got, S[right, 0, column])
                    T.copy(S[me, 0, column], got)
                    T.copy(X[chunk * m, column], own)
                    for i, j in T.Parallel(m, N // 2):
                        got[i, j] += own[i, j]
                T.copy(got, Y[right * m, column])
                for step in T.serial(ranks - 1):
                    chunk = (me + ranks - step) % ranks
                    T.copy(got, S[right, 0, column])
                    T.copy(S[me, 0, column], got)
                    T.copy(got, Y[chunk * m, column])

        return program

    @staticmethod
    def inputs(rng, ranks):
        m, N = ring_all_reduce.m, ring_all_reduce.N
        return [{"X": integers(rng, ranks * m, N)} for _ in range(ranks)]

    @staticmethod
    def expected(inputs):
        return [{"Y": sum(i["X"] for i in inputs)} for _ in inputs]


@case()
class ring_gemm_reduce_scatter:
    """Each partial product is added to what comes from the left and goes on to the right."""

    m, n, k, b = 16, 32, 16, 16

    @staticmethod
    def make(ranks):
        m, n, k, b = (getattr(ring_gemm_reduce_scatter, name) for name in "mnkb")

        @T.prim_func
        def program(
            A: T.Tensor((ranks * m, k), F32), B: T.Tensor((n, k), F32), C: T.Tensor((m, n), F32)
        ):
            with T.Kernel(n // b, threads=32) as block:
                S = W.alloc_symmetric((m, n), F32)
                A_tile = T.alloc_shared((m, k), F32)
                B_tile = T.alloc_shared((b, k), F32)
                tile = T.alloc_shared((m, b), F32)
                total = T.alloc_fragment((m, b), F32)
                me = W.rank()
                T.copy(B[block * b, 0], B_tile)
                for step in T.serial(ranks):
                    owner = (me + 2 * ranks - 1 - step) % ranks
                    T.copy(A[owner * m, 0], A_tile)
                    T.clear(total)
                    T.gemm(A_tile, B_tile, total, transpose_B=True)
                    if step > 0:
                        T.copy(S[me, 0, block * b], tile)
                        for i, j in T.Parallel(m, b):
                            total[i, j] += tile[i, j]
                    if step < ranks - 1:
                        T.copy(total, tile)
                        T.copy(tile, S[(me + 1) % ranks, 0, block * b])
                T.copy(total, C[0, block * b])

        return program

    @staticmethod
    def inputs(rng, ranks):
        m, n, k = (getattr(ring_gemm_reduce_scatter, name) for name in "mnk")
        return [{"A": integers(rng, ranks * m, k), "B": integers(rng, n, k)} for _ in range(ranks)]

    @staticmethod
    def expected(inputs):
        m = ring_gemm_reduce_scatter.m
        total = total_of(inputs)
        return [{"C": total[r * m : (r + 1) * m]} for r in range(len(inputs))]


@case(ranks=(2, 3, 4, 5))
class ring_in_place:
    """The same through all chunks of what the caller reads behind it: each but one is written by
    both halves."""

    N = 32

    @staticmethod
    def make(ranks):
        N = ring_in_place.N

        @T.prim_func
        def program(
            X: T.Tensor((ranks, N), F32), S: W.Symmetric((ranks, N), F32),
            Y: T.Tensor((ranks, N), F32),
        ):  # fmt: skip
            with T.Kernel(1, threads=32) as _:
                got = T.alloc_shared((N,), F32)
                own = T.alloc_shared((N,), F32)
                me, right = W.rank(), (W.rank() + 1) % ranks
                T.copy(X[me, 0:N], got)
                for step in T.serial(ranks - 1):
                    chunk = (me + ranks - step) % ranks
                    T.copy(got, S[right, chunk, 0])
                    T.copy(S[me, (chunk + ranks - 1) % ranks, 0], got)
                    T.copy(X[(chunk + ranks - 1) % ranks, 0:N], own)
                    for i in T.Parallel(N):
                        got[i] += own[i]
                T.copy(got, Y[right, 0:N])
                for step in T.serial(ranks - 1):
                    chunk = (right + ranks - step) % ranks
                    T.copy(got, S[right, chunk, 0])
                    T.copy(S[me, (chunk + ranks - 1) % ranks, 0], got)
                    T.copy(got, Y[(chunk + ranks - 1) % ranks, 0:N])

        return program

    @staticmethod
    def inputs(rng, ranks):
        return [{"X": integers(rng, ranks, ring_in_place.N)} for _ in range(ranks)]

    @staticmethod
    def expected(inputs):
        ranks, total = len(inputs), sum(i["X"] for i in inputs)
        once = [(r + 1) % ranks == np.arange(ranks)[:, None] for r in range(ranks)]
        return [{"Y": total, "S": total - o * i["X"]} for o, i in zip(once, inputs, strict=True)]


@case()
class add_again:
    """Sums at two owners in turn: cleared, added to by everyone and read, several times."""

    N, turns = 32, 3

    @staticmethod
    def make(ranks):
        N, turns = add_again.N, add_again.turns

        @T.prim_func
        def program(
            X: T.Tensor((turns, N), F32), S: W.Symmetric((2, N), F32), Y: T.Tensor((turns, N), F32)
        ):
            with T.Kernel(1, threads=32) as _:
                tile = T.alloc_shared((N,), F32)
                for turn in T.serial(turns):
                    T.clear(tile)
                    T.copy(tile, S[W.rank(), turn % 2, 0])
                    T.copy(X[turn, 0:N], tile)
                    for step in T.serial(ranks):
                        T.atomic_add(S[(W.rank() + step) % ranks, turn % 2, 0], tile)
                    T.copy(S[W.rank(), turn % 2, 0], Y[turn, 0:N])

        return program

    @staticmethod
    def inputs(rng, ranks):
        return [{"X": integers(rng, add_again.turns, add_again.N)} for _ in range(ranks)]

    @staticmethod
    def expected(inputs):
        total = sum(i["X"] for i in inputs)
        return [{"Y": total, "S": np.stack([total[2], total[1]])} for _ in inputs]


@case(unread=("gathered",))
class walked_in_place:
    """Copy engines gather the others' rows; the own ones are multiplied where they are. Blocks walk
    over the tiles, and what a loop of theirs loads is chosen in it."""

    m, n, K, b = 16, 16, 32, 16

    @staticmethod
    def make(ranks):
        m, n, K, b = (getattr(walked_in_place, name) for name in "mnKb")

        @T.prim_func
        def gemm(
            A: T.Tensor((m, K), F32),
            B: T.Tensor((n, K), F32),
            gathered: W.Symmetric((ranks, m, K), F32),
            C: T.Tensor((ranks, m, n), F32),
        ):
            with T.Kernel(1, threads=32) as _:
                A_tile = T.alloc_shared((b, b), F32)
                B_tile = T.alloc_shared((b, b), F32)
                total = T.alloc_fragment((b, b), F32)
                me = W.rank()
                for turn in T.serial(ranks):
                    source = (me + ranks - turn) % ranks
                    T.clear(total)
                    for k in T.Pipelined(K // b, num_stages=2):
                        if source == me:
                            T.copy(A[0, k * b], A_tile)
                        else:
                            T.copy(gathered[me, source, 0, k * b], A_tile)
                        T.copy(B[0, k * b], B_tile)
                        T.gemm(A_tile, B_tile, total, transpose_B=True)
                    T.copy(total, C[source, 0, 0])

        @tw.plan
        def plan(
            p: tw.PlanBuilder,
            A: T.Tensor((m, K), F32),
            B: T.Tensor((n, K), F32),
            gathered: W.Symmetric((ranks, m, K), F32),
            C: T.Tensor((ranks, m, n), F32),
        ):
            for peer in p.peers():
                p.copy(gathered[peer, p.rank], A, stream="copies")
            p.launch(gemm, A, B, gathered, C)

        return plan

    @staticmethod
    def inputs(rng, ranks):
        m, n, K = walked_in_place.m, walked_in_place.n, walked_in_place.K
        return [{"A": integers(rng, m, K), "B": integers(rng, n, K)} for _ in range(ranks)]

    @staticmethod
    def expected(inputs):
        return [{"C": np.stack([o["A"] @ i["B"].T for o in inputs])} for i in inputs]
