"""Short names of files in explanations for readers."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .explanation import Explanation


def path_shortener(e: Explanation) -> Callable[[str], str]:
    """Return a function that shortens each ``file:line`` of ``e`` in a text.

    A file becomes its name, or its path from the current folder if another file has the same name.
    """
    ops = *e.ops, *e.merged, *e.unordered, *e.explicit, *e.unverified
    files = {op.file for op in ops if op.file} | {file for _, file, *_ in e.sources}
    counts = Counter(Path(file).name for file in files)
    names = {
        file: Path(file).name if counts[Path(file).name] == 1 else os.path.relpath(file)
        for file in sorted(files, key=len, reverse=True)  # one may end in another
    }

    def shorten(text: str) -> str:
        for file, name in names.items():
            text = text.replace(f"{file}:", f"{name}:")
        return text

    return shorten
