"""Draw ``docs/images/sequence.svg``: which rank attends to what. ``make docs`` runs it."""

from __future__ import annotations

from pathlib import Path

from svg import picture, polygon, rect, text

from tileweave.ops import attention_schedule
from tileweave.ops.attention.sequence import PARTS, Sharding, owners_from

PICTURE = Path(__file__).resolve().with_name("images") / "sequence.svg"
RANKS, LENGTH = 4, 1 << 16
COLORS = ("#56b4e9", "#e69f00", "#66c2a5", "#dd9ac2")
"""Of ranks: tints of those that color-blind people tell apart."""
SIZE, LEFT, TOP, BETWEEN = 320.0, 96.0, 118.0, 150.0
"""Of a panel and around it, in pixels."""
BAR, GRID, GREY = 24.0, "#ffffff", "#666666"


def drawing() -> str:
    """Both layouts side by side."""
    title = f"Causal attention on {RANKS} ranks: who attends to what, and when"
    explained = (
        "A row is a chunk of queries, a column one of keys. Color: the rank that computes it, "
        "which is the one that holds the queries. Number: its step; 0 needs no other rank."
    )
    shapes: list[str] = [
        text(LEFT, 28, title, 17, bold=True),
        text(LEFT, 50, explained, 12, color=GREY),
    ]
    width = LEFT + SIZE + BETWEEN
    for number, layout in enumerate(PARTS):
        shapes += _panel(Sharding(layout, RANKS), LEFT + number * width, TOP)
    height = TOP + SIZE + 60 + RANKS * BAR + 16
    return picture(2 * width - 10, height, shapes)


def _panel(sharding: Sharding, left: float, top: float) -> list[str]:
    size = SIZE / sharding.chunks
    shapes: list[str] = [text(left, top - 40, sharding.layout, 15, bold=True)]
    for rank in range(sharding.ranks):
        for part in range(sharding.parts):
            chunk = sharding.chunk_of(part, rank)
            middle, name = (chunk + 0.5) * size, f"rank {rank}"
            shapes.append(text(left - 8, top + middle + 4, name, 11, "end"))
            shapes.append(
                text(left + middle, top - 8, f"{name if size > 60 else rank}", 11, "middle")
            )
    shapes.append(text(left + SIZE / 2, top - 24, "keys of", 11, "middle", GREY))
    shapes.append(text(left - 8, top - 8, "queries of", 11, "end", GREY))
    work = []
    for rank in range(sharding.ranks):
        visits = attention_schedule(
            rank, sharding.ranks, sharding.layout, causal=True, q_length=LENGTH
        )
        order = owners_from(rank, sharding.ranks)
        for visit in visits:
            x, y = left + visit.key * size, top + visit.query * size
            is_whole = visit.pairs == (LENGTH // sharding.chunks) ** 2
            shapes.append(_cell(x, y, size, COLORS[rank], is_whole))
            step = str(order.index(visit.owner))
            place = (0.5, 0.5) if is_whole else (0.32, 0.7)
            shapes.append(text(x + place[0] * size, y + place[1] * size + 4, step, 12, "middle"))
        work.append(sum(visit.pairs for visit in visits))
    return shapes + _bars(work, left, top + SIZE + 44)


def _cell(x: float, y: float, size: float, color: str, is_whole: bool) -> str:
    """Draw the part of a pair of chunks that is computed: all of it, or below the diagonal."""
    if is_whole:
        return rect(x, y, size, size, color, GRID)
    return polygon([(x, y), (x, y + size), (x + size, y + size)], color)


def _bars(work: list[int], left: float, top: float) -> list[str]:
    """Draw the work of each rank as a bar."""
    shapes: list[str] = [text(left, top - 8, "work", 12, bold=True)]
    for rank, pairs in enumerate(work):
        y, length = top + rank * BAR, SIZE * pairs / max(work)
        shapes += [
            text(left - 8, y + BAR / 2 + 4, f"rank {rank}", 11, "end"),
            rect(left, y + 3, length, BAR - 6, COLORS[rank]),
            text(left + length + 6, y + BAR / 2 + 4, f"{100 * pairs / sum(work):.0f} %", 11),
        ]
    return shapes


if __name__ == "__main__":
    PICTURE.write_text(drawing())
    print(f"{PICTURE.name} written")
