"""ops.grouped_matmul on one GPU: values, gradients, many launches, graphs, invalid offsets.

    python tests/gpu/grouped_matmul.py [CHECK ...] [--count N] [--seed S]

Most inputs are small integers, whose sums are exact in fp32: results must have the bits of the
reference. Under torchrun each rank checks alone. Without a GPU the same checks run by plain torch,
which only tests this file.
"""

import argparse
import os
import random
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise, product
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.gpu_calls import captured
from tests.on_gpus import GPU, Verdicts, parser_of, runs_here
from tileweave import ops
from tileweave.ops.moe import grouped_matmul as operator
from tileweave.ops.moe.kernels.grouped_gemm import GROUPED_FEW_ROWS, GroupedConfig, grouped_gemm
from tileweave.ops.moe.kernels.grouped_wgrad import grouped_wgrad
from tileweave.ops.moe.local_kernels import compiled as kernel_of

DEVICE = "cuda" if GPU else "cpu"
FP8 = torch.float8_e4m3fn
DTYPES = (torch.bfloat16, torch.float16)
SHAPES = (
    (4, 72, 136, DTYPES[0]),
    (8, 512, 320, DTYPES[0]),
    (33, 264, 1000, DTYPES[1]),
    (150, 8, 72, DTYPES[0]),
)
"""E, N, K and type."""
LAUNCHES = 300 if GPU else 3
GUARD = 64
"""Rows around a result that no launch may write."""
ROWS = GROUPED_FEW_ROWS.M, GROUPED_FEW_ROWS.M + 1
"""Rows of an expert, on average, for which tiles are low, and for which they are high."""
Draw = random.Random


def integers(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randint(-2, 3, shape, device=DEVICE).to(dtype)


def counts_of(draw: Draw, experts: int) -> list[int]:
    """Return random numbers of rows, many of them at the bounds of tiles."""
    kind = draw.choice(("any", "bounds", "one", "few", "none"))
    if kind == "one":
        counts = [0] * experts
        counts[draw.randrange(experts)] = draw.choice((1, 128, 129, 700))
        return counts
    most = {"any": 600, "few": 3, "none": 0}.get(kind, 0)
    bounds = (0, 0, 1, 63, 64, 127, 128, 129, 255, 256, 257)
    return [
        draw.choice(bounds) if kind == "bounds" else draw.randint(0, most) for _ in range(experts)
    ]


def offsets_of(counts: list[int]) -> torch.Tensor:
    return torch.tensor(counts, device=DEVICE).cumsum(0).int()


def weights(experts: int, N: int, K: int, transposed: bool, dtype: torch.dtype) -> torch.Tensor:
    if transposed:
        return integers(experts, N, K, dtype=dtype)
    return integers(experts, K, N, dtype=dtype).transpose(1, 2)


def expected(x: torch.Tensor, w: torch.Tensor, counts: list[int]) -> torch.Tensor:
    y = x.new_zeros(len(x), w.shape[1])
    ends = offsets_of(counts).tolist()
    for e, (begin, end) in enumerate(pairwise([0, *ends])):
        y[begin:end] = (x[begin:end].float() @ w[e].float().t()).to(x.dtype)
    return y


def expected_wgrad(grad: torch.Tensor, x: torch.Tensor, counts: list[int]) -> torch.Tensor:
    ends = offsets_of(counts).tolist()
    return torch.stack([
        (grad[begin:end].float().t() @ x[begin:end].float()).to(x.dtype)
        for begin, end in pairwise([0, *ends])
    ])  # fmt: skip


def fault(actual: torch.Tensor, wanted: torch.Tensor, what: str = "") -> str:
    """Return "" for equal tensors, else the first difference."""
    if torch.equal(actual, wanted):
        return ""
    at = tuple((actual != wanted).nonzero()[0].tolist())
    return f"WRONG {what}: {actual[at].item()} at {at}; expected {wanted[at].item()}"


def compile_ahead(jobs: set[tuple[Callable, GroupedConfig]]) -> None:
    """Compile kernels in parallel, each given by its program and configuration."""
    device = torch.cuda.current_device()
    with ThreadPoolExecutor(
        len(os.sched_getaffinity(0)), initializer=torch.cuda.set_device, initargs=(device,)
    ) as pool:
        for future in [pool.submit(kernel_of, operator.NAME, *job) for job in jobs]:
            future.result()


def jobs_of(
    experts: int, N: int, K: int, dtype: torch.dtype
) -> set[tuple[Callable, GroupedConfig]]:
    """Return the kernels of products and gradients without epilogue, for both orders of w."""
    device, jobs = torch.device("cuda", torch.cuda.current_device()), set()
    for n, k in ((N, K), (K, N)):
        w = torch.empty(experts, n, k, dtype=dtype, device="meta")
        jobs.add((grouped_wgrad, operator.config_of(w, True, device)))
        for transposed, rows in product((True, False), ROWS):
            jobs.add((grouped_gemm, operator.config_of(w, transposed, device, rows * experts)))
    return jobs


def values(options: argparse.Namespace) -> Verdicts:
    """Compare results and gradients for random numbers of rows."""
    draw = Draw(options.seed)
    if GPU:
        compile_ahead(set().union(*(jobs_of(*shape) for shape in SHAPES)))
    for number in range(options.count):
        experts, N, K, dtype = draw.choice(SHAPES)
        counts, unused = counts_of(draw, experts), draw.choice((0, 0, 1, 300))
        transposed = draw.random() < 0.5
        x = integers(sum(counts) + unused, K, dtype=dtype).requires_grad_()
        w = weights(experts, N, K, transposed, dtype).requires_grad_()
        y = ops.grouped_matmul(x, w, offsets_of(counts))
        grad = integers(*y.shape, dtype=dtype)
        grad_x, grad_w = torch.autograd.grad(y, (x, w), grad)
        with torch.no_grad():
            faults = [
                fault(y, expected(x, w, counts), "y"),
                fault(grad_x, expected(grad, w.transpose(1, 2), counts), "gradient of x"),
                fault(grad_w, expected_wgrad(grad, x, counts), "gradient of w"),
            ]
        order = "(E, N, K)" if transposed else "(E, K, N)"
        title = f"{number}: E={experts} N={N} K={K} {order} {dtype}, rows {sum(counts)} + {unused}"
        wrong = next(filter(None, faults), "")
        yield title, wrong and f"{wrong}, counts={counts}"


def noise(options: argparse.Namespace) -> Verdicts:
    """Compare results of inputs from N(0, 1) with fp32."""
    for dtype in DTYPES:
        counts = [700, 0, 50, 1300]
        x = torch.randn(sum(counts), 2048, device=DEVICE).to(dtype).requires_grad_()
        w = (torch.randn(4, 768, 2048, device=DEVICE) / 45).to(dtype).requires_grad_()
        y = ops.grouped_matmul(x, w, offsets_of(counts))
        grad = torch.randn_like(y)
        grad_x, grad_w = torch.autograd.grad(y, (x, w), grad)
        with torch.no_grad():
            pairs = (
                (y, expected(x, w, counts)),
                (grad_x, expected(grad, w.transpose(1, 2), counts)),
                (grad_w, expected_wgrad(grad, x, counts)),
            )
        errors = [((a.float() - b.float()).norm() / b.float().norm()).item() for a, b in pairs]
        wrong = "" if max(errors) < 2e-3 else "WRONG"
        yield f"noise, {dtype}", wrong, f"relative errors {', '.join(f'{e:.1e}' for e in errors)}"


def fp8(options: argparse.Namespace) -> Verdicts:
    """Compare fp8 products with scales with the reference: powers of two as scales are exact."""
    draw, (experts, N, K) = Draw(options.seed), (8, 336, 1072)
    for kind in ("tensor", "expert", "block"):
        wrong, number = "", max(1, options.count // 10)
        for _ in range(number):
            counts = counts_of(draw, experts)
            x = integers(sum(counts) + draw.choice((0, 7)), K, dtype=FP8)
            w = integers(experts, N, K, dtype=FP8)
            parts = -(-K // 128)
            shapes = {
                "tensor": ((1,), (1,)),
                "expert": ((1,), (experts,)),
                "block": ((len(x), parts), (experts, -(-N // 128), parts)),
            }
            scales = [2.0 ** torch.randint(-1, 2, s, device=DEVICE).float() for s in shapes[kind]]
            named = {"scale_x": scales[0], "scale_w": scales[1]}
            y = ops.grouped_matmul(x, w, offsets_of(counts), **named)
            wanted = ops.grouped_matmul(x, w, offsets_of(counts), **named, reference=True)
            found = fault(y, wanted)
            wrong = wrong or (found and f"{found}, counts={counts}")
        yield f"fp8, one scale for each {kind}, {number} calls", wrong


EPILOGUES = (("swiglu", False, False), ("swiglu", True, True), (None, True, True))
"""Epilogue, and whether a bias and weights of rows are given."""


def error_of(actual: torch.Tensor, wanted: torch.Tensor) -> float:
    """Return the norm of the difference relative to that of ``wanted``."""
    wanted = wanted.float()
    return ((actual.float() - wanted).norm() / wanted.norm().clamp(min=1e-6)).item()


def epilogue_arguments(
    rows: int, experts: int, N: int, dtype: torch.dtype, biased: bool, weighted: bool
) -> dict[str, torch.Tensor | None]:
    bias = torch.randn(experts, N, device=DEVICE).to(dtype) if biased else None
    return {"bias": bias, "row_weights": torch.rand(rows, device=DEVICE) if weighted else None}


EPILOGUE_SIZES = ((8, 512, 320), (5, 48, 72), (3, 4096, 1024))
"""E, N and K."""
FP8_EPILOGUE_SIZE = (8, 512, 1072)


def epilogue_jobs() -> set[tuple[Callable, GroupedConfig]]:
    """Return the kernels of ``epilogue``, with those of the gradients."""
    device, jobs = torch.device("cuda", torch.cuda.current_device()), set()
    for (experts, N, K), dtype in product(EPILOGUE_SIZES, DTYPES):
        jobs |= jobs_of(experts, N, K, dtype)
        w = torch.empty(experts, N, K, dtype=dtype, device="meta")
        for transposed, rows, (kind, *given) in product((True, False), ROWS, EPILOGUES):
            config = operator.config_of(
                w, transposed, device, rows * experts, "", dtype, kind, *given
            )
            jobs.add((grouped_gemm, config))
    return jobs


def fp8_epilogue_jobs() -> set[tuple[Callable, GroupedConfig]]:
    """Return the kernels of ``fp8_epilogue``."""
    device = torch.device("cuda", torch.cuda.current_device())
    w = torch.empty(*FP8_EPILOGUE_SIZE, dtype=FP8, device="meta")
    return {
        (
            grouped_gemm,
            operator.config_of(w, True, device, rows * len(w), scales, DTYPES[0], kind, *given),
        )
        for rows, scales, (kind, *given) in product(ROWS, ("block", "tensor"), EPILOGUES)
    }


def epilogue(options: argparse.Namespace) -> Verdicts:
    """Compare results and gradients of epilogues with the reference."""
    draw = Draw(options.seed)
    if GPU:
        compile_ahead(epilogue_jobs())
    for dtype, (kind, biased, weighted) in product(DTYPES, EPILOGUES):
        errors = [0.0]
        for _ in range(max(3, options.count // 10)):
            (experts, N, K), order = draw.choice(EPILOGUE_SIZES), draw.random() < 0.5
            counts, unused = counts_of(draw, experts), draw.choice((0, 1, 300))
            x = torch.randn(sum(counts) + unused, K, device=DEVICE).to(dtype).requires_grad_()
            w = weights(experts, N, K, order, torch.float32) * K**-0.5
            w = w.to(dtype).detach().requires_grad_()
            given = epilogue_arguments(len(x), experts, N, dtype, biased, weighted)
            inputs = [x, w, *(t.requires_grad_() for t in given.values() if t is not None)]
            results = []
            for reference in (False, True):
                y = ops.grouped_matmul(
                    x, w, offsets_of(counts), epilogue=kind, reference=reference, **given
                )  # fmt: skip
                grad = torch.ones_like(y)
                results.append((y, *torch.autograd.grad(y, inputs, grad)))
            if not sum(counts):
                errors += [float(y.detach().abs().sum()) for y in results[0]]
            else:
                errors += [error_of(*pair) for pair in zip(*results, strict=True)]
            if results[0][0][sum(counts) :].any():
                errors.append(float("inf"))
        what = f"{kind or 'products'}{' + bias' * biased}{' * weights' * weighted}"
        wrong = "" if max(errors) < 2e-2 else "WRONG"
        yield f"epilogue {what}, {dtype}", wrong, f"largest relative error {max(errors):.1e}"


def fp8_epilogue(options: argparse.Namespace) -> Verdicts:
    """Compare epilogues of fp8 products with the reference."""
    draw, (experts, N, K) = Draw(options.seed), FP8_EPILOGUE_SIZE
    if GPU:
        compile_ahead(fp8_epilogue_jobs())
    for by_block, (kind, biased, weighted) in product((True, False), EPILOGUES):
        errors = [0.0]
        for _ in range(max(3, options.count // 10)):
            counts = counts_of(draw, experts)
            x = integers(sum(counts) + draw.choice((0, 7)), K, dtype=FP8)
            w = integers(experts, N, K, dtype=FP8)
            parts = -(-K // 128)
            shapes = (len(x), parts), (experts, N // 128, parts)
            shapes = shapes if by_block else ((1,), (experts,))
            scale_x, scale_w = (torch.rand(shape, device=DEVICE) / 8 for shape in shapes)
            given = epilogue_arguments(len(x), experts, N, torch.bfloat16, biased, weighted)
            y, wanted = (
                ops.grouped_matmul(
                    x,
                    w,
                    offsets_of(counts),
                    scale_x=scale_x,
                    scale_w=scale_w,
                    epilogue=kind,
                    reference=reference,
                    **given,
                )
                for reference in (False, True)
            )
            errors.append(error_of(y, wanted))
        what = f"{kind or 'products'}{' + bias' * biased}{' * weights' * weighted}"
        wrong = "" if max(errors) < 5e-3 else "WRONG"
        scales = "blocks" if by_block else "experts"
        yield f"fp8 epilogue {what}, scales of {scales}", wrong, f"relative error {max(errors):.1e}"


def launches(options: argparse.Namespace) -> Verdicts:
    """Launch many times in a row, with other offsets each time; the host does not wait."""
    draw = Draw(options.seed)
    experts, N, K = 8, 512, 320
    x, w = integers(2400, K), weights(experts, N, K, True, torch.bfloat16)
    grad = integers(2400, N)
    cases = [[draw.choice((0, 1, 127, 128, 200, 300)) for _ in range(experts)]
             for _ in range(LAUNCHES)]  # fmt: skip
    offsets = [offsets_of(counts) for counts in cases]
    started = time.perf_counter()
    results = [ops.grouped_matmul(x, w, o) for o in offsets]
    weight_gradients = [torch.ops.tileweave.grouped_wgrad(grad, x, o, True, False) for o in offsets]
    ms = (time.perf_counter() - started) * 1e3
    faults = (
        fault(y, expected(x, w, counts), "y") or fault(g, expected_wgrad(grad, x, counts), "dw")
        for y, g, counts in zip(results, weight_gradients, cases, strict=True)
    )
    wrong = next((f"launch {n}: {f}" for n, f in enumerate(faults) if f), "")
    yield f"{LAUNCHES} launches of each kernel", wrong, f"{ms:.0f} ms of the host"


def graphs(options: argparse.Namespace) -> Verdicts:
    """Replay a graph of the result and both gradients with other offsets and rows."""
    draw = Draw(options.seed)
    experts, N, K = 8, 512, 320
    x, w, grad = integers(2400, K), weights(experts, N, K, True, torch.bfloat16), integers(2400, N)
    offsets = offsets_of([1] * experts)

    def compute() -> tuple[torch.Tensor, ...]:
        y = ops.grouped_matmul(x, w, offsets)
        grad_x = ops.grouped_matmul(grad, w.transpose(1, 2), offsets)
        return y, grad_x, torch.ops.tileweave.grouped_wgrad(grad, x, offsets, True, False)

    compute()
    graph, (y, grad_x, grad_w) = captured(compute)
    wrong = ""
    for n in range(50):
        counts = [draw.choice((0, 1, 127, 128, 200, 300)) for _ in range(experts)]
        x.copy_(integers(*x.shape))
        offsets.copy_(offsets_of(counts))
        graph.replay()
        found = (
            fault(y, expected(x, w, counts), "y")
            or fault(grad_x, expected(grad, w.transpose(1, 2), counts), "dx")
            or fault(grad_w, expected_wgrad(grad, x, counts), "dw")
        )
        wrong = wrong or (found and f"replay {n}: {found}")
    yield "50 replays of a graph with changing offsets", wrong


def nan(options: argparse.Namespace) -> Verdicts:
    """Rows of one expert and rows of no expert are NaN; they must not reach other results."""
    counts = [130, 77, 200]
    x, w, grad = integers(600, 136), integers(3, 72, 136), integers(600, 72)
    clean = expected(x, w, counts), expected_wgrad(grad, x, counts)
    for tensor in (x, grad):
        tensor[130:207] = torch.nan
        tensor[407:] = torch.nan
    y = ops.grouped_matmul(x, w, offsets_of(counts))
    grad_w = torch.ops.tileweave.grouped_wgrad(grad, x, offsets_of(counts), True, False)
    yield (
        "y beside rows that are NaN",
        fault(torch.cat([y[:130], y[207:]]), torch.cat([clean[0][:130], clean[0][207:]])),
    )
    yield "gradient of w beside rows that are NaN", fault(grad_w[::2], clean[1][::2])


def invalid(options: argparse.Namespace) -> Verdicts:
    """Invalid offsets write nothing outside of the result."""
    draw, wrong = Draw(options.seed), ""
    x, w = integers(500, 136), integers(40, 72, 136)
    for _ in range(30):
        around = torch.full((500 + 2 * GUARD, 72), 7.0, device=DEVICE, dtype=x.dtype)
        bounds = [10 ** draw.randint(1, 9) for _ in range(40)]
        ends = [draw.randint(-bound, bound) for bound in bounds]
        offsets = torch.tensor(ends, device=DEVICE, dtype=torch.int32)
        ops.grouped_matmul(x, w, offsets, out=around[GUARD:-GUARD])
        torch.ops.tileweave.grouped_wgrad(x[:, :72].contiguous(), x, offsets, True, False)
        torch.cuda.synchronize()
        if not ((around[:GUARD] == 7).all() and (around[-GUARD:] == 7).all()):
            wrong = f"WRONG: rows outside of out were written, offsets={ends}"
    yield "invalid offsets", wrong


def compiled(options: argparse.Namespace) -> Verdicts:
    """Compare torch.compile with eager calls."""
    x, w = integers(700, 320).requires_grad_(), weights(8, 512, 320, False, torch.bfloat16)
    w.requires_grad_()
    backend = "inductor" if GPU else "aot_eager"
    call = torch.compile(
        lambda x, w, o: ops.grouped_matmul(x * 2, w, o) * 2, backend=backend, fullgraph=True
    )
    for counts in ([100, 0, 50, 128, 1, 129, 200, 40], [0] * 7 + [700]):
        y = call(x, w, offsets_of(counts))
        actual = (y, *torch.autograd.grad(y, (x, w), torch.ones_like(y)))
        z = ops.grouped_matmul(x * 2, w, offsets_of(counts)) * 2
        wanted = (z, *torch.autograd.grad(z, (x, w), torch.ones_like(z)))
        yield (
            f"torch.compile by {backend}",
            next(filter(None, (fault(a, b) for a, b in zip(actual, wanted, strict=True))), ""),
        )


CHECKS: dict[str, Callable[[argparse.Namespace], Verdicts]] = {
    "values": values,
    "noise": noise,
    "fp8": fp8,
    "epilogue": epilogue,
    "fp8 epilogue": fp8_epilogue,
    "launches": launches,
    "graphs": graphs,
    "nan": nan,
    "invalid": invalid,
    "compiled": compiled,
}
NEED_GPU = ("graphs", "invalid")


def main() -> int:
    parser = parser_of(__doc__, CHECKS)
    parser.add_argument("--count", type=int, default=200 if GPU else 20)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if GPU:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
        # The checks are of kernels: without them plain torch would pass all but the graphs.
        x, w = integers(8, 8), integers(1, 8, 8)
        if not operator.has_kernel(x, w):
            print("not run: the kernels need sm_90")
            return 0
    torch.manual_seed(options.seed)
    failed = 0
    for name in options.checks or CHECKS:
        if runs_here(name, NEED_GPU):
            for what, wrong, *remarks in CHECKS[name](options):
                failed += bool(wrong)
                print(f"{what}: {', '.join([wrong or 'right', *remarks])}", flush=True)
    print(f"{failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
