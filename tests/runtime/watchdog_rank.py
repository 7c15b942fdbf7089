"""A rank with a watchdog and without a GPU: ``watchdog_rank.py RANK WORLD_SIZE PORT WHAT``.

WHAT is what its main thread does: ``python`` runs Python, ``stuck`` never returns from a call,
``stuck_at_exit`` does not while the interpreter ends, ``launch`` asks as a kernel launch does. On
rank 0 a wait gives up, once every rank is up.
"""

import atexit
import ctypes
import sys
import threading
import time

import torch
import torch.distributed as dist

from tileweave.builtins.implicit import LOCS, Loc
from tileweave.runtime.host.context import Record
from tileweave.runtime.host.group import Group
from tileweave.runtime.host.watchdog import DeadlockError, Watchdog

rank, world_size, port = map(int, sys.argv[1:4])
what = sys.argv[4]

store = dist.PrefixStore("watchdog", dist.TCPStore("127.0.0.1", port, is_master=False))
group = Group(rank, world_size, rank, torch.device("cpu"), None, store)
LOCS[7] = Loc("wait_reached", "S[0, 5]", "program.py", 12, "uint32")
record = Record()
watchdog = Watchdog(group, record, lambda address: f"<{address:#x}>", timeout_s=3)
group.meet("up")


def give_up() -> None:
    """Write the record as ``give_up`` in context.cuh does, but slowly."""
    record.state = Record.CLAIMED
    time.sleep(0.05)
    record.loc, record.rank, record.peer = 7, rank, 1
    record.flag, record.expected, record.seen = 0x1234, 9, 8
    record.block, record.thread = (ctypes.c_uint32 * 3)(1, 2, 3), 64
    record.state = Record.READY


def hang() -> None:
    """Never return to Python."""
    ctypes.CDLL(None).pause()


if rank == 0:
    threading.Thread(target=give_up).start()
if what == "stuck":
    hang()
if what == "stuck_at_exit":
    atexit.register(hang)
try:
    while True:
        time.sleep(0.001)
        if what == "launch":
            watchdog.raise_if_deadlocked()
except DeadlockError as error:
    print(f"raised: {error}")
    sys.stdout.flush()
    raise
