"""Expert and tensor parallelism of Hugging Face transformers by TileWeave's operators.

from tileweave.integrations.transformers import enable
enable()  # before from_pretrained
"""

from __future__ import annotations

import warnings

_NAME, _ROWWISE = "tileweave", "rowwise"


def enable() -> None:
    """Let models that are loaded from now on use the operators.

    ``DistributedConfig(ep_implementation="tileweave", ...)`` selects them for experts. Layers with
    the style ``rowwise`` of tensor parallelism call ``matmul_all_reduce``. Nothing is enabled, and
    a warning says why, if this release of transformers has other hooks.
    """
    try:
        from .layers import ALL_PARALLEL_STYLES, EPImplementationInterface, Experts, Rowwise
    except ImportError as error:
        message = f"tileweave.integrations.transformers is not enabled: {error}"
        warnings.warn(message, RuntimeWarning, stacklevel=2)
        return
    EPImplementationInterface.register(_NAME, Experts)
    ALL_PARALLEL_STYLES.register(_ROWWISE, Rowwise())


def disable() -> None:
    """Let models that are loaded from now on use the styles of transformers, and forget
    ``tileweave``."""
    from .layers import ALL_PARALLEL_STYLES, EPImplementationInterface, RowwiseParallel

    EPImplementationInterface._global_mapping.pop(_NAME, None)
    ALL_PARALLEL_STYLES.register(_ROWWISE, RowwiseParallel())


__all__ = ["disable", "enable"]
