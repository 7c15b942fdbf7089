"""All-reduce, residual and RMSNorm in one kernel, with optional quantization to fp8.

Contains the choice of a program, and the torch operator.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import ceil
from typing import Any

import torch
from tvm import tirx

from ...builtins.errors import brief_errors
from ...runtime.host.group import Group
from ..core import nccl
from ..core.agreement import agree
from ..core.autocast import widens
from ..core.call import Call, CallableOp, Decision, compute
from ..core.checks import require_dense
from ..core.compiled import shared_by_sizes, similar_sizes
from ..core.epilogue import FP8
from ..core.groups import TwoLevels, name_of, ranks_of
from ..core.library import define_pair, refuse_all_gradients
from ..core.noted import note
from ..core.registry import TableRow
from ..core.strategy import Strategy, first_possible, obstacle_of_ranks
from .kernels.all_reduce_rms_norm import (
    GROUP,
    GROUPED,
    local_program,
    one_shot_program,
    two_shot_program,
)
from .problem import (
    NAME,
    Inputs,
    NormProblem,
    check_memory,
    check_results,
    checked_problem,
    require_tensors,
)
from .reference import Results, copy_valid, normalized

ONE_SHOT, TWO_SHOT = OWN = ("one_shot", "two_shot")
ONE_SHOT_BYTES = 4 << 20
"""Most bytes that each rank sends in the one-shot program. Not measured here: vLLM uses the
one-shot kernel of FlashInfer on Hopper for 2 MiB with 4 ranks, which send 6 MiB each, and for 512
KiB with 8, which send 3.5 MiB."""


class AllReduceRmsNorm(CallableOp, op=NAME):
    """Compiled program of one problem and strategy."""

    arguments, reads, guarded_results = ("x", "residual", "weight"), Inputs._fields, 2
    row = TableRow(
        inputs="`x`, (..., H), bf16 or fp16: a partial sum on each rank; `residual`, like `x`, and "
        "`weight` and `bias`, (H,), equal on all ranks",
        result="the normalized rows of the sum of all `x` and the residual, in the type of `x` or "
        "fp8; the scales of `fp8_1x128`; that sum, the new residual",
        gradient="refused",
        memory="one-shot 2 W x T x H; two-shot 4 x T x H",
    )

    @classmethod
    def compiled_programs(cls, problem: NormProblem, choice: str) -> list[tirx.PrimFunc]:
        return [cls.program(problem, choice)]

    @classmethod
    def similar_programs(cls, problem: NormProblem, choice: str) -> list[tirx.PrimFunc]:
        numbers = similar_sizes(problem.tokens)
        return [cls.program(replace(problem, tokens=n), choice) for n in numbers]

    @staticmethod
    def program(problem: NormProblem, strategy: str) -> tirx.PrimFunc:
        """Return the tile program."""
        if problem.ranks == 1:
            make = local_program
        else:
            make = one_shot_program if strategy == ONE_SHOT else two_shot_program
        return shared_by_sizes(make(problem.config), problem, tokens=0)

    @staticmethod
    def fastest(problem: NormProblem) -> str:
        """Return the strategy of ``auto``. With two ranks, both programs send the same bytes."""
        sent = (problem.ranks - 1) * problem.nbytes
        return ONE_SHOT if problem.ranks <= 2 or sent <= ONE_SHOT_BYTES else TWO_SHOT

    @classmethod
    def decide(cls, call: Call) -> Decision:
        inputs, (eps, quant, group, requested) = Inputs(*call.inputs), call.options
        require_tensors(inputs, call.out, *call.results[:1])
        ranks = ranks_of(group)
        problem = checked_problem(inputs, eps, quant, ranks.world_size)
        strategy = cls.choose(problem, ranks, requested, inputs.x.device)
        if call.out is not None:
            results = results_of(call)
            check_results(inputs, quant, results.out, results.residual)
            check_memory(inputs, results.out, results.residual)
        return Decision(problem, ranks, strategy)

    @classmethod
    def choose(
        cls, problem: NormProblem, ranks: Group | TwoLevels, requested: str, device: torch.device
    ) -> str:
        node = ranks.node if isinstance(ranks, TwoLevels) else ranks
        strategy = first_possible(
            requested, NAME, device, node, OWN, (cls.fastest(problem),),
            lambda _: obstacle_of_ranks(device, ranks) or problem.obstacle(), Strategy,
        ).name  # fmt: skip
        agree(ranks, problem, requested if isinstance(ranks, TwoLevels) else strategy)
        return strategy

    @classmethod
    def check_memory(
        cls, inputs: Sequence[Any], out: torch.Tensor, results: Sequence[torch.Tensor | None]
    ) -> None:
        check_memory(inputs, out, results[0])

    @classmethod
    def with_results(cls, call: Call, problem: NormProblem) -> Call:
        out, *others = _completed(call.inputs[0], problem.quant)
        return call._replace(out=out, results=others)

    @classmethod
    def in_place_at(cls, decision: Decision, place: int, result: torch.Tensor) -> int | None:
        is_row = cls.reads[place] in ("x", "residual")
        return 0 if is_row and result.dtype == decision.problem.dtype else None

    @classmethod
    def compute_unfused(cls, call: Call, decision: Decision) -> torch.Tensor:
        """Compute the results by a collective, and torch on each rank."""
        inputs, results = Inputs(*call.inputs), results_of(call)
        problem, ranks = decision.problem, decision.group
        if isinstance(ranks, TwoLevels):
            transport = "nccl" if call.requested == "nccl" else "auto"
            total = torch.ops.tileweave.all_reduce(inputs.x, call.group, transport)
        else:
            total = inputs.x.clone(memory_format=torch.contiguous_format)
            nccl.all_reduce(total, ranks)
        residual = (inputs.residual.float() + total.float()).to(problem.dtype)
        computed = normalized(residual, inputs, problem.eps, problem.quant)
        for result, value in zip(results, computed, strict=True):
            if result is not None:
                copy_valid(value, result, inputs.num_tokens)
        return results.out


def results_of(call: Call) -> Results:
    """Return memory for the results of a call."""
    assert call.out is not None and call.results is not None
    residual, scales = call.results
    assert residual is not None
    return Results(call.out, residual, scales)


@brief_errors
def all_reduce_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    *,
    bias: torch.Tensor | None = None,
    quant: str | None = None,
    scale: torch.Tensor | None = None,
    num_tokens: torch.Tensor | None = None,
    group: Any = None,
    out: torch.Tensor | None = None,
    residual_out: torch.Tensor | None = None,
    strategy: str = "auto",
) -> tuple[torch.Tensor, ...]:
    """Sum x over ranks, add the residual, and normalize each row.

    The new residual is ``sum(x) + residual``, added in fp32 in the order residual, rank 0, rank 1,
    and so on, and rounded once. The rounded residual is normalized in fp32, rounded to the type of
    x, and quantized. All ranks receive the same bits; docs/guides/decode.md has the rules.

    Every rank calls it with the same shapes, and with equal ``residual``, ``weight``, ``bias``,
    ``scale`` and ``num_tokens``. The first call with new shapes compiles, collectively. There is no
    gradient.

    Args:
        x: (..., hidden), bf16 or fp16; with ``nccl`` any floating-point type that it adds.
        residual, weight: of the shape of x, and (hidden,); in the type of x.
        eps: added to the mean square.
        bias: (hidden,), in the type of x; added after the multiplication with ``weight``.
        quant: None; ``fp8``: divide by the given ``scale``; ``fp8_1x128``: each 128 columns of a
            row have a scale, their largest absolute value / 448.
        scale: one float32, for ``fp8`` only.
        num_tokens: one int32 on the device of x, equal on all ranks: the number of valid rows, at
            most all. The kernels neither read nor send nor await the other rows. Their results keep
            the values of ``out`` and ``residual_out``, or are undefined in new tensors. The number
            may change between replays of a CUDA graph.
        group: see ``all_gather_matmul``.
        out, residual_out: contiguous tensors for the results. Each may be x or residual, if it has
            the same type; otherwise they overlap no argument.
        strategy: ``one_shot``: ranks send rows to all; ``two_shot``: to owners, which send the
            sums; ``nccl``: ``torch.distributed``, then torch; or ``auto``.

    Returns:
        ``(out, residual_out)``, or ``(out, scales, residual_out)`` for ``fp8_1x128``. ``out`` is of
        the type of x or float8_e4m3fn; ``scales`` is (..., ceil(hidden / 128)) float32.

    Raises:
        TileWeaveError: arguments do not fit, or differ between ranks. Nothing is launched.
        HeapExhausted: the symmetric heap is too small.
    """
    inputs = x, residual, weight, bias, scale, num_tokens
    options = eps, quant, "" if group is None else name_of(group), strategy
    if out is None and residual_out is None:
        out, residual_out, *scales = _into_new(*inputs, *options)
        return out, *scales, residual_out
    results = _completed(x, quant, out, residual_out)
    _into_out(*inputs, *results, *options)
    if results.scales is None:
        return results.out, results.residual
    return results.out, results.scales, results.residual


def _completed(
    x: torch.Tensor, quant: str | None, out: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
) -> Results:  # fmt: skip
    """Return memory for the results of a call, which need not be legal: the given one, or new."""
    if out is None or residual is None or quant == GROUPED:
        require_dense(NAME, x=x)
    if out is None:
        out = x.new_empty(x.shape, dtype=x.dtype if quant is None else FP8)
    if residual is None:
        residual = x.new_empty(x.shape)
    if quant != GROUPED:
        return Results(out, residual)
    scales = x.new_empty((*x.shape[:-1], ceil(x.shape[-1] / GROUP)), dtype=torch.float32)
    return Results(out, residual, scales)


def _computed(inputs, results, options, recorded=None):
    out, *others = (None,) if results is None else results
    return compute(NAME, inputs, out, options, others, recorded=recorded)


def _fake(inputs, results, options):
    inputs, (eps, quant, group, requested) = Inputs(*inputs), options
    problem = checked_problem(inputs, eps, quant, ranks_of(group).world_size)
    note(problem, group, requested, inputs.x.device)
    if results is None:
        return [result for result in _completed(inputs.x, quant) if result is not None]
    return check_results(inputs, quant, *results[:2])


def _check(inputs, results, _):
    out, residual_out, _ = results or (None,) * 3
    require_tensors(Inputs(*inputs), out, residual_out)
    inputs = Inputs(*inputs[:5])._asdict()
    refuse_all_gradients(NAME, **inputs, out=out, residual_out=residual_out)


_into_new, _into_out = define_pair(
    NAME,
    "Tensor x, Tensor residual, Tensor weight, Tensor? bias, Tensor? scale, Tensor? num_tokens",
    "float eps, str? quant, str group, str strategy", _computed, _fake, _check,
    written="Tensor(a!) out, Tensor(b!) residual_out, Tensor(c!)? scales", returns="Tensor[]",
    casts=widens("x", "residual", "weight", "bias"),
)  # fmt: skip
