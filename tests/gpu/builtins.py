"""Effects of the builtins between real GPUs.

    torchrun --nproc-per-node=2 tests/gpu/builtins.py [CHECK ...]

Also with more ranks, with one, and with several ranks on one GPU (in time slices).
"""

import argparse
import operator
import sys
from collections.abc import Iterator
from functools import reduce
from pathlib import Path

import tilelang
import tilelang.language as T
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import tileweave as tw
from tests.on_gpus import Verdicts, main, parser_of
from tileweave import language as W

THREADS = 64
BARRIERS = "tw.barrier() before and after each launch"
COMBINE = {
    "add": operator.add, "min": min, "max": max,
    "and": operator.and_, "or": operator.or_, "xor": operator.xor,
}  # fmt: skip
INTEGERS = {
    "int32": torch.int32,
    "uint32": torch.uint32,
    "int64": torch.int64,
    "uint64": torch.uint64,
}
SIGNED = {torch.uint32: torch.int32, torch.uint64: torch.int64}


def signed(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(SIGNED.get(tensor.dtype, tensor.dtype))


def gather(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors of all ranks, in rank order, on the CPU."""
    if tw.world_size() == 1:
        return [tensor.cpu()]
    parts = [None] * tw.world_size()
    dist.all_gather_object(parts, tensor.cpu())
    return parts


def atomics_program(ranks: int, dtype: str):
    names = list(COMBINE) if "float" not in dtype else ["add"]

    @T.macro
    def apply(index, by_atom, by_red, peer, value):
        """Apply ``names[index:]``: a macro calls itself, because only TileLang 0.1.15 unrolls
        loops over Python lists."""
        if index < len(names):
            getattr(W, f"atom_{names[index]}")(by_atom[peer, index], value, scope="sys")
            getattr(W, f"red_{names[index]}")(
                by_red[peer, index], value, scope="sys", sem="release"
            )
            apply(index + 1, by_atom, by_red, peer, value)

    @T.prim_func
    def atomics(
        values: T.Tensor((THREADS,), dtype),
        by_atom: W.Symmetric((len(names),), dtype),
        by_red: W.Symmetric((len(names),), dtype),
    ):
        with T.Kernel(1, threads=THREADS) as _:
            thread = T.get_thread_binding()
            for peer in T.serial(ranks):
                apply(0, by_atom, by_red, peer, values[thread])

    return atomics, names


def check_atomics() -> Iterator[str]:
    for dtype, torch_dtype in {
        **INTEGERS,
        "float32": torch.float32,
        "float64": torch.float64,
    }.items():
        program, names = atomics_program(tw.world_size(), dtype)
        kernel = tw.compile(program)
        atom, red = (tw.symmetric((len(names),), torch_dtype) for _ in range(2))
        values = torch.randint(1, 1 << 12, (THREADS,), device="cuda").to(
            SIGNED.get(torch_dtype, torch_dtype)
        )
        start = 4660
        for tensor in (atom, red):
            signed(tensor.local).fill_(start)
        tw.barrier()
        kernel(values.view(torch_dtype), atom, red)
        tw.barrier()
        everyone = [int(v) for part in gather(values) for v in part]
        expected = [reduce(COMBINE[name], everyone, start) for name in names]
        for tensor in (atom, red):
            got = [int(v) for v in signed(tensor.local)]
            if got != expected:
                yield f"{dtype} {names}: {got}, expected {expected}"


def pairs_program(dtype: str):
    @T.prim_func
    def pairs(target: W.Symmetric((4,), dtype)):
        with T.Kernel(1, threads=32) as _:
            ones = T.alloc_local((2,), dtype)
            ones[0] = T.Cast(dtype, 1)
            ones[1] = T.Cast(dtype, 2)
            for peer in T.serial(W.world_size()):
                W.red_add(target[peer, 2], ones[T.Ramp(0, 1, 2)], scope="sys")

    return pairs


def check_pairs() -> Iterator[str]:
    for dtype, torch_dtype in (("float16", torch.float16), ("bfloat16", torch.bfloat16)):
        target = tw.symmetric((4,), torch_dtype)
        kernel = tw.compile(pairs_program(dtype))
        tw.barrier()
        kernel(target)
        tw.barrier()
        got, expected = target.local.tolist(), [0, 0, 32 * tw.world_size(), 64 * tw.world_size()]
        if got != expected:
            yield f"{dtype}x2: {got}, expected {expected}"


@T.prim_func
def old_values(
    counter: W.Symmetric((4,), "uint32"),
    tickets: T.Tensor((THREADS,), "uint32"),
    exchanged: T.Tensor((THREADS,), "uint32"),
    won: T.Tensor((THREADS,), "uint32"),
):
    with T.Kernel(1, threads=THREADS) as _:
        thread = T.get_thread_binding()
        number = T.Cast("uint32", W.rank() * THREADS + thread + 1)
        tickets[thread] = W.atom_add(counter[0, 0], 1, scope="sys", sem="acq_rel")
        exchanged[thread] = W.atom_exch(counter[0, 1], number, scope="sys")
        won[thread] = W.atom_cas(counter[0, 2], 0, number, scope="sys")


def check_old_values() -> Iterator[str]:
    counter = tw.symmetric((4,), torch.uint32)
    kernel = tw.compile(old_values)
    tickets, exchanged, won = (
        torch.zeros(THREADS, dtype=torch.uint32, device="cuda") for _ in range(3)
    )
    kernel(counter, tickets, exchanged, won)
    tw.barrier()
    torch.cuda.synchronize()
    tickets, exchanged, won = (
        torch.cat(gather(signed(t))).tolist() for t in (tickets, exchanged, won)
    )
    total = THREADS * tw.world_size()
    final = signed(counter.all[0]).tolist()
    if sorted(tickets) != list(range(total)):
        yield f"atom_add: {sorted(tickets)}"
    if sorted([*exchanged, final[1]]) != list(range(total + 1)):
        yield f"atom_exch: {sorted(exchanged)}, at the end {final[1]}"
    if won.count(0) != 1 or won[final[2] - 1] != 0 or not set(won) <= {0, final[2]}:
        yield f"atom_cas: {won}, at the end {final[2]}"


@T.prim_func
def wide_accesses(
    cells: W.Symmetric((16,), "float32"),
    octets: W.Symmetric((16,), "uint8"),
    out: T.Tensor((4,), "float32"),
    out_bytes: T.Tensor((1,), "uint8"),
    flags: W.Symmetric((1,), "uint64"),
):
    with T.Kernel(1, threads=32) as _:
        me = W.rank()
        right_of_me = (me + 1) % W.world_size()
        if T.get_thread_binding() == 0:
            four = T.alloc_local((4,), "float32")
            for i in T.serial(4):
                four[i] = T.Cast("float32", me * 10 + i)
            W.st(cells[right_of_me, 4], four[T.Ramp(0, 1, 4)], scope="sys")
            W.st(octets[right_of_me, 3], T.Cast("uint8", me + 1), scope="sys")
            W.st(flags[right_of_me, 0], T.uint64(1) << T.uint64(40), scope="sys", sem="release")
            W.wait_eq(flags[me, 0], T.uint64(1) << T.uint64(40))
            four[T.Ramp(0, 1, 4)] = W.ld(cells[me, 4], 4, scope="sys", sem="relaxed")
            for i in T.serial(4):
                out[i] = four[i]
            out_bytes[0] = W.ld(octets[me, 3], scope="sys", sem="volatile")


def check_wide_accesses() -> Iterator[str]:
    cells, bytes_, flags = (
        tw.symmetric((n,), d)
        for n, d in ((16, torch.float32), (16, torch.uint8), (1, torch.uint64))
    )
    kernel = tw.compile(wide_accesses)
    out = torch.full((4,), float("nan"), device="cuda")
    out_bytes = torch.zeros(1, dtype=torch.uint8, device="cuda")
    kernel(cells, bytes_, out, out_bytes, flags)
    torch.cuda.synchronize()
    left = (tw.rank() - 1) % tw.world_size()
    if out.tolist() != [left * 10.0 + i for i in range(4)] or out_bytes.item() != left + 1:
        yield f"{out.tolist()} and {out_bytes.item()} from rank {left}"


@T.prim_func
def relations(flags: W.Symmetric((8,), "int32"), reached: T.Tensor((1,), "int32")):
    with T.Kernel(2, threads=128) as block:
        me = W.rank()
        if block == 0:
            W.wait_eq(flags[me, 0], -5)
            W.wait_ne(flags[me, 1], 0)
            W.wait_gt(flags[me, 2], 6)
            W.wait_ge(flags[me, 3], 7)
            W.wait_lt(flags[me, 4], -6)
            W.wait_le(flags[me, 5], -7)
            W.wait_reached(flags[me, 6], -2147483647)
            if T.get_thread_binding() == 0:
                reached[0] = 1
        else:
            peer = (me + 1) % W.world_size()
            W.signal(flags[peer, 0], -5, op="set")
            W.signal(flags[peer, 1], 1)
            W.signal(flags[peer, 2], 7)
            W.signal(flags[peer, 3], 7, sem="relaxed")
            W.signal(flags[peer, 4], -7)
            W.signal(flags[peer, 5], -7, op="set", sem="relaxed")
            W.signal(flags[peer, 6], 2)


def check_relations() -> Iterator[str]:
    flags = tw.symmetric((8,), torch.int32)
    flags.local[6] = 2147483647
    kernel = tw.compile(relations)
    reached = torch.zeros(1, dtype=torch.int32, device="cuda")
    tw.barrier()
    kernel(flags, reached)
    torch.cuda.synchronize()
    if reached.item() != 1:
        yield "not reached"


BLOCKS = 32


def barrier_program(kind: str, blocks: int, rounds: int):
    """Each block writes its iteration to all peers, passes a barrier and counts missing values."""

    @T.prim_func
    def meet(board: W.Symmetric((2, blocks), "int32"), missing: T.Tensor((1,), "int32")):
        with T.Kernel(blocks, threads=64) as block:
            me = W.rank()
            for r in T.serial(rounds):
                half = r % 2
                if T.get_thread_binding() == 0:
                    for peer in T.serial(W.world_size() if kind != "sync_grid" else 1):
                        target = peer if kind != "sync_grid" else me
                        W.st(board[target, half, (block + r) % blocks], r + 1 + me, scope="sys")
                getattr(W, kind)()
                if T.get_thread_binding() == 0:
                    for other in T.serial(blocks):
                        seen = W.ld(board[me, half, other], scope="sys", sem="relaxed")
                        if seen < r + 1:
                            W.red_add(missing[0], 1)

    return meet


def check_barriers() -> Iterator[str]:
    for kind, blocks, rounds in (
        ("sync_grid", BLOCKS, 500),
        ("sync_ranks", 1, 500),
        ("barrier_blocks", BLOCKS, 500),
    ):
        kernel = tw.compile(barrier_program(kind, blocks, rounds))
        board = tw.symmetric((2, blocks), torch.int32)
        missing = torch.zeros(1, dtype=torch.int32, device="cuda")
        for _ in range(5):
            tw.barrier()
            board.local.zero_()
            tw.barrier()
            kernel(board, missing)
        torch.cuda.synchronize()
        if missing.item():
            yield f"{kind}: {missing.item()} stale reads"


def transfer_program(kind: str):
    n = T.dynamic("n", "int64")
    put = kind.startswith("put")

    @T.prim_func
    def transfer(
        local: T.Tensor((n,), "uint8"),
        remote: W.Symmetric((1 << 20,), "uint8"),
        first: T.int64,
        size: T.int64,
        start: T.int64,
    ):
        with T.Kernel(1, threads=32 if kind.endswith("warp") else 256) as _:
            peer = (W.rank() + 1) % W.world_size()
            if put:
                getattr(W, kind)(
                    local[first], W.unordered(remote[0, start], reason=BARRIERS), size, peer
                )
            else:
                getattr(W, kind)(
                    W.unordered(remote[0, start], reason=BARRIERS), local[first], size, peer
                )

    return transfer


def check_transfers() -> Iterator[str]:
    remote = tw.symmetric((1 << 20,), torch.uint8)
    generator = torch.Generator().manual_seed(7)
    for kind in ("put_block", "put_warp", "get_block", "get_warp"):
        kernel = tw.compile(transfer_program(kind))
        for turn in range(40):
            limit = 40 if turn < 20 else 300000
            size, first, start = (
                int(torch.randint(0, m, (), generator=generator)) for m in (limit, 40, 40)
            )
            noise = torch.Generator(device="cuda").manual_seed(turn * 64 + tw.rank())
            local = torch.randint(
                0, 256, (first + size + 64,), dtype=torch.uint8, device="cuda", generator=noise
            )
            remote.local[: start + size + 64].random_(0, 256, generator=noise)
            before = (local.cpu(), remote.local[: start + size + 64].cpu())
            tw.barrier()
            kernel(local, remote, first, size, start)
            tw.barrier()
            torch.cuda.synchronize()
            ranks, me = tw.world_size(), tw.rank()
            locals_, remotes = gather(before[0]), gather(before[1])
            expected_local, expected_remote = before[0].clone(), before[1].clone()
            if kind.startswith("put"):
                expected_remote[start : start + size] = locals_[(me - 1) % ranks][
                    first : first + size
                ]
            else:
                expected_local[first : first + size] = remotes[(me + 1) % ranks][
                    start : start + size
                ]
            if not (
                torch.equal(local.cpu(), expected_local)
                and torch.equal(remote.local[: start + size + 64].cpu(), expected_remote)
            ):
                yield f"{kind}: size {size} from {first} to {start} is wrong"
            tw.barrier()
            torch.cuda.synchronize()


@T.prim_func
def bulk_reduction(total: W.Symmetric((4096,), "float32"), part: T.Tensor((4096,), "float32")):
    with T.Kernel(1, threads=128) as _:
        tile = T.alloc_shared((4096,), "float32")
        full = T.alloc_barrier(128)
        W.bulk_load(tile, part, 4096, full[0])
        T.mbarrier_arrive(full[0])
        T.mbarrier_wait_parity(full[0], 0)
        for i in T.Parallel(4096):
            tile[i] = tile[i] * 2.0
        W.bulk_reduce(total[(W.rank() + 1) % W.world_size(), 0], tile, 4096)
        W.bulk_commit()
        W.sync_ranks()


def check_bulk_reduction() -> Iterator[str]:
    total = tw.symmetric((4096,), torch.float32)
    kernel = tw.compile(bulk_reduction)
    part = torch.randn(4096, device="cuda")
    for _ in range(3):
        kernel(total, part)
    torch.cuda.synchronize()
    left = gather(part)[(tw.rank() - 1) % tw.world_size()]
    if not torch.allclose(total.local.cpu(), left * 6.0, rtol=1e-5, atol=1e-5):
        yield "wrong sums"


@T.prim_func
def ring_shift(
    mail: W.Symmetric((2, 1024), "int32"),
    flags: W.Symmetric((2,), "uint32"),
    state: T.Tensor((1,), "uint32"),
    out: T.Tensor((1024,), "int32"),
):
    with T.Kernel(1, threads=256) as _:
        me = W.rank()
        peer = (me + 1) % W.world_size()
        epoch = T.alloc_var("uint32")
        epoch = W.ld(state[0], sem="relaxed")
        half = T.Cast("int32", epoch % 2)
        for i in T.Parallel(1024):
            mail[peer, half, i] = T.Cast("int32", epoch) * 1000 + me
        W.signal(flags[peer, half])
        W.wait_reached(flags[me, half], epoch // 2 + 1)
        for i in T.Parallel(1024):
            out[i] = mail[me, half, i]
        T.sync_threads()
        if T.get_thread_binding() == 0:
            W.st(state[0], epoch + 1)


def check_graph() -> Iterator[str]:
    """A kernel that synchronizes, and the stream barrier, captured once and replayed."""
    mail, flags = tw.symmetric((2, 1024), torch.int32), tw.symmetric((2,), torch.uint32)
    state = torch.zeros(1, dtype=torch.uint32, device="cuda")
    out = torch.empty(1024, dtype=torch.int32, device="cuda")
    # Two halves do not keep a neighbour of the neighbour out; the barrier after each launch does.
    kernel = tw.compile(ring_shift, pass_configs={"tileweave.verify": "off"})
    tw.barrier()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernel(mail, flags, state, out)
        tw.barrier()
    left = (tw.rank() - 1) % tw.world_size()
    for epoch in range(20):
        graph.replay()
        torch.cuda.synchronize()
        if not (out == epoch * 1000 + left).all():
            yield f"wrong in replay {epoch}"


@tw.jit
def eager_shift(X, Y):
    N = T.const("N")
    X: T.Tensor[[N], T.float32]
    Y: W.Symmetric[[N], T.float32]
    with T.Kernel(1, threads=128):
        for i in T.Parallel(N):
            Y[(W.rank() + 1) % W.world_size(), i] = X[i]
        W.sync_ranks()


@tw.jit(out_idx=[-1])
def lazy_gather(n):
    @T.prim_func
    def gather(X: W.Symmetric((n,), "float32"), Y: T.Tensor((n,), "float32")):
        with T.Kernel(1, threads=128):
            for i in T.Parallel(n):
                peer = (W.rank() + 1) % W.world_size()
                Y[i] = W.unordered(X[peer, i], reason=BARRIERS)

    return gather


@tilelang.jit
def stock_scatter(n):
    @T.prim_func
    def scatter(X: T.Tensor((n,), "int32"), Y: W.Symmetric((n,), "int32")):
        with T.Kernel(1, threads=128):
            for i in T.Parallel(n):
                Y[(W.rank() + 1) % W.world_size(), i] = X[i] * W.world_size()

    return scatter


def check_jit_styles() -> Iterator[str]:
    """tw.jit in eager and lazy style, and stock tilelang.jit, run programs with builtins."""
    ranks, left, right_of_me = tw.world_size(), (tw.rank() - 1), (tw.rank() + 1)
    Y = tw.symmetric((64,), torch.float32)
    X = torch.arange(64, dtype=torch.float32, device="cuda") + 100 * tw.rank()
    eager_shift(X, Y)
    tw.barrier()
    expected = torch.arange(64, device="cuda") + 100 * (left % ranks)
    eager = torch.equal(Y.local, expected.float())
    tw.barrier()
    Y.local.fill_(tw.rank())
    tw.barrier()
    lazy = bool((lazy_gather(64)(Y) == right_of_me % ranks).all())
    Z = tw.symmetric((64,), torch.int32)
    stock_scatter(64)(torch.full((64,), tw.rank(), dtype=torch.int32, device="cuda"), Z.all)
    tw.barrier()
    stock = bool((Z.local == (left % ranks) * ranks).all())
    if not (eager and lazy and stock):
        yield f"eager {eager}, lazy {lazy}, stock {stock}"


def check_heap() -> Iterator[str]:
    """Freed memory is used again, zeroed; arguments that differ between ranks are refused."""
    first = tw.symmetric((1000,), torch.float32)
    offset = first.offset
    first.local.fill_(7)
    first.free()
    second = tw.symmetric((500,), torch.float64)
    if second.offset != offset or second.local.any():
        yield "freed memory is not used again, or not zeroed"
    second.free()
    if tw.world_size() > 1:
        try:
            tw.symmetric((8 + tw.rank(),), torch.int32)
            yield "different arguments were accepted"
        except tw.TileWeaveError as error:
            if "expected the same calls in the same order" not in str(error):
                yield f"refused with {error!r}"


@T.prim_func
def stand(flag: T.Tensor((1,), "uint32")):
    with T.Kernel(1, threads=32) as _:
        W.wait_eq(flag[0], 1)


@T.prim_func
def release(flag: T.Tensor((1,), "uint32")):
    with T.Kernel(1, threads=32) as _:
        W.signal(flag[0], 1, op="set")


def check_first_launch_beside_a_standing_kernel() -> Iterator[str]:
    """Compiled programs are loaded: the first launch of one passes a kernel that waits."""
    flag = torch.zeros(1, dtype=torch.uint32, device="cuda")
    waiting, releasing = tw.compile(stand), tw.compile(release)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    waiting(flag)
    with torch.cuda.stream(side):
        releasing(flag)
    torch.cuda.synchronize()
    if signed(flag).item() != 1:
        yield "not released"


def check_refusals() -> Iterator[str]:
    """Illegal calls raise errors before anything runs."""
    for attempt, words in (
        (lambda: tw.symmetric((1 << 40,), torch.uint8), "larger TILEWEAVE_HEAP_BYTES"),
        (lambda: tw.symmetric((0, 3), torch.uint8), "expected positive integers"),
        (lambda: tw.symmetric((2,), torch.uint8).peer(99), "expected 0 to"),
        (lambda: tw.compile(multimem_program)(torch.zeros(4, device="cuda")), "NVLink multicast"),
    ):
        try:
            attempt()
            yield f"accepted; expected {words!r}"
        except Exception as error:
            if words not in str(error):
                yield f"refused with {error!r}, expected {words!r}"


@T.prim_func
def multimem_program(x: T.Tensor((4,), "float32")):
    with T.Kernel(1, threads=32) as _:
        W.multimem_red(x[0], T.float32(1), op="add")


CHECKS = {n.removeprefix("check_"): f for n, f in globals().items() if n.startswith("check_")}


def verdicts(options: argparse.Namespace) -> Verdicts:
    for name in options.checks or CHECKS:
        yield name, "; ".join(CHECKS[name]())


if __name__ == "__main__":
    parser = parser_of(__doc__, CHECKS)
    parser.parse_args()
    tw.init(heap_bytes=32 << 20)
    tw.finalize()
    sys.exit(main(verdicts, parser, heap_bytes=64 << 20))
