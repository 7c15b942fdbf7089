"""Operators that multiply while they communicate.

Each is a tile kernel without a word of synchronisation, its plan, and an operator of
``torch.ops.tileweave`` with a gradient.
"""

from .all_gather_matmul import all_gather_matmul
from .call import strategy_of
from .matmul_all_reduce import matmul_all_reduce
from .matmul_reduce_scatter import matmul_reduce_scatter
from .strategy import Strategy
from .tuner import Tuned, tune

__all__ = [
    "Strategy",
    "Tuned",
    "all_gather_matmul",
    "matmul_all_reduce",
    "matmul_reduce_scatter",
    "strategy_of",
    "tune",
]
