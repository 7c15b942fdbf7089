"""Verification of programs with explicit signals and waits."""

from __future__ import annotations

import warnings

from tvm import tirx

from ....builtins.errors import SyncWarning
from .verification import verify_program


def verify_sync(func: tirx.PrimFunc, world_size: int) -> tirx.PrimFunc:
    """Refuse a program whose explicit signals, waits and barriers leave a race.

    A race is a write and a read of one element of a symmetric tensor by different blocks, of any
    rank, that no chain of signals and waits, barriers and fences of sufficient scope orders. The
    two may be in different launches. The pass computes accesses, flags and values for all ranks,
    blocks and iterations of a few launches.

    Assumptions: memory starts at zero; values known only at run time that differ only between
    launches equal the number of the launch; a wait orders everything if the index of its flag, or
    of a signal of its tensor, depends on data.

    Not verified: data-dependent accesses; words that ``W.ld``, ``W.st``, ``W.ll_ld``, ``W.ll_st``
    access; the order of the threads of a block; two writes of the same element; that awaited values
    are reached. A ``SyncWarning`` names each event or tensor that is too large to be verified.

    Raises:
        LanguageError: names the accesses, their lines, and what would order them.

    Before and after: the same program
    """
    name = func.attrs["global_symbol"]
    for unverified in verify_program(func, world_size):
        event = unverified.event
        message = f"verify_sync of {name}: {event.text}: {unverified.reason}; it is not verified"
        warnings.warn(f"{message}{event.location}", SyncWarning, stacklevel=2)
    return func
