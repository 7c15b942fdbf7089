"""Order of the steps of an operator on a mesh: recorded from a run, and compared with the model.

A run is recorded where the operator calls the ranks of its node and where it transfers between
nodes. A dispatch mode follows the results of calls and transfers through the memory that torch
writes, so that it is known which of them each call and each transfer needs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tileweave.ops.autotune.nodes_model import Rates, predict_nodes
from tileweave.ops.core.across_nodes import Mesh


class Step(NamedTuple):
    """A call of the ranks of a node, or a transfer; each kind has its own numbers."""

    kind: str
    number: int


CALL, TRANSFER, WAIT = "call", "transfer", "wait"


@dataclass
class Trace:
    """Steps of one rank.

    Attributes:
        order: calls, starts of transfers, and waits for transfers, in the order of the host.
        calls: operator of each call.
        transfers: nodes to which each transfer sends, and from which it receives.
        needs: pairs of a step and a later one that uses its result.
    """

    order: list[Step] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)
    transfers: list[tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=list)
    needs: set[tuple[Step, Step]] = field(default_factory=set)


class _Flow(TorchDispatchMode):
    """Follow results through memory."""

    def __init__(self) -> None:
        super().__init__()
        self.results: dict[int, set[Step]] = defaultdict(set)
        self._kept: list[torch.UntypedStorage] = []

    def place(self, x: torch.Tensor) -> int:
        storage = x.untyped_storage()
        self._kept.append(storage)  # so that no other tensor gets its memory
        return storage.data_ptr()

    def of(self, tensors: Sequence[Any]) -> set[Step]:
        """Return the steps whose results the tensors contain."""
        tensors = [x for x in tensors if isinstance(x, torch.Tensor)]
        return set().union(*(self.results[self.place(x)] for x in tensors))

    def add(self, tensors: Sequence[Any], steps: set[Step]) -> None:
        for x in tensors:
            if isinstance(x, torch.Tensor):
                self.results[self.place(x)] |= steps

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        written = [
            x
            for x, argument in zip(args, func._schema.arguments, strict=False)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        steps = self.of(tree_leaves((args, kwargs)))
        self.add(tree_leaves((result, written)), steps)
        return result


class Recorder:
    """Records the steps of one call of an operator by one rank."""

    def __init__(self) -> None:
        self.trace, self._flow = Trace(), _Flow()

    @contextmanager
    def recording(self) -> Iterator[Trace]:
        with self._flow:
            yield self.trace

    def call(
        self, function: Callable[..., Any], out: int | None = None, op: str | None = None
    ) -> Callable[..., Any]:
        """Wrap a call of the ranks of a node.

        Args:
            out: position of the argument that it writes; None if it returns its result.
            op: the operator; None: that of the first argument.
        """

        def recorded(*args: Any) -> Any:
            step = Step(CALL, len(self.trace.calls))
            self.trace.calls.append(op or args[0].op)
            self.trace.order.append(step)
            self._need([x for place, x in enumerate(args) if place != out], step)
            result = function(*args)
            written = tree_leaves(result) if out is None else [args[out]]
            self._flow.add(written, {step})
            return result

        return recorded

    def mesh(self, mesh: Mesh) -> Mesh:
        """Return the mesh with recorded transfers."""

        def start(sent, target, received, source) -> list[_Work]:
            sides = ((target,) if sent else (), (source,) if received else ())
            step = self._transfer(sides, sent, received)
            return [_Work(self.trace, step, mesh.start(sent, target, received, source))]

        def broadcast(x, source) -> None:
            others = tuple(node for node in range(mesh.nodes) if node != source)
            is_root = mesh.node == source
            sides = (others, ()) if is_root else ((), (source,))
            step = self._transfer(sides, [x] if is_root else [], [] if is_root else [x])
            mesh.broadcast(x, source)
            self.trace.order.append(Step(WAIT, step.number))

        return replace(mesh, start=start, broadcast=broadcast)

    def _transfer(self, sides, sent, received) -> Step:
        step = Step(TRANSFER, len(self.trace.transfers))
        self.trace.transfers.append(sides)
        self.trace.order.append(step)
        self._need(sent, step)
        self._flow.add(received, {step})
        return step

    def _need(self, operands: Sequence[Any], step: Step) -> None:
        self.trace.needs |= {(before, step) for before in self._flow.of(operands)}


class _Work(NamedTuple):
    trace: Trace
    step: Step
    works: Sequence[Any]

    def wait(self) -> None:
        for work in self.works:
            work.wait()
        self.trace.order.append(Step(WAIT, self.step.number))


SLOW, FAST = Rates(network=1e-6, latency=0.0), Rates(network=1e18, latency=0.0)
"""Rates at which a call ends before each transfer that it need not wait for, and at which a
transfer ends before each such call."""


def differences(problem: Any, traces: Sequence[Trace], ranks_per_node: int) -> list[str]:
    """Return what differs between the model of an operator and its traces, one for each rank in the
    order of results."""
    nodes = len(traces) // ranks_per_node
    models = {
        name: predict_nodes(problem, nodes, rates)
        for name, rates in (("slow", SLOW), ("fast", FAST), ("usual", Rates()))
    }
    found = []
    for rank, trace in enumerate(traces):
        of_node = {name: models[name][rank // ranks_per_node] for name in models}
        found += [f"rank {rank}: {text}" for text in _differences(trace, of_node)]
    return found


def _differences(trace: Trace, models: dict[str, Any]) -> Iterator[str]:
    for name, model in models.items():
        calls = [phase.what for phase in model.calls]
        transfers = [(phase.targets, phase.sources) for phase in model.transfers]
        if calls != trace.calls or transfers != trace.transfers:
            yield f"{trace.calls} and {trace.transfers}, in the model {calls} and {transfers}"
            return
        for first, second in sorted(trace.needs):
            if _phase(model, first).end > _phase(model, second).begin:
                yield f"{name}: {second} begins in the model before {first} has ended, and needs it"
    place = {step: number for number, step in enumerate(trace.order)}
    for first, second in sorted(trace.needs):
        ends = place[first if first.kind == CALL else Step(WAIT, first.number)]
        if ends > place[second]:
            yield f"{second} begins before {first} has ended, and needs it"
    for call, transfer in (
        (Step(CALL, i), Step(TRANSFER, j))
        for i in range(len(trace.calls))
        for j in range(len(trace.transfers))
    ):
        waits = place[Step(WAIT, transfer.number)] < place[call]
        follows = place[call] < place[transfer]
        slow, fast = models["slow"], models["fast"]
        if waits != (_phase(slow, call).begin >= _phase(slow, transfer).end):
            yield f"{call} {'waits' if waits else 'does not wait'} for {transfer}"
        if follows != (_phase(fast, transfer).begin >= _phase(fast, call).end):
            yield f"{transfer} {'follows' if follows else 'does not follow'} {call}"


def _phase(model: Any, step: Step) -> Any:
    return (model.calls if step.kind == CALL else model.transfers)[step.number]
