"""Errors and warnings of the simulator."""

from __future__ import annotations

from typing import Any

from tvm import DataType

from ...builtins.errors import TileWeaveError

KINDS = (
    "race", "deadlock", "reuse", "arrival", "bounds", "alignment", "poison", "assertion",
    "nan", "translation", "unsupported",
)  # fmt: skip


class SimulationError(TileWeaveError):
    """A fault of the simulated program.

    Attributes:
        kind: one of

            - ``race``: two unordered accesses, at least one of them a write;
            - ``reuse``: a write to memory that an earlier reader may still read;
            - ``deadlock``: no block or stream can continue;
            - ``arrival``: more arrivals than are waited for, or than a barrier can count; words of
              a barrier with other values, or that another barrier uses;
            - ``bounds``: an index out of range;
            - ``alignment``: an address or a size that is illegal for an instruction;
            - ``poison``: a use of uninitialized memory;
            - ``assertion``: a failed ``T.device_assert``, or a ``W.rank_uniform`` with different
              values;
            - ``nan``: a statement that makes a NaN or an infinity, if ``nan=True`` is given;
            - ``translation``: results of the device level differ from the tile level's;
            - ``unsupported``: an operation that is not simulated.
        report: rank, block, tensor, region, source lines, last events, seed.
        seed: seed of the schedule with the fault; None if the program itself was refused, or all
            interleavings were explored.
        interleavings: number of interleavings explored, with that of the fault; 0 if schedules are
            random.
        event: number of the earlier one of two conflicting accesses; 0 if there is none.
    """

    def __init__(self, kind: str, report: str, *, seed: int | None = None, event: int = 0) -> None:
        assert kind in KINDS, kind
        super().__init__(f"{kind}: {report}")
        self.kind, self.report, self.seed, self.event = kind, report, seed, event
        self.interleavings = 0

    def noted(self, note: str, seed: int | None = None) -> SimulationError:
        """Return the fault with a note in its report."""
        return SimulationError(self.kind, f"{self.report}\n{note}", seed=seed, event=self.event)

    def in_schedule(self, seed: int) -> SimulationError:
        """Return the fault with a note on how to replay it."""
        return self.noted(f"schedule of seed {seed}: replay it with schedules=1, seed={seed}", seed)

    def in_interleaving(self, number: int) -> SimulationError:
        """Return the fault with the number of interleavings that were explored."""
        note = f"interleaving {number} of an exhaustive exploration, the first with a fault"
        fault = self.noted(note)
        fault.interleavings = number
        return fault


class SimulationWarning(UserWarning):
    """Warning for a program without a fault: signals that are never waited for or read, or a
    kernel that the compiler refuses."""


def uninitialized(use: str, block: Any, loc: str) -> SimulationError:
    """Return the fault of a use of uninitialized memory, such as ``T.copy to S of``. It says where
    that memory was read first."""
    explanation = block.machine.memory.unwritten
    fault = SimulationError("poison", f"{use} uninitialized memory, by {block.place}\n --> {loc}")
    return fault.noted(explanation) if explanation else fault


def read_before_write(name: str, loc: str) -> str:
    """Return the explanation of poison that a line reads in shared memory or registers."""
    return (
        f"{name} is read before it is written --> {loc}; expected T.clear, T.fill, T.copy or "
        "another write before"
    )


def two_values(name: str, index: tuple[int, ...], where: str, loc: str) -> SimulationError:
    """Return the fault of a statement in which threads store different values to one element."""
    return SimulationError(
        "race",
        f"different threads store different values to {name}[{', '.join(map(str, index))}] in one "
        f"statement, by {where}; which value remains is undefined\n --> {loc}",
    )


def refuse_vectors(name: str, dtype: str, loc: str) -> None:
    """Refuse a tensor or a tile whose elements are vectors, such as ``float16x2``.

    The simulator has an array of numbers for each tensor. Accesses to vectors of them are legal.
    """
    if (lanes := DataType(dtype).lanes) > 1:
        element = dtype.removesuffix(f"x{lanes}")
        raise SimulationError(
            "unsupported",
            f"{name} with elements of {dtype} is not simulated; expected {element}, which "
            f"{name}[i : i + {lanes}] accesses in vectors\n --> {loc}",
        )


def unsupported(what: Any, loc: str) -> SimulationError:
    """Return the error for an operation that is not simulated."""
    return SimulationError("unsupported", f"{what} is not simulated\n --> {loc}")
