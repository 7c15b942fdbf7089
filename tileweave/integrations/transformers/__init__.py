"""Expert and tensor parallelism of Hugging Face transformers by TileWeave's operators.

from tileweave.integrations.transformers import enable
enable()  # before from_pretrained
"""

from __future__ import annotations

import warnings


def enable() -> None:
    """Let models that are loaded from now on use the operators.

    ``DistributedConfig(ep_implementation="tileweave", ...)`` selects them for experts. Layers with
    the style ``rowwise`` of tensor parallelism call ``matmul_all_reduce``. Nothing is enabled, and
    a warning says why, if this release of transformers has other hooks.
    """
    try:
        from .layers import register
    except ImportError as error:
        message = f"tileweave.integrations.transformers is not enabled: {error}"
        warnings.warn(message, RuntimeWarning, stacklevel=2)
        return
    register()


def disable() -> None:
    """Let models that are loaded from now on use the styles of transformers, and forget
    ``tileweave``."""
    from .layers import unregister

    unregister()


__all__ = ["disable", "enable"]
