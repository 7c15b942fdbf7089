"""Plans on real GPUs: copies, flags and streams, called back to back and replayed as a CUDA graph.

    torchrun --nproc-per-node=2 tests/gpu/plan.py

Enqueued by C++ and by Python. Also with more ranks, with one, and with several ranks on one GPU (in
time slices).
"""

import argparse
import os
import sys
import threading
from pathlib import Path

import tilelang.language as T
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import tileweave as tw
from tests.on_gpus import Verdicts, main, parser_of
from tileweave import language as W

ROWS, COLUMNS, PARTS = 48, 512, 4


@T.prim_func
def count_up(count: T.Tensor((1,), "uint32")):
    with T.Kernel(1, threads=32):
        if T.get_thread_binding() == 0:
            count[0] = count[0] + T.uint32(1)


def exchange(ranks: int, by: str):
    """Return a plan that sends each rank's tensor to all others, which add 1 to it.

    Args:
        by: ``write_value`` announces the epoch that the host counts, ``copy_value`` the one that
            the GPU counts. ``strided`` copies part of the columns, with the flags of the latter.
    """
    width = COLUMNS // 2 if by == "strided" else COLUMNS

    @T.prim_func
    def take(
        inbox: W.Symmetric((2, ranks, ROWS, COLUMNS), "int32"),
        flags: W.Symmetric((2, ranks), "uint32"),
        count: T.Tensor((1,), "uint32"),
        out: T.Tensor((ranks, ROWS, COLUMNS), "int32"),
        half: T.int32,
    ):
        with T.Kernel(ranks, threads=128) as source:
            if source != W.rank():
                W.wait_reached(flags[W.rank(), half, source], count[0], peer=source)
                for row, i in T.Parallel(ROWS, width):
                    out[source, row, i] = inbox[W.rank(), half, source, row, i] + 1

    @tw.plan
    def plan(
        p: tw.PlanBuilder,
        A: T.Tensor((ROWS, COLUMNS), "int32"),
        inbox: W.Symmetric((2, ranks, ROWS, COLUMNS), "int32"),
        flags: W.Symmetric((2, ranks), "uint32"),
        count: T.Tensor((1,), "uint32"),
        out: T.Tensor((ranks, ROWS, COLUMNS), "int32"),
        epoch: T.int32,
    ):
        half = epoch % 2
        p.launch(count_up, count)
        p.wait_stream(None, stream="copies")
        for peer in p.peers():
            p.copy(inbox[peer, half, p.rank, :, 0:width], A[:, COLUMNS - width :], stream="copies")
            flag = flags[peer, half, p.rank]
            if by == "write_value":
                p.write_value(flag, epoch + 1, stream="copies")
            else:
                p.copy_value(flag, count[0], stream="copies")
        p.launch(take, inbox, flags, count, out, half)

    return plan, width


def overlapped_blocks(ranks: int, low: int, high: int):
    """Return the kernel of blocks ``low`` to ``high``: they add, or read received parts."""
    rows = ROWS // PARTS

    @T.prim_func
    def work(
        A: T.Tensor((ROWS, COLUMNS), "int32"),
        sums: T.Tensor((ROWS, COLUMNS), "int32"),
        done: T.Tensor((PARTS,), "uint32"),
        inbox: W.Symmetric((2, ranks, ROWS, COLUMNS), "int32"),
        flags: W.Symmetric((2, ranks, PARTS), "uint32"),
        count: T.Tensor((1,), "uint32"),
        out: T.Tensor((ranks, ROWS, COLUMNS), "int32"),
        half: T.int32,
    ):
        with T.Kernel(high - low, threads=128) as block:
            if block + low < ROWS:
                for i in T.Parallel(COLUMNS):
                    sums[block + low, i] = A[block + low, i] + 1
                W.signal(done[(block + low) // rows])
            else:
                source, part = (block + low - ROWS) % ranks, (block + low - ROWS) // ranks
                if source != W.rank():
                    W.wait_reached(flags[W.rank(), half, source, part], count[0], peer=source)
                    for row, i in T.Parallel(rows, COLUMNS):
                        out[source, part * rows + row, i] = inbox[
                            W.rank(), half, source, part * rows + row, i
                        ]

    return work


def overlapped(ranks: int, kernels: int):
    """Return a plan whose kernel adds 1 to a tensor; each finished part goes to all other ranks.

    Args:
        kernels: 2: another kernel reads the received parts. 1: later blocks of the kernel read
            them, so the kernel ends only if copies run beside it.
    """
    rows = ROWS // PARTS
    last = ROWS + ranks * PARTS
    bounds = [(0, last)] if kernels == 1 else [(0, ROWS), (ROWS, last)]
    parts = [overlapped_blocks(ranks, low, high) for low, high in bounds]

    @tw.plan
    def plan(
        p: tw.PlanBuilder,
        A: T.Tensor((ROWS, COLUMNS), "int32"),
        sums: T.Tensor((ROWS, COLUMNS), "int32"),
        done: T.Tensor((PARTS,), "uint32"),
        inbox: W.Symmetric((2, ranks, ROWS, COLUMNS), "int32"),
        flags: W.Symmetric((2, ranks, PARTS), "uint32"),
        count: T.Tensor((1,), "uint32"),
        out: T.Tensor((ranks, ROWS, COLUMNS), "int32"),
        half: T.int32,
    ):
        p.launch(count_up, count)
        p.wait_stream(None, stream="copies")
        p.launch(parts[0], A, sums, done, inbox, flags, count, out, half)
        for part in range(PARTS):
            p.wait_value(done[part], rows, stream="copies")
            p.write_value(done[part], 0, stream="copies")
            of_part = slice(part * rows, (part + 1) * rows)
            for peer in p.peers():
                p.copy(inbox[peer, half, p.rank, of_part], sums[of_part], stream="copies")
                p.copy_value(flags[peer, half, p.rank, part], count[0], stream="copies")
        for kernel in parts[1:]:
            p.launch(kernel, A, sums, done, inbox, flags, count, out, half)

    return plan


class Exchange:
    """A plan with its memory."""

    def __init__(self, by: str) -> None:
        ranks = tw.world_size()
        self.by = by
        self.plan, self.width = exchange(ranks, by)
        self._allocate(tw.symmetric((2, ranks), torch.uint32))

    def _allocate(self, flags: tw.SymmetricTensor) -> None:
        ranks, self.flags = tw.world_size(), flags
        self.inbox = tw.symmetric((2, ranks, ROWS, COLUMNS), torch.int32)
        self.count = torch.zeros(1, dtype=torch.uint32, device="cuda")
        self.out = torch.full((ranks, ROWS, COLUMNS), -1, dtype=torch.int32, device="cuda")
        self.epoch = 0

    def __call__(self, A: torch.Tensor) -> None:
        # Where the GPU counts, every second call is known already.
        epoch = self.epoch if self.by == "write_value" else self.epoch % 2
        self.plan(A, self.inbox, self.flags, self.count, self.out, epoch)
        self.epoch += 1

    def wrong(self, A: torch.Tensor) -> str:
        """Return what is wrong with ``out`` after a call with ``A`` on all ranks, or ""."""
        torch.cuda.synchronize()
        parts = [A.cpu()]
        if tw.world_size() > 1:
            parts = [None] * tw.world_size()
            dist.all_gather_object(parts, A.cpu())
        for peer in range(tw.world_size()):
            if peer == tw.rank():
                continue
            expected = parts[peer][:, COLUMNS - self.width :] + 1
            got = self.out[peer, :, : self.width].cpu()
            if not torch.equal(got, expected):
                return f"{int((got != expected).sum())} elements from rank {peer} are wrong"
        return ""

    def free(self) -> None:
        self.flags.free()
        self.inbox.free()


class Overlapped(Exchange):
    """``overlapped`` with its memory."""

    def __init__(self, kernels: int) -> None:
        ranks = tw.world_size()
        self.plan, self.width = overlapped(ranks, kernels), COLUMNS
        self._allocate(tw.symmetric((2, ranks, PARTS), torch.uint32))
        self.sums = torch.zeros((ROWS, COLUMNS), dtype=torch.int32, device="cuda")
        self.done = torch.zeros(PARTS, dtype=torch.uint32, device="cuda")

    def __call__(self, A: torch.Tensor) -> None:
        half = self.epoch % 2
        self.plan(A, self.sums, self.done, self.inbox, self.flags, self.count, self.out, half)
        self.epoch += 1


def numbers(turn: int) -> torch.Tensor:
    start = 1000 * turn + 7 * tw.rank()
    return torch.arange(ROWS * COLUMNS, dtype=torch.int32, device="cuda").view(ROWS, -1) + start


def check_calls(operator: Exchange, calls: int = 200) -> str:
    """Calls back to back, without host synchronization or barriers in between."""
    inputs = [numbers(turn) for turn in range(3)]
    for call in range(calls):
        operator(inputs[call % 3])
    problem = operator.wrong(inputs[(calls - 1) % 3])
    operator.free()
    return problem


def check_graph(operator: Exchange, replays: int = 100) -> str:
    """Two calls, one of each half, captured once and replayed with other inputs and counts.

    Between replays the same calls use the same events and streams.
    """
    A = numbers(0)
    for _ in range(2):
        operator(A)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="relaxed"):
        operator(A)
        operator(A)
    problem = ""
    for replay in range(replays):
        A.copy_(numbers(replay))
        graph.replay()
        if replay % 10 == 0:
            operator(A)
            operator(A)
        if replay % 20 == 0 or replay == replays - 1:
            problem = problem or operator.wrong(A)
    torch.cuda.synchronize()
    del graph
    operator.free()
    return problem


def check_threads(calls: int = 20) -> str:
    """Calls from a new thread, after those of this one."""
    operator, A = Exchange("write_value"), numbers(0)
    raised: list[Exception] = []

    def elsewhere() -> None:
        torch.cuda.set_device(A.device)
        try:
            for _ in range(calls):
                operator(A)
        except Exception as error:
            raised.append(error)

    for _ in range(calls):
        operator(A)
    torch.cuda.synchronize()
    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    problem = repr(raised[0]) if raised else operator.wrong(A)
    operator.free()
    return problem


def check_refusals() -> str:
    """Nothing is enqueued if an argument is illegal."""
    operator, A = Exchange("write_value"), numbers(0)
    for bad, words in ((A.float(), "expected torch.int32"), (A[:, ::2], "has shape"),
                       (A.cpu(), "is on cpu")):  # fmt: skip
        try:
            operator(bad)
        except tw.TileWeaveError as error:
            if words not in str(error) and "contiguous" not in str(error):
                return f"refused with {error}; expected {words}"
        else:
            return f"{bad.dtype} {tuple(bad.shape)} was taken"
    torch.cuda.synchronize()
    count = int(operator.count.view(torch.int32))
    operator.free()
    return f"{count} kernels ran" if count else ""


CHECKS = {
    "calls, write_value": lambda: check_calls(Exchange("write_value")),
    "calls, copy_value": lambda: check_calls(Exchange("copy_value")),
    "calls, strided": lambda: check_calls(Exchange("strided")),
    "graph": lambda: check_graph(Exchange("copy_value")),
    "calls, wait_value": lambda: check_calls(Overlapped(2)),
    "calls, wait_value in one kernel": lambda: check_calls(Overlapped(1)),
    "graph, wait_value": lambda: check_graph(Overlapped(2)),
    "graph, wait_value in one kernel": lambda: check_graph(Overlapped(1)),
    "threads": check_threads,
    "refusals": check_refusals,
}


def verdicts(options: argparse.Namespace) -> Verdicts:
    for by, native in (("C++", "1"), ("Python", "0")):
        os.environ["TILEWEAVE_NATIVE"] = native
        for name, check in CHECKS.items():
            yield f"{name}, by {by}", check()


if __name__ == "__main__":
    sys.exit(main(verdicts, parser_of(__doc__)))
