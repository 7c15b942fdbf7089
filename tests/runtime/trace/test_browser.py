"""The HTML drawing of a trace works in a browser. It runs where there is a Chromium."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.runtime.trace.test_merge import ring
from tileweave.runtime.trace.merge import merge
from tileweave.runtime.trace.render import writer

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome", "chrome-headless-shell")


def browser():
    """Return the path of a Chromium: ``CHROMIUM``, on ``PATH``, or Playwright's; None without."""
    playwright = Path(os.environ.get("PLAYWRIGHT_BROWSERS_PATH") or "~/.cache/ms-playwright")
    installed = sorted(playwright.expanduser().glob("chromium*/*/*chrom*"))
    candidates = [os.environ.get("CHROMIUM"), *map(shutil.which, NAMES), *map(str, installed)]
    return next((c for c in candidates if c and os.access(c, os.X_OK) and Path(c).is_file()), None)


@pytest.mark.skipif(browser() is None, reason="no Chromium: set CHROMIUM, or put one on PATH")
def test_the_page_opens_without_errors(tmp_path):
    page = tmp_path / "run.html"
    writer(page)(merge(ring(), "ring"))
    # The script hovers over a wait and reports the text that the page shows.
    text = page.read_text().replace(
        "</html>",
        """<script>
        const shape = document.querySelector("[data-tip*=wait]");
        shape.dispatchEvent(new PointerEvent("pointermove", {bubbles: true}));
        svg.dispatchEvent(new WheelEvent("wheel", {deltaY: -1, cancelable: true}));
        document.title = "shown: " + tip.textContent;
        </script></html>""",
    )
    page.write_text(text)
    command = [browser(), "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr",
               f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", page.as_uri()]  # fmt: skip
    run = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    assert "Uncaught" not in run.stderr
    title = re.search(r"<title>(.*?)</title>", run.stdout, re.DOTALL)[1]
    assert title.startswith("shown: ") and "F[" in title
