"""What the simulator finds."""

from __future__ import annotations

from typing import Any

from ...builtins.errors import TileWeaveError

KINDS = (
    "race", "deadlock", "reuse", "arrival", "bounds", "alignment", "poison", "assertion",
    "unsupported",
)  # fmt: skip


class SimulationError(TileWeaveError):
    """A fault of the simulated program.

    Attributes:
        kind: ``race`` (two accesses, one a write, that nothing orders), ``reuse`` (a write over
            what an earlier reader may still read), ``deadlock``, ``arrival`` (more arrivals than
            anybody waits for, or than a barrier can count; words of a barrier that hold something
            else, or that another barrier counts in), ``bounds``, ``alignment`` (an address
            or a size that an instruction cannot have), ``poison`` (memory that nobody wrote is
            used), ``assertion`` (of the program itself, ``T.device_assert``) or ``unsupported`` (an
            operation the simulator does not know).
        report: the whole story: rank, block, tensor, region, source lines, last events, seed.
        seed: of the schedule that met it; None if the program itself was refused.
        event: number of the earlier one of two accesses that conflict; 0 if there is none.
    """

    def __init__(self, kind: str, report: str, *, seed: int | None = None, event: int = 0) -> None:
        assert kind in KINDS, kind
        super().__init__(f"{kind}: {report}")
        self.kind, self.report, self.seed, self.event = kind, report, seed, event

    def in_schedule(self, seed: int) -> SimulationError:
        """The same fault; its report says how to meet it again."""
        note = f"schedule of seed {seed}: replay it with schedules=1, seed={seed}"
        return SimulationError(self.kind, f"{self.report}\n{note}", seed=seed, event=self.event)


class SimulationWarning(UserWarning):
    """Of a program without a fault: signals that nobody waits for or reads."""


def unsupported(what: Any, loc: str) -> SimulationError:
    """The error for an operation that the simulator does not know."""
    return SimulationError("unsupported", f"{what} is not simulated\n --> {loc}")
