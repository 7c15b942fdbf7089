"""Writes of TileLang's copy instructions: TMA, ``cp.async``, ``ldmatrix``, ``stmatrix``.

Source: PTX ISA, "Tensor copies", "cp.async", "ldmatrix", "stmatrix".
"""

from __future__ import annotations

import numpy as np
from tvm import tirx

from ..ir.walk import ASYNC_COPY, op_name
from .places import NOWHERE, Unknown, bits_of, flat_index
from .points import Points
from .transfers import LoweredTransfers, indices_of, mix

_SWIZZLES = (0, 32, 64, 128)
"""Bytes of the rows of a swizzle, by the number that cuTensorMapEncodeTiled uses."""
_LANES = 32
_ROWS = 8
"""Rows of a matrix, and its columns of 16 bits."""


def _nothing(transfers: LoweredTransfers, call: tirx.Call, points: Points) -> None:
    """Ignore an operation that moves no elements."""


def _tma_load(transfers: LoweredTransfers, call: tirx.Call, points: Points) -> None:
    if op_name(call.args[0]) == _DESCRIPTOR:
        box = _Box(transfers, call.args[0], call.args[3:-1], points)
        shared = box.shared(call.args[2], points)
        transfers.write(shared, box.fingerprints)
    else:
        target, source, _, size = call.args[:4]
        _copy_run(transfers, source, target, size, points)


def _tma_store(transfers: LoweredTransfers, call: tirx.Call, points: Points) -> None:
    if int(call.args[-2]):
        raise Unknown("a reduction by the TMA")
    if op_name(call.args[0]) == _DESCRIPTOR:
        box = _Box(transfers, call.args[0], call.args[2:-2], points)
        shared = box.shared(call.args[1], points)
        transfers.write(np.where(box.inside, box.places, NOWHERE), mix(shared))
    else:
        target, source, size = call.args[:3]
        _copy_run(transfers, source, target, size, points)


def _copy_run(
    transfers: LoweredTransfers,
    source: tirx.Call,
    target: tirx.Call,
    size: tirx.PrimExpr,
    points: Points,
) -> None:
    """Record the writes of a copy of consecutive bytes."""
    bits = _pointee_bits(source)
    if bits != _pointee_bits(target):
        raise Unknown("a copy between different types")
    places = []
    for pointer in (source, target):
        data, start = _pointer(pointer, points)
        count = int(points.at_all(size)[0]) * 8 // bits
        steps = np.arange(count) * bits
        places.append(transfers.places.at_bit(data, start[:, None] + steps))
    transfers.write(places[1], mix(places[0]))


_DESCRIPTOR = "tl.create_tma_descriptor"


class _Box:
    """Elements of a tensor in global memory that a TMA operation copies.

    Attributes:
        places: place of each element of the box at each point, the innermost axis last.
        inside: whether the element is in the tensor.
    """

    def __init__(
        self,
        transfers: LoweredTransfers,
        descriptor: tirx.Call,
        coordinates: list[tirx.PrimExpr],
        points: Points,
    ) -> None:
        rank, data = int(descriptor.args[1]), descriptor.args[2]
        shape, strides, box, steps = (
            descriptor.args[3 + rank * n : 3 + rank * (n + 1)] for n in range(4)
        )
        interleave, swizzle = map(int, descriptor.args[3 + 4 * rank : 5 + 4 * rank])
        if not isinstance(data, tirx.Var) or interleave or {int(n) for n in steps} != {1}:
            raise Unknown("a TMA descriptor")
        self._transfers, self._swizzle = transfers, _SWIZZLES[swizzle]
        self._bits = 8 * int(points.at_all(strides[0])[0])
        sizes = [int(n) for n in box]
        offsets = np.indices(sizes[::-1]).reshape(rank, -1)[::-1]
        bit: np.ndarray = np.zeros((points.count, 1), np.int64)
        self.inside: np.ndarray = np.ones((points.count, 1), bool)
        for coordinate, extent, stride, offset in zip(
            coordinates, shape, strides, offsets, strict=True
        ):
            index = points.at_all(coordinate)[:, None] + offset
            self.inside = self.inside & (index >= 0) & (index < points.at_all(extent)[:, None])
            bit = bit + index * points.at_all(stride)[:, None] * 8
        self.places = transfers.places.at_bit(data, bit)
        self._count = offsets.shape[1]

    @property
    def fingerprints(self) -> np.ndarray:
        """Fingerprint of each element; 0 outside of the tensor."""
        return np.where(self.inside, mix(self.places), np.uint64(0))

    def shared(self, pointer: tirx.Call, points: Points) -> np.ndarray:
        """Return the place of each element of the box in shared memory."""
        data, start = _pointer(pointer, points)
        byte = start[:, None] // 8 + np.arange(self._count) * self._bits // 8
        if self._swizzle:
            byte = byte ^ ((byte >> 3) & (self._swizzle - 16))
        return self._transfers.places.at_bit(data, byte * 8)


def _pointer(pointer: tirx.Call, points: Points) -> tuple[tirx.Var, np.ndarray]:
    """Return the allocation and the first bit of an access."""
    if op_name(pointer) == "tirx.tvm_access_ptr":
        kind, data, offset = pointer.args[:3]
        return data, points.at_all(offset) * bits_of(kind.dtype)
    load = _element(pointer)
    flat = flat_index(load.buffer, [points.at_all(i) for i in load.indices], points)
    return load.buffer.data, np.broadcast_to(flat * bits_of(load.buffer.dtype), points.count)


def _pointee_bits(pointer: tirx.Call) -> int:
    if op_name(pointer) == "tirx.tvm_access_ptr":
        return bits_of(pointer.args[0].dtype)
    return bits_of(_element(pointer).buffer.dtype)


def _element(pointer: tirx.Call) -> tirx.BufferLoad:
    """Return the element at which a pointer points."""
    if op_name(pointer) in ("tl.access_ptr", "tirx.address_of") and isinstance(
        pointer.args[0], tirx.BufferLoad
    ):
        return pointer.args[0]
    raise Unknown(f"the pointer {pointer}")


def _cp_async(transfers: LoweredTransfers, call: tirx.Call, points: Points) -> None:
    target, source = map(_element, call.args[:2])
    if int(call.args[2]) != 1:
        raise Unknown("a vector of cp.async")
    values = transfers.fingerprint(source, points)
    if len(call.args) > 3:
        values = np.where(points.at_all(call.args[3]).astype(bool), values, np.uint64(0))
    indices, inside = indices_of(target.buffer, target.indices, points)
    for places in transfers.targets(target.buffer, indices, points):
        transfers.write(np.where(inside, places, NOWHERE), values)


def _by_warp(values: np.ndarray, points: Points) -> np.ndarray:
    """Return values of points as an array with axes for the warp, the lane and the iteration."""
    threads = points.at_all(points.thread)
    count = len(np.unique(threads))
    if not count or count % _LANES or points.count % count:
        raise Unknown("a part of a warp")
    by_thread = threads.reshape(count, -1)
    if (by_thread != by_thread[0, 0] + np.arange(count)[:, None]).any() or threads[0] % _LANES:
        raise Unknown("a part of a warp")
    return np.broadcast_to(values, points.count).reshape(count // _LANES, _LANES, -1)


def _matrix_places(
    transfers: LoweredTransfers,
    pointer: tirx.Call,
    matrix: int,
    is_transposed: bool,
    points: Points,
) -> list[np.ndarray]:
    """Return the places in shared memory of the two elements that each lane has of a matrix."""
    data, start = _pointer(pointer, points)
    rows = _by_warp(start, points)[:, _ROWS * matrix : _ROWS * (matrix + 1)]
    lanes = np.arange(_LANES)
    places = []
    for element in range(2):
        major, minor = lanes // 4, 2 * (lanes % 4) + element
        row, column = (minor, major) if is_transposed else (major, minor)
        bits = rows[:, row] + (16 * column)[None, :, None]
        places.append(transfers.places.at_bit(data, bits))
    return places


def _ldmatrix(transfers: LoweredTransfers, call: tirx.Call, points: Points) -> None:
    is_transposed, count, pointer, target = call.args
    first = _element(target)
    if bits_of(first.buffer.dtype) != 16:
        raise Unknown("ldmatrix of other types")
    for matrix in range(int(count)):
        sources = _matrix_places(transfers, pointer, matrix, bool(int(is_transposed)), points)
        for element, source in enumerate(sources):
            register = points.at_all(first.indices[0]) + 2 * matrix + element
            places, _ = transfers.registers(first.buffer, [register], points)
            transfers.write(_by_warp(places, points), mix(source))


def _stmatrix(transfers: LoweredTransfers, call: tirx.Call, points: Points) -> None:
    is_transposed, count, pointer, *values = call.args
    if isinstance(values[-1], tirx.StringImm) and values.pop().value != "m8n8":
        raise Unknown("stmatrix of another shape")
    for matrix, packed in zip(range(int(count)), values, strict=True):
        targets = _matrix_places(transfers, pointer, matrix, bool(int(is_transposed)), points)
        if op_name(packed) != "tl.pack_b16":
            raise Unknown(op_name(packed))
        for target, value in zip(targets, packed.args, strict=True):
            fingerprints = transfers.fingerprint(value, points)
            transfers.write(target, _by_warp(fingerprints, points))


CALLS = {
    "tl.tma_load": _tma_load,
    "tl.tma_store": _tma_store,
    ASYNC_COPY: _cp_async,
    "tl.ptx_ldmatrix": _ldmatrix,
    "tl.ptx_stmatrix": _stmatrix,
    **dict.fromkeys(
        (
            "tl.mbarrier_expect_tx",
            "tl.mbarrier_wait_parity",
            "tl.tma_store_arrive",
            "tl.tma_store_wait",
            "tirx.ptx_arrive_barrier",
            "tirx.ptx_commit_group",
            "tirx.ptx_wait_group",
            "tirx.tvm_storage_sync",
        ),
        _nothing,
    ),
}
"""Functions that record the writes of an operation, by its name."""
