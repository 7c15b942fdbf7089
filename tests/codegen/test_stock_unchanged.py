"""TileWeave does not change a byte of the kernels that use none of its builtins."""

import functools
import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.long

PROGRAMS = Path(__file__).with_name("stock_programs.py")


@functools.cache
def sources(*imported: str) -> dict[str, str]:
    """Return the CUDA source of each program and architecture, lowered by a new process."""
    command = [sys.executable, str(PROGRAMS), *imported]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(run.stdout)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("name", ["gemm", "elementwise", "reduction"])
def test_same_source(name, arch):
    stock = sources()[f"{name} {arch}"]
    assert "__global__" in stock
    assert sources("tileweave")[f"{name} {arch}"] == stock
