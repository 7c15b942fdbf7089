"""Registers that ``wgmma`` accesses asynchronously: its accumulators, and A in registers.

Between an access of a thread and a product that accesses the same registers ``wgmma.fence`` is
needed, and after a product a wait. Source: PTX ISA, "wgmma.fence", "wgmma.wait_group".
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ..report.errors import SimulationError


@dataclass(frozen=True)
class _Product:
    """Last product in flight that accesses some registers."""

    time: int
    writes: bool
    loc: str


class AsyncRegisters:
    """Registers of one block, by the slot of their buffer and the thread group that owns them."""

    def __init__(self) -> None:
        self._fenced: set[int] = set()
        """Thread groups that have executed a fence."""
        self._stored: dict[tuple[int, int], str] = {}
        """Line of the last store since the last fence."""
        self._flying: dict[tuple[int, int], _Product] = {}

    def load(self, slot: int, thread_groups: Iterable[int], loc: str) -> None:
        """Refuse a load of what a product in flight writes."""
        if self._flying:
            self._require_complete(slot, thread_groups, "read", loc)

    def store(self, slot: int, thread_groups: Iterable[int], loc: str) -> None:
        """Note a store; refuse one to what a product in flight accesses."""
        if self._flying:
            self._require_complete(slot, thread_groups, "written", loc)
        for g in thread_groups:
            self._stored[slot, g] = loc

    def fence(self, thread_groups: Iterable[int]) -> None:
        """Order the stores of these groups before their next products."""
        groups = set(thread_groups)
        self._fenced |= groups
        self._stored = {key: loc for key, loc in self._stored.items() if key[1] not in groups}

    def multiply(
        self, slot: int, thread_groups: Iterable[int], time: int, writes: bool, loc: str
    ) -> None:
        """Note a product; refuse one that no fence orders after a store of its registers."""
        for g in thread_groups:
            before = self._stored.get((slot, g))
            if before is not None or g not in self._fenced:
                after = f" is between it and the store --> {before}" if before else " precedes it"
                raise SimulationError(
                    "race", f"wgmma accesses registers, and no wgmma.fence{after}\n --> {loc}"
                )
            self._flying[slot, g] = _Product(time, writes, loc)

    def complete(self, thread_groups: Iterable[int], time: int) -> None:
        """Note that the products of these groups up to a time are complete."""
        groups = set(thread_groups)
        self._flying = {
            key: product
            for key, product in self._flying.items()
            if key[1] not in groups or product.time > time
        }

    def _require_complete(
        self, slot: int, thread_groups: Iterable[int], how: str, loc: str
    ) -> None:
        for g in thread_groups:
            product = self._flying.get((slot, g))
            if product is not None and (product.writes or how == "written"):
                raise SimulationError(
                    "race",
                    f"registers are {how} while a wgmma that {_accesses(product)} them is in "
                    f"flight --> {product.loc}\n --> {loc}",
                )


def _accesses(product: _Product) -> str:
    return "writes" if product.writes else "reads"
