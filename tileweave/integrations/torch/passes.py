"""FX passes of the integration as Inductor calls them, beside those of the user."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch._inductor import config, custom_graph_pass
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch._inductor.fx_passes.micro_pipeline_tp import micro_pipeline_tp_pass
from torch.fx import Graph

from .all_reduces import fuse_all_reduces
from .biases import add_biases_to_gathered_products, add_biases_to_sums
from .explanation import record
from .gather_forms import flatten_gathers, merge_gathers
from .layout import enable_group
from .reasons import collectives
from .rms_norms import fuse_rms_norms

_FILES = tuple(str(file) for file in sorted(Path(__file__).parent.glob("*.py")))
_Pass = Callable[[Graph], None]
_WithInference: Any = getattr(custom_graph_pass, "CustomInferenceAwareGraphPass", CustomGraphPass)
"""Class of passes that also learn whether a graph is without gradients; torch 2.11 has none."""


def _listed(passes: Any) -> list[Any]:
    return list(passes) if isinstance(passes, (list, tuple)) else [passes] if passes else []


class Passes(_WithInference):
    """Passes of the user, then one of the integration: torch 2.11 accepts no list of passes."""

    def __init__(self, users: Any, own: _Pass) -> None:
        self.users = _listed(users)
        self.own = own

    def __call__(self, graph: Graph, is_inference: bool | None = None) -> None:
        for user in self.users:
            if is_inference is not None and isinstance(user, _WithInference):
                user(graph, is_inference)
            else:
                user(graph)
        self.own(graph)

    def uuid(self) -> Any:
        """Return what the cache of compiled graphs depends on; None, which disables the cache, if
        a pass of the user does not say it."""
        ids = [user.uuid() if isinstance(user, CustomGraphPass) else None for user in self.users]
        if not all(ids):
            return None
        return get_hash_for_files(_FILES), self.own.__name__, *ids


def patched_config() -> Any:
    """Return the context in which Inductor fuses collectives and calls all passes."""
    return config.patch(
        post_grad_custom_pre_pass=Passes(config.post_grad_custom_pre_pass, _before_fusion),
        post_grad_custom_post_pass=Passes(config.post_grad_custom_post_pass, _after_fusion),
    )


def are_replaced() -> bool:
    """Return whether Inductor no longer calls the passes of ``patched_config``."""
    passes = config.post_grad_custom_pre_pass, config.post_grad_custom_post_pass
    return not all(any(isinstance(p, Passes) for p in _listed(each)) for each in passes)


def _before_fusion(graph: Graph) -> None:
    for group in {collective.group for collective in collectives(graph)}:
        enable_group(group)
    merge_gathers(graph)
    flatten_gathers(graph)
    # Before Inductor's pass, whose new nodes have no shapes yet.
    fuse_rms_norms(graph)
    add_biases_to_sums(graph)
    fuse_all_reduces(graph)


def _after_fusion(graph: Graph) -> None:
    if any(collectives(graph)):
        # Not earlier: Inductor would unite product and bias again.
        add_biases_to_gathered_products(graph)
        with mock.patch.object(dist, "is_nccl_available", lambda: True):  # gloo does not need it
            micro_pipeline_tp_pass(graph)
    record(graph)
