"""Calls of plans on this rank's GPU: check the arguments, then enqueue the steps."""

from __future__ import annotations

import numbers
import threading
from collections.abc import Hashable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from tilelang import tvm
from tvm import tirx

from ...builtins.errors import TileWeaveError
from ...passes.ir.sizes import named
from ..compiler import compile
from ..host.group_argument import process_group_of
from ..host.heap import SymmetricTensor
from ..host.session import Session, current
from ..host.tracer import tracer_of
from ..kernel.dynamic import CallOrder, DynamicKernel
from ..kernel.kernel import Kernel, capturing, kernel_to_launch
from ..kernel.launch_order import CallStream
from ..plans.parameters import Parameter, Shape, bound, dynamic_extents, key_of, shapes_of
from ..plans.steps import Launch
from ..plans.sync_push import ENTRY_STREAM, implicit_name
from ..plans.traced_plan import TracedPlan
from .enqueue import enqueuer
from .operations import Operations
from .recorded_calls import RecordedCall, current_stream, drop_calls, has_driver, recorded_calls

_HIGH_PRIORITY = -1
"""Priority of the stream of the entry barrier, for which other streams wait."""


class Calls:
    """Calls of one plan by one group, with the kernels, side streams and events that they share."""

    def __init__(self, plan: TracedPlan, group: Any = None) -> None:
        """
        Args:
            group: ranks that call it; see ``tw.init``.
        """
        self.plan, self._group = plan, process_group_of(group)
        self._dynamic = bool(dynamic_extents(plan.parameters))
        self._preparing = threading.RLock()  # one thread compiles for all
        self._session: Session | None = None

    def _reset(self, session: Session) -> None:
        """Drop everything that belongs to another session."""
        self._session = session
        self._kernels: dict[int, tuple[tirx.PrimFunc, Kernel]] = {}
        self._streams: dict[str, torch.cuda.Stream] = {}
        self._thread = _Thread()
        self._order = CallOrder(session)

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        call, tensors, addresses = self.recorded_call(args, kwargs)
        if self._dynamic:
            self._order_call(call.kernels)
        call(tensors, addresses)

    def recorded_call(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[RecordedCall, list[torch.Tensor], list[int]]:
        """Return the recorded call for these arguments, its tensors and their addresses.

        The first call with a key is checked, and compiles the kernels, collectively.
        """
        session = self._here()
        values = args
        if kwargs or len(args) != len(self.plan.parameters):
            values = bound(self.plan.name, self.plan.parameters, args, kwargs)
        key, tensors, addresses = self._key(values)
        call = recorded_calls().get(key)
        if call is None or not call.is_valid:
            session.watchdog.raise_if_deadlocked()  # before compiling with ranks that hang
            with self._preparing:
                call = self._record(values, session)
            recorded_calls().put(key, call)
        return call, tensors, addresses

    def compile(self) -> None:
        """See ``Plan.compile``."""
        ranks = self._here().group.world_size
        with self._preparing, ExitStack() as failed:
            failed.callback(self.free)
            for step in self.plan.launches_of_any_call(ranks):
                self._kernel(step)
            failed.pop_all()

    def _here(self) -> Session:
        """Return the session of the group; drop what belongs to an earlier one."""
        session = current(self._group)
        if session is not self._session:
            self._reset(session)
        return session

    def _key(self, values: Sequence[Any]) -> tuple[Hashable, list[torch.Tensor], list[int]]:
        """Return the key of a call, its tensors and their addresses.

        Calls with equal keys differ only in the addresses of tensors that are not symmetric. The
        key is None if the call cannot be legal.
        """
        key: list[Hashable] = [self, current_stream(self._session.group.device)]
        tensors, addresses = [], []
        for p, value in zip(self.plan.parameters, values, strict=True):
            if p.shape is None:
                if not isinstance(value, numbers.Number):
                    return None, [], []
                key.append(key_of(value))
                continue
            if p.symmetric and isinstance(value, SymmetricTensor):
                value = value.all
            if not isinstance(value, torch.Tensor):
                return None, [], []
            try:
                address, shape, strides = value.data_ptr(), value.shape, value.stride()
            except RuntimeError:
                return None, [], []
            if not address and value.numel():  # a fake tensor of torch.compile
                return None, [], []
            tensors.append(value)
            addresses.append(address)
            key += shape, strides, value.dtype, value.device
            if p.symmetric:
                key.append(address)
        return tuple(key), tensors, addresses

    def _order_call(self, kernels: Iterable[Kernel]) -> None:
        """Order this call after one with other kernels, which dynamic sizes can cause."""
        if ordered := tuple(id(k) for k in kernels if k.implicit):
            self._order.enter(ordered)

    def _record(self, values: Sequence[Any], session: Session) -> RecordedCall:
        """Check a call and record its operations; compile its kernels if they are not yet."""
        tensors: dict[str, torch.Tensor] = {}
        scalars: dict[str, Any] = {}
        for p, value in zip(self.plan.parameters, values, strict=True):
            if p.shape is None:
                scalars[p.name] = self._scalar(p, value)
            else:
                tensors[p.name] = self._tensor(p, value, session)
        shapes = self._shapes(tensors)
        ranks = session.group.world_size
        for step in self.plan.launches(ranks, shapes, scalars):
            self._kernel(step)
        rank, recorded = session.group.rank, capturing()
        steps = self.plan.trace(rank, ranks, shapes, scalars, recorded=recorded)
        launches = [s for s in steps if isinstance(s, Launch)]
        kernels = {id(s): self._kernel(s) for s in launches}
        implicit: dict[str, torch.Tensor] = {}
        for step in launches:
            memory = kernels[id(step)].implicit_tensors
            implicit |= {implicit_name(step.program, name): t for name, t in memory.items()}
        symmetric = [p.name for p in self.plan.parameters if p.symmetric]
        caller = torch.cuda.current_stream(session.group.device)
        # Makes the GPU's context current in this thread, as the driver requires.
        self._event(0, caller)
        streams = {None: caller} | {s.stream: self._stream(s.stream, caller) for s in steps}
        tracer = tracer_of(session)
        operations = Operations(
            tensors, symmetric, implicit, streams, lambda n: self._event(n, caller), tracer
        ).lower(steps, kernels)  # fmt: skip
        native = None
        if has_driver(session.group.device) and tracer is None:
            native = enqueuer(operations, list(tensors.values()))
        distinct = {id(kernel): kernel for kernel in kernels.values()}.values()
        communicates = bool(symmetric) or any(k.communicates for k in distinct)
        stream = CallStream.of(caller, recorded) if communicates else None
        return RecordedCall(session, stream, operations, distinct, native)

    def free(self) -> None:
        """See ``Plan.free``."""
        if self._session is not None:
            for _, kernel in self._kernels.values():
                kernel.free()
            self._kernels.clear()
        drop_calls(self)

    def _shapes(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, Shape]:
        """Return the shape of each tensor, of one rank's part if symmetric."""
        shapes = {
            p.name: tuple(tensors[p.name].shape)[1 if p.symmetric else 0 :]
            for p in self.plan.parameters
            if p.shape is not None
        }
        for name, expected in shapes_of(self.plan.parameters, shapes, self.plan.name).items():
            if shapes[name] != expected:
                raise self._refused(f"{name} has shape {shapes[name]}", str(expected))
        return shapes

    def _scalar(self, p: Parameter, value: Any) -> Any:
        try:
            return p.number(value)
        except ValueError as error:
            raise self._refused(f"{p.name}={value!r}", str(error)) from None

    def _tensor(self, p: Parameter, value: Any, session: Session) -> torch.Tensor:
        group, heap = session.group, session.heap
        if p.symmetric:
            if isinstance(value, SymmetricTensor):
                if not value.belongs_to(heap):
                    legal = f"one of {session.label}"
                    raise self._refused(f"{p.name} is a tensor of another group", legal)
                value = value.all
            elif not (isinstance(value, torch.Tensor) and heap.is_view_of_all(value)):
                raise self._refused(f"{p.name}={_shown(value)}", "a tw.symmetric tensor")
            part = value[group.rank]
        elif isinstance(value, torch.Tensor):
            part = value
        else:
            raise self._refused(f"{p.name}={_shown(value)}", "a torch tensor")
        dtype = tvm.DataType(p.dtype).as_torch()
        if part.dtype != dtype:
            raise self._refused(f"{p.name} is of {part.dtype}", str(dtype))
        if part.device != group.device:
            raise self._refused(f"{p.name} is on {part.device}", str(group.device))
        if not _has_memory(part):
            kind = f"{type(part).__name__} of {part.layout}"
            raise self._refused(f"{p.name} is a {kind} without memory of its own", "a dense tensor")
        if not part.is_contiguous():
            raise self._refused(
                f"{p.name} has shape {tuple(part.shape)} and strides {part.stride()}",
                "a contiguous tensor",
            )
        return value

    def _refused(self, what: str, expected: str) -> TileWeaveError:
        return TileWeaveError(f"{self.plan.name}: {what}; expected {expected}")

    def _kernel(self, step: Launch) -> Kernel:
        """Return the compiled kernel of a step, traced during a trace. Collective the first
        time."""
        return kernel_to_launch(self._compiled(step), self._session)

    def _compiled(self, step: Launch) -> Kernel:
        if isinstance(step.kernel, Kernel) and step.kernel.program is step.program:
            step.kernel.require(self._session)
            return step.kernel
        if isinstance(step.kernel, DynamicKernel) and step.kernel.runs(step.program):
            kernel = step.kernel.at(**step.sizes)
            kernel.require(self._session)
            return kernel
        entry = self._kernels.get(id(step.program))
        if entry is None:
            if capturing():
                raise TileWeaveError(
                    f"{self.plan.name}: {named(step.program)} is not compiled yet; expected one "
                    "call of the plan before it is captured in a CUDA graph"
                )
            kernel = compile(step.program, group=self._group)
            assert not isinstance(kernel, DynamicKernel)  # steps have fixed sizes
            entry = self._kernels[id(step.program)] = step.program, kernel
        return entry[1]

    def _stream(self, name: str | None, caller: torch.cuda.Stream) -> torch.cuda.Stream:
        if name is None:
            return caller
        if name not in self._streams:
            priority = _HIGH_PRIORITY if name == ENTRY_STREAM else 0
            self._streams[name] = torch.cuda.Stream(caller.device, priority=priority)
        return self._streams[name]

    def _event(self, n: int, caller: torch.cuda.Stream) -> int:
        """Return the handle of the n-th event; recording an event once creates its handle."""
        events = self._thread.events
        if n == len(events):
            events.append(torch.cuda.Event())
            events[n].record(caller)
        return events[n].cuda_event


class _Thread(threading.local):
    """Events of one thread; no other thread records them between a record and its wait."""

    def __init__(self) -> None:
        self.events: list[torch.cuda.Event] = []


def _has_memory(tensor: torch.Tensor) -> bool:
    try:
        return not tensor.is_nested and (tensor.data_ptr() != 0 or tensor.numel() == 0)
    except RuntimeError:
        return False


def _shown(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"torch tensor {tuple(value.shape)}"
    return repr(value)
