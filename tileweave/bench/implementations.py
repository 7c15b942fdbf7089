"""Implementations of GEMM operators in ``tileweave bench``: ours, its parts, and alternatives."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from textwrap import shorten
from typing import Any

import torch
from torch import Tensor

from .. import ops
from ..ops.autotune.trial import Trial
from ..ops.core import nccl
from ..ops.core.problem import Problem
from ..ops.core.tiles import tiles_for
from ..runtime import Plan, SymmetricTensor, barrier, compile
from ..runtime.host.group import Group
from .programs import all_gather_plan, matmul_program

OPERATORS = {
    "all_gather_matmul": ops.all_gather_matmul,
    "matmul_reduce_scatter": ops.matmul_reduce_scatter,
    "matmul_all_reduce": ops.matmul_all_reduce,
}
OURS, NCCL, ASYNC_TP = "ours", "nccl", "async_tp"
PRODUCT, EXCHANGE, TRANSPORT = "product/", "exchange/", "transport/"
"""Prefixes of names: one half of the operator, or our collective by one transport."""
LOCAL = "local"
SDPA, GATHER, RING = "sdpa/", "gather/", "ring/"
"""Names of attention: ours on one rank without communication, and prefixes of PyTorch's: on one
rank, after an all-gather, and as ring attention."""


class Missing(Exception):
    """Reason why an implementation is missing."""


def relative_error(result: Tensor, expected: Tensor) -> Tensor:
    """Return the relative error in the Frobenius norm."""
    return (result.float() - expected).norm() / expected.norm()


@dataclass(frozen=True)
class Inputs:
    """Operands of one rank, and the expected results.

    Attributes:
        a, b: the operator's operands.
        rows: first operand of the product, (M, K): the rows of all ranks, or a.
        product: ``rows @ b``, (M, N), in fp32.
        part: ``product`` in the operands' type.
        result: expected result of the operator, in fp32.
    """

    a: Tensor
    b: Tensor
    rows: Tensor
    product: Tensor
    part: Tensor
    result: Tensor

    @staticmethod
    def random(trial: Trial) -> Inputs:
        """Create new inputs. Collective."""
        a, b = trial.inputs()
        rows = trial.rows_of(a)
        product = rows.float() @ b.float()
        part = product.to(a.dtype)
        result = product if trial.problem.gathers else trial.sum_of(product.clone())
        return Inputs(a, b, rows, product, part, result)


@dataclass(frozen=True)
class Implementation:
    """Implementation of a case or of a part of it.

    Attributes:
        call: function that is timed; on a GPU it enqueues on torch's current stream.
        right: returns the expected result from the inputs.
        found: returns the actual result from what ``call`` returned.
        prepare: runs before each call, untimed.
        error: returns the error of a result against the expected one.
    """

    call: Callable[[Any], Any]
    right: Callable[[Any], Tensor] = lambda inputs: inputs.result
    found: Callable[[Any], Tensor] = lambda returned: returned
    prepare: Callable[[Any], Any] = lambda inputs: None
    error: Callable[[Tensor, Tensor], Tensor] = relative_error


@dataclass
class Buffers:
    """Problem with the memory in which the implementations compute it.

    Attributes:
        gathered: symmetric memory for the rows of all ranks; None if it does not fit.
        result: memory of an operator's result.
        product: memory of one rank's product.
    """

    problem: Problem
    group: Group
    gathered: SymmetricTensor | None
    result: Tensor
    product: Tensor = field(init=False)

    def __post_init__(self) -> None:
        shape = self.problem.M, self.problem.N
        self.product = self.result if self.problem.gathers else self.result.new_empty(shape)

    def close(self) -> None:
        """Free nothing: the case allocates no symmetric memory of its own."""

    def into(self, memory: Tensor, call: Callable[[Inputs], Any]) -> Implementation:
        """Return the implementation of a call that writes its result to ``memory``, which is filled
        with NaN before."""
        right = "product" if memory is self.product else "result"
        return Implementation(
            call,
            right=lambda inputs: getattr(inputs, right),
            found=lambda _: memory,
            prepare=lambda _: memory.fill_(torch.nan),
        )


def _operator(buffers: Buffers, strategy: str) -> Implementation:
    operator = OPERATORS[buffers.problem.op]
    return buffers.into(
        buffers.result,
        lambda inputs: operator(inputs.a, inputs.b, out=buffers.result, strategy=strategy),
    )


def _cublas(buffers: Buffers) -> Implementation:
    return buffers.into(
        buffers.product, lambda inputs: torch.mm(inputs.rows, inputs.b, out=buffers.product)
    )


def _tilelang(buffers: Buffers) -> Implementation:
    if buffers.group.device.type != "cuda":
        raise Missing("there is no GPU")
    kernel = compile(product_program(buffers.problem))
    stored = buffers.problem.stored
    return buffers.into(
        buffers.product, lambda inputs: kernel(inputs.rows, stored(inputs.b), buffers.product)
    )


def product_program(problem: Problem) -> Any:
    """Return the program of one rank's product."""
    M, N, K = problem.M, problem.N, problem.K
    return matmul_program(M, N, K, problem.tile_dtype, problem.transposed, tiles_for(M, N, 1))


def _nccl_exchange(buffers: Buffers) -> Implementation:
    problem, group, result = buffers.problem, buffers.group, buffers.result
    if problem.gathers:
        return Implementation(
            lambda inputs: nccl.all_gather(inputs.a, group), lambda inputs: inputs.rows
        )
    if problem.scatters:
        return buffers.into(result, lambda inputs: nccl.reduce_scatter(inputs.part, result, group))
    return Implementation(
        lambda inputs: nccl.all_reduce(result, group),
        found=lambda _: result,
        prepare=lambda inputs: result.copy_(inputs.part),
    )


def _copies(buffers: Buffers) -> Implementation:
    problem = buffers.problem
    if not problem.gathers:
        raise Missing("copy engines do not add")
    return by_copies(
        buffers.gathered, buffers.group, all_gather_plan, problem.rows_per_rank * problem.K,
        sent=lambda inputs: inputs.a.view(-1), right=lambda inputs: inputs.rows.view(-1),
    )  # fmt: skip


def by_copies(
    room: SymmetricTensor | None,
    group: Group,
    plan_of: Callable[[int, int, str], Plan],
    elements: int,
    sent: Callable[[Any], Tensor],
    right: Callable[[Any], Tensor],
) -> Implementation:
    """Return an implementation that only copies, to the first elements of ``room``.

    Args:
        plan_of: creates the plan from the elements that a rank sends to a rank, the number of
            ranks, and TileLang's name of the type.
        sent: returns what is sent, from the inputs.
        right: returns the expected result from the inputs, flat.
    """
    ranks = group.world_size
    if ranks == 1:
        raise Missing("there is one rank")
    if room is None:
        raise Missing("there is no symmetric heap, or it has no room")
    everyones = room.all[:, : ranks * elements].unflatten(1, (ranks, elements))
    own = everyones[group.rank]
    plan = plan_of(elements, ranks, str(own.dtype).removeprefix("torch."))

    def found(_: Any) -> Tensor:
        barrier()  # a rank's call ends when it has sent, not when it has received
        return own.view(-1)

    return Implementation(
        lambda inputs: plan(sent(inputs), everyones), right, found, lambda _: own.fill_(torch.nan)
    )


def _async_tp(buffers: Buffers) -> Implementation:
    """Return PyTorch's async-TP, which overlaps copies and cuBLAS."""
    problem, group = buffers.problem, buffers.group
    if group.device.type != "cuda":
        raise Missing("there is no GPU")
    if group.process_group is None or group.world_size == 1:
        raise Missing("there is one rank")
    if not (problem.gathers or problem.scatters):
        raise Missing("PyTorch has none for matmul_all_reduce")
    import torch.distributed._symmetric_memory  # declares torch.ops.symm_mem

    name = group.process_group.group_name
    try:
        gather = torch.ops.symm_mem.fused_all_gather_matmul
        scatter = torch.ops.symm_mem.fused_matmul_reduce_scatter
    except AttributeError as error:
        raise Missing(str(error)) from None
    if problem.gathers:
        # With return_A torch never gathers by NVLink multicast, which our operators do not use.
        return Implementation(
            lambda inputs: gather(inputs.a, [inputs.b], 0, name, return_A=True),
            found=lambda returned: returned[1][0],
        )
    return Implementation(lambda inputs: scatter(inputs.a, inputs.b, "sum", 0, name))


MAKERS: dict[str, Callable[[Buffers], Implementation]] = {
    OURS: partial(_operator, strategy="auto"),
    f"{PRODUCT}cublas": _cublas,
    f"{PRODUCT}tilelang": _tilelang,
    f"{EXCHANGE}nccl": _nccl_exchange,
    f"{EXCHANGE}copies": _copies,
    NCCL: partial(_operator, strategy="nccl"),
    ASYNC_TP: _async_tp,
}
NEEDED = {OURS, f"{PRODUCT}cublas", f"{EXCHANGE}nccl", NCCL}
"""Implementations whose errors are raised; the others may be missing."""


def implementations_of(
    buffers: Any,
    inputs: Any,
    tries: int,
    makers: Mapping[str, Callable[[Any], Implementation]] = MAKERS,
) -> tuple[dict[str, Implementation], dict[str, str]]:
    """Return the implementations by name, each called ``tries`` times, and why the others are
    missing, by name. Collective; all ranks agree."""
    implementations: dict[str, Implementation] = {}
    missing: dict[str, str] = {}
    for name, make in makers.items():
        reason = ""
        try:
            implementation = make(buffers)
            for _ in range(tries):
                implementation.prepare(inputs)
                implementation.found(implementation.call(inputs))
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

    def __call__(self, name: str, inputs: Inputs, returned: Any) -> None:
        implementation = self.implementations[name]
        error = implementation.error(implementation.found(returned), implementation.right(inputs))
        error = error.nan_to_num(nan=torch.inf, posinf=torch.inf)
        self._errors[name] = torch.maximum(self._errors.get(name, error), error)

    @property
    def errors(self) -> dict[str, float]:
        """Largest error by name; infinite if a result contains NaN."""
        return {name: error.item() for name, error in self._errors.items()}
