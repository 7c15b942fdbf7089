"""``tileweave doctor``: report the software and GPUs of a machine, and what does not work.

Under torchrun it also reports the mesh of the processes."""

from __future__ import annotations

import argparse
import dataclasses
import os
import platform
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from itertools import combinations

from .. import __version__
from ..builtins.versions import SUPPORTED, unsupported_torch
from ..codegen import toolchain
from ..runtime.host.group import from_torchrun
from ..runtime.host.mesh_report import Mesh, find_mesh
from ..runtime.host.topology import Topology, topology

PACKAGES = ("torch", "tilelang", "apache-tvm-ffi", "cuda-bindings", "nvidia-ml-py")
MISSING = "not installed"
UNCACHED = "compiling a kernel that is in no cache"


def add_parser(commands: argparse._SubParsersAction) -> argparse.ArgumentParser:
    """Declare the arguments."""
    return commands.add_parser(
        "doctor", help="report the GPUs of this machine and what does not work"
    )


def run(options: argparse.Namespace) -> None:
    """Print the report of this machine; of several processes, rank 0 prints its own and the
    mesh."""
    report = examine()
    if "LOCAL_RANK" in os.environ and from_torchrun("WORLD_SIZE", 1) > 1:
        problems = [f"{problem.feature}: {problem.reason}" for problem in report.problems]
        mesh = find_mesh(report.topology, problems)
        if mesh is None:
            return
        report = dataclasses.replace(report, mesh=mesh)
    print(report)


@dataclass(frozen=True)
class Nvcc:
    """CUDA compiler that TileLang uses.

    Attributes:
        path: empty if there is no compiler.
        version: the reason if there is no compiler.
        architectures: supported sm numbers; empty if unknown.
        obstacle: why it compiles no kernel, and what repairs it; empty if it does.
    """

    path: str
    version: str
    architectures: tuple[int, ...] = ()
    obstacle: str = ""


@dataclass(frozen=True)
class Problem:
    """A feature that does not work, and the reason."""

    feature: str
    reason: str


@dataclass(frozen=True)
class Report:
    """Software, GPUs and problems of a machine.

    Attributes:
        mesh: the processes, if there are several.
    """

    versions: dict[str, str]
    supported: dict[str, str]
    nvcc: Nvcc
    topology: Topology
    problems: tuple[Problem, ...]
    mesh: Mesh | None = None

    def __str__(self) -> str:
        lines = [*self._software(), "", *self._hardware(), ""]
        if self.problems:
            lines.append("What does not work, and why")
            lines += [f"  {problem.feature}: {problem.reason}" for problem in self.problems]
        else:
            lines.append("Everything works here.")
        if self.mesh is not None:
            lines += ["", str(self.mesh)]
        return "\n".join(lines)

    def _software(self) -> Iterator[str]:
        for name, number in self.versions.items():
            supported = f" (supported: {self.supported[name]})" if name in self.supported else ""
            yield f"{name:<16}{number}{supported}"
        yield f"{'nvcc':<16}{self.nvcc.version} {self.nvcc.path}".rstrip()
        yield f"{'driver':<16}{self.topology.driver or 'not found'}"

    def _hardware(self) -> Iterator[str]:
        machine = self.topology
        yield f"GPUs: {len(machine.gpus)}"
        for index, gpu in enumerate(machine.gpus):
            yield (
                f"  {index}  {gpu.name}, {gpu.memory_bytes / 2**30:.0f} GiB, "
                f"sm_{gpu.capability[0]}{gpu.capability[1]}, {gpu.uuid}"
            )
        if len(machine.gpus) > 1:
            yield from ("", "NVLink links between two GPUs", *_table(machine.nvlinks))
            p2p = [
                ["yes" if is_accessible else "no" for is_accessible in row] for row in machine.p2p
            ]
            yield from ("", "P2P: the row's GPU can access the column's memory", *_table(p2p))
        if machine.gpus:
            refusal = machine.multicast_refusal
            yield from ("", f"NVLink multicast: {f'no, {refusal}' if refusal else 'yes'}")
        if machine.notes:
            yield from ("", "Failed queries", *(f"  {note}" for note in machine.notes))


def examine() -> Report:
    """Return the report of this machine. Missing software and GPUs raise no error."""
    versions = {"tileweave": __version__, "python": platform.python_version()}
    versions |= {package: _version(package) for package in PACKAGES}
    nvcc, machine = find_nvcc(), topology()
    if nvcc.path:
        nvcc = dataclasses.replace(nvcc, obstacle=toolchain.obstacle())
    return Report(versions, SUPPORTED, nvcc, machine, tuple(problems(versions, nvcc, machine)))


def problems(versions: dict[str, str], nvcc: Nvcc, machine: Topology) -> list[Problem]:
    """Return what does not work with these, most severe first."""
    return [
        *_torch_problems(machine),
        *_package_problems(versions, nvcc, machine),
        *_architecture_problems(nvcc, machine),
        *_link_problems(machine),
    ]


def _torch_problems(machine: Topology) -> Iterator[Problem]:
    note = next((note for note in machine.notes if note.startswith("torch: ")), "")
    if not machine.gpus:
        reason = f"there is no GPU{f' ({note})' if note else ''}; tw.emit works"
        yield Problem("running any kernel", reason)
    elif note:
        yield Problem("running any kernel", f"torch cannot use the GPUs ({note})")


def _package_problems(versions: dict[str, str], nvcc: Nvcc, machine: Topology) -> Iterator[Problem]:
    if reason := unsupported_torch(versions["torch"]):
        yield Problem("tw.init", reason)
    if not nvcc.path:
        yield Problem(UNCACHED, f"nvcc: {nvcc.version}; {toolchain.pip_command()}")
    elif nvcc.obstacle:
        yield Problem(UNCACHED, nvcc.obstacle)
    if machine.gpus and versions["cuda-bindings"] == MISSING:
        yield Problem("tw.init", "the Python package cuda-bindings is not installed")


def _architecture_problems(nvcc: Nvcc, machine: Topology) -> Iterator[Problem]:
    newest = max(nvcc.architectures, default=None)
    for sm in sorted({10 * major + minor for major, minor in (g.capability for g in machine.gpus)}):
        if newest is not None and sm > newest:
            reason = f"nvcc {nvcc.version} supports at most sm_{newest}"
            yield Problem(f"compiling for sm_{sm}", reason)
        if sm < 80:
            yield Problem("most builtins", f"a GPU is sm_{sm}; they need sm_80")
        if sm < 90:
            reason = f"a GPU is sm_{sm}; they need sm_90"
            yield Problem("TMA copies, W.bulk_*, and W.multimem_* on multicast addresses", reason)


def _link_problems(machine: Topology) -> Iterator[Problem]:
    if len(machine.gpus) == 1:
        reason = "there is one GPU; programs run with world size 1"
        yield Problem("more than one rank", reason)
    pairs = list(combinations(range(len(machine.gpus)), 2))
    blocked = [(i, j) for i, j in pairs if not (machine.p2p[i][j] and machine.p2p[j][i])]
    if blocked:
        yield Problem("symmetric tensors over all GPUs", f"no P2P between {_pairs(blocked)}")
    slow = [(i, j) for i, j in pairs if (i, j) not in blocked and not machine.nvlinks[i][j]]
    if slow:
        reason = f"no NVLink known between {_pairs(slow)}"
        yield Problem("access to peers at NVLink speed", reason)
    if machine.gpus and not machine.multicast:
        yield Problem(
            "W.multimem_* on multicast addresses",
            f"no NVLink multicast: {machine.multicast_refusal}",
        )


def find_nvcc() -> Nvcc:
    """Return the nvcc that TileLang calls."""
    from tilelang.contrib.nvcc import get_nvcc_compiler

    try:
        path = get_nvcc_compiler()
    except RuntimeError:
        return Nvcc("", "not on PATH, and CUDA_HOME is not set")
    try:
        release_text, architectures = (
            subprocess.run(
                [path, flag], capture_output=True, text=True, errors="replace", timeout=60
            ).stdout
            for flag in ("--version", "--list-gpu-arch")
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return Nvcc("", f"{path}: {getattr(error, 'strerror', None) or 'no answer'}")
    release = re.search(r"release [\d.]+, V([\d.]+)", release_text)
    if release is None:
        return Nvcc("", f"{path}: printed no version")
    numbers = re.findall(r"compute_(\d+)", architectures)
    return Nvcc(path, release[1], tuple(map(int, numbers)))


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return MISSING


def _pairs(pairs: list[tuple[int, int]]) -> str:
    names = ", ".join(f"{i} and {j}" for i, j in pairs[:4])
    return f"GPUs {names}{f' and {len(pairs) - 4} more pairs' if len(pairs) > 4 else ''}"


def _table(rows: list[list[str]] | tuple[tuple[int, ...], ...]) -> list[str]:
    cells = [["", *map(str, range(len(rows)))]]
    for index, row in enumerate(rows):
        cells.append(
            [str(index), *("-" if index == j else str(entry) for j, entry in enumerate(row))]
        )
    return ["  " + "".join(f"{cell:>5}" for cell in row) for row in cells]
