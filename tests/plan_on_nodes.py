"""A plan with collectives of NCCL between nodes, beside copies and a kernel within the node.

tests/gpu/two_levels.py runs it on GPUs, the tests of the simulator on CPUs.
"""

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import tilelang.language as T
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import tileweave as tw
from tileweave import language as W
from tileweave.runtime.host.collectives import uses_gloo
from tileweave.runtime.trace.chrome import read

ROWS, COLUMNS = 64, 512
LAUNCHES, REPLAYS = 100, 20
SLEEP_CYCLES, HOST_S = 2_000_000_000, 0.3
"""Time for which the GPU is kept busy, about a second, and largest time of a call on the host."""


def sums_over_nodes(nodes: int, ranks: int, rows: int = ROWS, columns: int = COLUMNS) -> tw.Plan:
    """Return a plan that adds the tensors of all ranks.

    NCCL gathers those of the other nodes while copies pull those of this node, whose sum NCCL adds
    to the sums of the other nodes::

        stream "nodes"   all_gather x -> pieces -------------------+
        stream "pull"    copy x of the peers -> parts -+           |
        caller's stream  copy x -> shared, parts[rank] * add_up -- * all_reduce, reduce_scatter
    """

    @T.prim_func
    def add_up(
        parts: T.Tensor((ranks, rows, columns), "int32"), total: T.Tensor((rows, columns), "int32")
    ):
        with T.Kernel(rows, threads=128) as row:
            sums = T.alloc_fragment((columns,), "int32")
            T.clear(sums)
            for rank in T.serial(ranks):
                for i in T.Parallel(columns):
                    sums[i] += parts[rank, row, i]
            T.copy(sums, total[row, 0])

    @tw.plan
    def plan(
        p: tw.PlanBuilder,
        x: T.Tensor((rows, columns), "int32"),
        shared: W.Symmetric((rows, columns), "int32"),
        parts: T.Tensor((ranks, rows, columns), "int32"),
        pieces: T.Tensor((nodes, rows, columns), "int32"),
        node_total: T.Tensor((rows, columns), "int32"),
        total: T.Tensor((rows, columns), "int32"),
        own_sums: T.Tensor((rows, columns), "int32"),
    ):
        p.collective("all_gather", pieces, x, stream="nodes")
        p.copy(shared[p.rank], x)
        p.copy(parts[p.rank], x)
        for peer in p.peers():
            p.copy(parts[peer], shared[peer], stream="pull")
        if p.world_size > 1:
            p.wait_stream("pull")
        p.launch(add_up, parts, node_total)
        p.wait_stream("nodes")
        p.collective("all_reduce", total, node_total)
        p.collective("reduce_scatter", own_sums, pieces)

    return plan


class Sums:
    """Calls of the plan by this rank, with inputs that depend on a number."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh, (self.node, self.local) = mesh, mesh.get_coordinate()
        nodes, ranks = mesh.shape
        self.plan = sums_over_nodes(nodes, ranks).on(mesh)
        local = mesh.get_group("local")
        self.shared = tw.symmetric((ROWS, COLUMNS), torch.int32, local)
        self.x = self.input_of(self.node, self.local, 0)
        shapes = (ranks, ROWS, COLUMNS), (nodes, ROWS, COLUMNS), *((ROWS, COLUMNS),) * 3
        self.outs = [torch.zeros(shape, dtype=torch.int32, device="cuda") for shape in shapes]
        tw.barrier(group=local)

    def input_of(self, node: int, local: int, number: int) -> torch.Tensor:
        generator = torch.Generator("cuda").manual_seed(1000 * number + 10 * node + local)
        x = torch.empty((ROWS, COLUMNS), dtype=torch.int32, device="cuda")
        return x.random_(0, 1000, generator=generator)

    def refill(self, number: int) -> None:
        self.x.copy_(self.input_of(self.node, self.local, number))

    def __call__(self) -> None:
        self.plan(self.x, self.shared, *self.outs)

    def fault(self, number: int, outs: list[torch.Tensor] | None = None) -> str:
        """Return which result of the call with a number is wrong, or ""."""
        nodes, ranks = self.mesh.shape
        every = torch.stack([
            torch.stack([self.input_of(node, local, number) for local in range(ranks)])
            for node in range(nodes)
        ])  # fmt: skip
        pieces = every[:, self.local]
        rights = {
            "parts": every[self.node],
            "pieces": pieces,
            "node_total": every[self.node].sum(0),
            "total": every.sum((0, 1)),
            # Each node with this index has the same pieces.
            "own_sums": nodes * pieces[self.node],
        }
        for out, (name, right) in zip(outs or self.outs, rights.items(), strict=True):
            if wrong := int((out != right).sum()):
                return f"call {number}: {wrong} elements of {name} are wrong"
        return ""


def nodes_use_gloo(mesh: DeviceMesh) -> bool:
    return mesh.size(0) > 1 and uses_gloo(mesh.get_group("node"), torch.device("cuda"))


def check_values(sums: Sums) -> str:
    """Calls back to back, without host synchronization and with random delays of ranks."""
    torch.manual_seed(dist.get_rank())
    copies = []
    for number in range(LAUNCHES):
        if torch.rand(()) < 0.3:
            torch.cuda._sleep(int(torch.randint(1, 400_000, ())))
        sums.refill(number)
        sums()
        copies.append([out.clone() for out in sums.outs])
    faults = (sums.fault(number, outs) for number, outs in enumerate(copies))
    return next(filter(None, faults), "")


def check_host(sums: Sums) -> str:
    """The host does not wait for NCCL."""
    sums()
    torch.cuda.synchronize()
    dist.barrier()
    torch.cuda._sleep(SLEEP_CYCLES)
    start = time.monotonic()
    sums()
    took = time.monotonic() - start
    is_over = torch.cuda.current_stream().query()
    torch.cuda.synchronize()
    if is_over or took > HOST_S:
        return f"the call took the host {took:.3f} s; the GPU was {'not ' * is_over}busy after it"
    return ""


def graph_fault(mesh: DeviceMesh) -> str:
    """A captured call, replayed with other inputs; gloo is refused before anything is captured."""
    sums = Sums(mesh)
    sums.refill(0)
    sums()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    refused = ""
    with torch.cuda.graph(graph):
        try:
            sums()
        except tw.TileWeaveError as error:
            refused = str(error)
    if nodes_use_gloo(sums.mesh):
        text = "a CUDA graph cannot record p.collective of "
        return "" if text in refused else f"gloo was captured: {refused or 'no error'}"
    if refused:
        return refused
    for number in range(REPLAYS):
        sums.refill(number)
        graph.replay()
        if fault := sums.fault(number):
            return f"replay: {fault}"
    return ""


def check_trace(sums: Sums) -> str:
    """The collectives are timed steps of the trace of each node."""
    local = sums.mesh.get_group("local")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.json"
        with tw.trace(path, group=local):
            sums()
        if sums.local != 0:
            return ""
        trace = read(path)
    for name, tensor in (
        ("all_gather", "pieces"), ("all_reduce", "total"), ("reduce_scatter", "own_sums")
    ):  # fmt: skip
        kernel = f"p.collective of {name}"
        spans = [s for s in trace.spans if s.kernel == kernel]
        if sorted(s.rank for s in spans) != list(range(sums.mesh.size(1))):
            return f"{len(spans)} spans of {kernel}"
        if not all(tensor in s.label and s.end is not None and s.end > s.start for s in spans):
            return f"{kernel}: {spans}"
    return ""


def faults(mesh: DeviceMesh) -> Iterator[str]:
    """Yield the fault of each check that runs without a graph, or ""."""
    sums = Sums(mesh)
    yield check_values(sums)
    yield check_trace(sums)
    if not nodes_use_gloo(mesh):
        yield check_host(sums)
