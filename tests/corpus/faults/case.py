"""One fault of the corpus, and the registry of all faults."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import tilelang.language as T

from tests.factory import factory
from tests.lines import lines_of, named_lines
from tests.releases import RECORDS_LINES
from tileweave import language as W
from tileweave.builtins.symmetric import is_symmetric

N = 64
"""Elements of a message, and threads of a block: one element a thread."""

EPOCHS = 3

TILE = 48
"""Elements of a tile that does not divide a message."""

Mail, TwoMails = partial(W.Symmetric, (N,), "int32"), partial(W.Symmetric, (2, N), "int32")
Flag = partial(W.Symmetric, (1,), "int32")
Row, TwoRows = partial(T.Tensor, (N,), "int32"), partial(T.Tensor, (2, N), "int32")
State, TwoStates = partial(T.Tensor, (1,), "int32"), partial(T.Tensor, (2,), "int32")
"""Types of parameters; a state has the number of the epoch, for each block."""

Expected = Callable[[int, int, int], dict[str, Any]]
"""(Last epoch, rank, number of ranks) -> what the correct twin leaves, by parameter."""


def datum(epoch, sender, i):
    """Return element ``i`` of the message that ``sender`` sends in ``epoch``."""
    return epoch * 1000 + sender * 100 + i


@T.macro
def begin(state, block=0):
    """Return the rank, its right neighbor and the number of the epoch."""
    epoch = T.alloc_var("int32")
    epoch = state[block]
    return W.rank(), (W.rank() + 1) % W.world_size(), epoch


@T.macro
def advance(state, epoch, block=0):
    """Let one thread of a block count the epoch."""
    if T.get_thread_binding() == 0:
        state[block] = epoch + 1


def from_left(epoch: int, me: int, ranks: int) -> dict[str, Any]:
    """Expect at each rank the message of its left neighbor."""
    return {"out": datum(epoch, (me - 1) % ranks, np.arange(N))}


def nothing(epoch: int, me: int, ranks: int) -> dict[str, Any]:
    """Expect no result: the program only synchronizes."""
    return {}


def zeros_of(program) -> dict[str, np.ndarray]:
    """Return zeros for each tensor of a program: of a symmetric tensor the part of one rank."""
    values = {}
    for buffer in program.buffer_map.values():
        shape = [int(n) for n in buffer.shape[1 if is_symmetric(buffer) else 0 :]]
        values[buffer.name] = np.zeros(shape, str(buffer.dtype))
    return values


@dataclass(frozen=True)
class Case:
    """A faulty program, its correct twin, and the expected report.

    Args:
        make: faulty or not -> the program.
        kinds: legal kinds of the reported fault; which effect shows depends on the schedule.
        report: a regular expression that the report must match.
        expected: results of the correct twin.
        source: the function whose ``# FAULT`` lines the report must name.
        label: restricts these lines to ``# FAULT <label>``; ``|`` separates several labels.
        start: initial values by parameter; None leaves a symmetric tensor unwritten.
    """

    name: str
    make: Callable[[bool], Any]
    kinds: tuple[str, ...]
    report: str
    expected: Expected
    source: Callable[..., Any]
    ranks: int = 2
    label: str = ""
    start: dict[str, Any] = field(default_factory=dict)

    def lines_in(self, text: str) -> set[int]:
        """Return the lines of the case's file that a report names.

        TileLang 0.1.12 records none: those that it should name are returned then.
        """
        return named_lines(text, self.source) if RECORDS_LINES else self.lines

    @property
    def lines(self) -> set[int]:
        """Numbers of the lines that the report must name."""
        return lines_of(self.source, *(f"# FAULT {x}".rstrip() for x in self.label.split("|")))

    def inputs(self, program) -> list[dict[str, np.ndarray]]:
        """Return one dict for each rank, with zeros or the values of ``start``."""
        values = zeros_of(program)
        for name, value in self.start.items():
            if value is None:
                del values[name]
            else:
                values[name][...] = value
        return [{name: value.copy() for name, value in values.items()} for _ in range(self.ranks)]


FAULTS: dict[str, Case] = {}


def add_case(make, kinds: str, report: str, expected: Expected = from_left, **more: Any) -> None:
    """Register a fault; ``kinds`` are separated by spaces."""
    make = factory(make)
    more = {"name": make.__name__, "source": make, **more}
    FAULTS[more["name"]] = Case(
        make=make, kinds=tuple(kinds.split()), report=report, expected=expected, **more
    )


def case(kinds: str, report: str, expected: Expected = from_left, **more: Any):
    """Register the factory below as a fault."""

    def register(make):
        add_case(make, kinds, report, expected, **more)
        return make

    return register


def with_fault(
    skeleton,
    name: str,
    kinds: str,
    report: str,
    label: str,
    ranks: int = 2,
    expected: Expected = from_left,
    **fault: Any,
) -> None:
    """Register a skeleton that is correct with its defaults and faulty with ``fault``."""

    def make(faulty):
        return skeleton(**fault) if faulty else skeleton()

    more = dict(name=name, source=skeleton, label=label, ranks=ranks)
    add_case(make, kinds, report, expected, **more)
