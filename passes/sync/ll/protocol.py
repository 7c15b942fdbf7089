"""Protocol of each tensor: counters with signals and waits, or words that hold data and a flag."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from tilelang import tvm
from tvm import tirx

from ....builtins.declaration.operands import WORD_DATA_BITS
from ....builtins.errors import LanguageError
from ....builtins.symmetric import itemsize
from ...ir.walk import nodes_in, op_name
from ..infer.options import Options
from ..regions.accesses import Access
from ..regions.granules import choose_granules
from ..regions.symbols import Symbols
from ..regions.tensor_accesses import TensorAccesses
from .word_copies import WORD_COPY, is_elementwise, is_vectorizable

FLAG, LL, AUTO = "flag", "ll", "auto"

MAX_LL_BYTES = 32768
"""Largest granule in bytes for which ``auto`` chooses LL. A signal waits until the stores of its
block have arrived, about 1 us; in this time one block stores about 44 KB over NVLink (8 blocks: 351
GB/s), and LL stores each byte twice. Estimated from these two figures; the crossing itself is not
measured yet."""

_OPERATIONS = (WORD_COPY, "a store", "a load")
"""Accesses that threads execute element by element."""
_DATA_BYTES = WORD_DATA_BITS // 8


@dataclass(frozen=True)
class Protocol:
    """Protocol of one tensor.

    Attributes:
        name: ``flag`` or ``ll``.
        reason: why, for the user.
        elements: number of elements in a word of LL.
        clipped: axes, counted from the last one (-1), along which accesses extend past the end of
            the tensor.
    """

    name: str
    reason: str
    elements: int = 1
    clipped: frozenset[int] = frozenset()

    @property
    def is_ll(self) -> bool:
        return self.name == LL


def choose_protocols(
    func: tirx.PrimFunc, exchanged: Iterable[TensorAccesses], scratch: set[tirx.Buffer],
    options: Options, symbols: Symbols,
) -> dict[tirx.Buffer, Protocol]:  # fmt: skip
    """Choose the protocol of each tensor that ranks exchange.

    Args:
        scratch: tensors that only the program accesses.

    Raises:
        LanguageError: ``tileweave.protocol`` names another tensor, or ``ll`` is not possible.
    """
    exchanged = list(exchanged)
    names = [accesses.tensor.name for accesses in exchanged]
    unknown = [name for name in options.protocol if name not in names]
    if unknown:
        raise LanguageError(
            f"tileweave.protocol: {unknown[0]!r} is no tensor that ranks exchange; expected "
            f"{' or '.join(map(repr, names))}"
        )
    return {
        a.tensor: _protocol_of(func, a, a.tensor in scratch, options, symbols) for a in exchanged
    }


def _protocol_of(
    func: tirx.PrimFunc,
    accesses: TensorAccesses,
    scratch: bool,
    options: Options,
    symbols: Symbols,
) -> Protocol:
    requested = options.protocol.get(accesses.tensor.name, FLAG)
    if requested == FLAG:
        return Protocol(FLAG, "")
    obstacle = _obstacle(func, accesses, scratch)
    if obstacle is not None and requested == LL:
        access, reason = obstacle
        raise LanguageError(
            f"{access.text}: tileweave.protocol='ll' of {accesses.tensor.name}: {reason}; expected "
            f"another tensor, or 'flag' or 'auto'{access.location}"
        )
    if obstacle is not None:
        return Protocol(FLAG, obstacle[1])
    words = _elements_per_word(accesses, symbols), _clipped_axes(accesses)
    if requested == LL:
        return Protocol(LL, "chosen by tileweave.protocol", *words)
    size = _granule_bytes(accesses, options)
    if any(rank != owner for f in accesses.of_kind("read") for rank, owner in f.ranks_and_owners()):
        return Protocol(FLAG, "ranks read memory of other ranks, which they would poll")
    if size > MAX_LL_BYTES:
        return Protocol(FLAG, f"a granule has {size} bytes, more than {MAX_LL_BYTES}")
    return Protocol(LL, f"a granule has {size} bytes, at most {MAX_LL_BYTES}", *words)


def _clipped_axes(accesses: TensorAccesses) -> frozenset[int]:
    """Return the axes, counted from the last one, along which a copy extends past the end."""
    shape = accesses.grid.shape
    return frozenset(
        axis - len(shape)
        for boxes in accesses.footprints.values()
        if boxes.access.op == WORD_COPY
        for axis, (low, extent) in enumerate(zip(boxes.low, boxes.access.extents[1:], strict=True))
        if np.any(boxes.active(low)[0] + int(extent) > shape[axis])
    )


def _granule_bytes(accesses: TensorAccesses, options: Options) -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # ``make_counters`` gives them
        granules = choose_granules(accesses, options.granule.get(accesses.tensor.name))
    return math.prod(granules.size) * itemsize(str(accesses.tensor.dtype))


def _elements_per_word(accesses: TensorAccesses, symbols: Symbols) -> int:
    """Return how many elements share a word: as many as fit, if copies move them together."""
    copies = [(f.access.anchor.value, f.access.node.buffer) for f in accesses.footprints.values()
              if f.access.op == WORD_COPY]  # fmt: skip
    fits = _DATA_BYTES // itemsize(str(accesses.tensor.dtype))
    together = len(copies) == len(accesses.footprints) and all(
        is_vectorizable(call, buffer, 2 * fits, symbols) for call, buffer in copies
    )
    return fits if together else 1


def _obstacle(
    func: tirx.PrimFunc, accesses: TensorAccesses, scratch: bool
) -> tuple[Access, str] | None:
    """Return why words with flags cannot replace counters, and an access that shows it."""
    footprints = list(accesses.footprints.values())
    first = (accesses.of_kind("write") or footprints)[0].access
    if accesses.copies is not None or accesses.copies_out is not None:
        copies = accesses.copies or accesses.copies_out
        assert copies is not None
        return copies.access, "copy engines access it, and they store no flags"
    if not scratch:
        return first, "the caller accesses it; expected W.alloc_symmetric"
    size = itemsize(str(accesses.tensor.dtype))
    if size not in (1, 2, 4) or tvm.DataType(str(accesses.tensor.dtype)).lanes > 1:
        dtype = accesses.tensor.dtype
        return first, f"its elements have type {dtype}, which does not divide the 4 bytes of a word"
    for boxes in footprints:
        if reason := _obstacle_of(func, boxes.access):
            return boxes.access, reason
        if not boxes.is_certain:
            return boxes.access, "which part is accessed depends on data"
        if boxes.outside or boxes.before:
            return boxes.access, "the access may begin outside of the tensor"
    return None


def _obstacle_of(func: tirx.PrimFunc, access: Access) -> str:
    if access.kind == "add":
        return "words with flags cannot be added to"
    if access.op not in _OPERATIONS:
        return f"{access.op} is not an access of single threads"
    if any(loop.stmt and "num_stages" in loop.stmt.annotations for loop in access.enclosing):
        return "the access is in T.Pipelined, which would poll ahead"
    if access.op == WORD_COPY:
        return "" if is_elementwise(access.anchor.value) else "the boxes of the copy differ"
    if isinstance(access.node.indices[-1], tirx.Ramp):
        return "the statement accesses a vector, not one element"
    if access.op == "a load" and not _is_in_statement(func, access):
        return "a condition or the range of a loop reads it"
    return ""


def _is_in_statement(func: tirx.PrimFunc, access: Access) -> bool:
    """Return whether a load is evaluated whenever its statement is."""
    leaves = nodes_in(func.body, tirx.Evaluate, tirx.BufferStore, tirx.Bind)
    choices = [c for leaf in leaves for c in nodes_in(leaf.value, tirx.Call, tirx.Select)]
    arms = [c for c in choices if isinstance(c, tirx.Select) or op_name(c) == "tirx.if_then_else"]

    def has(node: tirx.PrimExpr) -> bool:
        return any(load.same_as(access.node) for load in nodes_in(node, tirx.BufferLoad))

    return any(has(leaf.value) for leaf in leaves) and not any(map(has, arms))
