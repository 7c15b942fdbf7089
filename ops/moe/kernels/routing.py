"""Kernels that compute the routing: a stable counting sort of the choices by expert.

Each block has consecutive tokens, and numbers its rows of each expert. The first row of an expert
depends on the rows that all blocks have. If there are several blocks, a kernel before counts them::

    count | block 0: rows of each expert, in `counts` | block 1: ... | ...
    place | block 0: sum of `counts`, then its rows   | block 1: ... | ...

A block numbers as many tokens at once as it has threads for their choices: the rows of an expert in
the order of warps, then of lanes.
"""

from dataclasses import dataclass
from math import ceil
from typing import Any

import tilelang.language as T

WARP = 32
MAX_THREADS = 1024
"""Maximum number of threads of a block, which has one for each choice of a token."""
MAX_BLOCKS = 128
"""Maximum number of blocks: each reads the counts of all."""
MAX_EXPERTS = 1536
"""Maximum number of experts: shared memory has a number for each in each warp."""
MAX_TOKENS = MAX_BLOCKS << 14
"""Maximum number of tokens of all ranks: counts of a block have 16 bits."""


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
    def experts(self) -> int:
        """Experts of all ranks."""
        return self.ranks * self.per_rank

    @property
    def rank_choices(self) -> int:
        """Choices of a rank."""
        return self.tokens * self.choices

    @property
    def num_choices(self) -> int:
        """Choices of all ranks."""
        return self.ranks * self.rank_choices

    @property
    def wave_choices(self) -> int:
        """Choices that a block places at once: those of whole tokens."""
        return min(MAX_THREADS // self.choices * self.choices, self.num_choices)

    @property
    def waves(self) -> int:
        """Number of times that a block does so."""
        return ceil(self.num_choices / self.wave_choices / MAX_BLOCKS)

    @property
    def blocks(self) -> int:
        """Blocks of a kernel."""
        return ceil(self.num_choices / self.wave_choices / self.waves)

    @property
    def warps(self) -> int:
        """Warps of a block that have choices."""
        return ceil(self.wave_choices / WARP)

    @property
    def threads(self) -> int:
        """Threads of a block: one for each choice, and for each expert if possible."""
        return max(self.warps, min(ceil(self.experts / WARP), MAX_THREADS // WARP)) * WARP

    @property
    def shares(self) -> int:
        """Threads that sum the counts of an expert."""
        return max(1, min(self.threads // self.experts, self.blocks))

    @property
    def segments(self) -> int:
        """Parts of ``WARP`` experts."""
        return ceil(self.experts / WARP)

    @property
    def expert_waves(self) -> int:
        """Maximum number of experts of a thread."""
        return ceil(self.experts / self.threads)


@T.macro
def clear(config, numbers):
    """Set shared memory of any length to zero."""
    for i in T.serial(T.ceildiv(numbers.shape[0], config.threads)):
        at = i * config.threads + T.get_thread_binding()
        if at < numbers.shape[0]:
            numbers[at] = 0


@T.macro
def choice_of(config, block, wave):
    """Return the choice of a thread, and whether it exists."""
    thread = T.get_thread_binding()
    choice = (block * config.waves + wave) * config.wave_choices + thread
    return choice, (thread < config.wave_choices) & (choice < config.num_choices)


@T.macro
def find_expert(config, ids, choice, exists):
    """Return the expert of a choice, and the first choice of its token with the same one;
    ``config.experts`` and -1 if it has no expert."""
    expert = T.alloc_var("int32")
    first = T.alloc_var("int32")
    expert = config.experts
    first = -1
    if exists:
        number = ids[choice]
        if (number >= 0) & (number < config.experts):
            expert = T.cast(number, "int32")
            first = choice
            begin = choice // config.choices * config.choices
            for other in T.serial(config.choices):
                earlier = begin + config.choices - 1 - other  # the last match is the first choice
                if (earlier < choice) & (ids[earlier] == number):
                    first = earlier
    return expert, first


@T.macro
def match_lanes(config, expert):
    """Return the mask of lanes with the same expert, or with none."""
    lanes = T.alloc_var("uint32")
    lanes = T.uint32(0xFFFFFFFF)
    for bit in T.unroll(config.experts.bit_length()):
        is_set = ((expert >> bit) & 1) == 1
        vote = T.cast(T.ballot_sync(is_set), "uint32")
        lanes = lanes & T.if_then_else(is_set, vote, ~vote)
    return lanes


@T.macro
def tally(config, ids, choice, exists, table):
    """Store in ``table`` the rows of each expert in each warp. Return what ``find_expert`` returns,
    and the rows of the expert in lower lanes. A choice has a row if it is the first one."""
    thread = T.get_thread_binding()
    clear(config, table)
    expert, first = find_expert(config, ids, choice, exists)
    lanes = match_lanes(config, T.if_then_else(first == choice, expert, config.experts))
    lower = (T.uint32(1) << T.cast(thread % WARP, "uint32")) - T.uint32(1)
    lower_rows = T.cast(T.popcount(lanes & lower), "int32")
    T.sync_threads()
    if (first == choice) & (lower_rows == 0):
        rows = T.cast(T.popcount(lanes), "int32")
        table[thread // WARP * config.experts + expert] = rows
    T.sync_threads()
    return expert, first, lower_rows


@T.macro
def number_rows(config, table, next_row):
    """Replace the rows of each expert in each warp by the number of its first one, and move the
    next number after the last one."""
    for i in T.serial(config.expert_waves):
        expert = i * config.threads + T.get_thread_binding()
        if expert < config.experts:
            row = T.alloc_var("int32")
            row = next_row[expert]
            for warp in T.serial(config.warps):
                at = warp * config.experts + expert
                rows = table[at]
                table[at] = row
                row = row + rows
            next_row[expert] = row
    T.sync_threads()


@T.macro
def clear_source(config, block, source):
    """Store -1 in a block's part of ``source``."""
    for i in T.serial(ceil(config.capacity / config.blocks / config.threads)):
        row = (i * config.blocks + block) * config.threads + T.get_thread_binding()
        if row < config.capacity:
            source[row] = -1


@T.macro
def count_rows(config, block, ids, counts):
    """Store the number of rows that a block's tokens have at each expert."""
    thread = T.get_thread_binding()
    total = T.alloc_shared((config.experts,), "int32")
    table = T.alloc_shared((config.warps * config.experts,), "int32")
    clear(config, total)
    for wave in T.serial(config.waves):
        choice, exists = choice_of(config, block, wave)
        _, _, _ = tally(config, ids, choice, exists, table)
        number_rows(config, table, total)
    for i in T.serial(config.expert_waves):
        expert = i * config.threads + thread
        if expert < config.experts:
            counts[block * config.experts + expert] = T.cast(total[expert], "int16")


@T.macro
def sum_counts(config, block, counts, needs_all, this_rank, total, before):
    """Sum the counts of all blocks, and of the blocks before: of this rank's experts, or of all
    experts. Several threads share an expert."""
    thread = T.get_thread_binding()
    experts, shares = config.experts, config.shares
    totals = T.alloc_shared((shares * experts,), "int32")
    befores = T.alloc_shared((shares * experts,), "int32")
    for i in T.serial(config.expert_waves):
        at = i * config.threads + thread
        expert, share = at % experts, at // experts
        if (share < shares) & (needs_all | (expert // config.per_rank == this_rank)):
            count = T.alloc_var("int32")
            earlier = T.alloc_var("int32")
            count = 0
            earlier = 0
            num_earlier = T.ceildiv(block - share, shares)
            for j in T.serial(ceil(config.blocks / shares)):
                other = j * shares + share
                if other < config.blocks:
                    rows = T.cast(T.cast(counts[other * experts + expert], "uint16"), "int32")
                    count = count + rows
                    earlier = earlier + T.if_then_else(j < num_earlier, rows, 0)
            totals[at] = count
            befores[at] = earlier
    clear(config, total)
    clear(config, before)
    T.sync_threads()
    for i in T.serial(config.expert_waves):
        expert = i * config.threads + thread
        if (expert < experts) & (needs_all | (expert // config.per_rank == this_rank)):
            for share in T.serial(shares):
                total[expert] = total[expert] + totals[share * experts + expert]
                before[expert] = before[expert] + befores[share * experts + expert]
    T.sync_threads()


@T.macro
def start_experts(config, this_rank, stores, total, before, offsets, dropped):
    """Add to ``before`` the row of a rank at which each of its experts begins. One block stores the
    end of the rows of this rank's experts, and the rows that each rank drops.

    Loads have no conditions: with branches, each would wait for the load before.
    """
    thread = T.get_thread_binding()
    start = T.alloc_shared((config.experts,), "int32")
    segment = T.alloc_shared((config.segments,), "int32")
    for i in T.serial(config.expert_waves):
        expert = i * config.threads + thread
        if expert < config.experts:
            rows = T.alloc_var("int32")
            rows = 0
            for lane in T.serial(WARP):
                other = total[expert // WARP * WARP + lane]
                rows = rows + T.if_then_else(lane < expert % WARP, other, 0)
            start[expert] = rows
            if (expert % WARP == WARP - 1) | (expert == config.experts - 1):
                segment[expert // WARP] = rows + total[expert]
    T.sync_threads()
    for i in T.serial(config.expert_waves):
        expert = i * config.threads + thread
        if expert < config.experts:
            rows = T.alloc_var("int32")
            rows = start[expert]
            for part in T.serial(config.segments):
                other = segment[part]
                rows = rows + T.if_then_else(part < expert // WARP, other, 0)
            start[expert] = rows
    T.sync_threads()
    for i in T.serial(config.expert_waves):
        expert = i * config.threads + thread
        if expert < config.experts:
            owner = expert // config.per_rank
            number = expert % config.per_rank
            begin = start[expert] - start[owner * config.per_rank]
            before[expert] = before[expert] + begin
            end = begin + total[expert]
            if stores & (owner == this_rank):
                offsets[number] = T.min(end, config.capacity)
            if stores & (number == config.per_rank - 1):
                dropped[owner] = T.max(end - config.capacity, 0)
    T.sync_threads()


@T.macro
def store_slot(config, rows, choice, slots):
    """Store the row of a choice in the slots of its token, in descending order; choices without a
    row come last."""
    thread = T.get_thread_binding()
    slot = T.alloc_var("int32")
    slot = 0
    begin = thread // config.choices * config.choices
    for i in T.serial(config.choices):
        other = begin + i
        row, mine = rows[other], rows[thread]
        is_before = (row > mine) | ((row == mine) & (other < thread))
        slot = slot + T.if_then_else(is_before, 1, 0)
    slots[choice - thread + begin + slot] = rows[thread]


@T.macro
def place_rows(config, block, ids, this_rank, counts, results):
    """Store the tables, offsets and dropped rows; ``source`` has -1 where no block has a row."""
    source, slots, place, offsets, dropped = results
    thread = T.get_thread_binding()
    experts, capacity = config.experts, config.capacity
    total = T.alloc_shared((config.segments * WARP,), "int32")
    before = T.alloc_shared((experts,), "int32")
    next_row = T.alloc_shared((config.segments * WARP,), "int32")
    table = T.alloc_shared((config.warps * experts,), "int32")
    rows = T.alloc_shared((config.threads,), "int32")
    places = T.alloc_shared((config.threads,), "int32")
    block_choices = config.waves * config.wave_choices
    first_block = this_rank * config.rank_choices // block_choices
    last_block = ((this_rank + 1) * config.rank_choices - 1) // block_choices
    is_own = (block >= first_block) & (block <= last_block)
    stores = block == first_block
    clear(config, next_row)
    if config.blocks == 1:
        clear(config, before)
    else:
        sum_counts(config, block, counts, is_own, this_rank, total, before)
        start_experts(config, this_rank, stores, total, before, offsets, dropped)
    for wave in T.serial(config.waves):
        choice, exists = choice_of(config, block, wave)
        expert, first, lower_rows = tally(config, ids, choice, exists, table)
        number_rows(config, table, next_row)
        if config.blocks == 1:  # it has the rows of all
            start_experts(config, this_rank, stores, next_row, before, offsets, dropped)
        row = T.alloc_var("int32")
        row = capacity
        if first == choice:
            row = before[expert] + table[thread // WARP * experts + expert] + lower_rows
        owner = expert // config.per_rank
        is_here = (row < capacity) & (owner == this_rank)
        rows[thread] = T.if_then_else(is_here, row, -1)
        places[thread] = T.if_then_else(row < capacity, owner * capacity + row, -1)
        if is_here:
            source[row] = choice
        T.sync_threads()
        if exists:
            store_slot(config, rows, choice, slots)
            if choice // config.rank_choices == this_rank:
                place[choice % config.rank_choices] = T.if_then_else(
                    first >= 0, places[thread - choice + first], -1
                )


def routing_program(config: RoutingConfig) -> Any:
    """Build the kernels: the tables, offsets and dropped rows of ``routing.Routing``."""
    choices, blocks, threads = config.num_choices, config.blocks, config.threads

    @T.prim_func
    def routing(
        ids: T.Tensor((choices,), config.dtype),
        this_rank: T.int32,
        counts: T.Tensor((blocks * config.experts,), "int16"),  # rows of blocks, of two kernels
        source: T.Tensor((config.capacity,), "int32"),
        slots: T.Tensor((choices,), "int32"),
        place: T.Tensor((config.rank_choices,), "int32"),
        offsets: T.Tensor((config.per_rank,), "int32"),
        dropped: T.Tensor((config.ranks,), "int32"),
    ):
        results = source, slots, place, offsets, dropped
        if blocks > 1:
            with T.Kernel(blocks, threads=threads) as block:
                clear_source(config, block, source)
                count_rows(config, block, ids, counts)
            with T.Kernel(blocks, threads=threads) as block:
                place_rows(config, block, ids, this_rank, counts, results)
        else:
            with T.Kernel(1, threads=threads) as block:
                clear_source(config, block, source)
                place_rows(config, block, ids, this_rank, counts, results)

    return routing
