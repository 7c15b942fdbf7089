"""Tensor parallelism of PyTorch by TileWeave's operators: DTensor with ``torch.compile``.

from tileweave.integrations.torch import enable
enable()  # before the first call of the compiled model
"""

from __future__ import annotations

from .explanation import Explanation
from .fsdp import set_fsdp_communication
from .hooks import Enabled, disable, enable, explain
from .styles import parallel_styles

__all__ = [
    "Enabled",
    "Explanation",
    "disable",
    "enable",
    "explain",
    "parallel_styles",
    "set_fsdp_communication",
]
