"""Fused and other collectives of each graph that Inductor has compiled, with reasons."""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import Graph

from . import calls
from .reasons import collectives, describe, reason


@dataclass
class CompiledGraph:
    """Collectives of a graph.

    Attributes:
        kind: ``inference``, ``forward`` or ``backward``; the last two are of a training step.
        fused: the calls that replace collectives.
        unfused: the collectives that remain, with reasons.
    """

    kind: str
    fused: list[str]
    unfused: list[str]

    def __str__(self) -> str:
        if not self.fused and not self.unfused:
            return f"{self.kind}: no collectives, nothing to fuse"
        lines = [f"{self.kind}: {len(self.fused)} fused, {len(self.unfused)} not fused"]
        lines += [f"  fused: {text}" for text in self.fused]
        lines += [f"  not fused: {text}" for text in self.unfused]
        return "\n".join(lines)


@dataclass
class Explanation:
    """Result of ``explain``; ``print`` shows it as text.

    Attributes:
        graphs: graphs that Inductor has compiled, oldest first. Those of its cache are missing.
        calls: calls of torch's operators that the integration implements, by shapes, with their
            strategies.
        remark: what keeps the integration from working; "" if nothing does.
    """

    graphs: list[CompiledGraph]
    calls: list[calls.CallKind]
    remark: str

    def __str__(self) -> str:
        lines = [self.remark] if self.remark else []
        lines += [f"graph {n}, {graph}" for n, graph in enumerate(self.graphs)]
        if not self.graphs:
            lines.append("no graph was compiled; those of Inductor's cache are not listed")
        if self.calls:
            lines += ["calls:", *[f"  {kind}" for kind in self.calls]]
        return "\n".join(lines)


graphs: list[CompiledGraph] = []
"""Graphs since ``enable``."""


def record(graph: Graph) -> None:
    """Record the collectives of a graph after some were fused."""
    namespaces = "symm_mem", "tileweave"
    fused = [
        describe(node)
        for node in graph.nodes
        if getattr(node.target, "namespace", "") in namespaces
    ]
    unfused = [f"{describe(c.node)}: {reason(c, graph)}" for c in collectives(graph)]
    names = [node.name.partition("_")[0] for node in graph.find_nodes(op="placeholder")]
    kinds = {"tangents": "backward", "primals": "forward"}  # Autograd gives these names
    kind = next((kinds[name] for name in kinds if name in names), "inference")
    graphs.append(CompiledGraph(kind, fused, unfused))
