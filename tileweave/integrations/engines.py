"""Entry points of engines that serve models: vLLM and SGLang load them in each of their processes.

An integration is enabled only if the variable of the engine that selects plug-ins names
``tileweave``.
"""

from __future__ import annotations

import os
import warnings
from importlib import import_module
from importlib.metadata import version

from torch import Tensor

from ..builtins.versions import numbers_of
from ..ops.moe import row_problem

_NAME = "tileweave"


def vllm() -> None:
    """Enable ``tileweave.integrations.vllm`` if ``VLLM_PLUGINS`` names it."""
    _enable("vllm", "VLLM_PLUGINS", (0, 33))


def sglang() -> None:
    """Enable ``tileweave.integrations.sglang`` if ``SGLANG_PLUGINS`` names it."""
    _enable("sglang", "SGLANG_PLUGINS", (0, 5, 23))


def _enable(engine: str, variable: str, tested: tuple[int, ...]) -> None:
    """Call ``enable`` of an integration, or warn that the engine has another release or hooks."""
    names = os.environ.get(variable, "").split(",")
    if _NAME not in map(str.strip, names):
        return
    release, expected = version(engine), ".".join(map(str, tested))
    if numbers_of(release)[: len(tested)] != tested:
        obstacle = f"{engine} is {release}; expected {expected}"
    else:
        try:
            import_module(f"{__package__}.{engine}").enable()
            return
        except (ImportError, AttributeError) as error:
            obstacle = str(error)
    message = f"tileweave.integrations.{engine} is not enabled: {obstacle}"
    warnings.warn(message, RuntimeWarning, stacklevel=2)


def padded(rows: Tensor) -> Tensor:
    """Return rows (T, K), followed by zeros up to one of few numbers of rows.

    A batch may have any number of tokens, and the first call of an operator with a new number of
    rows infers its synchronization and allocates memory. Numbers are multiples of 64, and of a
    power of two that is at most a sixteenth of them.
    """
    step = max(64, (1 << len(rows).bit_length()) // 32)
    return row_problem.padded(rows, -(-len(rows) // step) * step)
