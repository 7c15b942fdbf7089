"""Registry of operators: commands, tuner, checks and tables read here what an operator declares."""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple, TypeVar

OPERATORS: dict[str, type[Any]] = {}
"""Operator classes by name. No other table has names of operators."""


class TableRow(NamedTuple):
    """Row of an operator in the tables of the documentation, as Markdown.

    W is the number of ranks. Tables omit an operator whose text is empty.

    Attributes:
        inputs, result: what each rank passes, and what it receives.
        gradient: how the gradient is computed.
        memory: symmetric memory of a rank: elements of a GEMM operator, or multiples of the input
            of a collective.
        sent: ``Collective.sent_bytes`` for an input of S bytes, as a formula.
    """

    inputs: str
    result: str
    gradient: str = ""
    memory: str = ""
    sent: str = ""


class RegisteredOp:
    """Base class of operators. The class argument registers a subclass: ``class
    AllGather(Collective, op="all_gather")``.

    Attributes:
        op: name of the function in ``tileweave.ops``, and in ``torch.ops.tileweave``.
        arguments: names of the tensors that a caller must pass, for errors.
        row: row in the tables of the documentation.
    """

    op: ClassVar[str]
    arguments: ClassVar[tuple[str, ...]]
    row: ClassVar[TableRow]

    def __init_subclass__(cls, op: str | None = None, **options: Any) -> None:
        super().__init_subclass__(**options)
        if op is not None:
            cls.op = op
            OPERATORS[op] = cls


Op = TypeVar("Op", bound=RegisteredOp)


def operators_of(base: type[Op] | tuple[type[Op], ...]) -> dict[str, type[Op]]:
    """Return the registered subclasses of base classes, in the order of their names."""
    return {name: cls for name, cls in sorted(OPERATORS.items()) if issubclass(cls, base)}
