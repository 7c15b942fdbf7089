"""Tile program that attends to a paged cache, whose tokens are sharded over ranks.

Each block attends with an item, the heads of q that share a head of a sequence, to a split of the
keys of its rank. The last blocks of an item also merge its splits, and store the result. On several
ranks they send it to all ranks instead, and other blocks at the end of the grid merge the ranks::

    item 0: attend | attend | attend, merge | item 1: ... | merge ranks

Blocks that attend wait only for blocks of their item and rank. Blocks that merge ranks wait only
for blocks that attend.

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
from .merge import Results, merge_ranks, merge_splits, send, store, store_part


def decode_attention(config: DecodeConfig) -> Any:
    """Return the program."""
    program = _program(config)
    options: dict[str, Any] = {"tl.enable_fast_math": True}
    if config.splits > 1:
        # One counter for each item, and one signal for each block.
        granule = 1, config.splits, config.part_rows, config.columns
        options["tileweave.granule"] = {"partials": granule}
    if config.ranks > 1:
        options["tileweave.protocol"] = {"sums": "ll"}
    return with_options(program, options)


def _program(config):
    batch, heads, splits, ranks = config.batch, config.heads, config.splits, config.ranks
    attend_blocks = config.items * splits
    partials_shape = config.items, splits, config.part_rows, config.columns
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
        with T.Kernel(attend_blocks + config.rank_blocks, threads=config.threads) as block:
            T.annotate_min_blocks_per_sm(1 if config.is_latent else 2)
            me = W.rank()
            partials = W.alloc_symmetric(partials_shape, "float32") if splits > 1 else None
            sums = W.alloc_symmetric(sums_shape, "float32") if ranks > 1 else None
            results = Results(partials, sums, lse, out)
            inputs = Inputs(q, k_cache, v_cache, block_table, seq_lens, k_scale, v_scale)
            if ranks == 1:
                attend(config, inputs, results, me, block // splits, block % splits)
            else:
                # No else: TileLang reuses shared memory between statements, not between branches.
                if block < attend_blocks:
                    attend(config, inputs, results, me, block // splits, block % splits)
                if block >= attend_blocks:
                    combine(config, results, me, (block - attend_blocks) * config.rank_rows)

    return decode_attention


@T.macro
def attend(config, inputs, results, me, item, split):
    """Attend to a split, and merge the splits of the item in its last blocks."""
    softmax = attend_to_split(config, inputs, me, item, split)
    if config.splits == 1:
        finish(config, results, me, item, 0, config.rows, softmax)
    else:
        place = me, item, split
        store_part(config, results.partials, place, 0, config.rows, softmax.out, softmax.lse)
        # No difference of constants: it would be 0 for some sizes, which need another kernel then.
        number = split + config.mergers - config.splits
        if number >= 0:
            row = number * config.merge_rows
            rows = merge_splits(config, results.partials, me, item, row)
            finish(config, results, me, item, row, config.merge_rows, rows)


@T.macro
def finish(config, results, me, item, row, count, part):
    """Store ``count`` rows of the part of this rank, beginning with row ``row`` of the item, or
    send them to all ranks if there are several."""
    if config.ranks == 1:
        store(config, results, item * config.part_rows + row, count, part.out, part.lse)
    else:
        send(config, results.sums, me, item, row, count, part.out, part.lse)


@T.macro
def combine(config, results, me, first):
    """Merge the results of ranks of rows, beginning with section ``first`` of those of all
    sequences."""
    item, row = first // config.part_rows, first % config.part_rows
    rows = merge_ranks(config, results.sums, me, item, row)
    store(config, results, first, config.rank_rows, rows.out, rows.lse)
