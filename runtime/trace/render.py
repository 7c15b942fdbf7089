"""Writing of traces to files: as JSON, or drawn as SVG, HTML or PNG."""

from __future__ import annotations

import io
from collections.abc import Callable
from functools import singledispatch
from html import escape
from pathlib import Path
from typing import Any

from ...builtins.errors import TileWeaveError
from ..host.out_file import out_file, write_out
from .chrome import to_json
from .drawing import Drawing, Line, Polygon, Rect, Text, draw
from .trace import Trace

_DPI = 100
_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>{title}</title>
<style>
body {{ margin: 12px; font-family: sans-serif; color: #222 }}
svg {{ width: 100%; height: auto; border: 1px solid #ccc; cursor: grab }}
pre {{ white-space: pre-wrap; background: #f7f7f7; padding: 8px }}
#tip {{ position: fixed; display: none; max-width: 60em; padding: 4px 8px; background: #222;
  color: #fff; font: 12px monospace; white-space: pre-wrap; pointer-events: none }}
</style>
<p>Wheel: zoom. Drag: move. Double click: all. Hover: what it is.</p>
{svg}
{report}<div id="tip"></div>
<script>
const svg = document.querySelector("svg"), tip = document.getElementById("tip");
const whole = svg.viewBox.baseVal, all = [whole.x, whole.y, whole.width, whole.height];
const show = (x, y, w, h) => svg.setAttribute("viewBox", [x, y, w, h].join(" "));
svg.onwheel = e => {{
  e.preventDefault();
  const box = svg.viewBox.baseVal, at = svg.getBoundingClientRect();
  const k = e.deltaY < 0 ? 0.8 : 1.25;
  const x = box.x + (e.clientX - at.left) / at.width * box.width;
  const y = box.y + (e.clientY - at.top) / at.height * box.height;
  show(x - (x - box.x) * k, y - (y - box.y) * k, box.width * k, box.height * k);
}};
svg.ondblclick = () => show(...all);
svg.onpointerdown = e => svg.setPointerCapture(e.pointerId);
svg.onpointermove = e => {{
  const box = svg.viewBox.baseVal, k = box.width / svg.getBoundingClientRect().width;
  if (e.buttons & 1) show(box.x - e.movementX * k, box.y - e.movementY * k, box.width, box.height);
  const text = e.target.dataset.tip;
  tip.style.display = text ? "block" : "none";
  tip.textContent = text || "";
  tip.style.left = Math.min(e.clientX + 14, innerWidth - tip.offsetWidth - 8) + "px";
  tip.style.top = Math.min(e.clientY + 14, innerHeight - tip.offsetHeight - 8) + "px";
}};
</script>
</html>
"""


def writer(path: str | Path, asks: str = "timeline:") -> Callable[[Trace], None]:
    """Return a function that writes a trace to ``path`` in the format of its suffix.

    Args:
        asks: names the argument, for errors.

    Raises:
        TileWeaveError: the suffix is unknown, the folder does not exist, or matplotlib, which PNG
            needs, is not installed.
    """
    path = out_file(asks, path)
    if path.suffix == ".json":
        return lambda trace: write_out(asks, path, to_json(trace))
    render = {".svg": svg, ".html": html, ".png": png}.get(path.suffix)
    if render is None:
        raise TileWeaveError(
            f"{asks} {path}; expected a name that ends in .html, .svg, .png or .json"
        )
    if render is png:
        _require_matplotlib()
    in_page = render is html  # which has the whole report itself
    return lambda trace: write_out(asks, path, render(draw(trace, foot=not in_page)))


def _require_matplotlib() -> None:
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise TileWeaveError(
            "timeline: a .png needs matplotlib, which is not installed; expected "
            '`pip install "tileweave[plot]"`, or a name that ends in .html or .svg'
        ) from None


def html(drawing: Drawing) -> str:
    """Return a self-contained page: the drawing with hover texts and zoom, and its report."""
    report = f"<pre>{escape(drawing.report)}</pre>\n" if drawing.report else ""
    return _PAGE.format(title=escape(drawing.title), svg=svg(drawing, "data-tip"), report=report)


def svg(drawing: Drawing, tips: str = "") -> str:
    """Return the drawing as SVG. Hover texts become the attribute ``tips``, if that is given."""
    body = "\n".join(_svg(shape, _tip(shape, tips)) for shape in drawing.shapes)
    size = f'width="{drawing.width:.0f}" height="{drawing.height:.0f}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} viewBox="0 0 {drawing.width:.0f} '
        f'{drawing.height:.0f}" font-family="Helvetica, Arial, sans-serif">\n'
        '<defs><pattern id="hatch" width="6" height="6" patternUnits="userSpaceOnUse" '
        'patternTransform="rotate(45)"><path d="M0 0V6" stroke="#ffffff" stroke-width="3" '
        'stroke-opacity="0.55"/></pattern></defs>\n'
        f'<rect width="100%" height="100%" fill="#ffffff"/>\n{body}\n</svg>'
    )


def _tip(shape: Any, name: str) -> str:
    text = getattr(shape, "tooltip", "")
    return f' {name}="{escape(text)}"' if name and text else ""


def _n(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


@singledispatch
def _svg(shape: Any, tip: str) -> str:
    raise NotImplementedError(type(shape))


@_svg.register
def _(r: Rect, tip: str) -> str:
    place = f'x="{_n(r.x)}" y="{_n(r.y)}" width="{_n(r.width)}" height="{_n(r.height)}"'
    edge = f' stroke="{r.edge}" stroke-width="0.6"' if r.edge != "none" else ""
    text = f'<rect {place} fill="{r.fill}"{edge}{tip}/>'
    return text + (f'<rect {place} fill="url(#hatch)"{tip}/>' if r.hatch else "")


@_svg.register
def _(s: Line, tip: str) -> str:
    dashed = ' stroke-dasharray="4 3"' if s.dashed else ""
    return (
        f'<line x1="{_n(s.x1)}" y1="{_n(s.y1)}" x2="{_n(s.x2)}" y2="{_n(s.y2)}" '
        f'stroke="{s.color}" stroke-width="{s.width}" stroke-opacity="{s.opacity}"{dashed}{tip}/>'
    )


@_svg.register
def _(p: Polygon, tip: str) -> str:
    points = " ".join(f"{_n(x)},{_n(y)}" for x, y in p.points)
    return f'<polygon points="{points}" fill="{p.fill}"{tip}/>'


@_svg.register
def _(t: Text, tip: str) -> str:
    attributes = "".join([
        f' text-anchor="{t.anchor}"' if t.anchor != "start" else "",
        ' font-weight="bold"' if t.bold else "",
        ' font-family="monospace" xml:space="preserve"' if t.mono else "",
        "" if t.mono else ' pointer-events="none"',
    ])  # fmt: skip
    return (
        f'<text x="{_n(t.x)}" y="{_n(t.y)}" font-size="{t.size}" fill="{t.color}"{attributes}>'
        f"{escape(t.text)}</text>"
    )


def png(drawing: Drawing) -> bytes:
    """Return the drawing as PNG, by matplotlib's Agg back end. One unit is one pixel."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure((drawing.width / _DPI, drawing.height / _DPI), _DPI, facecolor="#ffffff")
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_axis_off()
    axes.set_xlim(0, drawing.width)
    axes.set_ylim(drawing.height, 0)
    for order, shape in enumerate(drawing.shapes):
        _paint(shape, axes, order)
    written = io.BytesIO()
    figure.savefig(written, dpi=_DPI)
    return written.getvalue()


@singledispatch
def _paint(shape: Any, axes: Any, order: int) -> None:
    raise NotImplementedError(type(shape))


@_paint.register
def _(r: Rect, axes: Any, order: int) -> None:
    from matplotlib.patches import Rectangle

    axes.add_patch(
        Rectangle((r.x, r.y), r.width, r.height, facecolor=r.fill, edgecolor=r.edge, linewidth=0.5,
                  zorder=order)
    )  # fmt: skip
    if r.hatch:
        axes.add_patch(
            Rectangle((r.x, r.y), r.width, r.height, fill=False, edgecolor="#ffffff99",
                      linewidth=0, hatch="////", zorder=order)
        )  # fmt: skip


@_paint.register
def _(s: Line, axes: Any, order: int) -> None:
    axes.plot(
        [s.x1, s.x2], [s.y1, s.y2], color=s.color, linewidth=s.width * 72 / _DPI, alpha=s.opacity,
        linestyle=(0, (4, 3)) if s.dashed else "solid", zorder=order,
    )  # fmt: skip


@_paint.register
def _(p: Polygon, axes: Any, order: int) -> None:
    axes.fill(*zip(*p.points, strict=True), color=p.fill, linewidth=0, zorder=order)


@_paint.register
def _(t: Text, axes: Any, order: int) -> None:
    axes.text(
        t.x, t.y, t.text.replace("$", r"\$"), fontsize=t.size * 72 / _DPI, color=t.color,
        ha={"start": "left", "middle": "center", "end": "right"}[t.anchor], va="baseline",
        family="monospace" if t.mono else "sans-serif", weight="bold" if t.bold else "normal",
        zorder=order,
    )  # fmt: skip
