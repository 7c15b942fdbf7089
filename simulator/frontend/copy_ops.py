"""Copies of consecutive elements: put, get, and bulk copies."""

from __future__ import annotations

from typing import Any

import numpy as np
from tvm import tirx

from ...builtins.spec import BUILTINS, Builtin, builtin_of
from ..machine.block import AsyncCopy, Frame
from ..machine.steps import Step
from ..memory.alignment import BULK, require_aligned, require_bulk_size
from ..memory.order import SYS
from ..memory.threads import EACH_THREAD, WARP, ElementAccess
from ..report.errors import uninitialized
from .accesses import out_of_bounds, read_poison, uniform
from .block_ops import commit_stores, wait_stores
from .functions import REDUCTIONS
from .pointer import Pointer
from .statements import Statements


def _transfer(c: Statements, call: tirx.Call, loc: str) -> Step:
    """Compile put and get of a block or warp: ordinary loads and stores of all threads."""
    op = builtin_of(call).text
    src, dst = Pointer(c, call.args[0], op, loc), Pointer(c, call.args[1], op, loc)
    size = c.indices([call.args[2]], op, loc)
    is_warp = op.endswith("_warp")

    def run(frame: Frame):
        count = _uniform(size(frame)[0], frame, op, loc)
        if count <= 0:
            return
        team = WARP if is_warp and frame.mask.count % WARP == 0 else None
        source, target = src.ref.tensor(frame), dst.ref.tensor(frame)
        from_key, to_key = _run_of(frame, source, src, count), _run_of(frame, target, dst, count)
        distance = _start(source, from_key) - _start(target, to_key)
        threads = _threads_of(
            frame.mask.threads, _start(target, to_key), distance, count, target.dtype.itemsize, team
        )

        def access(tensor, key):
            def accessed():
                elements = np.tile(tensor.flat[key].reshape(-1), len(threads))
                return ElementAccess(EACH_THREAD, elements, threads.reshape(-1))

            thread_groups = frame.mask.overlapping
            return frame.block.access(thread_groups, op, loc, copies=True, accessed=accessed)

        values, poison = source.read(from_key, access(source, from_key))
        _refuse_stored(frame, target, poison, op, loc)
        target.write(to_key, values, access(target, to_key), poison)

    return c.preempted(run, call)


def _threads_of(
    threads: np.ndarray, start: int, distance: int, count: int, item: int, team: int | None
) -> np.ndarray:
    """Return the thread that copies each element, as in put_get.cuh, one row per team.

    Args:
        start: first element that is written.
        distance: distance in elements from there to the first element that is read.
        item: size of an element in bytes.
        team: number of threads that copy together; None: all.
    """
    width = 16
    while width > item and distance * item % width:
        width //= 2
    per_thread = max(1, width // item)
    head = min(count, -start % per_thread)
    tail = head + (count - head) // per_thread * per_thread
    element = np.arange(count)
    slot = np.where(element < head, element, (element - head) // per_thread)
    slot = np.where(element < tail, slot, element - tail)
    rows = threads.reshape(-1, team or len(threads))
    return rows[:, slot % rows.shape[1]]


def _start(tensor: Any, key: tuple) -> int:
    """Return the first element of a run, within the part of its rank."""
    first = [i.start if isinstance(i, slice) else int(np.asarray(i).flat[0]) for i in key]
    return int(np.ravel_multi_index(first, tensor.shape)) % _copy_size(tensor)


def _copy_size(tensor: Any) -> int:
    """Return the number of elements of one rank."""
    shape = tensor.shape[1:] if getattr(tensor, "symmetric", False) else tensor.shape
    return int(np.prod(shape))


def _uniform(value: Any, frame: Frame, op: str, loc: str) -> int:
    return uniform(value, frame, loc, f"{op} with operands that differ between threads")


def _run_of(frame: Frame, tensor: Any, pointer: Pointer, count: int) -> tuple:
    """Return the NumPy index of ``count`` consecutive elements from the pointer."""
    index = [_uniform(i, frame, pointer.op, pointer.loc) for i in pointer.index(frame)]
    shape = tensor.shape
    copy_size = _copy_size(tensor)
    if not all(0 <= i < n or (i == n and count == 0) for i, n in zip(index, shape, strict=True)):
        raise out_of_bounds(frame, tensor.name, shape, index, pointer.loc)
    first = int(np.ravel_multi_index(tuple(index), shape))
    if first % copy_size + count > copy_size:
        raise out_of_bounds(
            frame, tensor.name, shape, [*index[:-1], f"{index[-1]} .. + {count}"], pointer.loc
        )
    if index[-1] + count <= shape[-1]:
        return (*index[:-1], slice(index[-1], index[-1] + count))
    return np.unravel_index(np.arange(first, first + count), shape)


def _bulk_run(frame: Frame, tensor: Any, pointer: Pointer, count: int) -> tuple:
    """Return the NumPy index of a bulk copy, after a check of its size and alignment."""
    require_bulk_size(frame, tensor, count, pointer.op, pointer.loc)
    key = _run_of(frame, tensor, pointer, count)
    index = [_uniform(i, frame, pointer.op, pointer.loc) for i in pointer.index(frame)]
    require_aligned(frame, tensor, index, BULK, pointer.op, pointer.loc)
    return key


def _refuse_stored(frame: Frame, tensor: Any, poison: Any, op: str, loc: str) -> None:
    if poison is not None and not tensor.symmetric:
        raise uninitialized(f"{op} to {tensor.name} of", frame.block, loc)


def bulk_load(c: Statements, call: tirx.Call, loc: str) -> Step:
    op = builtin_of(call).text
    dst, src = (Pointer(c, call.args[i], op, loc) for i in (0, 1))
    size = c.indices([call.args[2]], op, loc)
    barrier = c.mbarrier(call.args[3].args[0], loc)

    def run(frame: Frame):
        count, block = _uniform(size(frame)[0], frame, op, loc), frame.block
        source, tile, full = src.ref.tensor(frame), frame.tile(dst.slot), barrier(frame)
        access = block.load_access(frame.mask.overlapping, op, loc, full)
        values, poison = source.read(_bulk_run(frame, source, src, count), access)
        values, key = np.array(values).reshape(-1), _bulk_run(frame, tile, dst, count)
        block.require_unread(tile, key, loc)
        flight = AsyncCopy(key, op, loc, f"a wait at mbarrier {full.name}")
        tile.begin_copy(flight)

        def deliver() -> None:
            tile.copies.remove(flight)
            tile.data[key] = values
            bad = None if poison is None else np.reshape(poison, -1)
            tile.set_poison(key, bad, source.unwritten)

        full.issue(access.time, deliver)

    return c.preempted(run, call)


def _bulk_store(spec: Builtin):
    op, reduces = spec.text, spec.has_qualifier("op")

    def compile(c: Statements, call: tirx.Call, loc: str) -> Step:
        dst, src = (Pointer(c, call.args[i], op, loc) for i in (0, 1))
        size = c.indices([call.args[2]], op, loc)
        ufunc = REDUCTIONS[call.args[4].value] if reduces else None

        def run(frame: Frame):
            count, block = _uniform(size(frame)[0], frame, op, loc), frame.block
            target, tile = dst.ref.tensor(frame), frame.tile(src.slot)
            part = _bulk_run(frame, tile, src, count)
            block.use(tile, frame.mask.overlapping)
            values = np.array(tile.data[part]).reshape(-1)
            poison = None if tile.poison is None else tile.poison[part].reshape(-1)
            poison = read_poison(frame, tile, part, poison, loc)
            key = _bulk_run(frame, target, dst, count)
            access = block.bulk_access(
                frame.mask.thread_groups, op, loc, SYS if reduces else 0, (tile, part)
            )
            if ufunc is not None:
                if poison is not None:
                    raise uninitialized(f"{op} to {dst.buffer.name} of", block, loc)
                target.update(key, ufunc, values, access)
            else:
                _refuse_stored(frame, target, poison, op, loc)
                target.write(key, values, access, poison)

        return c.preempted(run, call)

    return compile


def register(c: Statements) -> None:
    """Register the builtins that copy."""
    groups = {"commit": commit_stores, "wait": wait_stores}
    for spec in BUILTINS.values():
        if spec.is_async_load:
            c.steps[spec.op_name] = bulk_load
        elif spec.is_async_store:
            c.steps[spec.op_name] = _bulk_store(spec)
        elif spec.moves:
            c.steps[spec.op_name] = _transfer
        elif spec.bulk_group:
            c.steps[spec.op_name] = groups[spec.bulk_group]
