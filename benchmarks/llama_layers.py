"""Time layers of Llama-70B by torch.compile: with NCCL, async-TP, and TileWeave's operators.

    python benchmarks/llama_layers.py [--ranks 2] [--modes compile async-tp tileweave] [--layers 4]
        [--rows 8192] [--then 8191 5000 777 64 1] [--runs 12]

Starts torchrun twice for each mode: with empty caches of TileLang, Inductor and Triton, which are
in a temporary folder, and with the caches that the first run left. The weights are split by tensor
parallelism over all ranks, the rows of one sequence by sequence parallelism.

- ``compile``: ``torch.compile``, collectives by NCCL
- ``async-tp``: also Inductor's ``_micro_pipeline_tp``, which calls two operators of ``symm_mem``
- ``tileweave``: ``tileweave.integrations.torch.enable()``

``cold`` and ``warm`` are the seconds of the first forward and backward, with ``tw.prepare`` before
them for ``tileweave``. The times in ms are medians
of ``--runs`` calls. All are those of the slowest rank. ``error`` is the largest relative error of
the result and of all gradients, compared with eager torch. ``kernels`` is ``tw.stats().kernels``
and ``calls`` the number of calls of fused operators, after the first forward and backward. The
forward is that of training: it keeps what the backward needs.

Then the operators of TileWeave are called without ``torch.compile``, which would compile each size
itself: with ``--rows`` first, then with the sizes of ``--then``. A size is rounded down to a
multiple of the number of ranks, and is at least that number. Each row has the seconds of the first
forward and backward, the kernels that are compiled for them, which must be 0, and the
GEMMs of a layer's forward that are fused.

Without GPUs, tiny layers run with gloo, which only tests this file; there is no async-TP.
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.distributed._symmetric_memory as symm_mem
from torch import Tensor, nn
from torch._inductor import config as inductor
from torch.nn import functional

import tileweave as tw
from tileweave import ops
from tileweave.integrations.torch import enable, explain

GPU = torch.cuda.is_available()
MODES = ("compile", "async-tp", "tileweave") if GPU else ("compile", "tileweave")
# Older releases of torch have no other names of these collectives.
warnings.filterwarnings("ignore", ".*_tensor_autograd` is deprecated", FutureWarning)
CACHES = "TILELANG_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"
HEAP_BYTES = 6 << 30
ERROR = 5e-2
"""Largest relative error of bf16 results of some layers."""
WARMUPS = 4
SLEEP = 40_000_000
"""Cycles, about 20 ms, that a GPU sleeps before each call, so that the host is ahead of it."""


def attend(*qkv: Tensor) -> Tensor:
    """Return causal attention of one sequence, all (rows, heads, head_dim)."""
    heads = (x.transpose(0, 1)[None] for x in qkv)
    attended = functional.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
    return attended[0].transpose(0, 1)


class Products(NamedTuple):
    """The two products of a tensor-parallel layer, and its attention.

    Attributes:
        gathered: multiplies the rows of all ranks by the transposed weights.
        scattered: multiplies rows by the transposed weights; returns this rank's rows of the sum.
        attend: attention of this rank's heads.
    """

    gathered: Callable[[Tensor, Tensor], Tensor]
    scattered: Callable[[Tensor, Tensor], Tensor]
    attend: Callable[[Tensor, Tensor, Tensor], Tensor] = attend


TORCH = Products(
    lambda x, w: funcol.all_gather_tensor_autograd(x, 0, dist.group.WORLD) @ w.t(),
    lambda x, w: funcol.reduce_scatter_tensor_autograd(x @ w.t(), "sum", 0, dist.group.WORLD),
)
TILEWEAVE = Products(
    lambda x, w: ops.all_gather_matmul(x, w.t()), lambda x, w: ops.matmul_reduce_scatter(x, w.t())
)


class Layer(nn.Module):
    """This rank's weights of a decoder layer; random."""

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        ranks, hidden, self.dim = dist.get_world_size(), options.hidden, options.head_dim
        self.columns = [h * self.dim // ranks for h in (options.heads, *[options.kv_heads] * 2)]
        width = options.intermediate // ranks
        memory = {"device": "cuda", "dtype": torch.bfloat16} if GPU else {}

        def weights(rows: int, columns: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(rows, columns, **memory) * hidden**-0.5)

        self.qkv = weights(sum(self.columns), hidden)
        self.out = weights(hidden, self.columns[0])
        self.gate_up = weights(2 * width, hidden)
        self.down = weights(hidden, width)
        self.norms = nn.ParameterList(torch.ones(hidden, **memory) for _ in range(2))

    def forward(self, x: Tensor, products: Products) -> Tensor:
        before_attention, before_mlp = self.norms
        y = functional.rms_norm(x, before_attention.shape, before_attention)
        qkv = products.gathered(y, self.qkv).split(self.columns, -1)
        attended = products.attend(*(t.unflatten(-1, (-1, self.dim)) for t in qkv))
        x = x + products.scattered(attended.flatten(1), self.out)
        y = functional.rms_norm(x, before_mlp.shape, before_mlp)
        gate, up = products.gathered(y, self.gate_up).chunk(2, -1)
        return x + products.scattered(functional.silu(gate) * up, self.down)

    def num_fused(self, rows: int) -> int:
        """Return how many of the four GEMMs of a forward are fused."""
        gathered, scattered = ops.all_gather_matmul, ops.matmul_reduce_scatter
        gemms = (
            (gathered, self.qkv), (scattered, self.out), (gathered, self.gate_up),
            (scattered, self.down),
        )  # fmt: skip
        ranks = dist.get_world_size()
        strategies = (
            ops.strategy_of(
                op, w.new_empty(rows // ranks if op is gathered else rows, w.shape[1]), w.t()
            )
            for op, w in gemms
        )
        return sum(s.name == "fused" for s in strategies)


class Model(nn.Module):
    """Layers, with the products of the caller."""

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(options) for _ in range(options.layers))

    def forward(self, x: Tensor, products: Products) -> Tensor:
        for layer in self.layers:
            x = layer(x, products)
        return x


class Step(NamedTuple):
    """Forward and backward of a model, on random rows."""

    forward: Callable[[Tensor], Tensor]
    model: Model
    x: Tensor
    grad: Tensor

    @classmethod
    def of_rows(cls, forward: Callable[[Tensor], Tensor], model: Model, rows: int) -> "Step":
        torch.manual_seed(rows + dist.get_rank())
        weights = model.layers[0].qkv
        x, grad = weights.new_empty(2, rows // dist.get_world_size(), weights.shape[1]).normal_()
        return cls(forward, model, x, grad)

    def infer(self) -> Tensor:
        """Return the result of the forward of training, which torch.compile has compiled."""
        return self.forward(self.x.detach().requires_grad_())

    def train(self) -> list[Tensor]:
        """Return the result and all gradients."""
        self.model.zero_grad()
        x = self.x.detach().requires_grad_()
        y = self.forward(x)
        y.backward(self.grad)
        return [y.detach(), x.grad, *(p.grad for p in self.model.parameters())]


def largest(value: float) -> float:
    """Return the largest value of all ranks."""
    tensor = torch.tensor(value, dtype=torch.float64, device="cuda" if GPU else "cpu")
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return tensor.item()


def synchronize() -> None:
    if GPU:
        torch.cuda.synchronize()


def seconds(call: Callable[[], Any]) -> tuple[float, Any]:
    """Return the time of a call on the slowest rank in s, and its result."""
    synchronize()
    dist.barrier()
    begin = time.perf_counter()
    result = call()
    synchronize()
    return largest(time.perf_counter() - begin), result


def milliseconds(call: Callable[[], Any], runs: int) -> float:
    """Return the median time of a call on the slowest rank in ms."""
    for _ in range(WARMUPS):
        call()
    if not GPU:
        return 1e3 * statistics.median(seconds(call)[0] for _ in range(runs))
    token, times = torch.zeros(1, device="cuda"), []
    for _ in range(runs):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(SLEEP)
        dist.all_reduce(token)  # the GPUs begin together
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return largest(statistics.median(times))


def error_of(tensors: Iterable[Tensor], expected: Iterable[Tensor]) -> float:
    """Return the largest relative error of all tensors and ranks."""
    pairs = zip(tensors, expected, strict=True)
    errors = [(a.float() - b.float()).norm() / b.float().norm().clamp(min=1e-9) for a, b in pairs]
    return largest(torch.stack(errors).nan_to_num(torch.inf).max().item())


@contextlib.contextmanager
def operators_of(mode: str) -> Iterator[None]:
    """Let Inductor use the operators of a mode."""
    if mode == "tileweave":
        with enable():
            yield
    elif mode == "async-tp":
        with warnings.catch_warnings():  # deprecated, but Inductor asks for it
            warnings.simplefilter("ignore", FutureWarning)
            symm_mem.enable_symm_mem_for_group(dist.group.WORLD.group_name)
        with inductor.patch(_micro_pipeline_tp=True):
            yield
    else:
        yield


@contextlib.contextmanager
def ranks(heap_bytes: int | None) -> Iterator[None]:
    """Join the ranks.

    Args:
        heap_bytes: size of the symmetric heap; None for none.
    """
    if GPU:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        dist.init_process_group("gloo")
    if GPU and heap_bytes is not None:
        tw.init(heap_bytes=heap_bytes)
    yield
    if GPU and heap_bytes is not None:
        tw.finalize()
    dist.destroy_process_group()


def num_calls() -> int:
    """Return the number of calls of the fused operators that TileWeave computes."""
    return sum(kind.count for kind in explain().calls if kind.obstacle is None)


def measure(options: argparse.Namespace, model: Model) -> dict[str, float]:
    """Return the row of a mode; with empty caches only the first time."""
    compiled = torch.compile(lambda x: model(x, TORCH), fullgraph=True)
    step = Step.of_rows(compiled, model, options.rows)
    expected = step._replace(forward=lambda x: model(x, TORCH)).train()

    def first_step() -> list[Tensor]:
        if options.modes == ["tileweave"]:
            prepared.append(tw.prepare(lambda x: model(x, TILEWEAVE), step.x.requires_grad_()))
            say(f"{tw.stats().compiled} kernels to compile", time.perf_counter() - begin)
        return step.train()

    begin, prepared = time.perf_counter(), []
    first, results = seconds(first_step)
    for compilation in prepared:
        compilation.wait()  # the later process finds the kernels for other sizes
    row = {"first": first, "kernels": tw.stats().kernels, "calls": num_calls()}
    row["error"] = error_of(results, expected)
    if options.caches == "warm":
        del expected, results
        row["forward"] = milliseconds(step.infer, options.runs)
        row["both"] = milliseconds(step.train, options.runs)
    return row


def measure_sizes(options: argparse.Namespace, model: Model) -> list[dict[str, float]]:
    """Return a row of each further size, of calls of TileWeave's operators without torch.compile.
    The first is that of ``--rows``."""
    rows = []
    for asked in (options.rows, *options.then):
        size = divisible(asked, dist.get_world_size())
        step = Step.of_rows(lambda x: model(x, TILEWEAVE), model, size)
        expected = step._replace(forward=lambda x: model(x, TORCH)).train()
        compiled = tw.stats().compiled
        first, results = seconds(step.train)
        rows.append({
            "asked": asked, "size": size, "first": first,
            "compiled": tw.stats().compiled - compiled,
            "fused": model.layers[0].num_fused(size), "error": error_of(results, expected),
        })  # fmt: skip
        say(f"tileweave, {size} rows", first)
    return rows


def divisible(rows: int, ranks: int) -> int:
    """Return ``rows`` rounded down to a multiple of the number of ranks, but at least that."""
    return max(rows // ranks, 1) * ranks


def say(phase: str, s: float) -> None:
    if int(os.environ.get("RANK", "0")) == 0:
        print(f"{phase}: {s:.1f} s", flush=True)


def run_rank(options: argparse.Namespace) -> None:
    """Measure a mode in this process of torchrun; rank 0 writes the result."""
    (mode,), name = options.modes, f"{options.modes[0]}, {options.caches}"
    begin = time.perf_counter()
    with ranks(HEAP_BYTES if mode == "tileweave" else None), operators_of(mode):
        torch.manual_seed(dist.get_rank())
        model = Model(options)
        say(f"{name}: ranks and weights", time.perf_counter() - begin)
        begin = time.perf_counter()
        result = {"mode": measure(options, model)}
        say(f"{name}: first forward and backward", result["mode"]["first"])
        say(f"{name}: all of {options.rows} rows", time.perf_counter() - begin)
        if mode == "tileweave" and options.caches == "warm":
            result["sizes"] = measure_sizes(options, model)
        if dist.get_rank() == 0:
            options.result.write_text(json.dumps(result))


def start(options: argparse.Namespace, mode: str, caches: str, folder: Path) -> dict[str, Any]:
    """Measure a mode by torchrun, with the caches in ``folder``. Return its result."""
    result = folder / f"{caches}.json"
    begin = time.perf_counter()
    command = (sys.executable, "-m", "torch.distributed.run", "--standalone")
    own = (*sys.argv, "--modes", mode, "--caches", caches, "--result", str(result))
    subprocess.run(
        (*command, f"--nproc-per-node={options.ranks}", *own), check=True,
        env=os.environ | {name: str(folder / name) for name in CACHES},
    )  # fmt: skip
    say(f"{mode}, {caches}: all", time.perf_counter() - begin)
    return json.loads(result.read_text())


def print_tables(options: argparse.Namespace, results: dict[str, Any]) -> list[str]:
    """Print both tables. Return the faults that they show."""
    faults, limit = [], f"expected at most {ERROR}"
    device = torch.cuda.get_device_name() if GPU else "CPU"
    print(f"\n{options.ranks} x {device}, {options.layers} layers, {options.rows} rows")
    print(
        "| mode | cold, s | warm, s | forward, ms | with backward, ms | error | kernels | calls |"
    )
    print("|---" * 8 + "|")
    for mode, runs in results.items():
        cold, warm = runs["cold"]["mode"], runs["warm"]["mode"]
        times = f"{cold['first']:.1f} | {warm['first']:.1f} | {warm['forward']:.3f}"
        error = max(cold["error"], warm["error"])
        counts = f"{warm['kernels']} | {warm['calls']}" if mode == "tileweave" else "- | -"
        print(f"| {mode} | {times} | {warm['both']:.3f} | {error:.1e} | {counts} |")
        if mode == "tileweave" and not warm["calls"]:
            faults.append("tileweave: 0 calls of its operators; expected Inductor to call them")
        if error > ERROR:
            faults.append(f"{mode}: relative error {error:.1e}; {limit}")
    for first, *others in (r["warm"]["sizes"] for r in results.values() if "sizes" in r["warm"]):
        print(
            "\n| rows asked for | rows | first, s | kernels compiled | fused GEMMs of 4 | error |"
        )
        print("|---" * 6 + "|")
        for row in (first, *others):
            cells = f"{row['asked']} | {row['size']} | {row['first']:.3f} | {row['compiled']}"
            print(f"| {cells} | {row['fused']} | {row['error']:.1e} |")
            if (error := row["error"]) > ERROR:
                faults.append(f"{row['size']} rows: relative error {error:.1e}; {limit}")
        faults += [
            f"{r['size']} rows: {r['compiled']} kernels compiled; expected 0"
            for r in others
            if r["compiled"]
        ]
    return faults


def add_layer_options(parser: argparse.ArgumentParser) -> None:
    """Add the sizes of layers, and the number of runs."""
    parser.add_argument("--layers", type=int, default=4 if GPU else 1)
    parser.add_argument("--hidden", type=int, default=8192 if GPU else 64)
    parser.add_argument("--intermediate", type=int, default=28672 if GPU else 128)
    parser.add_argument("--heads", type=int, default=64 if GPU else 8)
    parser.add_argument("--kv-heads", type=int, default=8 if GPU else 4)
    parser.add_argument("--head-dim", type=int, default=128 if GPU else 8)
    parser.add_argument("--runs", type=int, default=12 if GPU else 2)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=torch.cuda.device_count() if GPU else 2)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    parser.add_argument("--rows", type=int, default=8192 if GPU else 64)
    parser.add_argument(
        "--then", type=int, nargs="*", default=[8191, 5000, 777, 64, 1] if GPU else [63, 1]
    )
    add_layer_options(parser)
    parser.add_argument("--caches", choices=["cold", "warm"], help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if "RANK" in os.environ and options.result is None:
        parser.error("started by torchrun; expected python, which starts torchrun for each mode")
    return options


def main() -> None:
    options = parsed()
    if options.result is not None:
        return run_rank(options)
    for name in ("heads", "kv_heads", "intermediate", "rows"):
        if (value := getattr(options, name)) % options.ranks:
            raise SystemExit(f"{name}={value}; expected a multiple of the {options.ranks} ranks")
    results = {}
    for mode in options.modes:
        with tempfile.TemporaryDirectory() as folder:
            results[mode] = {
                caches: start(options, mode, caches, Path(folder)) for caches in ("cold", "warm")
            }
    if faults := print_tables(options, results):
        raise SystemExit("\n".join(faults))


if __name__ == "__main__":
    main()
