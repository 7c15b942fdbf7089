"""Explain the synchronization of a plan: of its streams, its copies and its kernels."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from ..builtins.errors import TileWeaveError
from ..passes.ir.implicit import implicit_of
from ..passes.ir.sizes import named
from ..runtime import Plan
from ..runtime.plans.parameters import dynamic_extents, shapes_of
from ..runtime.plans.regions import Region
from ..runtime.plans.steps import Copy, CopyValue, Launch, Step, WaitValue, WriteValue
from ..runtime.plans.sync_pull import REUSE
from ..runtime.plans.sync_push import ENTRY_BARRIER, WAIT
from .explanation import Explanation
from .kernel import bytes_of, explain_kernel
from .operation import EXPLICIT, Operation, sorted_in


def explain_plan(plan: Plan, world_size: int, arch: str, sizes: Mapping[str, int]) -> Explanation:
    """Trace one call on each rank with 0 for every scalar, and explain its steps and kernels."""
    _require_sizes(plan, sizes)
    traces = _traces(plan, world_size, sizes)
    launches = [
        s for s in itertools.chain(*traces) if isinstance(s, Launch) and s.number > ENTRY_BARRIER
    ]
    kernels = list({id(launch.program): launch.program for launch in launches}.values())
    parts = [_explain_streams(plan, world_size, traces, sizes)]
    parts += [
        explain_kernel(kernel, world_size, plan.pass_configs, arch, name)
        for kernel, name in zip(kernels, _distinct(map(named, kernels)), strict=True)
    ]
    return _merged(plan.name, world_size, parts)


def _require_sizes(plan: Plan, sizes: Mapping[str, int]) -> None:
    legal = dynamic_extents(plan.parameters)
    if unknown := [f"{name}={size}" for name, size in sizes.items() if name not in legal]:
        expected = " or ".join(legal) or "no sizes: it has no dynamic extent"
        raise TileWeaveError(f"{plan.name}: size {', '.join(unknown)}; expected {expected}")


def _traces(plan: Plan, world_size: int, sizes: Mapping[str, int]) -> list[Sequence[Step]]:
    """Return the steps of each rank."""
    shapes = shapes_of(plan.parameters, {}, f"explain {plan.name}", sizes)
    scalars = {p.name: 0 for p in plan.parameters if p.shape is None}
    return [plan.trace(rank, world_size, shapes, scalars) for rank in range(world_size)]


def _explain_streams(
    plan: Plan, world_size: int, traces: Sequence[Sequence[Step]], sizes: Mapping[str, int]
) -> Explanation:
    """Explain the operations of the plan outside its kernels."""
    steps = list(itertools.chain(*traces))
    ops = _most_frequent(_stream_ops(trace) for trace in traces)
    added = {
        s.name: s.program for s in steps if isinstance(s, Launch) and s.number <= ENTRY_BARRIER
    }
    counters = {p.name: bytes_of(p) for program in added.values() for p in implicit_of(program)}
    file, _, first = plan.loc.rpartition(":")
    lines = [int(s.loc.rpartition(":")[2]) for s in steps] + [op.line for op in ops]
    return Explanation(
        plan.name,
        world_size,
        ops=sorted_in(plan.name, ops),
        reuse={op.tensor: REUSE for op in ops if op.kind == "signal"} if counters else {},
        flags=counters,
        sources=((plan.name, file, int(first), max([int(first), *lines])),),
        sizes=dict(sizes),
    )


def _stream_ops(trace: Sequence[Step]) -> Iterator[Operation]:
    """Yield the flag operations of one rank: explicit ones, and those of its copies."""
    written = {s.number: s.dst.parameter.name for s in trace if isinstance(s, Copy)}
    read = {s.loc: s.src.parameter.name for s in trace if isinstance(s, Copy)}
    first = next(iter(written.values()), "")
    for step in trace:
        file, _, line = step.loc.rpartition(":")
        place = file, int(line or 0)
        if step.number == WAIT:
            if isinstance(step, (Launch, WaitValue)):
                yield _wait_before_copy(step, read[step.loc], place)
        elif isinstance(step, (WriteValue, CopyValue)):
            yield _signal(step, written, place)
        elif isinstance(step, WaitValue):
            name = step.flag.parameter.name
            yield Operation("wait", name, *place, EXPLICIT, flag=name)
        elif isinstance(step, Launch) and step.number == ENTRY_BARRIER:
            reason = "before p.copy overwrites it: a peer may read it until its call begins"
            wait = Operation("wait", first, *place, reason, amount="1", flag="started")
            yield from [wait] * _peers_of_entry(step)


def _signal(
    step: WriteValue | CopyValue, written: Mapping[int, str], place: tuple[str, int]
) -> Operation:
    """Return a signal of a stream.

    Args:
        written: number of a copy -> the tensor that it writes.
    """
    kernel, is_inferred, flag = step.dst.parameter.name.partition(".")
    if not is_inferred:
        return Operation("signal", kernel, *place, EXPLICIT, flag=kernel)
    reason = f"the stream signals to {kernel} that p.copy has finished"
    return Operation("signal", written[step.number], *place, reason, amount="1", flag=flag)


def _wait_before_copy(step: Launch | WaitValue, tensor: str, place: tuple[str, int]) -> Operation:
    """Return the wait that is inserted before a copy that reads ``tensor``."""
    reason, flag = "p.copy reads what another stream writes", "arrived"
    producer = step.flag if isinstance(step, WaitValue) else step.arguments.get("made")
    if producer is not None:
        kernel, _, flag = producer.parameter.name.partition(".")
        reason = f"p.copy reads what {kernel} writes concurrently"
    return Operation("wait", tensor, *place, reason, amount="1", flag=flag)


def _peers_of_entry(barrier: Launch) -> int:
    """Return the number of peers that the first kernel of a call waits for."""
    shapes = {n: v.shape for n, v in barrier.arguments.items() if isinstance(v, Region)}
    shapes |= {p.name: p.shape for p in implicit_of(barrier.program)}
    return shapes["started"][-1] - 1 if "started" in shapes else 0


def _most_frequent(ops_of_ranks: Iterable[Iterable[Operation]]) -> list[Operation]:
    """Return each operation once, with the count of the rank that runs it most often."""
    counts: Counter[Operation] = Counter()
    for ops in ops_of_ranks:
        counts |= Counter(ops)
    return [dataclasses.replace(op, per_block=count) for op, count in counts.items()]


def _distinct(names: Iterable[str]) -> list[str]:
    """Append a number to each name that repeats an earlier one."""
    counts: Counter[str] = Counter()
    distinct = []
    for name in names:
        counts[name] += 1
        distinct.append(name if counts[name] == 1 else f"{name} ({counts[name]})")
    return distinct


def _merged(name: str, world_size: int, parts: Sequence[Explanation]) -> Explanation:
    """Merge the explanations of a plan and its kernels.

    Tensors are prefixed with the program if several programs have counters.
    """
    is_ambiguous = sum(bool(p.flags or p.reuse) for p in parts) > 1

    def union(field: Callable[[Explanation], Mapping[str, Any]]) -> dict[str, Any]:
        return {
            f"{part.name}.{key}" if is_ambiguous else key: value
            for part in parts
            for key, value in field(part).items()
        }

    def chain(field: Callable[[Explanation], tuple]) -> tuple:
        return tuple(itertools.chain.from_iterable(map(field, parts)))

    return Explanation(
        name,
        world_size,
        ops=chain(lambda e: e.ops),
        merged=chain(lambda e: e.merged),
        reuse=union(lambda e: e.reuse),
        flags=union(lambda e: e.flags),
        scratch=union(lambda e: e.scratch),
        sources=chain(lambda e: e.sources),
        unordered=chain(lambda e: e.unordered),
        explicit=chain(lambda e: e.explicit),
        unverified=chain(lambda e: e.unverified),
        sizes=parts[0].sizes,
        versions=union(lambda e: e.versions),
        assumed=union(lambda e: e.assumed),
    )
