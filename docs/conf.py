"""Configure Sphinx for the static site of these pages: ``make docs-site``."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

project = html_title = "TileWeave"
extensions = ["myst_parser"]
myst_heading_anchors = 4  # the anchors of GitHub
html_theme = "furo"
html_static_path = html_css_files = ["site.css"]
html_copy_source = html_show_copyright = html_show_sphinx = False
exclude_patterns = ["*.py"]

NAVIGATION = {
    "Tutorial": ["tutorial/index", "tutorial/*"],
    "Guides": [
        "guides/ops",
        "guides/integrations",
        "guides/moe",
        "guides/decode",
        "guides/synchronization",
        "guides/plans",
        "guides/simulator",
        "guides/without-a-gpu",
        "guides/traces",
        "guides/groups",
        "guides/zoo",
        "guides/troubleshooting",
        "guides/cluster",
        "guides/versions",
        "guides/benchmarks",
        "guides/*",
    ],
    "Reference": ["reference/language", "reference/host-api", "reference/*"],
    "Internals": ["how-it-works"],
    "Faults of TileLang": ["upstream/*"],
}
"""Pages of the side bar. Sphinx warns about a page that is missing here."""

LINK_TO_PAGE = re.compile(r"(?<=\]\()([^):#\s]+\.md)(?=[)#])")


def setup(app: Any) -> None:
    app.connect("source-read", _adapt_page)


def _adapt_page(app: Any, page: str, source: list[str]) -> None:
    """Add what Sphinx needs, and GitHub does not, to the text of a page."""
    folder = (Path(app.srcdir) / page).parent
    source[0] = LINK_TO_PAGE.sub(lambda link: _download_outside(link[1], folder, app), source[0])
    if page == "index":
        source[0] += "".join(_toctree(caption, pages) for caption, pages in NAVIGATION.items())


def _download_outside(link: str, folder: Path, app: Any) -> str:
    """Make a link to Markdown outside of this folder a download, like links to source files."""
    is_inside = (folder / link).resolve().is_relative_to(app.srcdir)
    return link if is_inside else f"path:{link}"


def _toctree(caption: str, pages: list[str]) -> str:
    listed = "\n".join(pages)
    return f"\n```{{toctree}}\n:hidden:\n:glob:\n:caption: {caption}\n\n{listed}\n```\n"
