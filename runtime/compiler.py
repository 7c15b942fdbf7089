"""``tw.compile``: compile a program for the group."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import tilelang
from tvm import tirx

from .. import passes
from ..builtins.errors import TileWeaveError, brief_errors, not_a_program
from .kernel.dynamic import DynamicKernel
from .kernel.kernel import Kernel, compile_kernel
from .lifecycle import init
from .plans.parameters import Parameter, parameters_of


@brief_errors
def compile(
    func: tirx.PrimFunc, group: Any = None, **options: Any
) -> Kernel | DynamicKernel:  # fmt: skip
    """Compile ``func`` for a group, once per node, and load it onto this rank's GPU. Collective
    over the group.

    The group's size and the heap's stride become constants of the program. The rank does not, so
    that all ranks use the same kernel. A program whose inferred synchronization depends on dynamic
    extents is compiled at its calls, for each set of sizes; see ``DynamicKernel``.

    Args:
        func: a ``@T.prim_func``.
        group: ranks that run it: None for the default group, a ``ProcessGroup``, its name, or a
            ``DeviceMesh`` with one axis.
        options: options of ``tilelang.compile``; ``pass_configs`` may contain TileWeave's options:
            ``tileweave.reuse``, ``tileweave.granule``, ``tileweave.verify``,
            ``tileweave.resident_blocks``.

    Raises:
        LanguageError: reads and writes of symmetric tensors cannot be ordered.
        TileWeaveError: ``func`` is no PrimFunc, an option is not supported, or compiling failed on
            some rank.
    """
    if (backend := options.get("execution_backend")) not in (None, "auto", "tvm_ffi"):
        raise TileWeaveError(
            f"compile: execution_backend={backend!r} has no host code that could bind the rank; "
            "expected 'auto' or 'tvm_ffi'"
        )
    if not isinstance(func, tirx.PrimFunc):
        raise not_a_program("compile", func)
    if unknown := [f"{n}={v!r}" for n, v in options.items() if n not in _OPTIONS]:
        raise TileWeaveError(f"compile: {', '.join(unknown)}; expected {', '.join(_OPTIONS)}")
    outputs = _own_outputs(options.get("out_idx"), parameters_of(func))
    session = init(group)
    func = passes.upgrade_ir(func)
    func, options["pass_configs"] = passes.split_options(func, options.get("pass_configs") or {})
    options["out_idx"] = outputs
    if passes.needs_sizes(func):
        return DynamicKernel(func, options, session)
    return compile_kernel(func, options, session)


_OPTIONS = tuple(inspect.signature(tilelang.compile).parameters)[1:]
"""Names of the options of ``tilelang.compile``."""


def _own_outputs(out_idx: Any, parameters: Sequence[Parameter]) -> list[int] | int | None:
    """Return ``out_idx`` as non-negative indices: implicit parameters follow the program's own."""
    if out_idx is None:
        return None
    indices = list(out_idx) if isinstance(out_idx, (list, tuple)) else [out_idx]
    legal = {
        index: i
        for i, p in enumerate(parameters)
        for index in (i, i - len(parameters))
        if p.shape is not None and not p.symmetric
    }
    if not all(type(i) is int and i in legal for i in indices):
        raise TileWeaveError(
            f"compile: out_idx={out_idx!r}; expected {', '.join(map(str, sorted(legal)))}: each "
            "call allocates a T.Tensor for it"
        )
    outputs = [legal[i] for i in indices]
    return outputs if isinstance(out_idx, (list, tuple)) else outputs[0]
