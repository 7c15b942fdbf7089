"""Multimem operations: one multicast address refers to an element of the copies of all ranks."""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce

import numpy as np
from tvm import tirx

from ...builtins.spec import BUILTINS, builtin_of
from ...passes.ir.walk import base_of
from ..machine.block import Frame
from ..machine.steps import Step
from ..memory.values import accumulation_dtype, convert, numpy_dtype
from ..report.errors import SimulationError
from .accesses import GlobalRef
from .atomics import Word, gather, places, words_at
from .expressions import Expr
from .functions import REDUCTIONS
from .pointer import refuse_poison
from .statements import Statements


class MulticastRef:
    """Operand ``ref`` of a multimem operation: an element of all copies."""

    def __init__(self, c: Statements, call: tirx.Call, loc: str) -> None:
        self.buffer, self.loc = call.args[0].args[0].buffer, loc
        spec = builtin_of(call)
        self.op = spec.text
        indices = call.args[0].args[0].indices
        self.index = c.indices([base_of(i) for i in indices], self.buffer.name, loc)
        ref = GlobalRef(c.multicasts[self.buffer.data], self.op, loc)
        self.word = Word(ref, spec.qualifier(call, "sem"), spec.qualifier(call, "scope"))

    def copies(self, frame: Frame, index: tuple, lanes: int) -> Iterator[list[tuple]]:
        """Yield, for each rank, the words of its copy that begin at ``index``."""
        tensor = self.word.ref.tensor(frame)
        if len(tensor.shape) != len(index) + 1:
            raise SimulationError(
                "bounds",
                f"{self.op} of {tensor.name}, which is no multicast tensor, by "
                f"{frame.block.place}\n --> {self.loc}",
            )
        for rank in range(tensor.shape[0]):
            yield words_at(frame, self.word.ref, tensor, (rank, *index), lanes)


def load_reduce(c: Statements, call: tirx.Call, loc: str) -> Expr:
    ref, lanes, node = MulticastRef(c, call, loc), int(call.args[1]), c.node()
    combine = REDUCTIONS[builtin_of(call).qualifier(call, "op")]
    dtype = numpy_dtype(ref.buffer.dtype)
    wide = accumulation_dtype(dtype)

    def value(frame: Frame):
        tensor, results, bad = ref.word.ref.tensor(frame), [], []
        for thread_groups, at, index, _ in places(frame, ref.index(frame), each_thread=False):
            copies = [
                [ref.word.load(frame, tensor, i, thread_groups) for i in words]
                for words in ref.copies(frame, index, lanes)
            ]
            parts = [np.array([v for v, _ in copy], dtype).astype(wide) for copy in copies]
            reduced = convert(reduce(combine, parts), dtype)
            results.append((at, reduced[0] if lanes == 1 else reduced))
            bad.append((at, any(b for copy in copies for _, b in copy)))
        poison = gather(frame, bad, np.dtype(np.bool_), 1) if any(b for _, b in bad) else None
        frame.cache[node] = poison
        return gather(frame, results, dtype, lanes)

    return Expr(value, lambda frame: frame.cache.get(node))


def _change(reduces: bool):
    def compile(c: Statements, call: tirx.Call, loc: str) -> Step:
        ref, expr = MulticastRef(c, call, loc), c.compile(call.args[1], loc)
        lanes, dtype = call.args[1].dtype.lanes, numpy_dtype(ref.buffer.dtype)
        combine = REDUCTIONS[builtin_of(call).qualifier(call, "op")] if reduces else None

        def run(frame: Frame):
            tensor, operand = ref.word.ref.tensor(frame), expr.value(frame)
            refuse_poison(frame, expr, ref)
            at = ref.index(frame)
            for thread_groups, _, index, (element,) in places(
                frame, at, operand, each_thread=True, lanes=lanes
            ):
                for words in ref.copies(frame, index, lanes):
                    for lane, i in enumerate(words):
                        value = convert(element if lanes == 1 else element[lane], dtype)
                        if combine is None:
                            ref.word.store(frame, tensor, [i], thread_groups, [value])
                        else:
                            ref.word.change(
                                frame, tensor, i, thread_groups,
                                lambda old, v=value, f=combine: convert(f(old, v), dtype),
                            )  # fmt: skip

        return c.preempted(run, call)

    return compile


def register(c: Statements) -> None:
    """Register the multimem operations."""
    for spec in BUILTINS.values():
        if spec.multicast and spec.writes:
            c.steps[spec.op_name] = _change(spec.has_qualifier("op"))
        elif spec.multicast:
            c.calls[spec.op_name] = load_reduce
