"""Published bugs of multi-GPU kernels as small programs, each with its correct twin.

The programs are written from the description of the bug in its issue or pull request, and contain
no code of these projects. A specimen is one factory: ``make(True)`` is the faulty program and
``make(False)`` the correct one. Importing a theme registers its specimens.
"""

from . import counts, proxies, release, reuse
from .case import ZOO, Specimen

__all__ = ["ZOO", "Specimen", "counts", "proxies", "release", "reuse"]
