"""A kernel without builtins comes out of TileLang byte for byte as if TileWeave were not there."""

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAMS = Path(__file__).with_name("stock_programs.py")


def source_of(name: str, arch: str, with_tileweave: bool) -> str:
    """The CUDA source of one program, lowered by a fresh process."""
    command = [
        sys.executable,
        str(PROGRAMS),
        name,
        arch,
        *(["tileweave"] if with_tileweave else []),
    ]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("name", ["gemm", "elementwise", "reduction"])
def test_same_source(name, arch):
    stock = source_of(name, arch, with_tileweave=False)
    assert "__global__" in stock
    assert source_of(name, arch, with_tileweave=True) == stock
