"""Fixtures: ranks without GPUs, nvcc and ptxas."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import threading
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch
import torch.distributed as dist

from tests import warm
from tileweave.runtime.host.group import Group

# A deadline would fail on a busy machine, not on a wrong program.
hypothesis.settings.register_profile("tileweave", deadline=None)
hypothesis.settings.load_profile("tileweave")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--part", default="0/1", metavar="K/N", help="run the tests whose name's hash modulo N is K"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    part, parts = map(int, config.getoption("part").split("/"))

    def is_own(item: pytest.Item) -> bool:
        return zlib.crc32(item.nodeid.encode()) % parts == part

    config.hook.pytest_deselected(items=[item for item in items if not is_own(item)])
    items[:] = filter(is_own, items)


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # a worker of pytest-xdist
        warm.start()


@pytest.fixture
def every_rank(monkeypatch) -> Callable[..., list[Any]]:
    """Return a runner that calls ``function(group)`` on each rank, in threads that share a store.

    The runner returns what each rank returned, or the exception that it raised.
    """
    # CPython 3.11 counts the depth of all threads' trees in one place: parsing tile programs in
    # several threads at a time raises SystemError now and then. Ranks are processes otherwise.
    parse, parsing = ast.parse, threading.Lock()

    def parse_alone(*args: Any, **options: Any) -> ast.AST:
        with parsing:
            return parse(*args, **options)

    monkeypatch.setattr(ast, "parse", parse_alone)

    def run(
        function: Callable[[Group], Any], world_size: int = 2, local_size: int | None = None
    ) -> list[Any]:
        store = dist.HashStore()

        def one(rank: int) -> Any:
            local_rank = rank % (local_size or world_size)
            try:
                return function(
                    Group(rank, world_size, local_rank, torch.device("cpu"), None, store)
                )
            except Exception as error:
                return error

        with ThreadPoolExecutor(world_size) as ranks:
            return list(ranks.map(one, range(world_size)))

    return run


@pytest.fixture(scope="module")
def two(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Connect two processes, which run functions of the module's ``on_ranks``."""
    from tests.ops.on_ranks import Ranks  # it imports all operators

    ranks = Ranks(2, request.module.on_ranks.__name__)
    yield ranks
    ranks.close()


@pytest.fixture(scope="session")
def nvcc() -> str:
    """Return the path of nvcc."""
    if os.environ.get("TILEWEAVE_NO_NVCC") == "1":
        pytest.skip("TILEWEAVE_NO_NVCC=1: nothing was assembled")
    toolkit = Path(os.environ.get("CUDA_HOME", ""), "bin")
    nvcc = shutil.which("nvcc") or shutil.which("nvcc", path=toolkit)
    if nvcc is None:
        pytest.fail(
            "nvcc is neither on PATH nor in CUDA_HOME; install CUDA, or set TILEWEAVE_NO_NVCC=1 to "
            "skip these tests"
        )
    return nvcc


@pytest.fixture
def ptxas(nvcc: str, tmp_path: Path) -> Callable[[str], str]:
    """Return a function that assembles PTX and returns the messages of ptxas."""

    def run(ptx: str, arch: str = "sm_90a") -> str:
        file = tmp_path / "kernel.ptx"
        file.write_text(ptx)
        tool, cubin = Path(nvcc).with_name("ptxas"), tmp_path / "kernel.cubin"
        command = [tool, f"-arch={arch}", "-v", "-o", cubin, file]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stderr

    return run
