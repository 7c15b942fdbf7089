"""Calls of operators: repeat a recorded call, or check, decide, compile, run and record."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations
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

TENSORS = frozenset((torch.Tensor, torch.nn.Parameter))
"""Tensor types whose methods are torch's own."""


def signature(
    names: Iterable[Hashable], tensors: Sequence[Any], skips_dispatcher: bool = False
) -> tuple[Hashable, list[int]]:
    """Return the key of a call in ``recorded_calls``, and the addresses of its tensors.

    Calls with equal keys differ only in addresses and contents: their tensors have equal shapes,
    strides, types, devices and alignments, and torch's current stream is the same. The key is None
    if the call cannot be legal.

    Args:
        names: the operator, and all arguments that are not tensors.
        tensors: tensors and None; the first one is a tensor in each legal call.
        skips_dispatcher: whether the key is also None if a tensor needs torch's dispatcher; see
            ``needs_dispatcher``.
    """
    key: list[Hashable] = [*names]
    addresses: list[int] = []
    differentiates = skips_dispatcher and torch.is_grad_enabled()
    try:
        for x in tensors:
            if x is None:
                key.append(None)
                continue
            if skips_dispatcher and (
                x.__class__ not in TENSORS
                or (differentiates and x.requires_grad)
                or x.is_neg()
                or x.is_conj()
            ):
                return None, []
            address = x.data_ptr()
            addresses.append(address)
            key += x.shape, x.stride(), x.dtype, x.device, address % ALIGNMENT
        device = tensors[0].device
        if skips_dispatcher and device.type == "meta":
            return None, []
        key.append(current_stream(device))
    except (AttributeError, RuntimeError):  # no tensor, or one without memory of its own
        return None, []
    return tuple(key), addresses


def allocator_of(x: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Return a function that allocates tensors like ``x``. A method of a tensor of the same type
    and device needs less time than ``torch.empty_strided``."""
    return partial(x.new_empty(0).new_empty_strided, tuple(x.shape), x.stride())


def is_recordable(device: torch.device) -> bool:
    """Return whether C++ can repeat the calls that are made now."""
    return has_driver(device) and library() is not None and not capturing()


class Recorded(NamedTuple):
    """Result of a look-up in ``recorded_calls``.

    Attributes:
        value: value of an earlier call with this key; None if there is none.
    """

    key: Hashable
    value: Any


class OverlapCheck(NamedTuple):
    """Result of the caller, and another tensor that it must not overlap.

    Attributes:
        result, other: indices of their addresses in a call.
        in_place: byte of the result at which the other tensor may begin nevertheless.
    """

    result: int
    result_nbytes: int
    other: int
    other_nbytes: int
    in_place: int | None


class FastPath:
    """Repetition of a recorded call on other tensors with the same signature: no checks, and one
    native call enqueues all."""

    def __init__(
        self, cache: OpCache, op: CompiledOp, inputs: Sequence[torch.Tensor], out: torch.Tensor,
        results: Sequence[torch.Tensor], is_list: bool, overlap_checks: Sequence[OverlapCheck],
    ) -> None:  # fmt: skip
        """
        Args:
            cache: cache that holds ``op``.
            inputs, out: tensors in the shapes and types that ``op`` declares; the other results
                are the last of ``inputs``.
            results: the other results, then ``out``, in the shapes and types that the caller
                receives.
            is_list: whether the caller receives all results, ``out`` first.
            overlap_checks: checks of the results of the caller.
        """
        self._uses, self._op = cache.uses, op
        self._recorded, addresses = op.recorded_call(inputs, out)
        self._memory = addresses[len(inputs) : -1]
        self._overlap_checks, self._is_list = overlap_checks, is_list
        *self._others, self._empty = map(allocator_of, results)

    @property
    def is_native(self) -> bool:
        """True if the call needs nothing but addresses."""
        return self._recorded.native

    def __call__(self, addresses: list[int], out: torch.Tensor | None) -> Any:
        """Return the result of ``compute``. None if the call must be checked: the operator has lost
        its memory, or a result of the caller overlaps an input.

        Args:
            addresses: of the inputs, and of the results of the caller, ``out`` last.
        """
        if not self._recorded.is_valid:
            return None
        if out is not None:
            for place, nbytes, other_place, other_nbytes, in_place in self._overlap_checks:
                begin, other = addresses[place], addresses[other_place]
                overlaps = begin < other + other_nbytes and other < begin + nbytes
                if overlaps and other - begin != in_place:
                    return None
            result, address = out, addresses.pop()
        else:
            result = self._empty()
            address = result.data_ptr()
            if self._is_list:
                others = [empty() for empty in self._others]
                addresses += [x.data_ptr() for x in others]
                result = [result, *others]
        self._op.last_used = next(self._uses)
        self._recorded((), [*addresses, *self._memory, address])
        return result


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
        out: memory for the result; None if ``with_results`` or ``prepared`` allocates it.
        options: arguments that are no tensors; two of them are the name of the group and, next to
            it, what the caller asks for, a strategy or a transport.
        results: memory for the other results; empty without ``out``, and if it is the only one.
        unread: tensors that only ``compute_unfused`` reads.
        key: key of the call in ``recorded_calls``.
    """

    operator: type[CallableOp]
    inputs: Sequence[Any]
    out: torch.Tensor | None
    options: tuple[Any, ...]
    results: Sequence[torch.Tensor | None] = ()
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
        guarded: number of first inputs that results must not overlap; None for all.
        guarded_results: number of these results, ``out`` first.
    """

    reads: ClassVar[tuple[str, ...]]
    group_at: ClassVar[int] = -2
    guarded: ClassVar[int | None] = None
    guarded_results: ClassVar[int] = 1

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
    def with_results(cls, call: Call, problem: Any) -> Call:
        """Return a call without ``out`` with memory for its results, if it has several."""
        return call

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
    def in_place_at(cls, decision: Decision, place: int, result: torch.Tensor) -> int | None:
        """Return the byte of a result at which the input at ``place`` may begin; None if they must
        not overlap."""
        return None


def compute(
    op: str, inputs: Sequence[Any], out: torch.Tensor | None, options: tuple[Any, ...],
    results: Sequence[torch.Tensor | None] = (), unread: Sequence[Any] = (),
    recorded: Recorded | None = None,
) -> Any:  # fmt: skip
    """Return the result of a call, in ``out`` if given; without ``out`` a list of all results if
    the operator has several. Collective for each new problem.

    Args:
        op: name of the operator.
        inputs, out, options, results, unread: see ``Call``.
        recorded: result of a look-up by the caller, who could not repeat the call.
    """
    if recorded is None:
        key, addresses = signature((op, *options), (*inputs, *results, out))
        decision = recorded_calls().get(key)
        if decision is not None and decision.fast_path is not None:
            result = decision.fast_path(addresses, out)
            if result is not None:
                return result
    else:
        key, decision = recorded
    call = Call(OPERATORS[op], inputs, out, options, results, unread, key)
    decision = decide(call, decision)
    if out is None:
        call = call.operator.with_results(call, decision.problem)
    is_list = call.out is not out
    if decision.is_compiled:
        result = _run_and_record(call, decision, out is None)
    else:
        result = call.operator.compute_unfused(call, decision)
    return [x for x in (result, *call.results) if x is not None] if is_list else result


def decided(
    op: str, inputs: Sequence[Any], out: torch.Tensor | None, options: tuple[Any, ...]
) -> tuple[Call, Decision]:
    """Return a call, and the decision about it. Nothing is computed. Collective for each new
    problem."""
    key, _ = signature((op, *options), (*inputs, out))
    call = Call(OPERATORS[op], inputs, out, options, key=key)
    return call, decide(call, recorded_calls().get(key))


def decide(call: Call, decision: Decision | None = None) -> Decision:
    """Check a call, and return the decision about it. Collective for each new problem.

    Args:
        decision: about an earlier call with the same signature.
    """
    if decision is None:
        decision = call.operator.decide(call)
        has_session = find_named(call.group) is not None
        if decision.is_lasting and has_session and not capturing():
            recorded_calls().put(call.key, decision)
    elif call.out is not None:
        call.operator.check_memory(call.inputs, call.out, call.results)
    return decision


def _run_and_record(call: Call, decision: Decision, is_new: bool) -> torch.Tensor:
    """Run the compiled operator, and record the call for later ones.

    Args:
        is_new: whether the caller gave no memory for results.
    """
    operator, others = call.operator, [x for x in call.results if x is not None]
    inputs, out = operator.prepared(call, decision)
    cache = op_cache_of(decision.group)
    compiled = cache.operator(decision.problem, decision.choice, operator)
    if capturing():
        compiled(*inputs, *others, out)
        return out
    declared = compiled.declared(*inputs, *others, out)
    compiled.enqueue(*declared)
    originals = [*(x for x in call.inputs if x is not None), *others]
    decision.fast_path = None
    if _is_repeatable(originals, *declared):
        is_list = is_new and call.out is not None
        checks = [] if is_new else _overlap_checks(call, decision)
        fast_path = FastPath(cache, compiled, *declared, [*others, out], is_list, checks)
        decision.fast_path = fast_path if fast_path.is_native else None
    recorded_calls().put(call.key, decision)
    return out


def _is_repeatable(
    originals: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], out: torch.Tensor
) -> bool:
    """Return whether C++ can repeat a call on addresses: no input was copied.

    Args:
        originals: the tensors of the caller.
        inputs, out: arguments of ``CompiledOp.enqueue``.
    """
    pairs = zip(originals, inputs, strict=True)
    return is_recordable(out.device) and all(x.data_ptr() == y.data_ptr() for x, y in pairs)


def _overlap_checks(call: Call, decision: Decision) -> list[OverlapCheck]:
    """Return the checks of the results of a call, which the caller has given."""
    operator, count = call.operator, len(call.inputs)
    tensors = [*call.inputs, *call.results, call.out]
    places = [sum(x is not None for x in tensors[:n]) for n in range(len(tensors))]
    results = [len(tensors) - 1, *range(count, len(tensors) - 1)][: operator.guarded_results]
    pairs = [
        (result, other, operator.in_place_at(decision, other, tensors[result]))
        for result in results
        for other in range(count)[: operator.guarded]
        if tensors[other] is not None
    ] + [(*two, None) for two in combinations(results, 2)]
    return [
        OverlapCheck(places[n], tensors[n].nbytes, places[m], tensors[m].nbytes, in_place)
        for n, m, in_place in pairs
    ]
