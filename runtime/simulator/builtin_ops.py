"""TileWeave's builtins, and TileLang's atomic operations on single elements."""

from __future__ import annotations

from typing import Any

import numpy as np
from tvm import tirx

from ...builtins.declare import BUILTINS, ElementOf
from .accesses import GlobalRef, out_of_bounds, store_tile
from .errors import SimulationError, unsupported
from .expressions import Expr, is_poisoned
from .order import SYS
from .statements import Statements, Step, Waiting
from .values import convert, numpy_dtype
from .words import Word, gather, places, unwritten_word, words_at

_FUNCTIONS = {
    "add": np.add, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and,
    "or": np.bitwise_or, "xor": np.bitwise_xor,
}  # fmt: skip
_HOLDS = {
    "eq": lambda seen, value: seen == value,
    "ne": lambda seen, value: seen != value,
    "ge": lambda seen, value: seen >= value,
    "gt": lambda seen, value: seen > value,
    "le": lambda seen, value: seen <= value,
    "lt": lambda seen, value: seen < value,
}
_SIGN = {"eq": "==", "ne": "!=", "ge": ">=", "gt": ">", "le": "<=", "lt": "<", "reached": "reached"}
_ORDERS = ("relaxed", "acquire", "acquire", "release", "acq_rel", "acq_rel")
"""TileLang's numbers of C++ memory orders."""


class Pointer:
    """A compiled ``T.access_ptr(tensor[index], ...)``."""

    def __init__(self, c: Statements, node: Any, op: str, site: str) -> None:
        load = node.args[0]
        buffer = load.buffer
        self.buffer, self.site, self.op = buffer, site, op
        self.dtype = numpy_dtype(buffer.dtype)
        starts = [i.base if isinstance(i, tirx.Ramp) else i for i in load.indices]
        self.index = c.indices(starts, buffer.name, site)
        self.ref = GlobalRef(c.globals[buffer.data], op, site) if buffer.data in c.globals else None
        self.slot = c.tiles.get(buffer.data, -1)
        if self.ref is None and self.slot < 0:
            raise unsupported(f"{op} of {buffer.name} in {buffer.scope()} memory", site)


def _refuse_poison(frame: Any, expr: Expr, pointer: Pointer) -> None:
    if expr.poison is not None and is_poisoned(expr.poison(frame), frame):
        raise SimulationError(
            "poison",
            f"the operand of {pointer.op} on {pointer.buffer.name} is computed from memory that "
            f"nobody has written, by {frame.block.name()} in launch {frame.block.epoch}"
            f"\n --> {pointer.site}",
        )


def _lanes(dtype: str) -> int:
    tail = str(dtype).rsplit("x", 1)
    return int(tail[1]) if len(tail) == 2 and tail[1].isdigit() else 1


def load(c: Statements, call: tirx.Call, site: str) -> Expr:
    pointer = Pointer(c, call.args[0], "W.ld", site)
    scope, sem = call.args[2].value, call.args[3].value
    return _load(c, pointer, Word(pointer.ref, sem, scope), int(call.args[1]))


def _load(c: Statements, pointer: Pointer, word: Word, lanes: int) -> Expr:
    node = c.node()

    def value(frame):
        tensor, results, bad = word.ref.tensor(frame), [], []
        for classes, at, index, _ in places(frame, pointer.index(frame), each_thread=False):
            found = [word.load(frame, tensor, i, classes)
                     for i in words_at(frame, word.ref, tensor, index, lanes)]  # fmt: skip
            values = [v for v, _ in found]
            results.append((at, values[0] if lanes == 1 else np.array(values)))
            bad.append((at, any(b for _, b in found)))
        poison = gather(frame, bad, np.dtype(np.bool_), 1) if any(b for _, b in bad) else None
        frame.cache[node] = poison
        return gather(frame, results, tensor.dtype, lanes)

    return Expr(value, lambda frame: frame.cache.get(node))


def store(c: Statements, call: tirx.Call, site: str) -> Step:
    pointer, expr = Pointer(c, call.args[0], "W.st", site), c.compile(call.args[1], site)
    word = Word(pointer.ref, call.args[3].value, call.args[2].value)
    return _store(c, pointer, expr, word, _lanes(call.args[1].dtype), call)


def _store(c, pointer: Pointer, expr: Expr, word: Word, lanes: int, call: Any) -> Step:
    def run(frame):
        tensor = word.ref.tensor(frame)
        found = expr.value(frame)
        _refuse_poison(frame, expr, pointer)
        at = pointer.index(frame)
        for classes, _, index, (one,) in places(frame, at, found, each_thread=True, lanes=lanes):
            for lane, i in enumerate(words_at(frame, word.ref, tensor, index, lanes)):
                value = one if lanes == 1 else one[lane]
                word.store(frame, tensor, i, classes, convert(value, tensor.dtype))

    return c.preempted(run, call)


def _change(
    c: Statements, pointer: Pointer, operands: list[Expr], word: Word, lanes: int, combine: Any
) -> Expr:
    """An atomic change of a word by each thread; the value before."""

    def value(frame):
        tensor, results = word.ref.tensor(frame), []
        found = [e.value(frame) for e in operands]
        for e in operands:
            _refuse_poison(frame, e, pointer)
        at = pointer.index(frame)
        for classes, place, index, values in places(
            frame, at, *found, each_thread=True, lanes=lanes
        ):
            olds = []
            for lane, i in enumerate(words_at(frame, word.ref, tensor, index, lanes)):
                own = [convert(v if lanes == 1 else v[lane], tensor.dtype) for v in values]
                olds.append(word.change(
                    frame, tensor, i, classes,
                    lambda old, own=own: convert(combine(old, *own), tensor.dtype),
                ))  # fmt: skip
            results.append((place, olds[0] if lanes == 1 else np.array(olds)))
        return gather(frame, results, tensor.dtype, lanes)

    return Expr(value)


def _atomic(name: str):
    """``atom_add`` and its like, and ``red_add``."""
    kind = name.split("_", 1)[1]
    combine = {
        "exch": lambda old, new: new,
        "cas": lambda old, compare, new: new if _same_bits(old, compare) else old,
    }.get(kind, _FUNCTIONS.get(kind))

    def compile(c: Statements, call: tirx.Call, site: str) -> Expr:
        pointer = Pointer(c, call.args[0], f"W.{name}", site)
        *operands, _, scope, sem = list(call.args[1:])
        word = Word(pointer.ref, sem.value, scope.value)
        exprs = [c.compile(o, site) for o in operands]
        return _change(c, pointer, exprs, word, _lanes(operands[-1].dtype), combine)

    return compile


def _same_bits(a: Any, b: Any) -> bool:
    return np.asarray(a).tobytes() == np.asarray(b).tobytes()


def signal(c: Statements, call: tirx.Call, site: str) -> Step:
    pointer, expr = Pointer(c, call.args[0], "W.signal", site), c.compile(call.args[1], site)
    op, scope, sem = (call.args[i].value for i in (3, 4, 5))
    word = Word(pointer.ref, sem, scope)
    if op == "set":
        return _store(c, pointer, expr, word, 1, call)
    return c.preempted(_change(c, pointer, [expr], word, 1, np.add).value, call)


def _wait(name: str):
    relation = name.removeprefix("wait_")

    def compile(c: Statements, call: tirx.Call, site: str) -> Step:
        pointer, expr = Pointer(c, call.args[0], f"W.{name}", site), c.compile(call.args[1], site)
        peer = c.compile(call.args[2], site).value
        word = Word(pointer.ref, call.args[-1].value, call.args[-2].value)
        bits = pointer.dtype.itemsize * 8

        def holds(seen: Any, value: Any) -> bool:
            if relation != "reached":
                return bool(_HOLDS[relation](seen, value))
            return (int(seen) - int(value)) % (1 << bits) < 1 << (bits - 1)

        def run(frame):
            yield None
            tensor = word.ref.tensor(frame)
            value = expr.value(frame)
            _refuse_poison(frame, expr, pointer)
            at = pointer.index(frame)
            for classes, _, index, (want,) in list(places(frame, at, value, each_thread=False)):
                words_at(frame, word.ref, tensor, index, 1)
                want = convert(want, tensor.dtype)

                def ready(index=index, want=want):
                    entry = tensor.newest(index)
                    if entry.poisoned:
                        raise unwritten_word(frame, word.ref, index)
                    return holds(entry.value, want)

                def text(index=index, want=want):
                    asked = int(np.asarray(peer(frame)).flat[0])
                    flag = f"{tensor.name}[{', '.join(map(str, index))}]"
                    return (
                        f"{frame.block.name()} in launch {frame.block.epoch} stands at "
                        f"W.{name}({flag}): value seen {tensor.newest(index).value}, value wanted "
                        f"{_SIGN[relation]} {want}"
                        + (f", from rank {asked}" if asked >= 0 else "")
                        + f" --> {site}\n    {frame.block.machine.signallers(tensor, index)}"
                    )

                if not ready():
                    yield Waiting(frame.block, ready, text)
                word.load(frame, tensor, index, classes, newest=True)

        return Step(run, True)

    return compile


def fence(c: Statements, call: tirx.Call, site: str) -> Step:
    word = Word(GlobalRef("", "W.fence", site), "acq_rel", call.args[0].value)

    def run(frame):
        for i in frame.mask.classes:
            frame.block.order.fence(i, word.level)

    return Step(run)


def _barrier(name: str):
    def compile(c: Statements, call: tirx.Call, site: str) -> Step:
        at = call.args[0]
        pointer = (
            Pointer(c, at, f"W.{name}", site) if getattr(at.op, "name", "") == "tl.access_ptr"
            else None
        )  # fmt: skip

        def run(frame):
            yield None
            block, words = frame.block, None
            if pointer is not None:
                index = tuple(int(np.asarray(i).flat[0]) for i in pointer.index(frame))
                tensor = pointer.ref.tensor(frame)
                words_at(frame, pointer.ref, tensor, index, 1)
                words = (tensor.name, *(index[1:] if tensor.symmetric else (index, block.rank)))
            barrier = block.machine.barrier(name, words, block.rank)
            yield from barrier.meet(frame, f"W.{name}", site)

        return Step(run, True)

    return compile


def _transfer(c: Statements, call: tirx.Call, site: str) -> Step:
    """put_block, put_warp, get_block, get_warp: ordinary loads and stores of all threads."""
    op = f"W.{call.op.name.removeprefix('tileweave.')}"
    src, dst = Pointer(c, call.args[0], op, site), Pointer(c, call.args[1], op, site)
    size = c.indices([call.args[2]], op, site)

    def run(frame):
        count = _uniform(size(frame)[0], frame, op, site)
        if count <= 0:
            return
        source, target = src.ref.tensor(frame), dst.ref.tensor(frame)
        classes = frame.mask.classes
        access = frame.block.access(classes, op, site, copies=True)
        values, poison = source.read(_run_of(frame, source, src, count), access)
        _refuse_stored(frame, target, poison, op, site)
        target.write(_run_of(frame, target, dst, count), values, access, poison)

    return c.preempted(run, call)


def _uniform(value: Any, frame: Any, op: str, site: str) -> int:
    if isinstance(value, np.ndarray):
        own = value[frame.mask.on] if value.shape == frame.mask.on.shape else value
        if not (own == own.flat[0]).all():
            raise unsupported(f"{op} with operands that differ between threads", site)
        value = own.flat[0]
    return int(value)


def _run_of(frame: Any, tensor: Any, pointer: Pointer, count: int) -> tuple:
    """The key of ``count`` elements that follow each other from the pointer."""
    index = [_uniform(i, frame, pointer.op, pointer.site) for i in pointer.index(frame)]
    shape = tensor.shape
    copy_size = int(np.prod(shape[1:])) if getattr(tensor, "symmetric", False) else int(
        np.prod(shape)
    )  # fmt: skip
    if not all(0 <= i < n or (i == n and count == 0) for i, n in zip(index, shape, strict=True)):
        raise out_of_bounds(frame, tensor.name, shape, index, pointer.site)
    first = int(np.ravel_multi_index(tuple(index), shape))
    if first % copy_size + count > copy_size:
        raise out_of_bounds(
            frame, tensor.name, shape, [*index[:-1], f"{index[-1]} .. + {count}"], pointer.site
        )
    if index[-1] + count <= shape[-1]:
        return (*index[:-1], slice(index[-1], index[-1] + count))
    return np.unravel_index(np.arange(first, first + count), shape)


def _refuse_stored(frame: Any, tensor: Any, poison: Any, op: str, site: str) -> None:
    if poison is not None and not tensor.symmetric:
        raise SimulationError(
            "poison",
            f"{op} to {tensor.name} of memory that nobody has written, by {frame.block.name()} in "
            f"launch {frame.block.epoch}\n --> {site}",
        )


def bulk_load(c: Statements, call: tirx.Call, site: str) -> Step:
    dst, src = (Pointer(c, call.args[i], "W.bulk_load", site) for i in (0, 1))
    size = c.indices([call.args[2]], "W.bulk_load", site)
    barrier = c.mbarrier(call.args[3].args[0], site)

    def run(frame):
        count, block = _uniform(size(frame)[0], frame, "W.bulk_load", site), frame.block
        source, tile = src.ref.tensor(frame), frame.tile(dst.slot)
        access = block.access(frame.mask.classes, "W.bulk_load", site)
        values, poison = source.read(_run_of(frame, source, src, count), access)
        values, key = np.array(values).reshape(-1), _run_of(frame, tile, dst, count)
        block.require_unread(tile, key, site)
        tile.set_poison(key, True)

        def deliver() -> int:
            tile.data[key] = values
            tile.set_poison(key, None if poison is None else np.reshape(poison, -1))
            return 0

        barrier(frame).deliveries.append(deliver)

    return c.preempted(run, call)


def _bulk_store(reduces: bool):
    op = "W.bulk_reduce" if reduces else "W.bulk_store"

    def compile(c: Statements, call: tirx.Call, site: str) -> Step:
        dst, src = (Pointer(c, call.args[i], op, site) for i in (0, 1))
        size = c.indices([call.args[2]], op, site)
        ufunc = _FUNCTIONS[call.args[4].value] if reduces else None

        def run(frame):
            count, block = _uniform(size(frame)[0], frame, op, site), frame.block
            target, tile = dst.ref.tensor(frame), frame.tile(src.slot)
            part = _run_of(frame, tile, src, count)
            values = np.array(tile.data[part]).reshape(-1)
            poison = None if tile.poison is None else tile.poison[part].reshape(-1)
            poison = poison if poison is not None and poison.any() else None
            key = _run_of(frame, target, dst, count)
            access = block.bulk_access(
                frame.mask.classes, op, site, SYS if reduces else 0, (tile, part)
            )
            if reduces:
                if poison is not None:
                    _refuse_poison(frame, Expr(lambda f: 0, lambda f: True), dst)
                target.update(key, ufunc, values, access)
            else:
                _refuse_stored(frame, target, poison, op, site)
                target.write(key, values, access, poison)

        return c.preempted(run, call)

    return compile


def bulk_commit(c: Statements, call: tirx.Call, site: str) -> Step:
    return Step(lambda frame: frame.block.commit(frame.mask.classes))


def bulk_wait(c: Statements, call: tirx.Call, site: str) -> Step:
    groups, read = int(call.args[0]), bool(call.args[1].value)
    return Step(lambda frame: frame.block.wait_groups(frame.mask.classes, groups, read))


def element_atomic(kind: str, returns: bool):
    """T.atomic_add and its like on one element: relaxed unless told, for any GPU."""
    combine = {"load": None, "store": lambda old, new: new}.get(kind, _FUNCTIONS.get(kind))

    def compile(c: Statements, call: tirx.Call, site: str) -> Any:
        op = f"T.atomic_{kind}"
        pointer = Pointer(c, call.args[0], op, site)
        numbers = [a for a in call.args[1 if kind == "load" else 2 :]]
        sem = _ORDERS[int(numbers[0])] if numbers else "relaxed"
        if pointer.ref is None:
            return _tile_atomic(c, call, pointer, combine, returns, site)
        word = Word(pointer.ref, sem, "sys")
        if kind == "load":
            return _load(c, pointer, word, 1)
        value = c.compile(call.args[1], site)
        if kind == "store":
            return _store(c, pointer, value, word, 1, call)
        whole = _change(c, pointer, [value], word, 1, combine)
        if returns:
            return whole

        def run(frame):
            if frame.space is None:
                whole.value(frame)
                return
            # A whole space at once; the words' history is of no use to a sum.
            _space_atomic(frame, pointer, value, combine, op, site)

        return c.preempted(run, call)

    return compile


def _space_atomic(frame: Any, pointer: Pointer, value: Expr, combine: Any, op: str, site: str):
    from .accesses import select

    tensor = pointer.ref.tensor(frame)
    found = value.value(frame)
    _refuse_poison(frame, value, pointer)
    space = frame.space
    index = [np.broadcast_to(i, space) for i in pointer.index(frame)]
    key, covered, _ = select(
        frame, tensor.name, tensor.shape, index, site, tensor.symmetric, clips=True
    )
    values = np.broadcast_to(convert(found, tensor.dtype), space)
    access = frame.block.access(frame.mask.classes, op, site, SYS)
    tensor.update(key, combine, values if covered is None else values[covered], access)


def _tile_atomic(c, call, pointer: Pointer, combine: Any, returns: bool, site: str) -> Step:
    if returns or pointer.slot < 0:
        raise unsupported(f"{pointer.op} that returns a value, in shared memory", site)
    value = c.compile(call.args[1], site)

    def run(frame):
        tile = frame.tile(pointer.slot)
        found = value.value(frame)
        _refuse_poison(frame, value, pointer)
        at = pointer.index(frame)
        for _, _, index, (one,) in places(frame, at, found, each_thread=True):
            old = tile.data[index]
            store_tile(frame, tile, list(index), combine(old, convert(one, tile.dtype)), None, site)

    return c.preempted(run, call)


def register(c: Statements) -> None:
    """Teach the compiler the builtins."""
    prefix = "tileweave."
    c.calls[prefix + "ld"] = load
    for spec in BUILTINS.values():
        if spec.name.startswith(("atom_", "red_")):
            assert isinstance(spec.operands[1][1], ElementOf)
            c.calls[spec.op_name] = _atomic(spec.name)
        elif spec.name.startswith("wait_"):
            c.steps[spec.op_name] = _wait(spec.name)
        elif spec.name.startswith(("put_", "get_")):
            c.steps[spec.op_name] = _transfer
        elif spec.name.startswith(("sync_", "barrier_")):
            c.steps[spec.op_name] = _barrier(spec.name)
    c.steps |= {
        prefix + "st": store,
        prefix + "signal": signal,
        prefix + "fence": fence,
        prefix + "fence_proxy_async": lambda c, call, site: Step(lambda frame: None),
        prefix + "bulk_load": bulk_load,
        prefix + "bulk_store": _bulk_store(False),
        prefix + "bulk_reduce": _bulk_store(True),
        prefix + "bulk_commit": bulk_commit,
        prefix + "bulk_wait": bulk_wait,
    }
    for kind in ("add", "max", "min", "or"):
        c.steps[f"tl.atomic_{kind}_elem_op"] = element_atomic(kind, False)
        c.calls[f"tl.atomic_{kind}_ret_elem_op"] = element_atomic(kind, True)
    c.calls["tl.atomic_load_elem_op"] = element_atomic("load", True)
    c.steps["tl.atomic_store_elem_op"] = element_atomic("store", False)
