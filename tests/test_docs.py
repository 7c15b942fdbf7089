"""The language reference says what the declarations say."""

from __future__ import annotations

import importlib.util
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parent.parent


def test_language_page_is_up_to_date():
    spec = importlib.util.spec_from_file_location("generate", CHECKOUT / "docs" / "generate.py")
    generate = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generate)
    assert generate.PAGE.read_text() == generate.page(), "run `make docs`"


def test_readme_names_every_environment_variable():
    sources = [p for d in ("runtime", "tileweave", "codegen") for p in (CHECKOUT / d).glob("*.py")]
    words = " ".join(p.read_text() for p in sources).replace('"', " ").replace("`", " ").split()
    used = {w.strip(".,;:()'") for w in words if w.startswith("TILEWEAVE_")}
    readme = (CHECKOUT / "README.md").read_text()
    assert used and [name for name in sorted(used) if f"`{name}`" not in readme] == []
