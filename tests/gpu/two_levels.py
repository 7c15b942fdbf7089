"""Operators on several nodes: fused kernels and P2P in a node, NCCL between nodes.

    torchrun --nproc-per-node=4 tests/gpu/two_levels.py [CHECK ...] [--local-world-size 2]
    torchrun --nproc-per-node=2 tests/gpu/two_levels.py graph --local-world-size 1  # 2 GPUs

One machine's GPUs are taken for nodes of ``--local-world-size`` GPUs, by default two nodes. Every
rank makes the inputs of all ranks and computes the right results alone. Without a GPU the same
checks run with gloo: that tries this file, not the kernels. Four ranks on two GPUs are two nodes
whose ranks share one in time slices. On one GPU all of them do, and gloo transfers between nodes
through host memory, because NCCL accepts a GPU once.
"""

import argparse
import hashlib
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.functional import scaled_dot_product_attention

import tileweave as tw
from tileweave import ops
from tileweave.ops.attention.across_nodes import attend_across
from tileweave.ops.attention.flash import tiles_for
from tileweave.ops.attention.problem import checked_attention
from tileweave.ops.attention.sp_attention import sp_attention_plan
from tileweave.ops.collectives.collective import checked_problem
from tileweave.ops.core import nccl
from tileweave.ops.core.across_nodes import Mesh
from tileweave.ops.core.epilogue import NO_EPILOGUE
from tileweave.ops.core.groups import TwoLevels, name_of, ranks_of
from tileweave.ops.core.problem import checked_problem as checked_product
from tileweave.ops.core.registry import OPERATORS
from tileweave.ops.gemm.gemm_operator import choice_of
from tileweave.runtime.executor.compile_ahead import compile_ahead

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.gpu_calls import Call, back_to_back, relative_error, replayed, values
from tests.on_gpus import GPU, runs_here, transports_here

TRANSPORTS, STRATEGIES = ["copy_engine", "ldst", "nccl"], ["fused", "nccl"]
DEVICE = "cuda" if GPU else "cpu"
HEAP_BYTES = 4 << 30
SETS = 3
"""Number of input sets used in turn."""


class Spanning(Call):
    """One operator with the inputs of all ranks and the right result of this one.

    Attributes:
        exact: whether results of integers must be equal to the right ones.
        is_equal: whether all ranks receive the same bits.
        engine: transport or strategy.
        tolerance: largest relative error, by norms, of random numbers and of gradients.
    """

    exact, is_equal, tolerance = True, False, 1e-2

    def __init__(self, op: str, engine: str, mesh: DeviceMesh, number: int = 0) -> None:
        self.op, self.engine, self.mesh = op, engine, mesh
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.every: list[list[torch.Tensor]] = []
        self.refill(number)
        self.out = torch.empty_like(self.expected)

    def refill(self, number: int) -> None:
        """Make the inputs with a number, equal in all processes, and the right result."""
        new = [self.operands(rank, number) for rank in range(self.ranks)]
        if not self.every:
            self.every = new
        for old, operands in zip(self.every, new, strict=True):
            for x, y in zip(old, operands, strict=True):
                x.copy_(y)
        self.expected = self.by_one(self.every, self.rank).to(torch.bfloat16)

    def operands(self, rank: int, number: int) -> list[torch.Tensor]:
        generator = torch.Generator(DEVICE).manual_seed(1000 * number + rank)
        return [
            self.draw(torch.empty(shape, device=DEVICE), generator).to(torch.bfloat16)
            for shape in self.shapes
        ]

    def draw(self, x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        return x.random_(0, 3, generator=generator).sub_(1)

    @property
    def mine(self) -> list[torch.Tensor]:
        return self.every[self.rank]

    def right(self) -> torch.Tensor:
        return self.expected

    def __call__(self) -> torch.Tensor:
        """Return the result of one more call in ``out``, which is overwritten with 77 first."""
        return self.call(*self.mine, out=self.out.fill_(77))

    def differs(self, actual: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        if self.exact:
            return (actual != right).any()
        return ~(relative_error(actual, right) <= self.tolerance)

    def fault(self, actual: torch.Tensor, right: torch.Tensor) -> str:
        if actual.shape != right.shape:
            return f"{self}: shape {tuple(actual.shape)}; expected {tuple(right.shape)}"
        if not self.differs(actual, right):
            return ""
        if self.exact:
            return f"{self}: {int((actual != right).sum())} of {right.numel()} elements are wrong"
        return f"{self}: relative error {relative_error(actual, right):.1e}"

    @property
    def name(self) -> str:
        return str(self)

    def __str__(self) -> str:
        shapes = " x ".join(str(tuple(x.shape)) for x in self.mine)
        return f"{self.op} of {shapes} by {self.engine}"


class Exchange(Spanning):
    """A collective."""

    def __init__(self, op, shape, options, engine, mesh, number=0) -> None:
        self.shapes, self.options = [shape], options
        self.is_equal = op in ("all_gather", "all_reduce", "broadcast")
        super().__init__(op, engine, mesh, number)

    def call(self, x, out=None):
        return getattr(ops, self.op)(x, *self.options, self.mesh, out=out, transport=self.engine)

    def by_one(self, every, rank):
        x = torch.stack([x for (x,) in every])
        return OPERATORS[self.op].expected(x, rank, *self.options)

    @property
    def is_legal(self) -> bool:
        try:
            ops.transport_of(
                self.op, *self.mine, *self.options, group=self.mesh, transport=self.engine
            )
        except tw.TileWeaveError:
            return False
        return True


class Product(Spanning):
    """A GEMM operator. Sums are integers below 256, which bf16 represents exactly."""

    def __init__(self, op, rows, engine, mesh, number=0) -> None:
        N, K = (136, 72) if GPU else (16, 8)
        self.shapes = [(rows, K), (K, N)]
        self.is_equal = op == "matmul_all_reduce"
        super().__init__(op, engine, mesh, number)

    def call(self, a, b, out=None):
        return getattr(ops, self.op)(a, b, self.mesh, out=out, strategy=self.engine)

    def by_one(self, every, rank):
        if self.op == "all_gather_matmul":
            return torch.cat([a for a, _ in every]).float() @ every[rank][1].float()
        total = sum(a.float() @ b.float() for a, b in every)
        return total if self.is_equal else total.chunk(self.ranks)[rank]


class Attention(Spanning):
    """Attention over a sharded sequence."""

    exact, tolerance = False, 2e-2

    def __init__(self, causal, layout, engine, mesh, number=0) -> None:
        rows, heads, dim = (256, 4, 64) if GPU else (8, 2, 8)
        self.causal, self.layout = causal, layout
        self.shapes = [(2, rows, heads, dim)] * 3
        super().__init__("sp_attention", engine, mesh, number)

    def draw(self, x, generator):
        return x.normal_(generator=generator)

    def call(self, q, k, v, out=None):
        options = {"causal": self.causal, "layout": self.layout, "group": self.mesh}
        return ops.sp_attention(q, k, v, **options, strategy=self.engine)

    def by_one(self, every, rank):
        q, k, v = (
            ops.unshard_sequence(shards, self.layout).float().transpose(1, 2)
            for shards in zip(*every, strict=True)
        )
        out = scaled_dot_product_attention(q, k, v, is_causal=self.causal).transpose(1, 2)
        return ops.shard_sequence(out, rank, self.ranks, self.layout)

    def __str__(self) -> str:
        mask = "causal" if self.causal else "full"
        return f"{super().__str__()}, {mask}, {self.layout}"


def exchanges(mesh: DeviceMesh, engine: str, number: int, large: bool) -> list[Spanning]:
    """Return a call of each collective and shape that the transport serves.

    Parts of (3, 5) are unaligned.
    """
    W = dist.get_world_size()
    shapes = [(1024, 256), (7, 8), (3, 5)] + ([(5 << 20, 4)] if GPU and large else [])
    calls = [Exchange("all_gather", shape, (), engine, mesh, number) for shape in shapes]
    calls += [
        Exchange("reduce_scatter", (W * rows, n), (), engine, mesh, number) for rows, n in shapes
    ]
    calls += [Exchange("all_reduce", shape, (), engine, mesh, number) for shape in shapes]
    calls += [
        Exchange("all_to_all", (W * 16, W * 4, 24), axes, engine, mesh, number)
        for axes in ((0, 1), (1, 0), (0, 0))
    ]
    calls += [Exchange("broadcast", shape, (W - 1,), engine, mesh, number) for shape in shapes[:3]]
    return [call for call in calls if call.is_legal]


def fused(mesh: DeviceMesh, engine: str, number: int) -> list[Spanning]:
    """Return a call of each GEMM operator and each kind of attention."""
    W = dist.get_world_size()
    rows = 200 if GPU else 3
    products = {
        "all_gather_matmul": rows, "matmul_reduce_scatter": W * rows, "matmul_all_reduce": 5 * rows
    }  # fmt: skip
    calls = [Product(op, n, engine, mesh, number) for op, n in products.items()]
    masks = (True, "contiguous"), (True, "zigzag"), (False, "contiguous")
    return [*calls, *(Attention(*mask, engine, mesh, number) for mask in masks)]


def calls_of(mesh: DeviceMesh, engine: str, number: int = 0, large: bool = False) -> list[Spanning]:
    """Return the calls that an engine serves; ``nccl`` is a transport and a strategy."""
    calls = exchanges(mesh, engine, number, large) if engine in TRANSPORTS else []
    return calls + (fused(mesh, engine, number) if engine in STRATEGIES else [])


class Programs:
    """Programs that calls within a node run, collected from compositions on tensors without
    data."""

    def __init__(self, ranks: TwoLevels, engine: str) -> None:
        self.ranks, self.local, self.engine = ranks, ranks.node.world_size, engine
        self.found: dict = {}

    def add(self, call: Spanning) -> None:
        x, *more = (torch.empty_like(x, device="meta") for x in call.mine)
        out = torch.empty_like(call.expected, device="meta")
        for node in (0, self.ranks.nodes.world_size - 1):
            nodes, local = self.ranks.nodes.world_size, self.ranks.node.rank
            mesh = Mesh(node, nodes, local, self.local, lambda *_: (), _nothing)
            if isinstance(call, Exchange):
                OPERATORS[call.op].across(self.move, x, out, mesh, *call.options)
            elif isinstance(call, Product):
                OPERATORS[call.op].across(self.multiply, _nothing, x, *more, out, NO_EPILOGUE, mesh)
            else:
                options = {"causal": call.causal, "layout": call.layout}
                self.layout = call.layout
                problem = checked_attention(x, *more, call.ranks, **options)
                attend_across(self.attend, problem, x, *more, mesh)

    def move(self, collective, x, out, *options) -> None:
        problem = checked_problem(collective.op, x, None, self.local, options)
        if problem not in self.found:
            self.found[problem] = [collective.steps(problem, self.engine)]

    def multiply(self, operator, a, b, out, epilogue) -> None:
        problem = checked_product(operator.op, a, b, self.local)
        if problem not in self.found:
            choice = choice_of("fused", problem, self.ranks.node)
            self.found[problem] = operator.compiled_programs(problem, choice)

    def attend(self, q, k, v, causal) -> tuple[torch.Tensor, torch.Tensor]:
        layout = self.layout if causal else "contiguous"
        problem = checked_attention(q, k, v, self.local, causal=causal, layout=layout)
        if problem not in self.found:
            self.found[problem] = [sp_attention_plan(problem, tiles_for(problem))]
        return torch.empty_like(q), q.new_empty(problem.lse_shape)


def _nothing(*_) -> None: ...


def compile_all(mesh: DeviceMesh, engines: Sequence[str]) -> None:
    """Compile the programs of most checks in parallel; the nodes divide them, as they share a
    cache."""
    ranks = ranks_of(name_of(mesh))
    if not isinstance(ranks, TwoLevels):
        return
    every = []
    for engine in engines:
        if engine != "nccl":
            programs = Programs(ranks, engine)
            for call in calls_of(mesh, engine, large=True):
                programs.add(call)
            every += [program for found in programs.found.values() for program in found]
    compile_ahead(every[ranks.nodes.rank :: ranks.nodes.world_size], mesh.get_group("local"))
    dist.barrier()


def check_values(mesh, engine) -> str:
    return values(calls_of(mesh, engine, large=True), SETS)


def check_bits(mesh, engine) -> str:
    """Equal inputs give equal bits even if sums depend on the order, on all ranks of a sum."""
    for call in calls_of(mesh, engine):
        generator = torch.Generator(DEVICE).manual_seed(0)
        for x in (x for operands in call.every for x in operands):
            x.normal_(generator=generator)
        first = call().clone()
        if any(not torch.equal(call(), first) for _ in range(10)):
            return f"{call}: not the same in each call"
        error = relative_error(first, call.by_one(call.every, call.rank))
        if not error <= call.tolerance:
            return f"{call}: relative error {error:.1e}"
        if call.is_equal and len(digests(first)) > 1:
            return f"{call}: not the same on all ranks"
    return ""


def digests(x: torch.Tensor) -> set[str]:
    """Return the different digests of a tensor on all ranks."""
    digest = hashlib.sha256(x.cpu().view(torch.uint8).numpy().tobytes()).hexdigest()
    every = [""] * dist.get_world_size()
    dist.all_gather_object(every, digest)
    return set(every)


def check_back_to_back(mesh, engine, calls: int = 100) -> str:
    """Many calls without host synchronization, with random delays of ranks."""
    sets = [calls_of(mesh, engine, number) for number in range(SETS)]
    return back_to_back([call for calls_of_set in sets for call in calls_of_set], calls)


def check_gradients(mesh, engine) -> str:
    """Gradients are those of one process, eager and compiled."""
    for call in calls_of(mesh, engine):
        weights, rights = right_gradients(call)
        torch.compiler.reset()
        compiled = torch.compile(call.call, backend="aot_eager", fullgraph=True)
        for what, function in (("eager", call.call), ("compiled", compiled)):
            operands = [x.clone().requires_grad_() for x in call.mine]
            result = function(*operands)
            actual = torch.autograd.grad((result * weights).sum(), operands)
            for number, (x, y) in enumerate(zip(actual, rights, strict=True)):
                if not (relative_error(x, y) <= call.tolerance or torch.equal(x.float(), y)):
                    return f"{call}: {what}: the gradient of argument {number} is wrong"
    return ""


def right_gradients(call: Spanning) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:
    """Return weights of the result of this rank, and the gradients of its inputs.

    The weights of a sum that all ranks receive are equal, see ``all_reduce``.
    """
    every = [[x.float().requires_grad_() for x in operands] for operands in call.every]
    same = call.op in ("all_reduce", "matmul_all_reduce")
    weights = [
        torch.empty_like(call.expected).random_(
            0, 3, generator=torch.Generator(DEVICE).manual_seed(7 + (0 if same else rank))
        ).sub_(1)
        for rank in range(call.ranks)
    ]  # fmt: skip
    results = [call.by_one(every, rank) for rank in range(call.ranks)]
    loss = sum((y * w.float()).sum() for y, w in zip(results, weights, strict=True))
    loss = loss / call.ranks if same else loss
    rights = torch.autograd.grad(loss, every[call.rank], materialize_grads=True)
    return weights[call.rank], rights


def check_graph(mesh, engine, replays: int = 20) -> str:
    """One call of each in one graph, replayed with changing inputs. gloo between nodes is
    refused."""
    calls = calls_of(mesh, engine)
    if engine == "nccl":  # the host computes the positions of its rows
        calls = [call for call in calls if not isinstance(call, Attention)]
    if dist.get_backend(mesh.get_group("node")) == "gloo":
        for call in calls:
            call()
        torch.cuda.synchronize()
        return next(filter(None, map(not_refused, calls)), "")
    # NCCL's watchdog, another thread, may query events.
    return replayed(calls, replays, period=1, mode="thread_local")


def not_refused(call: Spanning) -> str:
    """Return what is wrong unless a capture of the call ends in one sentence."""
    try:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            call.call(*call.mine)
    except tw.TileWeaveError as error:
        is_right = f"{call.op}: gloo connects the global ranks" in str(error)
        return "" if is_right else f"{call}: refused with {error}"
    return f"{call}: captured, with gloo between nodes"


CHECKS = {
    "values": check_values,
    "bits": check_bits,
    "back to back": check_back_to_back,
    "gradients": check_gradients,
    "graph": check_graph,
}
DEFAULT = [name for name in CHECKS if "graph" not in name]
"""Checks that run unless others are named."""


class Staged:
    """Transfers between CPUs, of tensors that are copied to the GPU when they have arrived."""

    def __init__(self, works: list, arrived: list, received: Sequence[torch.Tensor]) -> None:
        self.works, self.arrived, self.received = works, arrived, received

    def wait(self) -> None:
        for work in self.works:
            work.wait()
        for x, y in zip(self.received, self.arrived, strict=True):
            x.copy_(y)


def transfer_through_host() -> None:
    """Replace transfers between nodes: gloo has none between GPUs."""
    start = nccl.start_exchanges

    def start_exchanges(sent, target, received, source, group) -> list[Staged]:
        arrived = [torch.empty_like(x, device="cpu") for x in received]
        works = start([x.cpu() for x in sent], target, arrived, source, group)
        return [Staged(works, arrived, received)]

    nccl.start_exchanges = start_exchanges


def mesh_of(shape: tuple[int, int]) -> DeviceMesh:
    names, gpus = ("node", "local"), torch.cuda.device_count()
    if gpus >= shape[0] * shape[1] or not GPU:
        return init_device_mesh(DEVICE, shape, mesh_dim_names=names)
    # NCCL, between nodes, takes a GPU once.
    gpu = int(os.environ["LOCAL_RANK"]) // shape[1] % gpus
    os.environ["LOCAL_RANK"] = str(gpu)
    torch.cuda.set_device(gpu)
    dist.init_process_group("gloo")
    backends = {"node": "nccl" if gpus >= shape[0] else "gloo", "local": "gloo"}
    if gpus < shape[0]:
        transfer_through_host()
    return init_device_mesh("cuda", shape, mesh_dim_names=names, backend_override=backends)


def engines_of(options: argparse.Namespace) -> Iterator[str]:
    """Yield the engines that work here."""
    if not GPU:
        yield "nccl"
        return
    yield from dict.fromkeys([*transports_here(options.transports), *options.strategies])


def main() -> int:
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("checks", nargs="*", metavar="CHECK", help=", ".join(CHECKS))
    parser.add_argument("--transports", nargs="*", default=TRANSPORTS, choices=TRANSPORTS)
    parser.add_argument("--strategies", nargs="*", default=STRATEGIES, choices=STRATEGIES)
    parser.add_argument("--local-world-size", type=int, default=max(1, ranks // 2))
    options = parser.parse_args()
    local = options.local_world_size
    shape = ranks // local, local
    mesh = mesh_of(shape)
    rank, failed = dist.get_rank(), 0
    if GPU:
        tw.init(mesh.get_group("local"), heap_bytes=HEAP_BYTES)
        compile_all(mesh, [*engines_of(options)])
    for name in options.checks or DEFAULT:
        for engine in engines_of(options) if runs_here(name, ("graph",)) else ():
            fault = CHECKS[name](mesh, engine)
            failed += bool(fault)
            dist.barrier()
            where = f"{shape[0]} x {local}, {engine if GPU else 'gloo'}"
            print(f"rank {rank}: {name} ({where}): {fault or 'right'}", flush=True)
    if GPU:
        tw.finalize()
    dist.destroy_process_group()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
