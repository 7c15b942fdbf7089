"""``expert_mlp`` as two kernels in which exchange and products overlap, without gradients.

Contains the choice between these kernels and the separate steps, and the torch operator.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import tilelang.language as T
import torch

from ...builtins.ragged import MAX_ELEMENTS
from ...runtime import Plan, PlanBuilder, plan
from ...runtime.host.group import Group
from ...runtime.host.session import Session
from ..core.cache import op_cache_of
from ..core.compiled import CompiledOp
from ..core.groups import TwoLevels, ranks_of
from ..core.library import define
from ..core.problem import ALIGNMENT, agree, as_kernel_operand, refused
from ..core.strategy import obstacle_of_ranks
from .kernels.expert_mlp import ExpertMlpConfig, down, gate_up
from .routing import INDEX_LIMIT
from .row_problem import CHECK_IDS, checks_ids
from .segments import segments_of

NAME = "expert_mlp"
FUSED = "fused"
STRATEGIES = "auto", FUSED, "separate"
"""``auto`` uses the separate steps, which are faster in all sizes that were measured
(benchmarks/LOG.md)."""
_DTYPES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class MlpProblem:
    """Call of the overlapped kernels. Their memory is cached per problem.

    Attributes:
        op: the operator.
        tokens, choices: tokens of a rank, and experts of a token.
        per_rank: experts of a rank.
        hidden, width: columns of a token, and of gate.
    """

    op: ClassVar[str] = NAME
    tokens: int
    choices: int
    per_rank: int
    hidden: int
    width: int
    ranks: int
    dtype: torch.dtype

    @staticmethod
    def of(
        x: torch.Tensor, topk_ids: torch.Tensor, w_gate_up: torch.Tensor, ranks: int
    ) -> "MlpProblem":
        """Return the problem of a call whose arguments are checked."""
        per_rank, columns, hidden = w_gate_up.shape
        return MlpProblem(*topk_ids.shape, per_rank, hidden, columns // 2, ranks, x.dtype)

    @property
    def config(self) -> ExpertMlpConfig:
        """Parameters of the kernels."""
        dtype = str(self.dtype).removeprefix("torch.")
        return ExpertMlpConfig(
            self.tokens, self.choices, self.per_rank, self.hidden, self.width, self.ranks, dtype
        )

    def obstacle(self) -> str | None:
        """Return why the kernels cannot serve the problem, with what is expected; else None."""
        config, tile = self.config, self.config.down.N
        if self.dtype not in _DTYPES:
            return f"x is of {self.dtype}; expected {' or '.join(map(str, _DTYPES))}"
        if self.hidden % tile:
            return f"hidden size {self.hidden}; expected a multiple of {tile}"
        if self.width * self.dtype.itemsize % ALIGNMENT:
            return f"intermediate size {self.width}; expected a multiple of 8"
        if config.capacity * self.hidden > MAX_ELEMENTS:
            rows = config.gate_up.M
            most = MAX_ELEMENTS // self.hidden // rows * rows
            return f"there are {self.tokens} tokens; expected at most {most}"
        if (experts := self.ranks * self.per_rank) * config.capacity >= INDEX_LIMIT:
            most = (INDEX_LIMIT - 1) // config.capacity
            return f"there are {experts} experts; expected at most {most}"
        return None

    def __str__(self) -> str:
        dtype = self.config.dtype
        return (
            f"{NAME} of {self.tokens} tokens of {self.hidden} {dtype}, top-{self.choices}, "
            f"{self.per_rank} experts of a rank, intermediate size {self.width}"
        )


def mlp_plan(config: ExpertMlpConfig) -> Plan:
    """Build the plan that launches both kernels."""
    tokens, choices, dtype = config.tokens, config.choices, config.dtype
    segments = config.per_rank, config.ranks
    kernels = gate_up(config), down(config)

    @plan
    def expert_mlp(
        p: PlanBuilder,
        x: T.Tensor((tokens, config.hidden), dtype),
        sent: T.Tensor((tokens * choices,), "int32"),
        counts: T.Tensor((config.ranks, config.per_rank), "int32"),
        place: T.Tensor((tokens, choices), "int32"),
        topk_weights: T.Tensor((tokens, choices), "float32"),
        w_gate_up: config.gate_up_gemm.w,
        w_down: config.down_gemm.w,
        received: T.Tensor(segments, "int32"),
        activations: T.Tensor((*segments, config.capacity, config.width), dtype),
        out: T.Tensor((tokens, config.hidden), dtype),
    ):
        p.launch(kernels[0], x, sent, counts, w_gate_up, received, activations)
        p.launch(kernels[1], activations, received, w_down, place, topk_weights, out)

    return expert_mlp


class FusedMlp(CompiledOp):
    """Compiled kernels of one problem, with memory for the results of SwiGLU."""

    def __init__(self, problem: MlpProblem, strategy: str, session: Session) -> None:
        """Compile, and allocate symmetric memory. Collective."""
        config, device = problem.config, session.group.device
        super().__init__(mlp_plan(config), session)
        segments = config.per_rank, config.ranks
        rows = *segments, config.capacity, config.width
        self.fixed_inputs = (
            torch.empty(segments, dtype=torch.int32, device=device),
            torch.empty(rows, dtype=problem.dtype, device=device),
        )


def check_strategy(requested: Any) -> None:
    """Refuse an unknown strategy."""
    if requested not in STRATEGIES:
        raise refused(NAME, f"strategy={requested!r}", ", ".join(map(repr, STRATEGIES)))


def is_fused(
    requested: str, x: torch.Tensor, topk_ids: torch.Tensor, w_gate_up: torch.Tensor,
    ranks: Group | TwoLevels, separate: str | None,
) -> bool:  # fmt: skip
    """Return whether the overlapped kernels compute a call without gradients. The choice depends
    only on values that are equal on all ranks.

    Args:
        separate: an argument of the call that only the separate steps accept, with what is
            expected instead; None if there is none.

    Raises:
        TileWeaveError: ``requested`` is no strategy, or is ``fused`` for a call that cannot be
            overlapped.
    """
    check_strategy(requested)
    if requested != FUSED:
        return False
    reason = separate or _obstacle(x, topk_ids, w_gate_up, ranks)
    if reason is not None:
        raise refused(NAME, *f"strategy='fused', but {reason}".split("; expected ", 1))
    return True


def _obstacle(
    x: torch.Tensor, topk_ids: torch.Tensor, w_gate_up: torch.Tensor, ranks: Group | TwoLevels
) -> str | None:
    """Return why the kernels do not serve a call, with what is expected; else None."""
    if checks_ids():
        return f"{CHECK_IDS}=1; expected 0"
    problem = MlpProblem.of(x, topk_ids, w_gate_up, ranks.world_size)
    return obstacle_of_ranks(x.device, ranks, uses_wgmma=True) or problem.obstacle()


def _eager(x, topk_ids, topk_weights, w_gate_up, w_down, group):
    ranks = ranks_of(group)
    assert isinstance(ranks, Group)
    problem = MlpProblem.of(x, topk_ids, w_gate_up, ranks.world_size)
    agree(ranks, problem, FUSED)
    cache = op_cache_of(ranks)
    config = problem.config
    num_experts = problem.ranks * problem.per_rank
    tables = segments_of(topk_ids, ranks.rank, problem.ranks, num_experts, config.capacity)
    tensors = {"x": x, "w_gate_up": w_gate_up, "w_down": w_down}
    x, w_gate_up, w_down = (as_kernel_operand(NAME, name, t) for name, t in tensors.items())
    out = _fake(x)
    compiled = cache.operator(problem, FUSED, FusedMlp)
    compiled.enqueue((x, *tables, topk_weights.float().contiguous(), w_gate_up, w_down), out)
    return out


def _fake(x, *_: Any):
    return x.new_empty(x.shape)


fused_mlp = define(
    "expert_mlp_fused(Tensor x, Tensor topk_ids, Tensor topk_weights, Tensor w_gate_up, "
    "Tensor w_down, str group) -> Tensor",
    _eager, _fake,
)  # fmt: skip
