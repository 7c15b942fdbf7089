"""Tensor-core instructions: ``stmatrix`` and ``wgmma``."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from tvm import tirx

from ..frontend.accesses import of_threads, uniform
from ..frontend.expressions import Expr, either
from ..frontend.matrix_ops import (
    Poison,
    Registers,
    accumulator,
    element_type,
    matrices_of,
    mma_a,
    products_of,
    shape_of,
    warps_of,
    wide,
)
from ..frontend.numbers import note_operand
from ..frontend.statements import nothing
from ..machine.block import Frame
from ..machine.steps import Step
from ..memory.threads import WARP
from ..memory.values import convert, numpy_dtype, union_of_poison
from ..report.errors import unsupported
from .block import PRODUCTS
from .operand_layouts import operand_addresses
from .shared import Chunks, Source
from .statements import DeviceStatements, shared_address, to_threads

_WARPS = 4
"""Warps of a warp group."""
_SWIZZLES = (0, 128, 64, 32)
"""Bytes of a row of a swizzle, by the layout type of a matrix descriptor."""


def stmatrix(c: DeviceStatements, call: tirx.Call, loc: str) -> Step:
    """Store 8 x 8 matrices of 16-bit elements, the inverse of ``ldmatrix``."""
    transposed, count = bool(int(call.args[0])), int(call.args[1])
    if isinstance(call.args[-1], tirx.StringImm) and call.args[-1].value != "m8n8":
        raise unsupported(f"stmatrix of shape {call.args[-1].value}", loc)
    memory, address = shared_address(c, call.args[2], "stmatrix", loc)
    exprs = [c.compile(value, loc) for value in call.args[3 : 3 + count]]
    source = Source("stmatrix", loc)

    def run(frame: Frame):
        rows = warps_of(frame, "stmatrix", loc)
        addresses = of_threads(address(frame), frame).reshape(rows.shape)[:, : 8 * count]
        registers = np.stack([of_threads(e.value(frame), frame) for e in exprs], axis=-1)
        pairs = np.ascontiguousarray(registers.astype(np.uint32)).view(np.uint16)
        matrices = _matrices(pairs.reshape(len(rows), 32, count, 2), transposed)
        poison = None
        if any(e.poison is not None for e in exprs):
            masks = [e.poison(frame) if e.poison else None for e in exprs]
            if any(m is not None for m in masks):
                bad = np.stack([of_threads(False if m is None else m, frame) for m in masks], -1)
                bad = np.repeat(bad.reshape(len(rows), 32, count, 1), 2, axis=-1)
                poison = _matrices(bad, transposed).reshape(-1, 8)
        groups = frame.mask.group_of[rows[:, : 8 * count]].reshape(-1)
        frame.block.shared[memory].store(
            addresses.reshape(-1), matrices.reshape(-1, 8), poison, groups, source
        )

    return Step(run)


def _matrices(pairs: np.ndarray, transposed: bool) -> np.ndarray:
    """Return 8 x 8 matrices from the pairs that the lanes of warps hold."""
    warps, _, count, _ = pairs.shape
    matrices = pairs.swapaxes(1, 2).reshape(warps, count, 8, 8)
    return matrices.swapaxes(2, 3) if transposed else matrices


@dataclass
class Matrix:
    """Matrix descriptor of a ``wgmma`` operand, as a local buffer holds it for all threads."""

    memory: int
    start: Any
    row: int
    leading: int
    stride: int


def initialize_descriptor(c: DeviceStatements, call: tirx.Call, loc: str) -> Step:
    data = call.args[0].buffer.data
    memory, address = shared_address(c, call.args[1], "wgmma", loc)
    layout, leading, stride = (int(a) for a in call.args[2:5])

    def run(frame: Frame):
        frame.block.matrices[data] = Matrix(
            memory, address(frame), _SWIZZLES[layout], leading * 16, stride * 16
        )

    return Step(run)


def increase_descriptor(c: DeviceStatements, call: tirx.Call, loc: str) -> Step:
    data, offset = call.args[0].buffer.data, c.indices([call.args[1]], "wgmma", loc)

    def run(frame: Frame):
        matrix = frame.block.matrices[data]
        matrix.start = matrix.start + offset(frame)[0]

    return Step(run)


class SharedOperand:
    """Operand of ``wgmma`` in shared memory, named by a matrix descriptor.

    Args:
        offset: expression of an offset in units of 16 bytes.
        by_rows: whether each warp reads 16 rows of it, as of A, and not all of it.
    """

    def __init__(
        self, c: DeviceStatements, data: Any, offset: Any, extent: int, k: int, k_major: bool,
        dtype: np.dtype, loc: str, by_rows: bool = False,
    ) -> None:  # fmt: skip
        self._by_rows = by_rows
        self._data, self._offset = data, c.indices([offset], "wgmma", loc)
        self._sizes, self._k_major, self._dtype, self._loc = (extent, k), k_major, dtype, loc

    def read(self, frame: Frame, rows: np.ndarray) -> tuple[np.ndarray, Poison]:
        """Return the operand of each warp group, after a note of what each warp reads of it."""
        block, matrix = frame.block, frame.block.matrices[self._data]
        start = matrix.start + 16 * self._offset(frame)[0]
        if isinstance(start, np.ndarray):
            starts = of_threads(start, frame).reshape(rows.shape)
        else:
            starts = np.full((len(rows), 1), start)
        shared, source = block.shared[matrix.memory], Source("wgmma", self._loc, "T.wait_wgmma")
        out, masks = [], []
        for first, start in zip(range(0, _WARPS * len(rows), _WARPS), starts, strict=True):
            if (start != start[0]).any():
                raise unsupported("a matrix descriptor that differs between threads", self._loc)
            chunks = _operand_chunks(
                int(start[0]), *self._sizes, self._dtype.itemsize, self._k_major, matrix.row,
                matrix.leading, matrix.stride, _WARPS if self._by_rows else 1,
            )  # fmt: skip
            groups = _issuers(frame)[first : first + _WARPS]
            readers = [block.next_load(block.loads_of(PRODUCTS, g)) for g in groups]
            for g, (_, time) in zip(groups, readers, strict=True):
                block.products[g].open = time
            shared.read_async(chunks, np.array(groups), readers, source)
            values, bad = shared.values(chunks, self._dtype, source)
            masks.append(None if bad is None else self._matrix(bad))
            out.append(wide(self._matrix(values)))
        if all(mask is None for mask in masks):
            return np.stack(out), None
        return np.stack(out), np.stack(
            [np.zeros(self._sizes, np.bool_) if mask is None else mask for mask in masks]
        )

    def _matrix(self, chunks: np.ndarray) -> np.ndarray:
        """Return the matrix whose elements these are, by chunk of 16 bytes."""
        (extent, k), count = self._sizes, 16 // self._dtype.itemsize
        if self._k_major:
            return chunks.reshape(extent, k)
        return chunks.reshape(extent // count, k, count).swapaxes(1, 2).reshape(extent, k)


@lru_cache(maxsize=1024)
def _operand_chunks(
    start: int, extent: int, k: int, itemsize: int, k_major: bool, row: int, leading: int,
    stride: int, rows: int,
) -> Chunks:  # fmt: skip
    """Return the bytes of an operand in ``rows`` parts; see ``operand_addresses``."""
    addresses = operand_addresses(start, extent, k, itemsize, k_major, row, leading, stride)
    count = 16 // itemsize
    first = addresses[:, ::count] if k_major else addresses[::count]
    chunks = Chunks.at(first.reshape(rows, -1), 16)
    return Chunks(chunks.numbers.reshape(rows, -1), chunks.width)


def wgmma_ss(c: DeviceStatements, call: tirx.Call, loc: str) -> Step:
    """Multiply two operands in shared memory."""
    m, n, k = shape_of(call.args[0].value)
    a_major, b_major = (bool(int(call.args[i])) for i in (1, 2))
    a_type, b_type = (element_type(call.args[i].value, loc) for i in (3, 4))
    a = SharedOperand(c, call.args[6], call.args[7], m, k, a_major, a_type, loc, True)
    b = SharedOperand(c, call.args[8], call.args[9], n, k, b_major, b_type, loc)
    return _wgmma(c, a, b, n, call.args[10], call.args[11], call.args[12], loc)


def wgmma_rs(c: DeviceStatements, call: tirx.Call, loc: str) -> Step:
    """Multiply A in registers by B in shared memory."""
    _, n, k = shape_of(call.args[0].value)
    b_major = bool(int(call.args[1]))
    a_type, b_type = (element_type(call.args[i].value, loc) for i in (2, 3))
    a = RegisterOperand(c, call.args[5], call.args[6], k, a_type, loc)
    b = SharedOperand(c, call.args[7], call.args[8], n, k, b_major, b_type, loc)
    return _wgmma(c, a, b, n, call.args[9], call.args[10], call.args[11], loc)


class RegisterOperand:
    """A of ``wgmma`` in registers: each warp holds 16 rows, as for ``mma``."""

    def __init__(
        self, c: DeviceStatements, data: Any, offset: Any, k: int, dtype: np.dtype, loc: str
    ) -> None:
        self._at, self._k = mma_a(dtype.itemsize, k), k
        self._registers = Registers(c, data, offset, self._at[0].shape[1], "wgmma", loc)

    @property
    def slot(self) -> int:
        return self._registers.slot

    def read(self, frame: Frame, rows: np.ndarray) -> tuple[np.ndarray, Poison]:
        warps = len(rows) * _WARPS
        values, poison = self._registers.read(frame, rows)
        if poison is not None:
            poison = poison.reshape(warps, WARP, -1)
        matrix, bad = matrices_of(
            (values.reshape(warps, WARP, -1), poison), (warps, 16, self._k), self._at
        )
        shape = len(rows), 16 * _WARPS, self._k
        return matrix.reshape(shape), None if bad is None else bad.reshape(shape)


def _wgmma(
    c: DeviceStatements, a: Any, b: SharedOperand, n: int, data: Any, offset: Any, keeps: Any,
    loc: str,
) -> Step:  # fmt: skip
    total = Registers(c, data, offset, n // 2, "wgmma", loc)
    at, keep = accumulator(n, _WARPS), c.indices([keeps], "wgmma", loc)

    def run(frame: Frame):
        rows = warps_of(frame, "wgmma", loc, _WARPS)
        right, bad = b.read(frame, rows)
        right = right.swapaxes(1, 2), None if bad is None else bad.swapaxes(1, 2)
        product, poison = products_of(frame, a.read(frame, rows), right, at)
        for groups in frame.mask.groups_by_warp:
            time = frame.block.products[groups[0]].open
            frame.block.registers.multiply(total.slot, groups, time, True, loc)
            if isinstance(a, RegisterOperand):
                frame.block.registers.multiply(a.slot, groups, time, False, loc)
        if uniform(keep(frame)[0], frame, loc):
            sums, unwritten = total.read(frame, rows)
            note_operand(frame, "C", sums)
            product, poison = product + sums, union_of_poison(poison, unwritten)
        total.write(frame, rows, product, poison)

    return c.preempted(run)


def _issuers(frame: Frame) -> list[int]:
    """Return the thread group that issues the part of a product of each warp."""
    return [groups[0] for groups in frame.mask.groups_by_warp]


def fence(c: DeviceStatements, call: tirx.Call, loc: str) -> Step:
    """``wgmma.fence``."""
    return Step(lambda frame: frame.block.registers.fence(frame.mask.overlapping))


def commit(c: DeviceStatements, call: tirx.Call, loc: str) -> Step:
    def run(frame: Frame):
        warps_of(frame, "wgmma", loc, _WARPS)
        for g in _issuers(frame):
            frame.block.products[g].commit()

    return Step(run)


def wait(c: DeviceStatements, call: tirx.Call, loc: str) -> Step:
    max_pending = int(call.args[0])

    def run(frame: Frame):
        block = frame.block
        warps_of(frame, "wgmma", loc, _WARPS)
        for groups in frame.mask.groups_by_warp:
            time = block.products[groups[0]].wait(max_pending)
            block.order.complete_loads(groups, block.loads_of(PRODUCTS, groups[0]), time)
            block.registers.complete(groups, time)

    return Step(run)


def pack_b16(c: DeviceStatements, call: tirx.Call, loc: str) -> Expr:
    """Pack two 16-bit values into 32 bits; the first is the lower half."""
    low, high = (c.compile(a, loc) for a in call.args)
    dtype = numpy_dtype(call.args[0].dtype)

    def half(expr, frame):
        values = np.ascontiguousarray(of_threads(convert(expr.value(frame), dtype), frame))
        return values.view(np.uint16).astype(np.uint32)

    def value(frame: Frame):
        return to_threads(half(low, frame) | half(high, frame) << np.uint32(16), frame)

    return Expr(value, either(low.poison, high.poison))


def register(c: DeviceStatements) -> None:
    """Register the tensor-core instructions."""
    c.calls["tl.pack_b16"] = pack_b16
    c.steps |= {
        "tl.ptx_stmatrix": stmatrix,
        "tl.initialize_wgmma_descriptor": initialize_descriptor,
        "tl.increase_descriptor_offset": increase_descriptor,
        "tl.ptx_wgmma_ss": wgmma_ss,
        "tl.ptx_wgmma_rs": wgmma_rs,
        "tl.warpgroup_arrive": fence,
        "tl.annotate_producer_reg_dealloc": nothing,
        "tl.annotate_consumer_reg_alloc": nothing,
        "tl.warpgroup_commit_batch": commit,
        "tl.warpgroup_wait": wait,
        "tl.wait_wgmma": wait,
    }
