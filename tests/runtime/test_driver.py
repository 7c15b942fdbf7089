"""Failures of driver calls name the call, the place and the arguments. The driver is a fake."""

from __future__ import annotations

import enum
import sys
import types

import pytest

from tileweave import TileWeaveError
from tileweave.runtime.host import driver


class CUresult(enum.IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_ILLEGAL_ADDRESS = 700


class FakeDriver(types.ModuleType):
    """Driver that answers each call with the next of ``answers`` and records the calls."""

    CUresult = CUresult

    def __init__(self) -> None:
        super().__init__("driver")
        self.answers: list[tuple] = []
        self.asked: list[tuple] = []

    def __getattr__(self, name: str):
        if not name.startswith("cu"):
            raise AttributeError(name)

        def call(*args):
            self.asked.append((name, *args))
            return self.answers.pop(0)

        return call


@pytest.fixture
def fake(monkeypatch) -> FakeDriver:
    bindings = types.ModuleType("cuda.bindings")
    bindings.driver = FakeDriver()
    for name, module in (
        ("cuda", types.ModuleType("cuda")),
        ("cuda.bindings", bindings),
        ("cuda.bindings.driver", bindings.driver),
    ):
        monkeypatch.setitem(sys.modules, name, module)
    return bindings.driver


@pytest.mark.parametrize(
    ("answer", "result"), [((), None), ((5,), 5), ((5, 6), (5, 6))], ids=["none", "one", "two"]
)
def test_results_come_without_the_status(fake, answer, result):
    fake.answers = [(CUresult.CUDA_SUCCESS, *answer)]
    assert driver.call("cuMemMap", 1, "x") == result
    assert fake.asked == [("cuMemMap", 1, "x")]


def test_a_failure_names_call_arguments_and_rank(fake, monkeypatch):
    monkeypatch.setenv("RANK", "3")
    fake.answers = [(CUresult.CUDA_ERROR_ILLEGAL_ADDRESS,)]
    with pytest.raises(driver.DriverError) as error:
        driver.call("cuMemMap", 0x7F00, 4096, [None])
    assert str(error.value) == (
        "cuMemMap(0x7f00, 0x1000, list): CUDA_ERROR_ILLEGAL_ADDRESS on rank 3; expected "
        "CUDA_SUCCESS"
    )
    assert isinstance(error.value, TileWeaveError)


def test_a_failure_on_a_stream_names_the_stream(fake, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    fake.answers = [(CUresult.CUDA_ERROR_ILLEGAL_ADDRESS, 0)]
    with pytest.raises(driver.DriverError) as error:
        driver.call("cuStreamWriteValue32", 0xABC0, 0x7F0000000000, 9, 0, stream=0xABC0)
    assert str(error.value) == (
        "cuStreamWriteValue32(0xabc0, 0x7f0000000000, 0x9, 0x0): CUDA_ERROR_ILLEGAL_ADDRESS on "
        "rank 0, stream 0xabc0; expected CUDA_SUCCESS"
    )


@pytest.mark.parametrize("missing", ["cuda", "cuda.bindings"])
def test_missing_bindings_say_what_to_install(monkeypatch, missing):
    for name in [n for n in sys.modules if n == "cuda" or n.startswith("cuda.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(driver.DriverError, match=r"\(pip install cuda-bindings\)"):
        driver.call("cuInit", 0)
