"""Group, symmetric heap, compile-once, launch, watchdog and topology."""

from .compiler import compile
from .executor.plan import Plan, plan
from .host.driver import DriverError
from .host.heap import HeapExhausted, SymmetricTensor
from .host.session import current, rank, symmetric, world_size
from .host.watchdog import DeadlockError
from .kernel import host_functions
from .kernel.barrier import barrier
from .kernel.kernel import Kernel
from .kernel.statistics import Stats, stats
from .lifecycle import finalize, init
from .plans.builder import PlanBuilder

host_functions.register()

__all__ = [
    "DeadlockError",
    "DriverError",
    "HeapExhausted",
    "Kernel",
    "Plan",
    "PlanBuilder",
    "Stats",
    "SymmetricTensor",
    "barrier",
    "compile",
    "current",
    "finalize",
    "init",
    "plan",
    "rank",
    "stats",
    "symmetric",
    "world_size",
]
