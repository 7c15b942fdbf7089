"""Switch the integration on and off."""

from __future__ import annotations

import inspect
import pkgutil
import warnings
from contextlib import ExitStack

import torch

from ...builtins.versions import unsupported_torch
from . import calls, context_parallel, explanation
from .explanation import Explanation
from .gathers import IMPLEMENTATIONS as GATHERS
from .scatters import IMPLEMENTATIONS as SCATTERS

_IMPLEMENTATIONS = GATHERS | SCATTERS
_HOOKS = (
    "torch._inductor.config:post_grad_custom_post_pass",
    "torch._inductor.config:post_grad_custom_pre_pass",
    "torch._inductor.custom_graph_pass:CustomGraphPass",
    "torch._inductor.custom_graph_pass:get_hash_for_files",
    "torch._inductor.fx_passes.micro_pipeline_tp:find_all_gather_patterns",
    "torch._inductor.fx_passes.micro_pipeline_tp:find_reduce_scatter_patterns",
    "torch._inductor.fx_passes.micro_pipeline_tp:micro_pipeline_tp_pass",
    "torch.distributed._symmetric_memory:_maybe_convert_scalar_types_to_dtypes",
    "torch.distributed._symmetric_memory:enable_symm_mem_for_group",
    "torch.distributed._symmetric_memory:is_symm_mem_enabled_for_group",
    "torch.distributed.tensor.experimental._context_parallel._attention:_cp_options.enable_load_balance",
    "torch.distributed.tensor.experimental._context_parallel._attention:custom_ops",
)
"""Private names of torch without which nothing is enabled."""
_stack: ExitStack | None = None
"""Undoes what ``enable`` has done; None if the integration is not enabled."""


class Enabled:
    """Result of ``enable``: a context manager that calls ``disable`` at its end, unless the
    integration was already enabled."""

    def __init__(self, is_new: bool) -> None:
        self._is_new = is_new

    def __enter__(self) -> Enabled:
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_new:
            disable()


def enable() -> Enabled:
    """Let ``torch.compile`` fuse the collectives of tensor parallelism by TileWeave's operators.

    Call it on every rank before the first call of the compiled model, and keep it enabled until
    the backward pass is compiled. Graphs that are compiled before are not changed, and those
    compiled meanwhile keep calling ``torch.ops.symm_mem`` afterwards. ``explain`` says what was
    fused. Nothing is enabled, and a warning says why, if this release of torch has other hooks.

    Returns:
        A context manager that disables the integration at its end; it need not be used.
    """
    global _stack
    if _stack is not None:
        return Enabled(is_new=False)
    if (obstacle := _obstacle()) is not None:
        message = f"tileweave.integrations.torch is not enabled: {obstacle}"
        warnings.warn(message, RuntimeWarning, stacklevel=2)
        return Enabled(is_new=False)
    from .passes import patched_config  # imports hooks, which other releases may lack

    calls.clear()
    explanation.graphs.clear()
    with ExitStack() as stack:
        stack.enter_context(patched_config())
        stack.enter_context(context_parallel.handlers())
        library = torch.library.Library("symm_mem", "IMPL")
        stack.callback(library._destroy)
        with warnings.catch_warnings():  # torch warns of overridden kernels
            warnings.simplefilter("ignore", UserWarning)
            for name, function in _IMPLEMENTATIONS.items():
                for device in ("CPU", "CUDA"):
                    library.impl(name, function, device, allow_override=True)
        _stack = stack.pop_all()
    return Enabled(is_new=True)


def explain() -> Explanation:
    """Return which collectives were fused in each graph that was compiled since ``enable``, and why
    the others were not; ``print`` shows it."""
    remark = "" if _stack else "the integration is not enabled"
    if _stack:
        from .passes import are_replaced

        if are_replaced():
            remark = "passes that were set after enable() replace those of the integration"
    return Explanation(list(explanation.graphs), calls.kinds(), remark)


def disable() -> None:
    """Restore torch's own operators and the settings of Inductor from before ``enable``; do nothing
    if it is not enabled."""
    global _stack
    stack, _stack = _stack, None
    if stack is not None:
        stack.close()


def _obstacle() -> str | None:
    """Return why this torch cannot be used, with what is expected; else None."""
    if reason := unsupported_torch(torch.__version__):
        return reason
    missing = [name.replace(":", ".") for name in _HOOKS if not _exists(name)]
    for name, function in _IMPLEMENTATIONS.items():
        operator = getattr(torch.ops.symm_mem, name, None)
        if operator is None:
            missing.append(f"torch.ops.symm_mem.{name}")
            continue
        arguments = list(inspect.signature(function).parameters)
        if [argument.name for argument in operator.default._schema.arguments] != arguments:
            missing.append(f"the arguments {', '.join(arguments)} of torch.ops.symm_mem.{name}")
    return f"torch {torch.__version__} lacks {', '.join(missing)}" if missing else None


def _exists(name: str) -> bool:
    try:
        pkgutil.resolve_name(name)
    except (ImportError, AttributeError):
        return False
    return True
