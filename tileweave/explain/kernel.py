"""Explain the synchronization of one kernel program."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from tilelang import tvm
from tvm import tirx

from .. import passes
from ..builtins.spec import builtin_of
from ..emit import EMIT_HEAP_STRIDE, lowered
from ..passes.ir.group import heap_tensors
from ..passes.ir.implicit import implicit_of
from ..passes.ir.leaves import Leaf, leaves_of, tensor_of
from ..passes.ir.memory_order import acquires, releases
from ..passes.ir.sizes import sizes_of
from ..passes.ir.walk import uses_tileweave
from ..passes.sync.infer.context import InsertedOperation
from ..passes.sync.infer.inference import explicit_sync, infer_and_explain
from ..passes.sync.verify.launches import UnverifiedEvent
from ..passes.sync.verify.verification import verify_program
from .added import AddedOperation, add_in_stage, added_on_device
from .explanation import Explanation
from .operation import EXPLICIT, Kind, Operation, sorted_in
from .source import source_of


def explain_kernel(
    func: tirx.PrimFunc,
    world_size: int,
    configs: Mapping[str, Any],
    arch: str,
    name: str,
    sizes: Mapping[str, int] = MappingProxyType({}),
) -> Explanation:
    """Run the passes on ``func`` and collect the operations that they insert."""
    source = source_of(func)
    func, stock = passes.split_options(func, configs)
    func = passes.with_sizes(func, sizes)
    func = _run("group", func, world_size)
    ops = [_explicit_op(leaf, call) for leaf, call in _ordering_calls(func)]
    explicit = _inference_blocker(func)
    func, inferred = infer_and_explain(func, world_size, EMIT_HEAP_STRIDE)
    times = {leaf.stmt: leaf.times for leaf in leaves_of(func.body)}
    ops += [_inferred_op(i, times) for i in inferred.ops if i.stmts]
    unverified = [_unverified_op(item) for item in verify_program(func, world_size)]
    func = _run("debug", func, world_size)
    if uses_tileweave(func):
        tensors = {(i.line, i.flag): i.tensor for i in inferred.ops}
        tile, added = add_in_stage(func)
        added += added_on_device(tile, _device_kernels(func, arch, stock))
        ops += [_added_op(op, tensors) for op in added]
    skipped = [_inferred_op(i, times) for i in inferred.ops if not i.stmts]
    memory = implicit_of(func)
    return Explanation(
        name,
        world_size,
        ops=sorted_in(name, ops),
        merged=sorted_in(name, [op for op in skipped if op.kind != "unordered"]),
        reuse=inferred.reuse,
        flags={p.name: bytes_of(p) for p in memory if not p.scratch},
        scratch={p.name: bytes_of(p) for p in memory if p.scratch},
        sources=((name, *source),) if source else (),
        unordered=sorted_in(name, [op for op in skipped if op.kind == "unordered"]),
        explicit=sorted_in(name, explicit),
        unverified=sorted_in(name, unverified),
        sizes=sizes_of(func),
        versions=inferred.versions,
        assumed=inferred.assumed,
        protocols=inferred.protocols,
    )


def bytes_of(implicit: Any) -> int:
    """Return the size of an implicit parameter on each rank."""
    return math.prod(implicit.shape) * (tvm.DataType(implicit.dtype).bits // 8)


def _run(stage: str, func: tirx.PrimFunc, world_size: int) -> tirx.PrimFunc:
    return passes.for_group(func, world_size, EMIT_HEAP_STRIDE, [stage])


def _device_kernels(
    func: tirx.PrimFunc, arch: str, configs: Mapping[str, Any]
) -> list[tirx.PrimFunc]:
    """Lower ``func`` with TileLang and the device passes."""
    functions = lowered(func, arch, configs).device_mod.functions.values()
    return [f for f in functions if isinstance(f, tirx.PrimFunc)]


def _ordering_calls(func: tirx.PrimFunc) -> Iterator[tuple[Leaf, tirx.Call]]:
    """Yield the explicit calls that order memory."""
    for leaf in leaves_of(func.body):
        for call in leaf.builtins:
            if _kind_of(call) is not None:
                yield leaf, call


def _kind_of(call: tirx.Call) -> Kind | None:
    """Return the kind of a builtin that orders memory; None for the others."""
    spec = builtin_of(call)
    if spec.participants:
        return "barrier"
    if spec.is_fence or spec.proxy_fence:
        return "fence"
    if spec.bulk_group == "wait":
        return "bulk_wait"
    if spec.signals or releases(call):
        return "signal"
    return "wait" if spec.waits or acquires(call) else None


def _inference_blocker(func: tirx.PrimFunc) -> list[Operation]:
    """Return the explicit call that turns the inference off for symmetric tensors, if any."""
    blocker = explicit_sync(func) if heap_tensors(func) else None
    if blocker is None:
        return []
    leaf, call = blocker
    reason = (
        "explicit synchronization; without explicit signals, waits and barriers the compiler "
        "inserts them"
    )
    name = builtin_of(call).text
    return [dataclasses.replace(_explicit_op(leaf, call), tensor=name, reason=reason)]


def _explicit_op(leaf: Leaf, call: tirx.Call) -> Operation:
    kind = _kind_of(call)
    assert kind is not None
    name, (file, line) = tensor_of(call), leaf.loc
    return Operation(kind, name, file, line, EXPLICIT, flag=name, per_block=leaf.times)


def _inferred_op(inserted: InsertedOperation, times: Mapping[tirx.Stmt, int | None]) -> Operation:
    file, _, line = inserted.line.rpartition(":")
    counts = [times[stmt] for stmt in inserted.stmts]
    finite = [n for n in counts if n is not None]
    unit = f" x {inserted.unit} elements" if inserted.unit else ""
    return Operation(
        inserted.kind,
        inserted.tensor,
        file,
        int(line or 0),
        inserted.reason,
        inserted.granule,
        amount=f"{inserted.amount}{unit}",
        flag=inserted.flag,
        per_block=sum(finite) if len(finite) == len(counts) else None,
    )


def _added_op(added: AddedOperation, tensors: Mapping[tuple[str, str], str]) -> Operation:
    file, line = added.loc
    tensor = tensors.get((f"{file}:{line}", added.flag), added.flag)
    return Operation(
        added.kind, tensor, file, line, added.reason, flag=added.flag, per_block=added.times
    )


def _unverified_op(item: UnverifiedEvent) -> Operation:
    event = item.event
    file, _, line = event.line.rpartition(":")
    tensor = event.tensor.name if event.tensor is not None else event.op
    reason = f"{event.text}: {item.reason}"
    return Operation("unverified", tensor, file, int(line or 0), reason, per_block=None)
