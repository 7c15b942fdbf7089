"""All-gather and reduce-scatter on several nodes: P2P in a node, NCCL between nodes.

    torchrun --nproc-per-node=4 tests/gpu/two_levels.py [CHECK ...] [--local-world-size 2]

One machine's GPUs are taken for nodes of ``--local-world-size`` GPUs, by default two nodes. Results
are compared with those of torch.distributed without nodes. Without a GPU the same checks run with
gloo: that tries this file, not the transports. Four ranks on two GPUs are two nodes whose ranks
share one in time slices.
"""

import argparse
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import tileweave as tw
from tileweave import ops

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.on_gpus import GPU, transports_here

TRANSPORTS = ["copy_engine", "tma", "ldst", "nccl"]
HEAP_BYTES = 4 << 30
SHAPES = [(1024, 256), (7, 8), (3, 5), (5 << 20, 4)]
"""Shapes of a rank's result or input; parts of ``(3, 5)`` are unaligned."""


class Exchange:
    """One collective with its input and reference."""

    def __init__(self, op: str, shape, transport: str, mesh) -> None:
        self.op, self.mesh, self.transport = op, mesh, transport if GPU else "nccl"
        rows = shape[0] * (dist.get_world_size() if op == "reduce_scatter" else 1)
        self.x = torch.empty(
            rows, *shape[1:], dtype=torch.bfloat16, device="cuda" if GPU else "cpu"
        )
        self.name = f"{op} of {tuple(self.x.shape)} by {self.transport}"
        self.refill()
        self.out = self.call(self.x)

    def refill(self) -> None:
        """Fill the input with integers whose sums are exact in any order and type."""
        self.x.copy_(torch.randint(0, 9, self.x.shape, device=self.x.device))

    def call(self, x, out=None) -> torch.Tensor:
        return getattr(ops, self.op)(x, self.mesh, out=out, transport=self.transport)

    def again(self) -> torch.Tensor:
        """Return the result of one more call in ``out``, which is overwritten with 77 first."""
        return self.call(self.x, self.out.fill_(77))

    def flat(self, x) -> torch.Tensor:
        return getattr(ops, self.op)(x, dist.group.WORLD, transport="nccl")

    def fault(self, actual, right=None) -> str:
        """Return what is wrong, or ""."""
        right = self.flat(self.x) if right is None else right
        if actual.shape != right.shape:
            return f"{self.name}: shape {tuple(actual.shape)}; expected {tuple(right.shape)}"
        wrong = int((actual != right).sum())
        return f"{self.name}: {wrong} of {right.numel()} elements are wrong" if wrong else ""


def exchanges(mesh, transport, shapes=SHAPES) -> list[Exchange]:
    return [
        Exchange(op, shape, transport, mesh)
        for op in ("all_gather", "reduce_scatter")
        for shape in (shapes if GPU else shapes[:3])
        if transport != "tma" or shape != (3, 5)
    ]


def check_values(mesh, transport) -> str:
    for one in exchanges(mesh, transport):
        for _ in range(3):
            one.refill()
            if fault := one.fault(one.again()):
                return fault
    return ""


def check_bits(mesh, transport) -> str:
    """Equal inputs give equal bits even if sums depend on the order."""
    for one in exchanges(mesh, transport, SHAPES[:2]):
        if one.op == "all_gather":
            continue
        one.x.normal_()
        first = one.call(one.x)
        if any(not torch.equal(one.again(), first) for _ in range(10)):
            return f"{one.name}: not the same in each call"
        total = ops.reduce_scatter(one.x.float(), dist.group.WORLD, transport="nccl")
        error = ((first.float() - total).norm() / total.norm()).item()
        if not error < 1e-2:
            return f"{one.name}: relative error {error:.1e}"
    return ""


def check_back_to_back(mesh, transport, calls: int = 100) -> str:
    """Many calls without host synchronization, with random delays of ranks."""
    torch.manual_seed(1)
    every = [exchanges(mesh, transport, SHAPES[:2]) for _ in range(3)]
    choice = torch.randint(len(every[0]), (calls,)).tolist()
    rights = [[one.flat(one.x) for one in given] for given in every]
    torch.manual_seed(100 + dist.get_rank())
    results = []
    for number, which in enumerate(choice):
        if GPU and torch.rand(()) < 0.3:
            torch.cuda._sleep(int(torch.randint(1, 400_000, ())))
        results.append((number % 3, which, every[number % 3][which].again().clone()))
    for given, which, result in results:
        if fault := every[given][which].fault(result, rights[given][which]):
            return fault
    return ""


def check_gradients(mesh, transport) -> str:
    """Gradients equal those without nodes, eager and compiled."""
    for one in exchanges(mesh, transport, SHAPES[:1]):
        weight = torch.randint(0, 5, one.out.shape, device=one.x.device).to(one.x.dtype)
        torch.compiler.reset()
        compiled = torch.compile(one.call, backend="aot_eager", fullgraph=True)
        results = []
        for call in (one.flat, one.call, compiled):
            x = one.x.clone().requires_grad_()
            results.append(torch.autograd.grad((call(x) * weight).sum(), x)[0])
        for what, gradient in zip(("eager", "compiled"), results[1:], strict=True):
            if not torch.equal(gradient, results[0]):
                return f"{one.name}: {what}: gradients are wrong"
    return ""


CHECKS = {
    "values": check_values,
    "bits": check_bits,
    "back to back": check_back_to_back,
    "gradients": check_gradients,
}


def mesh_of(shape: tuple[int, int]) -> DeviceMesh:
    names = ("node", "local")
    if torch.cuda.device_count() >= shape[0] * shape[1] or not GPU:
        return init_device_mesh("cuda" if GPU else "cpu", shape, mesh_dim_names=names)
    if torch.cuda.device_count() < shape[0]:
        sys.exit(f"{torch.cuda.device_count()} GPU(s) for {shape[0]} nodes; expected one each")
    # NCCL, between nodes, takes a GPU once.
    node = int(os.environ["LOCAL_RANK"]) // shape[1]
    os.environ["LOCAL_RANK"] = str(node)
    torch.cuda.set_device(node)
    dist.init_process_group("gloo")
    backends = {"node": "nccl", "local": "gloo"}
    return init_device_mesh("cuda", shape, mesh_dim_names=names, backend_override=backends)


def main() -> int:
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("checks", nargs="*", metavar="CHECK", help=", ".join(CHECKS))
    parser.add_argument("--transports", nargs="+", default=TRANSPORTS, choices=TRANSPORTS)
    parser.add_argument("--local-world-size", type=int, default=max(1, ranks // 2))
    options = parser.parse_args()
    local = options.local_world_size
    shape = ranks // local, local
    mesh = mesh_of(shape)
    rank, failed = dist.get_rank(), 0
    if GPU:
        tw.init(mesh.get_group("local"), heap_bytes=HEAP_BYTES)
    torch.manual_seed(rank)
    transports = transports_here(options.transports) if GPU else TRANSPORTS[-1:]
    for name in options.checks or CHECKS:
        for transport in transports:
            fault = CHECKS[name](mesh, transport)
            failed += bool(fault)
            dist.barrier()
            where = f"{shape[0]} x {local}, {transport if GPU else 'gloo'}"
            print(f"rank {rank}: {name} ({where}): {fault or 'right'}", flush=True)
    if GPU:
        tw.finalize()
    dist.destroy_process_group()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
