"""What ``tileweave bench`` has found: as a table, in words, and as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import geometric_mean
from typing import Any, ClassVar

from .bench_contenders import ASYNC_TP, EXCHANGE, NCCL, OURS, PRODUCT, TRANSPORT
from .builtins.errors import TileWeaveError
from .ops.collective import sent_bytes
from .ops.trial import TOLERANCE


@dataclass(frozen=True)
class Shape:
    """A product of the whole group.

    Attributes:
        name: of the model, or empty.
        M, N, K: rows, columns and inner dimension. For ``all_gather_matmul`` N, else K is shared
            out among the ranks; so is M, but for ``matmul_all_reduce``.
        tolerance: largest relative error of a right result.
    """

    tolerance: ClassVar[float] = TOLERANCE

    name: str
    M: int
    N: int
    K: int

    def __str__(self) -> str:
        return f"{self.M} x {self.N} x {self.K}"


@dataclass(frozen=True)
class Size:
    """What each rank gives to a collective.

    Attributes:
        bytes: of one rank.
        tolerance: largest relative error of a right result, of numbers whose sums are exact.
    """

    tolerance: ClassVar[float] = 0.0

    bytes: int
    ranks: int

    def __str__(self) -> str:
        return f"{self.bytes / (1 << 20):.4g} MiB"


@dataclass(frozen=True)
class Result:
    """One operator with one shape, or one collective with one size.

    Attributes:
        strategy, reason: how the operator computes it, and why so.
        ms: of each contender, by name.
        errors: relative, of its worst run on the worst rank.
        seconds: that measuring it took.
    """

    op: str
    shape: Shape | Size
    strategy: str
    reason: str
    ms: dict[str, float]
    errors: dict[str, float]
    seconds: float

    def best(self, *beginnings: str) -> float | None:
        """The shortest time of those whose names begin so and whose results are right."""
        return min(
            (self.ms[n] for n in self.ms if n.startswith(beginnings) and self.is_right(n)),
            default=None,
        )

    def is_right(self, name: str) -> bool:
        return self.errors[name] <= self.shape.tolerance

    @property
    def ours(self) -> float:
        """Right or wrong."""
        return self.ms[OURS]

    @property
    def product(self) -> float | None:
        return self.best(PRODUCT)

    @property
    def exchange(self) -> float | None:
        return self.best(EXCHANGE)

    @property
    def ideal(self) -> float | None:
        """The longer of both halves alone, which overlap cannot beat; of a collective the copies
        alone."""
        if isinstance(self.shape, Size):
            return self.exchange
        halves = self.product, self.exchange
        return None if None in halves else max(halves)

    @property
    def best_other(self) -> float | None:
        """Of what users could pick instead."""
        return self.best(NCCL, ASYNC_TP)

    def rate(self, name: str) -> float | None:
        """Of a right contender for a collective: NCCL's bus bandwidth, in GB/s."""
        ms = self.best(name)
        size = self.shape
        return sent_bytes(self.op, size.bytes, size.ranks) / ms / 1e6 if ms else None


Column = tuple[str, int, int, Callable[[Result], float | None]]
"""What stands above it, its width, digits behind the point, and what is in it."""
_OTHERS: Column = ("best other/ours", 17, 3, lambda r: ratio(r.best_other, r.ours))
COLUMNS: dict[type, tuple[Column, ...]] = {
    Shape: (
        ("ours", 8, 3, lambda r: r.ours),
        ("gemm", 8, 3, lambda r: r.product),
        ("comm", 8, 3, lambda r: r.exchange),
        ("nccl", 8, 3, lambda r: r.best(NCCL)),
        ("async-TP", 10, 3, lambda r: r.best(ASYNC_TP)),
        ("ours/ideal", 12, 3, lambda r: ratio(r.ours, r.ideal)),
        _OTHERS,
    ),
    Size: (
        ("ours, ms", 10, 3, lambda r: r.ours),
        ("GB/s: ours", 12, 1, lambda r: r.rate(OURS)),
        ("copy_engine", 13, 1, lambda r: r.rate(f"{TRANSPORT}copy_engine")),
        ("tma", 8, 1, lambda r: r.rate(f"{TRANSPORT}tma")),
        ("ldst", 8, 1, lambda r: r.rate(f"{TRANSPORT}ldst")),
        ("nccl", 8, 1, lambda r: r.rate(NCCL)),
        ("copies", 8, 1, lambda r: r.rate(EXCHANGE)),
        ("ours/copies", 13, 3, lambda r: ratio(r.ours, r.ideal)),
        _OTHERS,
    ),
}
_SIZED = {Shape: "M x N x K", Size: "of each rank"}


def table(results: Sequence[Result], before: Result | None = None) -> list[str]:
    """A row for each, below what stands above the columns of its kind.

    Args:
        before: what the line above them is about.
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
    return f"{'operator':<22}{_SIZED[kind]:<22}{titles}{'error':>9}{'took':>7}  how"


def _row(r: Result) -> str:
    """``-`` where there is nothing that is right."""
    cells = ""
    for _, width, digits, of in COLUMNS[type(r.shape)]:
        value = of(r)
        cells += f"{'-':>{width}}" if value is None else f"{value:>{width}.{digits}f}"
    return (
        f"{r.op:<22}{r.shape!s:<22}{cells}{r.errors[OURS]:>9.1e}{r.seconds:>5.0f} s  "
        + (r.strategy if r.strategy == "fused" else f"{r.strategy}: {r.reason}")
        + ("" if r.is_right(OURS) else "  WRONG")
    )


def ratio(above: float | None, below: float | None) -> float | None:
    """Of two times, if there are both."""
    return above / below if above is not None and below else None


def wrong_others(r: Result) -> list[str]:
    """What is to be said of contenders that are left out because they are wrong."""
    return [
        f"{name}: wrong for {r.op} {r.shape}, relative error {r.errors[name]:.1e}; left out"
        for name in r.ms
        if name != OURS and not r.is_right(name)
    ]


def summary(results: Iterable[Result]) -> list[str]:
    """Of each operator how near to the ideal and how far from the others it is, and every shape
    that loses to one of them."""
    by_op: dict[str, list[Result]] = {}
    for r in results:
        by_op.setdefault(r.op, []).append(r)
    lines = []
    for op, of_op in by_op.items():
        lines.append(f"{op}, {len(of_op)} shapes")
        for what, ratios, worst in (
            ("ours / ideal", _ratios(of_op, lambda r: ratio(r.ours, r.ideal)), max),
            ("nccl / ours", _ratios(of_op, lambda r: ratio(r.best(NCCL), r.ours)), min),
            ("async-TP / ours", _ratios(of_op, lambda r: ratio(r.best(ASYNC_TP), r.ours)), min),
            ("best other / ours", _ratios(of_op, lambda r: ratio(r.best_other, r.ours)), min),
        ):
            if ratios:
                extreme, shape = worst(ratios, key=lambda pair: pair[0])
                mean = geometric_mean([value for value, _ in ratios])
                lines.append(
                    f"  {what:<18} geometric mean {mean:.3f}, worst {extreme:.3f} ({shape})"
                )
        lines += [
            f"  loses: {r.shape}: ours {r.ours:.3f}, best other {r.best_other:.3f} ms"
            for r in of_op
            if r.best_other is not None and r.best_other < r.ours
        ]
    return lines


def _ratios(results: Iterable[Result], of: Any) -> list[tuple[float, Shape | Size]]:
    return [(value, r.shape) for r in results if r.is_right(OURS) and (value := of(r)) is not None]


def save(file: str, machine: Mapping[str, Any], results: Iterable[Result]) -> None:
    """As JSON, of which ``load`` is the inverse."""
    text = json.dumps({**machine, "results": [asdict(r) for r in results]}, indent=1)
    Path(file).write_text(text + "\n")


def load(file: str) -> tuple[dict[str, Any], list[Result]]:
    """The machine and the results of ``save``.

    Raises:
        TileWeaveError: no such file, or no file of ``save``.
    """
    try:
        machine = json.loads(Path(file).read_text())
        results = [
            Result(**{**r, "shape": (Size if "bytes" in r["shape"] else Shape)(**r["shape"])})
            for r in machine.pop("results")
        ]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise TileWeaveError(
            f"bench: --from {file}: {error}; expected what tileweave bench --json has written"
        ) from None
    return machine, results
