"""Cases of ``tileweave bench``: an operator with one shape, and the implementations to compare."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from textwrap import shorten
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from ..ops.autotune.trial import relative_error
from ..ops.collectives.collective import Collective
from ..ops.core.compiled import CompiledOp
from ..ops.core.registry import RegisteredOp
from ..ops.core.strategy import Selection
from ..runtime import Plan, SymmetricTensor, barrier
from ..runtime.host.group import Group

if TYPE_CHECKING:
    from .selection import BenchOptions

INPUTS = 3
"""Number of input sets used in turn. It is odd, so that memory that is reused every second call
never holds the right result of an earlier call."""
OURS, NCCL, ASYNC_TP = "ours", "nccl", "async_tp"
PRODUCT, EXCHANGE, TRANSPORT = "product/", "exchange/", "transport/"
"""Prefixes of names: one half of the operator, or our collective by one transport."""
LOCAL = "local"
SDPA, GATHER, RING = "sdpa/", "gather/", "ring/"
"""Names of attention: ours on one rank without communication, and prefixes of PyTorch's: on one
rank, after an all-gather, and as ring attention. Of decode steps, ``SDPA`` is PyTorch's on all
ranks."""
TORCH, AGAINST = "torch", "against"
"""Names of an alternative for mixtures of experts, and of the function of ``--against``."""
NEEDED = {OURS, f"{PRODUCT}cublas", f"{EXCHANGE}nccl", NCCL}
"""Implementations whose errors are raised; the others may be missing."""


class Missing(Exception):
    """Reason why an implementation is missing."""


@dataclass(frozen=True)
class Implementation:
    """Implementation of a case or of a part of it.

    Attributes:
        call: function that is timed; on a GPU it enqueues on torch's current stream.
        expected: returns the expected result from the inputs.
        result: returns the actual result from what ``call`` returned.
        prepare: runs before each call, untimed.
        error: returns the error of a result against the expected one.
    """

    call: Callable[[Any], Any]
    expected: Callable[[Any], Tensor] = lambda inputs: inputs.result
    result: Callable[[Any], Tensor] = lambda returned: returned
    prepare: Callable[[Any], Any] = lambda inputs: None
    error: Callable[[Tensor, Tensor], Tensor] = relative_error


@dataclass
class Buffers:
    """Problem with the memory in which the implementations compute it.

    Attributes:
        gathered: symmetric memory for what all ranks send; None if it does not fit.
        memory: memory of results, by the attribute of the inputs that has the expected values.
        compiled: operators that ``close`` frees.
    """

    problem: Any
    group: Group
    gathered: SymmetricTensor | None = None
    memory: dict[str, Tensor] = field(default_factory=dict)
    compiled: list[CompiledOp] = field(default_factory=list)

    def into(self, name: str, call: Callable[[Any, Tensor], Any]) -> Implementation:
        """Return the implementation of a call that writes its result to a tensor of ``memory``,
        which is filled with NaN before.

        Args:
            call: accepts the inputs and the tensor.
        """
        out = self.memory[name]
        return Implementation(
            lambda inputs: call(inputs, out),
            expected=lambda inputs: getattr(inputs, name),
            result=lambda _: out,
            prepare=lambda _: out.fill_(torch.nan),
        )

    def close(self) -> None:
        """Free the operators that only this case uses. Collective."""
        for operator in self.compiled:
            operator.free()
        self.compiled.clear()


def require_gpu(buffers: Buffers) -> None:
    """Raise ``Missing`` if the ranks have no GPU."""
    if buffers.group.device.type != "cuda":
        raise Missing("there is no GPU")


Constructor: TypeAlias = Callable[[Buffers], Implementation]
"""Function that returns an implementation, or raises ``Missing``."""
Arguments: TypeAlias = Callable[[Any, Any], tuple[tuple[Any, ...], dict[str, Any]]]
"""Function that returns the arguments of an operator, given the problem and inputs."""


@dataclass(frozen=True)
class Family:
    """Operators that share base classes, and how the benchmark treats them.

    Attributes:
        base: base classes of the operators, or one.
        kind: type of ``Case.shape``.
        name: name of all of them on the command line.
        example: options for a small case.
        cases: returns the cases of an operator, given its class, the options and the number of
            ranks.
        problem: returns the problem of each rank, given the name of the operator, the shape, the
            number of ranks and the type. Raises ``TileWeaveError`` if the ranks do not divide it.
        stage: returns ``Buffers.memory``, and an iterator of inputs, which all ranks advance
            together, given the problem and the group.
        programs: returns the programs and plans that our implementations launch on a GPU, given the
            problem and the group.
        choice: returns how the operator computes a problem, and why, given the problem and inputs.
        arguments: returns the arguments of the operator, given the problem and inputs.
        error: as in ``Implementation``.
    """

    base: type[RegisteredOp] | tuple[type[RegisteredOp], ...]
    kind: type
    name: str
    example: str
    cases: Callable[[type[Any], BenchOptions, int], list[Case]]
    problem: Callable[[str, Any, int, torch.dtype], Any]
    stage: Callable[[Any, Group], tuple[dict[str, Tensor], Iterator[Any]]]
    programs: Callable[[Any, Group], Sequence[Any]]
    choice: Callable[[Any, Any], Selection]
    arguments: Arguments
    error: Callable[[Tensor, Tensor], Tensor] = relative_error


@dataclass(frozen=True)
class Case:
    """Operator with one shape, size or length, and the implementations to compare.

    Attributes:
        op: name of the operator.
        operations: arithmetic operations of all ranks; for a collective, bytes of one rank.
        symmetric_bytes: symmetric memory of our operator on each rank, for 2-byte values, without
            counters and tails.
        gathered_bytes: bytes that the implementation by copies writes to each rank.
        implementations: constructors of the implementations by name.
        device_bytes: other memory of each rank for operands and expected results; 0 for little.
        obstacle: reason why the ranks cannot compute it, with what is expected; None if they can.
    """

    op: str
    shape: Any
    family: Family
    operations: int
    symmetric_bytes: int
    gathered_bytes: int
    implementations: Mapping[str, Constructor]
    device_bytes: int = 0
    obstacle: str | None = None

    def problem(self, ranks: int, dtype: torch.dtype) -> Any:
        """Return the problem of each rank, as in ``Family``."""
        return self.family.problem(self.op, self.shape, ranks, dtype)


def by_call(
    buffers: Buffers,
    function: Callable[..., Any],
    arguments: Arguments,
    error: Callable[[Tensor, Tensor], Tensor],
) -> Implementation:
    """Return the implementation of a function that is called as the operator, and whose result, or
    the first of several, is new."""

    def call(inputs: Any) -> Tensor:
        positional, options = arguments(buffers.problem, inputs)
        result = function(*positional, **options)
        return result[0] if isinstance(result, tuple | list) else result

    return Implementation(call, error=error)


def by_reference(
    buffers: Buffers, collective: type[Collective], x: Callable[[Any], Tensor], *options: int
) -> Implementation:
    """Return the implementation of a collective by ``torch.distributed``.

    Args:
        x: returns the input of the collective from the inputs.
        options: integer arguments of the collective.
    """
    group, out = buffers.group, buffers.memory["result"]
    if not collective.reference_in_place:
        return buffers.into(
            "result", lambda inputs, out: collective.reference(x(inputs), out, group, *options)
        )
    return Implementation(
        lambda inputs: collective.reference(out, out, group, *options),
        result=lambda _: out,
        prepare=lambda inputs: out.copy_(x(inputs)),
    )


def by_copies(
    buffers: Buffers,
    plan: Plan | None,
    sent: Callable[[Any], Tensor],
    expected: Callable[[Any], Tensor],
) -> Implementation:
    """Return an implementation that only copies, to the first elements of ``buffers.gathered``.

    Args:
        plan: ``Collective.copies``.
        sent: returns what is sent, from the inputs.
        expected: returns the expected result from the inputs, flat.
    """
    ranks, rank, room = buffers.group.world_size, buffers.group.rank, buffers.gathered
    if plan is None:
        raise Missing("copy engines do not add")
    if ranks == 1:
        raise Missing("there is one rank")
    if room is None:
        raise Missing("there is no symmetric heap, or it has no room")
    source, received = (parameter.extents for parameter in plan.parameters)
    everyones = room.all[:, : ranks * received[1]].unflatten(1, received)
    own = everyones[rank]

    def result(_: Any) -> Tensor:
        # A rank's call ends when it has sent, not when it has received.
        barrier(group=buffers.group.process_group)
        return own.view(-1)

    return Implementation(
        lambda inputs: plan(sent(inputs).view(source), everyones),
        expected,
        result,
        lambda _: own.fill_(torch.nan),
    )


def implementations_of(
    buffers: Buffers, inputs: Any, tries: int, constructors: Mapping[str, Constructor]
) -> tuple[dict[str, Implementation], dict[str, str]]:
    """Return the implementations by name, each called ``tries`` times, and why the others are
    missing, by name. Collective; all ranks agree."""
    implementations: dict[str, Implementation] = {}
    missing: dict[str, str] = {}
    for name, construct in constructors.items():
        reason = ""
        try:
            implementation = construct(buffers)
            for _ in range(tries):
                implementation.prepare(inputs)
                implementation.result(implementation.call(inputs))
            buffers.group.synchronize()
            implementations[name] = implementation
        except Missing as error:
            reason = str(error)
        except Exception as error:
            if name in NEEDED:
                raise
            reason = shorten(f"{type(error).__name__}: {error}", 300)
        reasons = buffers.group.exchange("bench", reason)
        if any(reasons):
            implementations.pop(name, None)
            missing[name] = next(filter(None, reasons))
    return implementations, missing


class Checker:
    """Compares the results of implementations with the expected results."""

    def __init__(self, implementations: Mapping[str, Implementation]) -> None:
        self.implementations = implementations
        self._errors: dict[str, Tensor] = {}

    def __call__(self, name: str, inputs: Any, returned: Any) -> None:
        implementation = self.implementations[name]
        result, expected = implementation.result(returned), implementation.expected(inputs)
        error = implementation.error(result, expected)
        error = error.nan_to_num(nan=torch.inf, posinf=torch.inf)
        self._errors[name] = torch.maximum(self._errors.get(name, error), error)

    @property
    def errors(self) -> dict[str, float]:
        """Largest error by name; infinite if a result contains NaN."""
        return {name: error.item() for name, error in self._errors.items()}
