"""Test TileWeave with pairs of TileLang and torch, and write the table of docs/guides/versions.md.

    python tools/test_versions.py [--only 0.1.12+2.15 ...] [--write]

Each torch has a virtual environment, and each TileLang a folder that comes first on PYTHONPATH: six
pairs need three environments and four folders. Both are kept in ``~/.cache/tileweave`` under a hash
of their requirements. The first pair of each TileLang runs all lit tests, the others the
tests that depend on torch.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import time
import venv
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "guides" / "versions.md"
BEGIN, END = "<!-- begin of tools/test_versions.py -->\n", "<!-- end -->\n"
CACHE = Path(
    os.environ.get("TILEWEAVE_VERSIONS", Path.home() / ".cache" / "tileweave" / "versions")
)
PAIRS = (
    ("0.1.12", "2.15.0"),
    ("0.1.13", "2.11.0"),
    ("0.1.14", "2.13.0"),
    ("0.1.15", "2.15.0"),
    ("0.1.15", "2.11.0"),
    ("0.1.12", "2.13.0"),
)
FFI = {"0.1.12": "0.1.11"}
"""apache-tvm-ffi of a TileLang; by default the newest that is supported."""
NEWEST_TILELANG, NEWEST_FFI = "0.1.15", "0.1.12"
TEST_TOOLS = ("pytest", "hypothesis", "filecheck")
PTX = ("MatmulReduceScatter:stores:wgmma", "all_gather:tma", "sp_attention:zigzag:causal")
OF_TORCH = ("lit_tests/emit",)
"""lit tests of a pair whose TileLang another pair tests in full."""
NAMES = ("lit", "import", "simulate", "device", "emit", "torch names")
COLUMNS = ("TileLang", "torch", "tvm-ffi", *NAMES, "minutes")


@dataclass
class Result:
    """Cells of one row, and the output of what failed."""

    cells: dict[str, str] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", nargs="+", metavar="TILELANG+TORCH", help="only these pairs")
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.relative_to(ROOT)}")
    options = parser.parse_args()
    rows, tested, failed = [], set(), False
    for tilelang, torch in PAIRS:
        chosen = options.only or [f"{tilelang}+{torch}"]
        if not any(f"{tilelang}+{torch}".startswith(name) for name in chosen):
            continue
        print(f"TileLang {tilelang}, torch {torch}", file=sys.stderr, flush=True)
        result = run_pair(tilelang, torch, full=tilelang not in tested)
        tested.add(tilelang)
        rows.append(result.cells)
        for name, output in result.failures.items():
            failed = True
            print(f"--- {name} failed:\n{output[-3000:]}", file=sys.stderr)
    text = table(rows)
    print(text)
    if options.write and not failed:
        before, rest = PAGE.read_text().split(BEGIN)
        PAGE.write_text(f"{before}{BEGIN}{text}{END}{rest.split(END)[1]}")
    return 1 if failed else 0


def run_pair(tilelang: str, torch: str, full: bool) -> Result:
    """Run all checks of one pair; ``full`` runs all lit tests."""
    begin = time.monotonic()
    python, layer = torch_environment(torch), tilelang_folder(tilelang)
    env = environment(layer)
    result, installed = Result(), versions_of(python, env)
    result.cells = {
        "TileLang": installed["tilelang"],
        "torch": installed["torch"],
        "tvm-ffi": installed["apache-tvm-ffi"],
    }
    assert installed["tilelang"] == tilelang and installed["torch"].startswith(torch), installed
    for name in NAMES:
        output, status = run(command_of(name, python, full), env)
        result.cells[name] = ("" if status == 0 else "**failed** ") + summary(name, output, full)
        if status != 0:
            result.failures[f"{tilelang}, {torch}: {name}"] = output
        print(f"  {name}: {result.cells[name]}", file=sys.stderr, flush=True)
    result.cells["minutes"] = f"{(time.monotonic() - begin) / 60:.1f}"
    return result


def command_of(name: str, python: Path, full: bool) -> list[str]:
    """Return the command of one check."""
    tests = [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    lit = [str(Path(sys.executable).with_name("lit")), "-v", "--param", f"python={python}"]
    return {
        "lit": [*lit, *(["lit_tests"] if full else OF_TORCH)],
        "import": [str(python), "-c", "import tileweave; print(tileweave.__version__)"],
        "simulate": [str(python), "examples/without_gpu.py"],
        "device": [*tests, "-m", "not long", "tests/simulator/device/test_corpus.py"],
        "emit": [str(python), "tools/emit_programs.py", "--ptx", *PTX],
        "torch names": [*tests, "tests/project/test_torch_names.py"],
    }[name]


def summary(name: str, output: str, full: bool) -> str:
    """Return the cell of one check."""
    if name == "lit":
        count = {k: int(n) for k, n in re.findall(r"(Passed|Unsupported|Failed) *: *(\d+)", output)}
        text = f"{count.get('Passed', 0)} of {sum(count.values())}"
        if skipped := count.get("Unsupported"):
            text += f", {skipped} not run"
        return text if full else f"{text} ({', '.join(OF_TORCH)})"
    if name == "emit" and (found := re.search(r'\{\n "emitted".*', output, re.S)):
        report = json.loads(found[0])
        total = report["emitted"] + len(report["refused"]) + len(report["failed"])
        return f"{report['emitted']} of {total}"
    if found := re.findall(r"(\d+) passed", output):
        return found[-1]
    return "yes" if name in ("import", "simulate") else ""


def table(rows: list[dict[str, str]]) -> str:
    """Return a table in Markdown."""
    lines = [COLUMNS, ["---"] * len(COLUMNS), *([row[c] for c in COLUMNS] for row in rows)]
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
    command = [python, "-m", "pip", "install", "-q", "--no-compile", *arguments]
    subprocess.run(command, check=True, env={**os.environ, "PIP_CONSTRAINT": os.devnull})


def hash_of(pins: list[str]) -> str:
    text = "\n".join([*pins, f"{sys.version_info[0]}.{sys.version_info[1]}"])
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def environment(layer: Path) -> dict[str, str]:
    """Return environment variables with which TileLang and TileWeave are found."""
    return {**os.environ, "PYTHONPATH": f"{layer}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"}


def versions_of(python: Path, env: dict[str, str]) -> dict[str, str]:
    """Return the releases that a pair has, and check that its packages agree with each other."""
    packages = ("tilelang", "torch", "apache-tvm-ffi")
    code = f"from importlib.metadata import version as v; print(*map(v, {packages!r}))"
    output, _ = run([str(python), "-c", code], env)
    check, status = run([str(python), "-m", "pip", "check"], env)
    if status:
        raise SystemExit(f"test-versions: {check.strip()}")
    return dict(zip(packages, output.split(), strict=True))


def run(command: list[str], env: dict[str, str]) -> tuple[str, int]:
    """Return the output and the status of a command."""
    process = subprocess.run(
        command, cwd=ROOT, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    return process.stdout, process.returncode


if __name__ == "__main__":
    sys.exit(main())
