"""``tw.prepare``: compile before the first step what it needs."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.utils._pytree import tree_leaves, tree_map_only

from ..builtins.errors import TileWeaveError, brief_errors
from ..runtime.executor.compile_ahead import Compilation
from ..runtime.kernel.kernel import capturing
from .core.checks import refused
from .core.compiled import op_cache_of
from .core.groups import group_of
from .core.noted import noted_groups, noted_problems

NAME = "prepare"


@brief_errors
def prepare(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Compilation:
    """Begin to compile all kernels that a function and its gradients need, on all cores of all
    ranks.

    The function runs on tensors without memory (``torch``'s fake tensors): nothing is computed and
    nothing is sent. Then other processes compile: first what the function needs, then what it needs
    for other numbers of rows. A call waits for the kernels that it needs. Without ``tw.prepare``
    the operators of a step compile one after the other. Collective over all ranks, which may pass
    different functions. A kernel is compiled if all ranks of its group need it; others are compiled
    by their first calls.

    Args:
        function: a module, or a function that returns what is differentiated, such as a loss, or
            calls ``backward``. Gradients of parameters are not set. A function of ``torch.compile``
            runs without being compiled.
        args, kwargs: its arguments; their tensors keep their values.

    Returns:
        ``kernels``, the number of kernels that have to be compiled, and ``wait()``, which waits for
        the part of this rank, also for other numbers of rows.

    Raises:
        TileWeaveError: the function needs the value of a tensor, such as ``x.item()``; it fails on
            another rank; or a CUDA graph is being captured.
    """
    if capturing():
        raise refused(NAME, "a CUDA graph is being captured", "a call before it is captured")
    try:
        _trace(function, args, kwargs)
    except Exception as error:
        with suppress(TileWeaveError):  # the user needs the first error
            _exchange(error)  # the other ranks wait for this one
        if not isinstance(error, DataDependentOutputException | DynamicOutputShapeException):
            raise
        raise refused(
            NAME, f"{error.func} needs values of tensors, which are not computed here",
            "a function without it, such as the layers between",
        ) from error  # fmt: skip
    begun = []
    for name in _groups_of_all_members():
        ranks = group_of(name)
        if problems := noted_problems(ranks):
            begun.append(op_cache_of(ranks).compile_ahead(problems))
    return Compilation(sum(c.kernels for c in begun), [w for c in begun for w in c.work])


def _trace(function: Callable[..., Any], args: Any, kwargs: Any) -> None:
    """Run a function and its gradients on fake tensors, which notes their problems."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with torch.compiler.set_stance("force_eager"), _backward_as(_differentiate), mode:
        args, kwargs = tree_map_only(torch.Tensor, mode.from_tensor, (args, kwargs))
        results = function(*args, **kwargs)
        _differentiate([x for x in tree_leaves(results) if isinstance(x, torch.Tensor)])


@contextmanager
def _backward_as(function: Callable[..., None]) -> Iterator[None]:
    """Call ``function`` in place of ``backward``, which would set gradients of parameters to fake
    tensors."""
    backward = torch.autograd.backward
    torch.autograd.backward = function
    try:
        yield
    finally:
        torch.autograd.backward = backward


def _differentiate(tensors: torch.Tensor | Iterable[torch.Tensor], *_: Any, **__: Any) -> None:
    """Compute the gradients of all leaves, and drop them."""
    tensors = [tensors] if isinstance(tensors, torch.Tensor) else tensors
    roots = [x for x in tensors if x.grad_fn is not None]
    nodes = {x.grad_fn: None for x in roots}
    pending = [*nodes]
    while pending:
        for node, _ in pending.pop().next_functions:
            if node is not None and node not in nodes:
                nodes[node] = None
                pending.append(node)
    leaves = [node.variable for node in nodes if hasattr(node, "variable")]
    if leaves:
        grads = [torch.empty_like(x) for x in roots]
        torch.autograd.grad(roots, leaves, grads, retain_graph=True, allow_unused=True)


def _groups_of_all_members() -> list[str]:
    """Return the names of the groups for which all their ranks have noted something, in an order in
    which no ranks wait for each other. Collective over all ranks."""
    everywhere = _exchange()
    for rank, of_rank in enumerate(everywhere):
        if isinstance(of_rank, str):
            raise refused(
                NAME, f"its function fails on rank {rank}: {of_rank}",
                "a function that returns on all ranks",
            )  # fmt: skip
    return sorted(
        name for name in noted_groups() if all(name in everywhere[rank] for rank in _members(name))
    )


def _exchange(error: Exception | None = None) -> list[list[str] | str]:
    """Return of each rank the groups for which it has noted something, or what its function has
    raised. Collective over all ranks."""
    own = noted_groups() if error is None else f"{type(error).__name__}: {error}"
    return [json.loads(text) for text in group_of("").exchange(NAME, json.dumps(own))]


def _members(name: str) -> Iterable[int]:
    group = group_of(name)
    if not name:
        return range(group.world_size)
    return dist.get_process_group_ranks(group.process_group)
