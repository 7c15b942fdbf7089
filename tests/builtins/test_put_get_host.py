"""The index arithmetic of put and get, compiled for the CPU.

Every element arrives, nothing else is touched, and every access is aligned.
"""

import ctypes
import shutil
import subprocess

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tileweave.codegen.headers import INCLUDE_DIR

SOURCE = """
#include <tileweave/put_get.cuh>
template <int bytes> struct alignas(bytes) Item { char value[bytes]; };
#define COPY(BYTES)                                                                               \\
  extern "C" void block_##BYTES(const void *src, void *dst, int64_t size, int32_t threads) {      \\
    for (int32_t thread = 0; thread < threads; ++thread)                                          \\
      tw::put_block(static_cast<const Item<BYTES> *>(src), static_cast<Item<BYTES> *>(dst), size, \\
                    thread, threads);                                                             \\
  }                                                                                               \\
  extern "C" void warp_##BYTES(const void *src, void *dst, int64_t size, int32_t first) {         \\
    for (int32_t thread = first; thread < first + 32; ++thread)                                   \\
      tw::get_warp(static_cast<const Item<BYTES> *>(src), static_cast<Item<BYTES> *>(dst), size,  \\
                   thread);                                                                       \\
  }
COPY(1) COPY(2) COPY(4) COPY(8) COPY(16)
"""
GUARD = 64
"""Bytes on either side of the destination that must stay as they were."""


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    compiler = shutil.which("g++") or shutil.which("clang++")
    assert compiler, "a C++ compiler is needed to test the arithmetic of put and get"
    folder = tmp_path_factory.mktemp("put_get")
    (folder / "copy.cpp").write_text(SOURCE)
    flags = ["-std=c++17", "-O1", "-shared", "-fPIC", "-fno-strict-aliasing", f"-I{INCLUDE_DIR}"]
    checks = ["-fsanitize=alignment", "-fno-sanitize-recover"]
    command = [compiler, *flags, *checks, "copy.cpp", "-o", "copy.so"]
    subprocess.run(command, cwd=folder, check=True)
    return ctypes.CDLL(str(folder / "copy.so"))


def aligned(size: int) -> tuple[ctypes.Array, int]:
    """Return a buffer and the first address in it that is a multiple of 128."""
    buffer = (ctypes.c_uint8 * (size + 128))()
    return buffer, -(-ctypes.addressof(buffer) // 128) * 128


@settings(max_examples=400)
@given(
    item=st.sampled_from([1, 2, 4, 8, 16]),
    size=st.integers(-1, 700),
    src_at=st.integers(0, 31),
    dst_at=st.integers(0, 31),
    threads=st.sampled_from([1, 7, 32, 96, 128]),
    by_warp=st.booleans(),
)
def test_copy(library, item, size, src_at, dst_at, threads, by_warp):
    span = 2 * GUARD + (31 + 700) * item
    src_buffer, src_base = aligned(span)
    dst_buffer, dst_base = aligned(span)
    payload = bytes((i * 37 + 11) % 251 for i in range(max(size, 0) * item))
    src, dst = src_base + GUARD + src_at * item, dst_base + GUARD + dst_at * item
    ctypes.memmove(src, payload, len(payload))
    ctypes.memset(dst_base, 0xEE, span)

    copy = getattr(library, f"{'warp' if by_warp else 'block'}_{item}")
    copy(ctypes.c_void_p(src), ctypes.c_void_p(dst), ctypes.c_int64(size), threads)

    actual = ctypes.string_at(dst_base, span)
    start = dst - dst_base
    assert actual[start : start + len(payload)] == payload
    assert set(actual[:start]) | set(actual[start + len(payload) :]) <= {0xEE}
    assert src_buffer is not dst_buffer
