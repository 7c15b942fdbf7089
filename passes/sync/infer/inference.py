"""Insert the signals and waits that accesses to symmetric tensors need."""

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
from ...ir.group import heap_tensors
from ...ir.implicit import implicit_of, set_implicit, with_implicit
from ...ir.leaves import Leaf, leaves_of
from ...ir.memory_order import releases
from ...ir.ragged import counts_name, ragged_of, tiles_of
from ...ir.sizes import format_sizes, sizes_of
from ...ir.walk import builtins_in, location, uses_op
from ..ll.protocol import choose_protocols
from ..ll.store_words import store_words
from ..regions.accesses import Program, collect_accesses
from ..regions.copies import copies_of
from ..regions.ragged import (
    access_to_rows,
    access_to_tile,
    announcement_reads,
    verify_announcements,
)
from ..regions.symbols import Symbols
from ..regions.tensor_accesses import (
    TensorAccesses,
    collect_tensor_accesses,
    refuse_jumps,
    verify_tensor_accesses,
)
from ..regions.tiles import choose_tile
from ..verify.outside import warn_outside
from .announcements import assumption, in_units, with_tiles
from .context import InsertedOperation, SyncContext
from .counters import make_counters
from .credits import place_credits
from .drain import place_drain
from .epochs import count_epochs
from .options import Options, options_of
from .reindex import reindexed
from .residency import leaves_room, verify_residency
from .reuse import choose_buffers, clear_limited, guard_reuse
from .row_checks import place_row_checks
from .signals import place_signals
from .version_copies import expand_versions
from .waits import place_waits

MAX_INFERRED_RANKS = 32
"""Maximum number of ranks of an inferred program: a set of ranks is a uint32 bit mask."""


@dataclass(frozen=True)
class Explanation:
    """Result of the inference, for ``tw.explain`` and for plans.

    Attributes:
        ops: the inserted operations.
        reuse: tensor -> why the next launch may reuse its memory.
        flag_bytes: bytes of counters on each rank.
        versions: tensor -> where the versions that one launch writes are stored.
        protocols: tensor -> its protocol and why, if ``tileweave.protocol`` names it.
        signals_of_copies: by rank and number of a copy of the plan: (flag tensor, rank, its
            flags as a slice) that the copy signals.
        waits_of_copies: by rank and number of a copy of the plan: (flag tensor, index, value) that
            the copy waits for.
        leaves_room: whether the kernel that lets a plan's copies begin may run beside this one.
        assumed: ragged tensor -> what is assumed of its rows.
    """

    ops: tuple[InsertedOperation, ...] = ()
    reuse: Mapping[str, str] = field(default_factory=dict)
    flag_bytes: int = 0
    versions: Mapping[str, str] = field(default_factory=dict)
    protocols: Mapping[str, str] = field(default_factory=dict)
    signals_of_copies: Mapping[tuple[int, int], list[tuple]] = field(default_factory=dict)
    waits_of_copies: Mapping[tuple[int, int], list[tuple]] = field(default_factory=dict)
    leaves_room: bool = False
    assumed: Mapping[str, str] = field(default_factory=dict)


def infer_and_explain(
    func: tirx.PrimFunc, world_size: int, heap_stride: int
) -> tuple[tirx.PrimFunc, Explanation]:
    """Return the synchronized program, as ``infer_sync`` does, and what was inserted."""
    try:
        return _infer(func, world_size, heap_stride)
    except LanguageError as error:
        if sizes := sizes_of(func):
            error = LanguageError(f"with {format_sizes(sizes)}: {error}")
        if options_of(func).verify != "warn" or ragged_of(func):
            raise error from None
        message = f"{error}\n(the program stays as it is: nothing orders its accesses)"
        warnings.warn(message, SyncWarning, stacklevel=2)
        return func, Explanation()


def _infer(
    func: tirx.PrimFunc, world_size: int, heap_stride: int
) -> tuple[tirx.PrimFunc, Explanation]:
    tensors = heap_tensors(func)
    options = options_of(func)
    _require_inference(func)
    if not tensors or options.verify == "off" or is_explicit(func):
        return func, Explanation(_unordered(func, tensors))
    if world_size > MAX_INFERRED_RANKS:
        raise LanguageError(
            f"infer_sync: {world_size} ranks; expected at most {MAX_INFERRED_RANKS}, or explicit "
            "signals and waits"
        )
    versions: dict[str, str] = {}
    if ragged_of(func):
        func = with_tiles(func, _tiles(func, tensors, world_size, options), heap_stride)
        tensors = heap_tensors(func)
    program, exchanged = _exchanged_tensors(func, tensors, world_size)
    warn_outside(read for accesses in exchanged for read in accesses.missing)
    refuse_jumps(program, exchanged)
    rewritten = [accesses for accesses in exchanged if accesses.is_written_again]
    if rewritten:
        func, options, versions = expand_versions(func, rewritten, program, options, heap_stride)
        tensors = heap_tensors(func)
        program, exchanged = _exchanged_tensors(func, tensors, world_size)
    for accesses in exchanged:
        if accesses.is_ragged:
            verify_announcements(accesses)
    for accesses in exchanged:
        verify_tensor_accesses(accesses)
    if not exchanged:
        return func, Explanation(_unordered(func, tensors))
    symbols = Symbols(program, world_size)
    context = SyncContext(program, world_size, heap_stride, options, symbols, exchanged)
    implicit = {p.name for p in implicit_of(func)}
    scratch = {t for t in tensors if t.name in implicit}
    context.protocols = choose_protocols(func, exchanged, scratch, options, symbols)
    for accesses in exchanged:
        context.buffers[accesses.tensor] = choose_buffers(
            context, accesses, accesses.tensor in scratch
        )
    _place_sync(context, scratch)
    func = func.with_body(context.placement.apply(func.body, context.program))
    func = _with_buffers(context, func)
    func = func.with_body(in_units(func.body, context.counters))
    func = store_words(context, func)
    func = with_implicit(func, context.implicit, context.implicit_buffers)
    return func, Explanation(
        ops=(*context.inserted, *_unordered(func, tensors)),
        reuse=dict(context.reuse),
        flag_bytes=sum(4 * math.prod(p.shape) for p in context.implicit),
        versions=versions,
        signals_of_copies=context.signals_of_copies(),
        waits_of_copies=context.waits_of_copies(),
        protocols=_protocol_texts(context),
        leaves_room=context.has_copies and leaves_room(context),
        assumed={t.tensor.name: assumption(t) for t in exchanged if t.is_ragged},
    )


def _protocol_texts(context: SyncContext) -> dict[str, str]:
    """Return the protocol of each tensor for which ``tileweave.protocol`` asks, and why."""
    texts = {}
    for tensor, protocol in context.protocols.items():
        if protocol.reason:
            elements = f", {protocol.elements} elements in a word" * (protocol.elements > 1)
            texts[tensor.name] = f"{protocol.name}: {protocol.reason}{elements}"
    return texts


def _place_sync(context: SyncContext, scratch: set[tirx.Buffer]) -> None:
    """Choose counters and place everything that uses them.

    Args:
        scratch: tensors that the program allocates.
    """
    make_counters(context, scratch)
    place_row_checks(context)
    place_signals(context)
    place_waits(context)
    place_drain(context)
    guard_reuse(context, scratch)
    clear_limited(context, scratch)
    place_credits(context)
    count_epochs(context)
    verify_residency(context)


def is_explicit(func: tirx.PrimFunc) -> bool:
    """Return whether the program has explicit synchronization between ranks."""
    return any(map(_is_explicit, builtins_in(func.body)))


def explicit_sync(func: tirx.PrimFunc) -> tuple[Leaf, tirx.Call] | None:
    """Return the first builtin that synchronizes ranks explicitly, with its statement. The
    inference skips a program that has one."""
    calls = ((leaf, call) for leaf in leaves_of(func.body) for call in leaf.builtins)
    return next(((leaf, call) for leaf, call in calls if _is_explicit(call)), None)


def _is_explicit(call: tirx.Call) -> bool:
    spec = builtin_of(call)
    scope = spec.qualifier(call, "scope") if spec.has_qualifier("scope") else "sys"
    return (
        bool(spec.waits or spec.flagged or releases(call))
        and scope == "sys"
        and spec.participants != "grid"
    )


def _exchanged_tensors(
    func: tirx.PrimFunc, tensors: Sequence[tirx.Buffer], world_size: int
) -> tuple[Program, list[TensorAccesses]]:
    """Return the program's accesses, and those to each tensor that must be synchronized.

    The announcements of a ragged tensor precede its rows.
    """
    program = collect_accesses(func, tensors)
    program.is_shared = bool(options_of(func).share)
    exchanged, ragged, tiles = [], ragged_of(func), tiles_of(func)
    announced = {counts_name(name): name for name in ragged}
    by_name: dict[str, TensorAccesses] = {}
    for tensor in tensors:
        accesses = [a for a in program.accesses if a.tensor.same_as(tensor)]
        segments = ragged.get(announced.get(tensor.name, tensor.name), 0)
        if tensor.name in tiles:
            symbols, tile = Symbols(program, world_size), tiles[tensor.name]
            rows = [access_to_rows(a, segments, program, world_size) for a in accesses]
            accesses = [access_to_tile(a, segments, tile, symbols) for a in rows]
        elif segments:
            rows = [a for a in program.accesses if a.tensor.name == announced[tensor.name]]
            accesses += announcement_reads(tensor, rows, segments)
        if accesses:
            tensor_accesses = collect_tensor_accesses(
                tensor, accesses, copies_of(func, tensor), program, world_size,
                segments=segments, counts=by_name.get(counts_name(tensor.name)),
                tile=tiles.get(tensor.name, 0),
            )  # fmt: skip
            by_name[tensor.name] = tensor_accesses
            if tensor_accesses.is_exchanged or segments:
                exchanged.append(tensor_accesses)
    return program, exchanged


def _tiles(
    func: tirx.PrimFunc, tensors: Sequence[tirx.Buffer], world_size: int, options: Options
) -> dict[str, int]:
    """Return the rows of a tile of each ragged tensor, by its name."""
    program, ragged = collect_accesses(func, tensors), ragged_of(func)
    tiles = {}
    for tensor in (t for t in tensors if t.name in ragged):
        axes = ragged[tensor.name]
        accesses = [
            access_to_rows(a, axes, program, world_size)
            for a in program.accesses
            if a.tensor.same_as(tensor)
        ]
        requested = options.granule.get(tensor.name)
        tiles[tensor.name] = choose_tile(tensor, accesses, axes, program, world_size, requested)
    return tiles


def _require_inference(func: tirx.PrimFunc) -> None:
    """Refuse a ragged tensor in a program whose synchronization is not inferred."""
    ragged = ragged_of(func)
    if not ragged:
        return
    tensor = f"alloc_ragged: {next(iter(ragged))}"
    legal = "a program whose synchronization the compiler infers and verifies"
    if options_of(func).verify == "off":
        raise LanguageError(f"{tensor}, and tileweave.verify=off; expected {legal}")
    if (explicit := explicit_sync(func)) is not None:
        leaf, call = explicit
        raise LanguageError(
            f"{tensor}, and W.{builtin_of(call).name} synchronizes explicitly; "
            f"expected {legal}{location(leaf.stmt)}"
        )


def _unordered(
    func: tirx.PrimFunc, tensors: Sequence[tirx.Buffer]
) -> tuple[InsertedOperation, ...]:
    """Return the accesses that ``W.unordered`` excludes from the inference."""
    if not uses_op(func.body, UNORDERED):
        return ()
    accesses = collect_accesses(func, tensors).unordered
    return tuple(InsertedOperation("unordered", u.tensor, u.line, u.reason) for u in accesses)


def _with_buffers(context: SyncContext, func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Return ``func`` with all buffers of the scratch tensors that launches use in turn."""
    replaced: dict[tirx.Var, tuple] = {}
    buffers, implicit = dict(func.buffer_map.items()), implicit_of(func)
    for param, buffer in func.buffer_map.items():
        copies = context.buffers.get(buffer, 1)
        if copies > 1:
            index = next(i for i, p in enumerate(implicit) if p.name == buffer.name)
            old = implicit[index]
            implicit[index] = dataclasses.replace(old, shape=(copies, *old.shape))
            new = context.all_buffers_of(buffer)
            buffers[param], replaced[buffer.data] = new, (new, context.buffer_index(buffer))
    if not replaced:
        return func
    body = reindexed(func.body, lambda node: replaced.get(node.buffer.data))
    new = tirx.PrimFunc(func.params, body, func.ret_type, buffers, func.attrs, func.span)
    return set_implicit(new, implicit)
