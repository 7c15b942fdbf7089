"""Caches are private, and not used where every user may write them."""

from __future__ import annotations

import errno
import os
import subprocess
from pathlib import Path

import pytest
from tilelang import env

from tests import warm
from tests.groups import one_rank
from tileweave import TileWeaveError
from tileweave.runtime.host import cache_folder, native
from tileweave.runtime.host.group import Group
from tileweave.runtime.kernel.compile_once import compile_once

ALONE = one_rank()
REFUSED = r"cache: .*: every user may write it \(mode 0777\); expected a private TILELANG_CACHE_DIR"


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o7777


@pytest.fixture
def cache(monkeypatch, tmp_path):
    folder = tmp_path / "cache"
    monkeypatch.setattr(env, "TILELANG_CACHE_DIR", str(folder))
    return folder


def test_folders_are_created_for_their_owner_only(cache):
    assert cache_folder.writable_folder() == cache / "tileweave"
    assert [mode(path) for path in (cache, cache / "tileweave")] == [0o700, 0o700]


@pytest.mark.parametrize(("kernels", "after"), [(False, 0o700), (True, 0o755)])
def test_a_cache_without_kernels_becomes_private(cache, kernels, after):
    """A cache with kernels keeps its mode, because other users may read it."""
    (cache / "0.1.15" / "linux" / "kernels").mkdir(parents=True)
    if kernels:
        (cache / "0.1.15" / "linux" / "kernels" / "ab12").mkdir()
    cache.chmod(0o755)
    assert compile_once(ALONE, lambda: "kernel", "gemm") == "kernel"
    assert mode(cache) == after


@pytest.mark.parametrize("folder", [".", "0.1.15", "0.1.15/linux/kernels"])
def test_kernels_that_every_user_may_replace_are_not_loaded(cache, folder):
    (cache / "0.1.15" / "linux" / "kernels" / "ab12").mkdir(parents=True)
    cache.chmod(0o755)
    (cache / folder).chmod(0o777)
    with pytest.raises(TileWeaveError, match=REFUSED):
        compile_once(ALONE, lambda: pytest.fail("loaded"), "gemm")
    cache.chmod(0o700)  # protects what is in it
    assert compile_once(ALONE, lambda: "kernel", "gemm") == "kernel"


def test_a_folder_of_another_user_in_tmp_is_refused(cache, monkeypatch):
    cache.mkdir()
    cache.parent.chmod(0o1777)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    if os.getuid() == 0:
        os.chown(cache, 54321, -1)
    with pytest.raises(TileWeaveError, match=r"it belongs to user .*, in a folder that every user"):
        cache_folder.require_private(cache)
    cache.parent.chmod(0o755)
    cache_folder.require_private(cache)


def test_a_native_library_that_every_user_may_replace_is_not_loaded(cache, monkeypatch):
    folder = cache_folder.writable_folder()
    folder.chmod(0o777)
    native._library.cache_clear()
    with pytest.warns(UserWarning, match="enqueued from Python, which is slower: " + REFUSED):
        assert native.library() is None
    native._library.cache_clear()
    assert list(folder.iterdir()) == []


def test_processes_do_not_compile_the_native_library_twice(cache, tmp_path):
    """The compiler is a stand-in that counts its calls and takes a second."""
    compiler, log = tmp_path / "c++", tmp_path / "log"
    compiler.write_text(
        f"#!/bin/sh\necho call >> {log}\nsleep 1\n"
        'while [ "$1" != -o ]; do shift; done\necho library > "$2"\n'
    )
    compiler.chmod(0o755)
    program = (
        "import os, sys; from tilelang import env; from tileweave.runtime.host import native\n"
        "os.environ['CXX'], env.TILELANG_CACHE_DIR = sys.argv[1:]\n"
        "print(native.built())"
    )
    command = [*warm.python(), "-c", program, str(compiler), str(cache)]
    ranks = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(2)]
    assert len({rank.communicate(timeout=120)[0] for rank in ranks}) == 1
    assert [rank.returncode for rank in ranks] == [0, 0]
    assert log.read_text() == "call\n"
    (library,) = (cache / "tileweave").iterdir()
    assert native.is_intact(library)


def test_a_lock_excludes_another_process(tmp_path):
    program = (
        "import sys; from pathlib import Path\n"
        "from tileweave.runtime.host.cache_folder import locked\n"
        "print('up', flush=True)\n"
        "with locked(Path(sys.argv[1])): Path(sys.argv[1], 'entered').touch()\n"
    )
    with cache_folder.locked(tmp_path):
        other = subprocess.Popen(
            [*warm.python(), "-c", program, str(tmp_path)], stdout=subprocess.PIPE
        )
        assert other.stdout is not None and other.stdout.readline() == b"up\n"
        with pytest.raises(subprocess.TimeoutExpired):
            other.wait(timeout=0.5)
        assert not (tmp_path / "entered").exists()
    assert other.wait(timeout=60) == 0
    assert (tmp_path / "entered").exists()


@pytest.mark.parametrize("by_tvm", [False, True])
@pytest.mark.parametrize("number", ["EROFS", "ENOSPC", "EACCES"])
def test_a_cache_that_cannot_be_written_is_named_on_every_rank(cache, every_rank, number, by_tvm):
    """TVM turns an error of its callback into a RuntimeError with the same text."""
    cache.mkdir()

    def compile_gemm(group: Group) -> str:
        def compiler() -> str:
            code = getattr(errno, number)
            error = OSError(code, os.strerror(code), str(cache / ".staging"))
            raise RuntimeError(str(error)) if by_tvm else error

        return compile_once(group, compiler, "gemm")

    for error in every_rank(compile_gemm):
        assert isinstance(error, TileWeaveError)
        assert f"'{cache}/.staging'; expected a cache that can be written" in str(error)
        assert f"TILELANG_CACHE_DIR is {cache}" in str(error)
