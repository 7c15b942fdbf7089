"""Calls of operators: repeat a recorded call, or check, decide, compile, run and record."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch

from ...runtime.executor.recorded_calls import current_stream, has_driver, recorded_calls
from ...runtime.host.group import Group
from ...runtime.host.native import library
from ...runtime.host.session import find_named
from ...runtime.kernel.kernel import capturing
from ..autotune.store import lookup
from ..autotune.tuner import choice_of
from .across_nodes import Mesh, readable, writable
from .autocast import as_autocast
from .cache import OpCache, op_cache_of
from .compiled import CompiledOp
from .epilogue import NO_EPILOGUE, Epilogue
from .groups import TwoLevels, name_of, ranks_of
from .operator import Choice, Multiply, Operator
from .problem import (
    ALIGNMENT,
    Problem,
    agree,
    as_kernel_operand,
    as_kernel_operands,
    check_layout,
    checked_problem,
    operator_name,
    require_no_overlap_with_operands,
    require_operands,
    with_packed_strides,
)
from .registry import OPERATORS, operators_of
from .strategy import Strategy, choose_strategy, unfused_gemm_strategy


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
        problem: what they compute, a ``Problem`` or a ``CollectiveProblem``.
        group: the ranks that take part; ``TwoLevels`` on several nodes.
        choice: program and tiles of a fused GEMM, None for NCCL and cuBLAS and on several nodes;
            or the name of a transport.
        fast_path: repeats a call; None if each call needs its operands and memory prepared.
    """

    problem: Any
    group: Any
    choice: Any
    fast_path: FastPath | None = None


def run_and_record(
    key: Hashable, decision: Decision, operator: Any, inputs: Any, results: Any,
    tensors: Sequence[torch.Tensor | None],
) -> None:  # fmt: skip
    """Run the compiled operator of a problem, and record the call for later ones. Inputs with gaps
    or without alignment are copied before.

    Args:
        key: key of the call, from ``signature(names, tensors, results.out)``.
        operator: class of the operator; its method ``declared(inputs, results)`` returns the
            arguments of ``enqueue``.
        inputs, results: named tuples of tensors and None; ``results`` has ``out``.
        tensors: ``inputs`` and all results but ``out``.
    """
    named = zip(inputs._fields, inputs, strict=True)
    packed_inputs = type(inputs)(
        *(t if t is None else as_kernel_operand(operator.op, name, t) for name, t in named)
    )
    cache = op_cache_of(decision.group)
    compiled = cache.operator(decision.problem, decision.choice, operator)
    declared = compiled.declared(packed_inputs, results)
    compiled.enqueue(*declared)
    if not capturing():
        present = [t for t in tensors if t is not None]
        decision.fast_path = record_fast_path(present, cache, compiled, *declared, results.out, ())
        recorded_calls().put(cache.session, key, decision)


class Call(NamedTuple):
    """Checked GEMM that is ready to run: operands that kernels can read, and memory for c."""

    decision: Decision
    a: torch.Tensor
    b: torch.Tensor
    c: torch.Tensor
    epilogue: Epilogue

    @property
    def problem(self) -> Problem:
        return self.decision.problem

    @property
    def group(self) -> Group:
        return self.decision.group

    @property
    def levels(self) -> TwoLevels | None:
        """Ranks of several nodes; None if ``group`` makes the call."""
        group = self.decision.group
        return group if isinstance(group, TwoLevels) else None

    @property
    def choice(self) -> Choice | None:
        return self.decision.choice

    def operator(self, choice: Choice) -> Operator:
        """Return the operator for ``choice``. Collective if it is new."""
        make = OPERATORS[self.problem.op]
        return op_cache_of(self.group).operator(self.problem, choice, make)

    @property
    def operands(self) -> tuple[torch.Tensor, ...]:
        """Inputs of the ``Operator`` except c."""
        return self.a, self.b, *self.epilogue.tensors


def compute(
    op: str, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None, group: str, requested: str,
    epilogue: Sequence[Any] = NO_EPILOGUE,
) -> torch.Tensor:  # fmt: skip
    """Return the result of a GEMM, in ``out`` if given. Collective for each new problem.

    Args:
        out, group, requested: as in ``call``.
        epilogue: fields of an ``Epilogue``.
    """
    *tensors, out_dtype = epilogue
    key, addresses = signature((op, group, requested, out_dtype), (a, b, *tensors), out)
    decision = recorded_calls().get(key)
    if decision is not None and decision.fast_path is not None:
        c = decision.fast_path(addresses, out)
        if c is not None:
            return c
    request = _call(key, decision, op, a, b, out, group, requested, Epilogue(*epilogue))
    if (levels := request.levels) is not None:
        operands = request.a, request.b, request.c, request.epilogue
        multiply = _in_node(levels, requested)
        transport = "nccl" if requested == "nccl" else "auto"
        move = OPERATORS[op].collective.in_node(levels, transport)
        with Mesh.of(op, levels, request.a.device) as mesh:
            OPERATORS[op].across(multiply, move, *operands, mesh)
        return request.c
    if request.choice is None:
        OPERATORS[op].unfused(request.a, request.b, request.c, request.group, request.epilogue)
        return request.c
    operator = request.operator(request.choice)
    first, second, *rest = request.operands
    operator(first, second, request.c, *rest)
    declared = operator.declared(first, second, request.c, *rest)
    inputs, no_overlap = (a, b, *(t for t in tensors if t is not None)), (a, b, epilogue[0])
    cache, decision = op_cache_of(request.group), request.decision
    decision.fast_path = record_fast_path(inputs, cache, operator, *declared, request.c, no_overlap)
    if decision.fast_path is not None:  # this call may have opened the session
        recorded_calls().put(cache.session, key, decision)
    return request.c


def _in_node(ranks: TwoLevels, requested: str) -> Multiply:
    """Return the function that calls operators of the ranks of this node, on tensors of any
    alignment."""

    def multiply(operator: type[Operator], a, b, out, epilogue: Epilogue) -> None:
        with writable(out) as memory:
            compute(operator.op, readable(a), b, memory, ranks.node_name, requested, epilogue)

    return multiply


def call(
    op: str, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None, group: str, requested: str,
    epilogue: Epilogue = NO_EPILOGUE,
) -> Call:  # fmt: skip
    """Check a GEMM and decide how to compute it. Collective for each new problem.

    Args:
        out: tensor for the result; None for a new one.
        group: name of the group.
        requested: the strategy that the caller asks for.
    """
    *tensors, out_dtype = epilogue
    key, _ = signature((op, group, requested, out_dtype), (a, b, *tensors), out)
    decision = recorded_calls().get(key)
    return _call(key, decision, op, a, b, out, group, requested, epilogue)


def _call(
    key: Hashable, decision: Decision | None, op: str, a: torch.Tensor, b: torch.Tensor,
    out: torch.Tensor | None, group: str, requested: str, epilogue: Epilogue,
) -> Call:  # fmt: skip
    """Return the call, decided by ``decision`` unless that is None."""
    if decision is None:
        decision, cacheable = _decide(op, a, b, out, group, requested, epilogue)
        if cacheable and not capturing():
            recorded_calls().put(find_named(group), key, decision)
    elif out is not None:
        require_no_overlap_with_operands(op, out, a, b, epilogue)
    problem = decision.problem
    a, b, epilogue = as_kernel_operands(problem, a, b, epilogue)
    c = (
        a.new_empty(problem.shape, dtype=problem.out_dtype)
        if out is None
        else with_packed_strides(out)
    )
    return Call(decision, a, b, c, epilogue)


def _decide(
    op: str, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None, group: str, requested: str,
    epilogue: Epilogue,
) -> tuple[Decision, bool]:  # fmt: skip
    """Check and decide a call. The second value says whether the decision may be cached: the
    obstacles that keep a problem from being fused may change, other decisions hold until the next
    tuning or session."""
    require_operands(op, a, b, out, epilogue)
    if out is not None:
        require_no_overlap_with_operands(op, out, a, b, epilogue)
        check_layout(op, out)
    ranks = ranks_of(group)
    problem = checked_problem(op, a, b, ranks.world_size, out, epilogue)
    if isinstance(ranks, TwoLevels):
        part = OPERATORS[op].within(problem, ranks)
        unfused_gemm_strategy(requested, replace(part, op=op), a.device, ranks.node)
        agree(ranks, problem, requested)
        return Decision(problem, ranks, None), False
    unfused = unfused_gemm_strategy(requested, problem, a.device, ranks)
    agree(ranks, problem, unfused.name if unfused else requested)
    choice = None if unfused else choice_of(requested, problem, ranks)
    return Decision(problem, ranks, choice), unfused is None


def strategy_of(
    op: Any, a: torch.Tensor, b: torch.Tensor, group: Any = None, strategy: str = "auto",
    *, bias: torch.Tensor | None = None, scale_a: torch.Tensor | None = None,
    scale_b: torch.Tensor | None = None, out_dtype: torch.dtype | None = None,
) -> Strategy:  # fmt: skip
    """Return the strategy that a call would use, and the reason. Nothing is computed.

    Args:
        op: the operator, such as ``ops.matmul_reduce_scatter``, or its name.
        a, b, group, strategy, bias, scale_a, scale_b, out_dtype: arguments of the operator.

    Returns:
        The strategy; on several nodes, the one within a node.
    """
    name, ranks = operator_name("strategy_of", op, operators_of(Operator)), ranks_of(name_of(group))
    require_operands(name, a, b, None, Epilogue(bias, scale_a, scale_b, out_dtype))
    a, b, bias = as_autocast(a, b, bias)
    epilogue = Epilogue(bias, scale_a, scale_b, out_dtype)
    problem = checked_problem(name, a, b, ranks.world_size, None, epilogue)
    if isinstance(ranks, TwoLevels):
        problem, ranks = OPERATORS[name].within(problem, ranks), ranks.node
    return choose_strategy(strategy, problem, a.device, ranks, lookup(problem, ranks))
