"""Matrices in the registers of warps: ``ldmatrix`` and ``mma``.

Source of the layouts: PTX ISA, "Matrix fragments for mma", "Register fragments for wgmma".
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

import ml_dtypes
import numpy as np
from tvm import tirx

from ..machine.block import Frame, Tile
from ..machine.steps import Step
from ..memory.threads import WARP
from ..memory.values import convert, poison_of_product, union_of_poison
from ..report.errors import SimulationError, unsupported
from .accesses import of_threads, read_poison
from .numbers import note_operand, require_numbers
from .statements import Statements

Poison = np.ndarray | None
"""Mask of the elements that were never written, or None if there are none."""
_TYPES = {
    "bf16": np.dtype(ml_dtypes.bfloat16), "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "fp16": np.dtype(np.float16), "float16": np.dtype(np.float16),
    "tf32": np.dtype(np.float32), "fp32": np.dtype(np.float32), "float32": np.dtype(np.float32),
    "e4m3": np.dtype(ml_dtypes.float8_e4m3fn), "float8_e4m3": np.dtype(ml_dtypes.float8_e4m3fn),
    "float8_e4m3fn": np.dtype(ml_dtypes.float8_e4m3fn),
    "e5m2": np.dtype(ml_dtypes.float8_e5m2), "float8_e5m2": np.dtype(ml_dtypes.float8_e5m2),
    "int8": np.dtype(np.int8), "uint8": np.dtype(np.uint8),
}  # fmt: skip
_LANES = np.arange(32)[:, None]


@lru_cache(maxsize=64)
def mma_a(itemsize: int, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Return (row, column) of A of ``mma.m16n8k``, by lane and element."""
    packed = 4 // itemsize
    element = np.arange(16 * k // 32)[None]
    register = element // packed
    row = _LANES // 4 + 8 * (register % 2)
    column = (_LANES % 4) * packed + element % packed + 4 * packed * (register // 2)
    return row, column


@lru_cache(maxsize=64)
def mma_b(itemsize: int, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Return (row of k, column of n) of B of ``mma.m16n8k``, by lane and element."""
    packed = 4 // itemsize
    element = np.arange(8 * k // 32)[None]
    row = (_LANES % 4) * packed + element % packed + 4 * packed * (element // packed)
    return row, np.broadcast_to(_LANES // 4, row.shape)


@lru_cache(maxsize=64)
def accumulator(columns: int, warps: int) -> tuple[np.ndarray, np.ndarray]:
    """Return (row, column) of an accumulator of 16 rows for each of ``warps`` warps, by thread."""
    thread = np.arange(32 * warps)[:, None]
    element = np.arange(columns // 2)[None]
    row = thread // 32 * 16 + thread % 32 // 4 + 8 * (element // 2 % 2)
    column = (thread % 4) * 2 + element % 2 + 8 * (element // 4)
    return row, column


def element_type(name: str, loc: str) -> np.dtype:
    if name not in _TYPES:
        raise unsupported(f"a tensor-core operand of type {name}", loc)
    return _TYPES[name]


def shape_of(text: str) -> tuple[int, int, int]:
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
        self, c: Statements, data: Any, offset: Any, count: int, op: str, loc: str
    ) -> None:  # fmt: skip
        self.slot, self.count, self.op, self.loc = c.tiles[data], count, op, loc
        self._first = c.indices([offset], op, loc)

    def _tile(self, frame: Frame) -> Tile:
        tile = frame.tile(self.slot)
        tile.spread(len(frame.mask.on))
        return tile

    def _key(self, frame: Frame, rows: np.ndarray) -> tuple[Any, Any]:
        first, low, high = self._first(frame)[0], int(rows[0, 0]), int(rows[-1, -1]) + 1
        if isinstance(first, int) and high - low == rows.size:
            return slice(low, high), slice(first, first + self.count)
        first = of_threads(first, frame).reshape(-1, 1)
        return rows.reshape(-1, 1), first + np.arange(self.count)

    def read(self, frame: Frame, rows: np.ndarray) -> tuple[np.ndarray, Poison]:
        """Return the elements and their poison, by row of threads, thread and element."""
        tile, key, shape = self._tile(frame), self._key(frame, rows), (*rows.shape, self.count)
        poison = None if tile.poison is None else tile.poison[key].reshape(shape)
        return tile.data[key].reshape(shape), read_poison(frame, tile, key, poison, self.loc)

    def write(self, frame: Frame, rows: np.ndarray, values: np.ndarray, poison: Any = None) -> None:
        tile, key = self._tile(frame), self._key(frame, rows)
        shape = rows.size, self.count
        values = convert(values, tile.dtype).reshape(shape)
        if frame.operands is not None:
            index = np.ogrid[key] if isinstance(key[0], slice) else key
            require_numbers(frame, tile.name, index, values, None, self.loc)
        tile.data[key] = values
        frame.block.set_poison(tile, key, None if poison is None else poison.reshape(shape))


def ldmatrix(c: Statements, call: tirx.Call, loc: str) -> Step:
    """Load 8 x 8 matrices of 16-bit elements; each lane passes the address of one row."""
    transposed, count = bool(int(call.args[0])), int(call.args[1])
    load = c.rows_of_matrices(call.args[2], "ldmatrix", loc)
    buffer, (offset,) = c.pointee(call.args[3], loc)
    dtype = c.made[c.tiles[buffer.data]][1]
    registers = Registers(c, buffer.data, offset, 4 * count // dtype.itemsize, "ldmatrix", loc)

    def run(frame: Frame):
        rows = warps_of(frame, "ldmatrix", loc)
        values, bad = load(frame, rows[:, : 8 * count].reshape(-1))
        loaded = _fragments(values.reshape(len(rows), count, 8, 8), transposed)
        poison = None
        if bad is not None:
            poison = _fragments(bad.reshape(len(rows), count, 8, 8), transposed)
            poison = poison.reshape(*rows.shape, registers.count, -1).any(axis=-1)
        frame.block.note_store(registers.slot, frame.mask.overlapping, loc)
        registers.write(frame, rows, np.ascontiguousarray(loaded).view(dtype), poison)

    return Step(run)


def _fragments(matrices: np.ndarray, transposed: bool) -> np.ndarray:
    """Return the pairs of elements that each lane holds of 8 x 8 matrices, by warp and lane."""
    warps, count = matrices.shape[:2]
    if transposed:
        matrices = matrices.swapaxes(2, 3)
    pairs = matrices.reshape(warps, count, 32, 2)
    return pairs.swapaxes(1, 2).reshape(warps, 32, 2 * count)


def mma(c: Statements, call: tirx.Call, loc: str) -> Step:
    """Multiply the fragments of each warp."""
    m, n, k = shape_of(call.args[0].value)
    a_type, b_type = (element_type(call.args[i].value, loc) for i in (3, 4))
    if m != 16 or n != 8:
        raise unsupported(f"mma of shape {call.args[0].value}", loc)
    a_at, b_at, c_at = mma_a(a_type.itemsize, k), mma_b(b_type.itemsize, k), accumulator(n, 1)
    a = Registers(c, call.args[6], call.args[7], a_at[0].shape[1], "mma", loc)
    b = Registers(c, call.args[8], call.args[9], b_at[0].shape[1], "mma", loc)
    total = Registers(c, call.args[10], call.args[11], 4, "mma", loc)

    def run(frame: Frame):
        rows = warps_of(frame, "mma", loc)
        left = matrices_of(a.read(frame, rows), (len(rows), m, k), a_at)
        right = matrices_of(b.read(frame, rows), (len(rows), k, n), b_at)
        product, poison = products_of(frame, left, right, c_at)
        sums, unwritten = total.read(frame, rows)
        note_operand(frame, "C", sums)
        sums = sums + product.astype(sums.dtype)
        total.write(frame, rows, sums, union_of_poison(poison, unwritten))

    return c.preempted(run)


def matrices_of(
    registers: tuple[np.ndarray, Poison], shape: tuple[int, ...], at: tuple
) -> tuple[np.ndarray, Poison]:
    """Return matrices and their poison from the elements that lanes hold at places ``at``."""
    values, poison = wide(registers[0]), registers[1]
    matrix = np.zeros(shape, values.dtype)
    matrix[(slice(None), *at)] = values
    if poison is None or not poison.any():
        return matrix, None
    bad = np.zeros(shape, np.bool_)
    bad[(slice(None), *at)] = poison
    return matrix, bad


def wide(values: np.ndarray) -> np.ndarray:
    """Return values in the type in which tensor cores add their products."""
    return values.astype(np.int32 if values.dtype.kind in "iu" else np.float32)


def products_of(
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


def register(c: Statements) -> None:
    """Register the instructions of warps."""
    c.steps |= {"tl.ptx_ldmatrix": ldmatrix, "tirx.ptx_mma": mma}
