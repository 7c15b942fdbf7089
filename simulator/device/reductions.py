"""Reductions between threads: ``tl::AllReduce`` of TileLang's templates, and warp shuffles."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from tvm import tirx

from ..frontend import debug_ops, external
from ..frontend.accesses import of_threads
from ..frontend.expressions import Expr
from ..frontend.matrix_ops import Registers
from ..machine.block import Frame
from ..machine.steps import Step
from ..memory.threads import WARP
from ..report.errors import SimulationError, unsupported
from .barriers import meet
from .shared import Source
from .statements import DeviceStatements, shared_address, to_threads

_REDUCERS: dict[str, Callable[[Any, Any], Any]] = {
    "SumOp": np.add, "MaxOp": np.fmax, "MinOp": np.fmin, "MaxOpNan": np.maximum,
    "MinOpNan": np.minimum, "BitAndOp": np.bitwise_and, "BitOrOp": np.bitwise_or,
    "BitXorOp": np.bitwise_xor,
}  # fmt: skip
_NAME = re.compile(
    r"tl::AllReduce<tl::(\w+), (\d+), (\d+), (\d+)"
    r"(?:, tl::(SyncThreadsBarrier|NamedBarrier<(\d+)>))?(?:, (\d+), (\d+))?>::(run|run_batch)"
)


@dataclass(frozen=True)
class Reduction:
    """Reduction over groups of threads, by exchanges between pairs at halved distances.

    Attributes:
        threads, scale: the distances are ``threads / 2`` to ``scale``.
        first: first thread of the participants.
        barrier: number of threads of the named barriers; None for barriers of the block.
        count, stride: values of a thread, and their distance in shared memory.
    """

    ufunc: Callable[[Any, Any], Any]
    threads: int
    scale: int
    first: int
    barrier: int | None
    count: int
    stride: int
    loc: str

    def run(
        self, frame: Frame, values: np.ndarray, poison: np.ndarray | None, workspace: Any
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """Return the results of the active threads and their poison.

        Args:
            values, poison: by active thread and value.
            workspace: shared memory and address of the exchange between warps.
        """
        distance = self.threads // 2
        while distance >= self.scale:
            partners = self._partners(frame, distance)
            if distance < WARP:
                other = values[partners]
            else:
                other = self._exchanged(frame, values, partners, workspace)
            values = self.ufunc(values, other).astype(values.dtype)
            poison = None if poison is None else poison | poison[partners]
            distance //= 2
        return values, poison

    def _partners(self, frame: Frame, distance: int) -> np.ndarray:
        """Return the position of the partner of each active thread among the active threads."""
        threads = frame.mask.threads
        partners = ((threads - self.first) ^ distance) + self.first
        positions = np.searchsorted(threads, partners)
        nearest = threads[np.minimum(positions, len(threads) - 1)]
        if (positions >= len(threads)).any() or (nearest != partners).any():
            raise SimulationError(
                "deadlock",
                f"a reduction over {self.threads} threads is executed by {len(threads)} threads of "
                f"{frame.block.place}\n --> {self.loc}",
            )
        return positions

    def _exchanged(
        self, frame: Frame, values: np.ndarray, partners: np.ndarray, workspace: Any
    ) -> np.ndarray:
        shared, start = workspace
        threads, source = frame.mask.threads, Source("reduction", self.loc)
        groups, itemsize = frame.mask.group_of[threads], values.dtype.itemsize
        starts = start + (threads - self.first) * itemsize
        meet(frame, self.barrier, self.loc)
        for n in range(self.count):
            addresses = starts + n * self.stride * itemsize
            shared.store(addresses, values[:, n : n + 1], None, groups, source)
        meet(frame, self.barrier, self.loc)
        columns = [
            shared.load(
                starts[partners] + n * self.stride * itemsize,
                itemsize,
                values.dtype,
                groups,
                source,
            )[0]
            for n in range(self.count)
        ]
        return np.concatenate(columns, axis=1)


def _reduction(name: str, loc: str) -> Reduction | None:
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    if match[1] not in _REDUCERS:
        raise unsupported(name, loc)
    threads, scale, first = (int(match[i]) for i in (2, 3, 4))
    barrier = None if match[6] is None else int(match[6])
    return Reduction(
        _REDUCERS[match[1]], threads, scale, first, barrier, int(match[7] or 1),
        int(match[8] or 0), loc,
    )  # fmt: skip


def _workspace(c: DeviceStatements, node: Any, loc: str) -> Callable[[Frame], Any]:
    if node is None:
        return lambda frame: None
    memory, address = shared_address(c, node, "reduction", loc)
    return lambda frame: (frame.block.shared[memory], int(of_threads(address(frame), frame)[0]))


def all_reduce(c: DeviceStatements, call: tirx.Call, loc: str) -> Expr:
    """``AllReduce<...>::run(value, workspace)``."""
    reduction = _reduction(call.args[0].value, loc)
    if reduction is None:
        return external.extern_value(c, call, loc)
    expr, node = c.compile(call.args[1], loc), c.node()
    workspace = _workspace(c, call.args[2] if len(call.args) > 2 else None, loc)

    def value(frame: Frame):
        values = of_threads(expr.value(frame), frame)[:, None]
        bad = expr.poison(frame) if expr.poison else None
        poison = None if bad is None else of_threads(bad, frame)[:, None]
        results, poison = reduction.run(frame, values, poison, workspace(frame))
        frame.cache[node] = None if poison is None else to_threads(poison[:, 0], frame)
        return to_threads(results[:, 0], frame)

    return Expr(value, lambda frame: frame.cache.get(node))


def all_reduce_batch(c: DeviceStatements, call: tirx.Call, loc: str) -> Step:
    """``AllReduce<...>::run_batch(values, workspace)``."""
    reduction = _reduction(call.args[0].value, loc)
    if reduction is None:
        return debug_ops.call_extern(c, call, loc)
    buffer, (offset,) = c.pointee(call.args[1], loc)
    registers = Registers(c, buffer.data, offset, reduction.count, "reduction", loc)
    workspace = _workspace(c, call.args[2] if len(call.args) > 2 else None, loc)

    def run(frame: Frame):
        rows = frame.mask.threads[None]
        values, bad = registers.read(frame, rows)
        poison = None if bad is None else bad[0]
        results, poison = reduction.run(frame, values[0], poison, workspace(frame))
        registers.write(frame, rows, results[None], poison)

    return Step(run)


def register(c: DeviceStatements) -> None:
    """Register the reductions."""
    for name in ("tirx.call_extern", "tirx.call_pure_extern"):
        c.calls[name], c.steps[name] = all_reduce, all_reduce_batch
