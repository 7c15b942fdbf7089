"""Base class and calls of operators that move rows between tokens and experts."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from tvm import tirx

from ...runtime.host.group import Group
from ..core.agreement import agree
from ..core.call import Call, CallableOp, Decision, Recorded, compute
from ..core.checks import check_layout, require_no_overlap
from ..core.compiled import shared_by_sizes, similar_sizes
from ..core.groups import group_of
from ..core.noted import note
from ..core.registry import OPERATORS
from ..core.strategy import Transport, check_requested, first_possible, obstacle_of_ranks
from .routing import Tables
from .row_problem import RowProblem, check_capacity

OWN = ("ldst",)
"""Transports of the programs."""
TABLES = ", ".join(f"Tensor {name}" for name in Tables._fields)
"""Tables in the schemas of operators."""


class RowExchange(CallableOp):
    """Compiled program that exchanges rows by tables. Its parameters are rows, tables, the result.

    The options of a call are tokens, choices and capacity, ``clear_rest``, ``is_padded``, group and
    transport. The tables are ``unread``, after the weights.
    """

    @classmethod
    def compiled_programs(cls, problem: RowProblem, choice: str) -> list[tirx.PrimFunc]:
        return [shared_by_sizes(cls.program(problem), problem, tokens=0, capacity=0)]

    @classmethod
    def similar_programs(cls, problem: RowProblem, choice: str) -> list[tirx.PrimFunc]:
        sizes = zip(similar_sizes(problem.tokens), similar_sizes(problem.capacity), strict=False)
        others = [replace(problem, tokens=n, capacity=capacity) for n, capacity in sizes]
        return [program for other in others for program in cls.compiled_programs(other, choice)]

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
    def empty_rows(rows: torch.Tensor, tables: Tables) -> torch.Tensor:
        """Return memory for the result."""

    @staticmethod
    @abstractmethod
    def unfused(
        rows: torch.Tensor, weights: torch.Tensor | None, tables: Tables, group: Group
    ) -> torch.Tensor:
        """Return the result by ``torch.distributed``, on any device."""

    @classmethod
    def decide(cls, call: Call) -> Decision:
        *options, group, requested = call.options
        rows, ranks = call.inputs[0], group_of(group)
        problem = _problem(cls.op, rows, options, ranks)
        transport = cls.choose(problem, ranks, requested, rows.device)
        if call.out is not None:
            cls.check_memory(call.inputs, call.out, ())
        return Decision(problem, ranks, transport)

    @classmethod
    def choose(cls, problem: RowProblem, ranks: Group, requested: str, device: torch.device) -> str:
        obstacle = cls.obstacle(problem)
        transport = choose_transport(requested, problem, device, ranks, obstacle).name
        agree(ranks, problem, transport)
        return transport

    @classmethod
    def check_memory(
        cls, inputs: Sequence[Any], out: torch.Tensor, results: Sequence[torch.Tensor | None]
    ) -> None:
        check_layout(cls.op, out)
        require_no_overlap(cls.op, out, **dict(zip(cls.reads, inputs, strict=True)))

    @classmethod
    def empty(cls, call: Call, problem: RowProblem) -> torch.Tensor:
        return cls.empty_rows(call.inputs[0], Tables(*call.unread[1:]))

    @classmethod
    def compute_unfused(cls, call: Call, decision: Decision) -> torch.Tensor:
        weights, *tables = call.unread
        result = cls.unfused(call.inputs[0], weights, Tables(*tables), decision.group)
        return result if call.out is None else call.out.copy_(result)


def _problem(op: str, rows: torch.Tensor, options: Sequence[Any], ranks: Group) -> RowProblem:
    """Return the problem of a call; ``options`` are its first five."""
    tokens, choices, capacity, clear_rest, is_padded = options
    return RowProblem(
        op, tokens, choices, capacity, rows.shape[1], ranks.world_size, rows.dtype,
        clear_rest=clear_rest, is_padded=is_padded,
    )  # fmt: skip


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
        lambda _: obstacle_of_ranks(device, group) or obstacle, Transport,
    )  # fmt: skip


def gather_from_all(values: torch.Tensor, group: str, transport: str) -> torch.Tensor:
    """Return the values of all ranks, in rank order.

    Args:
        transport: transport of the exchange of rows that needs them.
    """
    return torch.ops.tileweave.all_gather(values, group, gather_transport(transport))


def gather_transport(transport: str) -> str:
    """Return the transport of ``gather_from_all``."""
    return "nccl" if transport == "nccl" else "auto"


def exchange(
    op: str, rows: torch.Tensor, weights: torch.Tensor | None, tables: Tables, is_padded: bool,
    group: str, requested: str, out: torch.Tensor | None = None, clear_rest: bool = True,
    recorded: Recorded | None = None,
) -> torch.Tensor:  # fmt: skip
    """Return the result of an exchange, in ``out`` if given. Collective for each new problem.

    Args:
        is_padded, clear_rest: see ``RowProblem``.
        recorded: see ``compute``; the tensors of its key are the inputs of the program.
    """
    inputs = OPERATORS[op].inputs(rows, weights, tables)
    options = *_sizes(tables), clear_rest, is_padded, group, requested
    return compute(op, inputs, out, options, unread=(weights, *tables), recorded=recorded)


def fake_exchange(
    op: str, rows: torch.Tensor, tables: Tables, is_padded: bool, group: str, requested: str,
    clear_rest: bool = True,
) -> torch.Tensor:  # fmt: skip
    """Return memory for the result of ``exchange``, and note the problem."""
    options = *_sizes(tables), clear_rest, is_padded
    note(_problem(op, rows, options, group_of(group)), group, requested, rows.device)
    return OPERATORS[op].empty_rows(rows, tables)


def _sizes(tables: Tables) -> tuple[int, ...]:
    """Return the tokens, choices and capacity of a call."""
    return *tables.place.shape, tables.source.shape[0]
