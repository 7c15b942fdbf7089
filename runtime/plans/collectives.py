"""Collectives of ``torch.distributed`` that a plan can run."""

from __future__ import annotations

from dataclasses import dataclass

from .parameters import Shape


@dataclass(frozen=True)
class CollectiveKind:
    """A collective: what it does with the memory of the ranks that take part.

    Attributes:
        name: function of ``torch.distributed``.
        gathers: the destination has the sources of all ranks.
        scatters: the source has a part for each rank.
    """

    name: str
    gathers: bool = False
    scatters: bool = False

    @property
    def sums(self) -> bool:
        """True if the destination is a sum over ranks."""
        return not self.gathers

    def shape(self, dst: Shape, src: Shape, members: int) -> Shape:
        """Return the legal shape of the source if it ``scatters``, else of the destination."""
        part = dst if self.scatters else src
        return (members, *part) if self.gathers or self.scatters else part


COLLECTIVES = {
    kind.name: kind
    for kind in (
        CollectiveKind("all_gather", gathers=True),
        CollectiveKind("reduce_scatter", scatters=True),
        CollectiveKind("all_reduce"),
    )
}

SUMMED_TYPES = (
    "float16", "bfloat16", "float32", "float64", "int8", "uint8", "int32", "int64"
)  # fmt: skip
"""Types that both NCCL and gloo add."""
