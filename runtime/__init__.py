"""Group, symmetric heap, compile-once, launch, watchdog and topology."""

from .host.driver import DriverError
from .host.heap import HeapExhausted, SymmetricTensor
from .host.session import current, finalize, init, rank, symmetric, world_size
from .host.watchdog import DeadlockError
from .kernel import host_functions
from .kernel.barrier import barrier
from .kernel.kernel import Kernel, compile
from .plans.plan import Plan, Steps, plan

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
