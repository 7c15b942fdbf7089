"""Base class and calls of collectives: each rank passes one tensor and receives one."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, TypeAlias

import torch

from ...builtins.errors import brief_errors
from ...runtime import Plan
from ...runtime.host.group import Group
from ...runtime.host.session import Session
from ..core import nccl
from ..core.across_nodes import Mesh, readable, writable
from ..core.agreement import agree
from ..core.call import Call, CallableOp, Decision, compute
from ..core.checks import (
    check_layout,
    operator_name,
    refused,
    require_dense,
    require_dense_or_none,
    require_no_overlap,
    shares_memory,
)
from ..core.collective_problem import ARGUMENT, CollectiveProblem, Shape, check_out
from ..core.compiled import shared_by_sizes, similar_sizes
from ..core.groups import TwoLevels, name_of, ranks_of
from ..core.library import define_pair, refuse_gradients
from ..core.noted import note
from ..core.registry import OPERATORS, operators_of
from .transport import OWN, Transport, choose_transport

Move: TypeAlias = Callable[..., None]
"""Function ``(collective, x, out, *options)``: all ranks of a node compute ``out`` by a
collective."""


class Collective(CallableOp):
    """Collective compiled for one problem and one transport.

    Attributes:
        options: names of the integer arguments besides the tensor.
        options_format: text of the values of ``options`` in errors.
        dtypes: types of the values with which the programs compute; None if they move bytes.
        in_place: whether the result may be in the memory of the input, as in NCCL: the same tensor
            or, if one is larger, this rank's part of it. A block reads there before it writes. The
            input is copied if they overlap elsewhere.
        adds: whether values of the ranks are added.
        reference_in_place: whether ``reference`` computes in the memory of the result, which then
            holds the input.
        copy_engine_min_ranks: least number of ranks for which copy engines are the fastest
            transport of large tensors; None if they are not the fastest for any, and ``steps`` has
            no program for them.
        across: function ``(move, x, out, mesh, *options)`` that computes ``out`` on the ranks of
            several nodes, where ``move`` calls a collective of the ranks of a node. None: the group
            of all ranks makes the call, as any other group on several nodes.
        ll_bytes: most bytes of a rank's input that words with flags serve, see ``LL_BYTES``; 0 if
            the collective has no such program.
    """

    arguments = reads = (ARGUMENT,)
    options: ClassVar[tuple[str, ...]] = ()
    options_format: ClassVar[str] = ""
    dtypes: ClassVar[tuple[torch.dtype, ...] | None] = None
    in_place: ClassVar[bool] = True
    adds: ClassVar[bool] = False
    reference_in_place: ClassVar[bool] = False
    copy_engine_min_ranks: ClassVar[int | None] = None
    across: ClassVar[Callable[..., None] | None] = None
    ll_bytes: ClassVar[int] = 0

    def __init__(self, problem: CollectiveProblem, transport: str, session: Session) -> None:
        """Compile, and allocate symmetric memory. Collective."""
        super().__init__(problem, transport, session)
        self.problem = problem

    @classmethod
    def compiled_programs(cls, problem: CollectiveProblem, choice: str) -> list[Any]:
        steps = cls.steps(problem, choice)
        return [shared_by_sizes(steps, problem, shape=(), result=())]

    @classmethod
    def similar_programs(cls, problem: CollectiveProblem, choice: str) -> list[Any]:
        others = cls._similar(problem, choice)
        return [program for other in others for program in cls.compiled_programs(other, choice)]

    @classmethod
    def _similar(cls, problem: CollectiveProblem, transport: str) -> Iterator[CollectiveProblem]:
        """Yield problems of other sizes."""
        if not problem.shape:
            return
        extent, *others = problem.shape
        unit = 1 if extent % problem.ranks else problem.ranks
        for other_extent in similar_sizes(extent, unit):
            shape = other_extent, *others
            x = torch.empty(shape, dtype=problem.dtype, device="meta")
            result, _ = cls.result(x, problem.ranks, *problem.options)
            other = replace(problem, shape=shape, result=result)
            if cls.obstacle(other, transport) is None:
                yield other

    @staticmethod
    @abstractmethod
    def result(x: torch.Tensor, ranks: int, *options: int) -> tuple[Shape, Shape]:
        """Return the shape of the result, and ``options`` in canonical form.

        Raises:
            TileWeaveError: x or options do not fit.
        """

    @staticmethod
    @abstractmethod
    def steps(problem: CollectiveProblem, transport: str) -> Any:
        """Return the plan or the tile program of a transport."""

    @classmethod
    def transports(cls) -> list[str]:
        """Return the transports of ``OWN`` for which ``steps`` has a program. Each collective has
        ``ldst``."""
        served = {"copy_engine": cls.copy_engine_min_ranks, "ldst": True, "ll": cls.ll_bytes}
        return [name for name in OWN if served[name]]

    @classmethod
    def obstacle(cls, problem: CollectiveProblem, transport: str) -> str | None:
        """Return why a transport cannot serve a problem on any GPU, with what is expected; else
        None."""
        if cls.dtypes is not None and problem.dtype not in cls.dtypes:
            return f"x is of {problem.dtype}; expected {', '.join(map(str, cls.dtypes))}"
        if transport not in (legal := cls.transports()):
            expected = ", ".join(map(repr, [*legal, "nccl"]))
            return f"{cls.op} has no program by {OWN[transport]}; expected {expected}"
        if transport == "ll" and (reason := cls._ll_obstacle(problem)):
            return reason
        return None

    @classmethod
    def _ll_obstacle(cls, problem: CollectiveProblem) -> str | None:
        if problem.ranks == 1:
            return "there is one rank, which exchanges nothing; expected 2 or more"
        if problem.nbytes > cls.ll_bytes:
            return f"x has {problem.nbytes} bytes; expected at most {cls.ll_bytes}"
        return None

    @staticmethod
    @abstractmethod
    def reference(x: torch.Tensor, out: torch.Tensor, group: Group, *options: int) -> None:
        """Call the function of ``torch.distributed``; both tensors are contiguous, and the same one
        if ``reference_in_place``."""

    @classmethod
    def unfused(cls, x: torch.Tensor, out: torch.Tensor, group: Group, *options: int) -> None:
        """Compute ``out`` by ``torch.distributed``, on any device."""
        cls.reference(out.copy_(x) if cls.reference_in_place else x, out, group, *options)

    @staticmethod
    def within(
        problem: CollectiveProblem, ranks: TwoLevels
    ) -> tuple[type[Collective], Shape, tuple[int, ...]]:
        """Return one of the calls within the node that ``across`` makes: the collective, the shape
        of its input, and its options. A transport serves all of them if it serves this one."""
        raise NotImplementedError

    @staticmethod
    def in_node(ranks: TwoLevels, transport: str) -> Move:
        """Return the function that calls collectives of the ranks of this node, on tensors of any
        alignment."""

        def move(collective: type[Collective], x: torch.Tensor, out: torch.Tensor, *options: int):
            with writable(out) as memory:
                arguments = *options, ranks.node_name, transport
                compute(collective.op, (readable(x),), memory, arguments)

        return move

    @classmethod
    def decide(cls, call: Call) -> Decision:
        (x,), out = call.inputs, call.out
        _require_dense(cls.op, x, out)
        *options, group, requested = call.options
        ranks = _ranks_of(cls, group)
        problem = checked_problem(cls.op, x, out, ranks.world_size, options)
        if out is not None:
            cls.check_memory(call.inputs, out, ())
            check_layout(cls.op, out)
        return Decision(problem, ranks, cls.choose(problem, ranks, requested, x.device))

    @classmethod
    def choose(
        cls, problem: CollectiveProblem, ranks: Group | TwoLevels, requested: str,
        device: torch.device,
    ) -> str:  # fmt: skip
        transport = transport_within(requested, problem, device, ranks).name
        agree(ranks, problem, transport)
        return transport

    @classmethod
    def check_memory(
        cls, inputs: Sequence[Any], out: torch.Tensor, results: Sequence[torch.Tensor | None]
    ) -> None:
        if not cls.in_place:
            require_no_overlap(cls.op, out, **{ARGUMENT: inputs[0]})

    @classmethod
    def empty(cls, call: Call, problem: CollectiveProblem) -> torch.Tensor:
        return call.inputs[0].new_empty(problem.result)

    @classmethod
    def prepared(
        cls, call: Call, decision: Decision
    ) -> tuple[Sequence[torch.Tensor], torch.Tensor]:
        (x,), out = super().prepared(call, decision)
        if call.out is not None and overwrites(decision.problem, decision.group.rank, x, out):
            x = x.clone()
        return (x,), out

    @classmethod
    def compute_unfused(cls, call: Call, decision: Decision) -> torch.Tensor:
        (x,), out = cls.prepared(call, decision)
        ranks, options = decision.group, decision.problem.options
        if not isinstance(ranks, TwoLevels):
            cls.unfused(x, out, ranks, *options)
            return out
        assert cls.across is not None
        with Mesh.of(cls.op, ranks, x.device) as mesh:
            cls.across(cls.in_node(ranks, decision.choice), x, out, mesh, *options)
        return out

    @classmethod
    def in_place_at(cls, decision: Decision, place: int, result: torch.Tensor) -> int | None:
        return _in_place(decision.problem, decision.group.rank)

    @staticmethod
    @abstractmethod
    def expected(inputs: torch.Tensor, rank: int, *options: int) -> torch.Tensor:
        """Return the result of a rank by definition, from the inputs of all ranks, (ranks, *shape).
        The benchmark compares results with it."""

    @staticmethod
    @abstractmethod
    def gradient(grad: torch.Tensor, group: str, transport: str, *options: int) -> torch.Tensor:
        """Return the gradient of the input, given that of the result."""

    @staticmethod
    def copies(elements: int, ranks: int, dtype: str, *options: int) -> Plan | None:
        """Return the plan that only copies the inputs to all receivers, without a kernel; None if
        copies alone do not compute the collective.

        It writes A to the symmetric tensor ``received`` (ranks, elements) of each receiver. A call
        ends when the rank has sent, no matter what has arrived.
        """
        return None

    @staticmethod
    def sent_bytes(nbytes: int, ranks: int) -> int:
        """Return the bytes that each rank sends for an input of ``nbytes``, as NCCL counts them for
        its bus bandwidth: the amount of an algorithm without in-network reduction."""
        return nbytes * (ranks - 1) // ranks

    @staticmethod
    @abstractmethod
    def symmetric_inputs(problem: CollectiveProblem) -> tuple[int, int]:
        """Return the symmetric memory by copy engines, 0 without a program for them, and by SMs, in
        units of a rank's input, without counters and tails."""

    @classmethod
    def symmetric_bytes(cls, problem: CollectiveProblem, transport: str) -> int:
        """Return the symmetric memory of a transport on each rank, without counters and tails."""
        engines, tiles = cls.symmetric_inputs(problem)
        inputs = {"copy_engine": engines, "ll": 2 * tiles}  # a word has as many bytes of flag
        return problem.nbytes * inputs.get(transport, tiles)


def sum_of(inputs: torch.Tensor) -> torch.Tensor:
    """Return the sum of the inputs of all ranks, added at least in fp32."""
    return inputs.sum(0, dtype=torch.promote_types(inputs.dtype, torch.float32)).to(inputs.dtype)


@brief_errors
def transport_of(
    op: Any, x: torch.Tensor, *options: int, group: Any = None, transport: str = "auto"
) -> Transport:
    """Return the transport that a call would use, and the reason. Nothing is moved.

    Args:
        op: the operator, such as ``ops.all_gather``, or its name.
        x, options, group, transport: arguments of the operator.

    Returns:
        The transport; on several nodes, the one within a node.
    """
    name = operator_name("transport_of", op, operators_of(Collective))
    require_dense(name, **{ARGUMENT: x})
    names = OPERATORS[name].options
    options = options or (0,) * len(names)
    if len(options) != len(names):
        raise refused(name, f"options={options}", f"({', '.join(names)})" if names else "none")
    ranks = _ranks_of(OPERATORS[name], name_of(group))
    problem = checked_problem(name, x, None, ranks.world_size, options)
    return transport_within(transport, problem, x.device, ranks)


def _ranks_of(collective: type[Collective], group: str) -> Group | TwoLevels:
    """Return the ranks that call a collective."""
    ranks = ranks_of(group)
    if isinstance(ranks, TwoLevels) and collective.across is None:
        return ranks.all_ranks
    return ranks


def transport_within(
    requested: str, problem: CollectiveProblem, device: torch.device, ranks: Group | TwoLevels,
    caller: str | None = None,
) -> Transport:  # fmt: skip
    """Return the transport of a checked call; on several nodes, the one within a node.

    Args:
        caller: operator that errors name; None for that of the problem.
    """
    name = caller or problem.op
    collective = OPERATORS[problem.op]
    if isinstance(ranks, TwoLevels):
        collective, shape, options = collective.within(problem, ranks)
        part = torch.empty(shape, dtype=problem.dtype, device="meta")
        ranks = ranks.node
        problem = checked_problem(collective.op, part, None, ranks.world_size, options)
    return choose_transport(requested, replace(problem, op=name), device, ranks, collective)


def checked_problem(
    op: str, x: torch.Tensor, out: torch.Tensor | None, ranks: int, options: Sequence[int]
) -> CollectiveProblem:
    """Return the problem of a call.

    Raises:
        TileWeaveError: shapes, types or devices do not fit.
    """
    collective = OPERATORS[op]
    result, options = collective.result(x, ranks, *options)
    if collective.adds and x.dtype not in nccl.ADDED:
        legal = "a type that torch.distributed adds, such as torch.bfloat16"
        raise refused(op, f"{ARGUMENT} is of {x.dtype}", legal)
    if out is not None:
        check_out(op, out, result, x)
    return CollectiveProblem(op, tuple(x.shape), tuple(result), tuple(options), ranks, x.dtype)


def _in_place(problem: CollectiveProblem, rank: int) -> int | None:
    """Return the byte of the result at which the input may begin; None if they must not overlap."""
    if not OPERATORS[problem.op].in_place:
        return None
    if problem.nbytes < problem.result_nbytes:
        return rank * problem.nbytes
    return -rank * problem.result_nbytes if problem.nbytes > problem.result_nbytes else 0


def overwrites(problem: CollectiveProblem, rank: int, x: torch.Tensor, out: torch.Tensor) -> bool:
    """Return whether the result overlaps the input, and the collective is not called in place: a
    rank would overwrite what it still sends."""
    return shares_memory(out, x) and x.data_ptr() - out.data_ptr() != _in_place(problem, rank)


def _require_dense(name: str, x: Any, out: Any) -> None:
    require_dense(name, **{ARGUMENT: x})
    require_dense_or_none(name, out=out)


def define_collective(collective: type[Collective]) -> None:
    """Register a collective as ``torch.ops.tileweave.name``, and as ``name_out``, which has no
    gradient."""
    name = collective.op

    def fake(inputs, out, arguments):
        (x,), (*options, group, requested) = inputs, arguments
        problem = checked_problem(name, x, out, ranks_of(group).world_size, options)
        note(problem, group, requested, x.device)
        return x.new_empty(problem.result) if out is None else None

    def check(inputs, out, _):
        _require_dense(name, *inputs, out)
        if out is not None:
            refuse_gradients(name, out, *inputs)

    def save(ctx: Any, inputs: tuple, output: torch.Tensor) -> None:
        _, *ctx.options, ctx.group, ctx.transport = inputs

    def gradients(ctx: Any, grad: torch.Tensor) -> tuple:
        grad_x = collective.gradient(grad.contiguous(), ctx.group, ctx.transport, *ctx.options)
        return grad_x, *(None for _ in ctx.options), None, None

    options = "".join(f"int {option}, " for option in collective.options)
    define_pair(
        name, "Tensor x", f"{options}str group, str transport", partial(compute, name),
        fake, check, gradient=(save, gradients),
    )  # fmt: skip
