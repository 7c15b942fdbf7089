"""Seconds to the first step of a model, with an empty cache of kernels.

    python tests/gpu/prepare.py [--ranks 2]

Starts torchrun for each mode: ``eager``, where operators compile one after the other; ``prepare``,
where ``tw.prepare`` compiles before; ``compile``, where the first call of ``torch.compile`` does.
The last two must compile all kernels of forward and gradients together. Results are compared with
NCCL.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from unittest import mock

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import tileweave as tw
from tests.on_gpus import GPU, Verdicts, main, parser_of
from tileweave import ops
from tileweave.ops.core import compiled
from tileweave.ops.core.groups import group_of

MODES = ("eager", "prepare", "compile")
ROWS, HIDDEN, WIDTHS = 1024, 2048, (4096, 6144)
ERROR = 5e-2


class Layer(torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        memory = {"device": "cuda" if GPU else "cpu", "dtype": torch.bfloat16}
        self.up = torch.nn.Parameter(torch.randn(width, HIDDEN, **memory) * HIDDEN**-0.5)
        self.down = torch.nn.Parameter(torch.randn(HIDDEN, width, **memory) * width**-0.5)

    def forward(self, x: torch.Tensor, strategy: str) -> torch.Tensor:
        hidden = ops.all_gather_matmul(x, self.up.t(), strategy=strategy)
        return x + ops.matmul_reduce_scatter(hidden, self.down.t(), strategy=strategy)


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(map(Layer, WIDTHS))

    def forward(self, x: torch.Tensor, strategy: str = "fused" if GPU else "nccl") -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, strategy)
        return x


def verdicts(options: argparse.Namespace) -> Verdicts:
    (mode,) = options.checks
    group, counts, seconds = group_of(""), [], []
    model, x = Model(), torch.randn(ROWS, HIDDEN, dtype=torch.bfloat16)
    x = x.to(group.device).requires_grad_()

    def compile_ahead(*args):
        begun = genuine(*args)
        counts.append(begun.kernels)
        return begun

    def step(forward) -> list[torch.Tensor]:
        result = forward(x)
        return [result.detach(), *torch.autograd.grad(result.sum(), [x, *model.parameters()])]

    def timed(call):
        begin = time.perf_counter()
        result = call()
        group.synchronize()
        seconds.append(time.perf_counter() - begin)
        return result

    genuine = compiled.compile_ahead
    with mock.patch.object(compiled, "compile_ahead", compile_ahead):
        if mode == "prepare":
            timed(lambda: tw.prepare(model, x).wait())
        forward = torch.compile(model) if mode == "compile" else model
        results = timed(lambda: step(forward))
    numbers = [count for count in counts if count]
    expected = step(lambda x: model(x, "nccl"))
    errors = [
        ((a.float() - b.float()).norm() / b.float().norm()).item()
        for a, b in zip(results, expected, strict=True)
    ]
    fault = f"relative error {max(errors):.1e}" if max(errors) > ERROR else ""
    if GPU and mode != "eager" and len(numbers) != 1:
        fault = fault or f"{numbers} kernels were compiled together; expected one number"
    times = " + ".join(f"{s:.1f}" for s in seconds)
    yield mode, fault, f"{times} s to the end of the first step", f"kernels compiled: {numbers}"


def start(ranks: int) -> int:
    """Run all modes, and return the exit status."""
    failed = 0
    for mode in MODES:
        with tempfile.TemporaryDirectory() as cache:
            launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
            command = [*launch, f"--nproc-per-node={ranks}", __file__, mode]
            names = "TILELANG_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"
            caches = {name: f"{cache}/{name}" for name in names}
            failed |= subprocess.run(command, env=os.environ | caches).returncode
    return failed


if __name__ == "__main__":
    parser = parser_of(__doc__, MODES)
    parser.add_argument("--ranks", type=int, default=max(1, torch.cuda.device_count()))
    if "RANK" not in os.environ:
        sys.exit(start(parser.parse_args().ranks))
    if GPU:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    sys.exit(main(verdicts, parser, heap_bytes=1 << 30))
