"""Calls of plans on this rank's GPU: arguments are checked, then the steps go to CUDA streams."""

from __future__ import annotations

import inspect
import numbers
from collections.abc import Iterable, Mapping
from typing import Any

import tilelang.language as T
import torch
from tvm import tirx

from ..builtins.errors import TileWeaveError
from ..passes.sizes import named
from .driver import call, driver, write_value
from .dynamic_kernel import DynamicKernel, Turns
from .heap import SymmetricTensor
from .kernel import Kernel, capturing, compile
from .parameters import Parameter, Shape, dynamic_extents, shapes_of
from .plan_sync import GUARD, hidden_name
from .plans import Copy, CopyValue, Launch, Plan, Step, WaitStream, WriteValue
from .regions import Region, Rows
from .session import Session, current

_FIRST = -1
"""Priority of the stream whose kernel others wait for."""


class Calls:
    """Calls of one plan, with the kernels and side streams they share."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self._signature = inspect.Signature([
            inspect.Parameter(p.name, inspect.Parameter.POSITIONAL_OR_KEYWORD)
            for p in plan.parameters
        ])  # fmt: skip
        self._session: Session | None = None
        self._kernels: dict[int, tuple[tirx.PrimFunc, Kernel]] = {}
        self._streams: dict[str, torch.cuda.Stream] = {}
        self._turns = Turns()

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        session = current()
        if session is not self._session:
            self._session, self._kernels, self._streams = session, {}, {}
            self._turns = Turns()
        session.watchdog.raise_if_deadlocked()
        try:
            given = self._signature.bind(*args, **kwargs).arguments
        except TypeError as error:
            names = ", ".join(p.name for p in self.plan.parameters)
            raise TileWeaveError(f"{self.plan.name}: {error}; expected ({names})") from None
        tensors: dict[str, torch.Tensor] = {}
        scalars: dict[str, Any] = {}
        for p in self.plan.parameters:
            if p.shape is None:
                scalars[p.name] = self._scalar(p, given[p.name])
            else:
                tensors[p.name] = self._tensor(p, given[p.name], session)
        shapes = self._shapes(tensors)
        steps = self.plan.trace(session.group.rank, session.group.world_size, shapes, scalars)
        kernels = {s.number: self._kernel(s) for s in steps if isinstance(s, Launch)}
        for step in (s for s in steps if isinstance(s, Launch)):
            hidden = kernels[step.number].hidden_tensors
            tensors |= {hidden_name(step.program, name): t for name, t in hidden.items()}
        self._take_turns(kernels.values())
        self._enqueue(steps, tensors, kernels)

    def free(self) -> None:
        """See ``Plan.free``."""
        for _, kernel in self._kernels.values():
            kernel.free()
        self._kernels.clear()

    def _take_turns(self, kernels: Iterable[Kernel]) -> None:
        """Keep this call apart from one with other kernels, which dynamic sizes may bring."""
        ordered = tuple(id(k) for k in kernels if k.hidden)
        if ordered and dynamic_extents(self.plan.parameters):
            self._turns.take(ordered)

    def _shapes(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, Shape]:
        """Of the tensors, of one rank's part if symmetric."""
        found = {
            p.name: tuple(tensors[p.name].shape)[1 if p.symmetric else 0 :]
            for p in self.plan.parameters
            if p.shape is not None
        }
        for name, shape in shapes_of(self.plan.parameters, found, self.plan.name).items():
            if found[name] != shape:
                raise self._refused(f"{name} has shape {found[name]}", str(shape))
        return found

    def _scalar(self, p: Parameter, value: Any) -> Any:
        kind = numbers.Integral if "int" in p.dtype else numbers.Real
        if not isinstance(value, kind):
            what = "an integer" if kind is numbers.Integral else "a number"
            raise self._refused(f"{p.name}={value!r}", f"{what} ({p.dtype})")
        return value

    def _tensor(self, p: Parameter, value: Any, session: Session) -> torch.Tensor:
        group, heap = session.group, session.heap
        if p.symmetric:
            if isinstance(value, SymmetricTensor):
                value = value.all
            elif not (
                isinstance(value, torch.Tensor)
                and value.ndim > 0
                and len(value) == group.world_size
                and heap.base <= value.data_ptr() < heap.base + heap.stride
                and value.stride(0) * value.itemsize == heap.stride
            ):
                raise self._refused(f"{p.name}={_shown(value)}", "a tw.symmetric tensor")
            part = value[group.rank]
        elif isinstance(value, torch.Tensor):
            part = value
        else:
            raise self._refused(f"{p.name}={_shown(value)}", "a torch tensor")
        dtype = T.dtype(p.dtype).as_torch()
        if part.dtype != dtype:
            raise self._refused(f"{p.name} is of {part.dtype}", str(dtype))
        if part.device != group.device:
            raise self._refused(f"{p.name} is on {part.device}", str(group.device))
        if not part.is_contiguous():
            raise self._refused(
                f"{p.name} has shape {tuple(part.shape)} and strides {part.stride()}",
                "a contiguous tensor",
            )
        return value

    def _refused(self, what: str, expected: str) -> TileWeaveError:
        return TileWeaveError(f"{self.plan.name}: {what}; expected {expected}")

    def _kernel(self, step: Launch) -> Kernel:
        """The compiled kernel of a step. Collective the first time."""
        if isinstance(step.kernel, Kernel) and step.kernel.program is step.program:
            return step.kernel
        if isinstance(step.kernel, DynamicKernel) and step.kernel.runs(step.program):
            return step.kernel.at(**step.sizes)
        known = self._kernels.get(id(step.program))
        if known is None:
            if capturing():
                raise TileWeaveError(
                    f"{self.plan.name}: {named(step.program)} is not compiled yet; expected one "
                    "call of the plan before it is captured in a CUDA graph"
                )
            kernel = compile(step.program, pass_configs=self.plan.pass_configs)
            known = self._kernels[id(step.program)] = step.program, kernel
        return known[1]

    def _enqueue(
        self, steps: list[Step], tensors: Mapping[str, torch.Tensor], kernels: Mapping[int, Kernel]
    ) -> None:
        caller = torch.cuda.current_stream(self._session.group.device)
        for step in steps:
            stream = self._stream(step.stream, caller)
            match step:
                case Copy():
                    _copy(tensors, step.dst, step.src, step.rows, stream.cuda_stream)
                case WriteValue():
                    write_value(stream.cuda_stream, _address(tensors, step.dst), step.value)
                case CopyValue():
                    word = Rows(1, 1, 1, 1)
                    _copy(tensors, step.dst, step.src, word, stream.cuda_stream)
                case WaitStream():
                    stream.wait_stream(self._stream(step.other, caller))
                case Launch():
                    arguments = [
                        tensors[value.parameter.name] if isinstance(value, Region) else value
                        for value in step.arguments.values()
                    ]
                    with torch.cuda.stream(stream):
                        kernels[step.number](*arguments)

    def _stream(self, name: str | None, caller: torch.cuda.Stream) -> torch.cuda.Stream:
        if name is None:
            return caller
        if name not in self._streams:
            priority = _FIRST if name == GUARD else 0
            self._streams[name] = torch.cuda.Stream(caller.device, priority=priority)
        return self._streams[name]


def _address(tensors: Mapping[str, torch.Tensor], region: Region) -> int:
    tensor = tensors[region.parameter.name]
    offset = sum(i * stride for i, stride in zip(region.start, tensor.stride(), strict=True))
    return tensor.data_ptr() + offset * tensor.itemsize


def _copy(
    tensors: Mapping[str, torch.Tensor], dst: Region, src: Region, rows: Rows, stream: int
) -> None:
    to, of = _address(tensors, dst), _address(tensors, src)
    size = tensors[dst.parameter.name].itemsize
    if rows.count == 1:
        call("cuMemcpyDtoDAsync", to, of, rows.width * size, stream, stream=stream)
        return
    bindings = driver()
    what = bindings.CUDA_MEMCPY2D()
    what.srcMemoryType = what.dstMemoryType = bindings.CUmemorytype.CU_MEMORYTYPE_DEVICE
    what.srcDevice, what.srcPitch = of, rows.src_pitch * size
    what.dstDevice, what.dstPitch = to, rows.dst_pitch * size
    what.WidthInBytes, what.Height = rows.width * size, rows.count
    call("cuMemcpy2DAsync", what, stream, stream=stream)


def _shown(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"torch tensor {tuple(value.shape)}"
    return repr(value)
