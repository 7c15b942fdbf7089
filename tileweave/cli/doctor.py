"""``tileweave doctor``: what this machine has, and what will not work on it, in words."""

from __future__ import annotations

import dataclasses
import json
import platform
import re
import subprocess
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from itertools import combinations

from .. import __version__
from ..builtins.versions import unsupported_torch
from ..runtime.host.topology import Topology, topology

PACKAGES = ("torch", "tilelang", "apache-tvm-ffi", "cuda-bindings", "nvidia-ml-py")


@dataclass(frozen=True)
class Nvcc:
    """The CUDA compiler TileLang uses.

    Attributes:
        path: empty if there is none; ``version`` then says why.
        architectures: the sm numbers it compiles for; empty if it does not tell.
    """

    path: str
    version: str
    architectures: tuple[int, ...] = ()


@dataclass(frozen=True)
class Problem:
    """Something that will not work, and why."""

    what: str
    why: str


@dataclass(frozen=True)
class Report:
    """What ``tileweave doctor`` found; ``str`` of it is for people."""

    versions: dict[str, str]
    nvcc: Nvcc
    topology: Topology
    problems: tuple[Problem, ...]

    def as_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=2)

    def __str__(self) -> str:
        machine = self.topology
        lines = [f"{name:<16}{found}" for name, found in self.versions.items()]
        lines.append(f"{'nvcc':<16}{self.nvcc.version} {self.nvcc.path}".rstrip())
        lines.append(f"{'driver':<16}{machine.driver or 'not found'}")
        lines += ["", f"GPUs: {len(machine.gpus)}"]
        for index, gpu in enumerate(machine.gpus):
            lines.append(
                f"  {index}  {gpu.name}, {gpu.memory_bytes / 2**30:.0f} GiB, "
                f"sm_{gpu.capability[0]}{gpu.capability[1]}, {gpu.uuid}"
            )
        if len(machine.gpus) > 1:
            lines += ["", "NVLink links between two GPUs", *_table(machine.nvlinks)]
            p2p = [["yes" if can else "no" for can in row] for row in machine.p2p]
            lines += ["", "P2P: the row's GPU can access the column's memory", *_table(p2p)]
        if machine.gpus:
            refusal = machine.multicast_refusal
            lines += ["", f"NVLink multicast: {f'no, {refusal}' if refusal else 'yes'}"]
        if machine.notes:
            lines += ["", "Could not be asked", *(f"  {note}" for note in machine.notes)]
        if self.problems:
            lines += ["", "What will not work, and why"]
            lines += [f"  {problem.what}: {problem.why}" for problem in self.problems]
        else:
            lines += ["", "Everything works here."]
        return "\n".join(lines)


def examine() -> Report:
    """Look at this machine. Never raises for what it lacks."""
    versions = {"tileweave": __version__, "python": platform.python_version()}
    versions |= {package: _version(package) for package in PACKAGES}
    nvcc, machine = find_nvcc(), topology()
    return Report(versions, nvcc, machine, tuple(problems(versions, nvcc, machine)))


def problems(versions: dict[str, str], nvcc: Nvcc, machine: Topology) -> list[Problem]:
    """What will not work with these, gravest first."""
    found: list[Problem] = []

    def add(what: str, why: str) -> None:
        found.append(Problem(what, why))

    if not machine.gpus:
        why = [note for note in machine.notes if note.startswith("torch: ")]
        add("running any kernel", f"there is no GPU{f' ({why[0]})' if why else ''}; tw.emit works")
    elif torch_reason := next((n for n in machine.notes if n.startswith("torch: ")), ""):
        add("running any kernel", f"torch cannot use the GPUs ({torch_reason})")
    if why := unsupported_torch(versions["torch"]):
        add("tw.init", why)
    if not nvcc.path:
        add("compiling a kernel that is in no cache", f"nvcc: {nvcc.version}")
    if machine.gpus and versions["cuda-bindings"] == MISSING:
        add("tw.init", "the Python package cuda-bindings is not installed")
    for sm in sorted({10 * gpu.capability[0] + gpu.capability[1] for gpu in machine.gpus}):
        if nvcc.architectures and sm > max(nvcc.architectures):
            add(
                f"compiling for sm_{sm}",
                f"nvcc {nvcc.version} ends at sm_{max(nvcc.architectures)}",
            )
        if sm < 80:
            add("most builtins", f"a GPU is sm_{sm}; they need sm_80")
        if sm < 90:
            add("TMA copies, W.bulk_* and W.multimem_*", f"a GPU is sm_{sm}; they need sm_90")
    pairs = list(combinations(range(len(machine.gpus)), 2))
    if len(machine.gpus) == 1:
        add("more than one rank", "there is one GPU; programs run with world size 1")
    if blocked := [(i, j) for i, j in pairs if not (machine.p2p[i][j] and machine.p2p[j][i])]:
        add("symmetric tensors over all GPUs", f"no P2P between {_pairs(blocked)}")
    if slow := [p for p in pairs if p not in blocked and not machine.nvlinks[p[0]][p[1]]]:
        add("access to peers at NVLink speed", f"no NVLink known between {_pairs(slow)}")
    if machine.gpus and not machine.multicast:
        add("W.multimem_*", f"no NVLink multicast: {machine.multicast_refusal}")
    return found


def find_nvcc() -> Nvcc:
    """The nvcc that TileLang calls."""
    from tilelang.contrib.nvcc import get_nvcc_compiler

    try:
        path = get_nvcc_compiler()
    except RuntimeError:
        return Nvcc("", "not on PATH, and CUDA_HOME is not set")
    try:
        said, known = (
            subprocess.run(
                [path, flag], capture_output=True, text=True, errors="replace", timeout=60
            ).stdout
            for flag in ("--version", "--list-gpu-arch")
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return Nvcc("", f"{path}: {getattr(error, 'strerror', None) or 'does not answer'}")
    release = re.search(r"release [\d.]+, V([\d.]+)", said)
    if release is None:
        return Nvcc("", f"{path}: does not say its version")
    return Nvcc(path, release[1], tuple(map(int, re.findall(r"compute_(\d+)", known))))


MISSING = "not installed"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return MISSING


def _pairs(pairs: list[tuple[int, int]]) -> str:
    shown = ", ".join(f"{i} and {j}" for i, j in pairs[:4])
    return f"GPUs {shown}{f' and {len(pairs) - 4} more pairs' if len(pairs) > 4 else ''}"


def _table(rows: list[list[str]] | tuple[tuple[int, ...], ...]) -> list[str]:
    cells = [["", *map(str, range(len(rows)))]]
    for index, row in enumerate(rows):
        cells.append(
            [str(index), *("-" if index == j else str(entry) for j, entry in enumerate(row))]
        )
    return ["  " + "".join(f"{cell:>5}" for cell in row) for row in cells]
