"""Put in the signals, waits and guards that reads and writes of symmetric tensors need."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tvm import tirx

from ....builtins.errors import LanguageError, SyncWarning
from ....builtins.memory import UNORDERED
from ....builtins.spec import builtin_of
from ...group.specialize_group import heap_tensors
from ...ir.implicit import implicit_of, set_implicit, with_hidden
from ...ir.leaves import Leaf, leaves_of
from ...ir.memory_order import releases
from ...ir.sizes import in_numbers, sizes_of
from ...ir.walk import builtins_in, uses_op
from ..regions.accesses import Program, collect_accesses
from ..regions.copies import copies_of
from ..regions.symbols import Symbols
from ..regions.tensor_accesses import TensorAccesses, refuse_jumps, traffic_of, verify_traffic
from ..verify.outside import warn_outside
from .context import Inserted, SyncContext
from .counters import make_counters
from .credits import place_credits
from .drain import place_exits
from .epochs import count_epochs
from .options import options_of
from .reindex import reindexed
from .residency import leaves_room, verify_residency
from .reuse import choose_buffers, guard_reuse
from .signals import place_signals
from .version_copies import give_rounds
from .waits import place_waits

MOST_INFERRED_RANKS = 32
"""Ranks of a program that is synchronized by inference: sets of ranks are bits of a uint32."""


@dataclass(frozen=True)
class Explanation:
    """What the inference did to a program.

    Attributes:
        ops: every operation that was put in.
        reuse: tensor -> why its memory may be used again in the next launch.
        flag_bytes: bytes of counters on each rank.
    """

    ops: tuple[Inserted, ...] = ()
    reuse: Mapping[str, str] = field(default_factory=dict)
    flag_bytes: int = 0
    rounds: Mapping[str, str] = field(default_factory=dict)
    """tensor -> what keeps apart the rounds in which one launch writes it."""
    copied: Mapping[tuple[int, int], list[tuple]] = field(default_factory=dict)
    """By rank and number of a plan's copy: (flag tensor, rank, its flags) of what it announces."""
    awaited: Mapping[tuple[int, int], list[tuple]] = field(default_factory=dict)
    """By the same, what it waits for: (flag tensor, index, value)."""
    leaves_room: bool = False
    """Whether what lets a plan's copies begin may run beside it."""


def infer_sync(func: tirx.PrimFunc, world_size: int, heap_stride: int) -> tirx.PrimFunc:
    """Synchronise a program of which no line says so.

    A program with a signal, wait or barrier of its own stays as it is, and so does one that reaches
    no other rank's memory, or with ``tileweave.verify`` off.

    Args:
        func: specialised for the group.
        heap_stride: bytes between two ranks' heaps.

    Raises:
        LanguageError: an access cannot be ordered; names it and its line.

    Before: ``if owner != me: T.copy(tile, S[owner, ...]) else: T.copy(S[me, ...], tile)``
    After:  the same with signals and waits, and hidden parameters for their counters
    """
    return explained(func, world_size, heap_stride)[0]


def explained(
    func: tirx.PrimFunc, world_size: int, heap_stride: int
) -> tuple[tirx.PrimFunc, Explanation]:
    """``infer_sync`` of a program, and what it did."""
    try:
        return _inferred(func, world_size, heap_stride)
    except LanguageError as error:
        if sizes := sizes_of(func):
            error = LanguageError(f"with {in_numbers(sizes)}: {error}")
        if options_of(func).verify != "warn":
            raise error from None
        message = f"{error}\n(the program stays as it is: nothing orders its accesses)"
        warnings.warn(message, SyncWarning, stacklevel=2)
        return func, Explanation()


def _inferred(
    func: tirx.PrimFunc, world_size: int, heap_stride: int
) -> tuple[tirx.PrimFunc, Explanation]:
    tensors = heap_tensors(func)
    options = options_of(func)
    if not tensors or options.verify == "off" or is_explicit(func):
        return func, Explanation(_unordered(func, tensors))
    if world_size > MOST_INFERRED_RANKS:
        raise LanguageError(
            f"infer_sync: {world_size} ranks; expected at most {MOST_INFERRED_RANKS}, or signals "
            "and waits of the program's own"
        )
    rounds: dict[str, str] = {}
    program, traffic = _traffic(func, tensors, world_size)
    warn_outside(read for one in traffic for read in one.missing)
    refuse_jumps(program, traffic)
    again = [t for t in traffic if t.is_written_again]
    if again:
        func, options, rounds = give_rounds(func, again, program, options, heap_stride)
        tensors = heap_tensors(func)
        program, traffic = _traffic(func, tensors, world_size)
    for one in traffic:
        verify_traffic(one)
    if not traffic:
        return func, Explanation(_unordered(func, tensors))
    symbols = Symbols(program, world_size)
    exchange = SyncContext(program, world_size, heap_stride, options, symbols, traffic)
    implicit = {h.name for h in implicit_of(func)}
    own = {t for t in tensors if t.name in implicit}
    for traffic in exchange.traffic:
        exchange.buffers[traffic.tensor] = choose_buffers(exchange, traffic, traffic.tensor in own)
    make_counters(exchange, own)
    place_signals(exchange)
    place_waits(exchange)
    place_exits(exchange)
    guard_reuse(exchange, own)
    place_credits(exchange)
    count_epochs(exchange)
    verify_residency(exchange)
    func = func.with_body(exchange.placement.applied(func.body, exchange.program))
    func = _alternated(exchange, func)
    flags = sum(4 * math.prod(h.shape) for h in exchange.implicit)
    func = with_hidden(func, exchange.implicit, exchange.hidden_buffers)
    copied, awaited = exchange.copied(), exchange.awaited()
    ops = (*exchange.inserted, *_unordered(func, tensors))
    room = exchange.is_called and leaves_room(exchange)
    return func, Explanation(ops, dict(exchange.reuse), flags, rounds, copied, awaited, room)


def is_explicit(func: tirx.PrimFunc) -> bool:
    """Whether the program orders memory between ranks itself."""
    return any(map(_is_explicit, builtins_in(func.body)))


def explicit_sync(func: tirx.PrimFunc) -> tuple[Leaf, tirx.Call] | None:
    """Return the first builtin by which the program orders memory between ranks itself, with its
    statement. One is enough for nothing to be inferred."""
    calls = ((leaf, call) for leaf in leaves_of(func.body) for call in leaf.builtins)
    return next(((leaf, call) for leaf, call in calls if _is_explicit(call)), None)


def _is_explicit(call: tirx.Call) -> bool:
    spec = builtin_of(call)
    scope = spec.qualifier(call, "scope") if spec.has_qualifier("scope") else "sys"
    return bool(spec.waits or releases(call)) and scope == "sys" and spec.participants != "grid"


def _traffic(
    func: tirx.PrimFunc, tensors: Sequence[tirx.Buffer], world_size: int
) -> tuple[Program, list[TensorAccesses]]:
    """The tensors that must be synchronised."""
    program = collect_accesses(func, tensors)
    found = []
    for tensor in tensors:
        accesses = [a for a in program.accesses if a.tensor.same_as(tensor)]
        if accesses:
            copies = copies_of(func, tensor)
            traffic = traffic_of(tensor, accesses, copies, program, world_size)
            if traffic.is_exchanged:
                found.append(traffic)
    return program, found


def _unordered(func: tirx.PrimFunc, tensors: Sequence[tirx.Buffer]) -> tuple[Inserted, ...]:
    """What ``W.unordered`` takes out."""
    if not uses_op(func.body, UNORDERED):
        return ()
    left_out = collect_accesses(func, tensors).unordered
    return tuple(Inserted("unordered", u.tensor, u.line, u.reason) for u in left_out)


def _alternated(exchange: SyncContext, func: tirx.PrimFunc) -> tirx.PrimFunc:
    """``func`` with as many buffers of its scratch tensors as launches take in turn."""
    replaced: dict[tirx.Var, tuple] = {}
    buffers, implicit = dict(func.buffer_map.items()), implicit_of(func)
    for param, buffer in func.buffer_map.items():
        copies = exchange.buffers.get(buffer, 1)
        if copies > 1:
            at = next(i for i, h in enumerate(implicit) if h.name == buffer.name)
            implicit[at] = dataclasses.replace(implicit[at], shape=(copies, *implicit[at].shape))
            new = exchange.heap_buffer(buffer.name, implicit[at].shape, implicit[at].dtype)
            buffers[param], replaced[buffer.data] = new, (new, exchange.half(buffer))
    if not replaced:
        return func
    body = reindexed(func.body, lambda node: replaced.get(node.buffer.data))
    new = tirx.PrimFunc(func.params, body, func.ret_type, buffers, func.attrs, func.span)
    return set_implicit(new, implicit)
