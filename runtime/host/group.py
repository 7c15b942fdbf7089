"""Group of processes: one per GPU, started by torchrun, or a single process without it."""

from __future__ import annotations

import atexit
import os
import socket
import time
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
import torch.distributed as dist

from ...builtins.errors import TileWeaveError
from .group_argument import is_alive, require_member

CHECK_INTERVAL_S = 1.0
"""Interval at which a waiting rank checks whether another one has failed."""
_POLL_S = 0.002
"""Maximum interval at which a waiting rank looks for a value; a quarter of the time so far."""
_FAILED = "failed"
"""Key in the store of a group with the reason why its ranks are at different exchanges."""
_joined: Counter[str] = Counter()
"""Number of times that each process group was joined, so that keys in the store are not reused."""


@dataclass(frozen=True)
class Group:
    """Ranks that work together, and the GPU of this rank."""

    rank: int
    world_size: int
    local_rank: int
    device: torch.device
    process_group: dist.ProcessGroup | None
    store: dist.Store | None
    gpus: tuple[str, ...] = field(default=(), compare=False)
    """The UUID of each rank's GPU; empty if they are not queried yet."""
    _exchanged: Counter[str] = field(default_factory=Counter, repr=False, compare=False)
    _failures: list[str] = field(default_factory=list, repr=False, compare=False)
    """Why the ranks are at different exchanges; empty if they are not."""

    @property
    def shares_gpus(self) -> bool:
        """True if several ranks use the same GPU, which runs one of them at a time."""
        gpus = self.gpus or self._queried_gpus
        return len(set(gpus)) < len(gpus)

    @cached_property
    def _queried_gpus(self) -> tuple[str, ...]:
        """The UUID of each rank's GPU, for a group that has not queried them. Collective."""
        return _with_gpus(self).gpus if torch.cuda.is_available() else ()

    @cached_property
    def nodes(self) -> tuple[str, ...]:
        """The host name of each rank's node. Collective at the first use."""
        return tuple(self.exchange("nodes", socket.gethostname()))

    def describe_rank(self, rank: int) -> str:
        """Return the name of a rank in messages: with its group and its rank among all processes,
        unless the group is the default group."""
        if self.process_group is None or self.process_group is dist.group.WORLD:
            return f"rank {rank}"
        name = self.process_group.group_desc
        if name in ("", "undefined"):
            name = self.process_group.group_name
        if not is_alive(self.process_group):
            return f"rank {rank} of group {name!r}, which was destroyed"
        global_rank = dist.get_global_rank(self.process_group, rank)
        return f"rank {rank} of group {name!r} (global rank {global_rank})"

    def exchange(
        self, topic: str, value: str, timeout_s: float = 300.0,
        check: Callable[[], None] | None = None,
    ) -> list[str]:  # fmt: skip
        """Return the ``value`` of each rank for ``topic``, in rank order. Collective, through the
        host only.

        Args:
            topic: name of the exchange; the n-th calls of the ranks with it match.
            check: called about once per second while waiting; it may raise an error that explains
                why no more values will arrive.

        Raises:
            TileWeaveError: a rank did not make the call within ``timeout_s`` seconds, or an earlier
                exchange has failed on a rank.
        """
        self.require_in_step(topic)
        self.publish(topic, value)

        def check_ranks() -> None:
            if check is not None:
                check()
            self.raise_if_failed(topic)

        return self.collect(topic, value, timeout_s, check_ranks)

    def publish(self, topic: str, value: str) -> None:
        """Give ``value`` to all ranks, which receive it by ``collect``. Does not wait."""
        if self.store is not None:
            self._exchanged[topic] += 1
            self.store.set(f"tileweave/{topic}/{self._exchanged[topic]}/{self.rank}", value)

    def collect(
        self, topic: str, value: str, timeout_s: float = 300.0,
        check: Callable[[], None] | None = None,
    ) -> list[str]:  # fmt: skip
        """Return what each rank has published for ``topic``, in rank order; see ``exchange``.

        Args:
            value: what this rank has published.
        """
        if self.store is None:
            return [value]
        prefix = f"tileweave/{topic}/{self._exchanged[topic]}"
        values = []
        try:
            for peer in range(self.world_size):
                self._wait(topic, peer, f"{prefix}/{peer}", timeout_s, check)
                values.append(self.store.get(f"{prefix}/{peer}").decode())
        except BaseException as error:  # also Ctrl-C: a later exchange would read this one's values
            self.fail(str(error) or f"{topic}: {type(error).__name__}")
            raise
        return values

    def fail(self, reason: str) -> None:
        """Make all later exchanges of all ranks raise, because the ranks are at different ones."""
        if self._failures:
            return
        self._failures.append(reason)
        if self.store is not None:
            with suppress(RuntimeError):  # of a store that has failed itself
                self.store.set(_FAILED, reason)

    def require_in_step(self, call: str) -> None:
        """Refuse a call of a group that has failed.

        Raises:
            TileWeaveError: ``fail`` was called on this rank, or a wait observed it on another rank.
        """
        if self._failures:
            raise TileWeaveError(
                f"{call}: the ranks are at different calls since an error ({self._failures[0]}); "
                "expected tw.finalize() and a new process group on all ranks, or a restart"
            )

    def raise_if_failed(self, call: str) -> None:
        """Raise if another rank has called ``fail``; see ``require_in_step``."""
        if self.store is not None and not self._failures and self.store.check([_FAILED]):
            self._failures.append(self.store.get(_FAILED).decode())
        self.require_in_step(call)

    def _wait(
        self, topic: str, peer: int, key: str, timeout_s: float, check: Callable[[], None] | None
    ) -> None:  # fmt: skip
        """Wait until a peer has written a key. Each second, call ``check``.

        It polls, because ``Store.wait`` handles no signals, such as that of Ctrl-C, before its time
        limit.
        """
        assert self.store is not None
        start = checked_at = time.monotonic()
        while not self.store.check([key]):
            now = time.monotonic()
            if now - start > timeout_s:
                raise TileWeaveError(
                    f"{topic}: {self.describe_rank(self.rank)} waited {timeout_s:g} s for "
                    f"rank {peer}; "
                    "expected every rank to make the same calls in the same order"
                )
            if check is not None and now - checked_at > CHECK_INTERVAL_S:
                checked_at = now
                check()
            time.sleep(min(_POLL_S, (now - start) / 4))

    def meet(self, topic: str, timeout_s: float = 300.0) -> None:
        """Wait until all ranks have made this call. Through the host only."""
        self.exchange(topic, "", timeout_s)

    def synchronize(self) -> None:
        """Wait for all work on this rank's GPU."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def join(process_group: dist.ProcessGroup | None = None) -> Group:
    """Return the group of this process: ``process_group``, the default group, the group of
    torchrun's variables, or this process alone.

    Raises:
        TileWeaveError: no CUDA device.
    """
    if not torch.cuda.is_available():
        raise TileWeaveError(
            "init: this process sees no CUDA device; expected one GPU a rank (programs can still "
            "be looked at with tw.emit and `tileweave emit`)"
        )
    devices = torch.cuda.device_count()
    if "LOCAL_RANK" in os.environ:
        local_rank = from_torchrun("LOCAL_RANK", 0)
    else:  # without torchrun: the code that initialized torch.distributed has chosen the GPU
        local_rank = torch.cuda.current_device() if dist.is_initialized() else 0
    device = torch.device("cuda", local_rank % devices)
    torch.cuda.set_device(device)
    distributed = dist.is_initialized() or from_torchrun("WORLD_SIZE", 1) > 1
    if not distributed:
        return Group(0, 1, 0, device, None, None)

    if not dist.is_initialized():
        _initialize(local_rank, device)
    process_group = process_group or dist.group.WORLD
    rank, world_size = require_member(process_group), dist.get_world_size(process_group)
    name = process_group.group_name
    _joined[name] += 1
    store = dist.PrefixStore(
        f"tileweave/{name}/{_joined[name]}",
        dist.distributed_c10d._get_default_store(),
    )
    group = Group(rank, world_size, local_rank, device, process_group, store)
    # One rank of each node compiles first, also in a group without torchrun's first rank.
    local_rank = group.nodes[:rank].count(group.nodes[rank])
    group = _with_gpus(replace(group, local_rank=local_rank))
    _ = group.nodes  # not at a later use, which may be that of one rank
    if group.shares_gpus:
        warnings.warn(
            f"tileweave: {world_size} ranks on {len(set(group.gpus))} GPU(s): ranks share a GPU in "
            "time slices, right but slow",
            stacklevel=3,
        )
    indices = group.exchange("index of the GPU", str(device.index))
    if len(set(indices)) < world_size:  # torch treats equal indices as one GPU
        os.environ.setdefault("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")
    return group


def from_torchrun(variable: str, minimum: int) -> int:
    """Return a number that torchrun puts into the environment; ``minimum`` without torchrun.

    Raises:
        TileWeaveError: the variable is not a number of at least ``minimum``.
    """
    value = os.environ.get(variable, str(minimum))
    if not value.isdecimal() or int(value) < minimum:
        raise TileWeaveError(
            f"init: {variable}={value!r}; expected {minimum} or more, from torchrun"
        )
    return int(value)


def _initialize(local_rank: int, device: torch.device) -> None:
    """Initialize torch.distributed until the process ends: torch cannot initialize it twice."""
    try:
        store, rank, world_size = next(dist.rendezvous("env://"))
    except ValueError as error:
        raise TileWeaveError(
            f"init: {error}; expected the variables of torchrun, or torch.distributed initialized"
        ) from None
    store.set_timeout(dist.constants.default_pg_timeout)
    prefixed_store = dist.PrefixStore("tileweave/before torch.distributed", store)
    shared = _with_gpus(
        Group(rank, world_size, local_rank, device, None, prefixed_store)
    ).shares_gpus
    dist.init_process_group(
        "gloo" if shared else "cpu:gloo,cuda:nccl",  # NCCL accepts only one rank per GPU
        store=dist.PrefixStore("default_pg", store),
        rank=rank,
        world_size=world_size,
        device_id=None if shared else device,
    )
    atexit.register(_leave)


def _with_gpus(group: Group) -> Group:
    """Return ``group`` with the UUIDs of all ranks' GPUs. Collective."""
    device = group.device if group.device.type == "cuda" else torch.cuda.current_device()
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    return replace(group, gpus=tuple(group.exchange("GPUs", uuid)))


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
