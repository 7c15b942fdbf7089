"""Memory of its own for each round of a tensor that is written again within a launch."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tvm import tirx
from tvm.ir import structural_equal
from tvm.tirx.stmt_functor import post_order_visit

from ....builtins.errors import LanguageError
from ....builtins.symmetric import itemsize
from ...ir.implicit import Implicit, heap_buffer, implicit_of, set_implicit, with_hidden
from ...ir.walk import format_expr, rewrite_children
from ..regions.accesses import Access, Program
from ..regions.granules import choose_granules
from ..regions.tensor_accesses import TensorAccesses, refuse_unwritten, verify_tensor_accesses
from .edits import at_line_of
from .options import Options
from .reindex import Node, reindexed
from .versions import Rounds, rounds_of

_EXPECTED = "expected W.alloc_symmetric, another tensor for it, or signals and waits by hand"


@dataclass(frozen=True)
class _Home:
    """Where the rounds of a tensor are.

    Attributes:
        rounds: whose.
        copies: one for each round; those of a parameter only hold what is overwritten.
        kept: the parameter, which holds the rest; None for the program's own memory.
    """

    rounds: Rounds
    copies: tirx.Buffer
    kept: tirx.Buffer | None

    @property
    def text(self) -> str:
        """``3 rounds, each with its own copy, 4096 bytes``, for the user."""
        said = f"{self.rounds.count} rounds, each with its own copy, {_bytes(self.copies)} bytes"
        if self.kept is None:
            return said
        return f"{said}; what is written last is in place, the rest in {self.copies.name}"


def give_rounds(
    func: tirx.PrimFunc, again: Sequence[TensorAccesses], program: Program, options: Options,
    heap_stride: int,
) -> tuple[tirx.PrimFunc, Options, dict[str, str]]:  # fmt: skip
    """Give each round of the tensors in ``again``, which are written more than once in a launch,
    its own copy. Then nothing is written twice.

    The program's own memory becomes larger. The caller of the program finds in its tensor what
    was written last; what is overwritten before goes to hidden memory.

    Returns:
        The program, its options, with granules of one round; and by tensor what was done.

    Raises:
        LanguageError: it is not settled to what round an access belongs, or the copies need more
            memory than ``tileweave.round_bytes``.

    Before: ``for r in T.serial(3): T.copy(tile, S[right, 0]); T.copy(S[me, 0], tile)``
    After:  ``for r in T.serial(3): T.copy(tile, S[right, r, 0]); T.copy(S[me, r, 0], tile)``
    """
    own = {h.name for h in implicit_of(func)}
    granule, homes = dict(options.granule), {}
    for traffic in again:
        tensor, name = traffic.tensor, traffic.tensor.name
        if traffic.copies is not None:
            verify_tensor_accesses(traffic)
        choose_granules(traffic, granule.get(name))
        refuse_unwritten(traffic)
        _refuse_unseen(func, traffic, program)
        home = _home(traffic, rounds_of(traffic, program), name in own, heap_stride)
        _refuse_large(traffic, home, options.round_bytes)
        homes[tensor] = home
        if name in granule:
            granule[home.copies.name] = (1, *granule[name])
    func = _with_memory(func.with_body(_moved(func.body, homes)), homes)
    notes = {tensor.name: home.text for tensor, home in homes.items()}
    return func, dataclasses.replace(options, granule=granule), notes


def _home(traffic: TensorAccesses, rounds: Rounds, own: bool, heap_stride: int) -> _Home:
    tensor = traffic.tensor
    count = rounds.count if own else rounds.overwritten
    shape = [count, *(int(n) for n in tensor.shape[1:])]
    name = tensor.name if own else f"{tensor.name}_rounds"
    copies = heap_buffer(name, shape, str(tensor.dtype), traffic.world_size, heap_stride)
    return _Home(rounds, copies, None if own else tensor)


def _bytes(copies: tirx.Buffer) -> int:
    return math.prod(int(n) for n in copies.shape[1:]) * itemsize(copies.dtype)


def _refuse_large(traffic: TensorAccesses, home: _Home, limit: int) -> None:
    size = _bytes(home.copies)
    if size > limit:
        access = traffic.in_kernel("write")[0].access
        raise LanguageError(
            f"{access.text} in {home.rounds.count} rounds of a launch, for which copies take "
            f"{size} bytes; expected at most {limit} (tileweave.round_bytes), fewer rounds, or a "
            f"smaller tensor{access.location}"
        )


def _refuse_unseen(func: tirx.PrimFunc, traffic: TensorAccesses, program: Program) -> None:
    """Refuse what touches the tensor beside its known accesses: ``W.unordered``, and what reads or
    writes single words."""
    known = {a.node for a in program.accesses if a.tensor.same_as(traffic.tensor)}
    unseen: list[Node] = []

    def visit(node) -> None:
        if isinstance(node, (tirx.BufferLoad, tirx.BufferStore)):
            if node.buffer.data.same_as(traffic.tensor.data) and node not in known:
                unseen.append(node)

    post_order_visit(func.body, visit)
    if unseen:
        first = traffic.of_kind("write")[0].access
        where = f"{traffic.tensor.name}[{', '.join(map(format_expr, unseen[0].indices))}]"
        raise LanguageError(
            f"{first.text} again in the same launch, and it is not known what round is meant where "
            f"{where} is not synchronised; {_EXPECTED}{first.location}"
        )


def _with_memory(func: tirx.PrimFunc, homes: Mapping[tirx.Buffer, _Home]) -> tirx.PrimFunc:
    """``func`` with the copies as hidden parameters."""
    buffers, implicit = dict(func.buffer_map.items()), implicit_of(func)
    new: list[tuple[Implicit, tirx.Buffer]] = []
    for param, buffer in func.buffer_map.items():
        home = homes.get(buffer)
        if home is None:
            continue
        shape = tuple(int(n) for n in home.copies.shape[1:])
        if home.kept is not None:
            one = Implicit(home.copies.name, True, shape, str(buffer.dtype), scratch=True)
            new.append((one, home.copies))
        else:
            buffers[param] = home.copies
            implicit = [
                dataclasses.replace(h, shape=shape) if h.name == buffer.name else h
                for h in implicit
            ]
    func = tirx.PrimFunc(func.params, func.body, func.ret_type, buffers, func.attrs, func.span)
    return with_hidden(set_implicit(func, implicit), [h for h, _ in new], [b for _, b in new])


def _moved(body: tirx.Stmt, homes: Mapping[tirx.Buffer, _Home]) -> tirx.Stmt:
    """``body`` with each access where its round is."""
    at: dict[tirx.Stmt, list[tuple[Access, _Home]]] = {}
    for home in homes.values():
        for access in home.rounds.of:
            at.setdefault(access.anchor, []).append((access, home))

    def place(stmt: tirx.Stmt) -> tirx.Stmt:
        if stmt in at:
            return at_line_of(stmt, _placed(stmt, at[stmt], {}))
        return rewrite_children(stmt, place)

    return place(body)


def _placed(
    stmt: tirx.Stmt, left: Sequence[tuple[Access, _Home]], other: Mapping[Node, tuple]
) -> tirx.Stmt:
    """``stmt`` with what its accesses name replaced, as ``other`` says, and as ``left`` demands."""
    if not left:
        return reindexed(stmt, lambda node: other.get(node))
    (access, home), *rest = left
    of = home.rounds.of[access]

    def with_other(buffer: tirx.Buffer, indices: Sequence[tirx.PrimExpr]) -> tirx.Stmt:
        _refuse_two(access, other.get(access.node), (buffer, indices))
        return _placed(stmt, rest, {**other, access.node: (buffer, indices)})

    if home.kept is None or of.kept is False:
        return with_other(home.copies, [of.number])
    if of.kept is True:
        return with_other(home.kept, [])
    if of.kept is None or isinstance(stmt, tirx.Bind):
        raise LanguageError(
            f"{access.text}, of which the caller finds a part behind the launch, and another part "
            f"is written again; {_EXPECTED}{access.location}"
        )
    here, there = with_other(home.kept, []), with_other(home.copies, [of.number])
    return tirx.IfThenElse(of.kept, here, there)


def _refuse_two(access: Access, one: tuple | None, other: tuple) -> None:
    """Refuse what reads and writes one region at once, if they are of two rounds."""
    if one is not None and not structural_equal(list(one[1]), list(other[1])):
        raise LanguageError(
            f"{access.text}, and reads there what the round before brought; {_EXPECTED}"
            f"{access.location}"
        )
