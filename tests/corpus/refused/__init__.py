"""Programs for which no synchronization can be inferred, each with the message.

Importing a theme registers its programs.
"""

from . import indices, ragged, versions, writers
from .case import F32, REFUSED, N

__all__ = ["F32", "REFUSED", "N", "indices", "ragged", "versions", "writers"]
