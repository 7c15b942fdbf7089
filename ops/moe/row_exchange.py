"""Base class and calls of operators that move rows between tokens and experts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from tvm import tirx

from ...runtime.executor.recorded_calls import recorded_calls
from ...runtime.host.group import Group
from ...runtime.host.session import Session
from ...runtime.kernel.kernel import capturing
from ...runtime.plans.parameters import parameters_of
from ..collectives.transport import Transport, check_requested, first_possible
from ..collectives.vectors import as_declared
from ..core.cache import op_cache_of
from ..core.call import Decision, record_fast_path, signature
from ..core.compiled import CompiledOp
from ..core.groups import group_of
from ..core.problem import agree, as_kernel_operand, check_layout, require_no_overlap
from ..core.registry import OPERATORS, RegisteredOp
from ..core.strategy import obstacle_of_ranks
from .routing import Tables
from .row_problem import RowProblem, check_capacity

OWN = ("ldst",)
"""Transports of the programs."""
TABLES = ", ".join(f"Tensor {name}" for name in Tables._fields)
"""Tables in the schemas of operators."""


class RowExchange(CompiledOp, RegisteredOp, ABC):
    """Compiled program that exchanges rows by tables. Its parameters are rows, tables, the result.

    Attributes:
        reads: names of the arguments that the program reads, for errors.
    """

    reads: ClassVar[tuple[str, ...]]

    def __init__(self, problem: RowProblem, transport: str, session: Session) -> None:
        """Compile, and allocate symmetric memory. Collective."""
        program = self.program(problem)
        super().__init__(program, session)
        *self._inputs, self._out = parameters_of(program)

    def __call__(self, inputs: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        """Compute ``out``. Every rank calls it."""
        self.enqueue(*self.declared(inputs, out))

    def declared(
        self, inputs: Sequence[torch.Tensor], out: torch.Tensor
    ) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Return the arguments of ``enqueue``."""
        pairs = zip(inputs, self._inputs, strict=True)
        return [as_declared(tensor, p) for tensor, p in pairs], as_declared(out, self._out)

    @staticmethod
    @abstractmethod
    def program(problem: RowProblem) -> tirx.PrimFunc:
        """Return the tile program."""

    @staticmethod
    @abstractmethod
    def obstacle(problem: RowProblem) -> str | None:
        """Return why the program cannot serve a problem, with what is expected; else None."""

    @staticmethod
    @abstractmethod
    def inputs(
        rows: torch.Tensor, weights: torch.Tensor | None, tables: Tables
    ) -> tuple[torch.Tensor, ...]:
        """Return the arguments that the program reads."""

    @staticmethod
    @abstractmethod
    def empty(rows: torch.Tensor, tables: Tables) -> torch.Tensor:
        """Return memory for the result."""

    @staticmethod
    @abstractmethod
    def unfused(
        rows: torch.Tensor, weights: torch.Tensor | None, tables: Tables, group: Group
    ) -> torch.Tensor:
        """Return the result by ``torch.distributed``, on any device."""


def check_options(op: str, capacity: Any, transport: Any) -> None:
    """Refuse values that no call accepts. torch would convert them, or refuse them with another
    error."""
    check_capacity(op, capacity)
    check_requested(transport, op, OWN)


def choose_transport(
    requested: str, problem: RowProblem, device: torch.device, group: Group, obstacle: str | None
) -> Transport:
    """Return the transport for a problem. It depends only on values that are equal on all ranks.

    Args:
        obstacle: why no program serves the problem, with what is expected; else None.

    Raises:
        TileWeaveError: ``requested`` is no transport, or cannot serve the problem; or the tensors
            are on another rank's GPU.
    """
    return first_possible(
        requested, problem.op, device, group, OWN, OWN,
        lambda _: obstacle_of_ranks(device, group) or obstacle,
    )  # fmt: skip


def gather_from_all(values: torch.Tensor, group: str, transport: str) -> torch.Tensor:
    """Return the values of all ranks, in rank order.

    Args:
        transport: transport of the exchange of rows that needs them.
    """
    by = "nccl" if transport == "nccl" else "auto"
    return torch.ops.tileweave.all_gather(values, group, by)


def problem_of(
    op: str, rows: torch.Tensor, tables: Tables, ranks: int, clear_rest: bool, is_padded: bool
) -> RowProblem:
    """Return the problem of a call with tables."""
    (tokens, choices), capacity = tables.place.shape, len(tables.source)
    columns = rows.shape[1]
    return RowProblem(
        op, tokens, choices, capacity, columns, ranks, rows.dtype, clear_rest=clear_rest,
        is_padded=is_padded,
    )  # fmt: skip


def exchange(
    op: str, rows: torch.Tensor, weights: torch.Tensor | None, tables: Tables, is_padded: bool,
    group: str, requested: str, out: torch.Tensor | None = None, clear_rest: bool = True,
) -> torch.Tensor:  # fmt: skip
    """Return the result of an exchange, in ``out`` if given. Collective for each new problem.

    Args:
        is_padded, clear_rest: see ``RowProblem``.
    """
    operator = OPERATORS[op]
    inputs = operator.inputs(rows, weights, tables)
    shapes = *tables.place.shape, len(tables.source)
    key, addresses = signature((op, group, requested, *shapes, clear_rest, is_padded), inputs, out)
    decision = recorded_calls().get(key)
    if decision is not None and decision.fast_path is not None:
        result = decision.fast_path(addresses, out)
        if result is not None:
            return result
    if decision is None:
        decision = _decide(operator, rows, tables, group, requested, clear_rest, is_padded)
    if out is not None:
        _check_out(operator, out, inputs)
    problem, ranks = decision.problem, decision.group
    if decision.choice == "nccl":
        result = operator.unfused(rows, weights, tables, ranks)
        return result if out is None else out.copy_(result)
    readable = [
        as_kernel_operand(op, name, x) for name, x in zip(operator.reads, inputs, strict=True)
    ]
    result = operator.empty(rows, tables) if out is None else out
    cache = op_cache_of(ranks)
    compiled = cache.operator(problem, decision.choice, operator)
    compiled(readable, result)
    if not capturing():
        declared = compiled.declared(readable, result)
        decision.fast_path = record_fast_path(inputs, cache, compiled, *declared, result, inputs)
        recorded_calls().put(cache.session, key, decision)
    return result


def _decide(
    operator: type[RowExchange], rows: torch.Tensor, tables: Tables, group: str, requested: str,
    clear_rest: bool, is_padded: bool,
) -> Decision:  # fmt: skip
    """Check a call and choose its transport. Collective for each new problem."""
    ranks = group_of(group)
    problem = problem_of(operator.op, rows, tables, ranks.world_size, clear_rest, is_padded)
    obstacle = operator.obstacle(problem)
    transport = choose_transport(requested, problem, rows.device, ranks, obstacle).name
    agree(ranks, problem, transport)
    return Decision(problem, ranks, transport)


def _check_out(
    operator: type[RowExchange], out: torch.Tensor, inputs: Sequence[torch.Tensor]
) -> None:
    check_layout(operator.op, out)
    require_no_overlap(operator.op, out, **dict(zip(operator.reads, inputs, strict=True)))
