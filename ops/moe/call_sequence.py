"""Calls of several kernels that one native call enqueues.

``dispatch`` and ``expert_mlp`` are such calls. The first call with a signature runs the operators
one by one, then records their kernels. A later one allocates memory and passes addresses. Tensors
that only the kernels exchange are parts of one allocation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeAlias

import torch

from ...runtime.executor.enqueue import Part, enqueuer_of
from ...runtime.executor.operations import KernelLaunch, Place
from ...runtime.executor.recorded_calls import JoinedCall, RecordedCall, recorded_calls
from ...runtime.host.session import find_named
from ..core.call import allocator_of, decided, is_recordable
from ..core.checks import ALIGNMENT, is_contiguous_and_aligned, with_packed_strides
from ..core.compiled import CompiledOp, op_cache_of
from ..core.library import look_up
from .local_kernels import LocalKernel

Shapes: TypeAlias = "Mapping[str, tuple[tuple[int, ...], torch.dtype]]"
"""Shapes and types of tensors by name."""
_WORD = torch.int32
"""Type of the elements of the allocation that several tensors share."""


class NotRecordableError(Exception):
    """Python enqueues a part of the call, or a part copies an operand."""


class Sharing:
    """Places of several tensors in one allocation."""

    def __init__(self, shapes: Shapes) -> None:
        self.shapes, self.begins, end = shapes, {}, 0
        for name, (shape, dtype) in shapes.items():
            self.begins[name] = end
            end += -(-math.prod(shape) * dtype.itemsize // ALIGNMENT) * ALIGNMENT
        self.words = end // _WORD.itemsize

    def views(self, names: Sequence[str]) -> Callable[[torch.Tensor], list[torch.Tensor]]:
        """Return a function that returns tensors of ``_WORD`` in an allocation. It calls as few
        operations of torch as possible.

        Args:
            names: of the tensors, in the order of their places.
        """
        sizes: list[int] = []
        pieces: list[tuple[int, tuple[int, ...] | None]] = []
        for name in names:
            shape, _ = self.shapes[name]
            if gap := self.begins[name] // _WORD.itemsize - sum(sizes):
                sizes.append(gap)
            pieces.append((len(sizes), None if len(shape) == 1 else shape))
            sizes.append(math.prod(shape))
        sizes.append(self.words - sum(sizes))

        def views(memory: torch.Tensor) -> list[torch.Tensor]:
            parts = memory.split_with_sizes(sizes)
            return [parts[n] if shape is None else parts[n].view(shape) for n, shape in pieces]

        return views


class CallSequence:
    """Call that is recorded: later ones differ from it only in addresses and contents."""

    def __init__(
        self, call: JoinedCall, uses: Sequence[tuple[Iterator[int], CompiledOp]],
        allocate: Sequence[Callable[[], torch.Tensor]],
        views: Callable[[torch.Tensor], list[torch.Tensor]] | None,
    ) -> None:  # fmt: skip
        """
        Args:
            uses: the counter of ``OpCache`` and the operator, for each operator of the call.
            allocate: functions that return results of the call, and last the memory that other
                tensors share.
            views: returns the results in this memory; None if there are none.
        """
        self._call, self._uses, self._allocate, self._views = call, uses, allocate, views

    def __call__(self, addresses: Sequence[int]) -> list[torch.Tensor] | None:
        """Return the results. None if an operator has lost its memory.

        Args:
            addresses: of the tensors of the call.
        """
        if not self._call.is_valid:
            return None
        for uses, op in self._uses:
            op.last_used = next(uses)
        tensors = [allocate() for allocate in self._allocate]
        self._call((), [*addresses, *(tensor.data_ptr() for tensor in tensors)])
        *results, memory = tensors
        return results if self._views is None else results + self._views(memory)


_NOT_RECORDABLE = object()
"""Value of keys of calls that have raised NotRecordableError."""


def find(
    op: str, tensors: Sequence[Any], options: Sequence[Any]
) -> tuple[Hashable, list[int], CallSequence | None]:
    """Return the key of a call, whose arguments need not be checked yet, the addresses of its
    tensors, and an equal call if there is one. The key is None if the call must not be recorded.

    Equal keys have options of equal types: an illegal True differs from a legal 1.
    """
    if torch.compiler.is_compiling():
        return None, [], None
    recorded, addresses = look_up((op, *options, *map(type, options)), tensors)
    if recorded is None or recorded.value is _NOT_RECORDABLE:
        return None, [], None
    return recorded.key, addresses, recorded.value


class Recorder:
    """Records the kernels of a call, in the order in which they are enqueued.

    Tensors have names. ``recorder[name]`` is a tensor of the shape and type that the kernels
    receive.
    """

    def __init__(
        self, inputs: Mapping[str, torch.Tensor], results: Shapes, shared: Shapes,
        returned: Sequence[str] = (),
    ) -> None:  # fmt: skip
        """
        Args:
            inputs: tensors of the call, in the order of its addresses.
            results: tensors that the call returns.
            shared: other tensors.
            returned: names of those of them that it returns, too, in the order of ``shared``.
        """
        self._device = next(iter(inputs.values())).device
        self._sharing = Sharing(shared)
        self._views = self._sharing.views(returned) if returned else None
        *tensors, memory = (
            torch.empty(shape, dtype=dtype, device=self._device)
            for shape, dtype in (*results.values(), ((self._sharing.words,), _WORD))
        )
        self._allocate = [allocator_of(tensor) for tensor in (*tensors, memory)]
        # Kernels accept no tensors that require a gradient, such as weights under torch.no_grad().
        detached = {name: tensor.detach() for name, tensor in inputs.items()}
        self._tensors = detached | dict(zip(results, tensors, strict=True))
        self._places = {name: Place(i, 0) for i, name in enumerate(self._tensors)}
        for name, begin in self._sharing.begins.items():
            shape, dtype = shared[name]
            part = memory.view(torch.uint8)[begin:][: math.prod(shape) * dtype.itemsize]
            self._tensors[name] = part.view(dtype).view(shape)
            self._places[name] = Place(len(inputs) + len(results), begin)
        self._parts: list[Part] = []
        self._calls: list[RecordedCall] = []
        self._uses: list[tuple[Iterator[int], CompiledOp]] = []

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._tensors[name]

    def operator(self, op: str, inputs: Sequence[str], out: str, options: tuple[Any, ...]) -> None:
        """Append the kernels of an operator of a group, as ``compute`` calls it.

        Raises:
            NotRecordableError: see there.
        """
        tensors = [self[name] for name in inputs]
        _, decision = decided(op, tensors, None, options)
        if not decision.is_compiled or not all(map(is_contiguous_and_aligned, tensors)):
            raise NotRecordableError
        cache = op_cache_of(decision.group)
        compiled = cache.operators.get((decision.problem, decision.choice))
        if compiled is None:  # evicted since: creating it is collective
            raise NotRecordableError
        operands, result = compiled.declared(*tensors, self[out])
        call, addresses = compiled.recorded_call(operands, result)
        if not call.native:
            raise NotRecordableError
        memory = [*(m.all for m in compiled.memory), *compiled.fixed_inputs]
        fixed = addresses[len(operands) : -1]
        places = [
            *(self._places[name] for name in inputs), *(Place(-1, address) for address in fixed),
            self._places[out],
        ]  # fmt: skip
        self._parts.append(Part(call.operations, [*operands, *memory, result], places))
        self._calls.append(call)
        self._uses.append((cache.uses, compiled))

    def kernel(self, launch: Callable[..., Any], *args: int | tuple[str, torch.Tensor]) -> None:
        """Append a launch of a kernel of one GPU.

        Args:
            args: numbers, and tensors with their names; a tensor begins where the one with this
                name does, but may have another shape.

        Raises:
            NotRecordableError: see there.
        """
        names = [arg[0] for arg in args if isinstance(arg, tuple)]
        tensors = [arg[1] for arg in args if isinstance(arg, tuple)]
        if not all(map(is_contiguous_and_aligned, tensors)):
            raise NotRecordableError
        places = (Place(i, 0) for i in range(len(names)))
        stream = torch.cuda.current_stream(self._device)
        arguments = tuple(next(places) if isinstance(arg, tuple) else arg for arg in args)
        operation = KernelLaunch(stream, stream, LocalKernel(launch), arguments)
        operands = [with_packed_strides(tensor) for tensor in tensors]
        self._parts.append(Part([operation], operands, [self._places[name] for name in names]))

    def sequence(self, session: Any) -> CallSequence:
        """Return the call.

        Raises:
            NotRecordableError: see there.
        """
        enqueue = enqueuer_of(self._parts)
        if enqueue is None:
            raise NotRecordableError
        stream = next((call.stream for call in self._calls if call.stream is not None), None)
        kernels = [kernel for call in self._calls for kernel in call.kernels]
        call = JoinedCall(session, stream, self._parts, kernels, enqueue)
        return CallSequence(call, self._uses, self._allocate, self._views)


def record(key: Hashable, group: str, device: torch.device, steps: Callable[[], Recorder]) -> None:
    """Record a call that has been made, if one native call can enqueue its kernels.

    Args:
        key: see ``find``.
        group: name of the group.
        steps: returns the recorder with all kernels, or raises NotRecordableError.
    """
    session = find_named(group)
    if key is None or session is None or not is_recordable(device):
        return
    sequence: Any = _NOT_RECORDABLE
    with suppress(NotRecordableError):
        sequence = steps().sequence(session)
    recorded_calls().put(key, sequence)
