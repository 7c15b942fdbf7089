"""Instructions of the LL protocol, as ptxas assembles them."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import tilelang.language as T

import tileweave as tw
from tileweave import language as W

N = 64
OFF = {"tileweave.verify": "off"}


@T.prim_func
def exchange(
    X: T.Tensor((N,), "bfloat16"), S: W.Symmetric((N,), "uint64"), Y: T.Tensor((N,), "bfloat16"),
    epoch: T.uint32,
):  # fmt: skip
    with T.Kernel(1, threads=16):
        t = T.get_thread_binding()
        W.ll_st(S[1 - W.rank(), 2 * t], X[4 * t : 4 * t + 4], epoch)
        Y[4 * t : 4 * t + 4] = W.ll_ld(S[W.rank(), 2 * t], epoch, words=2, dtype="bfloat16")


@pytest.fixture
def nvdisasm(nvcc: str) -> str:
    """Return the path of nvdisasm: beside nvcc, on PATH, or of Triton."""
    path = shutil.which("nvdisasm", path=str(Path(nvcc).parent)) or shutil.which("nvdisasm")
    if path is None:
        triton = pytest.importorskip("triton", reason="no nvdisasm: SASS was not read")
        path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    return str(path)


def test_no_register_is_spilled(ptxas):
    messages = ptxas(tw.emit(exchange, world_size=2, stage="ptx", pass_configs=OFF))
    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", messages)
    assert spills and set(spills) == {("0", "0")}, messages


def test_a_poll_is_one_access_of_16_bytes_without_a_fence(ptxas, nvdisasm, tmp_path):
    ptxas(tw.emit(exchange, world_size=2, stage="ptx", pass_configs=OFF))
    command = [nvdisasm, "-c", str(tmp_path / "kernel.cubin")]
    sass = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    kernel = sass[sass.index(".text.exchange_kernel") :].split(".L_x_", 1)[0]
    rest = sass[sass.index(".text.exchange_kernel") :]
    accesses = re.findall(r"\b(?:LDG|STG|LD|ST)\.[\w.]*STRONG[\w.]*", rest)
    assert accesses[:2] == ["STG.E.128.STRONG.SYS", "LDG.E.128.STRONG.SYS"], accesses
    loop = rest[rest.index("LDG.E.128.STRONG.SYS") :]
    loop = loop[: loop.index("BRA")]
    assert not re.search(r"MEMBAR|FENCE|CCTL|BAR\.|LDL|STL", kernel + loop), kernel + loop
