"""GEMMs and attention fused with communication, collectives, and mixtures of experts.

Each operator is a tile kernel without explicit synchronization, its plan, and a function of
``torch.ops.tileweave`` with a gradient.
"""

from .attention.module import SequenceParallelAttention
from .attention.sequence import attention_schedule, shard_sequence, unshard_sequence
from .attention.sp_attention import sp_attention
from .attention.ulysses import ulysses_attention
from .autotune.tuner import Tuned
from .collectives.all_gather import all_gather
from .collectives.all_reduce import all_reduce
from .collectives.all_to_all import all_to_all
from .collectives.broadcast import broadcast
from .collectives.collective import Collective, define_collective, transport_of
from .collectives.reduce_scatter import reduce_scatter
from .collectives.ring_shift import ring_shift
from .collectives.transport import Transport
from .core.registry import operators_of
from .core.strategy import Strategy
from .decode.decode_attention import decode_attention
from .gemm.all_gather_matmul import all_gather_matmul
from .gemm.gemm_operator import GemmOperator, define_gemm
from .gemm.matmul_all_reduce import matmul_all_reduce
from .gemm.matmul_reduce_scatter import matmul_reduce_scatter
from .gemm.strategy import strategy_of, tune
from .moe.combine import combine
from .moe.dispatch import DispatchHandle, dispatch
from .moe.expert_mlp import expert_mlp
from .moe.grouped_matmul import grouped_matmul
from .norm.all_reduce_rms_norm import all_reduce_rms_norm
from .preparation import prepare

__all__ = [
    "DispatchHandle",
    "SequenceParallelAttention",
    "Strategy",
    "Transport",
    "Tuned",
    "all_gather",
    "all_gather_matmul",
    "all_reduce",
    "all_reduce_rms_norm",
    "all_to_all",
    "attention_schedule",
    "broadcast",
    "combine",
    "decode_attention",
    "dispatch",
    "expert_mlp",
    "grouped_matmul",
    "matmul_all_reduce",
    "matmul_reduce_scatter",
    "prepare",
    "reduce_scatter",
    "ring_shift",
    "shard_sequence",
    "sp_attention",
    "strategy_of",
    "transport_of",
    "tune",
    "ulysses_attention",
    "unshard_sequence",
]

for _operator in operators_of(GemmOperator).values():
    define_gemm(_operator)
for _collective in operators_of(Collective).values():
    define_collective(_collective)
