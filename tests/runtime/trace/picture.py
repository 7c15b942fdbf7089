"""The drawing of a trace, by the script of its page, which Node.js runs without a browser."""

from __future__ import annotations

import re
import shutil
import subprocess
from xml.etree import ElementTree

import pytest

from tileweave.runtime.trace.render import html
from tileweave.runtime.trace.trace import Trace

FAULT, SIGNAL, WRITE = "#d55e00", "#009e73", "#0072b2"
"""Colors of crosses, of signals and of writes."""
DRAW = "process.stdout.write(picture({trace}, {title!r}))"


def draw(trace: Trace, change: str = "") -> list[ElementTree.Element]:
    """Return the elements of the drawing; skip the test if there is no Node.js.

    Args:
        change: replaces the declaration of ``MOST``.
    """
    node = shutil.which("node")
    if node is None:
        pytest.skip("no Node.js on PATH")
    page = html(trace)
    content, script = re.findall(r"<script[^>]*>(.*?)</script>", page, re.DOTALL)[:2]
    script = re.sub("const MOST = .*", change, script) if change else script
    command = script + DRAW.format(trace=content, title=trace.title)
    run = subprocess.run([node, "-"], input=command, capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    return list(ElementTree.fromstring(run.stdout).iter())


def texts(elements: list[ElementTree.Element]) -> list[str]:
    """Return the texts of a drawing."""
    return [e.text or "" for e in elements if e.tag.endswith("text")]
