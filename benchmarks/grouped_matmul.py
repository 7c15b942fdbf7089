"""Time ops.grouped_matmul beside torch.nn.functional.grouped_mm and a dense GEMM by cuBLAS.

    python benchmarks/grouped_matmul.py [--gradients] [--fp8] [--swiglu] [--even] [--rep 200]
        [--case E M N K ...]

Times of triton's ``do_bench`` on one GPU, the median of three turns: the caches are cold. The dense
GEMM has the same number of rows and one weight; ``by expert`` is one GEMM of cuBLAS for each
expert. ``ours`` reads weights (E, N, K), ``(E, K, N)`` the other memory order. With ``--gradients``
the rows are repeated for the gradient of the weights, beside the 2-d forms of both. With ``--fp8``
they are repeated for fp8 operands: ``ours`` and ``by expert`` with scales of blocks, ``(E, K, N)``
with one scale for each expert, beside bf16. With ``--swiglu`` they are repeated for the epilogue,
beside the product of the others with two kernels of torch for SwiGLU; with ``--fp8`` also in fp8.

Rows choose their experts at random, or with ``--even`` all experts have equally many. Every result
is compared with that of torch. Without a GPU, small sizes run by plain torch once, which only tests
this file.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from typing import Any

import torch

from tileweave import ops
from tileweave.ops.moe import grouped_matmul as operator
from tileweave.ops.moe.kernels.grouped_gemm import SCALED, grouped_gemm
from tileweave.ops.moe.kernels.grouped_wgrad import grouped_wgrad
from tileweave.ops.moe.local_kernels import compiled

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
CASES = (
    (32, 35456, 4096, 7168),
    (32, 36992, 7168, 2048),
    (16, 32256, 3072, 4096),
    (32, 9728, 4096, 7168),
    (32, 3136, 4096, 7168),
    (32, 2048, 7168, 2048),
)
"""E, M, N and K of the mixtures that `benchmarks/LOG.md` measures."""
READ_TBPS = 4.2
"""Rate at which an H200 reads memory, in TB/s: the least time is that of reading the weights."""
TURNS = 3 if GPU else 1
"""Measurements of each call."""
FP8 = torch.float8_e4m3fn
FOUR = 4
"""cuBLAS accepts rows of fp8 and scales of weights in multiples of this number."""
LEAST_ROWS = 128
"""cuBLAS accepts no fewer rows of fp8."""
ERROR = 5e-3
"""Largest relative error; results are of the type of the operands."""
Times = dict[str, float]


def milliseconds(call: Callable[[], Any], rep: int) -> float:
    """Return the time of a call in ms."""
    if not GPU:
        started = time.perf_counter()
        call()
        return (time.perf_counter() - started) * 1e3
    from triton.testing import do_bench

    return do_bench(call, warmup=50, rep=rep)


def times_of(calls: dict[str, Callable[[], Any]], rep: int) -> Times:
    """Return the median time of each call in ms. The calls take turns, because the clock depends on
    what ran before."""
    turns = [{name: milliseconds(call, rep) for name, call in calls.items()} for _ in range(TURNS)]
    return {name: statistics.median(turn[name] for turn in turns) for name in calls}


def check(name: str, actual: torch.Tensor, expected: torch.Tensor) -> None:
    error = ((actual.float() - expected.float()).norm() / expected.float().norm()).item()
    if not error <= ERROR:
        raise SystemExit(f"{name}: relative error {error:.1e}")


def counts_of(experts: int, rows: int, even: bool) -> torch.Tensor:
    if even:
        return torch.full((experts,), rows // experts)
    return torch.bincount(torch.randint(0, experts, (rows,)), minlength=experts)


def by_expert(x: torch.Tensor, w: torch.Tensor, counts: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Return a call that multiplies the rows of each expert by a GEMM of cuBLAS."""
    out = x.new_empty(len(x), w.shape[1])
    parts = [tensor.split(counts.tolist()) for tensor in (x, out)]

    def multiply() -> torch.Tensor:
        for rows, weight, result in zip(parts[0], w, parts[1], strict=True):
            torch.mm(rows, weight.t(), out=result)
        return out

    return multiply


def fp8_by_expert(
    x: torch.Tensor, w: torch.Tensor, counts: torch.Tensor
) -> Callable[[], list[torch.Tensor]]:
    """Return a call that multiplies fp8 rows of each expert by a GEMM of cuBLAS, with scales of
    1 x 128 and 128 x 128, all of them 1.

    cuBLAS needs rows in fours, so a result can have a few rows too many.
    """
    from torch.nn.functional import ScalingType, scaled_mm

    parts = x.shape[1] // SCALED
    x = torch.cat([x, x[:FOUR]])
    of_w = torch.ones(-(-w.shape[1] // SCALED), parts, device=DEVICE).t()
    starts = (counts.cumsum(0) - counts).tolist()
    rows = [
        x[start:][: -(-n // FOUR) * FOUR] for start, n in zip(starts, counts.tolist(), strict=True)
    ]
    of_x = [torch.ones(parts, len(of_expert), device=DEVICE).t() for of_expert in rows]

    def multiply() -> list[torch.Tensor]:
        return [
            scaled_mm(
                of_expert, weight.t(), scales, ScalingType.BlockWise1x128, of_w,
                ScalingType.BlockWise128x128, output_dtype=torch.bfloat16,
            )
            for of_expert, weight, scales in zip(rows, w, of_x, strict=True)
        ]  # fmt: skip

    return multiply


def forward(case: tuple[int, ...], counts: torch.Tensor, rep: int) -> Times:
    """Time the result."""
    E, _, N, K = case
    rows, offsets = int(counts.sum()), counts.cumsum(0).int().to(DEVICE)
    x = torch.randn(rows, K, device=DEVICE, dtype=torch.bfloat16)
    w = torch.randn(E, N, K, device=DEVICE, dtype=torch.bfloat16) * K**-0.5
    other_order = w.transpose(1, 2).contiguous().transpose(1, 2)
    calls = {
        "grouped_mm": lambda: torch.nn.functional.grouped_mm(x, w.transpose(1, 2), offs=offsets),
        "dense": lambda: x @ w[0].t(),
        "by expert": by_expert(x, w, counts),
        "ours": lambda: ops.grouped_matmul(x, w, offsets),
        "(E, K, N)": lambda: ops.grouped_matmul(x, other_order, offsets),
    }
    expected = calls["grouped_mm"]()
    for name in ("by expert", "ours", "(E, K, N)"):
        check(name, calls[name](), expected)
    return times_of(calls, rep)


def fp8(case: tuple[int, ...], counts: torch.Tensor, rep: int) -> Times:
    """Time fp8 operands with one scale for each expert, and with those of blocks.

    ``grouped_mm`` and ``dense`` are of bf16.
    """
    E, _, N, K = case
    rows, offsets = int(counts.sum()), counts.cumsum(0).int().to(DEVICE)
    x = torch.randn(rows, K, device=DEVICE, dtype=torch.bfloat16)
    w = torch.randn(E, N, K, device=DEVICE, dtype=torch.bfloat16)
    x8, w8, parts = x.to(FP8), w.to(FP8), -(-K // SCALED)
    of_tensors = {"scale_x": torch.ones(1, device=DEVICE), "scale_w": torch.ones(E, device=DEVICE)}
    of_blocks = {
        "scale_x": torch.ones(rows, parts, device=DEVICE),
        "scale_w": torch.ones(E, -(-N // SCALED), parts, device=DEVICE),
    }
    calls = {
        "grouped_mm": lambda: torch.nn.functional.grouped_mm(x, w.transpose(1, 2), offs=offsets),
        "dense": lambda: x @ w[0].t(),
        "ours": lambda: ops.grouped_matmul(x8, w8, offsets, **of_blocks),
        "one scale": lambda: ops.grouped_matmul(x8, w8, offsets, **of_tensors),
    }
    x, w = x8.bfloat16(), w8.bfloat16()
    expected = calls["grouped_mm"]()
    for name in ("ours", "one scale"):
        check(f"fp8, {name}", calls[name](), expected)
    if GPU and counts.min() >= LEAST_ROWS and K % (FOUR * SCALED) == 0:
        calls["by expert"] = fp8_by_expert(x8, w8, counts)
        results = zip(calls["by expert"](), counts.tolist(), strict=True)
        check("fp8, by expert", torch.cat([result[:n] for result, n in results]), expected)
    return times_of(calls, rep)


def swiglu(case: tuple[int, ...], counts: torch.Tensor, rep: int) -> Times:
    """Time products whose columns are gate and up, with SwiGLU."""
    E, _, N, K = case
    rows, offsets = int(counts.sum()), counts.cumsum(0).int().to(DEVICE)
    x = torch.randn(rows, K, device=DEVICE, dtype=torch.bfloat16)
    w = torch.randn(E, N, K, device=DEVICE, dtype=torch.bfloat16) * K**-0.5
    other_order = w.transpose(1, 2).contiguous().transpose(1, 2)
    grouped_mm = torch.nn.functional.grouped_mm
    calls = {
        "grouped_mm": lambda: gated(grouped_mm(x, w.transpose(1, 2), offs=offsets)),
        "dense": lambda: gated(x @ w[0].t()),
        "ours": lambda: ops.grouped_matmul(x, w, offsets, epilogue="swiglu"),
        "(E, K, N)": lambda: ops.grouped_matmul(x, other_order, offsets, epilogue="swiglu"),
    }
    expected = calls["grouped_mm"]()
    for name in ("ours", "(E, K, N)"):
        check(f"swiglu, {name}", calls[name](), expected)
    return times_of(calls, rep)


def fp8_swiglu(case: tuple[int, ...], counts: torch.Tensor, rep: int) -> Times:
    """Time fp8 operands with SwiGLU. ``grouped_mm`` and ``dense`` are of bf16."""
    E, _, N, K = case
    rows, offsets = int(counts.sum()), counts.cumsum(0).int().to(DEVICE)
    x8 = torch.randn(rows, K, device=DEVICE).to(FP8)
    w8 = (torch.randn(E, N, K, device=DEVICE, dtype=torch.bfloat16) / 2).to(FP8)
    x, w, parts = x8.bfloat16(), w8.bfloat16(), -(-K // SCALED)
    of_tensors = {
        "scale_x": torch.full((1,), K**-0.5, device=DEVICE),
        "scale_w": torch.ones(E, device=DEVICE),
    }
    of_blocks = {
        "scale_x": torch.full((rows, parts), K**-0.5, device=DEVICE),
        "scale_w": torch.ones(E, -(-N // SCALED), parts, device=DEVICE),
    }
    grouped_mm = torch.nn.functional.grouped_mm
    calls = {
        "grouped_mm": lambda: gated(grouped_mm(x, w.transpose(1, 2), offs=offsets)),
        "dense": lambda: gated(x @ w[0].t()),
        "ours": lambda: ops.grouped_matmul(x8, w8, offsets, epilogue="swiglu", **of_blocks),
        "one scale": lambda: ops.grouped_matmul(x8, w8, offsets, epilogue="swiglu", **of_tensors),
    }
    expected = gated(grouped_mm(x, w.transpose(1, 2), offs=offsets).float() * K**-0.5)
    for name in ("ours", "one scale"):
        check(f"fp8 swiglu, {name}", calls[name](), expected)
    return times_of(calls, rep)


def gated(products: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) * up by torch."""
    gate, up = products.chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


def gradient(case: tuple[int, ...], counts: torch.Tensor, rep: int) -> Times:
    """Time the gradient of the weights."""
    _, _, N, K = case
    rows, offsets = int(counts.sum()), counts.cumsum(0).int().to(DEVICE)
    x = torch.randn(rows, K, device=DEVICE, dtype=torch.bfloat16)
    grad = torch.randn(rows, N, device=DEVICE, dtype=torch.bfloat16)
    wgrad = torch.ops.tileweave.grouped_wgrad
    calls = {
        "grouped_mm": lambda: torch.nn.functional.grouped_mm(grad.t(), x, offs=offsets),
        "dense": lambda: grad.t() @ x,
        "ours": lambda: wgrad(grad, x, offsets, True, False),
        "(E, K, N)": lambda: wgrad(grad, x, offsets, False, False),
    }
    expected = calls["grouped_mm"]()
    for name in ("ours", "(E, K, N)"):
        check(f"gradient, {name}", calls[name](), expected)
    return times_of(calls, rep)


def row_of(case: tuple[int, ...], rows: int, what: str, times: Times) -> str:
    """Return a row of the table: TFLOP/s, and ratios of times."""
    E, _, N, K = case
    flops = 2 * rows * N * K
    rates = {name: f"{flops / ms / 1e9:.0f}" for name, ms in times.items()}
    order = "(E, K, N)" if "(E, K, N)" in times else "one scale"
    columns = ("grouped_mm", "dense", "by expert", "ours", order)
    ratios = [times[name] / times["ours"] for name in ("grouped_mm", "dense")]
    by_expert = f"{times['by expert'] / times['ours']:.3f}" if "by expert" in times else ""
    itemsize = 1 if what.startswith("fp8") else 2
    read_ms = E * N * K * itemsize / READ_TBPS / 1e9
    cells = [what, f"{E}, {rows}, {N}, {K}", *(rates.get(name, "") for name in columns)]
    cells += [*(f"{ratio:.3f}" for ratio in ratios), by_expert]
    cells.append(f"{times['ours'] / read_ms:.2f}" if GPU else "")
    return f"| {' | '.join(cells)} |"


def compile_ahead(cases: list[tuple[int, ...]], options: argparse.Namespace) -> None:
    """Compile all kernels in parallel."""
    epilogues = (None, "swiglu") if options.swiglu else (None,)
    device = torch.device("cuda", torch.cuda.current_device())
    jobs: set[tuple] = set()
    for E, rows, N, K in cases:
        w = torch.empty(E, N, K, dtype=torch.bfloat16, device="meta")
        for transposed, epilogue in product((True, False), epilogues):
            config = operator.config_of(w, transposed, device, rows, epilogue=epilogue)
            jobs.add((grouped_gemm, config))
        for scales, epilogue in product(("tensor", "block") if options.fp8 else (), epilogues):
            config = operator.config_of(
                w.to(FP8), True, device, rows, scales, torch.bfloat16, epilogue=epilogue
            )
            jobs.add((grouped_gemm, config))
        for out in (w, w.transpose(1, 2)) if options.gradients else ():
            jobs.add((grouped_wgrad, operator.config_of(out, True, device)))
    with ThreadPoolExecutor(
        16, initializer=torch.cuda.set_device, initargs=(device,)
    ) as pool:  # fmt: skip
        for future in [pool.submit(compiled, operator.NAME, *job) for job in jobs]:
            future.result()


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--case", type=int, nargs=4, action="append", metavar=("E", "M", "N", "K"))
    parser.add_argument("--gradients", action="store_true", help="also time gradients of weights")
    parser.add_argument("--fp8", action="store_true", help="also time fp8")
    parser.add_argument("--swiglu", action="store_true", help="also time products with SwiGLU")
    parser.add_argument("--even", action="store_true", help="equally many rows for each expert")
    parser.add_argument("--rep", type=int, default=200, help="ms of each measurement")
    options = parser.parse_args()
    cases = [tuple(case) for case in options.case or (CASES if GPU else [(4, 96, 256, 64)])]
    if GPU:
        compile_ahead(cases, options)
        print(torch.cuda.get_device_name(), flush=True)
    measures = {"result": forward}
    measures |= {"gradient of w": gradient} if options.gradients else {}
    measures |= {"swiglu": swiglu} if options.swiglu else {}
    measures |= {"fp8": fp8} if options.fp8 else {}
    measures |= {"fp8 swiglu": fp8_swiglu} if options.fp8 and options.swiglu else {}
    print(
        "| | E, M, N, K | grouped_mm | dense | by expert | ours | (E, K, N) | ours / grouped_mm "
        "| ours / dense | ours / by expert | time / reading w |\n" + "|---" * 11 + "|"
    )
    for case in cases:
        torch.manual_seed(0)
        counts = counts_of(case[0], case[1], options.even)
        rows = int(counts.sum())
        for what, measure in measures.items():
            print(row_of(case, rows, what, measure(case, counts, options.rep)), flush=True)


if __name__ == "__main__":
    main()
