"""What the simulator finds."""

from __future__ import annotations

from typing import Any

from ...builtins.errors import TileWeaveError

KINDS = ("race", "deadlock", "reuse", "arrival", "bounds", "poison", "unsupported")


class SimulationError(TileWeaveError):
    """A fault of the simulated program.

    Attributes:
        kind: ``race`` (two accesses, one a write, that nothing orders), ``reuse`` (a write over
            what an earlier reader may still read), ``deadlock``, ``arrival`` (more arrivals than
            a barrier can count), ``bounds``, ``poison`` (memory that nobody wrote is used) or
            ``unsupported`` (an operation the simulator does not know).
        report: the whole story: rank, block, tensor, region, source lines, last events, seed.
    """

    def __init__(self, kind: str, report: str) -> None:
        assert kind in KINDS, kind
        super().__init__(f"{kind}: {report}")
        self.kind = kind
        self.report = report

    def with_note(self, note: str) -> SimulationError:
        """The same fault with a line more in its report."""
        return SimulationError(self.kind, f"{self.report}\n{note}")


def unsupported(what: Any, site: str) -> SimulationError:
    """The error for an operation that the simulator does not know."""
    return SimulationError("unsupported", f"{what} is not simulated\n --> {site}")
