"""For tests of timing: nothing here changes what a program computes."""

from __future__ import annotations

from .declare import builtin
from .spec import Constant

__all__ = ["delay"]


@builtin(implicit=("context",))
def delay(seed: Constant, place: Constant) -> None:
    """Sleep up to 16 microseconds; the time differs between ranks, blocks and places.

    ``pass_configs={"tileweave.delays": seed}`` puts one before every signal and after every wait
    but those that stand by themselves in ``T.Pipelined``.

    Args:
        seed: chooses the times.
        place: number of the call in its program.

    Source: PTX ISA, ``nanosleep``.
    """
