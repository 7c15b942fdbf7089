"""Shapes of the pictures that ``make docs`` draws: SVG elements, in pixels from the top left."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

INK = "#222222"


def rect(x: float, y: float, width: float, height: float, fill: str, edge: str = "none") -> str:
    """Return a rectangle."""
    stroke = f' stroke="{edge}" stroke-width="0.6"' if edge != "none" else ""
    place = f'x="{_n(x)}" y="{_n(y)}" width="{_n(width)}" height="{_n(height)}"'
    return f'<rect {place} fill="{fill}"{stroke}/>'


def line(x1: float, y1: float, x2: float, y2: float, color: str, dashed: bool = False) -> str:
    """Return a line."""
    dashes = ' stroke-dasharray="4 3"' if dashed else ""
    place = f'x1="{_n(x1)}" y1="{_n(y1)}" x2="{_n(x2)}" y2="{_n(y2)}"'
    return f'<line {place} stroke="{color}" stroke-width="1.0" stroke-opacity="1.0"{dashes}/>'


def polygon(points: Iterable[tuple[float, float]], fill: str) -> str:
    """Return a polygon."""
    return f'<polygon points="{" ".join(f"{_n(x)},{_n(y)}" for x, y in points)}" fill="{fill}"/>'


def text(
    x: float,
    y: float,
    body: str,
    size: float = 12,
    anchor: str = "start",
    color: str = INK,
    bold: bool = False,
) -> str:
    """Return a line of text."""
    anchored = f' text-anchor="{anchor}"' if anchor != "start" else ""
    weight = ' font-weight="bold"' if bold else ""
    return (
        f'<text x="{_n(x)}" y="{_n(y)}" font-size="{size}" fill="{color}"{anchored}{weight} '
        f'pointer-events="none">{escape(body)}</text>'
    )


def picture(width: float, height: float, shapes: Iterable[str]) -> str:
    """Return a picture of the shapes, in drawing order."""
    body = "\n".join(shapes)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
        f'viewBox="0 0 {width:.0f} {height:.0f}" font-family="Helvetica, Arial, sans-serif">\n'
        f'<rect width="100%" height="100%" fill="#ffffff"/>\n{body}\n</svg>'
    )


def _n(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")
