"""Group, symmetric heap, compile-once, launch, watchdog and topology."""

from . import host_functions
from .barrier import barrier
from .driver import DriverError
from .heap import HeapExhausted, SymmetricTensor
from .kernel import Kernel, compile
from .plans import Plan, Steps, plan
from .session import current, finalize, init, rank, symmetric, world_size
from .watchdog import DeadlockError

host_functions.register()

__all__ = [
    "DeadlockError",
    "DriverError",
    "HeapExhausted",
    "Kernel",
    "Plan",
    "Steps",
    "SymmetricTensor",
    "barrier",
    "compile",
    "current",
    "finalize",
    "init",
    "plan",
    "rank",
    "symmetric",
    "world_size",
]
