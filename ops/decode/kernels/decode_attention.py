"""Tile program that attends to a paged cache, whose tokens are sharded over ranks.

Blocks that attend come first in the grid, then those that merge. A block waits only for blocks of
lower index on its rank, and for blocks of other ranks that send before they wait::

    | attend to a split of the keys | merge splits, send to all ranks, merge the parts of ranks |

A part is a result for some of the keys, divided by the sum of their exponentials, and the logarithm
of this sum. Parts are fp32, and are merged in the order of splits and ranks. All ranks therefore
receive the same bits.
"""

from typing import Any

import tilelang.language as T

from ....builtins import language as W
from ....passes import with_options
from .attend import Inputs, attend_to_split
from .config import DecodeConfig
from .merge import Results, merge_heads


def decode_attention(config: DecodeConfig) -> Any:
    """Return the program."""
    program = _program(config)
    options: dict[str, Any] = {"tl.enable_fast_math": True}
    if config.merges_within and config.merge_blocks:
        parts = 1, config.splits, config.part_rows, config.columns
        options["tileweave.granule"] = {"parts": parts}
    if config.ranks > 1:
        options["tileweave.protocol"] = {"sums": "ll"}
    return with_options(program, options)


def _program(config):
    batch, heads, splits, ranks = config.batch, config.heads, config.splits, config.ranks
    attends = config.items * splits
    parts_shape = config.items, splits, config.part_rows, config.columns
    sums_shape = config.items, ranks, config.part_rows, config.columns
    cache = config.pages * config.page_size, config.kv_heads * config.dim

    @T.prim_func
    def decode_attention(
        q: T.Tensor((batch * heads, config.dim), config.dtype),
        k_cache: T.Tensor(cache, config.cache_dtype),
        v_cache: None if config.is_latent else T.Tensor(cache, config.cache_dtype),
        block_table: T.Tensor((batch, config.table), "int32"),
        seq_lens: T.Tensor((batch,), "int32"),
        k_scale: T.Tensor((1,), "float32") if config.is_quantized else None,
        v_scale: T.Tensor((1,), "float32") if config.is_quantized else None,
        lse: T.Tensor((batch, heads), "float32") if config.has_lse else None,
        out: T.Tensor((batch, heads * config.sections, config.width), config.dtype),
    ):
        merging = 0 if config.merges_within else config.merge_blocks
        with T.Kernel(attends + merging, threads=config.threads) as block:
            T.annotate_min_blocks_per_sm(1 if config.is_latent else config.resident)
            me = W.rank()
            parts = W.alloc_symmetric(parts_shape, "float32") if config.merge_blocks else None
            sums = W.alloc_symmetric(sums_shape, "float32") if ranks > 1 else None
            results = Results(parts, sums, lse, out)
            inputs = Inputs(q, k_cache, v_cache, block_table, seq_lens, k_scale, v_scale)
            if config.merge_blocks == 0:
                attend_to_split(config, inputs, results, me, block, 0)
            elif config.merges_within:
                item, split = block // splits, block % splits
                attend_to_split(config, inputs, results, me, item, split)
                if split >= splits - config.mergers:
                    row = (split - splits + config.mergers) * config.merge_rows
                    merge_heads(config, results, me, item * config.part_rows + row)
            else:
                # No else: TileLang reuses shared memory between statements, not between branches.
                if block < attends:
                    attend_to_split(config, inputs, results, me, block // splits, block % splits)
                if block >= attends:
                    merge_heads(config, results, me, (block - attends) * config.merge_rows)

    return decode_attention
