"""Files outside of packages as modules: examples, and the scripts of the documentation."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any


def load_module(file: Path) -> Any:
    """Execute a Python file and return its module."""
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
