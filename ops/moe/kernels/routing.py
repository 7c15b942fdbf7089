"""Kernel of one block that computes the routing of few tokens.

A choice of all ranks has a key: its expert, then its number. A choice that repeats one of its token
has the key of the first one. So the place of a row is the number of smaller keys of first choices
at the same rank. Each thread compares its key with all others in shared memory: the keys of a block
are few, and need not be sorted.
"""

from dataclasses import dataclass
from math import ceil
from typing import Any

import tilelang.language as T

MOST_CHOICES = 1024
"""Most choices of all ranks: one for each thread of a block."""
WARP = 32


@dataclass(frozen=True)
class RoutingConfig:
    """Extents of a routing, see ``routing.Tables``.

    Attributes:
        ranks, tokens, choices: extents of the experts of all tokens.
        per_rank: experts of a rank.
        capacity: rows of a rank's experts.
        dtype: type of the experts, as TileLang writes it.
    """

    ranks: int
    tokens: int
    choices: int
    per_rank: int
    capacity: int
    dtype: str

    @property
    def num_choices(self) -> int:
        """Choices of all ranks."""
        return self.ranks * self.tokens * self.choices

    @property
    def threads(self) -> int:
        """Threads of the block: one for each choice."""
        return ceil(self.num_choices / WARP) * WARP

    @property
    def no_key(self) -> int:
        """Key of what is no row, larger than all others."""
        return self.ranks * self.per_rank * self.num_choices


@T.macro
def count_keys(config, keys, low, high):
    """Return the number of keys in [low, high), by one unsigned comparison for each key."""
    count = T.alloc_var("int32")
    extent = T.alloc_var("uint32")
    count = 0
    extent = T.cast(high - low, "uint32")
    for other in T.serial(config.num_choices):
        count = count + T.if_then_else(T.cast(keys[other] - low, "uint32") < extent, 1, 0)
    return count


@T.macro
def find_key(config, ids, choice):
    """Return the key of a choice, and whether it is the first one of its token with this expert."""
    key = T.alloc_var("int32")
    first = T.alloc_var("int32")
    expert = ids[choice]
    key = config.no_key
    first = choice
    if (expert >= 0) & (expert < config.ranks * config.per_rank):
        begin = choice // config.choices * config.choices
        for other in T.serial(config.choices):
            earlier = config.choices - 1 - other  # the last match is the first choice
            if (begin + earlier < choice) & (ids[begin + earlier] == expert):
                first = begin + earlier
        key = T.cast(expert, "int32") * config.num_choices + first
    return key, first == choice


@T.macro
def store_slot(config, rows, choice, slots):
    """Store the row of a choice in the slots of its token, in descending order; choices without a
    row come last."""
    slot = T.alloc_var("int32")
    slot = 0
    begin = choice // config.choices * config.choices
    for other in T.serial(config.choices):
        row, mine = rows[begin + other], rows[choice]
        is_before = (row > mine) | ((row == mine) & (begin + other < choice))
        slot = slot + T.if_then_else(is_before, 1, 0)
    slots[begin + slot] = rows[choice]


@T.macro
def count_rows(config, keys, this_rank, number, offsets, dropped, used):
    """Store the end of the rows of expert ``number`` of this rank; for larger numbers the rows that
    another rank drops. ``used[0]`` becomes the number of this rank's rows."""
    of_rank = config.per_rank * config.num_choices
    low = T.alloc_var("int32")
    high = T.alloc_var("int32")
    if number < config.per_rank:
        low = this_rank * of_rank
        high = low + (number + 1) * config.num_choices
        end = count_keys(config, keys, low, high)
        offsets[number] = T.min(end, config.capacity)
        if number == config.per_rank - 1:
            used[0] = end
    elif number < config.per_rank + config.ranks:
        low = (number - config.per_rank) * of_rank
        high = low + of_rank
        count = count_keys(config, keys, low, high)
        dropped[number - config.per_rank] = T.max(count - config.capacity, 0)


def routing_program(config: RoutingConfig) -> Any:
    """Build the kernel: the tables, offsets and dropped rows of ``routing.Routing``."""
    size, capacity, ranks = config.num_choices, config.capacity, config.ranks
    per_rank, of_rank = config.per_rank, config.tokens * config.choices
    keys_of_rank = per_rank * size

    @T.prim_func
    def routing(
        ids: T.Tensor((size,), config.dtype),
        this_rank: T.int32,
        source: T.Tensor((capacity,), "int32"),
        slots: T.Tensor((size,), "int32"),
        place: T.Tensor((of_rank,), "int32"),
        offsets: T.Tensor((per_rank,), "int32"),
        dropped: T.Tensor((ranks,), "int32"),
    ):
        with T.Kernel(1, threads=config.threads):
            keys = T.alloc_shared((config.threads,), "int32", scope="shared")
            rows = T.alloc_shared((config.threads,), "int32", scope="shared")
            used = T.alloc_shared((1,), "int32", scope="shared")
            choice = T.get_thread_binding()
            own_key = T.alloc_var("int32")
            own_key = config.no_key
            keys[choice] = config.no_key
            if choice < size:
                key, is_first = find_key(config, ids, choice)
                own_key = key
                keys[choice] = T.if_then_else(is_first, key, config.no_key)
            T.sync_threads()
            owner = own_key // keys_of_rank
            row = count_keys(config, keys, owner * keys_of_rank, own_key)
            is_kept = (own_key < config.no_key) & (row < capacity)
            is_here = is_kept & (owner == this_rank) & (keys[choice] < config.no_key)
            rows[choice] = T.if_then_else(is_here, row, -1)
            T.sync_threads()
            if choice < size:
                store_slot(config, rows, choice, slots)
                if is_here:
                    source[row] = choice
                if choice // of_rank == this_rank:
                    place[choice % of_rank] = T.if_then_else(is_kept, owner * capacity + row, -1)
            for i in T.serial(ceil((per_rank + ranks) / config.threads)):
                number = i * config.threads + choice
                count_rows(config, keys, this_rank, number, offsets, dropped, used)
            T.sync_threads()
            for i in T.serial(ceil(capacity / config.threads)):
                unused = i * config.threads + choice
                if (unused >= used[0]) & (unused < capacity):
                    source[unused] = -1

    return routing
