"""Explanation as an HTML page: the source with the operations of each line."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from .operation import KINDS, Operation
from .short_paths import path_shortener
from .table import details

if TYPE_CHECKING:
    from .explanation import Explanation

_COLORS = {
    "wait": "#b5452c", "fence": "#8a6d1d", "bulk_wait": "#6b4fa0", "barrier": "#57708f",
    "signal": "#2c7a3f",
}  # fmt: skip

_STYLE = """
body { font: 14px/1.45 sans-serif; margin: 2em auto; max-width: 80em; padding: 0 1em;
  color: #222; background: #fff; }
h1 { font-size: 1.4em; } h2 { font-size: 1.1em; margin-top: 2em; }
table { border-collapse: collapse; } td, th { text-align: left; padding: .15em 1.2em .15em 0; }
pre { font: 13px/1.5 monospace; margin: 0; background: #f7f7f2; padding: .6em 0; overflow-x: auto; }
pre > span { display: block; white-space: pre; padding-right: 1em; }
.number { display: inline-block; width: 4em; padding-right: 1em; text-align: right; color: #999; }
.op { margin-left: 5.4em; border-left: .3em solid; padding: 0 .6em; background: #fff;
  cursor: help; }
.op b { display: inline-block; width: 6em; }
.op i { display: none; color: #222; }
.op:hover, .op:focus { background: #fff3d6; } .op:hover i, .op:focus i { display: inline; }
"""


def page(explanation: Explanation) -> str:
    """Return one self-contained page."""
    title = explanation.title
    rules = "".join(f".{k} {{ color: {c}; border-color: {c}; }}\n" for k, c in _COLORS.items())
    body = "\n".join(_body(explanation))
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8"/>\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}{rules}</style>\n</head>\n<body>\n"
        f"<h1>{escape(title)}</h1>\n{body}\n</body>\n</html>\n"
    )


def _body(e: Explanation) -> Iterator[str]:
    shorten = path_shortener(e)
    yield (
        "<p>Each line is followed by its operations. Hover over one to see the reason. A ? stands "
        "for a number of executions that depends on a loop whose iterations are counted at run "
        "time.</p>"
    )
    kinds = (
        f'<tr><td><b class="{kind}">{kind}</b></td><td>{escape(text)}</td></tr>'
        for kind, text in KINDS.items()
    )
    yield f"<table>{''.join(kinds)}</table>"
    remaining = list(e.ops)
    for name, file, first, last in e.sources:
        ops = [op for op in remaining if op.kernel == name and op.file == file]
        remaining = [op for op in remaining if op not in ops]
        first = min([first, *(op.line for op in ops)])
        last = max([last, *(op.line for op in ops)])
        yield f"<h2>{escape(name)} in {escape(Path(file).name)}</h2>"
        yield from _source(file, first, last, ops, shorten)
    if remaining:
        yield "<h2>In other files</h2>"
        yield f"<pre>{''.join(_operation(op, shorten) for op in remaining)}</pre>"
    yield f"<pre>{escape(shorten(chr(10).join(details(e))))}</pre>"


def _source(
    file: str, first: int, last: int, ops: list[Operation], shorten: Callable[[str], str]
) -> Iterator[str]:
    """Yield the source lines from the decorators on, each followed by its operations."""
    path = Path(file)
    lines = path.read_text().splitlines() if path.is_file() else []
    while 1 < first <= len(lines) and lines[first - 2].lstrip().startswith("@"):
        first -= 1
    out = []
    for number in range(first, last + 1):
        text = lines[number - 1] if number <= len(lines) else ""
        out.append(f'<span><span class="number">{number}</span>{escape(text)}</span>')
        out += [_operation(op, shorten) for op in ops if op.line == number]
    yield f"<pre>{''.join(out)}</pre>"


def _operation(op: Operation, shorten: Callable[[str], str]) -> str:
    reason = escape(shorten(op.reason))
    times = "?" if op.per_block is None else op.per_block
    parts = [op.tensor, op.granule and f"granule {op.granule}", op.amount, f"{times} per block"]
    text = " | ".join(p for p in parts if p)
    return (
        f'<span class="op {op.kind}" tabindex="0" title="{reason}"><b>{op.kind}</b>'
        f"{escape(text)}<i>: {reason}</i></span>"
    )
