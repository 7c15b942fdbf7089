"""Attend to a split of the keys of a sequence."""

from dataclasses import dataclass
from typing import Any

import tilelang.language as T

from . import heads, latent
from .config import CONTIGUOUS, INTERLEAVED, STAGES
from .softmax import alloc_softmax, clear, divide
from .tiles import Split


@dataclass(frozen=True)
class Inputs:
    """Tensors that a program reads.

    Attributes:
        q: (batch * heads, dim).
        k_cache, v_cache: (tokens of all pages, kv_heads * dim); no v_cache for a latent cache.
        block_table: number in the cache of each page of a sequence, (batch, table).
        seq_lens: tokens of the sequences, (batch,).
        k_scale, v_scale: factors of an fp8 cache, (1,).
    """

    q: Any
    k_cache: Any
    v_cache: Any
    block_table: Any
    seq_lens: Any
    k_scale: Any
    v_scale: Any


@T.macro
def attend_to_split(config, inputs, me, item, split):
    """Attend with the heads of an item to a split of the keys on this rank, and return a
    ``Softmax`` with the part."""
    softmax = alloc_softmax(config, inputs)
    keys = find_split(config, inputs, me, item, split)
    cache = cache_of(config)
    buffers = cache.alloc(config)
    cache.load_queries(config, inputs.q, item, buffers)
    clear(softmax)
    for step in T.Pipelined(keys.steps, num_stages=STAGES):
        cache.load_keys(config, inputs, keys, step, buffers)
        cache.attend(config, keys, step, buffers, softmax)
    divide(config, softmax)
    return softmax


def cache_of(config: Any) -> Any:
    """Return the module that loads and multiplies tiles of a cache."""
    return latent if config.is_latent else heads


@T.macro
def find_split(config, inputs, me, item, split):
    """Return the ``Split`` of a block."""
    # Variables, because TVM would otherwise repeat these expressions in each index.
    keys, begin, steps = T.alloc_var("int32"), T.alloc_var("int32"), T.alloc_var("int32")
    sequence = item // (config.heads // config.rows)
    kv_head = item % (config.heads // config.rows) // (config.group // config.rows)
    keys = keys_on_rank(config, inputs.seq_lens[sequence], me)
    steps = T.ceildiv(T.ceildiv(keys, config.N), config.splits)
    begin = split * steps
    steps = T.max(T.min(steps, T.ceildiv(keys, config.N) - begin), 0)
    return Split(sequence, kv_head, keys, begin, steps)


def keys_on_rank(config: Any, length: Any, me: Any) -> Any:
    """Return the number of tokens of a sequence on a rank, at most its capacity."""
    size, ranks = config.page_size, config.ranks
    keys = length
    if config.sharding == CONTIGUOUS:
        keys = length - me * config.capacity
    elif config.sharding == INTERLEAVED:
        pages, last = length // size, length % size
        keys = (pages + ranks - 1 - me) // ranks * size
        keys += T.if_then_else(pages % ranks == me, last, 0)
    return T.max(T.min(keys, config.capacity), 0)
