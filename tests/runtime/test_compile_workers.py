"""Processes that compile kernels into the cache."""

import os
import shutil
import signal
import time
from concurrent.futures import wait
from functools import partial

import pytest
import tilelang.language as T
from tilelang import env
from tilelang.cache import kernel_cache

from tileweave import language as W
from tileweave.codegen.compile import compile_by_tilelang
from tileweave.runtime.kernel.compile_workers import CompileWorkers


def program(index):
    @T.prim_func
    def stored(A: T.Tensor((64,), "float32")):
        with T.Kernel(1, threads=64):
            W.st(A[index], 3.0)

    return stored


def use_cache(monkeypatch, folder):
    """Let this process, and those that it starts, use a folder as cache."""
    monkeypatch.setenv("TILELANG_CACHE_DIR", str(folder))
    monkeypatch.setattr(env, "TILELANG_CACHE_DIR", str(folder))  # another test may have set it


@pytest.fixture(autouse=True)
def machine(monkeypatch, tmp_path):
    use_cache(monkeypatch, tmp_path)
    monkeypatch.setenv("TILELANG_DEFAULT_TARGET", '{"kind": "cuda", "arch": "sm_80"}')


@pytest.fixture
def workers(nvcc):
    workers = CompileWorkers(1)
    yield workers
    workers.close()


def compiled(workers, func, **options):
    return workers.submit(partial(compile_by_tilelang, func, **options)).result(60)


@pytest.fixture
def only_finds(monkeypatch):
    """Let this process compile nothing."""

    def compiles(*args, **options):
        raise AssertionError("this process compiles")

    monkeypatch.setattr(kernel_cache.JITKernel, "_compile_and_create_adapter", compiles)


def test_this_process_finds_their_kernels(workers, only_finds):
    func, options = program(3), {"pass_configs": {"tl.disable_warp_specialized": True}}
    compiled(workers, func, **options)
    compile_by_tilelang(func, **options)
    with pytest.raises(AssertionError, match="this process compiles"):
        compile_by_tilelang(func)  # without the option it is another kernel


def test_a_copy_of_the_cache_has_their_kernels(workers, only_finds, tmp_path, monkeypatch):
    compiled(workers, program(3))
    moved = tmp_path / "moved"
    shutil.copytree(tmp_path, moved)
    for path in tmp_path.iterdir():
        if path != moved:
            shutil.rmtree(path)
    use_cache(monkeypatch, moved)
    compile_by_tilelang(program(3))


def test_an_error_of_theirs_is_raised_here_and_they_go_on(workers):
    with pytest.raises(RuntimeError, match="no_such_backend"):
        compiled(workers, program(3), execution_backend="no_such_backend")
    compiled(workers, program(4))


def test_an_error_after_a_call_is_raised_here(workers):
    def then():
        raise ValueError("the disk is full")

    call = workers.submit(os.getpid, then)
    with pytest.raises(ValueError, match="the disk is full"):
        call.result(60)
    workers.submit(os.getpid).result(60)


def test_calls_that_a_process_does_not_make_because_it_has_ended_fail():
    workers = CompileWorkers(2)
    first, *calls = [workers.submit(call) for call in (os.getpid, *[end] * 4)]
    first.result(60)
    wait(calls)
    calls.append(workers.submit(os.getpid))  # no process is left
    for call in calls:
        with pytest.raises(RuntimeError, match="a process that compiles kernels has ended"):
            call.result(60)


def end():
    os.kill(os.getpid(), signal.SIGKILL)


def test_they_make_calls_at_the_same_time(tmp_path):
    workers = CompileWorkers(2)
    first, second = tmp_path / "first", tmp_path / "second"
    done, order = [], []
    for own, other in ((first, second), (second, first)):
        done.append(workers.submit(partial(meet, own, other), partial(order.append, own)))
    workers.close()
    for call in done:
        call.result(60)
    assert {*order} == {first, second}
    workers._process.wait(60)


def meet(own, other):
    """Return when another process has made this call, too."""
    own.touch()
    for _ in range(500):
        if other.exists():
            return
        time.sleep(0.1)
    raise TimeoutError(other)
