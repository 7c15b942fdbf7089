"""Diagnosis of an nvcc that compiles nothing."""

import sys
from pathlib import Path

import pytest
import tilelang
import tilelang.language as T
import torch
from tilelang.contrib import nvcc

import tileweave as tw
from tileweave.cli.main import main
from tileweave.codegen import toolchain

FATAL = "ptxas fatal   : Unsupported .version 9.5; current version is '9.0'"
ANSWERS = 'case $1 in --version) echo "release 13.0, V13.0.88"; exit ;; --list*) exit ;; esac'
FAILS = f'{ANSWERS}; echo run >>"$0.log"; echo "{FATAL}"; exit 1'
WORKS = 'while [ "$1" != -o ]; do shift; done; echo cubin >"$2"'
IF_EMPTY = 'for file; do :; done; if grep -q empty "$file"; then'
FAILS_FOR_OTHERS = f"{IF_EMPTY} {WORKS}; exit; fi; {FAILS}"
FIT = {
    "nvidia-cuda-nvcc": "13.0.88",
    "nvidia-nvvm": "13.0.88",
    "nvidia-cuda-crt": "13.0.88",
    "nvidia-cuda-runtime": "13.0.96",
    "nvidia-cuda-cccl": "13.0.85",
}
PIP = f"{sys.executable} -m pip install"


@T.prim_func
def nothing(A: T.Tensor((64,), "float32")):
    with T.Kernel(1, threads=64):
        A[0] = 1.0


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Return a function that installs a fake nvcc and packages, as pip leaves them."""

    def install(does: str, versions: dict[str, str], cuda_of_torch: str | None = None) -> Path:
        home = tmp_path / "nvidia" / "cu13"
        path = home / "bin" / "nvcc"
        path.parent.mkdir(parents=True)
        path.write_text(f"#!/bin/sh\n{does}\n")
        path.chmod(0o755)
        for package, version in versions.items():
            info = tmp_path / f"{package.replace('-', '_')}-{version}.dist-info"
            info.mkdir()
            text = f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n"
            (info / "METADATA").write_text(text)
            (info / "RECORD").write_text("nvidia/cu13/bin/nvcc,,\n" if "nvcc" in package else "")
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.setattr(nvcc, "CUDA_HOME", str(home))
        monkeypatch.setattr(torch.version, "cuda", cuda_of_torch)
        return path

    toolchain.obstacle.cache_clear()
    yield install
    toolchain.obstacle.cache_clear()


@pytest.mark.parametrize(
    ("versions", "cuda_of_torch", "remedy"),
    [
        (
            FIT | {"nvidia-nvvm": "13.5.37", "nvidia-cuda-crt": "13.5.37"},
            None,
            ": nvidia-nvvm is 13.5.37, nvidia-cuda-crt is 13.5.37; expected 13.0.* as "
            f"nvidia-cuda-nvcc 13.0.88: {PIP} 'nvidia-nvvm==13.0.*' 'nvidia-cuda-crt==13.0.*'",
        ),
        (
            FIT | {"nvidia-cuda-runtime": "13.2.75"},
            "13.2",
            ": nvidia-cuda-nvcc is 13.0.88, nvidia-nvvm is 13.0.88, nvidia-cuda-crt is 13.0.88, "
            f"nvidia-cuda-cccl is 13.0.85; expected 13.2.* as torch: {PIP} "
            "'nvidia-cuda-nvcc==13.2.*' 'nvidia-nvvm==13.2.*' 'nvidia-cuda-crt==13.2.*' "
            "'nvidia-cuda-cccl==13.2.*'",
        ),
        (
            FIT | {"nvidia-cuda-runtime": "13.1.1"},
            "12.8",
            ": nvidia-cuda-runtime is 13.1.1; expected 13.0.* as nvidia-cuda-nvcc 13.0.88: "
            f"{PIP} 'nvidia-cuda-runtime==13.0.*'",
        ),
        (FIT, None, "; expected a C++ compiler that it supports"),
        ({}, None, "; expected a complete CUDA toolkit in {home} and a C++ compiler for it"),
    ],
)
def test_what_repairs_it(install, versions, cuda_of_torch, remedy):
    path = install(FAILS, versions, cuda_of_torch)
    message = f"{path} compiles no kernel ({FATAL})" + remedy.format(home=path.parents[1])
    assert toolchain.obstacle() == message


def test_requirements_pin_all_packages():
    text = (Path(tw.__file__).parents[1] / "requirements-nvcc.txt").read_text()
    pins = dict(line.split("==") for line in text.splitlines() if line[0] != "#")
    assert pins.keys() == set(toolchain.PACKAGES)
    assert {toolchain._release(version) for version in pins.values()} == {toolchain.DEFAULT_RELEASE}


def test_a_package_that_is_missing(install, monkeypatch):
    install(FAILS, FIT)
    version = toolchain._version_of
    monkeypatch.setattr(toolchain, "_version_of", lambda p: "" if "cccl" in p else version(p))
    assert toolchain.obstacle().endswith(
        ": nvidia-cuda-cccl is not installed; expected 13.0.* as nvidia-cuda-nvcc 13.0.88: "
        f"{PIP} 'nvidia-cuda-cccl==13.0.*'"
    )


def test_failing_compilations_are_diagnosed_once(install, capsys):
    path = install(FAILS, FIT | {"nvidia-nvvm": "13.5.37"})
    for _ in range(2):
        with pytest.raises(tw.TileWeaveError) as error:
            tw.emit(nothing, "ptx")
        assert str(error.value).startswith(f"nvcc: {path} compiles no kernel ({FATAL}): nvidia-nvv")
        assert str(error.value).endswith("pip install 'nvidia-nvvm==13.0.*'")
    assert len(path.with_suffix(".log").read_text().split()) == 3  # two programs, an empty kernel
    with pytest.raises(tw.TileWeaveError, match="compiles no kernel"):
        tilelang.compile(nothing, target={"kind": "cuda", "arch": "sm_80"})
    capsys.readouterr()
    assert main(["doctor"]) == 0
    assert f"no cache: {toolchain.obstacle()}\n" in capsys.readouterr().out


def test_a_kernel_that_fails_alone_keeps_its_error(install):
    install(FAILS_FOR_OTHERS, FIT | {"nvidia-nvvm": "13.5.37"})
    with pytest.raises(RuntimeError, match="Compilation error:\nptxas fatal"):
        tw.emit(nothing, "ptx")
    assert toolchain.obstacle() == ""
