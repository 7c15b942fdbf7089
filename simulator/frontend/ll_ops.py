"""Words of the LL protocol: each holds data and a flag, and only one word is accessed at once."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from tvm import tirx

from ...builtins.spec import BUILTINS, Builtin, builtin_of
from ..machine.block import Frame
from ..machine.steps import Step
from ..machine.word_wait import FlagPoll
from ..memory.flagged import load_flagged, store_flagged
from ..memory.values import convert, numpy_dtype
from .atomics import Word, gather, places, unwritten_word, words_at
from .expressions import Expr
from .pointer import Pointer, refuse_poison
from .statements import Statements


def store(c: Statements, call: tirx.Call, loc: str) -> Step:
    """Compile a store of words. Other blocks may run between the stores of its two words, whose
    order is arbitrary."""
    spec, pointer, word = _operands(c, call, loc)
    value, flag = (c.compile(spec.operand(call, name), loc) for name in ("value", "flag"))
    lanes, dtype = call.args[1].dtype.lanes, numpy_dtype(call.args[1].dtype)
    c.signals.setdefault(word.ref.name, {})[loc] = spec.text

    def run(frame: Frame):
        yield None
        tensor, stored = word.ref.tensor(frame), []
        data, flags = value.value(frame), flag.value(frame)
        refuse_poison(frame, value, pointer)
        refuse_poison(frame, flag, pointer)
        if lanes > 1 and isinstance(flags, np.ndarray):
            flags = flags[..., None]
        for thread_groups, _, index, (element, at_flag) in places(
            frame, pointer.index(frame), data, flags, each_thread=True, lanes=lanes
        ):
            halves = _bits(convert(element, dtype))
            new = int(np.asarray(at_flag).flat[0])
            indices = words_at(frame, word.ref, tensor, index, len(halves))
            stores = list(zip(indices, halves, strict=True))
            frame.block.machine.order_words(stores)
            stored.append((thread_groups, new, stores))
        for number in range(max((len(stores) for *_, stores in stored), default=0)):
            if number:
                yield None
            for thread_groups, new, stores in stored:
                at, half = stores[number]
                store_flagged(frame, word, tensor, at, thread_groups, half, new)

    return Step(run, True)


def load(c: Statements, call: tirx.Call, loc: str) -> Expr:
    """Compile a poll of words. The statement around it waits for the flags before it runs."""
    spec, pointer, word = _operands(c, call, loc)
    flag, peer = (c.compile(spec.operand(call, name), loc) for name in ("flag", "peer"))
    count, node = int(spec.operand(call, "words")), c.node()
    lanes, dtype = call.dtype.lanes, numpy_dtype(call.dtype)

    def wait(frame: Frame):
        yield None
        tensor, results = word.ref.tensor(frame), []
        wanted = flag.value(frame)
        refuse_poison(frame, flag, pointer)

        def sender() -> int:
            return int(np.asarray(peer.value(frame)).flat[0])

        for thread_groups, place, index, (expected,) in list(
            places(frame, pointer.index(frame), wanted, each_thread=False)
        ):
            expected = int(convert(expected, np.dtype(np.uint32)))
            halves = []
            for at in words_at(frame, word.ref, tensor, index, count):
                poll = FlagPoll(
                    frame.block.machine, tensor, at, "flag", expected, tensor.element(at),
                    spec.text, loc, frame.block.place,
                    partial(unwritten_word, frame, word.ref, at), sender,
                )  # fmt: skip
                yield from poll.until_ready(partial(word.look, frame, tensor, at, thread_groups))
                halves.append(load_flagged(frame, word, tensor, at, thread_groups))
            values = np.frombuffer(np.array(halves, np.uint32).tobytes(), dtype)
            results.append((place, values if lanes > 1 else values[0]))
        frame.cache[node] = gather(frame, results, dtype, lanes)

    c.polls.append(wait)
    return Expr(lambda frame: frame.cache[node])


def _operands(c: Statements, call: tirx.Call, loc: str) -> tuple[Builtin, Pointer, Word]:
    spec = builtin_of(call)
    pointer = Pointer(c, call.args[0], spec.text, loc)
    return spec, pointer, Word(pointer.ref, "relaxed", spec.qualifier(call, "scope"))


def _bits(element: Any) -> list[int]:
    """Return the bits of a value in pieces of 4 bytes."""
    return np.frombuffer(np.ascontiguousarray(element).tobytes(), np.uint32).tolist()


def register(c: Statements) -> None:
    """Register the builtins that access words with flags."""
    for spec in BUILTINS.values():
        if spec.polls:
            c.calls[spec.op_name] = load
        elif spec.flagged:
            c.steps[spec.op_name] = store
