"""GPUs of this machine and their connections, queried once per process."""

from __future__ import annotations

import os
import re
import subprocess
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

Matrix = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Gpu:
    """One GPU.

    Attributes:
        capability: compute capability, (9, 0) for sm_90; (0, 0) if unknown.
        uuid: without the prefix ``GPU-``.
    """

    name: str
    memory_bytes: int
    capability: tuple[int, int]
    uuid: str


@dataclass(frozen=True)
class Topology:
    """GPUs that this process sees, in torch's order of devices.

    If torch cannot use CUDA, these are all GPUs of the machine in NVML's order.

    Attributes:
        gpus: the GPUs.
        nvlinks: ``nvlinks[i][j]``: number of NVLink links between GPUs i and j.
        p2p: ``p2p[i][j]``: whether GPU i can access GPU j's memory.
        multicast: whether every GPU has NVLink multicast and nothing forbids its use.
        multicast_refusal: why multicast cannot be used; empty if it can.
        driver: version of the driver; empty if unknown.
        notes: each query that failed, and why.
    """

    gpus: tuple[Gpu, ...] = ()
    nvlinks: Matrix = ()
    p2p: Matrix = ()
    multicast: bool = False
    multicast_refusal: str = ""
    driver: str = ""
    notes: tuple[str, ...] = field(default=())


class _Unavailable(Exception):
    """A source of information is missing; the message says which and why."""


_lock = threading.Lock()


def topology() -> Topology:
    """Return the topology. Thread-safe; the first call queries it, later calls return its result.

    The source is NVML, or ``nvidia-smi`` if NVML is missing. It never raises: unknown values are
    zero or False, with the reason in ``notes``.
    """
    with _lock:
        return _query()


@cache
def _query() -> Topology:
    machine, notes = Topology(), []
    for source in (_nvml, _nvidia_smi):
        try:
            machine = source()
            break
        except _Unavailable as error:
            notes.append(str(error))
    machine = _as_torch_sees(machine, notes)
    refusal = _multicast_refusal(len(machine.gpus))
    return replace(
        machine,
        multicast=not refusal,
        multicast_refusal=refusal,
        notes=(*notes, *machine.notes),
    )


def _matrix(count: int, entry: Callable[[int, int], Any]) -> Any:
    return tuple(tuple(entry(i, j) for j in range(count)) for i in range(count))


def _first_line(error: object) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _nvml() -> Topology:
    try:
        import pynvml as nvml
    except ImportError:
        raise _Unavailable("NVML: the Python package nvidia-ml-py is not installed") from None
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        raise _Unavailable(f"NVML: {_first_line(error)}") from None
    try:
        handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
        gpus = tuple(
            Gpu(
                nvml.nvmlDeviceGetName(h),
                nvml.nvmlDeviceGetMemoryInfo(h).total,
                tuple(nvml.nvmlDeviceGetCudaComputeCapability(h)),
                nvml.nvmlDeviceGetUUID(h).removeprefix("GPU-"),
            )
            for h in handles
        )
        notes: list[str] = []
        writes = _nvml_p2p(nvml, handles, nvml.NVML_P2P_CAPS_INDEX_WRITE, notes)
        return Topology(
            gpus,
            nvlinks=_nvml_links(nvml, handles, notes),
            p2p=writes,
            driver=nvml.nvmlSystemGetDriverVersion(),
            notes=tuple(dict.fromkeys(notes)),
        )
    except nvml.NVMLError as error:
        raise _Unavailable(f"NVML: {_first_line(error)}") from None
    finally:
        nvml.nvmlShutdown()


def _nvml_p2p(nvml: Any, handles: list[Any], capability: int, notes: list[str]) -> Matrix:
    def is_capable(i: int, j: int) -> bool:
        if i == j:
            return True
        try:
            status = nvml.nvmlDeviceGetP2PStatus(handles[i], handles[j], capability)
        except nvml.NVMLError as error:
            notes.append(f"NVML: P2P status: {_first_line(error)}")
            return False
        return status == nvml.NVML_P2P_STATUS_OK

    return _matrix(len(handles), is_capable)


def _nvml_links(nvml: Any, handles: list[Any], notes: list[str]) -> Matrix:
    """Return the number of links between each two GPUs.

    A link that ends at a GPU counts for that pair. The others end at switches, which connect all
    pairs between which NVML reports NVLink.
    """
    buses = [nvml.nvmlDeviceGetPciInfo(h).busId for h in handles]
    direct = [[0] * len(handles) for _ in handles]
    switched = [0] * len(handles)
    for i, handle in enumerate(handles):
        for link in range(nvml.NVML_NVLINK_MAX_LINKS):
            try:
                if nvml.nvmlDeviceGetNvLinkState(handle, link) != nvml.NVML_FEATURE_ENABLED:
                    continue
            except nvml.NVMLError:
                continue  # the GPU has fewer links
            try:
                remote = nvml.nvmlDeviceGetNvLinkRemotePciInfo(handle, link).busId
            except nvml.NVMLError:
                remote = ""  # a switch that a virtual machine does not see
            if remote in buses:
                direct[i][buses.index(remote)] += 1
            else:
                switched[i] += 1
    joined = (
        _nvml_p2p(nvml, handles, nvml.NVML_P2P_CAPS_INDEX_NVLINK, notes) if any(switched) else None
    )

    def links(i: int, j: int) -> int:
        if i == j:
            return 0
        return direct[i][j] or (min(switched[i], switched[j]) if joined and joined[i][j] else 0)

    return _matrix(len(handles), links)


def _nvidia_smi() -> Topology:
    fields = "name,memory.total,compute_cap,uuid,driver_version"
    rows = _smi(f"--query-gpu={fields}", "--format=csv,noheader,nounits").splitlines()
    gpus, driver = [], ""
    for row in filter(str.strip, rows):
        values = [value.strip() for value in row.split(",")]
        if len(values) != 5:
            raise _Unavailable(f"nvidia-smi: unexpected answer {row.strip()!r}")
        name, mebibytes, capability, uuid, driver = values
        digits = re.fullmatch(r"(\d+)\.(\d+)", capability)
        gpus.append(
            Gpu(
                name,
                int(mebibytes) << 20 if mebibytes.isdigit() else 0,
                (int(digits[1]), int(digits[2])) if digits else (0, 0),
                uuid.removeprefix("GPU-"),
            )
        )
    notes: list[str] = []

    def ask(*arguments: str) -> dict[tuple[int, int], str]:
        try:
            return parse_matrix(_smi("topo", *arguments))
        except _Unavailable as error:
            notes.append(str(error))
            return {}

    links, writes = ask("-m"), ask("-p2p", "w")

    def count(i: int, j: int) -> int:
        match = re.fullmatch(r"NV(\d+)", links.get((i, j), ""))
        return int(match[1]) if match else 0

    return Topology(
        tuple(gpus),
        nvlinks=_matrix(len(gpus), count),
        p2p=_matrix(len(gpus), lambda i, j: i == j or writes.get((i, j)) == "OK"),
        driver=driver,
        notes=tuple(notes),
    )


def _smi(*arguments: str) -> str:
    command = ["nvidia-smi", *arguments]
    try:
        process = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except FileNotFoundError:
        raise _Unavailable("nvidia-smi: not on PATH") from None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise _Unavailable(f"nvidia-smi: {_first_line(error)}") from None
    if process.returncode != 0:
        output = _first_line(process.stderr.strip() or process.stdout.strip() or "no output")
        question = arguments[0].split("=")[0]
        raise _Unavailable(f"nvidia-smi {question}: exit {process.returncode}: {output}")
    return process.stdout


def parse_matrix(text: str) -> dict[tuple[int, int], str]:
    """Parse the matrix between GPUs that ``nvidia-smi topo`` prints: (row, column) -> entry.

    Other devices (network cards) and other columns (affinities) are skipped.
    """
    entries: dict[tuple[int, int], str] = {}
    columns: list[int] = []
    for line in re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines():
        fields = line.split()
        gpus = [int(field[3:]) for field in fields if re.fullmatch(r"GPU\d+", field)]
        if not columns:
            columns = gpus
        elif gpus and fields[0] == f"GPU{gpus[0]}":
            for column, field in zip(columns, fields[1:], strict=False):
                entries[gpus[0], column] = field
    return entries


def _as_torch_sees(machine: Topology, notes: list[str]) -> Topology:
    """Return ``machine`` with the GPUs that torch sees, in its order, and CUDA's report of P2P."""
    import torch

    try:
        torch.cuda.init()
        properties = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
        count = len(properties)
        p2p = _matrix(count, lambda i, j: i == j or torch.cuda.can_device_access_peer(i, j))
    except Exception as error:  # a build without CUDA, no driver, a driver too old, ...
        notes.append(f"torch: {_first_line(error)}")
        return machine
    uuids = [gpu.uuid for gpu in machine.gpus]
    places: list[int | None] = []
    gpus = []
    for index, gpu in enumerate(properties):
        uuid = str(gpu.uuid)
        places.append(uuids.index(uuid) if uuid in uuids else None)
        capability = (gpu.major, gpu.minor)
        gpus.append(Gpu(gpu.name, gpu.total_memory, capability, uuid))
        if places[-1] is None and machine.gpus:
            notes.append(f"NVLink of GPU {index}: unknown, NVML has no GPU {uuid}")

    def links(i: int, j: int) -> int:
        a, b = places[i], places[j]
        return 0 if a is None or b is None else machine.nvlinks[a][b]

    return replace(machine, gpus=tuple(gpus), nvlinks=_matrix(count, links), p2p=p2p)


def _multicast_refusal(gpus: int) -> str:
    """Return why NVLink multicast cannot be used; empty if it can. Only queries the driver."""
    if gpus == 0:
        return "there is no GPU"
    if os.environ.get("TORCH_SYMM_MEM_DISABLE_MULTICAST") == "1":
        return "TORCH_SYMM_MEM_DISABLE_MULTICAST=1 forbids it"
    try:
        from cuda.bindings import driver
    except ImportError:
        return "unknown, the Python package cuda-bindings is not installed"
    attribute = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED
    try:
        _checked(driver.cuInit(0))
        for index in range(gpus):
            if not _checked(
                driver.cuDeviceGetAttribute(attribute, _checked(driver.cuDeviceGet(index)))
            ):
                return f"GPU {index} does not support it"
    except Exception as error:  # the bindings raise RuntimeError where there is no driver
        return f"unknown, {_first_line(error)}"
    return ""


def _checked(answer: tuple[Any, ...]) -> Any:
    status, *values = answer
    if int(status) != 0:
        raise _Unavailable(f"the driver answered {getattr(status, 'name', status)}")
    return values[0] if values else None
