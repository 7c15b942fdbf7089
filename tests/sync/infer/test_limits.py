"""Memory of the analysis: programs that would need too much are refused by name."""

import tracemalloc

import pytest
import tilelang.language as T

import tileweave as tw
from tests.releases import names_line
from tileweave import language as W

M = T.dynamic("M")


@T.prim_func
def shift(S: W.Symmetric((M, 32), "float32"), X: T.Tensor((M, 32), "float32")):
    with T.Kernel(T.ceildiv(M, 8), threads=32) as row:
        tile = T.alloc_shared((8, 32), "float32")
        T.copy(X[row * 8, 0], tile)
        T.copy(tile, S[(W.rank() + 1) % 4, row * 8, 0])
        T.copy(S[W.rank(), row * 8, 0], tile)
        T.copy(tile, X[row * 8, 0])


def test_iterations_that_do_not_fit(monkeypatch):
    monkeypatch.setattr("tileweave.passes.sync.regions.footprints._MAX_INTEGERS", 1000)
    assert "def shift(" in tw.emit(shift, "tile", sizes={"M": 8 * 16})
    with pytest.raises(tw.LanguageError) as error:
        tw.emit(shift, "tile", sizes={"M": 8 * 200})
    said = str(error.value)
    assert "T.copy writes S[" in said and "happens 800 times on all ranks in a launch" in said
    assert "expected smaller sizes, larger tiles, explicit signals and waits" in said
    assert names_line(said, f"{__file__}:20")


ROWS, BLOCKS = 2048, 32


@T.prim_func
def read_any_rows(
    X: T.Tensor((ROWS, 64), "float16"),
    rows: T.Tensor((ROWS,), "int32"),
    Y: T.Tensor((ROWS, 64), "float16"),
):
    with T.Kernel(BLOCKS, threads=64) as block:
        S = W.alloc_symmetric((ROWS, 64), "float16")
        row = T.alloc_fragment((64,), "float16")
        for wave in T.serial(ROWS // BLOCKS):
            T.copy(X[wave * BLOCKS + block, 0], row)
            T.copy(row, S[W.rank(), wave * BLOCKS + block, 0])
        for wave in T.serial(ROWS // BLOCKS):
            T.copy(S[W.rank(), rows[wave * BLOCKS + block], 0], row)
            T.copy(row, Y[wave * BLOCKS + block, 0])


def test_reads_of_any_row_need_no_memory_for_each_pair():
    """Numbers for each row, wave and block would need 300 MB."""
    tracemalloc.start()
    try:
        assert "def read_any_rows(" in tw.emit(read_any_rows, "tile", world_size=1)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 64 << 20
