"""The host part of a compiled program asks the runtime, once a launch, for what it binds."""

from __future__ import annotations

import ctypes

import pytest
import tvm_ffi

import tileweave as tw
from tileweave.passes.bind_runtime import BIND


def test_bind_without_a_session_says_to_initialise():
    slots = (ctypes.c_int64 * 4)()
    with pytest.raises(Exception, match=r"expected tw\.init\(\) before this"):
        tvm_ffi.get_global_func(BIND)(ctypes.c_void_p(ctypes.addressof(slots)), "tileweave.rank")


def test_bind_writes_each_value_to_its_slot(monkeypatch):
    from tileweave.runtime import host_functions, session

    class Group:
        rank, world_size = 3, 5

    class Context:
        address = 1 << 40

    class FakeSession:
        group, context = Group, Context

    monkeypatch.setattr(session, "_session", FakeSession)
    slots = (ctypes.c_int64 * 6)()
    names = "tileweave.context,tileweave.rank,tileweave.world_size"
    tvm_ffi.get_global_func(BIND)(ctypes.c_void_p(ctypes.addressof(slots)), names)
    assert (slots[1], slots[3], slots[5]) == (1 << 40, 3, 5)
    assert tw.rank() == 3
    assert host_functions.current() is FakeSession


def test_multimem_is_refused_by_the_kernels_name_where_there_is_no_multicast(monkeypatch):
    from tileweave.runtime import host_functions, topology

    class NoMulticast:
        multicast = False

    monkeypatch.setattr(topology, "topology", lambda: NoMulticast)
    with pytest.raises(tw.TileWeaveError, match=r"gather: uses multimem .* no usable NVLink"):
        host_functions.require_multicast("gather")
