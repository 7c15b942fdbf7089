"""Strategies of GEMM operators: which one a call uses, and the measurement for ``auto``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from ...builtins.errors import TileWeaveError, brief_errors
from ...runtime.host import group_argument
from ..autotune.store import lookup
from ..autotune.trial import problem_of
from ..autotune.tuner import Tuned, tune_problem
from ..core.autocast import as_autocast
from ..core.checks import operator_name, require_bools
from ..core.epilogue import Epilogue
from ..core.groups import TwoLevels, group_of, name_of, ranks_of
from ..core.problem import checked_problem, require_operands
from ..core.registry import OPERATORS, operators_of
from ..core.strategy import Strategy
from .gemm_operator import GemmOperator, obstacle, preferred_strategy, unfused_gemm_strategy


@brief_errors
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
    name = operator_name("strategy_of", op, operators_of(GemmOperator))
    ranks = ranks_of(name_of(group))
    require_operands(name, a, b, None, Epilogue(bias, scale_a, scale_b, out_dtype))
    a, b, bias = as_autocast(a, b, bias)
    epilogue = Epilogue(bias, scale_a, scale_b, out_dtype)
    problem = checked_problem(name, a, b, ranks.world_size, None, epilogue)
    if isinstance(ranks, TwoLevels):
        problem, ranks = OPERATORS[name].within(problem, ranks), ranks.node
    unfused = unfused_gemm_strategy(strategy, problem, a.device, ranks)
    return unfused or preferred_strategy(strategy, problem, lookup(problem, ranks))


@brief_errors
def tune(
    op: Any,
    shapes: Iterable[Sequence[int]],
    dtype: torch.dtype = torch.bfloat16,
    group: Any = None,
    *,
    transposed: bool = True,
) -> list[Tuned]:
    """Measure the implementations of GEMMs; use the fastest correct one for ``strategy="auto"``.

    Every rank calls it with the same arguments. Later calls use the results. They are also stored
    on disk for later processes, and replace older results.

    Args:
        op: the operator, such as ``ops.matmul_reduce_scatter``, or its name.
        shapes: (M, N, K) of the whole group, as in ``tileweave bench``.
        dtype: type of the operands.
        group: as for the operator; for a mesh of nodes pass the axis within a node.
        transposed: whether b is the transpose of a row-major (N, K), as weights are.

    Raises:
        TileWeaveError: there is no such operator, or the problem cannot be fused, or the ranks
            pass different arguments.
    """
    require_bools("tune", transposed=transposed)
    name = operator_name("tune", op, operators_of(GemmOperator))
    if not isinstance(dtype, torch.dtype):
        raise TileWeaveError(f"tune: dtype={dtype!r}; expected a torch.dtype")
    ranks = group_of(group_argument.name_of(group))
    problems = []
    for shape in shapes:
        if not (
            isinstance(shape, Sequence)
            and len(shape) == 3
            and all(isinstance(n, int) and n > 0 for n in shape)
        ):
            raise TileWeaveError(f"tune: shape={shape!r}; expected (M, N, K)")
        M, N, K = shape
        problems.append(problem_of(name, M, N, K, ranks.world_size, dtype, transposed))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for problem in problems:
        if reason := obstacle(problem, device, ranks):
            raise TileWeaveError(f"tune: {problem}: {reason}")
    return [tune_problem(problem, ranks) for problem in problems]
