"""Turn a wait that timed out on the GPU into a report and a Python exception, on this rank and on
its peers."""

from __future__ import annotations

import atexit
import ctypes
import os
import sys
import threading
import time
from collections.abc import Callable

from ...builtins.errors import TileWeaveError
from ...builtins.implicit import LOCS
from ...builtins.spec import BUILTINS, Builtin
from .context import Record
from .group import Group

POLL_S = 0.005
PEERS_EVERY_S = 0.5
PUBLISH_S = 1.0
"""Time for the device to finish its record and for this rank to publish the report to the peers."""
GRACE_S = 3.0
"""Time for the main thread to return to Python and raise."""
_KEY = "tileweave/deadlock"
_ON_ONE_GPU = (
    "; ranks share a GPU, where a copy needs room on the SMs that a kernel which waits for it may "
    "take: expected a GPU for each rank, or such a kernel of fewer blocks"
)


class DeadlockError(TileWeaveError, RuntimeError):
    """A wait on the GPU timed out, here or on a peer. The GPU context of this process is lost."""

    def __init__(self, message: str = "") -> None:
        super().__init__(message or _report)
        _delivered.set()


_report = ""
_delivered = threading.Event()
_watching: list[Watchdog] = []
"""Watchdogs of all sessions of this process."""


class Watchdog:
    """Thread that polls the record that a kernel writes and the reports of the peers.

    It prints the report immediately and raises DeadlockError in the main thread. If that thread is
    stuck in a call that does not return to Python, it ends the process after a few seconds.
    """

    def __init__(
        self, group: Group, record: Record, describe: Callable[[int], str], timeout_s: float
    ) -> None:
        self._group, self._record, self._describe, self._timeout_s = (
            group,
            record,
            describe,
            timeout_s,
        )
        # Its own connection: the main thread may block in a call of the store for minutes.
        self._store = group.store.clone() if group.store is not None else None
        self._stop = threading.Event()
        self._published = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="tileweave-watchdog", daemon=True)
        _watching.append(self)
        self._thread.start()

    def close(self) -> None:
        """Stop watching."""
        _watching.remove(self)
        self._stop.set()
        self._thread.join()

    def raise_if_deadlocked(self) -> None:
        """Raise DeadlockError if a wait of this process has timed out."""
        if self._record.state == Record.EMPTY:
            return
        # After the main thread ends the interpreter, no thread publishes to the peers.
        self._published.wait(PUBLISH_S)
        raise DeadlockError(self.report())

    def report(self) -> str:
        """Return the record as text."""
        r = self._record
        loc = LOCS.get(r.loc)
        unsigned = loc is not None and loc.dtype.startswith("uint")
        # The device sign-extends signed values.
        expected, seen = (v if unsigned else ctypes.c_int64(v).value for v in (r.expected, r.seen))
        spec = BUILTINS[f"tileweave.{loc.op}"] if loc is not None else None
        who, block = self._group.describe_rank(r.rank), ", ".join(map(str, r.block))
        if spec is not None and (spec.announces or spec.checks):
            return (
                f"tileweave: {who} {fault_of_rows(spec, seen, expected)}: {loc}; "
                f"{self._describe(r.flag)}; block ({block}), thread {r.thread}"
            )
        peer = f"a signal from rank {r.peer}" if r.peer >= 0 else "a signal"
        return (
            f"tileweave: {who} waited {self._timeout_s:g} s for "
            f"{peer} and gave up: {loc or f'wait {r.loc:#x}'}; flag {self._describe(r.flag)}: "
            f"seen {seen}, expected {expected}; block ({block}), thread {r.thread}"
            + (_ON_ONE_GPU if self._group.shares_gpus else "")
        )

    def _watch(self) -> None:
        polled = 0.0
        while not self._stop.wait(POLL_S):
            if self._record.state == Record.READY:
                report = self.report()
                self._end(report, report)
                return
            if self._store is not None and time.monotonic() - polled > PEERS_EVERY_S:
                polled = time.monotonic()
                if report := self._report_of_peers():
                    own_name = self._group.describe_rank(self._group.rank)
                    self._end(f"tileweave: {own_name} stops: {report}", report)
                    return

    def publish(self, report: str) -> None:
        """Publish a report to the peers, unless one is published."""
        if self._store is None or self._report_of_peers():
            return
        try:
            self._store.set(_KEY, report)
        except Exception as error:
            print(
                f"tileweave: could not publish to the peers: {error}", file=sys.stderr, flush=True
            )

    def _report_of_peers(self) -> str:
        """Return the report that a peer has published; empty if there is none."""
        try:
            if self._store.check([_KEY]):
                return self._store.get(_KEY).decode()
        except Exception:
            return ""  # the store has closed: torchrun is ending the group
        return ""

    def _end(self, message: str, report: str) -> None:
        """End the process with a message. Publish the report to the peers in all groups, because
        they wait for this process too."""
        global _report
        _report = message
        print(message, file=sys.stderr, flush=True)
        for watchdog in [self, *(other for other in _watching if other is not self)]:
            watchdog.publish(report)
        # A lost GPU context can block the end of the process forever: exit before its teardown.
        atexit.register(os._exit, 1)
        main = threading.main_thread()
        if main.ident is not None and not _delivered.is_set():
            ctypes.pythonapi.PyThreadState_SetAsyncExc(
                ctypes.c_ulong(main.ident), ctypes.py_object(DeadlockError)
            )
        self._published.set()
        if not _delivered.wait(GRACE_S):
            os._exit(1)


def fault_of_rows(spec: Builtin, seen: int, expected: int) -> str:
    """Describe a fault of the rows of a ragged tensor.

    Args:
        seen, expected: what a builtin that announces or checks rows reports.
    """
    if spec.announces:
        return f"announced {seen} rows of a segment; expected 0 to {expected}"
    if spec.level == "thread":
        return f"wrote {seen} units to a segment, in all launches, and announced {expected}"
    if 0 <= seen < expected:
        return f"wrote row {seen} of a segment twice in a launch"
    return f"wrote row {seen} of a segment of {expected} rows"
