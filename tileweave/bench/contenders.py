"""What ``tileweave bench`` measures: operators, what they are made of, and what else there is."""

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
"""How the names of those begin that do one half alone, or are ours by one transport."""
LOCAL = "local"
SDPA, GATHER, RING = "sdpa/", "gather/", "ring/"
"""Of attention: ours alone on a rank, and how the names of PyTorch's begin, alone on a rank, behind
an all-gather, and with keys and values that go round."""


class Missing(Exception):
    """Why a contender does not take part."""


def relative_error(found: Tensor, right: Tensor) -> Tensor:
    """In the Frobenius norm."""
    return (found.float() - right).norm() / right.norm()


@dataclass(frozen=True)
class Inputs:
    """One rank's operands of one problem, and what is right.

    Attributes:
        a, b: the operator's operands.
        rows: what is multiplied by b, (M, K): the rows of all ranks, or a.
        product: rows times b, (M, N), in fp32.
        part: the same in the operands' type.
        result: of the operator, in fp32.
    """

    a: Tensor
    b: Tensor
    rows: Tensor
    product: Tensor
    part: Tensor
    result: Tensor

    @staticmethod
    def random(trial: Trial) -> Inputs:
        """Fresh ones. Collective."""
        a, b = trial.inputs()
        rows = trial.rows_of(a)
        product = rows.float() @ b.float()
        part = product.to(a.dtype)
        result = product if trial.problem.gathers else trial.sum_of(product.clone())
        return Inputs(a, b, rows, product, part, result)


@dataclass(frozen=True)
class Implementation:
    """One way to do it, or half of it.

    Attributes:
        call: what is timed; on a GPU it enqueues on torch's current stream.
        right: what should come out, of the inputs.
        found: what came out, of what ``call`` returned.
        prepare: comes before each call, untimed.
        error: how far from right what was found is.
    """

    call: Callable[[Any], Any]
    right: Callable[[Any], Tensor] = lambda given: given.result
    found: Callable[[Any], Tensor] = lambda returned: returned
    prepare: Callable[[Any], Any] = lambda given: None
    error: Callable[[Tensor, Tensor], Tensor] = relative_error


@dataclass
class Buffers:
    """One problem, and the memory in which contenders compute it.

    Attributes:
        gathered: room for the rows of all ranks, on each; None if there is none.
        result: of an operator.
        product: of one rank.
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
        """Nothing was made for this problem alone."""

    def into(self, memory: Tensor, call: Callable[[Inputs], Any]) -> Implementation:
        """What writes its result there, which holds no number before."""
        right = "product" if memory is self.product else "result"
        return Implementation(
            call,
            right=lambda given: getattr(given, right),
            found=lambda _: memory,
            prepare=lambda _: memory.fill_(torch.nan),
        )


def _operator(arena: Buffers, strategy: str) -> Implementation:
    operator = OPERATORS[arena.problem.op]
    return arena.into(
        arena.result, lambda given: operator(given.a, given.b, out=arena.result, strategy=strategy)
    )


def _cublas(arena: Buffers) -> Implementation:
    return arena.into(arena.product, lambda given: torch.mm(given.rows, given.b, out=arena.product))


def _tilelang(arena: Buffers) -> Implementation:
    if arena.group.device.type != "cuda":
        raise Missing("there is no GPU")
    kernel = compile(product_program(arena.problem))
    stored = arena.problem.stored
    return arena.into(
        arena.product, lambda given: kernel(given.rows, stored(given.b), arena.product)
    )


def product_program(problem: Problem) -> Any:
    """Of what one rank multiplies."""
    M, N, K = problem.M, problem.N, problem.K
    return matmul_program(M, N, K, problem.tile_dtype, problem.transposed, tiles_for(M, N, 1))


def _nccl_exchange(arena: Buffers) -> Implementation:
    problem, group, result = arena.problem, arena.group, arena.result
    if problem.gathers:
        return Implementation(
            lambda given: nccl.all_gather(given.a, group), lambda given: given.rows
        )
    if problem.scatters:
        return arena.into(result, lambda given: nccl.reduce_scatter(given.part, result, group))
    return Implementation(
        lambda given: nccl.all_reduce(result, group),
        found=lambda _: result,
        prepare=lambda given: result.copy_(given.part),
    )


def _copies(arena: Buffers) -> Implementation:
    problem = arena.problem
    if not problem.gathers:
        raise Missing("copy engines do not add")
    return by_copies(
        arena.gathered, arena.group, all_gather_plan, problem.rows_per_rank * problem.K,
        given=lambda inputs: inputs.a.view(-1), right=lambda inputs: inputs.rows.view(-1),
    )  # fmt: skip


def by_copies(
    room: SymmetricTensor | None,
    group: Group,
    plan_of: Callable[[int, int, str], Plan],
    elements: int,
    given: Callable[[Any], Tensor],
    right: Callable[[Any], Tensor],
) -> Implementation:
    """Copies alone, to where the first elements of ``room`` are.

    Args:
        plan_of: of so many elements of each rank for each, ranks, and TileLang's name of the type.
        given: what is sent, of the inputs.
        right: what should come out, flat.
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
        barrier()  # a rank's call is over when it has sent, not when it has got
        return own.view(-1)

    return Implementation(
        lambda inputs: plan(given(inputs), everyones), right, found, lambda _: own.fill_(torch.nan)
    )


def _async_tp(arena: Buffers) -> Implementation:
    """PyTorch's own overlap of copies and cuBLAS."""
    problem, group = arena.problem, arena.group
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
        # Asked for the rows, too, torch never gathers by NVLink multicast, which we leave alone.
        return Implementation(
            lambda given: gather(given.a, [given.b], 0, name, return_A=True),
            found=lambda returned: returned[1][0],
        )
    return Implementation(lambda given: scatter(given.a, given.b, "sum", 0, name))


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
"""Those that raise what they raise; the others need not take part."""


def contenders_of(
    arena: Any,
    inputs: Any,
    tries: int,
    makers: Mapping[str, Callable[[Any], Implementation]] = MAKERS,
) -> tuple[dict[str, Implementation], dict[str, str]]:
    """Those that take part, each called ``tries`` times, and why the others do not, by name.
    Collective; all ranks agree."""
    found: dict[str, Implementation] = {}
    why: dict[str, str] = {}
    for name, make in makers.items():
        reason = ""
        try:
            contender = make(arena)
            for _ in range(tries):
                contender.prepare(inputs)
                contender.found(contender.call(inputs))
            arena.group.synchronize()
            found[name] = contender
        except Missing as error:
            reason = str(error)
        except Exception as error:
            if name in NEEDED:
                raise
            reason = shorten(f"{type(error).__name__}: {error}", 300)
        said = arena.group.exchange("bench", reason)
        if any(said):
            found.pop(name, None)
            why[name] = next(reason for reason in said if reason)
    return found, why


class Checker:
    """Compares what contenders return with what is right."""

    def __init__(self, contenders: Mapping[str, Implementation]) -> None:
        self.contenders = contenders
        self._errors: dict[str, Tensor] = {}

    def __call__(self, name: str, given: Inputs, returned: Any) -> None:
        contender = self.contenders[name]
        error = contender.error(contender.found(returned), contender.right(given))
        error = error.nan_to_num(nan=torch.inf, posinf=torch.inf)
        self._errors[name] = torch.maximum(self._errors.get(name, error), error)

    @property
    def errors(self) -> dict[str, float]:
        """Of each contender the largest; infinite where some element was no number."""
        return {name: error.item() for name, error in self._errors.items()}
