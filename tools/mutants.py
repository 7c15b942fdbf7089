"""Write ``build/mutants.md`` and ``build/mutants-inferred.md``: the verdict of each mutant of the
examples, and of the programs whose synchronization is inferred; ``make docs`` runs it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from tileweave.simulator import Mutant

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # for tests/, where the programs are

EXAMPLES = """\
# Mutants of the examples

What is changed, and what the verdicts mean: docs/guides/simulator.md, "Mutation testing".
"""
INFERRED = """\
# Mutants of inferred synchronization

The programs of tests/corpus/programs contain no explicit synchronization call. Only the mutants
that survive are listed; the others are killed. *Inferred* reasons hold for every program and are
part of the tool, *proven* ones are the simulator's; the others are in
tests/corpus/programs/*.equivalent.json.
"""


def write_page(name: str, introduction: str, sections: Iterable[str]) -> None:
    page = ROOT / "build" / name
    page.parent.mkdir(exist_ok=True)
    page.write_text("\n".join([introduction, *sections]))
    print(f"{page} written")


def example_section(title: str) -> str:
    from tests.simulator.mutation.test_example_mutants import mutants

    ranks, results = mutants(title)
    head = f"## {title}\n\n{ranks} ranks, 3 launches: {_counts(results)}.\n"
    return head + _table(results, ("op", "line", "change", "verdict", "why"))


def inferred_section(name: str) -> str:
    from tests.corpus import PROGRAMS
    from tests.sync.test_mutants import mutants

    results = mutants(name)
    survivors = [m for m in results if m.verdict != "killed"]
    head = f"## {name}\n\n{PROGRAMS[name].mutated} ranks: {_counts(results)}.\n"
    return head + _table(survivors, ("op", "flag", "change", "verdict", "why"))


def _counts(results: list[Mutant]) -> str:
    verdicts = [m.verdict for m in results]
    counts = [f"{verdicts.count(v)} {v}" for v in sorted(set(verdicts))]
    return ", ".join(counts) or "no synchronization operation"


def _table(results: list[Mutant], columns: tuple[str, ...]) -> str:
    rows: list[tuple[Any, ...]] = [columns, ("---",) * len(columns)]
    rows += [tuple(getattr(m, column) for column in columns) for m in results]
    lines = ["| " + " | ".join(map(str, row)) + " |" for row in rows]
    return "\n" + "\n".join(lines) + "\n" if results else ""


def main(run_each: Callable[..., Iterable[str]]) -> None:
    from tests.corpus import PROGRAMS
    from tests.simulator.mutation.test_example_mutants import CASES

    write_page("mutants.md", EXAMPLES, run_each(example_section, CASES))
    write_page("mutants-inferred.md", INFERRED, run_each(inferred_section, PROGRAMS))


if __name__ == "__main__":
    with ProcessPoolExecutor() as pool:
        main(pool.map)
