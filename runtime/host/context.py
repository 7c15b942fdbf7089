"""Context that all kernels read, and the record that a kernel writes for the host. ``context.cuh``
declares the same structures."""

from __future__ import annotations

import ctypes

import torch


class Record(ctypes.Structure):
    """A wait that timed out; the device writes it to pinned host memory."""

    _fields_ = (
        ("state", ctypes.c_uint32),
        ("loc", ctypes.c_int32),
        ("rank", ctypes.c_int32),
        ("peer", ctypes.c_int32),
        ("flag", ctypes.c_uint64),
        ("expected", ctypes.c_uint64),
        ("seen", ctypes.c_uint64),
        ("block", ctypes.c_uint32 * 3),
        ("thread", ctypes.c_uint32),
    )

    EMPTY, CLAIMED, READY = range(3)


class DeviceContext(ctypes.Structure):
    """Context of the kernels of one process, in device memory."""

    _fields_ = (
        ("timeout_ns", ctypes.c_uint64),
        ("rank", ctypes.c_int32),
        ("world_size", ctypes.c_int32),
        ("barrier", ctypes.c_uint64),
        ("heap_stride", ctypes.c_uint64),
        ("record", ctypes.c_uint64),
        ("trace", ctypes.c_uint64),
    )


class TraceEvent(ctypes.Structure):
    """One event of a trace, in device memory."""

    _fields_ = (
        ("begin", ctypes.c_uint64),
        ("end", ctypes.c_uint64),
        ("flag", ctypes.c_uint64),
        ("seen", ctypes.c_int64),
        ("wanted", ctypes.c_int64),
        ("launch", ctypes.c_int32),
        ("event", ctypes.c_int32),
        ("block", ctypes.c_uint32),
        ("sm", ctypes.c_uint32),
    )


class TraceBuffer(ctypes.Structure):
    """Head of the buffer of a trace; the events follow it."""

    _fields_ = (("count", ctypes.c_uint64), ("capacity", ctypes.c_uint64))


class Context:
    """Owner of the device context and the record while kernels may run."""

    def __init__(
        self,
        device: torch.device,
        *,
        rank: int,
        world_size: int,
        barrier: int,
        heap_stride: int,
        timeout_s: float,
    ) -> None:
        record = torch.zeros(ctypes.sizeof(Record), dtype=torch.uint8, device="cpu")
        self._pinned = record.pin_memory()
        self.record = Record.from_address(self._pinned.data_ptr())
        fields = DeviceContext(
            timeout_ns=int(timeout_s * 1e9),
            rank=rank,
            world_size=world_size,
            barrier=barrier,
            heap_stride=heap_stride,
            record=self._pinned.data_ptr(),
        )
        self._memory = torch.frombuffer(bytearray(fields), dtype=torch.uint8).to(device)
        self.address = self._memory.data_ptr()

    def set_trace(self, buffer: int) -> None:
        """Let all later kernels record their events in the buffer at this address; 0: in none.

        The caller synchronizes with the kernels before and after.
        """
        offset = DeviceContext.trace.offset
        value = torch.tensor([buffer], dtype=torch.int64, device="cpu").view(torch.uint8)
        self._memory[offset : offset + value.numel()].copy_(value)
