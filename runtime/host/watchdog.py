"""Turns a wait that gave up on the GPU into words and a Python exception, on this rank and on its
peers."""

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
from .context import Record
from .group import Group

POLL_S = 0.005
PEERS_EVERY_S = 0.5
TOLD_S = 1.0
"""For the device to finish its record and for the peers to be told."""
GRACE_S = 3.0
"""For the main thread to come back to Python and raise."""
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


class Watchdog:
    """A thread that looks at the record a kernel leaves and at what the peers say.

    It prints the report at once, raises DeadlockError in the main thread, and, should that thread
    be stuck in a call that never returns to Python, ends the process after a few seconds.
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
        # Its own connection: the main thread may stand in a call of the store for minutes.
        self._store = group.store.clone() if group.store is not None else None
        self._stop = threading.Event()
        self._told = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="tileweave-watchdog", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop watching."""
        self._stop.set()
        self._thread.join()

    def raise_if_deadlocked(self) -> None:
        """Raise DeadlockError if a wait of this process has given up."""
        if self._record.state == Record.EMPTY:
            return
        # Once the main thread has ended the interpreter, nobody tells the peers.
        self._told.wait(TOLD_S)
        raise DeadlockError(self.report())

    def report(self) -> str:
        """The record in words."""
        r = self._record
        loc = LOCS.get(r.loc)
        unsigned = loc is not None and loc.dtype.startswith("uint")
        # The device sign-extends what is signed.
        expected, seen = (v if unsigned else ctypes.c_int64(v).value for v in (r.expected, r.seen))
        peer = f"a signal from rank {r.peer}" if r.peer >= 0 else "a signal"
        return (
            f"tileweave: rank {r.rank} waited {self._timeout_s:g} s for {peer} and gave up: "
            f"{loc or f'wait {r.loc:#x}'}; flag {self._describe(r.flag)}: seen {seen}, "
            f"expected {expected}; block ({', '.join(map(str, r.block))}), thread {r.thread}"
            + (_ON_ONE_GPU if self._group.shares_gpus else "")
        )

    def _watch(self) -> None:
        looked = 0.0
        while not self._stop.wait(POLL_S):
            if self._record.state == Record.READY:
                self._end(self.report(), tell=True)
                return
            if self._store is not None and time.monotonic() - looked > PEERS_EVERY_S:
                looked = time.monotonic()
                if said := self._peers_say():
                    self._end(f"tileweave: rank {self._group.rank} stops: {said}", tell=False)
                    return

    def _peers_say(self) -> str:
        try:
            if self._store.check([_KEY]):
                return self._store.get(_KEY).decode()
        except Exception:
            return ""  # the store is gone: torchrun is ending the group
        return ""

    def _end(self, report: str, tell: bool) -> None:
        global _report
        _report = report
        print(report, file=sys.stderr, flush=True)
        if tell and self._store is not None:
            try:
                self._store.set(_KEY, report)
            except Exception as error:
                print(f"tileweave: could not tell the peers: {error}", file=sys.stderr, flush=True)
        # A lost GPU context can hold up the end of the process for ever: leave before its teardown.
        atexit.register(os._exit, 1)
        main = threading.main_thread()
        if main.ident is not None and not _delivered.is_set():
            ctypes.pythonapi.PyThreadState_SetAsyncExc(
                ctypes.c_ulong(main.ident), ctypes.py_object(DeadlockError)
            )
        self._told.set()
        if not _delivered.wait(GRACE_S):
            os._exit(1)
