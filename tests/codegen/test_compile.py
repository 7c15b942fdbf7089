"""TileLang's log of compilations."""

import pytest
import tilelang
import tilelang.language as T

from tileweave.codegen.compile import compile_by_tilelang

CUDA = {"kind": "cuda", "arch": "sm_80"}


@T.prim_func
def logged(A: T.Tensor((64,), "float32")):
    with T.Kernel(1, threads=64):
        A[0] = 3.0


@pytest.fixture
def cached(nvcc, monkeypatch, tmp_path):
    monkeypatch.setenv("TILELANG_CACHE_DIR", str(tmp_path))


def test_users_see_no_log(cached, capfd):
    """TileLang logs a compilation, and a kernel that is in the cache of the process."""
    compile_by_tilelang(logged, target=CUDA, verbose=True)
    assert "compile kernel `logged`" in capfd.readouterr().out
    changed = logged.with_attr("global_symbol", "changed")
    for _ in range(2):
        compile_by_tilelang(changed, target=CUDA)
    assert capfd.readouterr() == ("", "")
    tilelang.compile(changed, target=CUDA)
    assert "Found kernel 'changed' in memory cache" in capfd.readouterr().out
