"""Operations for tests of timing and for traces. They do not change the results of a program."""

from __future__ import annotations

from typing import Annotated, Any

from .declaration.declare import builtin
from .spec import Constant, Int64, Pointer

__all__ = ["delay", "globaltimer", "record"]

OptionalRead = Annotated[Any, Pointer("r", optional=True)]


@builtin(no_effect=True, implicit=("context",))
def delay(seed: Constant, place: Constant) -> None:
    """Sleep up to 16 microseconds. The time differs between ranks, blocks and calls.

    ``pass_configs={"tileweave.delays": seed}`` inserts a call before every signal and after every
    wait, except waits that are statements of their own in ``T.Pipelined``.

    Args:
        seed: seed of the random times.
        place: number of the call in its program.

    Source: PTX ISA, ``nanosleep``.
    """


@builtin()
def globaltimer() -> Int64:
    """Return the time of the GPU's clock in nanoseconds.

    All SMs of a GPU read the same clock. The clocks of two GPUs differ by an offset. The clock
    advances in steps: 32 ns on Hopper, up to 1 microsecond on other GPUs. The simulator counts
    the events of the schedule instead.

    Source: PTX ISA, special registers, ``%globaltimer``.
    """


@builtin(no_effect=True, implicit=("context", "launch"))
def record(
    event: Constant,
    begin: Int64 = 0,
    flag: OptionalRead = None,
    seen: Int64 = 0,
    wanted: Int64 = 0,
) -> None:
    """Append an event with the current time, block and SM to the rank's trace buffer.

    ``tw.trace`` inserts the calls into the kernels that it records; programs need none. Each thread
    that reaches the call appends an event. If the buffer is full, the event is only counted.
    Outside of ``tw.trace``, and in the simulator, the call does nothing.

    Args:
        event: number of the event in the table of its kernel.
        begin: time in nanoseconds at which the event began, of ``globaltimer``; 0: it has no
            duration.
        flag: the flag that is awaited or changed.
        seen: value of the flag before the event.
        wanted: the awaited value, or the added one.
    """
