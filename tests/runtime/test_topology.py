"""Topology of a machine, from a stand-in for NVML and from output of nvidia-smi."""

from __future__ import annotations

import sys
import threading
import time
import types
from pathlib import Path

import pytest
import torch

from tileweave.runtime.host import topology as module
from tileweave.runtime.host.topology import Gpu, Topology, parse_matrix, topology

H200 = Gpu("NVIDIA H200", 150754820096, (9, 0), "")
L4 = Gpu("NVIDIA L4", 24152899584, (8, 9), "")

TOPO_H200 = """\
\t\x1b[4mGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tNIC1\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tNV18\tNV18\tNV18\tPIX\tSYS\t0-47,96-143\t0\t\tN/A
GPU1\tNV18\t X \tNV18\tNV18\tNODE\tSYS\t0-47,96-143\t0\t\tN/A
GPU2\tNV18\tNV18\t X \tNV18\tSYS\tPIX\t48-95,144-191\t1\t\tN/A
GPU3\tNV18\tNV18\tNV18\t X \tSYS\tNODE\t48-95,144-191\t1\t\tN/A
NIC0\tPIX\tNODE\tSYS\tSYS\t X \tSYS
NIC1\tSYS\tSYS\tPIX\tNODE\tSYS\t X

Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes
  NV#  = Connection traversing a bonded set of # NVLinks

NIC Legend:

  NIC0: mlx5_0
  NIC1: mlx5_1
"""

P2P_H200 = """\
 \tGPU0\tGPU1\tGPU2\tGPU3\t
 GPU0\tX\tOK\tOK\tOK\t
 GPU1\tOK\tX\tOK\tOK\t
 GPU2\tOK\tOK\tX\tOK\t
 GPU3\tOK\tOK\tOK\tX\t

Legend:

  X    = Self
  OK   = Status Ok
"""

TOPO_PCIE = """\
\tGPU0\tGPU1\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID
GPU0\t X \tPHB\t0-31\t0\t\tN/A
GPU1\tPHB\t X \t0-31\t0\t\tN/A
"""

P2P_PCIE = """\
 \tGPU0\tGPU1\t
 GPU0\tX\tCNS\t
 GPU1\tCNS\tX\t
"""


@pytest.fixture(autouse=True)
def bare_machine(monkeypatch, tmp_path):
    """Hide NVML, nvidia-smi, CUDA and cached results."""
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("TORCH_SYMM_MEM_DISABLE_MULTICAST", raising=False)

    def init():
        raise AssertionError("Torch not compiled with CUDA enabled")

    monkeypatch.setattr(torch.cuda, "init", init)
    module._query.cache_clear()
    yield
    module._query.cache_clear()


class NVMLError(Exception):
    pass


def nvml(gpus: list[Gpu], remote_of_link, nvlink_status=0, **overrides) -> types.ModuleType:
    """Return a pynvml with ``gpus``; ``remote_of_link(gpu, link)`` is a bus id, or None."""
    fake = types.ModuleType("pynvml")

    def remote(gpu, link):
        remote = remote_of_link(gpu, link)
        if remote is None:
            raise NVMLError("Not Supported")
        return types.SimpleNamespace(busId=remote)

    fake.NVMLError = NVMLError
    fake.NVML_NVLINK_MAX_LINKS = 36
    fake.NVML_FEATURE_ENABLED = 1
    fake.NVML_P2P_CAPS_INDEX_WRITE = 1
    fake.NVML_P2P_CAPS_INDEX_NVLINK = 2
    fake.NVML_P2P_STATUS_OK = 0
    fake.shut_down = 0

    def shutdown():
        fake.shut_down += 1

    functions = {
        "nvmlInit": lambda: None,
        "nvmlShutdown": shutdown,
        "nvmlSystemGetDriverVersion": lambda: "580.95.05",
        "nvmlDeviceGetCount": lambda: len(gpus),
        "nvmlDeviceGetHandleByIndex": lambda i: i,
        "nvmlDeviceGetName": lambda h: gpus[h].name,
        "nvmlDeviceGetMemoryInfo": lambda h: types.SimpleNamespace(total=gpus[h].memory_bytes),
        "nvmlDeviceGetCudaComputeCapability": lambda h: gpus[h].capability,
        "nvmlDeviceGetUUID": lambda h: f"GPU-uuid-{h}",
        "nvmlDeviceGetPciInfo": lambda h: types.SimpleNamespace(busId=bus(h)),
        "nvmlDeviceGetNvLinkState": lambda h, link: 1 if remote(h, link) else 0,
        "nvmlDeviceGetNvLinkRemotePciInfo": remote,
        "nvmlDeviceGetP2PStatus": lambda a, b, what: nvlink_status if what == 2 else 0,
    }
    for name, function in (functions | overrides).items():
        setattr(fake, name, function)
    return fake


def bus(gpu: int) -> str:
    return f"00000000:{0x1B + gpu:02X}:00.0"


def switched(gpu: int, link: int) -> str | None:
    """Connect 18 links, all of them to NVSwitches."""
    return f"00000000:{0xA0 + link % 4:02X}:00.0" if link < 18 else None


def install_smi(directory: Path, gpus: str, topo: str = "", p2p: str = "") -> None:
    """Install an nvidia-smi that prints this; without ``gpus`` it fails as without a driver."""
    for name, text in {"gpus": gpus, "topo": topo, "p2p": p2p}.items():
        (directory / name).write_text(text)
    script = directory / "nvidia-smi"
    script.write_text(
        f"""#!/bin/sh
cd {directory}
show() {{ while IFS= read -r line; do printf '%s\\n' "$line"; done; }}
case "$*" in
  *--query-gpu*)
    if [ -s gpus ]; then show <gpus; exit; fi
    echo "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver."; exit 9 ;;
  "topo -m") show <topo ;;
  "topo -p2p w") [ -s p2p ] || {{ echo "Invalid option"; exit 2; }}; show <p2p ;;
  *) exit 2 ;;
esac
"""
    )
    script.chmod(0o755)


QUERY_H200 = "".join(
    f"NVIDIA H200, 143771, 9.0, GPU-{i}0000000-0000-0000-0000-000000000000, 580.95.05\n"
    for i in range(4)
)


def test_nvswitch_joins_all_pairs(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", nvml([H200] * 4, switched))
    machine = topology()
    assert [g.name for g in machine.gpus] == ["NVIDIA H200"] * 4
    assert [g.uuid for g in machine.gpus] == [f"uuid-{i}" for i in range(4)]
    assert machine.nvlinks == tuple(tuple(0 if i == j else 18 for j in range(4)) for i in range(4))
    assert machine.p2p == ((True,) * 4,) * 4
    assert machine.driver == "580.95.05"
    assert sys.modules["pynvml"].shut_down == 1


def test_direct_links_count_for_their_pair(monkeypatch):
    # A chain 0 = 1 - 2: two links, then one.
    wiring = {0: [bus(1), bus(1)], 1: [bus(0), bus(0), bus(2)], 2: [bus(1)]}

    def remote(gpu, link):
        return wiring[gpu][link] if link < len(wiring[gpu]) else None

    monkeypatch.setitem(sys.modules, "pynvml", nvml([H200] * 3, remote))
    assert topology().nvlinks == ((0, 2, 0), (2, 0, 1), (0, 1, 0))


def test_switch_links_without_nvlink_between_the_pair_count_nothing(monkeypatch):
    fake = nvml([H200] * 2, switched, nvlink_status=1)
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    assert topology().nvlinks == ((0, 0), (0, 0))


def test_links_to_a_hidden_switch_count(monkeypatch):
    def no_remote(handle, link):
        raise NVMLError("Not Supported")

    fake = nvml([H200] * 2, switched, nvmlDeviceGetNvLinkRemotePciInfo=no_remote)
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    assert topology().nvlinks == ((0, 18), (18, 0))


def test_pcie_machine_has_no_links(monkeypatch):
    def refuse(a, b, what):
        raise NVMLError("Not Supported")

    fake = nvml([L4] * 2, lambda gpu, link: None, nvmlDeviceGetP2PStatus=refuse)
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    machine = topology()
    assert machine.nvlinks == ((0, 0), (0, 0))
    assert machine.p2p == ((True, False), (False, True))
    assert "NVML: P2P status: Not Supported" in machine.notes


def test_smi_stands_in_for_nvml(tmp_path):
    install_smi(tmp_path, QUERY_H200, TOPO_H200, P2P_H200)
    machine = topology()
    assert machine.gpus[3] == Gpu(
        "NVIDIA H200", 143771 << 20, (9, 0), "30000000-0000-0000-0000-000000000000"
    )
    assert machine.nvlinks == tuple(tuple(0 if i == j else 18 for j in range(4)) for i in range(4))
    assert machine.p2p == ((True,) * 4,) * 4
    assert machine.driver == "580.95.05"
    assert machine.notes[0] == "NVML: the Python package nvidia-ml-py is not installed"


def test_smi_stands_in_when_nvml_fails(monkeypatch, tmp_path):
    def init():
        raise NVMLError("Driver/library version mismatch")

    monkeypatch.setitem(sys.modules, "pynvml", nvml([], switched, nvmlInit=init))
    install_smi(tmp_path, QUERY_H200, TOPO_H200, P2P_H200)
    machine = topology()
    assert len(machine.gpus) == 4
    assert machine.notes[0] == "NVML: Driver/library version mismatch"


def test_smi_on_a_pcie_machine(tmp_path):
    install_smi(tmp_path, "NVIDIA L4, 23034, 8.9, GPU-a, 1\nNVIDIA L4, 23034, 8.9, GPU-b, 1\n")
    (tmp_path / "topo").write_text(TOPO_PCIE)
    (tmp_path / "p2p").write_text(P2P_PCIE)
    machine = topology()
    assert machine.nvlinks == ((0, 0), (0, 0))
    assert machine.p2p == ((True, False), (False, True))


def test_smi_without_its_p2p_question(tmp_path):
    install_smi(tmp_path, QUERY_H200, TOPO_H200)
    machine = topology()
    assert machine.nvlinks[0] == (0, 18, 18, 18)
    assert machine.p2p[0] == (True, False, False, False)
    assert "nvidia-smi topo: exit 2: Invalid option" in machine.notes


@pytest.mark.parametrize("fields", ["NVIDIA H200, [N/A], [N/A], GPU-a, 1"])
def test_smi_fields_without_answer(tmp_path, fields):
    install_smi(tmp_path, fields + "\n", TOPO_PCIE, P2P_PCIE)
    assert topology().gpus == (Gpu("NVIDIA H200", 0, (0, 0), "a"),)


def test_nothing_answers(tmp_path):
    install_smi(tmp_path, "")
    machine = topology()
    assert machine.gpus == () and not machine.multicast
    assert machine.notes == (
        "NVML: the Python package nvidia-ml-py is not installed",
        "nvidia-smi --query-gpu: exit 9: "
        "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.",
        "torch: Torch not compiled with CUDA enabled",
    )


def test_no_smi():
    assert "nvidia-smi: not on PATH" in topology().notes


def test_matrix_leaves_other_devices_out():
    matrix = parse_matrix(TOPO_H200)
    assert set(matrix) == {(i, j) for i in range(4) for j in range(4)}
    assert matrix[2, 3] == "NV18" and matrix[1, 1] == "X"


def torch_with(monkeypatch, uuids: list[str]) -> None:
    properties = [
        types.SimpleNamespace(name="NVIDIA H200", total_memory=7, major=9, minor=0, uuid=uuid)
        for uuid in uuids
    ]
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(uuids))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: properties[i])
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda i, j: (i, j) != (0, 1))


def test_torch_decides_which_gpus_in_which_order(monkeypatch):
    wiring = {0: [bus(2)], 1: [], 2: [bus(0)]}

    def remote(gpu, link):
        return wiring[gpu][link] if link < len(wiring[gpu]) else None

    monkeypatch.setitem(sys.modules, "pynvml", nvml([H200] * 3, remote))
    torch_with(monkeypatch, ["uuid-2", "uuid-0"])
    machine = topology()
    assert [g.uuid for g in machine.gpus] == ["uuid-2", "uuid-0"]
    assert machine.nvlinks == ((0, 1), (1, 0))
    assert machine.p2p == ((True, False), (True, True))


def test_a_gpu_that_nvml_does_not_know(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", nvml([H200] * 2, switched))
    torch_with(monkeypatch, ["uuid-0", "slice"])
    machine = topology()
    assert machine.nvlinks == ((0, 0), (0, 0))
    assert "NVLink of GPU 1: unknown, NVML has no GPU slice" in machine.notes


def driver_with(monkeypatch, multicast: list[int], status: int = 0) -> list[str]:
    """Install a cuda.bindings.driver with these answers; return the names of its calls."""
    calls: list[str] = []
    driver = types.ModuleType("cuda.bindings.driver")
    attribute = types.SimpleNamespace(CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED=132)
    driver.CUdevice_attribute = attribute

    def answer(name, value):
        def call(*args):
            calls.append(name)
            return (status, *value(*args))

        return call

    driver.cuInit = answer("cuInit", lambda flags: ())
    driver.cuDeviceGet = answer("cuDeviceGet", lambda i: (i,))
    driver.cuDeviceGetAttribute = answer("cuDeviceGetAttribute", lambda a, i: (multicast[i],))
    bindings = types.ModuleType("cuda.bindings")
    bindings.driver = driver
    monkeypatch.setitem(sys.modules, "cuda", types.ModuleType("cuda"))
    monkeypatch.setitem(sys.modules, "cuda.bindings", bindings)
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", driver)
    return calls


@pytest.mark.parametrize(
    ("supported", "status", "refusal"),
    [
        ([1, 1], 0, ""),
        ([1, 0], 0, "GPU 1 does not support it"),
        ([1, 1], 100, "unknown, the driver answered 100"),
    ],
)
def test_multicast(monkeypatch, supported, status, refusal):
    monkeypatch.setitem(sys.modules, "pynvml", nvml([H200] * 2, switched))
    calls = driver_with(monkeypatch, supported, status)
    machine = topology()
    assert (machine.multicast, machine.multicast_refusal) == (not refusal, refusal)
    assert set(calls) <= {"cuInit", "cuDeviceGet", "cuDeviceGetAttribute"}


def test_multicast_can_be_forbidden(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", nvml([H200] * 2, switched))
    calls = driver_with(monkeypatch, [1, 1])
    monkeypatch.setenv("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    machine = topology()
    assert not machine.multicast
    assert machine.multicast_refusal == "TORCH_SYMM_MEM_DISABLE_MULTICAST=1 forbids it"
    assert calls == []


def test_multicast_without_bindings(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", nvml([H200] * 2, switched))
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    assert topology().multicast_refusal.endswith("cuda-bindings is not installed")


def test_asked_once_by_many_threads(monkeypatch):
    requests = []

    def init():
        requests.append(threading.get_ident())
        time.sleep(0.05)

    monkeypatch.setitem(sys.modules, "pynvml", nvml([H200] * 2, switched, nvmlInit=init))
    start = threading.Barrier(8)
    answers: list[Topology] = []

    def ask():
        start.wait()
        answers.append(topology())

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(requests) == 1
    assert len(answers) == 8 and all(answer is answers[0] for answer in answers)
