"""Settings that must be equal on all ranks: versions, the heap, and the environment."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping

import tilelang
import torch

from ...builtins import versions
from ...builtins.errors import TileWeaveError
from .group import Group

_VARIABLES = {"TILEWEAVE_TUNE": "0"}
"""Variables whose values must be equal, with their defaults."""


def settings(heap_bytes: int, timeout_s: float) -> dict[str, str]:
    """Return the settings of this rank, by the name that users know."""
    return {
        "tileweave": versions.__version__,
        "tilelang": tilelang.__version__,
        "torch": torch.__version__,
        "heap_bytes": str(heap_bytes),
        "TILEWEAVE_TIMEOUT_S": f"{timeout_s:g}",
    } | {name: os.environ.get(name, default) for name, default in _VARIABLES.items()}


def require_equal(group: Group, own: Mapping[str, str]) -> None:
    """Compare the settings of all ranks. Collective.

    Raises:
        TileWeaveError: they differ; the message has each value that differs, of each rank.
    """
    ranks = [json.loads(text) for text in group.exchange("init", json.dumps(dict(own)))]
    names = [name for name in own if len({values.get(name) for values in ranks}) > 1]
    if names:
        details = "; ".join(
            f"rank {rank}: {', '.join(f'{name}={values.get(name)}' for name in names)}"
            for rank, values in enumerate(ranks)
        )
        hint = " (TILEWEAVE_HEAP_BYTES)" if "heap_bytes" in names else ""
        raise TileWeaveError(
            f"init: the ranks differ ({details}); expected the same {', '.join(names)}{hint} on "
            "every rank"
        )
