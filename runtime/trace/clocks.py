"""Offsets between the clocks of GPUs and hosts, measured with kernels."""

import time
from dataclasses import dataclass

import tilelang.language as T
import torch

from ...builtins.debug import globaltimer
from ...builtins.ranks import rank
from ...builtins.signals import signal, wait_reached
from ...builtins.symmetric import Symmetric
from ..host.session import Session
from ..kernel.kernel import compile_kernel
from .merge import RankClock

ROUNDS = 64
"""Exchanges between rank 0 and a peer, of which the fastest counts."""
_HOST_ROUNDS = 16


@T.prim_func
def ping_pong(
    flags: Symmetric((2,), "uint32"),
    times: T.Tensor((ROUNDS, 2), "int64"),
    peer: T.int32,
    start: T.uint32,
):
    with T.Kernel(1, threads=32):
        if T.get_thread_binding() == 0:
            me = rank()
            for i in T.serial(ROUNDS):
                value = start + T.Cast("uint32", i) + T.uint32(1)
                if me == 0:
                    times[i, 0] = globaltimer()
                    signal(flags[peer, 0], value, op="set")
                    wait_reached(flags[0, 1], value, peer=peer)
                    times[i, 1] = globaltimer()
                else:
                    wait_reached(flags[me, 0], value, peer=0)
                    times[i, 0] = globaltimer()
                    signal(flags[0, 1], value, op="set")
                    times[i, 1] = globaltimer()


@T.prim_func
def read_clock(times: T.Tensor((2,), "int64")):
    with T.Kernel(1, threads=32):
        if T.get_thread_binding() == 0:
            times[0] = globaltimer()


@dataclass(frozen=True)
class Reading:
    """Clocks of one rank at one moment.

    Attributes:
        base: event of torch's current stream, recorded at ``base_ns`` of the GPU's clock.
    """

    clock: RankClock
    base: torch.cuda.Event
    base_ns: int


class Clocks:
    """Kernels and memory that measure the clocks of a session. Collective; ``free`` it."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._read = compile_kernel(read_clock, {}, session)
        self._times = torch.zeros((ROUNDS, 2), dtype=torch.int64, device=session.group.device)
        self._exchanges = 0
        self._ping_pong = self._flags = None
        if session.group.world_size > 1:
            self._ping_pong = compile_kernel(ping_pong, {}, session)
            self._flags = session.heap.allocate((2,), torch.uint32)

    def read(self) -> Reading:
        """Return the clocks of this rank now. Collective."""
        offset, error = self._offset()
        host_offset, host_error, base, base_ns = self._host()
        return Reading(RankClock(offset, error, host_offset, host_error), base, base_ns)

    def free(self) -> None:
        """Free the memory. Collective."""
        if self._flags is not None:
            self._flags.free()

    def _offset(self) -> tuple[int, int]:
        """Return the offset from rank 0's clock and its error.

        Rank 0 exchanges signals with each rank on another GPU in turn. Ranks that share its GPU
        have its clock: their offset is 0.
        """
        group = self._session.group
        offset = error = 0
        for peer in range(1, group.world_size):
            if group.gpus and group.gpus[peer] == group.gpus[0]:
                continue
            start, self._exchanges = self._exchanges, self._exchanges + ROUNDS
            times: list[list[int]] = []
            if group.rank in (0, peer):
                assert self._ping_pong is not None and self._flags is not None
                self._ping_pong(self._flags, self._times, peer, start)
                times = self._times.tolist()
            own = ",".join(str(t) for pair in times for t in pair)
            of_ranks = group.exchange("clocks", own)
            if group.rank == peer:
                offset, error = offset_of(_pairs(of_ranks[0]), _pairs(of_ranks[peer]))
        return offset, error

    def _host(self) -> tuple[int, int, torch.cuda.Event, int]:
        """Return the offset of the host's clock from the GPU's and its error, and an event with its
        time."""
        best = None
        for _ in range(_HOST_ROUNDS):
            torch.cuda.synchronize(self._session.group.device)
            before = time.monotonic_ns()
            self._read(self._times.view(-1)[:2])
            now = self._times[0, 0].item()
            after = time.monotonic_ns()
            if best is None or after - before < 2 * best[1]:
                best = (before + after) // 2 - now, (after - before) // 2 + 1
        assert best is not None
        first, second = self._times.new_zeros(2), self._times.new_zeros(2)
        base = torch.cuda.Event(enable_timing=True)
        self._read(first)
        base.record()
        self._read(second)
        low, high = first[0].item(), second[0].item()
        return best[0], max(best[1], (high - low) // 2 + 1), base, (low + high) // 2


def offset_of(zero: list[tuple[int, int]], peer: list[tuple[int, int]]) -> tuple[int, int]:
    """Return the offset of a peer's clock from rank 0's, and its error, in nanoseconds.

    As in NTP, the fastest exchange counts, and the error is half of the time that its two signals
    took.

    Args:
        zero: times at which rank 0 signalled and received the answer, of each exchange.
        peer: times at which the peer received the signal and answered.
    """

    def on_the_way(exchange: int) -> int:
        (sent, received), (arrived, answered) = zero[exchange], peer[exchange]
        return received - sent - (answered - arrived)

    best = min(range(len(zero)), key=on_the_way)
    (sent, received), (arrived, answered) = zero[best], peer[best]
    offset = ((arrived - sent) + (answered - received)) // 2
    return offset, max(on_the_way(best), 0) // 2 + 1


def combined(first: RankClock, second: RankClock) -> RankClock:
    """Return the clock between two readings: the mean, with an error that covers the drift."""

    def between(a: int, b: int, error_a: int, error_b: int) -> tuple[int, int]:
        return (a + b) // 2, max(error_a, error_b) + (abs(a - b) + 1) // 2

    return RankClock(
        *between(first.offset, second.offset, first.error, second.error),
        *between(first.host_offset, second.host_offset, first.host_error, second.host_error),
    )


def _pairs(text: str) -> list[tuple[int, int]]:
    numbers = [int(n) for n in text.split(",")]
    return list(zip(numbers[::2], numbers[1::2], strict=True))
