"""Operations for tests of timing. They do not change the results of a program."""

from __future__ import annotations

from .declare import builtin
from .spec import Constant

__all__ = ["delay"]


@builtin(implicit=("context",))
def delay(seed: Constant, place: Constant) -> None:
    """Sleep up to 16 microseconds. The time differs between ranks, blocks and calls.

    ``pass_configs={"tileweave.delays": seed}`` inserts a call before every signal and after every
    wait, except waits that are statements of their own in ``T.Pipelined``.

    Args:
        seed: seed of the random times.
        place: number of the call in its program.

    Source: PTX ISA, ``nanosleep``.
    """
