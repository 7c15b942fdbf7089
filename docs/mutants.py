"""Writes ``docs/mutants.md`` and ``docs/mutants-inferred.md``: what becomes of every mutant of the
examples, and of the programs whose synchronisation is inferred; ``make docs`` runs it.

Tests compare the verdicts.
"""

from __future__ import annotations

import importlib.util
import itertools
import re
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

import tileweave as tw
from tileweave.simulator import Mutant

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
PAGE = Path(__file__).resolve().with_name("mutants.md")
INFERRED = PAGE.with_name("mutants-inferred.md")
EXAMPLES = PAGE.parent.parent / "examples"
SCHEDULES = 5

INTRODUCTION = f"""\
# Mutants of the examples

<!-- Written by docs/mutants.py, which runs them: `make docs`. -->

How we know that the simulator sees what it claims: `tw.mutate` changes the synchronisation of a
program in one place at a time and runs it in {SCHEDULES} schedules. A mutant is *killed* by a fault
the simulator reports or by other outputs; what survives must be *explained*, by a comment beside
the operation in the example or by a proof of the tool.

Operations are those after TileWeave's passes: `sync_threads` and `complete_bulk_stores` (the full
wait for bulk stores before a release) are put in by the compiler and have the line of what they
serve. `fence_proxy_async` is left out: the simulator does not tell ordinary accesses from those of
the async proxy.

| change | what it is |
|---|---|
| `drop` | the operation is not there |
| `sem=`, `scope=` | a weaker or narrower word |
| `target+1`, `target-1` | a wait counts one too many, one too few |
| `value+1` | a signal adds or sets one more |
| `epoch-1`, ... | a wait's target lags: computed from that value, less one |
| `parity flipped`, `axis 1 flipped` | the other phase; the other half of an axis of two |
| `rank+1` | the flag of the next rank |
| `read=True`, `n=1` | waits for the read of shared memory only; leaves a group under way |
| `write after` | what the operation publishes is written after it |
| `read before` | what the operation guards is read before it |

Of a plan the words that its streams write and the waits between streams are changed, too; `fork`
and `join` are those of its side streams with the caller's.
"""


class Instance(NamedTuple):
    """A program of an example, small."""

    title: str
    program: Any
    ranks: int
    inputs: list[dict[str, Any]]


def example(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def instances() -> Iterator[Instance]:
    """All programs of the examples."""
    zeros, rng = np.zeros, np.random.default_rng(0)
    flags = [{"flags": zeros(1, np.uint32), "start": lambda e: 3 * e, "rounds": 3}] * 2
    ping_pong = example("signal_ping_pong").ping_pong
    yield Instance("signal_ping_pong.py: `ping_pong`, 3 rounds", ping_pong, 2, flags)
    copied = {"src": rng.integers(0, 256, 901).astype(np.uint8), "dst": zeros(901, np.uint8)}
    bulk = example("bulk_copy")
    title = "bulk_copy.py: `bulk_copy_with(stages=4, chunk=64, ahead=2)`, 901 bytes"
    yield Instance(title, bulk.bulk_copy_with(4, 64, 2), 1, [{**copied, "blocks": 2}])
    title = "bulk_copy.py: `load_store_program`, 901 bytes"
    yield Instance(title, bulk.load_store_program, 1, [{**copied, "blocks": 2}])
    sent = {"src": zeros(5, np.float32), "dst": zeros(5, np.float32), "blocks": 1}
    title = "bulk_copy.py: `multicast_program`, 5 numbers"
    yield Instance(title, bulk.multicast_program, 1, [sent])
    ranks, M, N, K = 3, 48, 64, 16
    inputs = [
        {
            **{n: rng.standard_normal((rows, K)).astype(ml_dtypes.bfloat16)
               for n, rows in (("A", M), ("B", N))},
            "arrived": zeros((2, 2), np.uint32),
            "state": zeros(2, np.uint32),
        }
        for _ in range(ranks)
    ]  # fmt: skip
    program = example("gemm_reduce_scatter").gemm_reduce_scatter(M, N, K, ranks, 16, 32, 16)
    title = f"gemm_reduce_scatter.py: {M} x {N} x {K * ranks}, tiles of 16 x 32"
    yield Instance(title, program, ranks, inputs)
    N, K = 32, 16
    inputs = [
        {
            **{n: rng.standard_normal((rows, K)).astype(ml_dtypes.bfloat16)
               for n, rows in (("A", M // ranks), ("B", N))},
            "ready": zeros((2, ranks), np.uint32),
            "epoch": lambda e: e,
        }
        for _ in range(ranks)
    ]  # fmt: skip
    plan, _ = example("all_gather_gemm").all_gather_gemm(M, N, K, ranks, 16, 32, 16)
    title = f"all_gather_gemm.py: {M} x {N * ranks} x {K}, tiles of 16 x 32"
    yield Instance(title, plan, ranks, inputs)
    inferred = example("inferred")
    plan = inferred.all_gather_gemm(M, N, K, ranks, 16, 32, 16)
    title = f"inferred.py: `all_gather_gemm`, {M} x {N * ranks} x {K}, tiles of 16 x 32"
    yield Instance(title, plan, ranks, [{n: i[n] for n in "AB"} for i in inputs])
    inputs = [
        {n: rng.standard_normal((rows, K)).astype(ml_dtypes.bfloat16)
         for n, rows in (("A", M), ("B", N))}
        for _ in range(ranks)
    ]  # fmt: skip
    program = inferred.gemm_reduce_scatter(M, N, K, ranks, 16, 32, 16)
    title = f"inferred.py: `gemm_reduce_scatter`, {M} x {N} x {K * ranks}, tiles of 16 x 32"
    yield Instance(title, program, ranks, inputs)


def page(each: Callable = map) -> str:
    """The whole page; ``each`` maps over the programs."""
    return "\n".join([INTRODUCTION, *each(_of_example, range(len(list(instances()))))])


def _of_example(number: int) -> str:
    title, program, ranks, inputs = next(itertools.islice(instances(), number, None))
    found = tw.mutate(program, ranks, inputs, SCHEDULES)
    count = {v: sum(m.verdict == v for m in found) for v in sorted({m.verdict for m in found})}
    each = ", ".join(f"{n} {verdict}" for verdict, n in count.items())
    where = f"{ranks} rank{'s'[: ranks > 1]}, 3 launches"
    head = f"## {title}\n\n{where}: {each or 'it has no synchronisation operation'}.\n"
    if not found:
        return head
    rows = ["| operation | line | change | verdict | why |", "|---|---|---|---|---|"]
    return f"{head}\n" + "\n".join([*rows, *map(_row, found)]) + "\n"


def _row(m: Mutant) -> str:
    return f"| `{m.op}` | {m.line} | `{m.change}` | {m.verdict} | {m.why} |"


INFERRED_INTRODUCTION = f"""\
# Mutants of inferred synchronisation

<!-- Written by docs/mutants.py, which runs them: `make docs`. -->

The programs of `tests/sync/programs.py` have no word of synchronisation; what the compiler put
in is changed in one place at a time, as [mutants.md](mutants.md) says, in {SCHEDULES} schedules of
3 launches, between which the caller reads its symmetric tensors. Only what survives is listed; the
rest is killed. *Inferred* reasons hold for every program and stand beside the code that puts the
operation in; *proven* ones are the simulator's; the others stand in the program.
"""


def inferred_page(each: Callable = map) -> str:
    """The page of the programs without synchronisation; ``each`` maps over them."""
    from tests.sync.programs import CASES

    return "\n".join([INFERRED_INTRODUCTION, *each(_of_inferred, CASES)])


def _of_inferred(name: str) -> str:
    from tests.sync.programs import CASES
    from tests.sync.test_mutants import mutants

    found = mutants(name)
    left = [m for m in found if m.verdict != "killed"]
    lines = ", ".join(dict.fromkeys(f"`{m.op}`" for m in found if m.verdict == "killed"))
    head = (
        f"## {name}\n\n{CASES[name].mutated} ranks: {len(found) - len(left)} killed (of {lines}), "
        f"{len(left)} not.\n"
    )
    rows = ["| operation | of | change | verdict | why |", "|---|---|---|---|---|"]
    rows += [f"| `{m.op}` | `{m.flag}` | `{m.change}` | {m.verdict} | {m.why} |" for m in left]
    return f"{head}\n" + "\n".join(rows) + "\n"


def verdicts(text: str) -> list[str]:
    """What of a page must not be out of date: all but by which fault a mutant is killed."""
    rows = re.findall(r"^(?:## .*|\| `.*\| \d+ \|.*)$", text, re.MULTILINE)
    return [re.sub(r"\| killed \|.*", "| killed |", row) for row in rows]


if __name__ == "__main__":
    with ProcessPoolExecutor() as pool:
        PAGE.write_text(page(pool.map))
        INFERRED.write_text(inferred_page(pool.map))
    print(f"{PAGE.relative_to(Path.cwd()) if PAGE.is_relative_to(Path.cwd()) else PAGE} written")
