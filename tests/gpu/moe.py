"""tileweave.ops.dispatch, combine and expert_mlp between real GPUs: values, gradients, many calls,
graphs.

    torchrun --nproc-per-node=4 tests/gpu/moe.py [CHECK ...] [--transports ...]

Each rank compares with the tokens of all ranks, which it gathers, and their experts, which it
generates. Ranks compile most programs in parallel, before the first check. Without a GPU the same
checks, but for that of graphs, run with gloo, on small shapes: that tries this file.
"""

import argparse
import os
import sys
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

import torch

import tileweave as tw
from tileweave import ops
from tileweave.ops.core.groups import group_of
from tileweave.ops.moe.quant import quantized
from tileweave.ops.moe.quantized_mlp import Weights, quantized_experts
from tileweave.ops.moe.routing import default_capacity, has_kernel, routing_by_torch, routing_of

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.gpu_calls import captured
from tests.on_gpus import GPU, Verdicts, main, parser_of, runs_here
from tests.ops.moe.by_definition import random_ids
from tests.ops.moe.mixture import ERROR, ROUTINGS, Case, Mixture, quantized_squares

TRANSPORTS = ["auto", "ldst", "nccl"] if GPU else ["auto"]
HEAP_BYTES = 4 << 30
LAUNCHES = 2000 if GPU else 20
VERIFIED = 100 if GPU else 5
"""One launch of this number is compared row by row; the sums of all are compared."""
CASES = [
    Case(256, 2048, 768, 8, 16),
    Case(128, 7168, 512, 8, 8),
    Case(333, 2880, 2880, 4, 4),
    Case(64, 4096, 1024, 2, 1),
    Case(200, 1024, 256, 4, 4, capacity=150),
    Case(1, 2048, 256, 1, 2),
    Case(48, 520, 64, 3, 3, dtype=torch.float16),
    Case(48, 514, 64, 3, 3, dtype=torch.float32),
    Case(16, 77, 32, 2, 2, dtype=torch.float32),
    Case(3000, 1024, 256, 4, 3),
]
if not GPU:
    CASES = [c._replace(tokens=c.tokens // 32 + 1, hidden=c.hidden // 8, width=8) for c in CASES]
    CASES = [c._replace(dtype=torch.float32, capacity=c.capacity and 9) for c in CASES]
HALF = torch.bfloat16
QUANT_ERROR = 0.25
"""Largest relative norm of the error of e4m3 tokens, weights and hidden values, of one token."""
FP8_CASES = [c for c in CASES if c.width % 128 == 0 and c.dtype.itemsize == 2] or [
    Case(9, 48, 128, 2, 2)
]


def mixtures(transport: str) -> list[Mixture]:
    """Return all cases, each with two routings; the capacity has room for all or for few rows."""
    seeds = range(2 * len(CASES))
    return [Mixture(CASES[seed // 2], transport, 5 * (seed // 2) + seed % 2) for seed in seeds]


def check_exchange(transport: str) -> str:
    with torch.no_grad():
        for mixture in mixtures(transport):
            results = mixture.exchange()
            if fault := mixture.fault_of_exchange(results):
                return fault
            if not torch.equal(results[-1], mixture.exchange()[-1]):
                return f"{mixture.case}: combine differs between calls"
    return ""


def check_mlp(transport: str) -> str:
    with torch.no_grad():
        for mixture in mixtures(transport):
            if fault := mixture.fault(mixture(), mixture.right()[0]):
                return fault
    return ""


@torch.no_grad()
def check_max_tokens(transport: str) -> str:
    """Ranks with other numbers of tokens, also 0, against calls in which the tokens that a rank
    does not have choose no expert: equal bits."""
    for number, mixture in enumerate(mixtures(transport)):
        place = (mixture.group.rank + number) % mixture.group.world_size
        tokens = mixture.case.tokens * place // max(1, mixture.group.world_size - 1)
        actual = mixture(tokens=tokens)
        mixture.ids[tokens:] = -1
        if not torch.equal(actual, mixture()[:tokens]):
            return f"{mixture.case}: the result of {tokens} tokens is wrong"
    return ""


@torch.no_grad()
def check_fp8(transport: str) -> str:
    """Fp8 against products by plain torch with equal rounding, and against fp32."""
    for place, case in enumerate(FP8_CASES):
        for routing in range(2):
            mixture = Mixture(case._replace(dtype=HALF), transport, 5 * place + routing)
            out, by_torch = mixture.quantized()
            # If the largest hidden value of a token is rounded otherwise, so is a block of them.
            rounded = ERROR * (1 + case.tokens**-0.5)
            for right, bound in ((by_torch, rounded), (mixture.right()[0], QUANT_ERROR)):
                error = (out.float() - right.float()).norm() / right.float().norm().clamp(min=1e-3)
                if not error <= bound:
                    return f"{case}: fp8: relative error {error:.1e}; expected {bound:.1e}"
    return ""


ROUTED = [(8, 16, 8, 32), (4, 1, 8, 64), (2, 64, 4, 4), (1, 1, 1, 1), (3, 5, 3, 200)]
ROUTED += [(4, 33, 8, 64), (3, 700, 3, 1), (1, 999, 7, 512), (5, 1111, 2, 300), (4, 4096, 8, 64)]
ROUTED += [(8, 8192, 8, 64), (8, 8191, 5, 32)]
"""Ranks, tokens, choices and experts of a rank of ``check_routing``: for one block, for blocks of
one wave, and for several waves."""
ROUTED_DTYPES = torch.int32, torch.int64
"""Types of the experts. The capacity has room for all rows with the first one."""


def capacity_of(routed: tuple[int, ...], variant: int) -> int:
    """Return the capacity for an element of ``ROUTED`` and of ``ROUTED_DTYPES``."""
    ranks, tokens, choices, per_rank = routed
    return max(1, default_capacity(tokens, ranks, choices, per_rank) >> variant)


def route_nothing(routed: tuple[int, ...], variant: int) -> None:
    """Compile the kernel of a routing."""
    ranks, tokens, choices, per_rank = routed
    ids = torch.full((ranks, tokens, choices), -1, dtype=ROUTED_DTYPES[variant], device="cuda")
    routing_of(ids, 0, ranks * per_rank, capacity_of(routed, variant))


def check_routing(transport: str) -> str:
    """The kernels against torch, for all ranks of groups of any size."""
    device, generator = group_of("").device if GPU else "cpu", torch.Generator().manual_seed(0)
    for routed in ROUTED:
        ranks, tokens, choices, per_rank = routed
        num_experts = ranks * per_rank
        for number in range(50 if GPU else 5):
            variant = number % len(ROUTED_DTYPES)
            ids = random_ids(ranks, tokens, choices, num_experts, generator).to(device)
            ids = ids.to(ROUTED_DTYPES[variant])
            if has_kernel(ids, num_experts) != GPU:
                return f"{tuple(ids.shape)}: the kernel is not used"
            arguments = ids, number % ranks, num_experts, capacity_of(routed, variant)
            actual, right = routing_of(*arguments), routing_by_torch(*arguments)
            pairs = zip((*actual.tables, *actual[1:]), (*right.tables, *right[1:]), strict=True)
            if not all(torch.equal(*pair) for pair in pairs):
                return f"routing {number} of {tuple(ids.shape)}, {num_experts} experts is wrong"
    return ""


def check_gradients(transport: str) -> str:
    names = "out", "x", "topk_weights", "w_gate_up", "w_down"
    for mixture in mixtures(transport):
        given = [tensor.requires_grad_() for tensor in mixture.given]
        out = mixture()
        results = out.detach(), *torch.autograd.grad(out, given, mixture.grad)
        # The gradient of a weight is a product of two rows, which may be near 0.
        product = out.norm() * mixture.grad.norm() / mixture.grad.numel() ** 0.5
        for name, actual, right in zip(names, results, mixture.right(), strict=True):
            typical = product.item() if name == "topk_weights" else 0.0
            if fault := mixture.fault(actual, right, name, typical):
                return fault
    return ""


def check_back_to_back(transport: str) -> str:
    """Many calls with changing routing, without host synchronization, with random delays; half of
    them are replays of graphs."""
    every = [Mixture(case, transport, 3) for case in CASES[:5]]
    wrong = torch.zeros(len(every), dtype=torch.int32, device=every[0].device)
    torch.manual_seed(1)
    choice = torch.randint(len(every), (LAUNCHES,)).tolist()
    routings = torch.randint(len(ROUTINGS), (LAUNCHES,)).tolist()
    replays = torch.randint(2, (LAUNCHES,)).tolist()
    torch.manual_seed(100 + group_of("").rank)
    with torch.no_grad():
        graphs = []
        if GPU and transport != "nccl":
            for mixture in every:
                mixture.exchange()  # compiles, which a capture may not
            graphs = [captured(mixture.exchange) for mixture in every]
        for number, (which, routing) in enumerate(zip(choice, routings, strict=True)):
            mixture = every[which]
            mixture.x.normal_()
            mixture.route(ROUTINGS[routing])
            if GPU and torch.rand(()) < 0.3:
                torch.cuda._sleep(int(torch.randint(1, 400_000, ())))
            if graphs and replays[number]:
                graph, results = graphs[which]
                graph.replay()
            else:
                results = mixture.exchange()
            if number % VERIFIED == 0 and (fault := mixture.fault_of_exchange(results)):
                return f"launch {number}: {fault}"
            wrong[which] += _is_wrong(mixture, results[-1])
    for mixture, count in zip(every, wrong.tolist(), strict=True):
        if count:
            return f"{mixture.case}: {count} launches are wrong"
    return ""


def _is_wrong(mixture: Mixture, out: torch.Tensor) -> torch.Tensor | bool:
    """Return whether the result of ``exchange`` is wrong, without reading it on the host.

    Only ``fault_of_exchange`` knows the rows that a capacity drops.
    """
    if mixture.case.capacity is not None:
        return False
    is_expert = (mixture.ids >= 0) & (mixture.ids < mixture.num_experts)
    weight = torch.where(is_expert, mixture.weights, 0).sum(-1, keepdim=True)
    right = weight * (mixture.x * 2).float()
    error = (out.float() - right).norm() / right.norm().clamp(min=1e-9)
    return ~(error <= ERROR / 4)


def check_graph(transport: str, replays: int = 20) -> str:
    """Exchanges and layers of several cases in one graph, replayed with changing routing."""
    if transport == "nccl":
        return ""  # the host reads the number of rows
    given = [Mixture(case, transport, 3) for case in CASES[:5]]
    with torch.no_grad():
        for mixture in given:
            mixture.exchange()
            mixture()
        graph, results = captured(lambda: [(mixture.exchange(), mixture()) for mixture in given])
        for number in range(replays):
            for place, mixture in enumerate(given):
                mixture.x.normal_()
                mixture.route(ROUTINGS[(number + place) % len(ROUTINGS)])
            graph.replay()
            for mixture, (exchanged, out) in zip(given, results, strict=True):
                fault = mixture.fault_of_exchange(exchanged)
                if fault := fault or mixture.fault(out, mixture.right()[0]):
                    return f"replay {number}: {fault}"
    return ""


def call_all(cases: Collection[Case], checks: Collection[str]) -> None:
    """Call what checks call, but for ``routing``."""
    for case in cases:
        mixture = Mixture(case, "auto", 0)
        if "gradients" in checks:
            for tensor in mixture.given:
                tensor.requires_grad_()
            mixture().sum().backward()
        with torch.no_grad():
            mixture.exchange()
            mixture()
            if "max tokens" in checks:
                mixture(case.tokens)
    if "fp8" in checks:
        for case in FP8_CASES:
            Mixture(case._replace(dtype=HALF), "auto", 0).quantized()


def capacity_of_case(case: Case) -> int:
    ranks = group_of("").world_size
    return case.capacity or default_capacity(case.tokens, ranks, case.choices, case.per_rank)


def products(case: Case) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Yield rows, weights and offsets of the two grouped GEMMs of a case, without rows."""
    offsets = torch.zeros(case.per_rank, dtype=torch.int32, device="cuda")
    for N, K in ((2 * case.width, case.hidden), (case.hidden, case.width)):
        w = torch.zeros(case.per_rank, N, K, dtype=case.dtype, device="cuda")
        yield w.new_zeros(capacity_of_case(case), K), w, offsets


def multiply(case: Case) -> None:
    """Call the grouped GEMMs of ``expert_mlp``, on this rank only."""
    (x, w, offsets), down = products(case)
    ops.grouped_matmul(x, w, offsets, epilogue="swiglu", clear_rest=False)
    ops.grouped_matmul(*down, clear_rest=False)


def multiply_back(case: Case) -> None:
    """Call those of ``expert_mlp`` with gradients, and of the gradients."""
    for x, w, offsets in products(case):
        y = ops.grouped_matmul(x, w, offsets)
        ops.grouped_matmul(y, w.transpose(1, 2), offsets)
        torch.ops.tileweave.grouped_wgrad(y, x, offsets, True, False)


def multiply_fp8(case: Case) -> None:
    """Call the kernels of ``expert_mlp`` with fp8 weights."""
    (x, gate_up, offsets), (_, down, _) = products(case)
    pairs = [quantized_squares(w) for w in (gate_up, down)]
    values, scales = zip(*pairs, strict=True)
    quantized_experts(*quantized(x), offsets, Weights(*values, *scales), case.dtype)


def compile_all(checks: Collection[str]) -> None:
    """Compile in parallel what checks need; ranks share the work through TileLang's cache."""
    group = group_of("")
    cases = CASES if set(checks) - {"routing"} else []
    routed = list(product(ROUTED, range(len(ROUTED_DTYPES)))) if "routing" in checks else []
    exchanges = tw.prepare(call_all, cases, checks)
    calls = [(multiply, case) for case in cases if MULTIPLY & set(checks)]
    calls += [(multiply_back, case) for case in cases if "gradients" in checks]
    calls += [(multiply_fp8, case) for case in FP8_CASES if "fp8" in checks]
    device, workers = group.device, max(1, len(os.sched_getaffinity(0)) // group.world_size)
    with ThreadPoolExecutor(workers, initializer=torch.cuda.set_device, initargs=(device,)) as pool:
        own = slice(group.rank, None, group.world_size)
        futures = [pool.submit(*call) for call in calls[own]]
        futures += [pool.submit(route_nothing, *arguments) for arguments in routed[own]]
        for future in futures:
            future.result()
    exchanges.wait()
    torch.cuda.empty_cache()
    group.meet("kernels of one GPU", timeout_s=3600.0)


CHECKS = {
    "exchange": check_exchange,
    "mlp": check_mlp,
    "max tokens": check_max_tokens,
    "fp8": check_fp8,
    "routing": check_routing,
    "gradients": check_gradients,
    "back to back": check_back_to_back,
    "graph": check_graph,
}
NEED_GPU = ("graph",)
MULTIPLY = {"mlp", "max tokens", "graph"}
"""Checks of ``expert_mlp`` without gradients, in the type of x."""


def verdicts(options: argparse.Namespace) -> Verdicts:
    checks = options.checks or CHECKS
    if GPU and set(options.transports) != {"nccl"}:
        compile_all(checks)
    for name, transport in product(checks, options.transports):
        if runs_here(name, NEED_GPU):
            yield f"{name} by {transport if GPU else 'gloo'}", CHECKS[name](transport)


if __name__ == "__main__":
    parser = parser_of(__doc__, CHECKS)
    parser.add_argument("--transports", nargs="+", default=TRANSPORTS[:1], choices=TRANSPORTS)
    sys.exit(main(verdicts, parser, heap_bytes=HEAP_BYTES))
