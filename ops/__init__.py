"""Operators that multiply while they communicate, and collectives.

Each is a tile kernel without a word of synchronisation, its plan, and an operator of
``torch.ops.tileweave`` with a gradient.
"""

from .all_gather import all_gather
from .all_gather_matmul import all_gather_matmul
from .all_reduce import all_reduce
from .all_to_all import all_to_all
from .attention_reference import SequenceParallelAttention
from .call import strategy_of
from .exchange import transport_of
from .matmul_all_reduce import matmul_all_reduce
from .matmul_reduce_scatter import matmul_reduce_scatter
from .reduce_scatter import reduce_scatter
from .sequence import attention_schedule, shard_sequence, unshard_sequence
from .sp_attention import sp_attention
from .strategy import Strategy
from .transport import Transport
from .tuner import Tuned, tune
from .ulysses import ulysses_attention

__all__ = [
    "SequenceParallelAttention",
    "Strategy",
    "Transport",
    "Tuned",
    "all_gather",
    "all_gather_matmul",
    "all_reduce",
    "all_to_all",
    "attention_schedule",
    "matmul_all_reduce",
    "matmul_reduce_scatter",
    "reduce_scatter",
    "shard_sequence",
    "sp_attention",
    "strategy_of",
    "transport_of",
    "tune",
    "ulysses_attention",
    "unshard_sequence",
]
