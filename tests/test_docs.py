"""The language reference says what the declarations say; the README's program is one."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import tileweave as tw

CHECKOUT = Path(__file__).resolve().parent.parent


def _load(file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(file.stem, file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_language_page_is_up_to_date():
    generate = _load(CHECKOUT / "docs" / "generate.py")
    assert generate.PAGE.read_text() == generate.page(), "run `make docs`"


def test_readme_program_compiles(tmp_path):
    """The README's first two blocks are one file, and what it says of it holds."""
    readme = (CHECKOUT / "README.md").read_text()
    imports, program = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)[:2]
    file = tmp_path / "readme.py"
    file.write_text(f"{imports}\n{program}\nexample = gemm_reduce_scatter(1024, 512, 256, 4)\n")
    cuda = tw.emit(_load(file).example)
    assert "tl::tma_store" in cuda and "tw::complete_bulk_stores" in cuda
    assert "tw::signal<" in cuda and "tw::wait_reached<" in cuda


def test_readme_names_every_environment_variable():
    sources = [p for d in ("runtime", "tileweave", "codegen") for p in (CHECKOUT / d).glob("*.py")]
    words = " ".join(p.read_text() for p in sources).replace('"', " ").replace("`", " ").split()
    used = {w.strip(".,;:()'") for w in words if w.startswith("TILEWEAVE_")}
    readme = (CHECKOUT / "README.md").read_text()
    assert used and [name for name in sorted(used) if f"`{name}`" not in readme] == []
