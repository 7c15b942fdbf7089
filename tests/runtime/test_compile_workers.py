"""Processes that compile kernels into the cache."""

import os
import signal

import pytest
import tilelang.language as T
from tilelang.cache import kernel_cache

from tileweave import language as W
from tileweave.codegen.compile import compile_by_tilelang
from tileweave.runtime.executor.compile_workers import CompileWorkers


def program(index):
    @T.prim_func
    def stored(A: T.Tensor((64,), "float32")):
        with T.Kernel(1, threads=64):
            W.st(A[index], 3.0)

    return stored


@pytest.fixture
def workers(nvcc, monkeypatch, tmp_path):
    monkeypatch.setenv("TILELANG_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TILELANG_DEFAULT_TARGET", '{"kind": "cuda", "arch": "sm_80"}')
    with CompileWorkers(1) as workers:
        yield workers


def test_this_process_finds_their_kernels(workers, monkeypatch):
    func = program(3)
    workers.compile(func, pass_configs={"tl.disable_warp_specialized": True})

    def compiles(*args, **options):
        raise AssertionError("this process compiles")

    monkeypatch.setattr(kernel_cache, "JITKernel", compiles)
    with pytest.raises(AssertionError, match="this process compiles"):
        compile_by_tilelang(func)  # without the option it is another kernel
    monkeypatch.undo()


def test_an_error_of_theirs_is_raised_here_and_they_go_on(workers):
    with pytest.raises(RuntimeError, match="no_such_backend"):
        workers.compile(program(3), execution_backend="no_such_backend")
    workers.compile(program(4))


def test_the_end_of_a_process_is_named(workers):
    worker = workers._idle.get()
    workers._idle.put(worker)
    os.kill(worker._process.pid, signal.SIGKILL)
    with pytest.raises(RuntimeError, match="compiles kernels has ended with code -9"):
        workers.compile(program(3))
