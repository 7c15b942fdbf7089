"""Draw ``docs/images/speedup.svg``, the chart of the README. ``make docs`` runs it."""

from __future__ import annotations

from pathlib import Path

from svg import line, picture, rect, text

PICTURE = Path(__file__).resolve().with_name("images") / "speedup.svg"
LOG_ENTRY = "2026-11-28, after 15:49"
"""Heading of the entry of benchmarks/LOG.md that holds the ratios."""
ROWS = (1024, 2048, 4096, 8192, 16384)
RATIOS = {
    "all_gather_matmul": (1.08, 1.18, 1.21, 1.05, 1.02),
    "matmul_reduce_scatter": (1.17, 1.11, 1.08, 1.05, 1.03),
    "matmul_all_reduce": (1.04, 1.11, 1.24, 1.31, 1.32),
}
"""Operator -> time of the fastest other implementation / time of TileWeave, for each of ROWS."""
COLORS = ("#0072b2", "#e69f00", "#009e73")
"""One for each operator, from the palette of Okabe and Ito."""
LEFT, BASE, HEIGHT = 56.0, 250.0, 140.0
"""Position of the axes, and height of a bar of ratio 1, in pixels."""
BAR, GAP, GREY = 40.0, 36.0, "#666666"


def drawing() -> str:
    """Return the chart: one group of bars for each operator, one bar for each number of rows."""
    title = "Speed-up on 4 x H200: the MLP of Llama-3 70B in bf16"
    width = LEFT + len(RATIOS) * (len(ROWS) * BAR + GAP)
    shapes: list[str] = [
        text(16, 26, title, 16, bold=True),
        text(16, 46, "over the faster of NCCL + cuBLAS and PyTorch's async-TP", 12, color=GREY),
    ]
    for group, (operator, ratios) in enumerate(RATIOS.items()):
        left = LEFT + group * (len(ROWS) * BAR + GAP)
        shapes += _bars(operator, ratios, left, COLORS[group])
    level = BASE - HEIGHT
    shapes += [
        line(LEFT - 8, BASE, width - GAP + 8, BASE, GREY),
        line(LEFT - 8, level, width - GAP + 8, level, GREY, dashed=True),
        text(LEFT - 12, level + 4, "1.0", 11, "end", GREY),
        text(LEFT - 12, BASE + 4, "0", 11, "end", GREY),
        text(LEFT - 12, BASE + 18, "rows", 11, "end", GREY),
        text(16, BASE + 66, f"benchmarks/LOG.md, {LOG_ENTRY}. No async-TP exists", 11, color=GREY),
        text(
            16,
            BASE + 82,
            "for matmul_all_reduce; it is compared with NCCL + cuBLAS.",
            11,
            color=GREY,
        ),
    ]
    return picture(width, BASE + 96, shapes)


def _bars(operator: str, ratios: tuple[float, ...], left: float, color: str) -> list[str]:
    middle = left + len(ROWS) * BAR / 2
    shapes: list[str] = [text(middle, BASE + 40, operator, 13, "middle", bold=True)]
    for index, (rows, ratio) in enumerate(zip(ROWS, ratios, strict=True)):
        x, height = left + index * BAR, HEIGHT * ratio
        shapes += [
            rect(x + 3, BASE - height, BAR - 6, height, color),
            text(x + BAR / 2, BASE - height - 6, f"{ratio:.2f}", 11, "middle"),
            text(x + BAR / 2, BASE + 18, str(rows), 11, "middle", GREY),
        ]
    return shapes


if __name__ == "__main__":
    PICTURE.write_text(drawing())
    print(f"{PICTURE.name} written")
