"""TileWeave's builtins, and TileLang's atomic operations on single elements."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from tvm import tirx

from ...builtins.debug import globaltimer
from ...builtins.memory import st
from ...builtins.spec import BUILTINS, Builtin, builtin_of, declaration_of
from ...passes.ir.ragged import counts_name
from ...passes.ir.walk import base_of, op_name
from ..machine.block import Frame
from ..machine.steps import Step
from ..machine.word_wait import WordWait
from ..memory.barrier_words import Barrier
from ..memory.order import LEVEL, merge
from ..memory.values import convert, equal_bits, is_float
from ..report.errors import SimulationError, uninitialized, unsupported
from .accesses import element_access, read_poison, select, store_tile
from .atomics import Word, accessed_by, gather, places, unwritten_word, words_at
from .expressions import Expr
from .functions import REDUCTIONS
from .numbers import note_operand
from .pointer import Pointer, refuse_poison
from .statements import Statements, nothing

_ORDERS = ("relaxed", "acquire", "acquire", "release", "acq_rel", "acq_rel")
"""C++ memory orders by TileLang's numbers."""


def load(c: Statements, call: tirx.Call, loc: str) -> Expr:
    pointer = Pointer(c, call.args[0], builtin_of(call).text, loc)
    scope, sem = call.args[2].value, call.args[3].value
    return _load(c, pointer, Word(pointer.ref, sem, scope), int(call.args[1]))


def _load(c: Statements, pointer: Pointer, word: Word, lanes: int) -> Expr:
    node = c.node()

    def value(frame: Frame):
        tensor, results, bad = word.ref.tensor(frame), [], []
        for thread_groups, at, index, _ in places(frame, pointer.index(frame), each_thread=False):
            words = words_at(frame, word.ref, tensor, index, lanes)
            accessed = accessed_by(frame, tensor, words, at)
            loaded = [(tensor.dtype.type(0), False)] * lanes
            if words:
                loaded = word.load_all(frame, tensor, words, thread_groups, accessed=accessed)
            values = [v for v, _ in loaded]
            results.append((at, values[0] if lanes == 1 else np.array(values)))
            bad.append((at, any(b for _, b in loaded)))
        poison = gather(frame, bad, np.dtype(np.bool_), 1) if any(b for _, b in bad) else None
        frame.cache[node] = poison
        return gather(frame, results, tensor.dtype, lanes)

    return Expr(value, lambda frame: frame.cache.get(node))


def store(c: Statements, call: tirx.Call, loc: str) -> Step:
    op, expr = builtin_of(call).text, c.compile(call.args[1], loc)
    pointer = Pointer(c, call.args[0], op, loc)
    word = Word(pointer.ref, call.args[3].value, call.args[2].value)
    return _store(c, pointer, expr, word, call.args[1].dtype.lanes, call)


def _store(c: Statements, pointer: Pointer, expr: Expr, word: Word, lanes: int, call: Any) -> Step:
    c.signals.setdefault(word.ref.name, {})[word.ref.loc] = word.ref.op

    def run(frame: Frame):
        tensor = word.ref.tensor(frame)
        stored = expr.value(frame)
        refuse_poison(frame, expr, pointer)
        at = pointer.index(frame)
        for thread_groups, place, index, (element,) in places(
            frame, at, stored, each_thread=True, lanes=lanes
        ):
            words = words_at(frame, word.ref, tensor, index, lanes)
            if not words:
                continue
            values = [convert(v, tensor.dtype) for v in ([element] if lanes == 1 else element)]
            accessed = accessed_by(frame, tensor, words, place)
            word.store(frame, tensor, words, thread_groups, values, accessed)

    return c.preempted(run, call)


def _change(
    c: Statements, pointer: Pointer, operands: list[Expr], word: Word, lanes: int, combine: Any
) -> Expr:
    """Compile an atomic change of a word by each thread. Its value is the old value."""
    c.signals.setdefault(word.ref.name, {})[word.ref.loc] = word.ref.op
    word = replace(word, combine=combine if combine in REDUCTIONS.values() else None)

    def value(frame: Frame):
        tensor, results = word.ref.tensor(frame), []
        evaluated = [e.value(frame) for e in operands]
        for e in operands:
            refuse_poison(frame, e, pointer)
        at = pointer.index(frame)
        for thread_groups, place, index, values in places(
            frame, at, *evaluated, each_thread=True, lanes=lanes
        ):
            olds = []
            for lane, i in enumerate(words_at(frame, word.ref, tensor, index, lanes)):
                args = [convert(v if lanes == 1 else v[lane], tensor.dtype) for v in values]
                olds.append(word.change(
                    frame, tensor, i, thread_groups,
                    lambda old, args=args: convert(combine(old, *args), tensor.dtype),
                    accessed_by(frame, tensor, [i], place),
                ))  # fmt: skip
            olds = olds or [tensor.dtype.type(0)] * lanes
            results.append((place, olds[0] if lanes == 1 else np.array(olds)))
        return gather(frame, results, tensor.dtype, lanes)

    return Expr(value)


def _atomic(spec: Builtin):
    """Return the compiler of an atomic operation such as ``atom_add`` or ``red_add``."""
    combine = {**REDUCTIONS, **_REPLACE}.get(spec.combines or "set")

    def compile(c: Statements, call: tirx.Call, loc: str) -> Expr:
        if combine is None:
            raise unsupported(f"{spec.text}, which combines by {spec.combines!r},", loc)
        pointer = Pointer(c, call.args[0], spec.text, loc)
        *operands, _, scope, sem = list(call.args[1:])
        word = Word(pointer.ref, sem.value, scope.value)
        exprs = [c.compile(o, loc) for o in operands]
        return _change(c, pointer, exprs, word, operands[-1].dtype.lanes, combine)

    return compile


_REPLACE = {
    "set": lambda old, new: new,
    "cas": lambda old, compare, new: new if equal_bits(old, compare) else old,
}
"""Atomic operations that replace an element."""


def signal(c: Statements, call: tirx.Call, loc: str) -> Step:
    name, expr = builtin_of(call).text, c.compile(call.args[1], loc)
    pointer = Pointer(c, call.args[0], name, loc)
    op, scope, sem = (call.args[i].value for i in (3, 4, 5))
    word = Word(pointer.ref, sem, scope)
    if op == "set":
        return _store(c, pointer, expr, word, 1, call)
    return c.preempted(_change(c, pointer, [expr], word, 1, np.add).value, call)


def _wait(spec: Builtin):
    relation = spec.waits

    def compile(c: Statements, call: tirx.Call, loc: str) -> Step:
        pointer, expr = Pointer(c, call.args[0], spec.text, loc), c.compile(call.args[1], loc)
        peer = c.compile(call.args[2], loc).value
        word = Word(pointer.ref, call.args[-1].value, call.args[-2].value)

        def run(frame: Frame):
            yield None
            tensor = word.ref.tensor(frame)
            value = expr.value(frame)

            def sender() -> int:
                return int(np.asarray(peer(frame)).flat[0])

            refuse_poison(frame, expr, pointer)
            at = pointer.index(frame)
            for thread_groups, _, index, (expected,) in list(
                places(frame, at, value, each_thread=False)
            ):
                words_at(frame, word.ref, tensor, index, 1)
                expected = convert(expected, tensor.dtype)

                wait = WordWait(
                    frame.block.machine, tensor, index, relation, expected,
                    tensor.element(index), spec.text, loc, frame.block.place,
                    partial(unwritten_word, frame, word.ref, index), sender,
                )  # fmt: skip
                yield from wait.until_ready(partial(word.look, frame, tensor, index, thread_groups))
                word.load(frame, tensor, index, thread_groups, newest=True)
                tensor.note_wait(index, relation, expected)

        return Step(run, True)

    return compile


def fence(c: Statements, call: tirx.Call, loc: str) -> Step:
    level, total = LEVEL[call.args[0].value], call.args[1].value == "sc"

    def run(frame: Frame):
        memory = frame.block.machine.memory
        for i in frame.mask.thread_groups:
            if total:
                published = frame.block.order.fence(i, level, memory.sc_fences)
                memory.sc_fences = merge(memory.sc_fences, published)
            else:
                frame.block.order.fence(i, level)

    return Step(run)


def _barrier(spec: Builtin):
    def compile(c: Statements, call: tirx.Call, loc: str) -> Step:
        argument = call.args[0]
        is_pointer = op_name(argument).endswith("access_ptr")
        pointer = Pointer(c, argument, spec.text, loc) if is_pointer else None

        called = Barrier(spec.text, spec.participants, loc)
        if pointer is not None:
            c.counted.add(pointer.ref.name)

        def run(frame: Frame):
            yield None
            block, tensor, index = frame.block, None, ()
            if pointer is not None:
                index = tuple(int(np.asarray(i).flat[0]) for i in pointer.index(frame))
                tensor = pointer.ref.tensor(frame)
                words_at(frame, pointer.ref, tensor, index, 1)
                if tensor.symmetric and index[0] != block.rank:
                    raise SimulationError(
                        "arrival",
                        f"{spec.text} at {tensor.name}{list(index)}, words of rank "
                        f"{tensor.ranks[index[0]]}, by "
                        f"{block.place}; expected its own rank's"
                        f"\n --> {loc}",
                    )
            words = block.machine.barrier_words.at(tensor, index, block, called)
            barrier = block.machine.barrier(spec.participants, words, block)
            words.arrive(frame, called)
            yield from barrier.arrive_and_wait(frame, spec.text, loc)
            words.leave(frame, called)

        return Step(run, True)

    return compile


def tilelang_atomic(kind: str, returns: bool, lanes: int = 1, widened: bool = False):
    """Return the compiler of T.atomic_add and similar operations, which change each element
    separately.

    Args:
        widened: whether ``make_coherent`` has given it system scope.
    """
    combine = {"load": None, "store": lambda old, new: new}.get(kind, REDUCTIONS.get(kind))
    op = f"T.atomic_{kind}" + (f"x{lanes}" if lanes > 1 else "")

    def compile(c: Statements, call: tirx.Call, loc: str) -> Any:
        if kind != "load" and (shared := c.shared_atomic(kind, lanes, call, loc)) is not None:
            return shared if returns else c.preempted(shared.value, call)
        pointer = Pointer(c, call.args[0], op, loc)
        if pointer.slot >= 0:
            return _tile_atomic(c, call, pointer, combine, returns, loc, lanes)
        word = _word_of(c, call, pointer, kind, returns, widened)
        if kind == "load":
            return _load(c, pointer, word, 1)
        value = c.compile(vector_operand(c, call.args[1], lanes, loc), loc)
        if kind == "store":
            return _store(c, pointer, value, word, 1, call)
        change = _change(c, pointer, [value], word, lanes, combine)
        if returns:
            return change

        def run(frame: Frame) -> None:
            if frame.space is None or lanes > 1:
                change.value(frame)
                return
            # Update all points at once: a sum needs no history of its words.
            _space_atomic(frame, pointer, value, combine, word)

        return c.preempted(run, call)

    return compile


def _word_of(
    c: Statements, call: tirx.Call, pointer: Pointer, kind: str, returns: bool, widened: bool
) -> Word:
    """Return the word of an atomic operation, with the scope and order that the GPU applies."""
    numbers = call.args[1 if kind == "load" else 2 :]
    sem = _ORDERS[int(numbers[0])] if numbers else "relaxed"
    scope = "sys" if (widened or c.widens) and pointer.buffer.data in c.symmetric else "gpu"
    if scope == "gpu" and sem != "relaxed" and _drops_order(kind, returns, pointer.dtype):
        pointer.op += f" (relaxed: TileLang drops memory_order={sem!r})"
        sem = "relaxed"
    return Word(replace(pointer.ref, clips=c.guards), sem, scope)


def _drops_order(kind: str, returns: bool, dtype: np.dtype) -> bool:
    """Return whether TileLang's ``atomic.h`` drops ``memory_order``, since ``atomicAdd`` and loops
    of ``atomicCAS`` have none."""
    is_half = is_float(dtype) and dtype.itemsize == 2
    return is_half if kind in ("max", "min") else kind == "add" and not returns and not is_half


def _space_atomic(frame: Frame, pointer: Pointer, value: Expr, combine: Any, word: Word) -> None:
    loc = pointer.loc
    tensor = pointer.ref.tensor(frame)
    operand = value.value(frame)
    refuse_poison(frame, value, pointer)
    space = frame.space
    index = [np.broadcast_to(i, space) for i in pointer.index(frame)]
    key, covered, _ = select(
        frame, tensor.name, tensor.shape, index, loc, tensor.symmetric, word.ref.clips
    )
    values = np.broadcast_to(convert(operand, tensor.dtype), space)
    groups = frame.mask.overlapping
    access = element_access(frame, pointer.ref, groups, tensor, index, covered, word.level)
    tensor.update(key, combine, values if covered is None else values[covered], access)


def _tile_atomic(
    c: Statements, call: tirx.Call, pointer: Pointer, combine: Any, returns: bool, loc: str,
    lanes: int,
) -> Any:  # fmt: skip
    """Compile an atomic operation in shared memory, whose accesses are not checked for order."""
    if combine is None:
        raise unsupported(f"{pointer.op} in {pointer.buffer.scope()} memory", loc)
    value = c.compile(vector_operand(c, call.args[1], lanes, loc), loc)

    def change(frame: Frame):
        tile, results = frame.tile(pointer.slot), []
        operand = value.value(frame)
        refuse_poison(frame, value, pointer)
        at = pointer.index(frame)
        for _, place, index, (element,) in places(
            frame, at, operand, each_thread=True, lanes=lanes
        ):
            words = [(*index[:-1], index[-1] + lane) for lane in range(lanes)]
            elements = convert([element] if lanes == 1 else element, tile.dtype)
            if tile.poison is not None and any(tile.poison[word] for word in words):
                frame.block.note_poison(tile, words[0], loc)
                raise uninitialized(f"{pointer.op} of", frame.block, loc)
            old = [tile.data[word] for word in words]
            results.append((place, old[0] if lanes == 1 else np.array(old)))
            for word, before, new in zip(words, old, elements, strict=True):
                note_operand(frame, tile.name, before)
                store_tile(frame, tile, list(word), combine(before, new), None, loc)
        return gather(frame, results, tile.dtype, lanes)

    return Expr(change) if returns else c.preempted(change, call)


def vector_operand(c: Statements, operand: Any, lanes: int, loc: str) -> Any:
    """Return the vector that an operand is or points to: vectorized loops pass vectors."""
    if lanes == 1 or operand.dtype.lanes == lanes:
        return operand
    buffer, (*first, last) = c.pointee(operand, loc)
    return tirx.BufferLoad(buffer, [*first, tirx.Ramp(base_of(last), 1, lanes)])


def _any_or_all(f: Any):
    def compile(c: Statements, call: tirx.Call, loc: str) -> Expr:
        pointer = Pointer(c, call.args[0], f"T.{call.op.name.rsplit('.', 1)[-1]}", loc)
        count = int(call.args[1])
        if pointer.slot < 0:
            raise unsupported(f"{pointer.op} in global memory", loc)
        node = c.node()

        def value(frame: Frame):
            tile = frame.tile(pointer.slot)
            frame.block.use(tile, frame.mask.overlapping)
            first = int(np.ravel_multi_index([int(i) for i in pointer.index(frame)], tile.shape))
            part = slice(first, first + count)
            poison = None if tile.poison is None else tile.poison.reshape(-1)[part]
            bad = read_poison(frame, tile, ..., poison, loc)
            frame.cache[node] = None if bad is None else True
            return bool(f(tile.data.reshape(-1)[part]))

        return Expr(value, lambda frame: frame.cache.get(node))

    return compile


def announce(c: Statements, call: tirx.Call, loc: str) -> Step:
    """Compile the announcement of a segment by one thread."""
    spec = builtin_of(call)
    counts, total = (
        Pointer(c, node, spec.text, loc) for node in (call.args[0], spec.operand(call, "total"))
    )
    rows = next(n for n in c.globals.values() if counts_name(n) == counts.ref.name)
    count = c.compile(spec.operand(call, "count"), loc)
    row_size, tile = (int(spec.operand(call, name)) for name in ("row_size", "tile"))
    rows_before = np.arange(0, int(spec.operand(call, "rows")), tile)

    def run(frame: Frame):
        value = int(np.asarray(count.value(frame)).flat[0])
        refuse_poison(frame, count, counts)
        block, segments = frame.block, frame.block.tensors[rows].segments
        *at, word = (int(np.asarray(i).flat[0]) for i in counts.index(frame))
        *sent_at, first = (int(np.asarray(i).flat[0]) for i in total.index(frame))
        place = (at[0], *at[len(at) - len(sent_at) :])
        text = f"{spec.text} of {value} rows by {block.place} --> {loc}"
        if not 0 <= value <= segments.capacity:
            segment = f"{rows}[{', '.join(map(str, place))}]"
            raise SimulationError(
                "bounds", f"{segment} has {segments.capacity} rows of capacity: {text}"
            )
        segments.announce(place, value, text)
        access = block.access(frame.mask.overlapping, spec.text, loc)
        sent = total.ref.tensor(frame)
        totals = (*sent_at, slice(first, first + len(rows_before)))
        old, _ = sent.read(totals, access)
        in_tiles = np.clip(value - rows_before, 0, tile)
        new = (old.astype(np.int64) + in_tiles * row_size).astype(np.uint32)
        sent.write(totals, new, access)
        words = np.array([value, *new], np.uint32)
        counts.ref.tensor(frame).write((*at, slice(word, word + len(words))), words, access)

    return c.preempted(run, call)


def uniform(c: Statements, call: tirx.Call, loc: str) -> Expr:
    """Compile a value that must be equal in all blocks of a launch on all ranks."""
    text, expr, node = builtin_of(call).text, c.compile(call.args[0], loc), c.node()

    def value(frame: Frame):
        block, got = frame.block, int(np.asarray(expr.value(frame)).flat[0])
        launch = block.launch
        key = launch.kernel.name, launch.epoch, launch.enqueue_index, node
        first = block.machine.uniform.setdefault(key, (got, block.name()))
        if first[0] != got:
            raise SimulationError(
                "assertion",
                f"{text} has the value {got} in {block.name()} and {first[0]} in {first[1]}, in "
                f"launch {block.epoch}; expected equal values\n --> {loc}",
            )
        return np.int32(got)

    return Expr(value, expr.poison)


def register(c: Statements) -> None:
    """Register the builtins."""
    c.steps[declaration_of(st).op_name] = store
    c.calls[declaration_of(globaltimer).op_name] = lambda c, call, loc: Expr(
        lambda frame: np.int64(len(frame.block.machine.memory.events.what))
    )  # the simulator's time
    for spec in BUILTINS.values():
        if spec.fetches or spec.combines:
            c.calls[spec.op_name] = _atomic(spec)
        elif spec.loads:
            c.calls[spec.op_name] = load
        elif spec.waits:
            c.steps[spec.op_name] = _wait(spec)
        elif spec.uniform:
            c.calls[spec.op_name] = uniform
        elif spec.participants:
            c.steps[spec.op_name] = _barrier(spec)
        elif spec.announces:
            c.steps[spec.op_name] = announce
        elif spec.signals:
            c.steps[spec.op_name] = signal
        elif spec.is_fence:
            c.steps[spec.op_name] = fence
        elif spec.no_effect or spec.checks or spec.proxy_fence:
            c.steps[spec.op_name] = nothing
    for kind in ("add", "max", "min", "or"):
        c.steps[f"tl.atomic_{kind}_elem_op"] = tilelang_atomic(kind, False)
        c.calls[f"tl.atomic_{kind}_ret_elem_op"] = tilelang_atomic(kind, True)
    for lanes in (2, 4):
        c.steps[f"tl.atomic_addx{lanes}_elem_op"] = tilelang_atomic("add", False, lanes)
        c.calls[f"tl.atomic_addx{lanes}_ret_elem_op"] = tilelang_atomic("add", True, lanes)
    c.calls |= {"tl.any_of": _any_or_all(np.any), "tl.all_of": _any_or_all(np.all)}
    c.calls["tl.atomic_load_elem_op"] = tilelang_atomic("load", True)
    c.steps["tl.atomic_store_elem_op"] = tilelang_atomic("store", False)
