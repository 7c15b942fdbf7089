"""Separate memory for each version of a tensor that one launch writes more than once."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tvm import tirx
from tvm.ir import structural_equal

from ....builtins.errors import LanguageError
from ....builtins.symmetric import itemsize
from ...ir.implicit import (
    Implicit,
    heap_buffer,
    implicit_of,
    parameter_names,
    set_implicit,
    unused_name,
    with_implicit,
)
from ...ir.walk import format_expr, nodes_in, rewrite_children
from ..regions.accesses import Access, Program
from ..regions.granules import choose_granules
from ..regions.tensor_accesses import TensorAccesses, refuse_unwritten, verify_tensor_accesses
from .edits import at_line_of
from .options import Options
from .reindex import Node, reindexed
from .versions import Versions, versions_of

_EXPECTED = "expected W.alloc_symmetric, another tensor for it, or explicit signals and waits"


@dataclass(frozen=True)
class _Storage:
    """Memory of the versions of a tensor.

    Attributes:
        versions: the versions of the tensor.
        copies: buffer with one copy for each version. For a parameter of the program, it holds
            only the versions that are overwritten.
        parameter: the parameter, which holds the last version. None for memory that the program
            allocates.
    """

    versions: Versions
    copies: tirx.Buffer
    parameter: tirx.Buffer | None

    @property
    def text(self) -> str:
        """Describe the memory for the user: ``3 versions, each with its own copy, 4096 bytes``."""
        count, size = self.versions.count, _bytes(self.copies)
        text = f"{count} versions, each with its own copy, {size} bytes"
        if self.parameter is None:
            return text
        return f"{text}; the last version is in place, the others in {self.copies.name}"


def expand_versions(
    func: tirx.PrimFunc, rewritten: Sequence[TensorAccesses], program: Program, options: Options,
    heap_stride: int,
) -> tuple[tirx.PrimFunc, Options, dict[str, str]]:  # fmt: skip
    """Give each version of the tensors in ``rewritten`` its own copy, so that no element is written
    twice in a launch.

    A tensor that the program allocates grows by one axis. A parameter holds the last version, for
    the caller, and implicit memory holds the versions that are overwritten.

    Returns:
        The program; its options, with granules of one version; and a text for each tensor.

    Raises:
        LanguageError: the version of an access is ambiguous, or the copies need more memory than
            ``tileweave.version_bytes``.

    Before: ``for r in T.serial(3): T.copy(tile, S[right, 0]); T.copy(S[me, 0], tile)``
    After:  ``for r in T.serial(3): T.copy(tile, S[right, r, 0]); T.copy(S[me, r, 0], tile)``
    """
    implicit = {p.name for p in implicit_of(func)}
    granule, storages = dict(options.granule), {}
    for accesses in rewritten:
        tensor, name = accesses.tensor, accesses.tensor.name
        if accesses.copies is not None:
            verify_tensor_accesses(accesses)
        choose_granules(accesses, granule.get(name))
        refuse_unwritten(accesses)
        _refuse_unseen(func, accesses, program)
        copies_name = name
        if name not in implicit:
            copies_name = unused_name(f"{name}_versions", parameter_names(func))
        storage = _storage(accesses, versions_of(accesses, program), copies_name, heap_stride)
        _refuse_large(accesses, storage, options.version_bytes)
        storages[tensor] = storage
        if name in granule:
            granule[storage.copies.name] = (1, *granule[name])
    func = _with_memory(func.with_body(_redirected(func.body, storages)), storages)
    notes = {tensor.name: storage.text for tensor, storage in storages.items()}
    return func, dataclasses.replace(options, granule=granule), notes


def _storage(accesses: TensorAccesses, versions: Versions, name: str, heap_stride: int) -> _Storage:
    """Return the memory ``name`` of the versions: the tensor itself if it has this name."""
    tensor = accesses.tensor
    is_implicit = name == tensor.name
    count = versions.count if is_implicit else versions.overwritten
    shape = [count, *(int(n) for n in tensor.shape[1:])]
    copies = heap_buffer(name, shape, str(tensor.dtype), accesses.world_size, heap_stride)
    return _Storage(versions, copies, None if is_implicit else tensor)


def _bytes(copies: tirx.Buffer) -> int:
    return math.prod(int(n) for n in copies.shape[1:]) * itemsize(copies.dtype)


def _refuse_large(accesses: TensorAccesses, storage: _Storage, limit: int) -> None:
    size = _bytes(storage.copies)
    if size > limit:
        access = accesses.in_kernel("write")[0].access
        raise LanguageError(
            f"{access.text} in {storage.versions.count} versions in one launch, whose copies need "
            f"{size} bytes; expected at most {limit} (tileweave.version_bytes), fewer versions, or "
            f"a smaller tensor{access.location}"
        )


def _refuse_unseen(func: tirx.PrimFunc, accesses: TensorAccesses, program: Program) -> None:
    """Refuse accesses to the tensor that the inference does not order: those in ``W.unordered``,
    and reads or writes of single elements in other expressions."""
    collected = {a.node for a in program.accesses if a.tensor.same_as(accesses.tensor)}
    unseen: list[Node] = [
        node
        for node in nodes_in(func.body, tirx.BufferLoad, tirx.BufferStore)
        if node.buffer.data.same_as(accesses.tensor.data) and node not in collected
    ]
    if unseen:
        first = accesses.of_kind("write")[0].access
        element = f"{accesses.tensor.name}[{', '.join(map(format_expr, unseen[0].indices))}]"
        raise LanguageError(
            f"{first.text} again in the same launch, and the version of {element}, which is not "
            f"synchronized, is unknown; {_EXPECTED}{first.location}"
        )


def _with_memory(func: tirx.PrimFunc, storages: Mapping[tirx.Buffer, _Storage]) -> tirx.PrimFunc:
    """Return ``func`` with the copies as implicit parameters."""
    buffers, implicit = dict(func.buffer_map.items()), implicit_of(func)
    new: list[tuple[Implicit, tirx.Buffer]] = []
    for param, buffer in func.buffer_map.items():
        storage = storages.get(buffer)
        if storage is None:
            continue
        shape = tuple(int(n) for n in storage.copies.shape[1:])
        if storage.parameter is not None:
            added = Implicit(storage.copies.name, True, shape, str(buffer.dtype), scratch=True)
            new.append((added, storage.copies))
        else:
            buffers[param] = storage.copies
            implicit = [
                dataclasses.replace(p, shape=shape) if p.name == buffer.name else p
                for p in implicit
            ]
    func = tirx.PrimFunc(func.params, func.body, func.ret_type, buffers, func.attrs, func.span)
    return with_implicit(set_implicit(func, implicit), [p for p, _ in new], [b for _, b in new])


def _redirected(body: tirx.Stmt, storages: Mapping[tirx.Buffer, _Storage]) -> tirx.Stmt:
    """Return ``body`` with each access redirected to the memory of its version."""
    by_anchor: dict[tirx.Stmt, list[tuple[Access, _Storage]]] = {}
    for storage in storages.values():
        for access in storage.versions.by_access:
            by_anchor.setdefault(access.anchor, []).append((access, storage))

    def redirect(stmt: tirx.Stmt) -> tirx.Stmt:
        if stmt in by_anchor:
            return at_line_of(stmt, _replaced(stmt, by_anchor[stmt], {}))
        return rewrite_children(stmt, redirect)

    return redirect(body)


def _replaced(
    stmt: tirx.Stmt, pending: Sequence[tuple[Access, _Storage]], replacements: Mapping[Node, tuple]
) -> tirx.Stmt:
    """Return ``stmt`` with ``replacements`` for its memory accesses.

    Args:
        pending: accesses of ``stmt`` whose replacement is not chosen yet.
        replacements: buffer and leading indices, by the node of an access.
    """
    if not pending:
        return reindexed(stmt, lambda node: replacements.get(node))
    (access, storage), *rest = pending
    version = storage.versions.by_access[access]

    def in_memory(buffer: tirx.Buffer, indices: Sequence[tirx.PrimExpr]) -> tirx.Stmt:
        _refuse_two_versions(access, replacements.get(access.node), (buffer, indices))
        return _replaced(stmt, rest, {**replacements, access.node: (buffer, indices)})

    if storage.parameter is None or version.is_last is False:
        return in_memory(storage.copies, [version.number])
    if version.is_last is True:
        return in_memory(storage.parameter, [])
    if version.is_last is None or isinstance(stmt, tirx.Bind):
        raise LanguageError(
            f"{access.text}, and one part of it is the last version, for the caller, and another "
            f"part is written again; {_EXPECTED}{access.location}"
        )
    last, overwritten = (
        in_memory(storage.parameter, []),
        in_memory(storage.copies, [version.number]),
    )
    return tirx.IfThenElse(version.is_last, last, overwritten)


def _refuse_two_versions(access: Access, chosen: tuple | None, needed: tuple) -> None:
    """Refuse an operation that reads and writes one region in two versions."""
    if chosen is not None and not structural_equal(list(chosen[1]), list(needed[1])):
        raise LanguageError(
            f"{access.text}, and reads the previous version there; {_EXPECTED}{access.location}"
        )
