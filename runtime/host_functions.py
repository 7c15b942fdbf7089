"""What the host part of a compiled program asks at each launch; see ``passes/bind_runtime.py``."""

from __future__ import annotations

import tvm_ffi

from ..builtins.errors import TileWeaveError
from .session import current
from .topology import multicast_refusal


def register() -> None:
    """Register the functions under the names of the operators they stand for."""
    for name, function in _FUNCTIONS.items():
        tvm_ffi.register_global_func(name, f=function, override=True)


def _require_multicast(kernel: str) -> int:
    if refusal := multicast_refusal():
        raise TileWeaveError(f"{kernel}: uses multimem, but {refusal}; expected a machine with NVLink multicast")
    return 0


_FUNCTIONS = {
    "tileweave.rank": lambda: current().group.rank,
    "tileweave.world_size": lambda: current().group.world_size,
    "tileweave.context": lambda: current().context.address,
    "tileweave.require_multicast": _require_multicast,
}
