"""Text of TileLang and TVM on the error stream during a compilation."""

import os
import threading

import pytest
import tilelang.language as T

import tileweave as tw
from tileweave import language as W
from tileweave.codegen.stderr import without_fatal_text


@T.prim_func
def unequal(X: T.Tensor((64, 64), "float32"), Y: T.Tensor((64, 64), "float32")):
    with T.Kernel(1, threads=128):
        tile = T.alloc_shared((32, 48), "float32")
        W.fence("gpu")
        T.copy(X[0:32, 0:64], tile[0:32, 0:40])
        T.copy(tile, Y[0:32, 0:48])


@pytest.mark.parametrize("arch", ["sm_90a", "sm_80"])
def test_a_refusal_prints_nothing(capfd, arch):
    with pytest.raises(tw.TileWeaveError, match="32 x 64 elements of X to 32 x 40 elements"):
        tw.emit(unequal, arch=arch)
    assert capfd.readouterr().err == ""


@T.prim_func
def narrow(A: T.Tensor((64, 64), "float16"), B: T.Tensor((64, 24), "float16"),
           C: T.Tensor((64, 24), "float32")):  # fmt: skip
    with T.Kernel(1, threads=128):
        a, b = T.alloc_shared((64, 64), "float16"), T.alloc_shared((64, 24), "float16")
        c = T.alloc_fragment((64, 24), "float32")
        W.fence("gpu")
        T.copy(A, a)
        T.copy(B, b)
        T.gemm(a, b, c, clear_accum=True)
        T.copy(c, C)


def test_a_refused_product_logs_no_code(capfd):
    """TileLang logs the Python code of the macro that it fails to build for ``T.gemm``."""
    with pytest.raises(tw.TileWeaveError, match="no wgmma layout of b"):
        tw.emit(narrow, arch="sm_90a")
    assert capfd.readouterr() == ("", "")


def test_other_text_is_kept(capfd):
    with without_fatal_text():
        os.write(2, b"kept\n[01:02:03] : Fatal: dropped\n--> file\n")
    os.write(2, b"after\n")
    assert capfd.readouterr().err == "kept\nafter\n"


def test_threads_that_compile_at_once(capfd):
    """The first one that ends does not restore a stream that the other has redirected."""
    entered, leave = threading.Event(), threading.Event()

    def compile_first():
        with without_fatal_text():
            entered.set()
            leave.wait(60)

    thread = threading.Thread(target=compile_first)
    thread.start()
    entered.wait(60)
    with without_fatal_text():
        leave.set()
        thread.join()
        os.write(2, b"inside\n")
    os.write(2, b"after\n")
    assert capfd.readouterr().err == "inside\nafter\n"


def test_copy_of_tiles_of_other_shapes():
    with pytest.raises(
        tw.TileWeaveError,
        match=r"T.copy: copies 64 x 64 elements of X to 32 x 64 elements of tile; expected equal "
        r"extents on both sides\n --> .*test_stderr.py:\d+",
    ):

        @T.prim_func
        def program(X: T.Tensor((64, 64), "float32")):
            with T.Kernel(1, threads=128):
                tile = T.alloc_shared((32, 64), "float32")
                T.copy(X, tile)
