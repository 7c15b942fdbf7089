"""``tileweave doctor``: problems of a machine, and their report."""

import dataclasses
import re
from pathlib import Path

import pytest

import tileweave
from tileweave.cli.doctor import MISSING, Nvcc, Problem, Report, find_nvcc, problems
from tileweave.cli.main import main
from tileweave.codegen.toolchain import pip_command
from tileweave.runtime.host.topology import Gpu, Topology


def test_doctor_prints(capsys):
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert f"tileweave       {tileweave.__version__}" in out
    assert "GPUs: " in out
    supported = dict(re.findall(r"^(\S+) +\d\S* \(supported: (.*)\)$", out, re.M))
    assert supported == {
        "python": "3.10 to 3.13",
        "torch": "2.11 to 2.15",
        "tilelang": "0.1.12 to 0.1.15",
        "apache-tvm-ffi": "0.1.11 to 0.1.12",
    }


H200 = Gpu("NVIDIA H200", 140 << 30, (9, 0), "a")
L4 = Gpu("NVIDIA L4", 24 << 30, (8, 9), "b")
NVCC = Nvcc("/cuda/bin/nvcc", "13.0.88", (75, 80, 89, 90, 100))
VERSIONS = {"torch": "2.13.0", "cuda-bindings": "13.0.3"}


def machine(*gpus: Gpu, links: int = 18, p2p: bool = True, **rest) -> Topology:
    n = range(len(gpus))
    return Topology(
        gpus,
        tuple(tuple(0 if i == j else links for j in n) for i in n),
        tuple(tuple(i == j or p2p for j in n) for i in n),
        **{"multicast": True, **rest},
    )


def test_nothing_to_complain_about():
    assert problems(VERSIONS, NVCC, machine(H200, H200)) == []


@pytest.mark.parametrize(
    ("versions", "nvcc", "topology", "expected"),
    [
        (
            {},
            NVCC,
            machine(multicast=False, notes=("torch: no CUDA",)),
            Problem("running any kernel", "there is no GPU (torch: no CUDA); tw.emit works"),
        ),
        (
            {},
            NVCC,
            machine(H200, H200, notes=("torch: driver too old",)),
            Problem("running any kernel", "torch cannot use the GPUs (torch: driver too old)"),
        ),
        (
            {"torch": "2.10.1+cu128"},
            NVCC,
            machine(H200, H200),
            Problem("tw.init", "torch is 2.10.1+cu128; expected 2.11 to 2.15"),
        ),
        (
            {"cuda-bindings": MISSING},
            NVCC,
            machine(H200, H200),
            Problem("tw.init", "the Python package cuda-bindings is not installed"),
        ),
        (
            {},
            Nvcc("", "not on PATH, and CUDA_HOME is not set"),
            machine(H200, H200),
            Problem(
                "compiling a kernel that is in no cache",
                f"nvcc: not on PATH, and CUDA_HOME is not set; {pip_command()}",
            ),
        ),
        (
            {},
            dataclasses.replace(NVCC, obstacle="/cuda/bin/nvcc compiles no kernel"),
            machine(H200, H200),
            Problem("compiling a kernel that is in no cache", "/cuda/bin/nvcc compiles no kernel"),
        ),
        (
            {},
            Nvcc("/cuda/bin/nvcc", "11.7", (70, 80, 87)),
            machine(H200, H200),
            Problem("compiling for sm_90", "nvcc 11.7 supports at most sm_87"),
        ),
        (
            {},
            NVCC,
            machine(L4, L4),
            Problem(
                "TMA copies, W.bulk_*, and W.multimem_* on multicast addresses",
                "a GPU is sm_89; they need sm_90",
            ),
        ),
        (
            {},
            NVCC,
            machine(H200),
            Problem("more than one rank", "there is one GPU; programs run with world size 1"),
        ),
        (
            {},
            NVCC,
            machine(H200, H200, p2p=False),
            Problem("symmetric tensors over all GPUs", "no P2P between GPUs 0 and 1"),
        ),
        (
            {},
            NVCC,
            machine(H200, H200, H200, H200, links=0),
            Problem(
                "access to peers at NVLink speed",
                "no NVLink known between GPUs 0 and 1, 0 and 2, 0 and 3, 1 and 2 and 2 more pairs",
            ),
        ),
        (
            {},
            NVCC,
            machine(H200, H200, multicast=False, multicast_refusal="forbidden"),
            Problem("W.multimem_* on multicast addresses", "no NVLink multicast: forbidden"),
        ),
    ],
)
def test_problem(versions, nvcc, topology, expected):
    assert problems(VERSIONS | versions, nvcc, topology) == [expected]


def test_report_for_people():
    shown = str(Report(VERSIONS, {}, NVCC, machine(H200, H200, driver="580.95.05"), ()))
    assert "driver          580.95.05" in shown
    assert "  1  NVIDIA H200, 140 GiB, sm_90, a" in shown
    assert "NVLink links between two GPUs\n           0    1\n      0    -   18\n" in shown
    assert "      1  yes    -" in shown
    assert "NVLink multicast: yes" in shown
    assert shown.endswith("Everything works here.")


def fake_nvcc(directory: Path, script: str, monkeypatch) -> str:
    path = directory / "bin" / "nvcc"
    path.parent.mkdir()
    path.write_text(f"#!/bin/sh\n{script}")
    path.chmod(0o755)
    monkeypatch.setattr("tilelang.contrib.nvcc.CUDA_HOME", str(directory))
    return str(path)


def test_nvcc_is_asked(tmp_path, monkeypatch):
    path = fake_nvcc(
        tmp_path,
        'case $1 in --version) echo "Cuda compilation tools, release 12.8, V12.8.93" ;;\n'
        "*) echo compute_80; echo compute_90 ;; esac\n",
        monkeypatch,
    )
    assert find_nvcc() == Nvcc(path, "12.8.93", (80, 90))


@pytest.mark.parametrize("does", ["exit 1\n", "printf '\\377\\376'\n"])  # the latter is no text
def test_nvcc_that_fails(tmp_path, monkeypatch, does):
    path = fake_nvcc(tmp_path, does, monkeypatch)
    assert find_nvcc() == Nvcc("", f"{path}: printed no version")


@pytest.mark.parametrize(
    ("home", "why"),
    [
        ("", "not on PATH, and CUDA_HOME is not set"),
        ("/nowhere", "/nowhere/bin/nvcc: No such file or directory"),
    ],
)
def test_no_nvcc(monkeypatch, home, why):
    monkeypatch.setattr("tilelang.contrib.nvcc.CUDA_HOME", home)
    assert find_nvcc() == Nvcc("", why)
