"""Programs that TileLang's lowering once changed without an error, each against exact results.

    torchrun --nproc-per-node=2 tests/gpu/lowering.py [CHECK ...]

Builtins after an outer loop around T.Pipelined, accumulators that are cleared before such a loop or
inside it, TileLang's own atomic operations on symmetric tensors, and the programs of
tests/simulator/device/miscompiled.py and tests/generated/known.
"""

import argparse
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import tilelang.language as T
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import tileweave as tw
from tests.modules import load_module
from tests.on_gpus import Verdicts, main, parser_of, say
from tests.passes.second_loop import second_loop
from tests.simulator.device import miscompiled
from tileweave import language as W
from tileweave.runtime.executor.compile_ahead import compile_ahead
from tileweave.runtime.kernel.configured import configured
from tileweave.runtime.plans.parameters import Parameter, parameters_of
from tileweave.simulator.memory.values import numpy_dtype

BF16 = torch.bfloat16
KNOWN = [
    file
    for file in sorted((Path(__file__).resolve().parents[1] / "generated/known").glob("*_*.py"))
    if not file.stem.startswith(("__", "rows_of_fragment"))
]
"""Generated programs that were once wrong; those of fragments are refused."""


def small(*shape: int, seed: int) -> torch.Tensor:
    """Return -1, 0 and 1 at random: sums of products of these are exact."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-1, 2, shape, generator=generator).to(BF16).cuda()


def builtin_after_loop(threads: int, what: str, micro: int = 2, rows: int = 128, H: int = 256):
    """Build products of ``micro`` batches; after them each block runs one builtin."""
    ranks = tw.world_size()

    @T.prim_func
    def program(
        x: T.Tensor((micro, rows, H), "bfloat16"),
        w: T.Tensor((H, H), "bfloat16"),
        y: T.Tensor((micro, rows, H), "bfloat16"),
        flags: W.Symmetric((ranks,), "uint32"),
        n: T.Tensor((4,), "uint32"),
        S: W.Symmetric((4,), "uint32"),
    ):
        with T.Kernel(H // 64, threads=threads) as b:
            A = T.alloc_shared((rows, 64), "bfloat16")
            B = T.alloc_shared((64, 64), "bfloat16")
            C = T.alloc_shared((rows, 64), "bfloat16")
            acc = T.alloc_fragment((rows, 64), "float32")
            me = W.rank()
            for u in T.serial(micro):
                T.clear(acc)
                for k in T.Pipelined(H // 64, num_stages=2):
                    T.copy(x[u, 0, k * 64], A)
                    T.copy(w[k * 64, b * 64], B)
                    T.gemm(A, B, acc)
                T.copy(acc, C)
                T.copy(C, y[u, 0, b * 64])
            if what == "signal":
                W.signal(flags[(me + 1) % ranks, me])
            if what == "st":
                W.st(n[0], 7)
            if what == "put":
                W.put_block(n[0], S[(me + 1) % ranks, 0], 4)
                W.signal(flags[(me + 1) % ranks, me])
            if what == "sync":
                W.sync_grid()
                W.red_add(n[1], 1)
            if what == "red_add":
                W.red_add(n[0], 1)

    return program


def fault_of_builtin(threads: int, what: str) -> str:
    """Run the program once; return "" or the values that are wrong."""
    rank, ranks, blocks = tw.rank(), tw.world_size(), 4
    left = (rank - 1) % ranks
    kernel = tw.compile(builtin_after_loop(threads, what))
    x, w = small(2, 128, 256, seed=rank), small(256, 256, seed=9)
    y, n = torch.empty_like(x), torch.arange(4, dtype=torch.int32).cuda() + 10 * rank
    start = n.clone()
    flags, S = tw.symmetric((ranks,), torch.uint32), tw.symmetric((4,), torch.uint32)
    tw.barrier()
    kernel(x, w, y, flags, n.view(torch.uint32), S)
    tw.barrier()
    torch.cuda.synchronize()
    actual: dict[str, Any] = {
        "flag": int(flags.local.view(torch.int32)[left]),
        "n": n.tolist(),
        "S": S.local.view(torch.int32).tolist(),
    }
    expected: dict[str, Any] = {"flag": 0, "n": start.tolist(), "S": [0] * 4}
    if what in ("signal", "put"):
        expected["flag"] = blocks
    if what == "st":
        expected["n"][0] = 7
    if what == "put":
        expected["S"] = [i + 10 * left for i in range(4)]
    if what == "sync":
        expected["n"][1] += blocks * threads
    if what == "red_add":
        expected["n"][0] += blocks * threads
    wrong = [f"{k}={actual[k]}, expected {expected[k]}" for k in actual if actual[k] != expected[k]]
    if not torch.equal(y, (x.float() @ w.float()).to(BF16)):
        wrong.append("y is wrong")
    flags.free(), S.free()
    return "; ".join(wrong)


def check_builtins() -> str:
    """Builtins run once in each thread that they are meant for."""
    cases = [(t, w) for t in (128, 256) for w in ("signal", "st", "put", "sync", "red_add")]
    faults = [(t, w, fault_of_builtin(t, w)) for t, w in cases]
    return "; ".join(f"{w} with {t} threads: {fault}" for t, w, fault in faults if fault)


def mail(threads: int, H: int, micro: int = 2, rows: int = 64):
    """Build a program without explicit synchronization: each product goes to the right neighbor."""
    ranks = tw.world_size()

    @T.prim_func
    def program(
        x: T.Tensor((micro, rows, H), "bfloat16"),
        w: T.Tensor((H, H), "bfloat16"),
        y: T.Tensor((micro, rows, H), "bfloat16"),
    ):
        with T.Kernel(H // 64, threads=threads) as b:
            box = W.alloc_symmetric((micro, rows, H), "bfloat16")
            A = T.alloc_shared((rows, 64), "bfloat16")
            B = T.alloc_shared((64, 64), "bfloat16")
            C = T.alloc_shared((rows, 64), "bfloat16")
            acc = T.alloc_fragment((rows, 64), "float32")
            me = W.rank()
            for u in T.serial(micro):
                T.clear(acc)
                for k in T.Pipelined(H // 64, num_stages=2):
                    T.copy(x[u, 0, k * 64], A)
                    T.copy(w[k * 64, b * 64], B)
                    T.gemm(A, B, acc)
                T.copy(acc, C)
                T.copy(C, box[(me + 1) % ranks, u, 0, b * 64])
                T.copy(box[me, u, 0, b * 64], C)
                T.copy(C, y[u, 0, b * 64])

    return program


def check_inferred() -> str:
    """The end of a launch is published, so that a later launch may write again."""
    rank, ranks, faults = tw.rank(), tw.world_size(), []
    for threads, H in ((128, 64), (128, 256), (256, 256)):
        kernel = tw.compile(mail(threads, H))
        w = small(H, H, seed=9)
        for launch in range(20):
            x = small(2, 64, H, seed=100 * launch + rank)
            theirs = small(2, 64, H, seed=100 * launch + (rank - 1) % ranks)
            y = torch.empty_like(x)
            kernel(x, w, y)
            if not torch.equal(y, (theirs.float() @ w.float()).to(BF16)):
                faults.append(f"{threads} threads, H={H}, launch {launch}: y is wrong")
                break
    return "; ".join(faults)


def attention(outer: int, S: int, B: int, threads: int, D: int = 64):
    """Build (q k^T) v, repeated ``outer`` times, with the keys of the left neighbor."""
    ranks, blocks = tw.world_size(), S // B

    @T.prim_func
    def program(
        q: T.Tensor((S, D), "bfloat16"),
        k: T.Tensor((S, D), "bfloat16"),
        v: T.Tensor((S, D), "bfloat16"),
        o: T.Tensor((S, D), "bfloat16"),
    ):
        with T.Kernel(blocks, threads=threads) as bq:
            kk = W.alloc_symmetric((S, D), "bfloat16")
            Q = T.alloc_shared((B, D), "bfloat16")
            K = T.alloc_shared((B, D), "bfloat16")
            V = T.alloc_shared((B, D), "bfloat16")
            F = T.alloc_shared((B, D), "bfloat16")
            s = T.alloc_fragment((B, B), "float32")
            p = T.alloc_fragment((B, B), "bfloat16")
            acc = T.alloc_fragment((B, D), "float32")
            me = W.rank()
            T.copy(q[bq * B, 0], Q)
            T.clear(acc)
            T.copy(k[bq * B, 0], F)
            T.copy(F, kk[(me + 1) % ranks, bq * B, 0])
            for _ in T.serial(outer):
                for j in T.Pipelined(blocks, num_stages=2):
                    T.copy(kk[me, j * B, 0], K)
                    T.copy(v[j * B, 0], V)
                    T.clear(s)
                    T.gemm(Q, K, s, transpose_B=True, policy=T.GemmWarpPolicy.FullRow)
                    T.copy(s, p)
                    T.gemm(p, V, acc, policy=T.GemmWarpPolicy.FullRow)
            T.copy(acc, F)
            T.copy(F, o[bq * B, 0])

    return program


def check_clear() -> str:
    """Accumulators keep their values across an outer loop, and are cleared where the program says.

    Each step adds the same product, so that a lost step shows.
    """
    rank, ranks, faults = tw.rank(), tw.world_size(), []
    for outer, S, B, threads in ((1, 128, 64, 128), (2, 128, 64, 128), (3, 256, 128, 256)):
        kernel = tw.compile(attention(outer, S, B, threads))
        q, v = small(S, 64, seed=rank), small(S, 64, seed=50 + rank)
        k, theirs = small(S, 64, seed=90 + rank), small(S, 64, seed=90 + (rank - 1) % ranks)
        o = torch.empty_like(q)
        kernel(q, k, v, o)
        right = outer * (q.float() @ theirs.float().T) @ v.float()
        if not torch.equal(o, right.to(BF16)):
            share = float((o != right.to(BF16)).float().mean())
            faults.append(f"{outer} steps of {S} rows: {share:.0%} of the elements are wrong")
    return "; ".join(faults)


def tile_sum(dtype: str):
    """Build an element-wise addition of one tile to the sums of all ranks."""
    ranks = tw.world_size()

    @T.prim_func
    def program(x: T.Tensor((32, 64), dtype), S: W.Symmetric((32, 64), dtype)):
        with T.Kernel(1, threads=128):
            tile = T.alloc_shared((32, 64), dtype)
            T.copy(x, tile)
            for r in T.serial(ranks):
                T.atomic_add(S[r, 0, 0], tile)

    return program


def check_atomics() -> str:
    """Additions by T.atomic_add of all ranks reach every rank."""
    faults = []
    for dtype in ("float32", "float16", "bfloat16"):
        # The barriers order the sums: nothing in the program does.
        kernel = tw.compile(tile_sum(dtype), pass_configs={"tileweave.verify": "off"})
        kind = getattr(torch, dtype)
        parts = [small(32, 64, seed=r).to(kind) for r in range(tw.world_size())]
        S = tw.symmetric((32, 64), kind)
        tw.barrier()
        for _ in range(10):
            kernel(parts[tw.rank()], S)
        tw.barrier()
        torch.cuda.synchronize()
        if not torch.equal(S.local, 10 * sum(parts)):
            faults.append(f"{dtype}: sums are wrong")
        S.free()
    return "; ".join(faults)


class Miscompiled(NamedTuple):
    """A program for two ranks, whose result the simulator computes.

    Attributes:
        launches: number of launches, back to back; 1 for a program that synchronizes one launch
            only, or adds to what the last one left.
    """

    make: Callable[[], Any]
    launches: int = 20
    configs: Mapping[str, Any] = MappingProxyType({})


def miscompiled_programs() -> list[Miscompiled]:
    credit, unverified = {"tileweave.reuse": "credit"}, {"tileweave.verify": "off"}
    several = {
        "pipelined_in_a_loop": {}, "past_a_loop": {}, "changes_for_fewer_threads": {},
        "reads_before_warps": credit, "reads_in_conditions": credit, "waits_before_warps": {},
        "sends_before_warps": {}, "reuses_tile_in_waves": {}, "tile_in_a_uniform_branch": {},
        "reads_in_producers": credit, "counts_backward": {}, "small_stages": {},
        "row_of_a_tile": {},
        "words_beside_a_pipeline": {"tileweave.protocol": {"S": "ll"}},
    }  # fmt: skip
    once = {
        "writes_before_warps": {}, "counts_in_a_loop": unverified, "adds_in_two_axes": {},
        "adds_at_the_peer": unverified, "loads_what_threads_stored": unverified,
    }  # fmt: skip
    programs = [
        Miscompiled(getattr(miscompiled, name), launches, configs)
        for launches, table in ((20, several), (1, once))
        for name, configs in table.items()
    ]
    branches = [lambda limit, copy: W.ld(limit), lambda limit, copy: copy]
    programs += [Miscompiled(partial(miscompiled.tile_in_a_branch_on, load)) for load in branches]
    for place in ("bound", "first", "condition"):
        programs.append(Miscompiled(partial(miscompiled.reads_in_bounds, place), configs=credit))
    programs += [Miscompiled(partial(second_loop, stages)) for stages in (2, 3)]
    return programs + [
        Miscompiled(partial(getattr, known, "program"))
        for known in map(load_module, KNOWN)
        if known.RANKS == 2
    ]


SET = {"num": 40, "F": 0}
"""Values of a number of rows, which is equal on all ranks, and of a flag."""


def array_for(p: Parameter, rng: np.random.Generator) -> np.ndarray:
    """Return small numbers, of which sums and products are exact."""
    values = rng.integers(0, 3, p.shape)
    return np.full_like(values, SET.get(p.name, values)).astype(numpy_dtype(p.dtype))


def as_torch(values: np.ndarray, dtype: str) -> torch.Tensor:
    kind = getattr(torch, dtype)
    return torch.from_numpy(values.astype(np.float64)).to(kind).cuda()


def fault_of_launches(program: Miscompiled, seed: int) -> str:
    """Launch the program; return "" or the first result that is not the simulator's."""
    ranks, me = tw.world_size(), tw.rank()
    rng, sleep = np.random.default_rng(seed), np.random.default_rng(me)
    parameters = list(parameters_of(program.make()))
    kernel = tw.compile(program.make(), pass_configs=program.configs)
    given = [
        [{p.name: array_for(p, rng) for p in parameters} for _ in range(ranks)]
        for _ in range(program.launches)
    ]
    launches = []
    for of_ranks in given:
        tensors = {p.name: as_torch(of_ranks[me][p.name], p.dtype) for p in parameters}
        for p in parameters:
            if p.symmetric:
                memory = tw.symmetric(p.shape, getattr(torch, p.dtype))
                memory.local.copy_(tensors[p.name])
                tensors[p.name] = memory
        launches.append(tensors)
    tw.barrier()
    for tensors in launches:
        torch.cuda._sleep(int(sleep.integers(1, 400_000)))
        kernel(*tensors.values())
    tw.barrier()
    torch.cuda.synchronize()
    for number, (of_ranks, tensors) in enumerate(zip(given, launches, strict=True)):
        right = tw.simulate(program.make(), ranks, of_ranks, epochs=1, pass_configs=program.configs)
        for p in parameters:
            actual = tensors[p.name].local if p.symmetric else tensors[p.name]
            if not torch.equal(actual, as_torch(right[me][p.name], p.dtype)):
                return f"launch {number}: {p.name} is wrong"
    return ""


def check_miscompiled() -> str:
    """Programs that passes correct have the simulator's results, in launches back to back."""
    programs, faults = miscompiled_programs(), []
    compile_ahead(configured(str(p.make), p.make(), p.configs) for p in programs)
    for number, program in enumerate(programs):
        if fault := fault_of_launches(program, number):
            faults.append(f"{program.make}: {fault}")
    return "; ".join(faults)


CHECKS: dict[str, Callable[[], str]] = {
    "builtins": check_builtins,
    "inferred": check_inferred,
    "clear": check_clear,
    "atomics": check_atomics,
    "miscompiled": check_miscompiled,
}


def verdicts(options: argparse.Namespace) -> Verdicts:
    for name in options.checks or CHECKS:
        if name == "miscompiled" and tw.world_size() != 2:
            say(f"{name}: not run: its programs are for two ranks")
            continue
        yield name, CHECKS[name]()


if __name__ == "__main__":
    sys.exit(main(verdicts, parser_of(__doc__, CHECKS)))
