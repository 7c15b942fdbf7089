"""Test TileWeave with pairs of TileLang and torch, and write the table of docs/guides/versions.md.

    python tools/test_versions.py [--only 0.1.12+2.15 ...] [--check lit ...] [--write]
    python tools/test_versions.py --quick

Each torch has a virtual environment, and each TileLang a folder that comes first on PYTHONPATH: six
pairs need three environments and four folders. Both are kept in ``~/.cache/tileweave`` under a hash
of their requirements. What depends on TileLang runs in one pair of each TileLang, what depends on
torch in one pair of each torch. The results of checks are kept in ``build/versions``: several calls
with ``--only`` and ``--check`` may run all of them, before ``--write`` writes the table.

``--quick`` is for CI. It runs the oldest TileLang with the torch of this Python, so that it
installs no other torch. It runs a part of the tests that depend on TileLang.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import resource
import subprocess
import sys
import venv
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "guides" / "versions.md"
RESULTS = ROOT / "build" / "versions"
COMMIT = "git describe --always --abbrev=7 --exclude=* --dirty=+"
"""Command that prints the commit of the checkout, and a "+" if its files differ from it."""
BEGIN, END = "<!-- begin of tools/test_versions.py -->\n", "<!-- end -->\n"
CACHE = Path(
    os.environ.get("TILEWEAVE_VERSIONS", Path.home() / ".cache" / "tileweave" / "versions")
)
FFI = {"0.1.12": "0.1.11"}
"""apache-tvm-ffi of a TileLang; by default the newest that is supported."""
NEWEST_TILELANG, NEWEST_FFI = "0.1.15", "0.1.12"
TEST_TOOLS = ("pytest", "pytest-xdist", "hypothesis", "filecheck", "matplotlib")
PTX = ("MatmulReduceScatter:stores:wgmma", "all_gather:ldst", "sp_attention:zigzag:causal")
IMPORT = "import sys, tileweave as t; sys.exit(t.__file__ if t.__file__ != sys.argv[1] else 0)"
"""Program that exits with a message unless it imports the package at its argument."""

OF_EACH_PAIR = ("import", "demo", "torch names")
OF_TILELANG = ("lit", "emit", "simulator")
OF_TORCH = ("operators",)
SELECTED = ("lit part", "simulator part")
"""Parts of "lit" and "simulator" for ``--quick``."""
OF_QUICK = ("import", "torch names", "emit", *SELECTED)
SIMULATOR = (
    "tests/simulator",
    "tests/sync",
    "--ignore=tests/simulator/faults",
    "--ignore=tests/simulator/mutation",
    "--ignore=tests/simulator/device/test_faults.py",
    "--ignore=tests/sync/test_programs.py",
    "--ignore=tests/sync/infer/test_pieces.py",
    "--ignore=tests/sync/infer/test_plans.py",
)
"""Tests of the simulator, the inference and the verification; without those that take longest."""
OPERATORS = (
    "tests/runtime/plans",
    "tests/runtime/test_group.py",
    "tests/runtime/test_heap.py",
    "tests/runtime/test_memory.py",
    "tests/runtime/test_session.py",
    "tests/ops/core",
)
"""Tests of the runtime and the operators on CPUs: what calls torch."""
LIT_PART = (
    "lit_tests/builtins",
    *(f"lit_tests/passes/{stage}" for stage in ("target", "tile", "entry", "warp", "layout")),
)
SIMULATOR_PART = ("tests/simulator/frontend", "tests/sync/verify")
CHECKS = (*OF_EACH_PAIR, *OF_TILELANG, *SELECTED, *OF_TORCH)


@dataclass(frozen=True)
class Pair:
    """A release of TileLang with a release of torch, and the checks that it runs."""

    tilelang: str
    torch: str
    checks: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"{self.tilelang}+{self.torch}"

    @property
    def result(self) -> Path:
        return RESULTS / f"{self.name}.json"


PAIRS = (
    Pair("0.1.12", "2.15.0", OF_EACH_PAIR + OF_TILELANG),
    Pair("0.1.13", "2.11.0", OF_EACH_PAIR + OF_TILELANG),
    Pair("0.1.14", "2.13.0", OF_EACH_PAIR + OF_TILELANG),
    Pair("0.1.15", "2.15.0", OF_EACH_PAIR + OF_TILELANG + OF_TORCH),
    Pair("0.1.15", "2.11.0", OF_EACH_PAIR + OF_TORCH),
    Pair("0.1.12", "2.13.0", OF_EACH_PAIR + OF_TORCH),
)
TORCH = version("torch").split("+")[0]
QUICK = (Pair("0.1.12", TORCH, OF_QUICK),)
"""Pairs of ``--quick``. ``make test`` runs all tests with the newest TileLang."""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", nargs="*", metavar="TILELANG+TORCH", help="only these pairs")
    parser.add_argument("--check", nargs="+", choices=CHECKS, default=CHECKS, help="only these")
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.relative_to(ROOT)}")
    parser.add_argument("--quick", action="store_true", help="fewer tests, with one torch")
    options = parser.parse_args()
    pairs = QUICK if options.quick else PAIRS
    chosen = [p for p in pairs if options.only is None or p.name.startswith(tuple(options.only))]
    failed = []
    for pair in chosen:
        python = Path(sys.executable) if options.quick else torch_environment(pair.torch)
        failed += run_pair(pair, python, options.check)
    text = table(PAIRS if options.write else chosen)
    print(text)
    if options.write:
        before, rest = PAGE.read_text().split(BEGIN)
        PAGE.write_text(f"{before}{BEGIN}{text}{END}{rest.split(END)[1]}")
    return 1 if failed else 0


def run_pair(pair: Pair, python: Path, checks: Sequence[str]) -> list[str]:
    """Run checks of one pair and keep their results; return the names of those that fail."""
    print(f"TileLang {pair.tilelang}, torch {pair.torch}", file=sys.stderr, flush=True)
    env = environment(tilelang_folder(pair.tilelang))
    require_versions(pair, python, env)
    commit = run(COMMIT.split(), env)[0].strip()
    failed = []
    for name in (c for c in pair.checks if c in checks):
        begin = cpu_seconds()
        output, status = run(command_of(name, python), env)
        cell = summary(name, output)
        seconds = round(cpu_seconds() - begin)
        print(f"  {name}: {'failed, ' if status else ''}{cell}, {seconds} s", file=sys.stderr)
        if status:
            failed.append(name)
            print(f"--- {name} failed:\n{output[-3000:]}", file=sys.stderr, flush=True)
        result = {"cell": "**failed**" if status else cell, "seconds": seconds, "commit": commit}
        RESULTS.mkdir(parents=True, exist_ok=True)
        pair.result.write_text(json.dumps(results_of(pair) | {name: result}, indent=1))
    return failed


def results_of(pair: Pair) -> dict[str, dict[str, Any]]:
    """Return the kept results of a pair, by check."""
    return json.loads(pair.result.read_text()) if pair.result.exists() else {}


def row_of(pair: Pair) -> dict[str, str]:
    """Return the cells of a pair. A check of the pair without a result says so."""
    results = {name: r for name, r in results_of(pair).items() if name in pair.checks}
    cells = {check: results.get(check, {"cell": "not run"})["cell"] for check in pair.checks}
    return {
        **cells,
        "TileLang": pair.tilelang,
        "torch": pair.torch,
        "CPU minutes": f"{sum(r['seconds'] for r in results.values()) / 60:.1f}",
        "commit": ", ".join(dict.fromkeys(r["commit"] for r in results.values())),
    }


def command_of(name: str, python: Path) -> list[str]:
    """Return the command of one check."""
    tests = [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not long"]
    parallel = ["-n", "2", "--dist=worksteal"]
    lit = str(Path(sys.executable).with_name("lit"))
    return {
        "import": [str(python), "-c", IMPORT, str(ROOT / "tileweave" / "__init__.py")],
        "demo": [str(python), "examples/without_gpu.py"],
        "torch names": [*tests, "tests/project/test_torch_names.py"],
        "lit": [lit, "-v", "--param", f"python={python}", "lit_tests"],
        "lit part": [lit, "-v", "--param", f"python={python}", *LIT_PART],
        "emit": [str(python), "tools/emit_programs.py", "--jobs", "2", "--ptx", *PTX],
        "simulator": [*tests, *parallel, *SIMULATOR],
        "simulator part": [*tests, *parallel, *SIMULATOR_PART],
        "operators": [*tests, *parallel, *OPERATORS],
    }[name]


def summary(name: str, output: str) -> str:
    """Return the cell of one check."""
    if name in ("lit", "lit part"):
        count = {k: int(n) for k, n in re.findall(r"(Passed|Unsupported|Failed) *: *(\d+)", output)}
        text = f"{count.get('Passed', 0)} of {sum(count.values())}"
        skipped = count.get("Unsupported")
        return f"{text}, {skipped} not run" if skipped else text
    if name == "emit" and (found := re.search(r'\{\n "emitted".*', output, re.S)):
        report = json.loads(found[0])
        total = report["emitted"] + len(report["refused"]) + len(report["failed"])
        return f"{report['emitted']} of {total}"
    count = {k: int(n) for n, k in re.findall(r"(\d+) (passed|failed|skipped|error)", output)}
    if name in ("import", "demo"):
        return "yes"
    text = f"{count.get('passed', 0)} of {sum(count.values())}"
    return f"{text}, {count['skipped']} not run" if "skipped" in count else text


def cpu_seconds() -> float:
    """Return the CPU time of all commands that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def table(pairs: Sequence[Pair]) -> str:
    """Return a table in Markdown, with a column for each check of any of these pairs."""
    checks = (check for check in CHECKS if any(check in pair.checks for pair in pairs))
    columns = ("TileLang", "torch", *checks, "CPU minutes", "commit")
    rows = ([row_of(pair).get(column, "-") for column in columns] for pair in pairs)
    lines = [columns, ["---"] * len(columns), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def torch_environment(torch: str) -> Path:
    """Return the Python of an environment with ``torch``, which is made if there is none."""
    pins = [f"torch=={torch}", f"tilelang=={NEWEST_TILELANG}", f"apache-tvm-ffi=={NEWEST_FFI}"]
    for line in (ROOT / "requirements-test.txt").read_text().splitlines():
        if line.split("==")[0] in TEST_TOOLS:
            pins.append(line)
    folder = CACHE / f"torch-{torch}-{hash_of(pins)}"
    python = folder / "bin" / "python"
    if not (folder / "ready").exists():
        venv.create(folder, clear=True, symlinks=True, with_pip=True)
        install(python, pins)
        (folder / "ready").touch()
    return python


def tilelang_folder(tilelang: str) -> Path:
    """Return a folder with one TileLang and its apache-tvm-ffi, without what they need."""
    pins = [f"tilelang=={tilelang}", f"apache-tvm-ffi=={FFI.get(tilelang, NEWEST_FFI)}"]
    folder = CACHE / f"tilelang-{tilelang}-{hash_of(pins)}"
    if not (folder / "ready").exists():
        install(Path(sys.executable), ["--no-deps", "--target", str(folder), "--upgrade", *pins])
        (folder / "ready").touch()
    return folder


def install(python: Path, arguments: list[str]) -> None:
    """Install packages by pip, bounded by nothing but their own pins."""
    print(f"  installing {' '.join(arguments)}", file=sys.stderr, flush=True)
    command = [str(python), "-m", "pip", "install", "-q", "--no-compile", *arguments]
    settings = {"PIP_CONSTRAINT": os.devnull, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    output, status = run(command, os.environ | settings)
    if status:
        pins = " ".join(a for a in arguments if "==" in a)
        last = output.strip().rpartition("\n")[2] or f"exit status {status}"
        raise SystemExit(f"test-versions: pip could not install {pins}: {last}")


def hash_of(pins: list[str]) -> str:
    text = "\n".join([*pins, f"{sys.version_info[0]}.{sys.version_info[1]}"])
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def environment(layer: Path) -> dict[str, str]:
    """Return environment variables with which TileLang and TileWeave are found."""
    return {**os.environ, "PYTHONPATH": f"{layer}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"}


def require_versions(pair: Pair, python: Path, env: dict[str, str]) -> None:
    """Exit unless a Python has the releases of a pair, whose packages agree with each other."""
    code = "from importlib.metadata import version as v; print(v('tilelang'), v('torch'))"
    installed = run([str(python), "-c", code], env)[0].split()
    if [release.split("+")[0] for release in installed] != [pair.tilelang, pair.torch]:
        raise SystemExit(f"test-versions: {' '.join(installed)}; expected {pair.name}")
    check, status = run([str(python), "-m", "pip", "check"], env)
    if status:
        raise SystemExit(f"test-versions: {check.strip()}")


def run(command: list[str], env: dict[str, str]) -> tuple[str, int]:
    """Return the output and the status of a command."""
    process = subprocess.run(
        command, cwd=ROOT, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    return process.stdout, process.returncode


if __name__ == "__main__":
    sys.exit(main())
