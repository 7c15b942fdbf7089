"""Figure of ``tileweave bench``: time of each implementation relative to the ideal."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ..builtins.errors import TileWeaveError
from ..runtime.host.out_file import write_out
from .case import ASYNC_TP, GATHER, NCCL, OURS, RING, SDPA
from .results import Length, Result, Shape, ratio

_OURS = "ours", "#0b6e4f", "o"


@dataclass(frozen=True)
class _Drawn:
    """Drawing of results of one kind.

    Attributes:
        styles: label, color and marker by prefix of the implementation's name.
        ideal: label of the line at 1.
        x: attribute of a shape on the x axis, and its label.
        panel: returns the title of a panel, which its results share.
    """

    styles: Mapping[str, tuple[str, str, str]]
    ideal: str
    x: tuple[str, str]
    panel: Callable[[Any], str]


DRAWN: dict[type, _Drawn] = {
    Shape: _Drawn(
        {
            OURS: _OURS,
            NCCL: ("NCCL + cuBLAS", "#b5651d", "s"),
            ASYNC_TP: ("PyTorch async-TP", "#5b5ea6", "^"),
        },
        "ideal: the longer of GEMM and communication alone",
        ("M", "M"),
        lambda shape: f"{shape.name or 'N x K'} {shape.N} x {shape.K}",
    ),
    Length: _Drawn(
        {
            OURS: _OURS,
            GATHER: ("NCCL all-gather + PyTorch SDPA", "#b5651d", "s"),
            RING: ("ring attention", "#5b5ea6", "^"),
            SDPA: ("PyTorch SDPA alone", "#888888", "x"),
        },
        "ideal: the kernel alone, all keys there",
        ("length", "rows of all ranks"),
        lambda shape: f"{shape.batch} x {shape.kind}",
    ),
}
"""Drawing by kind of shape; collectives are not drawn."""
_PANEL = 3.6, 2.8
_WIDTH = 7
"""Size of a panel, and the least width for the legend, in inches."""


def require_matplotlib() -> None:
    """Refuse a figure without matplotlib.

    Raises:
        TileWeaveError: matplotlib is not installed.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise TileWeaveError(
            "bench: --figure needs matplotlib, which is not installed; expected "
            '`pip install "tileweave[plot]"`, or --json here and --from with --figure elsewhere'
        ) from None


def draw(file: str, machine: Mapping[str, Any], results: Iterable[Result]) -> None:
    """Write a PNG with a panel for each operator and each N x K, with M on the x axis, or for each
    kind of attention.

    Raises:
        TileWeaveError: the file cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels: dict[tuple[str, str], list[Result]] = {}
    for r in (r for r in results if type(r.shape) in DRAWN):
        panels.setdefault((r.op, DRAWN[type(r.shape)].panel(r.shape)), []).append(r)
    ops = list(dict.fromkeys(op for op, _ in panels))
    rows = [[key for key in panels if key[0] == op] for op in ops]
    columns = max(map(len, rows))
    size = max(_PANEL[0] * columns, _WIDTH), _PANEL[1] * len(rows) + 0.8
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(len(rows), columns, squeeze=False, sharey=True)
    for i, keys in enumerate(rows):
        for ax, key in zip(axes[i], keys, strict=False):
            _panel(ax, "\n".join(key), panels[key])
        for ax in axes[i][len(keys) :]:
            ax.set_axis_off()
    labelled = {
        label: handle
        for handle, label in (
            pair for row in axes for pair in zip(*row[0].get_legend_handles_labels(), strict=True)
        )
    }
    figure.legend(labelled.values(), labelled.keys(), loc="outside lower center", ncols=2)
    figure.suptitle(f"{machine['ranks']} x {machine['device']}, {machine['dtype']}")
    png = io.BytesIO()
    FigureCanvasAgg(figure).print_png(png)
    write_out("bench: --figure", file, png.getvalue())


def _panel(ax: Any, title: str, results: list[Result]) -> None:
    drawn = DRAWN[type(results[0].shape)]
    attribute, x_label = drawn.x
    ordered = sorted(((getattr(r.shape, attribute), r) for r in results), key=lambda pair: pair[0])
    ax.axhline(1, color="black", linewidth=1, label=drawn.ideal)
    for implementation, (label, color, marker) in drawn.styles.items():
        points = [(x, ratio(r.best(implementation), r.ideal)) for x, r in ordered]
        points = [(x, value) for x, value in points if value is not None]
        ax.plot(*zip(*points, strict=True) if points else ([], []),
                label=label, color=color, marker=marker, markersize=4)  # fmt: skip
    ax.set_xscale("log", base=2)
    ticks = [x for x, _ in ordered]
    ax.set_xticks(ticks, map(str, ticks), fontsize=8)
    ax.minorticks_off()
    ax.set_title(title, fontsize=9)
    ax.set_xlabel(x_label, fontsize=8)
    ax.set_ylabel("time / ideal", fontsize=8)
    ax.grid(alpha=0.3)
