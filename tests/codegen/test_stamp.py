"""The source and the cache key of a kernel have a stamp of the headers, builtins and passes."""

import shutil
from pathlib import Path

import pytest
import tilelang.language as T
from tilelang.cache.kernel_cache import KernelCache

import tileweave as tw
from tileweave import language as W
from tileweave.codegen import headers as include


@T.prim_func
def ours(F: T.Tensor((8,), "uint32")):
    with T.Kernel(1, threads=32):
        W.signal(F[0])


@T.prim_func
def stock(F: T.Tensor((8,), "uint32")):
    with T.Kernel(1, threads=32):
        F[T.get_thread_binding() % 8] = T.uint32(1)


def key(program) -> str:
    return KernelCache()._generate_key(program, [], args=[], target="cuda")


def include_line() -> str:
    (line,) = [line for line in tw.emit(ours).splitlines() if "tileweave.cuh" in line]
    return line


@pytest.fixture
def copy_of_checkout(tmp_path, monkeypatch) -> Path:
    """Replace the files that the stamp covers by a copy that the test may edit."""
    for folder in ("builtins", "codegen", "passes"):
        shutil.copytree(include._ROOT.parent / folder, tmp_path / folder)
    monkeypatch.setattr(include, "_ROOT", tmp_path / "codegen")
    monkeypatch.setattr(include, "INCLUDE_DIR", tmp_path / "codegen" / "include")
    return tmp_path


@pytest.mark.parametrize(
    "edited",
    [
        "codegen/include/tileweave/signals.cuh",
        "codegen/include/tileweave/qualifiers.cuh",
        "passes/tile/order_releases.py",
        "builtins/signals.py",
        "codegen/hook.py",
    ],
)
def test_edit_recompiles(copy_of_checkout, edited):
    before = include_line(), key(ours), key(stock)
    assert (include_line(), key(ours), key(stock)) == before

    with (copy_of_checkout / edited).open("a") as file:
        file.write("\n")

    assert include_line() != before[0]
    assert key(ours) != before[1]
    assert key(stock) == before[2]


def test_new_file_recompiles(copy_of_checkout):
    before = key(ours)
    (copy_of_checkout / "passes" / "another.py").write_text("# new\n")
    assert key(ours) != before
