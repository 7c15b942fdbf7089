"""Tensor-core instructions: ``ldmatrix``, ``stmatrix``, ``mma`` and ``wgmma``."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import ml_dtypes
import numpy as np
from tvm import tirx

from ..frontend.accesses import uniform
from ..frontend.expressions import Expr, either
from ..frontend.numbers import note_operand, require_numbers
from ..frontend.statements import nothing
from ..machine.block import Frame
from ..machine.steps import Step
from ..memory.threads import WARP
from ..memory.values import convert, numpy_dtype, poison_of_product, union_of_poison
from ..report.errors import SimulationError, unsupported
from .block import PRODUCTS
from .fragments import accumulator, mma_a, mma_b, operand_addresses
from .shared import Chunks, Source
from .statements import DeviceStatements, of_threads, shared_address, to_threads

Poison = np.ndarray | None
"""Mask of the elements that were never written, or None if there are none."""
_WARPS = 4
"""Warps of a warp group."""
_TYPES = {
    "bf16": np.dtype(ml_dtypes.bfloat16), "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "fp16": np.dtype(np.float16), "float16": np.dtype(np.float16),
    "tf32": np.dtype(np.float32), "fp32": np.dtype(np.float32), "float32": np.dtype(np.float32),
    "e4m3": np.dtype(ml_dtypes.float8_e4m3fn), "float8_e4m3": np.dtype(ml_dtypes.float8_e4m3fn),
    "float8_e4m3fn": np.dtype(ml_dtypes.float8_e4m3fn),
    "e5m2": np.dtype(ml_dtypes.float8_e5m2), "float8_e5m2": np.dtype(ml_dtypes.float8_e5m2),
    "int8": np.dtype(np.int8), "uint8": np.dtype(np.uint8),
}  # fmt: skip
_SWIZZLES = (0, 128, 64, 32)
"""Bytes of a row of a swizzle, by the layout type of a matrix descriptor."""


def element_type(name: str, loc: str) -> np.dtype:
    if name not in _TYPES:
        raise unsupported(f"a tensor-core operand of type {name}", loc)
    return _TYPES[name]


def _shape(text: str) -> tuple[int, int, int]:
    m, n, k = re.fullmatch(r"m(\d+)n(\d+)k(\d+)", text).groups()
    return int(m), int(n), int(k)


def warps_of(frame: Frame, op: str, loc: str, warps: int = 1) -> np.ndarray:
    """Return the active threads as rows of warps or warp groups, which must be whole."""
    rows = frame.mask.rows(WARP * warps)
    if rows is None:
        raise SimulationError(
            "deadlock",
            f"{op} is executed by {frame.mask.count} threads of "
            f"{frame.block.place}; expected all of {'a warp' if warps == 1 else 'a warp group'}"
            f"\n --> {loc}",
        )
    return rows


class Registers:
    """Registers of an instruction: consecutive elements of a local buffer.

    Args:
        data: pointer to the buffer.
        offset: expression of the first element.
        count: number of elements.
    """

    def __init__(
        self, c: DeviceStatements, data: Any, offset: Any, count: int, op: str, loc: str
    ) -> None:  # fmt: skip
        self.slot, self.count, self.op, self.loc = c.tiles[data], count, op, loc
        self._first = c.indices([offset], op, loc)

    def _key(self, frame: Frame, rows: np.ndarray) -> tuple[Any, Any]:
        first, low, high = self._first(frame)[0], int(rows[0, 0]), int(rows[-1, -1]) + 1
        if isinstance(first, int) and high - low == rows.size:
            return slice(low, high), slice(first, first + self.count)
        first = of_threads(first, frame).reshape(-1, 1)
        return rows.reshape(-1, 1), first + np.arange(self.count)

    def read(self, frame: Frame, rows: np.ndarray) -> tuple[np.ndarray, Poison]:
        """Return the elements and their poison, by row of threads, thread and element."""
        tile, key, shape = frame.tile(self.slot), self._key(frame, rows), (*rows.shape, self.count)
        poison = None if tile.poison is None else tile.poison[key].reshape(shape)
        return tile.data[key].reshape(shape), poison

    def write(self, frame: Frame, rows: np.ndarray, values: np.ndarray, poison: Any = None) -> None:
        tile, key = frame.tile(self.slot), self._key(frame, rows)
        shape = rows.size, self.count
        values = convert(values, tile.dtype).reshape(shape)
        if frame.operands is not None:
            index = np.ogrid[key] if isinstance(key[0], slice) else key
            require_numbers(frame, tile.name, index, values, None, self.loc)
        tile.data[key] = values
        tile.set_poison(key, None if poison is None else poison.reshape(shape))


def ldmatrix(c: DeviceStatements, call: tirx.Call, loc: str) -> Step:
    """Load 8 x 8 matrices of 16-bit elements; each lane passes the address of one row."""
    transposed, count = bool(int(call.args[0])), int(call.args[1])
    memory, address = shared_address(c, call.args[2], "ldmatrix", loc)
    data, offset = call.args[3].args[1:3]  # of tvm_access_ptr
    source = Source("ldmatrix", loc)
    dtype = c.made[c.tiles[data]][1]
    registers = Registers(c, data, offset, 4 * count // dtype.itemsize, "ldmatrix", loc)

    def run(frame: Frame):
        rows = warps_of(frame, "ldmatrix", loc)
        addresses = of_threads(address(frame), frame).reshape(rows.shape)[:, : 8 * count]
        groups = frame.mask.group_of[rows[:, : 8 * count]]
        values, bad = frame.block.shared[memory].load(
            addresses.reshape(-1), 16, np.dtype(np.uint16), groups.reshape(-1), source
        )
        loaded = _fragments(values.reshape(len(rows), count, 8, 8), transposed)
        poison = None
        if bad is not None:
            poison = _fragments(bad.reshape(len(rows), count, 8, 8), transposed)
            poison = poison.reshape(*rows.shape, registers.count, -1).any(axis=-1)
        words = np.ascontiguousarray(loaded).view(dtype)
        frame.block.registers.store(registers.slot, frame.mask.overlapping, loc)
        registers.write(frame, rows, words, poison)

    return Step(run)


def _fragments(matrices: np.ndarray, transposed: bool) -> np.ndarray:
    """Return the pairs of elements that each lane holds of 8 x 8 matrices, by warp and lane."""
    warps, count = matrices.shape[:2]
    if transposed:
        matrices = matrices.swapaxes(2, 3)
    pairs = matrices.reshape(warps, count, 32, 2)
    return pairs.swapaxes(1, 2).reshape(warps, 32, 2 * count)


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


def mma(c: DeviceStatements, call: tirx.Call, loc: str) -> Step:
    """Multiply the fragments of each warp."""
    m, n, k = _shape(call.args[0].value)
    a_type, b_type = (element_type(call.args[i].value, loc) for i in (3, 4))
    if m != 16 or n != 8:
        raise unsupported(f"mma of shape {call.args[0].value}", loc)
    a_at, b_at, c_at = mma_a(a_type.itemsize, k), mma_b(b_type.itemsize, k), accumulator(n, 1)
    a = Registers(c, call.args[6], call.args[7], a_at[0].shape[1], "mma", loc)
    b = Registers(c, call.args[8], call.args[9], b_at[0].shape[1], "mma", loc)
    total = Registers(c, call.args[10], call.args[11], 4, "mma", loc)

    def run(frame: Frame):
        rows = warps_of(frame, "mma", loc)
        left = _operand(a.read(frame, rows), (len(rows), m, k), a_at)
        right = _operand(b.read(frame, rows), (len(rows), k, n), b_at)
        product, poison = _product(frame, left, right, c_at)
        sums, unwritten = total.read(frame, rows)
        note_operand(frame, "C", sums)
        sums = sums + product.astype(sums.dtype)
        total.write(frame, rows, sums, union_of_poison(poison, unwritten))

    return c.preempted(run)


def _operand(
    registers: tuple[np.ndarray, Poison], shape: tuple[int, ...], at: tuple
) -> tuple[np.ndarray, Poison]:
    """Return matrices and their poison from the elements that lanes hold at places ``at``."""
    values, poison = _wide(registers[0]), registers[1]
    matrix = np.zeros(shape, values.dtype)
    matrix[(slice(None), *at)] = values
    if poison is None or not poison.any():
        return matrix, None
    bad = np.zeros(shape, np.bool_)
    bad[(slice(None), *at)] = poison
    return matrix, bad


def _wide(values: np.ndarray) -> np.ndarray:
    """Return values in the type in which tensor cores add their products."""
    return values.astype(np.int32 if values.dtype.kind in "iu" else np.float32)


def _product(
    frame: Frame, left: tuple[np.ndarray, Poison], right: tuple[np.ndarray, Poison], at: tuple
) -> tuple[np.ndarray, Poison]:
    """Return the elements of products at places ``at``."""
    (a, a_bad), (b, b_bad) = left, right
    product, key = a @ b, (slice(None), *at)
    if frame.operands is not None:
        for name, factor, axis in (("A", a, -1), ("B", b, -2)):
            largest = np.abs(factor).max(axis=axis, keepdims=True)
            note_operand(frame, name, np.broadcast_to(largest, product.shape)[key])
    poison = poison_of_product(a_bad, b_bad)
    return product[key], None if poison is None else np.broadcast_to(poison, product.shape)[key]


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
        shared, source = block.shared[matrix.memory], Source("wgmma", self._loc)
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
            values, bad = shared.values(chunks, self._dtype)
            masks.append(None if bad is None else self._matrix(bad))
            out.append(_wide(self._matrix(values)))
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
    m, n, k = _shape(call.args[0].value)
    a_major, b_major = (bool(int(call.args[i])) for i in (1, 2))
    a_type, b_type = (element_type(call.args[i].value, loc) for i in (3, 4))
    a = SharedOperand(c, call.args[6], call.args[7], m, k, a_major, a_type, loc, True)
    b = SharedOperand(c, call.args[8], call.args[9], n, k, b_major, b_type, loc)
    return _wgmma(c, a, b, n, call.args[10], call.args[11], call.args[12], loc)


def wgmma_rs(c: DeviceStatements, call: tirx.Call, loc: str) -> Step:
    """Multiply A in registers by B in shared memory."""
    _, n, k = _shape(call.args[0].value)
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
        matrix, bad = _operand(
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
        product, poison = _product(frame, a.read(frame, rows), right, at)
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
        "tl.ptx_ldmatrix": ldmatrix,
        "tl.ptx_stmatrix": stmatrix,
        "tirx.ptx_mma": mma,
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
