"""``tw.explain``: which synchronisation a program gets, for which line, why, and what it costs."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tilelang import tvm
from tvm import tirx

from .. import passes
from ..builtins.errors import TileWeaveError
from ..builtins.spec import builtin_of
from ..emit import EMIT_HEAP_STRIDE, lowered, require_group
from ..passes.group.specialize_group import heap_tensors
from ..passes.ir.added import Added, add_by_table, added_on_device
from ..passes.ir.implicit import hidden_of
from ..passes.ir.leaves import Leaf, leaves_of, tensor_of
from ..passes.ir.memory_order import acquires, releases
from ..passes.ir.sizes import in_numbers, named, sizes_of
from ..passes.ir.walk import uses_tileweave
from ..passes.sync.infer.context import Inserted
from ..passes.sync.infer.infer_sync import explained, explicit_sync
from ..passes.sync.verify.launches import LeftOut
from ..passes.sync.verify.verify_sync import verified
from ..runtime import Plan
from ..runtime.kernel.configured import configured
from ..runtime.plans.parameters import dynamic_extents, shapes_of
from ..runtime.plans.regions import Region
from ..runtime.plans.steps import Copy, CopyValue, Launch, Step, WaitValue, WriteValue
from ..runtime.plans.sync_pull import REUSE
from ..runtime.plans.sync_push import BEGIN, WAIT
from .operation import BY_HAND, KINDS, Kind, Operation
from .page import page

_WIDEST = 28
"""Characters of an amount that the table shows."""


@dataclass(frozen=True)
class Explanation:
    """What orders memory in a program, or in the programs of a plan.

    Attributes:
        name, world_size: what was asked for.
        ops: every operation, by line; those of one line in the order in which they run.
        merged: where none was put in because another serves, too, as its ``reason`` says.
        reuse: tensor -> why its memory may be written again in the next launch.
        flags: tensor of counters -> bytes on each rank.
        scratch: tensor of ``W.alloc_symmetric``, or of rounds -> bytes on each rank, of all its
            buffers.
        sources: of each program (name, file, first line, last line).
        unordered: accesses that ``W.unordered`` takes out, with the program's reasons.
        explicit: the first signal, wait or barrier of each program that has its own, by its name:
            because of it nothing is inferred.
        unverified: what of a program that orders itself was too much to be verified.
        sizes: dynamic extents by name, for which all this is.
        rounds: tensor that a launch writes in several rounds -> what keeps them apart.
    """

    name: str
    world_size: int
    ops: tuple[Operation, ...] = ()
    merged: tuple[Operation, ...] = ()
    reuse: Mapping[str, str] = field(default_factory=dict)
    flags: Mapping[str, int] = field(default_factory=dict)
    scratch: Mapping[str, int] = field(default_factory=dict)
    sources: tuple[tuple[str, str, int, int], ...] = ()
    unordered: tuple[Operation, ...] = ()
    explicit: tuple[Operation, ...] = ()
    unverified: tuple[Operation, ...] = ()
    sizes: Mapping[str, int] = field(default_factory=dict)
    rounds: Mapping[str, str] = field(default_factory=dict)

    @property
    def flag_bytes(self) -> int:
        """Bytes of counters on each rank."""
        return sum(self.flags.values())

    def __str__(self) -> str:
        """A table."""
        return "\n".join(_table_of(self))

    def as_json(self) -> str:
        """The same for programs: one object."""
        return json.dumps({**dataclasses.asdict(self), "flag_bytes": self.flag_bytes})

    def html(self) -> str:
        """One page: the source, and under each line what is put in for it."""
        return page(self)


def explain(
    f: Any,
    world_size: int,
    pass_configs: Mapping[str, Any] | None = None,
    arch: str = "sm_90a",
    sizes: Mapping[str, int] | None = None,
) -> Explanation:
    """Which signals, waits, barriers and fences order the memory of ``f``, and why. Needs no GPU.

    Args:
        f: a ``@T.prim_func``, or a ``@tw.plan``, whose kernels and copies are looked at in a call
            with 0 for every scalar.
        world_size: ranks of the group.
        pass_configs: those of TileLang, and ours; see ``tw.compile``; of a plan, for each of its
            kernels, with those that it has.
        arch: what the device passes see, as for ``tw.emit``.
        sizes: of the dynamic extents by name, of a plan, or of a program that is compiled for each
            set of them.

    Raises:
        LanguageError: an access cannot be ordered; names it and its line.
        TileWeaveError: neither a program nor a plan, an option that there is not, or a size that is
            missing or that there is not.
    """
    require_group("explain", world_size, arch)
    if isinstance(f, tirx.PrimFunc):
        name = str(f.attrs["global_symbol"])
        return _of_kernel(f, world_size, pass_configs or {}, arch, name, sizes or {})
    if isinstance(f, Plan):
        return _of_plan(configured("explain", f, pass_configs), world_size, arch, sizes or {})
    raise TileWeaveError(f"explain: {f!r}; expected a T.prim_func or a tw.plan")


def _of_kernel(
    func: tirx.PrimFunc, world_size: int, configs: Mapping[str, Any], arch: str, name: str,
    sizes: Mapping[str, int] = MappingProxyType({}),
) -> Explanation:  # fmt: skip
    source = source_of(func)
    func, stock = passes.split_options(func, configs)
    func = passes.with_sizes(func, sizes)
    func = _through(passes.PREPARE_PASSES, func, world_size)
    ops = [_by_hand(leaf, call) for leaf, call in _orders_in(func)]
    explicit = _explicit(func)
    func, inferred = explained(func, world_size, EMIT_HEAP_STRIDE)
    tensors = {(i.line, i.flag): i.tensor for i in inferred.ops}
    times = {leaf.stmt: leaf.times for leaf in leaves_of(func.body)}
    ops += [_inferred(i, times) for i in inferred.ops if i.stmts]
    unverified = [_left_out(one) for one in verified(func, world_size)]
    func = _through(passes.FINISH_PASSES, func, world_size)
    if uses_tileweave(func):
        tile, added = add_by_table(func)
        device = _lowered(func, arch, stock)
        ops += [_of_pass(a, tensors) for a in (*added, *added_on_device(tile, device))]
    others = [_inferred(i, times) for i in inferred.ops if not i.stmts]
    merged = [o for o in others if o.kind != "unordered"]
    unordered = [o for o in others if o.kind == "unordered"]
    memory = [(h.name, _bytes(h), h.scratch) for h in hidden_of(func)]
    return Explanation(
        name, world_size, tuple(_in_kernel(ops, name)), tuple(_in_kernel(merged, name)),
        inferred.reuse, {n: size for n, size, scratch in memory if not scratch},
        {n: size for n, size, scratch in memory if scratch}, ((name, *source),) if source else (),
        tuple(_in_kernel(unordered, name)), tuple(_in_kernel(explicit, name)),
        tuple(_in_kernel(unverified, name)), sizes_of(func),
        inferred.rounds,
    )  # fmt: skip


def _explicit(func: tirx.PrimFunc) -> list[Operation]:
    """Return what turns the inference off for the program, if it has symmetric tensors."""
    found = explicit_sync(func) if heap_tensors(func) else None
    if found is None:
        return []
    leaf, call = found
    reason = (
        "explicit synchronization; without explicit signals, waits and barriers the compiler "
        "inserts them"
    )
    name = f"W.{builtin_of(call).name}"
    return [dataclasses.replace(_by_hand(leaf, call), tensor=name, reason=reason)]


def _left_out(one: LeftOut) -> Operation:
    file, _, line = one.event.line.rpartition(":")
    tensor = one.event.tensor.name if one.event.tensor is not None else one.event.op
    reason = f"{one.event.text}: {one.reason}"
    return Operation("unverified", tensor, file, int(line or 0), reason, per_block=None)


def _through(table: Iterable[passes.Pass], func: tirx.PrimFunc, world_size: int) -> tirx.PrimFunc:
    for one in table:
        func = one.run(func, world_size, EMIT_HEAP_STRIDE)
    return func


def _in_kernel(ops: Iterable[Operation], kernel: str) -> Iterator[Operation]:
    order = [*KINDS, "unordered", "unverified"]
    for op in sorted(ops, key=lambda o: (o.file, o.line, order.index(o.kind))):
        yield dataclasses.replace(op, kernel=kernel)


def _inferred(one: Inserted, times: Mapping[tirx.Stmt, int | None]) -> Operation:
    file, _, line = one.line.rpartition(":")
    every = [times[stmt] for stmt in one.stmts]
    counts = [n for n in every if n is not None]
    unit = f" x {one.unit} elements" if one.unit else ""
    return Operation(
        one.kind, one.tensor, file, int(line or 0), one.reason, one.granule,
        f"{one.each}{unit}", one.flag, sum(counts) if len(counts) == len(every) else None,
    )  # fmt: skip


def _of_pass(one: Added, tensors: Mapping[tuple[str, str], str]) -> Operation:
    file, line = one.place
    tensor = tensors.get((f"{file}:{line}", one.flag), one.flag)
    return Operation(one.kind, tensor, file, line, one.reason, flag=one.flag, per_block=one.times)


def _orders_in(func: tirx.PrimFunc) -> Iterator[tuple[Leaf, tirx.Call]]:
    """What a program itself says about the order of memory."""
    for leaf in leaves_of(func.body):
        for call in leaf.builtins:
            if _kind_of(call) is not None:
                yield leaf, call


def _kind_of(call: tirx.Call) -> Kind | None:
    """The kind of a builtin that orders memory; None for the others."""
    spec = builtin_of(call)
    if spec.participants:
        return "barrier"
    if spec.is_fence or spec.proxy_fence:
        return "fence"
    if spec.bulk_group == "wait":
        return "bulk_wait"
    if spec.signals or releases(call):
        return "signal"
    return "wait" if spec.waits or acquires(call) else None


def _by_hand(leaf: Leaf, call: tirx.Call) -> Operation:
    kind = _kind_of(call)
    assert kind is not None
    name, (file, line) = tensor_of(call), leaf.place
    return Operation(kind, name, file, line, BY_HAND, "", "", name, leaf.times)


def _lowered(func: tirx.PrimFunc, arch: str, configs: Mapping[str, Any]) -> list[tirx.PrimFunc]:
    """The kernels that TileLang and the device passes make of ``func``."""
    functions = lowered(func, arch, configs).device_mod.functions.values()
    return [f for f in functions if isinstance(f, tirx.PrimFunc)]


def _bytes(hidden: Any) -> int:
    return math.prod(hidden.shape) * (tvm.DataType(hidden.dtype).bits // 8)


def source_of(func: tirx.PrimFunc) -> tuple[str, int, int] | None:
    """(file, first line, last line) of a program, where TileLang has noted them."""
    span = func.span
    if span is None or span.source_name is None:
        return None
    file, first = str(span.source_name.name), int(span.line)
    places = [leaf.place for leaf in leaves_of(func.body)]
    return file, first, max([first, *(line for path, line in places if path == file)])


def _of_plan(plan: Plan, world_size: int, arch: str, sizes: Mapping[str, int]) -> Explanation:
    legal = dynamic_extents(plan.parameters)
    if unknown := [f"{n}={size}" for n, size in sizes.items() if n not in legal]:
        expected = " or ".join(legal) or "no sizes: it has no dynamic extent"
        raise TileWeaveError(f"{plan.name}: size {', '.join(unknown)}; expected {expected}")
    shapes = shapes_of(plan.parameters, {}, f"explain {plan.name}", sizes)
    scalars = {p.name: 0 for p in plan.parameters if p.shape is None}
    traces = [plan.trace(r, world_size, shapes, scalars) for r in range(world_size)]
    steps = list(itertools.chain(*traces))
    ops = _most(_flag_steps(trace) for trace in traces)
    lines = [int(s.site.rpartition(":")[2]) for s in steps] + [op.line for op in ops]
    file, _, first = plan.site.rpartition(":")
    launches = [s for s in steps if isinstance(s, Launch) and s.number > BEGIN]
    added = {s.name: s.program for s in steps if isinstance(s, Launch) and s.number <= BEGIN}
    counters = {h.name: _bytes(h) for f in added.values() for h in hidden_of(f)}
    reuse = {op.tensor: REUSE for op in ops if op.kind == "signal"} if counters else {}
    kernels = {id(s.program): s.program for s in launches}
    names = _apart(named(k) for k in kernels.values())
    parts = [
        _of_kernel(k, world_size, plan.pass_configs, arch, name)
        for k, name in zip(kernels.values(), names, strict=True)
    ]
    own = Explanation(
        plan.name, world_size, tuple(_in_kernel(ops, plan.name)), reuse=reuse, flags=counters,
        sources=((plan.name, file, int(first), max([int(first), *lines])),), sizes=dict(sizes),
    )  # fmt: skip
    return _merged(plan.name, world_size, [own, *parts])


def _apart(names: Iterable[str]) -> list[str]:
    """``names`` with a number where one comes again."""
    seen: dict[str, int] = {}
    out = []
    for name in names:
        seen[name] = seen.get(name, 0) + 1
        out.append(name if seen[name] == 1 else f"{name} ({seen[name]})")
    return out


def _flag_steps(trace: Sequence[Step]) -> Iterator[Operation]:
    """What the steps of one rank do to flags, by hand or for a copy whose number they have."""
    copied = {s.number: s.dst.parameter.name for s in trace if isinstance(s, Copy)}
    read = {s.site: s.src.parameter.name for s in trace if isinstance(s, Copy)}
    first = next(iter(copied.values()), "")
    for step in trace:
        file, _, line = step.site.rpartition(":")
        place = file, int(line or 0)
        if step.number == WAIT:
            if isinstance(step, (Launch, WaitValue)):
                yield _before_copy(step, read[step.site], place)
        elif isinstance(step, (WriteValue, CopyValue)):
            kernel, inferred, flag = step.dst.parameter.name.partition(".")
            if inferred:
                reason = f"the stream tells {kernel} that p.copy has ended"
                yield Operation("signal", copied[step.number], *place, reason, "", "1", flag)
            else:
                yield Operation("signal", kernel, *place, BY_HAND, flag=kernel)
        elif isinstance(step, WaitValue):
            name = step.flag.parameter.name
            yield Operation("wait", name, *place, BY_HAND, flag=name)
        elif isinstance(step, Launch) and step.number == BEGIN and (peers := _met(step)):
            reason = "before p.copy overwrites it: a peer may read it until its call begins"
            yield from [Operation("wait", first, *place, reason, "", "1", "started")] * peers


def _before_copy(step: Launch | WaitValue, tensor: str, place: tuple[str, int]) -> Operation:
    """A wait that was put in before a copy which reads ``tensor``."""
    reason, flag = "p.copy reads what another stream brings", "arrived"
    made = step.flag if isinstance(step, WaitValue) else step.arguments.get("made")
    if made is not None:
        kernel, _, flag = made.parameter.name.partition(".")
        reason = f"p.copy reads what {kernel} writes beside it"
    return Operation("wait", tensor, *place, reason, "", "1", flag)


def _met(begin: Launch) -> int:
    """For how many peers the kernel waits that begins a call."""
    words = {n: v.shape for n, v in begin.arguments.items() if isinstance(v, Region)}
    words |= {h.name: h.shape for h in hidden_of(begin.program)}
    return words["started"][-1] - 1 if "started" in words else 0


def _most(of_ranks: Iterable[Iterable[Operation]]) -> list[Operation]:
    """Each operation once, as often as the rank that does it most."""
    most: dict[Operation, int] = {}
    for ops in of_ranks:
        counts: dict[Operation, int] = {}
        for op in ops:
            counts[op] = counts.get(op, 0) + 1
        for op, count in counts.items():
            most[op] = max(most.get(op, 0), count)
    return [dataclasses.replace(op, per_block=n) for op, n in most.items()]


def _merged(name: str, world_size: int, parts: list[Explanation]) -> Explanation:
    """One explanation of several programs; tensors get their program's name where names meet."""
    several = sum(bool(p.flags or p.reuse) for p in parts) > 1

    def union(of: Callable[[Explanation], Mapping[str, Any]]) -> dict[str, Any]:
        return {f"{p.name}.{k}" if several else k: v for p in parts for k, v in of(p).items()}

    return Explanation(
        name, world_size, tuple(itertools.chain(*(p.ops for p in parts))),
        tuple(itertools.chain(*(p.merged for p in parts))), union(lambda p: p.reuse),
        union(lambda p: p.flags), union(lambda p: p.scratch),
        tuple(itertools.chain(*(p.sources for p in parts))),
        tuple(itertools.chain(*(p.unordered for p in parts))),
        tuple(itertools.chain(*(p.explicit for p in parts))),
        tuple(itertools.chain(*(p.unverified for p in parts))), parts[0].sizes,
        union(lambda p: p.rounds),
    )  # fmt: skip


def _table_of(e: Explanation) -> Iterator[str]:
    kernels = {op.kernel for op in e.ops}
    sizes = f", {in_numbers(e.sizes)}" if e.sizes else ""
    yield f"{e.name}, {e.world_size} rank{'s' * (e.world_size > 1)}{sizes}"
    if not e.ops:
        yield "  nothing is put in: no rank reads what another writes, or verify is off"
    head = ("line", "kind", "tensor", "granule", "amount", "per block", "why")
    rows = [_row(op, len(kernels) > 1) for op in e.ops]
    yield from _aligned(head, rows)
    for title, ops in (
        ("not needed", e.merged),
        ("not ordered, by W.unordered", e.unordered),
        ("nothing is inferred", e.explicit),
        ("not verified", e.unverified),
    ):
        if ops:
            yield f"{title}:"
            yield from (f"  {Path(o.file).name}:{o.line}  {o.tensor}: {o.reason}" for o in ops)
    for when, reasons in (("the same", e.rounds), ("the next", e.reuse)):
        if reasons:
            yield f"memory is used again in {when} launch because:"
            width = max(map(len, reasons))
            yield from (f"  {name:{width}}  {reason}" for name, reason in reasons.items())
    if e.flags:
        each = ", ".join(f"{name} {size}" for name, size in e.flags.items())
        yield f"counters: {e.flag_bytes} bytes on each rank ({each})"
    if e.scratch:
        each = ", ".join(f"{name} {size}" for name, size in e.scratch.items())
        yield f"scratch memory: {sum(e.scratch.values())} bytes on each rank ({each})"


def _row(op: Operation, with_kernel: bool) -> tuple[str, ...]:
    where = f"{Path(op.file).name}:{op.line}" if op.file else "-"
    times = "?" if op.per_block is None else str(op.per_block)
    amount = op.amount if len(op.amount) <= _WIDEST else "varies"
    why = f"{op.kernel}: {op.reason}" if with_kernel else op.reason
    return where, op.kind, op.tensor or "-", op.granule or "-", amount or "-", times, why


def _aligned(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> Iterator[str]:
    if not rows:
        return
    widths = [max(len(r[i]) for r in (head, *rows)) for i in range(len(head) - 1)]
    for row in (head, *rows):
        cells = (f"{cell:{width}}" for cell, width in zip(row, widths, strict=False))
        yield "  " + "  ".join([*cells, row[-1]]).rstrip()
