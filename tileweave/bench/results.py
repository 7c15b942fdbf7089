"""Results of ``tileweave bench``: as a table, as a summary, and as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import geometric_mean
from typing import Any, ClassVar

from ..builtins.errors import TileWeaveError
from ..ops.autotune.trial import TOLERANCE
from ..ops.core.registry import OPERATORS
from ..runtime.host.out_file import write_out
from .case import (
    AGAINST,
    ASYNC_TP,
    EXCHANGE,
    GATHER,
    LOCAL,
    NCCL,
    OURS,
    PRODUCT,
    RING,
    SDPA,
    TORCH,
    TRANSPORT,
    Case,
)


@dataclass(frozen=True)
class Shape:
    """GEMM of the whole group.

    Attributes:
        name: name of the model, or empty.
        M, N, K: rows, columns and inner dimension. The ranks share them as in
            ``autotune.trial.problem_of``.
        tolerance: largest relative error of a right result.
        floors: prefixes of the implementations of which the slowest is the lower bound.
        others: prefixes of the alternatives for users.
    """

    tolerance: ClassVar[float] = TOLERANCE
    floors: ClassVar[Sequence[str]] = PRODUCT, EXCHANGE
    others: ClassVar[Sequence[str]] = NCCL, ASYNC_TP, AGAINST

    name: str
    M: int
    N: int
    K: int

    def __str__(self) -> str:
        return f"{self.M} x {self.N} x {self.K}"


@dataclass(frozen=True)
class Size:
    """Input of each rank to a collective.

    Attributes:
        bytes: size of one rank's input.
        tolerance: largest relative error of a right result; sums of the inputs are exact.
        floors, others: as in ``Shape``.
    """

    tolerance: ClassVar[float] = 0.0
    floors: ClassVar[Sequence[str]] = (EXCHANGE,)
    others: ClassVar[Sequence[str]] = NCCL, AGAINST

    bytes: int
    ranks: int

    def __str__(self) -> str:
        return f"{self.bytes / (1 << 20):.4g} MiB"


@dataclass(frozen=True)
class Length:
    """Attention of the whole group.

    Attributes:
        batch, length: number of sequences, and rows of each.
        heads, kv_heads, head_dim: heads of queries, heads of keys and values, and their dimension.
        causal: whether a row attends only to earlier rows and itself.
        layout: distribution of rows over the ranks, as in ``sp_attention``.
        tolerance: largest relative error of a row and head of a right result.
        floors, others: as in ``Shape``.
    """

    tolerance: ClassVar[float] = TOLERANCE
    floors: ClassVar[Sequence[str]] = (LOCAL,)
    others: ClassVar[Sequence[str]] = GATHER, RING, AGAINST

    batch: int
    length: int
    heads: int
    kv_heads: int
    head_dim: int
    causal: bool
    layout: str
    ranks: int

    def __str__(self) -> str:
        return f"{self.batch} x {self.length} {self.kind}"

    @property
    def kind(self) -> str:
        return f"{'causal' if self.causal else 'full'} {self.layout}"

    @property
    def flops(self) -> float:
        """Floating-point operations of a rank, on average: two products over the pairs of rows that
        attend to each other."""
        pairs = self.length * (self.length + 1) / 2 if self.causal else self.length**2
        return 4 * self.batch * pairs * self.heads * self.head_dim / self.ranks


@dataclass(frozen=True)
class MoeShape:
    """Layer of a mixture of experts with a routing.

    Attributes:
        model: name of the model, or its extents.
        experts, top_k: experts of all ranks, and the choices of a token.
        hidden, intermediate: extents of an expert's MLP.
        tokens: tokens of each rank.
        routing: how tokens choose experts.
        part: which product of the MLP a grouped GEMM is; else empty.
        rows: most rows of a rank's experts in any of the routings.
        sent_bytes: bytes that the busiest rank sends to others or receives from them, of 2-byte
            values, if each choice of a token has a row of its own.
        flops: floating-point operations of the busiest rank's products.
        tolerance: largest relative error of a right result.
        floors, others: as in ``Shape``.
    """

    tolerance: ClassVar[float] = 2 * TOLERANCE  # of a row, after three roundings to 16 bits
    floors: ClassVar[Sequence[str]] = ()
    others: ClassVar[Sequence[str]] = TORCH, AGAINST

    model: str
    experts: int
    top_k: int
    hidden: int
    intermediate: int
    tokens: int
    routing: str
    part: str
    ranks: int
    rows: int
    sent_bytes: int
    flops: int

    def __str__(self) -> str:
        return " ".join(filter(None, (self.model, str(self.tokens), self.routing, self.part)))

    @property
    def moved_bytes(self) -> int:
        """``sent_bytes``, for ``Result.gigabytes``."""
        return self.sent_bytes


@dataclass(frozen=True)
class DecodeShape:
    """Attention of a decode step of the whole group.

    Attributes:
        batch, keys: number of sequences, and tokens of each on all ranks.
        heads, kv_heads, head_dim: heads of queries, heads of keys and values, and their dimension.
        page_size: tokens of a page.
        tolerance: largest relative error of a head of a right result.
        floors, others: as in ``Shape``.
    """

    tolerance: ClassVar[float] = TOLERANCE
    floors: ClassVar[Sequence[str]] = ()
    others: ClassVar[Sequence[str]] = SDPA, AGAINST

    batch: int
    keys: int
    heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    ranks: int

    def __str__(self) -> str:
        return f"{self.batch} x {self.keys}"

    @property
    def moved_bytes(self) -> int:
        """Bytes of the keys and values of a rank, of 2-byte values."""
        return 2 * 2 * self.batch * self.keys // self.ranks * self.kv_heads * self.head_dim


KINDS = Shape, Size, Length, MoeShape, DecodeShape


@dataclass(frozen=True)
class Result:
    """One operator with one shape or length, or one collective with one size.

    Attributes:
        strategy, reason: how the operator computes it, and why.
        ms: times of the implementations by name.
        errors: relative errors of their worst runs on the worst rank.
        seconds: duration of the measurement.
    """

    op: str
    shape: Shape | Size | Length | MoeShape | DecodeShape
    strategy: str
    reason: str
    ms: dict[str, float]
    errors: dict[str, float]
    seconds: float

    def best(self, *prefixes: str) -> float | None:
        """Return the shortest time among right implementations whose names have one of the
        prefixes."""
        return min(
            (self.ms[n] for n in self.ms if n.startswith(prefixes) and self.is_right(n)),
            default=None,
        )

    def is_right(self, name: str) -> bool:
        return self.errors[name] <= self.shape.tolerance

    @property
    def ours(self) -> float:
        """Time of our operator, also if its result is wrong."""
        return self.ms[OURS]

    @property
    def ideal(self) -> float | None:
        """Lower bound: for a GEMM the longer of its two halves, for a collective the copies, for
        attention the kernel of one rank without communication."""
        times = [self.best(name) for name in self.shape.floors]
        floors = [ms for ms in times if ms is not None]
        return max(floors) if floors and len(floors) == len(times) else None

    @property
    def best_other(self) -> float | None:
        """Shortest time of an alternative."""
        return self.best(*self.shape.others)

    def gigabytes(self, name: str) -> float | None:
        """Return the GB/s of a right implementation: between ranks for a mixture of experts, of the
        cache for a decode step."""
        ms, moved = self.best(name), self.shape.moved_bytes
        return moved / ms / 1e6 if ms and moved else None

    def rate(self, name: str) -> float | None:
        """Return NCCL's bus bandwidth of a right implementation of a collective, in GB/s."""
        ms = self.best(name)
        size = self.shape
        return OPERATORS[self.op].sent_bytes(size.bytes, size.ranks) / ms / 1e6 if ms else None

    def teraflops(self, name: str) -> float | None:
        """Return the TFLOP/s of a rank of a right implementation of attention or of experts."""
        ms, flops = self.best(name), self.shape.flops
        return flops / ms / 1e9 if ms and flops else None


Column = tuple[str, int, int, Callable[[Result], float | None]]
"""Title, width, decimals and value of a column."""
_OTHERS: tuple[Column, ...] = (
    ("against", 9, 3, lambda r: r.best(AGAINST)),
    ("best other/ours", 17, 3, lambda r: ratio(r.best_other, r.ours)),
)
COLUMNS: dict[type, tuple[Column, ...]] = {
    Shape: (
        ("ours", 8, 3, lambda r: r.ours),
        ("gemm", 8, 3, lambda r: r.best(PRODUCT)),
        ("comm", 8, 3, lambda r: r.best(EXCHANGE)),
        ("nccl", 8, 3, lambda r: r.best(NCCL)),
        ("async-TP", 10, 3, lambda r: r.best(ASYNC_TP)),
        ("ours/ideal", 12, 3, lambda r: ratio(r.ours, r.ideal)),
        *_OTHERS,
    ),
    Size: (
        ("ours, ms", 10, 3, lambda r: r.ours),
        ("GB/s: ours", 12, 1, lambda r: r.rate(OURS)),
        ("copy_engine", 13, 1, lambda r: r.rate(f"{TRANSPORT}copy_engine")),
        ("ldst", 8, 1, lambda r: r.rate(f"{TRANSPORT}ldst")),
        ("ll", 8, 1, lambda r: r.rate(f"{TRANSPORT}ll")),
        ("nccl", 8, 1, lambda r: r.rate(NCCL)),
        ("copies", 8, 1, lambda r: r.rate(EXCHANGE)),
        ("ours/copies", 13, 3, lambda r: ratio(r.ours, r.ideal)),
        *_OTHERS,
    ),
    Length: (
        ("ours, ms", 10, 3, lambda r: r.ours),
        ("local", 9, 3, lambda r: r.best(LOCAL)),
        ("sdpa", 9, 3, lambda r: r.best(SDPA)),
        ("gather", 9, 3, lambda r: r.best(GATHER)),
        ("ring", 9, 3, lambda r: r.best(RING)),
        ("TFLOP/s: ours", 15, 0, lambda r: r.teraflops(OURS)),
        ("local", 7, 0, lambda r: r.teraflops(LOCAL)),
        ("sdpa", 6, 0, lambda r: r.teraflops(SDPA)),
        ("ours/local", 12, 3, lambda r: ratio(r.ours, r.ideal)),
        ("gather/ours", 13, 3, lambda r: ratio(r.best(GATHER), r.ours)),
        ("ring/ours", 11, 3, lambda r: ratio(r.best(RING), r.ours)),
        ("sdpa/local", 12, 3, lambda r: ratio(r.best(SDPA), r.best(LOCAL))),
        *_OTHERS,
    ),
    MoeShape: (
        ("ours, ms", 10, 3, lambda r: r.ours),
        ("torch", 9, 3, lambda r: r.best(TORCH)),
        ("MiB", 9, 1, lambda r: r.shape.sent_bytes / (1 << 20)),
        ("GB/s: ours", 12, 1, lambda r: r.gigabytes(OURS)),
        ("torch", 8, 1, lambda r: r.gigabytes(TORCH)),
        ("TFLOP/s: ours", 15, 0, lambda r: r.teraflops(OURS)),
        ("torch", 7, 0, lambda r: r.teraflops(TORCH)),
        *_OTHERS,
    ),
    DecodeShape: (
        ("ours, ms", 10, 4, lambda r: r.ours),
        ("sdpa", 9, 4, lambda r: r.best(SDPA)),
        ("GB/s: ours", 12, 0, lambda r: r.gigabytes(OURS)),
        ("sdpa", 7, 0, lambda r: r.gigabytes(SDPA)),
        *_OTHERS,
    ),
}
_SIZED = {
    Shape: ("M x N x K", 22),
    Size: ("of each rank", 22),
    Length: ("batch x length", 28),
    MoeShape: ("model, tokens, routing", 34),
    DecodeShape: ("batch x tokens", 22),
}
"""Title and width of the column of shapes."""


def table(results: Sequence[Result | Case], before: Result | Case | None = None) -> list[str]:
    """Return a row for each result, with a heading before each new kind.

    Args:
        results: also cases with an obstacle, which are not measured.
        before: result or case of the line above them.
    """
    lines = []
    for r in results:
        if before is None or type(before.shape) is not type(r.shape):
            lines.append(_head(type(r.shape)))
        lines.append(_row(r))
        before = r
    return lines


def _head(kind: type) -> str:
    titles = "".join(f"{title:>{width}}" for title, width, *_ in COLUMNS[kind])
    sized, width = _SIZED[kind]
    return f"{'operator':<22}{sized:<{width}}{titles}{'error':>9}{'took':>7}  how"


def _row(r: Result | Case) -> str:
    """Return one row; ``-`` where no right result exists."""
    cells, (_, place) = "", _SIZED[type(r.shape)]
    if isinstance(r, Case):
        return f"{r.op:<22}{r.shape!s:<{place}}  -: {r.obstacle}"
    for _, width, digits, value_of in COLUMNS[type(r.shape)]:
        value = value_of(r)
        cells += f"{'-':>{width}}" if value is None else f"{value:>{width}.{digits}f}"
    return (
        f"{r.op:<22}{r.shape!s:<{place}}{cells}{r.errors[OURS]:>9.1e}{r.seconds:>5.0f} s  "
        + (r.strategy if r.strategy == "fused" else f"{r.strategy}: {r.reason}")
        + ("" if r.is_right(OURS) else "  WRONG")
    )


def ratio(numerator: float | None, denominator: float | None) -> float | None:
    """Return the ratio of two times, None if one is missing."""
    return numerator / denominator if numerator is not None and denominator else None


def wrong_others(r: Result) -> list[str]:
    """Return a note for each other implementation that is left out because its result is wrong."""
    return [
        f"{name}: wrong for {r.op} {r.shape}, relative error {r.errors[name]:.1e}; left out"
        for name in r.ms
        if name != OURS and not r.is_right(name)
    ]


def summary(results: Iterable[Result]) -> list[str]:
    """Return, for each operator, its ratios to the ideal and to alternatives, and every shape at
    which an alternative is faster."""
    by_op: dict[str, list[Result]] = {}
    for r in results:
        by_op.setdefault(r.op, []).append(r)
    lines = []
    for op, of_op in by_op.items():
        lines.append(f"{op}, {len(of_op)} shapes")
        lines += _ratio_line("ours / ideal", of_op, lambda r: ratio(r.ours, r.ideal), max)
        for other in of_op[0].shape.others:
            title = f"{other.removesuffix('/')} / ours"
            lines += _ratio_line(title, of_op, lambda r, o=other: ratio(r.best(o), r.ours), min)
        lines += _ratio_line("best other / ours", of_op, lambda r: ratio(r.best_other, r.ours), min)
        lines += [
            f"  loses: {r.shape}: ours {r.ours:.3f}, best other {r.best_other:.3f} ms"
            for r in of_op
            if r.best_other is not None and r.best_other < r.ours
        ]
    return lines


def _ratio_line(
    title: str, results: Iterable[Result], value_of: Callable[[Result], float | None], worst: Any
) -> list[str]:
    """Return a line with the mean and the ``worst`` of a ratio; none if no result has it."""
    ratios = [
        (value, r.shape) for r in results if r.is_right(OURS) and (value := value_of(r)) is not None
    ]
    if not ratios:
        return []
    extreme, shape = worst(ratios, key=lambda pair: pair[0])
    mean = geometric_mean([value for value, _ in ratios])
    return [f"  {title:<18} geometric mean {mean:.3f}, worst {extreme:.3f} ({shape})"]


def save(file: str, machine: Mapping[str, Any], results: Iterable[Result]) -> None:
    """Write JSON that ``load`` reads. An infinite error becomes null, because JSON has no infinity.

    Raises:
        TileWeaveError: the file cannot be written.
    """
    rows = [asdict(r) for r in results]
    for row in rows:
        row["errors"] = {n: e if math.isfinite(e) else None for n, e in row["errors"].items()}
    text = json.dumps({**machine, "results": rows}, indent=1, allow_nan=False)
    write_out("bench: --json", file, text + "\n")


def load(file: str) -> tuple[dict[str, Any], list[Result]]:
    """Return the machine and the results that ``save`` wrote.

    Raises:
        TileWeaveError: there is no such file, or ``save`` did not write it.
    """
    kinds = {frozenset(field.name for field in fields(kind)): kind for kind in KINDS}
    try:
        machine = json.loads(Path(file).read_text())
        results = []
        for r in machine.pop("results"):
            shape = kinds[frozenset(r["shape"])](**r["shape"])
            errors = {n: math.inf if e is None else e for n, e in r["errors"].items()}
            results.append(_checked(Result(**{**r, "shape": shape, "errors": errors})))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise TileWeaveError(
            f"bench: --from {file}: {error}; expected what tileweave bench --json has written"
        ) from None
    return machine, results


def _checked(r: Result) -> Result:
    """Return the result, checked so that ``table`` and ``summary`` can print it.

    Raises:
        ValueError: no measurement has such values.
    """
    numbers = [*r.ms.values(), *r.errors.values(), r.seconds]
    if not (
        all(type(getattr(r.shape, f.name)).__name__ == f.type for f in fields(r.shape))
        and all(isinstance(text, str) for text in (r.op, r.strategy, r.reason))
        and r.op in OPERATORS
        and all(type(n) in (int, float) and n >= 0 for n in numbers)
        and all(0 < ms < math.inf for ms in r.ms.values())
        and OURS in r.ms.keys() == r.errors.keys()
    ):
        raise ValueError(f"{r} was not measured")
    return r
