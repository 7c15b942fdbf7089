"""Traces of real GPUs: nesting, flows, clocks, unchanged results, and a buffer that is too small.

    torchrun --nproc-per-node=2 tests/gpu/trace.py

Also with more ranks, and with several ranks on one GPU (in time slices).
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import tilelang.language as T
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import tileweave as tw
from tests.examples.programs import example
from tests.on_gpus import Verdicts, main, parser_of, runs_here, transports_here
from tileweave import language as W
from tileweave.builtins.errors import TileWeaveError
from tileweave.ops.core.groups import group_of
from tileweave.runtime.trace.chrome import read
from tileweave.runtime.trace.summary import summarize
from tileweave.runtime.trace.trace import Trace

M, N, K, TILE = 256, 256, 128, 128
BLOCKS, LAUNCHES = 8, 4


@T.prim_func
def ring(
    inbox: W.Symmetric((2, BLOCKS, 64), "int32"),
    flags: W.Symmetric((2, BLOCKS), "uint32"),
    out: T.Tensor((BLOCKS, 64), "int32"),
    epoch: T.int32,
):
    """Each block sends 64 numbers to the next rank, and receives those of the previous one."""
    with T.Kernel(BLOCKS, threads=128) as block:
        me, half = W.rank(), epoch % 2
        for i in T.Parallel(64):
            inbox[(me + 1) % W.world_size(), half, block, i] = me * 1000 + block * 64 + i + epoch
        W.signal(flags[(me + 1) % W.world_size(), half, block])
        W.wait_reached(flags[me, half, block], T.Cast("uint32", epoch // 2 + 1))
        for i in T.Parallel(64):
            out[block, i] = inbox[me, half, block, i]


def push(ranks: int):
    """Return a plan that copies each rank's tensor to all others and announces it by a flag."""

    @T.prim_func
    def take(
        inbox: W.Symmetric((2, ranks, 4096), "int32"),
        flags: W.Symmetric((2, ranks), "uint32"),
        out: T.Tensor((ranks, 4096), "int32"),
        half: T.int32,
        wanted: T.int32,
    ):
        with T.Kernel(ranks, threads=128) as source:
            if source != W.rank():
                W.wait_reached(flags[W.rank(), half, source], T.Cast("uint32", wanted), peer=source)
                for i in T.Parallel(4096):
                    out[source, i] = inbox[W.rank(), half, source, i]

    @tw.plan
    def plan(
        p: tw.PlanBuilder,
        x: T.Tensor((4096,), "int32"),
        inbox: W.Symmetric((2, ranks, 4096), "int32"),
        flags: W.Symmetric((2, ranks), "uint32"),
        out: T.Tensor((ranks, 4096), "int32"),
        epoch: T.int32,
    ):
        half = epoch % 2
        p.wait_stream(None, stream="copies")
        for peer in p.peers():
            p.copy(inbox[peer, half, p.rank], x, stream="copies")
            p.write_value(flags[peer, half, p.rank], epoch + 1, stream="copies")
        p.launch(take, inbox, flags, out, half, epoch + 1)
        p.wait_stream("copies")

    return plan


def traced(run: Callable[[], None], **options) -> Trace:
    """Record ``run``, and return the trace, which rank 0 reads for all."""
    group = group_of("")
    folder = Path(group.exchange("trace folder", tempfile.mkdtemp())[0])
    path = folder / "run.json"
    with tw.trace(path, **options):
        run()
    return read(path)


def faults_of(trace: Trace, signalled: Callable[[str], bool]) -> Iterator[str]:
    """Yield what is wrong with a trace of a run in which no event was lost.

    Args:
        signalled: whether waits for a tensor of this name end by a recorded signal.
    """
    if any(trace.lost):
        yield f"lost {trace.lost}"
    for span in trace.spans:
        if span.end is None or span.end < span.start:
            yield f"{span.label} of rank {span.rank} ends at {span.end}, begins at {span.start}"
            continue
        for wait in span.waits:
            if wait.end is None or not span.start <= wait.start <= wait.end <= span.end:
                yield f"a wait from {wait.start} to {wait.end} in {span.start} to {span.end}"
    for access in [*trace.signals, *trace.transfers]:
        end = access.time + access.duration
        if not access.span.start <= access.time <= end <= trace.until(access.span) + 1e-3:
            yield f"{access.op} from {access.time} to {end} is outside of its span"
    for phase in trace.phases:
        if phase.end < phase.start:
            yield f"{phase.name} ends before it begins"
    ended = {flow.wait for flow in trace.flows}
    for span in trace.spans:
        for wait in span.waits:
            if wait.flag and signalled(wait.tensor) and wait not in ended:
                yield f"no flow to the wait for {wait.flag} of rank {span.rank}, {span.label}"
    for flow in trace.flows:
        clocks = trace.clocks[flow.signal.span.rank], trace.clocks[flow.span.rank]
        error = sum(clock.error for clock in clocks)
        if flow.signal.span.block is None:
            error += clocks[0].host_error
        if flow.signal.flag.partition("[")[2] != flow.wait.flag.partition("[")[2]:
            yield f"a flow from {flow.signal.flag} to {flow.wait.flag}"
        if flow.signal.time > flow.wait.end + error:
            yield f"{flow.signal.flag} is signalled {flow.signal.time - flow.wait.end} us late"


def first_of(faults: Iterator[str]) -> str:
    """Return the first faults, or ""."""
    shown = list(faults)
    return "; ".join(shown[:3]) + (f"; {len(shown)} in all" if len(shown) > 3 else "")


class Ring:
    """Launches of ``ring`` on this rank, and its result."""

    def __init__(self) -> None:
        self.rank, self.ranks = group_of("").rank, group_of("").world_size
        self.inbox = tw.symmetric((2, BLOCKS, 64), torch.int32)
        self.flags = tw.symmetric((2, BLOCKS), torch.uint32)
        self.out = torch.zeros((BLOCKS, 64), dtype=torch.int32, device="cuda")
        self.kernel = tw.compile(ring, pass_configs={"tileweave.verify": "off"})
        self.epoch = 0

    def __call__(self, count: int = LAUNCHES) -> None:
        for _ in range(count):
            self.kernel(self.inbox, self.flags, self.out, self.epoch)
            tw.barrier()
            self.epoch += 1

    def wrong(self) -> str:
        """Return what is wrong with the result of the last launch, and clear it."""
        torch.cuda.synchronize()
        source = (self.rank + self.ranks - 1) % self.ranks
        numbers = torch.arange(BLOCKS * 64).view(BLOCKS, 64)
        right = (source * 1000 + numbers + self.epoch - 1).int()
        found = self.out.cpu()
        self.out.zero_()
        torch.cuda.synchronize()
        return "" if torch.equal(found, right) else "wrong result"


def check_ring() -> Iterator[tuple[str, ...]]:
    """Waits and signals that the program contains."""
    run = Ring()
    rank, ranks = run.rank, run.ranks
    run()
    yield "ring before a trace", run.wrong()
    trace = traced(run)
    yield "ring in a trace", run.wrong()
    spans = [s for s in trace.spans if s.kernel == "ring"]
    waits = [w for s in spans for w in s.waits]
    signals = [s for s in trace.signals if s.span.kernel == "ring"]
    count = ranks * BLOCKS * LAUNCHES
    found = len(spans), len(waits), len(signals)
    yield "ring: number of events", "" if found == (count,) * 3 else f"{found}, expected {count}"
    yield (
        "ring: nesting, flows, clocks",
        first_of(faults_of(trace, lambda tensor: tensor == "flags")),
        f"{len(trace.flows)} flows, clock error "
        f"{max(c.error for c in trace.clocks):.3f} us, host {trace.clocks[rank].host_error:.1f} us",
    )
    senders = {(f.signal.span.rank + 1) % ranks == f.span.rank for f in trace.flows if f.wait.flag}
    yield "ring: flows come from the previous rank", "" if senders == {True} else f"{senders}"
    own = [p for p in trace.phases if p.stream == "host" and p.kernel == "ring" and p.rank == rank]
    yield "ring: host times", "" if len(own) == LAUNCHES else f"{len(own)}, expected {LAUNCHES}"
    text = str(summarize(trace))
    yield "ring: summary", "" if "critical path" in text and "flags" in text else text
    run()
    yield "ring after a trace", run.wrong()


def check_limits() -> Iterator[tuple[str, ...]]:
    """A buffer that is too small, and a CUDA graph."""
    run = Ring()
    small = traced(run, events=20)
    recorded = sum(s.rank == run.rank for s in small.spans)
    yield (
        "ring: events without room are counted",
        "" if all(lost > 0 for lost in small.lost) and recorded <= 20 else f"{small.lost}",
        f"lost {small.lost}",
    )
    yield "ring in a trace without room", run.wrong()
    graph, refusal = torch.cuda.CUDAGraph(), "not refused"

    def captured() -> None:
        nonlocal refusal
        try:
            with torch.cuda.graph(graph):
                run.kernel(run.inbox, run.flags, run.out, run.epoch)
        except TileWeaveError as error:
            refusal = str(error)

    traced(captured)
    yield "a CUDA graph is refused", "" if "captured inside of tw.trace" in refusal else refusal
    run()
    yield "ring after a refused graph", run.wrong()


def check_gemm() -> Iterator[tuple[str, ...]]:
    """Pipelined loops, TMA stores and inferred waits, in a warp-specialized kernel on Hopper."""
    rank, ranks = group_of("").rank, group_of("").world_size
    torch.manual_seed(rank)
    A = torch.randint(-2, 3, (M * ranks, K), device="cuda").bfloat16()
    B = torch.randint(-2, 3, (N, K), device="cuda").bfloat16()
    C = torch.zeros((M, N), dtype=torch.bfloat16, device="cuda")
    make = example("inferred.py").gemm_reduce_scatter
    kernel = tw.compile(make(M * ranks, N, K, ranks, TILE, TILE, 32, stages=2))
    kernel(A, B, C)
    torch.cuda.synchronize()
    before = C.clone()
    C.zero_()

    def launch() -> None:
        for _ in range(LAUNCHES):
            kernel(A, B, C)

    trace = traced(launch)
    yield "gemm: same result", "" if torch.equal(C, before) else "another result"
    symmetric = first_of(faults_of(trace, lambda tensor: tensor.startswith("parts")))
    yield "gemm: nesting, flows, clocks", symmetric, f"{len(trace.flows)} flows"
    loops = [p for p in trace.phases if p.name == "loop k" and p.rank == rank]
    kernels = {p.kernel for p in loops}
    least = LAUNCHES * len({s.block for s in trace.spans if s.kernel == "reduce_scatter"})
    yield "gemm: loops", "" if len(loops) >= least > 0 else f"{len(loops)}, expected {least}"
    is_hopper = torch.cuda.get_device_capability()[0] >= 9
    specialized = "reduce_scatter (producer)" in kernels
    yield "gemm: producers", "" if specialized == is_hopper else f"{kernels}"
    stores = [t for t in trace.transfers if t.op == "T.copy" and t.tensor == "parts"]
    expected = LAUNCHES * ranks * (ranks - 1) * (M // TILE) * (N // TILE)
    missing = is_hopper and len(stores) != expected
    yield "gemm: TMA stores", f"{len(stores)}, expected {expected}" if missing else ""


def check_plan() -> Iterator[tuple[str, ...]]:
    """Copies and flags of a plan, between events of their stream."""
    rank, ranks = group_of("").rank, group_of("").world_size
    inbox = tw.symmetric((2, ranks, 4096), torch.int32)
    flags = tw.symmetric((2, ranks), torch.uint32)
    x = torch.arange(4096, dtype=torch.int32, device="cuda") + rank
    out = torch.zeros((ranks, 4096), dtype=torch.int32, device="cuda")
    plan = push(ranks)
    epochs = iter(range(1000))

    def launch() -> None:
        for _ in range(LAUNCHES):
            plan(x, inbox, flags, out, next(epochs))
            tw.barrier()

    launch()
    out.zero_()
    trace = traced(launch)
    right = [torch.arange(4096) + r if r != rank else torch.zeros(4096) for r in range(ranks)]
    same = torch.equal(out.cpu(), torch.stack(right).int())
    yield "plan: result in a trace", "" if same else "wrong result"
    copies = [s for s in trace.spans if s.kernel == "p.copy"]
    count = LAUNCHES * ranks * (ranks - 1)
    yield "plan: copies", "" if len(copies) == count else f"{len(copies)}, expected {count}"
    yield (
        "plan: nesting, flows, clocks",
        first_of(faults_of(trace, lambda tensor: tensor == "flags")),
        f"{len(trace.flows)} flows",
    )
    launch()
    yield "plan: after a trace", "" if torch.equal(out.cpu(), torch.stack(right).int()) else "wrong"


CHECKS = {"ring": check_ring, "limits": check_limits, "gemm": check_gemm, "plan": check_plan}


def verdicts(options: argparse.Namespace) -> Verdicts:
    for name in options.checks or CHECKS:
        if not runs_here(name, CHECKS):
            continue
        if name == "plan" and not transports_here(["copy_engine"]):
            continue
        yield from CHECKS[name]()


if __name__ == "__main__":
    os.environ.setdefault("TILEWEAVE_TIMEOUT_S", "60")
    sys.exit(main(verdicts, parser_of(__doc__, CHECKS)))
