"""What ``tileweave bench`` has found: as a table, in words, and as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from .bench_contenders import ASYNC_TP, EXCHANGE, NCCL, OURS, PRODUCT
from .builtins.errors import TileWeaveError
from .ops.trial import TOLERANCE


@dataclass(frozen=True)
class Shape:
    """A product of the whole group.

    Attributes:
        name: of the model, or empty.
        M, N, K: rows, columns and inner dimension. For ``all_gather_matmul`` N, else K is shared
            out among the ranks; so is M, but for ``matmul_all_reduce``.
    """

    name: str
    M: int
    N: int
    K: int

    def __str__(self) -> str:
        return f"{self.M} x {self.N} x {self.K}"


@dataclass(frozen=True)
class Result:
    """One operator with one shape.

    Attributes:
        strategy, reason: how the operator computes it, and why so.
        ms: of each contender, by name.
        errors: relative, of its worst run on the worst rank.
        seconds: that measuring it took.
    """

    op: str
    shape: Shape
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
        return self.errors[name] <= TOLERANCE

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
        """The longer of both halves alone: what overlap cannot beat."""
        halves = self.product, self.exchange
        return None if None in halves else max(halves)

    @property
    def best_other(self) -> float | None:
        """Of what users could pick instead."""
        return self.best(NCCL, ASYNC_TP)


def table_head() -> str:
    """What stands above ``table_row``."""
    return (
        f"{'operator':<22}{'M x N x K':<22}{'ours':>8}{'gemm':>8}{'comm':>8}{'nccl':>8}"
        f"{'async-TP':>10}{'ours/ideal':>12}{'best other/ours':>17}{'error':>9}{'took':>7}  how"
    )


def table_row(r: Result) -> str:
    """Times in ms; ``-`` where there is none that is right."""
    cells = (
        (r.ours, 8),
        (r.product, 8),
        (r.exchange, 8),
        (r.best(NCCL), 8),
        (r.best(ASYNC_TP), 10),
        (ratio(r.ours, r.ideal), 12),
        (ratio(r.best_other, r.ours), 17),
    )
    how = r.strategy if r.strategy == "fused" else f"{r.strategy}: {r.reason}"
    return (
        f"{r.op:<22}{r.shape!s:<22}"
        + "".join(f"{'-':>{width}}" if ms is None else f"{ms:>{width}.3f}" for ms, width in cells)
        + f"{r.errors[OURS]:>9.1e}{r.seconds:>5.0f} s  {how}"
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


def _ratios(results: Iterable[Result], of: Any) -> list[tuple[float, Shape]]:
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
        results = [Result(**{**r, "shape": Shape(**r["shape"])}) for r in machine.pop("results")]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise TileWeaveError(
            f"bench: --from {file}: {error}; expected what tileweave bench --json has written"
        ) from None
    return machine, results
