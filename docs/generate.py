"""Write ``docs/reference/language.md`` from the declarations. ``make docs`` runs it."""

from __future__ import annotations

import inspect
import re
import sys
import textwrap
from itertools import groupby
from pathlib import Path
from typing import Any

from tileweave import language
from tileweave.builtins.spec import BUILTINS, Builtin, Pointer

PAGE = Path(__file__).resolve().with_name("reference") / "language.md"

INTRODUCTION = """\
# The language

<!-- Written by docs/generate.py from the declarations: change those, then `make docs`. -->

The operations that TileWeave adds to TileLang. A program imports them beside TileLang's own:

```python
import tilelang.language as T
from tileweave import language as W
```

Operations that map to PTX instructions use its qualifiers, such as `sem` (memory order) and `scope`
(the threads that observe the order). The signature of an operation lists the qualifiers that it
accepts. Other qualifiers are refused when the program is traced.
"""

RUN_BY = {
    "thread": "each thread that reaches it",
    "warp": "all threads of a warp together",
    "block": "all threads of the block together",
    "leader": "one thread, for the block",
}


def page() -> str:
    """Return the whole page."""
    names = [name for name, value in vars(language).items() if _is_public(name, value)]
    parts = [INTRODUCTION]
    for module, members in groupby(names, lambda n: _module(getattr(language, n))):
        summary, _, rest = inspect.getdoc(module).partition("\n\n")
        parts.append(f"## {_heading(module.__name__.rpartition('.')[2])}\n")
        parts.append(f"{_prose(summary)}\n")
        if rest:
            parts.append(f"{_prose(rest)}\n")
        parts += [_entry(name, getattr(language, name)) for name in members]
    return "\n".join(parts)


def _heading(module: str) -> str:
    """Return ``Put get`` for ``put_get``; names of two letters are abbreviations."""
    return module.upper() if len(module) == 2 else module.replace("_", " ").capitalize()


def _is_public(name: str, value: Any) -> bool:
    return not name.startswith("_") and callable(value)


def _module(value: Any) -> Any:
    return sys.modules[getattr(value, "__module__", None) or type(value).__module__]


def _entry(name: str, value: Any) -> str:
    spec = BUILTINS.get(f"tileweave.{name}")
    signature = spec.signature if spec else inspect.signature(value)
    lines = [f"### W.{name}\n", "```python", _call(name, signature, spec), "```\n"]
    if spec:
        lines += [*_facts(spec), ""]
    lines.append(_manual(inspect.getdoc(value if inspect.isfunction(value) else type(value)) or ""))
    return "\n".join(lines)


def _call(name: str, signature: inspect.Signature, spec: Builtin | None) -> str:
    qualifiers = dict(spec.qualifiers) if spec else {}
    shown, marked = [], False
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and not marked:
            shown.append("*")
            marked = True
        text, equals = parameter.name, "="
        if parameter.name in qualifiers:
            text += f": {' | '.join(map(_quoted, qualifiers[parameter.name]))}"
            equals = " = "
        if parameter.default is not parameter.empty:
            text += f"{equals}{_quoted(parameter.default)}"
        shown.append(text)
    line = f"W.{name}({', '.join(shown)})"
    if len(line) <= 100:
        return line
    return "\n".join([f"W.{name}(", *(f"    {parameter}," for parameter in shown), ")"])


def _quoted(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else repr(value)


def _facts(spec: Builtin) -> list[str]:
    facts = [f"run by {RUN_BY[spec.level]}"]
    if spec.barrier_before and spec.barrier_after:
        facts.append("the block synchronizes before and after")
    elif spec.barrier_before or spec.barrier_after:
        facts.append(f"the block synchronizes {'before' if spec.barrier_before else 'after'}")
    if spec.types:
        facts.append(f"types {' '.join(spec.types)}")
    shared = [name for name, kind in spec.operands if getattr(kind, "space", "") == "shared"]
    if shared:
        facts.append(f"{', '.join(f'`{name}`' for name in shared)} in shared memory")
    if any(isinstance(kind, Pointer) and kind.space == "barrier" for _, kind in spec.operands):
        facts.append("signals an mbarrier")
    architectures = [f"sm_{spec.sm}", *(f"sm_{sm} for {ptx}" for ptx, sm in spec.type_sm.items())]
    facts.append(f"from {', '.join(architectures)}")
    return [_wrapped(f"*{'; '.join(facts)}.*")]


def _manual(doc: str) -> str:
    """Return a docstring as Markdown, with its sections as bold words and lists."""
    out: list[str] = []
    for block in doc.split("\n\n"):
        head, *rest = block.splitlines()
        section = re.fullmatch(r"(Args|Attributes|Raises):", head)
        if section:
            out.append(f"**{section[1]}**\n")
            for entry in re.split(r"\n(?=    \S)", "\n".join(rest)):
                name, _, text = " ".join(entry.split()).partition(": ")
                out.append(_wrapped(f"- `{name}`: {_prose(text)}", "  "))
            out.append("")
        elif match := re.match(r"(Returns|Needs|Source):\s*", block):
            text = " ".join(block[match.end() :].split())
            out.append(_wrapped(f"**{match[1]}** {_prose(text)}") + "\n")
        else:
            out.append(f"{_prose(block)}\n")
    return "\n".join(out)


def _wrapped(text: str, indent: str = "") -> str:
    return textwrap.fill(
        text, 100, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def _prose(text: str) -> str:
    return text.replace("``", "`")


if __name__ == "__main__":
    PAGE.write_text(page())
    print(f"{PAGE.relative_to(Path.cwd()) if PAGE.is_relative_to(Path.cwd()) else PAGE} written")
