"""The native part does the same as Python, in the same order.

The driver and a kernel are stand-ins, written in C; memory is real.
"""

import ctypes
import subprocess
import sys
import threading
import time
import types
import warnings
from collections.abc import Sequence
from pathlib import Path

import pytest
import tilelang
import tilelang.language as T
import torch
import tvm_ffi
from tilelang import env

import tileweave as tw
from tests import warm
from tileweave.runtime.executor import enqueue, operations, recorded_calls
from tileweave.runtime.executor.operations import (
    DriverCall,
    KernelLaunch,
    Place,
    RowsCopy,
    StreamMemOps,
)
from tileweave.runtime.executor.recorded_calls import JoinedCall, RecordedCall
from tileweave.runtime.host import driver, native
from tileweave.runtime.kernel.kernel import Kernel
from tileweave.runtime.plans.regions import Rows

pytestmark = pytest.mark.long

HERE = Path(__file__).parents[1] / "native"
STREAM, SIDE, EVENT = 0x10, 0x20, 0x30
FUNCTIONS = ("copy", "rows", "write", "record", "wait", "kernel", "wait value", "words")


class Asked(ctypes.Structure):
    _fields_ = (("function", ctypes.c_int64), ("arguments", ctypes.c_uint64 * 4))


class Any(ctypes.Structure):
    """TVMFFIAny of a number or a tensor."""

    _fields_ = (("type", ctypes.c_int32), ("_", ctypes.c_int32), ("value", ctypes.c_int64))

    INT, FLOAT, TENSOR = 1, 3, 7


class Tensor(ctypes.Structure):
    """DLTensor."""

    _fields_ = (
        ("data", ctypes.c_uint64), ("device_type", ctypes.c_int32), ("device", ctypes.c_int32),
        ("ndim", ctypes.c_int32), ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16), ("shape", ctypes.c_uint64), ("strides", ctypes.c_uint64),
        ("offset", ctypes.c_uint64),
    )  # fmt: skip


class StandIn:
    """Stand-ins for driver and kernel, with the calls since the last look."""

    def __init__(self, path: Path) -> None:
        self.kernel = tvm_ffi.load_module(str(path))["kernel"]
        self.library = ctypes.CDLL(str(path))
        self.fails_at = ctypes.c_int64.in_dll(self.library, "fails_at")
        self._count = ctypes.c_int64.in_dll(self.library, "count")
        self._asked = (Asked * 256).in_dll(self.library, "asked")

    def arguments(self) -> list:
        """Return the arguments of the kernel's last launch: numbers, and address, sizes and type of
        tensors."""
        results = []
        for i, any_ in enumerate((Any * 16).in_dll(self.library, "given")):
            if any_.type == Any.TENSOR:
                tensor = (Tensor * 16).in_dll(self.library, "tensors")[i]
                sizes = (ctypes.c_int64 * 64).in_dll(self.library, "sizes")[4 * i : 4 * i + 4]
                results.append((tensor.data + tensor.offset, sizes[: tensor.ndim],
                              sizes[2 : 2 + tensor.ndim], tensor.code, tensor.bits))  # fmt: skip
            elif any_.type == Any.FLOAT:
                results.append(ctypes.c_double.from_buffer(any_, 8).value)
            elif any_.type == Any.INT:
                results.append(any_.value)
        return results

    def asked(self) -> list[tuple]:
        results = [(FUNCTIONS[a.function], *a.arguments) for a in self._asked[: self._count.value]]
        self._count.value = 0
        return results


@pytest.fixture(autouse=True)
def by_default(monkeypatch):
    monkeypatch.delenv("TILEWEAVE_NATIVE", raising=False)


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("driver") / "libcuda.so"
    ffi = tvm_ffi.libinfo
    lib = Path(ffi.find_libtvm_ffi()).parent
    includes = {f"-I{i}" for i in (ffi.find_include_path(), ffi.find_dlpack_include_path())}
    subprocess.run(
        ["cc", "-shared", "-fPIC", *includes, str(HERE / "driver.c"), "-o", str(path), f"-L{lib}",
         "-ltvm_ffi"], check=True,
    )  # fmt: skip
    return path


@pytest.fixture
def stand_in(library, monkeypatch) -> StandIn:
    monkeypatch.setattr(enqueue, "DRIVER", str(library))
    monkeypatch.setattr(recorded_calls, "begin_call", lambda *_: False)
    stand_in = StandIn(library)
    stand_in.asked()
    stand_in.fails_at.value = -1
    return stand_in


def stream(handle: int) -> types.SimpleNamespace:
    return types.SimpleNamespace(cuda_stream=handle, device=torch.device("cuda", 1))


def launches(function: Any, *args: object, implicit: Sequence[torch.Tensor] = ()) -> KernelLaunch:
    kernel = Kernel(None, None, {str(i): t for i, t in enumerate(implicit)})
    kernel.__dict__["launch"] = function
    return KernelLaunch(stream(SIDE), stream(STREAM), kernel, (*args, *implicit))


def made(given, *done) -> RecordedCall:
    call = enqueue.enqueuer(done, given)
    assert call is not None
    watchdog = types.SimpleNamespace(raise_if_deadlocked=lambda: None)
    session = types.SimpleNamespace(watchdog=watchdog)
    return RecordedCall(
        session, None, done, [o.kernel for o in done if isinstance(o, KernelLaunch)], call
    )


def at(*tensors: torch.Tensor) -> tuple[list[torch.Tensor], list[int]]:
    return list(tensors), [t.data_ptr() for t in tensors]


def ints(*shape: int) -> torch.Tensor:
    return torch.randint(1000, shape, dtype=torch.int32)


def test_driver_calls(stand_in):
    to, flags = torch.zeros(4, 8, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    first, second = ints(4, 8), ints(4, 8)
    word = flags.data_ptr() + 4
    call = made(
        [first],
        DriverCall("cuEventRecord", STREAM, (EVENT, STREAM)),
        DriverCall("cuStreamWaitEvent", SIDE, (SIDE, EVENT, 0)),
        DriverCall("cuMemcpyDtoDAsync", SIDE, (to.data_ptr(), Place(0, 32), 64, SIDE)),
        RowsCopy(SIDE, to.data_ptr() + 64, Place(0, 8), Rows(2, 12, 32, 16)),
        StreamMemOps(SIDE, ((1, Place(0, 4), 0xFFFFFFFE), (2, word, 0xFFFFFFFF))),
    )
    for given in (first, second):
        call(*at(given))
        source = given.data_ptr()
        assert stand_in.asked() == [
            ("record", EVENT, STREAM, 0, 0),
            ("wait", SIDE, EVENT, 0, 0),
            ("copy", to.data_ptr(), source + 32, 64, SIDE),
            ("rows", to.data_ptr() + 64, source + 8, 22, SIDE),
            ("words", SIDE, 2, 0, 0),
            ("wait value", source + 4, 0xFFFFFFFE, 0, 0),
            ("write", word, 0xFFFFFFFF, 0, 0),
        ]
        assert torch.equal(to[:2], given[1:3])
        flat = given.flatten()
        assert torch.equal(to[2:, :3], torch.stack([flat[2:5], flat[6:9]]))
        assert not to[2:, 3:].any()
        assert flags.tolist() == [0, -1]


def test_kernels(stand_in):
    """Kernels receive the tensors, implicit tensors and numbers of this call, on their stream, in
    order."""
    implicit, b, a = torch.zeros(3), torch.zeros(5, dtype=torch.int64), ints(4, 8)[:, :4]
    wait = DriverCall("cuStreamWaitEvent", SIDE, (SIDE, EVENT, 0))
    kernel = launches(stand_in.kernel, Place(1, 0), 3, 0.5, Place(0, 0), implicit=[implicit])
    call = made([b, a], wait, kernel, wait)
    for given in ((b, a), (torch.zeros(5, dtype=torch.int64), ints(4, 8)[:, :4])):
        call(*at(*given))
        assert [what[:3] for what in stand_in.asked()] == [
            ("wait", SIDE, EVENT), ("kernel", SIDE, 5), ("wait", SIDE, EVENT)
        ]  # fmt: skip
        assert stand_in.arguments() == [
            (given[1].data_ptr(), [4, 4], [8, 1], 0, 32), 3, 0.5,
            (given[0].data_ptr(), [5], [1], 0, 64), (implicit.data_ptr(), [3], [1], 2, 32),
        ]  # fmt: skip
    assert tvm_ffi.get_raw_stream(tvm_ffi.device("cuda", 1)) == 0


def joined(*parts: enqueue.Part) -> JoinedCall:
    call = enqueue.enqueuer_of(parts)
    assert call is not None
    watchdog = types.SimpleNamespace(raise_if_deadlocked=lambda: None)
    return JoinedCall(types.SimpleNamespace(watchdog=watchdog), None, parts, [], call)


def test_one_call_enqueues_the_operations_of_several(stand_in):
    """Each finds its tensors at other places, at bytes after a tensor, or at a fixed address."""
    fixed, like, first = ints(2), ints(2), (ints(4), ints(16))
    copy = DriverCall("cuMemcpyDtoDAsync", SIDE, (Place(1, 4), Place(0, 8), 4, SIDE))
    word = StreamMemOps(SIDE, ((2, Place(0, 4), 7),))
    rows = RowsCopy(SIDE, Place(1, 8), Place(0, 0), Rows(2, 4, 8, 8))
    kernel = launches(stand_in.kernel, Place(1, 0), 3, Place(0, 0), Place(2, 0))
    place = Place(-1, fixed.data_ptr())
    call = joined(
        enqueue.Part([copy, rows], first, [Place(0, 0), Place(1, 16)]),
        enqueue.Part([word, kernel], [like, first[0], fixed], [Place(1, 32), Place(0, 0), place]),
    )
    for x, memory in (first, (ints(4), ints(16))):
        right = memory.clone()
        right[5], right[6], right[8], right[9] = x[2], x[0], x[2], 7
        call(*at(x, memory))
        assert torch.equal(memory, right)
        asked = [name for name, *_ in stand_in.asked()]
        assert asked == ["copy", "rows", "words", "write", "kernel"]
        assert stand_in.arguments()[:4] == [
            (x.data_ptr(), [4], [1], 0, 32), 3, (memory.data_ptr() + 32, [2], [1], 0, 32),
            (fixed.data_ptr(), [2], [1], 0, 32),
        ]  # fmt: skip


def test_a_failure_in_a_part_names_its_addresses(stand_in, monkeypatch):
    bindings = types.SimpleNamespace(
        CUresult=lambda status: types.SimpleNamespace(name=f"STATUS {status}")
    )
    for module in (driver, recorded_calls):
        monkeypatch.setattr(module, "driver", lambda: bindings)
    monkeypatch.setenv("RANK", "2")
    x, memory = ints(4), ints(16)
    copy = DriverCall("cuMemcpyDtoDAsync", SIDE, (Place(0, 4), Place(1, 0), 4, SIDE))
    parts = (
        enqueue.Part([copy], [memory, x], [Place(1, 0), Place(0, 0)]),
        enqueue.Part([copy], [memory, x], [Place(1, 32), Place(0, 8)]),
    )
    stand_in.fails_at.value = 1
    addresses = f"{memory.data_ptr() + 36:#x}, {x.data_ptr() + 8:#x}, 0x4, 0x20"
    with pytest.raises(driver.DriverError, match=rf"cuMemcpyDtoDAsync\({addresses}\): STATUS 700"):
        joined(*parts)(*at(x, memory))


def test_tensors_of_earlier_calls_are_not_kept(stand_in):
    a, b = ints(4), ints(4)

    def users(tensor):
        return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata), sys.getrefcount(tensor)

    before = users(a), users(b)
    call = made([a], launches(stand_in.kernel, Place(0, 0)))
    call(*at(b))
    assert (users(a), users(b)) == before
    assert len(stand_in.asked()) == 1


def test_a_failing_kernel_says_why_and_ends_the_call(stand_in):
    a = ints(2)
    wait = DriverCall("cuStreamWaitEvent", SIDE, (SIDE, EVENT, 0))
    call = made([a], wait, launches(stand_in.kernel, Place(0, 0)), wait)
    stand_in.fails_at.value = 1
    with pytest.raises(ValueError, match="device_type mismatch"):
        call(*at(a))
    assert len(stand_in.asked()) == 1
    assert tvm_ffi.get_raw_stream(tvm_ffi.device("cuda", 1)) == 0


@pytest.mark.parametrize("fails_at", [1, 2])
def test_a_failure_of_the_driver_is_told_as_from_python(stand_in, monkeypatch, fails_at):
    a, to = ints(16), torch.zeros(16, dtype=torch.int32)
    done = (
        DriverCall("cuEventRecord", STREAM, (EVENT, STREAM)),
        DriverCall("cuMemcpyDtoDAsync", SIDE, (to.data_ptr(), Place(0, 4), 16, SIDE)),
        RowsCopy(SIDE, to.data_ptr(), Place(0, 0), Rows(2, 4, 8, 8)),
        DriverCall("cuStreamWaitEvent", SIDE, (SIDE, EVENT, 0)),
    )

    class CUDA_MEMCPY2D: ...

    bindings = types.SimpleNamespace(
        CUresult=lambda status: types.SimpleNamespace(name=f"STATUS {status}"),
        CUDA_MEMCPY2D=CUDA_MEMCPY2D, CUmemorytype=types.SimpleNamespace(CU_MEMORYTYPE_DEVICE=2),
    )  # fmt: skip
    for module in (operations, driver):
        monkeypatch.setattr(module, "driver", lambda: bindings)
    monkeypatch.setattr("tileweave.runtime.executor.recorded_calls.driver", lambda: bindings)
    monkeypatch.setenv("RANK", "2")
    call = made([a], *done)
    stand_in.fails_at.value = fails_at
    with pytest.raises(driver.DriverError) as error:
        call(*at(a))
    shown = ("CUDA_MEMCPY2D, 0x20" if fails_at == 2 else
             f"{to.data_ptr():#x}, {a.data_ptr() + 4:#x}, 0x10, 0x20")  # fmt: skip
    name = done[fails_at].name
    assert str(error.value) == (
        f"{name}({shown}): STATUS 700 on rank 2, stream 0x20; expected CUDA_SUCCESS"
    )
    assert len(stand_in.asked()) == fails_at


def test_what_tilelang_compiles(stand_in, nvcc):
    """TileLang's host code accepts these arguments, and refuses CPU memory without a GPU."""

    @T.prim_func
    def nothing(A: T.Tensor((4, 8), "int32"), x: T.float32, i: T.int32):
        with T.Kernel(1, threads=32):
            A[0, 0] = i

    target = {"kind": "cuda", "arch": "sm_80"}
    kernel = Kernel(tilelang.compile(nothing, target=target), nothing)
    launch = KernelLaunch(stream(SIDE), stream(STREAM), kernel, (Place(0, 0), 0.5, 3))
    for A, message in (
        (ints(4, 8), "input A device_type mismatch, expected cuda"),
        (ints(4), "input A ndim mismatch, expected 2"),
        (ints(4, 8).float(), "input A dtype mismatch, expected int32"),
    ):
        with pytest.raises(RuntimeError, match=message):
            made([A], launch)(*at(A))
        with pytest.raises(RuntimeError, match=message):
            kernel.launch(A, 0.5, 3)


def test_only_kernels_of_tvm_are_launched_natively(stand_in):
    assert enqueue.enqueuer([launches(print, Place(0, 0))], [ints(1)]) is None


def test_a_missing_driver_is_named(monkeypatch):
    monkeypatch.setattr(enqueue, "DRIVER", "libno-such-driver.so")
    with pytest.raises(RuntimeError, match=r"libno-such-driver\.so"):
        enqueue.enqueuer([], [])


def test_python_remains(monkeypatch, tmp_path):
    """Python is used if it is asked for, and, with a message, if nothing can be compiled."""
    monkeypatch.setenv("TILEWEAVE_NATIVE", "0")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert enqueue.enqueuer([], []) is None
    monkeypatch.setenv("TILEWEAVE_NATIVE", "yes")
    with pytest.raises(tw.TileWeaveError, match="TILEWEAVE_NATIVE='yes'; expected 0 or 1"):
        enqueue.enqueuer([], [])
    for compiler, why in (
        (None, "no C.. compiler"),
        ("false", "false refuses the native part"),
        ("'c++", 'CXX="\'c\\+\\+": No closing quotation'),
    ):
        if compiler is None:
            monkeypatch.delenv("CXX", raising=False)
            monkeypatch.setenv("PATH", str(tmp_path))
        else:
            monkeypatch.undo()
            monkeypatch.setenv("CXX", compiler)
        monkeypatch.delenv("TILEWEAVE_NATIVE", raising=False)
        native._library.cache_clear()
        with pytest.warns(UserWarning, match=f"enqueued from Python.*{why}"):
            assert enqueue.enqueuer([], []) is None
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert enqueue.enqueuer([], []) is None
    native._library.cache_clear()


@pytest.mark.parametrize("damage", ["truncated", "empty", "changed"])
def test_a_damaged_library_in_the_cache_is_compiled_again(monkeypatch, tmp_path, damage):
    """Loading a truncated library ended the process with SIGBUS, so the test runs in its own
    process."""
    program = (
        "import sys, warnings; from tilelang import env\n"
        "from tileweave.runtime.host import native\n"
        "warnings.simplefilter('error'); env.TILELANG_CACHE_DIR = sys.argv[1]\n"
        "print(native.library() is not None)"
    )
    load = [*warm.python(), "-c", program, str(tmp_path)]
    monkeypatch.setattr(env, "TILELANG_CACHE_DIR", str(tmp_path))
    whole = native.built().read_bytes()
    at = len(whole) // 2
    damaged = {"truncated": whole[:at], "empty": b"", "changed": whole[:at] + whole[at + 1 :]}
    native.built().write_bytes(damaged[damage])
    done = subprocess.run(load, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr
    (library,) = (tmp_path / "tileweave").iterdir()
    assert native.is_intact(library)


def test_an_intact_library_in_the_cache_is_not_compiled_again(monkeypatch, tmp_path):
    monkeypatch.setattr(env, "TILELANG_CACHE_DIR", str(tmp_path))
    first = native.built()
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("compiled again"))
    assert native.built() == first


def test_it_is_built_ahead_and_only_library_reports_what_fails(monkeypatch, tmp_path):
    monkeypatch.setattr(env, "TILELANG_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("CXX", "false")
    native._library.cache_clear()
    begun = threading.active_count()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        native.build_ahead()
        wait_for_threads(begun)
    assert not list(tmp_path.rglob("*.so"))
    monkeypatch.delenv("CXX")
    native.build_ahead()
    wait_for_threads(begun)
    (library,) = tmp_path.rglob("*.so")
    assert native.built() == library


def wait_for_threads(count: int) -> None:
    while threading.active_count() > count:
        time.sleep(0.01)


def test_it_says_of_the_driver_what_cuda_h_says(nvcc, tmp_path):
    includes = [native.SOURCES[0].parent, tvm_ffi.libinfo.find_include_path()]
    done = subprocess.run(
        [nvcc, "-std=c++17", *(f"-I{i}" for i in includes), "-c", str(HERE / "layout.cc"),
         "-o", str(tmp_path / "layout.o")], capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
