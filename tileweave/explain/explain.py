"""``tw.explain``: list the synchronization of a program by line, with its reasons and cost."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tilelang import tvm  # noqa: F401  (makes the bundled tvm importable)
from tvm import tirx

from ..builtins.errors import brief_errors, not_a_program
from ..emit import require_group
from ..runtime import Plan
from ..runtime.kernel.configured import configured
from .explanation import Explanation
from .kernel import explain_kernel
from .plan import explain_plan


@brief_errors
def explain(
    f: Any,
    world_size: int,
    pass_configs: Mapping[str, Any] | None = None,
    arch: str = "sm_90a",
    sizes: Mapping[str, int] | None = None,
) -> Explanation:
    """List the signals, waits, barriers and fences of ``f``, and their reasons. Needs no GPU.

    Args:
        f: a ``@T.prim_func`` or a ``@tw.plan``. A plan is explained with its kernels and copies,
            in a call with 0 for every scalar.
        world_size: ranks of the group.
        pass_configs: options of TileLang and TileWeave; see ``tw.compile``. For a plan they are
            added to the options of each kernel.
        arch: architecture for the device passes; see ``tw.emit``.
        sizes: sizes of the dynamic extents by name, for a plan, or for a program that is compiled
            separately for each set of sizes.

    Raises:
        LanguageError: an access cannot be ordered. The message names the access and its line.
        TileWeaveError: ``f`` is neither a program nor a plan, an option or a size is unknown, or a
            size is missing.
    """
    require_group("explain", world_size, arch)
    if isinstance(f, tirx.PrimFunc):
        name = str(f.attrs["global_symbol"])
        return explain_kernel(f, world_size, pass_configs or {}, arch, name, sizes or {})
    if isinstance(f, Plan):
        plan = configured("explain", f, pass_configs)
        return explain_plan(plan, world_size, arch, sizes or {})
    raise not_a_program("explain", f, "a T.prim_func or a tw.plan")
