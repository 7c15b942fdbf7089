"""The host part of a compiled program asks the runtime once per launch for the values that it
binds."""

from __future__ import annotations

import ctypes

import pytest
import tvm_ffi

import tileweave as tw
from tests.groups import open_sessions
from tileweave.passes.ir.host import BIND
from tileweave.runtime.host import topology
from tileweave.runtime.host.session import opened
from tileweave.runtime.kernel import host_functions


class FakeSession:
    class group:
        rank, world_size = 3, 5

    class context:
        address = 1 << 40


@pytest.fixture(params=["Python", "C++"])
def begin(request, monkeypatch):
    """Begin or end a session; Python or the native part answers."""
    monkeypatch.setenv("TILEWEAVE_NATIVE", "1" if request.param == "C++" else "0")

    def begin(up):
        for ended in opened():
            open_sessions(monkeypatch)
            host_functions.close_session(ended)
        if up is not None:
            open_sessions(monkeypatch, up)
            host_functions.open_session(up)

    yield begin
    begin(None)
    host_functions.register()


def bind(names: str) -> list[int]:
    """Return the contents of the slots."""
    slots = (ctypes.c_int64 * 8)(*([-1] * 8))
    tvm_ffi.get_global_func(BIND)(ctypes.c_void_p(ctypes.addressof(slots)), names)
    return list(slots[1::2])


def test_bind_without_a_session_says_to_initialise(begin):
    for up in (None, FakeSession, None):
        begin(up)
        if up is None:
            with pytest.raises(Exception, match=r"expected tw\.init\(\) before this"):
                bind("tileweave.rank")
        else:
            assert bind("tileweave.rank") == [3, -1, -1, -1]


def test_bind_writes_each_value_to_its_slot(begin):
    begin(FakeSession)
    names = "tileweave.context,tileweave.rank,tileweave.world_size"
    assert bind(names) == [1 << 40, 3, 5, -1]
    assert bind("tileweave.world_size,tileweave.rank") == [5, 3, -1, -1]
    assert tw.rank() == 3
    assert host_functions.current() is FakeSession


def test_multimem_is_refused_by_the_kernels_name_where_there_is_no_multicast(monkeypatch):
    class NoMulticast:
        multicast = False

    monkeypatch.setattr(topology, "topology", lambda: NoMulticast)
    with pytest.raises(tw.TileWeaveError, match=r"gather: uses multimem .* no usable NVLink"):
        host_functions.require_multicast("gather")
