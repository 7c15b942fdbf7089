"""Calls of operators: repeat a recorded call, or check, decide, compile, run and record."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch

from ...runtime.executor.recorded_calls import current_stream, has_driver, recorded_calls
from ...runtime.host.native import library
from ...runtime.host.session import find_named
from ...runtime.kernel.kernel import capturing
from .checks import ALIGNMENT, as_kernel_operand
from .compiled import CompiledOp, OpCache, ProblemOp, op_cache_of
from .groups import TwoLevels
from .noted import UNCOMPILED
from .registry import OPERATORS


def signature(
    names: Iterable[Hashable], inputs: Sequence[Any], out: torch.Tensor | None
) -> tuple[Hashable, list[int]]:
    """Return the key of a call in ``recorded_calls``, and the addresses of its tensors.

    Calls with equal keys differ only in addresses and contents: their tensors have equal shapes,
    strides, types, devices and alignments, and torch's current stream is the same. The key is None
    if the call cannot be legal.

    Args:
        names: the operator, and all arguments that are not tensors.
        inputs: tensors and None; the first one is a tensor in each legal call.
    """
    key: list[Hashable] = [*names]
    addresses: list[int] = []
    try:
        for tensor in (*inputs, out):
            if tensor is None:
                key.append(None)
                continue
            address = tensor.data_ptr()
            addresses.append(address)
            key += tensor.shape, tensor.stride(), tensor.dtype, tensor.device, address % ALIGNMENT
        device = inputs[0].device
    except (AttributeError, RuntimeError):  # no tensor, or one without memory of its own
        return None, []
    if has_driver(device):
        key.append(current_stream(device))
    return tuple(key), addresses


class FastPath:
    """Repetition of a recorded call on other tensors with the same signature: no checks, and one
    native call enqueues all."""

    def __init__(
        self, cache: OpCache, op: CompiledOp, inputs: Sequence[torch.Tensor], out: torch.Tensor,
        result: torch.Tensor, no_overlap: Sequence[torch.Tensor | None],
        in_place: int | None = None,
    ) -> None:  # fmt: skip
        """
        Args:
            cache: cache that holds ``op``.
            inputs, out: tensors in the shapes and types that ``op`` declares.
            result: ``out`` in the shape and type that the caller receives.
            no_overlap: the first inputs of a call, whose memory ``out`` must not overlap.
            in_place: byte of ``out`` at which such an input may begin nevertheless.
        """
        self._uses, self._op = cache.uses, op
        self._recorded, addresses = op.recorded_call(inputs, out)
        self._memory = addresses[len(inputs) : -1]
        self._nbytes = result.nbytes
        self._no_overlap = [x.nbytes for x in no_overlap if x is not None]
        self._in_place = in_place
        self._empty = partial(
            torch.empty_strided, tuple(result.shape), result.stride(),
            dtype=result.dtype, device=result.device,
        )  # fmt: skip

    @property
    def is_native(self) -> bool:
        """True if the call needs nothing but addresses."""
        return self._recorded.native

    def __call__(self, addresses: list[int], out: torch.Tensor | None) -> torch.Tensor | None:
        """Return the result, in ``out`` if given. None if the call must be checked: the operator
        has lost its memory, or ``out`` overlaps an input.

        Args:
            addresses: of the inputs, then of ``out`` if given.
        """
        if not self._recorded.is_valid:
            return None
        if out is None:
            out = self._empty()
            address = out.data_ptr()
        else:
            address = addresses.pop()
            end = address + self._nbytes
            for begin, nbytes in zip(addresses, self._no_overlap, strict=False):
                overlaps = begin < end and address < begin + nbytes
                if overlaps and begin - address != self._in_place:
                    return None
        self._op.last_used = next(self._uses)
        self._recorded((), [*addresses, *self._memory, address])
        return out


def record_fast_path(
    originals: Sequence[torch.Tensor], cache: OpCache, op: CompiledOp,
    inputs: Sequence[torch.Tensor], out: torch.Tensor, result: torch.Tensor,
    no_overlap: Sequence[torch.Tensor | None], in_place: int | None = None,
) -> FastPath | None:  # fmt: skip
    """Return the fast path of later calls like the one just made. None if that one had to copy an
    input, if a CUDA graph captured it, or if Python enqueued it.

    Args:
        originals: the caller's inputs.
        cache, op, inputs, out, result, no_overlap, in_place: arguments of ``FastPath``.
    """
    if not has_driver(result.device) or library() is None or capturing():
        return None
    if any(x.data_ptr() != y.data_ptr() for x, y in zip(originals, inputs, strict=True)):
        return None
    fast_path = FastPath(cache, op, inputs, out, result, no_overlap, in_place)
    return fast_path if fast_path.is_native else None


@dataclass(slots=True)
class Decision:
    """Decision about calls with one signature, which ``recorded_calls`` keeps.

    Attributes:
        problem: what they compute; ranks agree on it, and operators are compiled for it.
        group: the ranks that take part; ``TwoLevels`` on several nodes.
        choice: see ``ProblemOp.choose``.
        is_lasting: whether later calls use it even if no compiled operator serves them.
        fast_path: repeats a call; None if each call needs its operands and memory prepared.
    """

    problem: Any
    group: Any
    choice: Any
    is_lasting: bool = False
    fast_path: FastPath | None = None

    @property
    def is_compiled(self) -> bool:
        """True if a compiled operator serves the calls."""
        return self.choice not in UNCOMPILED and not isinstance(self.group, TwoLevels)


class Call(NamedTuple):
    """Arguments of a call.

    Attributes:
        inputs: tensors that the operator reads, in the order of its parameters.
        out: memory for the result; None if ``prepared`` allocates it.
        options: arguments that are no tensors; two of them are the name of the group and, next to
            it, what the caller asks for, a strategy or a transport.
        results: memory for the other results; None if ``out`` is the only one.
        is_new: whether ``out`` and ``results`` overlap nothing.
        unread: tensors that only ``compute_unfused`` reads.
        key: key of the call in ``recorded_calls``.
    """

    operator: type[CallableOp]
    inputs: Sequence[Any]
    out: torch.Tensor | None
    options: tuple[Any, ...]
    results: Sequence[torch.Tensor | None] | None = None
    is_new: bool = False
    unread: Sequence[Any] = ()
    key: Hashable = None

    @property
    def group(self) -> str:
        return self.options[self.operator.group_at]

    @property
    def requested(self) -> str:
        return self.options[self.operator.group_at + 1]


class CallableOp(ProblemOp):
    """Operator whose calls ``compute`` makes: it declares what differs from other operators.

    Attributes:
        reads: names of the inputs, for errors.
        group_at: place of the group's name in ``Call.options``.
        guarded: number of first inputs whose memory the fast path keeps from ``out``; None for
            all.
    """

    reads: ClassVar[tuple[str, ...]]
    group_at: ClassVar[int] = -2
    guarded: ClassVar[int | None] = None

    @classmethod
    @abstractmethod
    def decide(cls, call: Call) -> Decision:
        """Check a call, and decide how to compute it. Collective for each new problem."""

    @classmethod
    @abstractmethod
    def check_memory(
        cls, inputs: Sequence[Any], out: torch.Tensor, results: Sequence[torch.Tensor | None]
    ) -> None:
        """Refuse results of the caller that overlap each other or an input. An earlier call had
        tensors of the same shapes, strides, types and alignments."""

    @classmethod
    @abstractmethod
    def compute_unfused(cls, call: Call, decision: Decision) -> torch.Tensor:
        """Return the result without a compiled operator of the group, in ``out`` if given."""

    @classmethod
    def empty(cls, call: Call, problem: Any) -> torch.Tensor:
        """Return memory for the result of a call without ``out``."""
        raise NotImplementedError

    @classmethod
    def prepared(
        cls, call: Call, decision: Decision
    ) -> tuple[Sequence[torch.Tensor], torch.Tensor]:
        """Return the inputs as kernels can read them, and memory for the result. Inputs with gaps
        or without alignment are copied."""
        named = zip(cls.reads, call.inputs, strict=True)
        inputs = [as_kernel_operand(cls.op, name, x) for name, x in named if x is not None]
        return inputs, cls.empty(call, decision.problem) if call.out is None else call.out

    @classmethod
    def in_place_at(cls, decision: Decision) -> int | None:
        """Return the byte of ``out`` at which an input may begin; None if they must not overlap."""
        return None


def compute(
    op: str, inputs: Sequence[Any], out: torch.Tensor | None, options: tuple[Any, ...],
    results: Sequence[torch.Tensor | None] | None = None, is_new: bool = False,
    unread: Sequence[Any] = (),
) -> torch.Tensor:  # fmt: skip
    """Return the result of a call, in ``out`` if given. Collective for each new problem.

    Args:
        op: name of the operator.
        inputs, out, options, results, is_new, unread: see ``Call``.
    """
    key, addresses = signature(
        (op, *options), inputs if results is None else (*inputs, *results), out
    )
    decision = recorded_calls().get(key)
    if decision is not None:
        if out is not None and results is not None and not is_new:
            OPERATORS[op].check_memory(inputs, out, results)
        if decision.fast_path is not None:
            result = decision.fast_path(addresses, out)
            if result is not None:
                return result
    call = Call(OPERATORS[op], inputs, out, options, results, is_new, unread, key)
    decision = decide(call, decision)
    if not decision.is_compiled:
        return call.operator.compute_unfused(call, decision)
    return _run_and_record(call, decision)


def decided(
    op: str, inputs: Sequence[Any], out: torch.Tensor | None, options: tuple[Any, ...]
) -> tuple[Call, Decision]:
    """Return a call, and the decision about it. Nothing is computed. Collective for each new
    problem."""
    key, _ = signature((op, *options), inputs, out)
    call = Call(OPERATORS[op], inputs, out, options, key=key)
    return call, decide(call, recorded_calls().get(key))


def decide(call: Call, decision: Decision | None = None) -> Decision:
    """Check a call, and return the decision about it. Collective for each new problem.

    Args:
        decision: about an earlier call with the same signature.
    """
    if decision is None:
        decision = call.operator.decide(call)
        if decision.is_lasting and not capturing():
            recorded_calls().put(find_named(call.group), call.key, decision)
    elif call.results is None and call.out is not None:
        call.operator.check_memory(call.inputs, call.out, ())
    return decision


def _run_and_record(call: Call, decision: Decision) -> torch.Tensor:
    """Run the compiled operator, and record the call for later ones."""
    operator, others = call.operator, [x for x in call.results or () if x is not None]
    inputs, out = operator.prepared(call, decision)
    cache = op_cache_of(decision.group)
    compiled = cache.operator(decision.problem, decision.choice, operator)
    if capturing():
        compiled(*inputs, *others, out)
        return out
    declared = compiled.declared(*inputs, *others, out)
    compiled.enqueue(*declared)
    originals = [*(x for x in call.inputs if x is not None), *others]
    decision.fast_path = record_fast_path(
        originals, cache, compiled, *declared, out,
        call.inputs[: operator.guarded], operator.in_place_at(decision),
    )  # fmt: skip
    recorded_calls().put(cache.session, call.key, decision)  # the session may be new
    return out
