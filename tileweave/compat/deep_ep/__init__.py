"""Exchange of tokens with the interface of DeepEP 1.2.1, for the ranks of one node.

A program that imports ``deep_ep`` imports this module instead; DeepEP need not be installed. The
exchanges are those of ``ops.dispatch`` and ``ops.combine``, also on CPUs. Results have no
gradients, as those of DeepEP.
"""

from .buffer import Buffer
from .events import Config, EventOverlap

__all__ = ["Buffer", "Config", "EventOverlap"]
