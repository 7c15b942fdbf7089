"""Operators of two groups in one process: a 2 x 2 mesh whose axes communicate in turns.

    torchrun --nproc-per-node=4 tests/gpu/groups.py [CHECK ...]

Each launch multiplies on the axis "tp" and attends and exchanges on the axis "cp". The results are
compared with those of one process in fp32, which every rank computes. Ranks may share GPUs. Without
a GPU the launches run with gloo, on one stream.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.functional import scaled_dot_product_attention

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import tileweave as tw
from tests.on_gpus import GPU, Verdicts, main, parser_of, runs_here
from tileweave import ops

CHECKS = ("memory", "one_stream", "two_streams", "graph")
RANKS = 4
"""Number of processes. `make test-gpu` starts as many."""
SIDE = 2
"""Number of ranks along each axis."""
LAUNCHES, REPLAYS = 200, 20
INPUTS = 4
"""Number of input sets used in turn."""
ROWS, K, N, M = (128, 128, 256, 256) if GPU else (8, 16, 16, 16)
HEADS, DIM = (2, 64) if GPU else (2, 8)
ERROR = 2e-2
"""Largest relative error, by norms."""
FUSED = {"strategy": "fused"} if GPU else {}
DEVICE = "cuda" if GPU else "cpu"


class Inputs(NamedTuple):
    """Inputs of one rank."""

    shard: torch.Tensor
    wide: torch.Tensor
    rows: torch.Tensor
    narrow: torch.Tensor
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    parts: torch.Tensor


SHAPES = Inputs(
    (ROWS, K), (K, N), (M, K), (K, N),
    *((1, ROWS, HEADS, DIM),) * 3, (SIDE * 64, N),
)  # fmt: skip


def inputs_of(rank: int, number: int) -> Inputs:
    """Return the inputs of one rank and one launch, equal in all processes."""
    generator = torch.Generator().manual_seed(1000 * number + rank)
    tensors = (torch.randn(shape, generator=generator) for shape in SHAPES)
    return Inputs(*(x.bfloat16().to(DEVICE) for x in tensors))


class Layer:
    """Operators on both axes, and the results that they must have."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.tp, self.cp = mesh["tp"], mesh["cp"]
        row, column = mesh.get_coordinate()
        ranks = mesh.mesh.tolist()
        self.rank = ranks[row][column]
        self._along_tp, self._tp = ranks[row], column
        self._along_cp, self._cp = [line[column] for line in ranks], row
        self.inputs = [inputs_of(self.rank, number) for number in range(INPUTS)]
        self.expected = [self._expected(number) for number in range(INPUTS)]

    def on_tp(self, x: Inputs) -> list[torch.Tensor]:
        return [
            ops.all_gather_matmul(x.shard, x.wide, group=self.tp, **FUSED),
            ops.matmul_reduce_scatter(x.rows, x.narrow, group=self.tp, **FUSED),
        ]

    def on_cp(self, x: Inputs) -> list[torch.Tensor]:
        transport = "ldst" if GPU else "auto"
        return [
            ops.sp_attention(x.q, x.k, x.v, causal=True, group=self.cp, **FUSED),
            ops.all_to_all(x.parts, 0, 0, group=self.cp, transport=transport),
        ]

    def _expected(self, number: int) -> list[torch.Tensor]:
        own = inputs_of(self.rank, number)
        tp = [inputs_of(rank, number) for rank in self._along_tp]
        cp = [inputs_of(rank, number) for rank in self._along_cp]
        gathered = torch.cat([x.shard for x in tp]).float() @ own.wide.float()
        summed = sum(x.rows.float() @ x.narrow.float() for x in tp)
        q, k, v = (
            torch.cat([getattr(x, name) for x in cp], 1).float().transpose(1, 2) for name in "qkv"
        )
        attended = scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        parts = torch.cat([x.parts.chunk(SIDE)[self._cp] for x in cp])
        return [
            gathered, summed.chunk(SIDE)[self._tp], attended.chunk(SIDE, 1)[self._cp], parts.float()
        ]  # fmt: skip

    def fault(self, results: Iterable[tuple[int, list[torch.Tensor]]]) -> str:
        """Return what is wrong with the results of launches, given the numbers of their inputs."""
        worst = [0.0] * 4
        for number, tensors in results:
            for index, (x, y) in enumerate(zip(tensors, self.expected[number], strict=True)):
                worst[index] = max(worst[index], float((x.float() - y).norm() / y.norm()))
        wrong = [f"{error:.1e}" for error in worst if not error <= ERROR]
        return f"relative errors {', '.join(wrong)}; expected at most {ERROR:g}" if wrong else ""


def memory(layer: Layer) -> str:
    """Tensors, barriers and kernels of both groups; tensors of one in a kernel of the other."""
    for group, ranks in ((layer.tp, layer._along_tp), (layer.cp, layer._along_cp)):
        tensor = tw.symmetric((1 << 10,), torch.int32, group=group)
        tensor.local.fill_(layer.rank)
        tw.barrier(group=group)
        torch.cuda.synchronize()
        values = [tensor.peer(peer).unique().tolist() for peer in range(SIDE)]
        if values != [[rank] for rank in ranks] or tw.world_size(group) != SIDE:
            return f"peers hold {values}; expected {ranks}"
        tw.barrier(group=group)
        torch.cuda.synchronize()
        tensor.free()
    return ""


def one_stream(layer: Layer) -> str:
    return layer.fault(launched(layer, contextlib.nullcontext, contextlib.nullcontext))


def two_streams(layer: Layer) -> str:
    """The streams are ordered by the runtime only."""
    streams = [torch.cuda.Stream() for _ in range(2)]
    for stream in streams:
        stream.wait_stream(torch.cuda.current_stream())
    results = launched(layer, *(lambda s=s: torch.cuda.stream(s) for s in streams))
    torch.cuda.synchronize()
    return layer.fault(results)


def launched(
    layer: Layer, on_tp: Callable[[], contextlib.AbstractContextManager],
    on_cp: Callable[[], contextlib.AbstractContextManager],
) -> list[tuple[int, list[torch.Tensor]]]:  # fmt: skip
    """Launch back to back and return the results, with the numbers of their inputs."""
    results = []
    for launch in range(LAUNCHES):
        number = launch % INPUTS
        with on_tp():
            products = layer.on_tp(layer.inputs[number])
        with on_cp():
            results.append((number, [*products, *layer.on_cp(layer.inputs[number])]))
    return results


def graph(layer: Layer) -> str:
    """One graph of both axes on two streams; each replay has other inputs."""
    x = Inputs(*(tensor.clone() for tensor in layer.inputs[0]))
    layer.on_tp(x), layer.on_cp(x)  # compiles
    torch.cuda.synchronize()
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph):
        outer = torch.cuda.current_stream()
        side.wait_stream(outer)
        results = []
        for _ in range(3):
            products = layer.on_tp(x)
            with torch.cuda.stream(side):
                results.append([*products, *layer.on_cp(x)])
        outer.wait_stream(side)
    replayed = []
    for replay in range(REPLAYS):
        number = replay % INPUTS
        for own, given in zip(x, layer.inputs[number], strict=True):
            own.copy_(given)
        graph.replay()
        replayed += [(number, [tensor.clone() for tensor in tensors]) for tensors in results]
    return layer.fault(replayed)


def verdicts(options: argparse.Namespace) -> Verdicts:
    mesh = init_device_mesh(DEVICE, (SIDE, SIDE), mesh_dim_names=("cp", "tp"))
    if GPU:
        tw.init(mesh["tp"], heap_bytes=256 << 20)  # that of "cp" opens at its first use
    layer = Layer(mesh)
    for name in options.checks or CHECKS:
        if runs_here(name, ("memory", "two_streams", "graph")):
            yield name, globals()[name](layer)


if __name__ == "__main__":
    sys.exit(main(verdicts, parser_of(__doc__, CHECKS)))
