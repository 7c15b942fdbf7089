"""Results of ``tileweave bench`` as a figure: how far from the ideal each contender is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from .bench_contenders import ASYNC_TP, NCCL, OURS
from .bench_results import Result, Shape, ratio
from .builtins.errors import TileWeaveError

_STYLES = {
    OURS: ("ours", "#0b6e4f", "o"),
    NCCL: ("NCCL + cuBLAS", "#b5651d", "s"),
    ASYNC_TP: ("PyTorch async-TP", "#5b5ea6", "^"),
}
_IDEAL = "ideal: the longer of GEMM and communication alone"
_PANEL = 3.6, 2.8
_WIDTH = 7
"""Inches: of a panel, and the least for the legend."""


def require_matplotlib() -> None:
    """
    Raises:
        TileWeaveError: there is none.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise TileWeaveError(
            "bench: --figure needs matplotlib, which is not installed; expected "
            '`pip install "tileweave[plot]"`, or --json here and --from with --figure elsewhere'
        ) from None


def draw(file: str, machine: Mapping[str, Any], results: Iterable[Result]) -> None:
    """Write a PNG with a panel for each operator and each N x K, M on the x axis; collectives are
    not drawn."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels: dict[tuple, list[Result]] = {}
    for r in (r for r in results if isinstance(r.shape, Shape)):
        panels.setdefault((r.op, r.shape.name, r.shape.N, r.shape.K), []).append(r)
    ops = list(dict.fromkeys(op for op, *_ in panels))
    rows = [[key for key in panels if key[0] == op] for op in ops]
    columns = max(map(len, rows))
    size = max(_PANEL[0] * columns, _WIDTH), _PANEL[1] * len(rows) + 0.8
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(len(rows), columns, squeeze=False, sharey=True)
    for i, keys in enumerate(rows):
        for ax, key in zip(axes[i], keys, strict=False):
            _panel(ax, key, panels[key])
        for ax in axes[i][len(keys) :]:
            ax.set_axis_off()
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2)
    figure.suptitle(f"{machine['ranks']} x {machine['device']}, {machine['dtype']}")
    FigureCanvasAgg(figure).print_png(file)


def _panel(ax: Any, key: tuple, results: list[Result]) -> None:
    op, name, N, K = key
    results = sorted(results, key=lambda r: r.shape.M)
    ax.axhline(
        1, color="black", linewidth=1, label="ideal: the longer of GEMM and communication alone"
    )
    for contender, (label, color, marker) in _STYLES.items():
        points = [(r.shape.M, ratio(r.best(contender), r.ideal)) for r in results]
        points = [(M, value) for M, value in points if value is not None]
        ax.plot(*zip(*points, strict=True) if points else ([], []),
                label=label, color=color, marker=marker, markersize=4)  # fmt: skip
    ax.set_xscale("log", base=2)
    ticks = [r.shape.M for r in results]
    ax.set_xticks(ticks, map(str, ticks), fontsize=8)
    ax.minorticks_off()
    ax.set_title(f"{op}\n{name or 'N x K'} {N} x {K}", fontsize=9)
    ax.set_xlabel("M", fontsize=8)
    ax.set_ylabel("time / ideal", fontsize=8)
    ax.grid(alpha=0.3)
