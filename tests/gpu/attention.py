"""Attention over a sharded sequence between real GPUs: values, calls back to back, graphs.

    torchrun --nproc-per-node=4 tests/gpu/attention.py [CHECK ...] [--count N] [--seed S]

Configurations are drawn at random, the same on all ranks. Results are compared with the reference
in fp32, which each rank computes alone. Without a GPU the same checks, but for that of graphs, run
with gloo: that tries this file, not the kernels.
"""

import argparse
import random
import sys
import warnings
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

import torch

import tileweave as tw
from tileweave import ops
from tileweave.ops.attention.flash import tiles_for
from tileweave.ops.attention.problem import DTYPES, HEAD_DIMS, AttentionProblem, checked_attention
from tileweave.ops.attention.reference import reference_attention
from tileweave.ops.attention.sequence import PARTS, Sharding
from tileweave.ops.attention.sp_attention import sp_attention_plan
from tileweave.ops.core.groups import group_of
from tileweave.runtime.executor.compile_ahead import compile_ahead

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.gpu_calls import Call, back_to_back, replayed
from tests.on_gpus import GPU, Verdicts, main, parser_of, runs_here, say

STRATEGY = "fused" if GPU else "nccl"
DEVICE = "cuda" if GPU else "cpu"
HEAP_BYTES = 4 << 30
TOLERANCE, LSE_TOLERANCE = 2e-2, 2e-3
"""Largest absolute errors, of inputs from N(0, 1)."""
SIZES = (1, 3, 16, 40, 64, 127, 128, 129, 200, 320, 512)
"""Rows of a chunk."""
HEADS = ((1, 1), (4, 4), (4, 2), (8, 2), (6, 1))
"""Numbers of heads of q, and of k and v."""
Results = tuple[torch.Tensor, torch.Tensor]
"""Result, and logarithms of the sums."""
LARGE = 4 if GPU else 1
"""Largest multiple of ``SIZES`` in a chunk."""


@dataclass(frozen=True)
class Case:
    """A configuration.

    Attributes:
        lengths: of q and of k, of each whole sequence.
        dims: of a head of q and k, and of v.
        sliced: whether k and v lie in memory side by side.
    """

    lengths: tuple[tuple[int, int], ...]
    packed: bool
    causal: bool
    layout: str
    heads: tuple[int, int]
    dims: tuple[int, int]
    dtype: torch.dtype
    scale: float | None = None
    sliced: bool = False

    @classmethod
    def draw(cls, draw: random.Random) -> "Case":
        packed, causal = draw.random() < 0.5, draw.random() < 0.6
        layout = draw.choice(sorted(PARTS))
        chunks = Sharding(layout, group_of("").world_size).chunks
        count = draw.randint(1, 5 if packed else 3)
        lengths = [_lengths(draw, causal) for _ in range(count)]
        if packed and draw.random() < 0.2:  # no queries: with keys or without
            lengths.insert(draw.randint(0, count), (0, draw.choice((0, 1, 64))))
        if not packed:
            lengths = lengths[:1] * count
        return cls(
            tuple((chunks * q, chunks * k) for q, k in lengths), packed, causal, layout,
            draw.choice(HEADS), draw.choice(HEAD_DIMS), draw.choice(DTYPES),
            draw.choice((None, None, 0.3)), draw.random() < 0.1,
        )  # fmt: skip

    @property
    def group(self) -> str:
        """Return the name of the printed line that counts this configuration."""
        words = "packed" if self.packed else "batch", "causal" if self.causal else "full"
        return " ".join((*words, self.layout))

    def problem(self, ranks: int) -> AttentionProblem:
        """Return the problem for which programs are compiled."""
        (heads, kv_heads), (dim, v_dim) = self.heads, self.dims
        count, batch, more = len(self.lengths), [len(self.lengths)], {}
        rows, keys = self.lengths[0]
        if self.packed:
            rows, keys = (sum(n) for n in zip(*self.lengths, strict=True))
            cu = torch.empty(count + 1, dtype=torch.int32, device="meta")
            batch, more = [], {"cu_seqlens_q": cu, "cu_seqlens_k": cu}
        q, k, v = (
            torch.empty(*batch, n // ranks, *shape, dtype=self.dtype, device="meta")
            for n, *shape in ((rows, heads, dim), (keys, kv_heads, dim), (keys, kv_heads, v_dim))
        )
        return checked_attention(
            q, k, v, ranks, causal=self.causal, layout=self.layout, softmax_scale=self.scale,
            **more,
        )  # fmt: skip

    @property
    def offsets(self) -> list[torch.Tensor] | list[None]:
        """Return ``cu_seqlens`` of q and of k, on the host."""
        if not self.packed:
            return [None, None]
        return [torch.tensor([0, *n]).cumsum(0).int() for n in zip(*self.lengths, strict=True)]


def _lengths(draw: random.Random, causal: bool) -> tuple[int, int]:
    """Draw the numbers of rows of a chunk of q and of k."""
    q, k = (draw.choice(SIZES) * draw.randint(1, LARGE) for _ in range(2))
    if draw.random() < 0.5:
        k = q
    return (min(q, k), max(q, k)) if causal else (q, k)


class Run(Call):
    """A configuration with inputs."""

    def __init__(self, case: Case) -> None:
        self.case, self.name, group = case, str(case), group_of("")
        self.rank, self.ranks = group.rank, group.world_size
        self.offsets = case.offsets
        given = self.offsets
        maxima = [max(n) for n in zip(*case.lengths, strict=True)] if case.packed else [None] * 2
        self.more = {
            "causal": case.causal,
            "layout": case.layout,
            "cu_seqlens_q": given[0] if given[0] is None else given[0].to(DEVICE),
            "cu_seqlens_k": given[1] if given[1] is None else given[1].to(DEVICE),
            "max_seqlen_q": maxima[0],
            "max_seqlen_k": maxima[1],
            "softmax_scale": case.scale,
        }
        self.whole = self.fresh()
        q, k, v = (shards[self.rank].clone() for shards in self.shards())
        if case.sliced:
            k, v = torch.cat((k, v), -1).split(case.dims, -1)
        self.given = q, k, v
        self.problem = checked_attention(*self.given, self.ranks, **self.more)

    def fresh(self) -> list[torch.Tensor]:
        """Return whole sequences of random numbers, equal on all ranks."""
        case = self.case
        dims = (case.dims[0], *case.dims)
        heads = (case.heads[0], case.heads[1], case.heads[1])
        shapes = []
        for which, head, dim in zip((0, 1, 1), heads, dims, strict=True):
            rows = [n[which] for n in case.lengths]
            shapes.append(((sum(rows),) if case.packed else (len(rows), rows[0])) + (head, dim))
        return [torch.randn(shape, device=DEVICE).to(case.dtype) for shape in shapes]

    def shards(self) -> list[list[torch.Tensor]]:
        """Return q, k and v of all ranks."""
        q, k = self.offsets
        dim = 0 if self.case.packed else 1
        return [
            [
                ops.shard_sequence(x, rank, self.ranks, self.case.layout, dim, cu)
                for rank in range(self.ranks)
            ]
            for x, cu in zip(self.whole, (q, k, k), strict=True)
        ]

    def refill(self, seed: int = 0) -> None:
        self.whole = self.fresh()
        for operand, shards in zip(self.given, self.shards(), strict=True):
            operand.copy_(shards[self.rank])

    def __call__(self) -> Results:
        return ops.sp_attention(*self.given, **self.more, return_lse=True, strategy=STRATEGY)

    def right(self) -> Results:
        """Return the reference result in fp32."""
        qs, ks, vs = self.shards()
        return reference_attention(self.problem, self.rank, qs[self.rank], ks, vs, *self.offsets)

    def errors(self, actual: Results, right: Results) -> torch.Tensor:
        """Return the largest errors of the result and of the logarithms of the sums."""
        pairs = zip(actual, right, strict=True)
        if any(x.shape != y.shape for x, y in pairs) or actual[0].dtype != right[0].dtype:
            return torch.full((2,), torch.inf, device=DEVICE)
        return torch.stack([
            (x.float() - y.float()).abs().max() if x.numel() else torch.zeros((), device=DEVICE)
            for x, y in zip(actual, right, strict=True)
        ])  # fmt: skip

    def differs(self, actual: Results, right: Results) -> torch.Tensor:
        limits = torch.tensor([TOLERANCE, LSE_TOLERANCE], device=DEVICE)
        return ~(self.errors(actual, right) <= limits).all()

    def fault(self, actual: Results, right: Results) -> str:
        error, of_lse = self.errors(actual, right).tolist()
        if not self.differs(actual, right):
            return ""
        return f"{self.case}: error {error:.1e}, of lse {of_lse:.1e}"


def random_cases(options: argparse.Namespace, count: int) -> list[Case]:
    """Return the first configurations of a seed, compiled in parallel."""
    draw = random.Random(options.seed)
    torch.manual_seed(options.seed)
    cases = [Case.draw(draw) for _ in range(count)]
    if GPU:
        problems = [case.problem(group_of("").world_size) for case in cases]
        compile_ahead(sp_attention_plan(problem, tiles_for(problem)) for problem in problems)
    return cases


def check_values(options: argparse.Namespace) -> str:
    """Run each configuration with two inputs; print a line for each kind, then the first fault."""
    faults, count, worst = [], Counter(), {}
    for case in random_cases(options, options.count):
        run = Run(case)
        for _ in range(2):
            run.refill()
            actual, right = run(), run.right()
            errors = run.errors(actual, right).nan_to_num(torch.inf).tolist()
            worst[case.group] = tuple(map(max, worst.get(case.group, (0.0, 0.0)), errors))
            if fault := run.fault(actual, right):
                faults.append(fault)
                break
        count[case.group] += 1
    for group in sorted(count):
        error, of_lse = worst[group]
        say(f"values: {group}: {count[group]} configurations, error {error:.1e}, lse {of_lse:.1e}")
    return f"{len(faults)} of {options.count} are wrong; {faults[0]}" if faults else ""


def check_back_to_back(options: argparse.Namespace, calls: int = 200) -> str:
    """Many calls without host synchronization, with changing inputs and random delays of ranks."""
    return back_to_back([Run(case) for case in random_cases(options, 6) for _ in range(3)], calls)


def check_graph(options: argparse.Namespace, replays: int = 100) -> str:
    """Two calls of each in one graph, replayed with changing inputs and random delays of ranks."""
    return replayed([Run(case) for case in random_cases(options, 5) for _ in range(2)], replays)


def check_maxima(options: argparse.Namespace) -> str:
    """Packed sequences with maxima that are missing, too large or illegal, which are refused."""
    for case in random_cases(options, 8):
        run = Run(replace(case, packed=True))
        for maxima in ([None, None], [2 * run.problem.q_total, run.problem.k_total]):
            run.more["max_seqlen_q"], run.more["max_seqlen_k"] = maxima
            if fault := run.fault(run(), run.right()):
                return f"maxima {maxima}: {fault}"
    run.more |= {"max_seqlen_q": None, "max_seqlen_k": None}
    run.more["cu_seqlens_k"] = run.more["cu_seqlens_k"] + 1
    try:
        run()
    except tw.TileWeaveError as error:
        return "" if "cu_seqlens_k[0]=1; expected 0" in str(error) else str(error)
    return "offsets that begin with 1 were taken"


def check_disagreement(options: argparse.Namespace) -> str:
    """Ranks that ask for different results are refused, and can continue."""
    me = group_of("").rank
    q = torch.randn(1, 64, 4, 64, device=DEVICE).to(torch.bfloat16)
    try:
        ops.sp_attention(q, q, q, causal=me == 0, strategy=STRATEGY)
    except tw.TileWeaveError as error:
        if "the ranks disagree" not in str(error):
            return str(error)
    else:
        return "" if group_of("").world_size == 1 else "not told"
    (case,) = random_cases(options, 1)
    run = Run(case)
    return run.fault(run(), run.right())


CHECKS = {
    "values": check_values,
    "back to back": check_back_to_back,
    "graph": check_graph,
    "maxima": check_maxima,
    "disagreement": check_disagreement,
}
NEED_GPU = ("graph",)


def verdicts(options: argparse.Namespace) -> Verdicts:
    for name in options.checks or CHECKS:
        if runs_here(name, NEED_GPU):
            yield name, CHECKS[name](options)


if __name__ == "__main__":
    parser = parser_of(__doc__, CHECKS)
    parser.add_argument("--count", type=int, default=24, help="configurations of `values`")
    parser.add_argument("--seed", type=int, default=0)
    warnings.filterwarnings("ignore", message=".*it is copied in each call")  # of sliced inputs
    sys.exit(main(verdicts, parser, heap_bytes=HEAP_BYTES))
