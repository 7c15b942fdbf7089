"""``tw.explain``: list the synchronization of a program by line, with its reasons and cost."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tilelang import tvm  # noqa: F401  (makes the bundled tvm importable)
from tvm import tirx

from ..builtins.errors import TileWeaveError, brief_errors, not_a_program
from ..emit import require_group
from ..runtime import Plan
from ..runtime.kernel.configured import configured
from ..runtime.plans.mesh_plan import ranks_of
from .explanation import Explanation
from .kernel import explain_kernel
from .plan import explain_plan


@brief_errors
def explain(
    f: Any,
    world_size: int | Mapping[str, int],
    pass_configs: Mapping[str, Any] | None = None,
    arch: str = "sm_90a",
    sizes: Mapping[str, int] | None = None,
) -> Explanation:
    """List the signals, waits, barriers and fences of ``f``, and their reasons. Needs no GPU.

    Args:
        f: a ``@T.prim_func`` or a ``@tw.plan``. A plan is explained with its kernels and copies,
            in a call with 0 for every scalar.
        world_size: ranks of the group; or, for a plan, the sizes of the axes of a mesh by name:
            nodes, and ranks of a node.
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
    nodes, ranks = _levels_of(f, world_size)
    require_group("explain", ranks, arch)
    if isinstance(f, tirx.PrimFunc):
        name = str(f.attrs["global_symbol"])
        return explain_kernel(f, ranks, pass_configs or {}, arch, name, sizes or {})
    if isinstance(f, Plan):
        plan = configured("explain", f, pass_configs)
        return explain_plan(plan, ranks, arch, sizes or {}, nodes)
    raise not_a_program("explain", f, "a T.prim_func or a tw.plan")


def _levels_of(f: Any, world_size: int | Mapping[str, int]) -> tuple[int, Any]:
    """Return the numbers of nodes and of ranks of a node.

    Raises:
        TileWeaveError: ``f`` is explained on a mesh and is no plan, or the mesh has no two axes.
    """
    if not isinstance(world_size, Mapping):
        return f.nodes if isinstance(f, Plan) else 1, world_size
    ranks_of("explain", world_size)
    if not isinstance(f, Plan) or len(world_size) != 2:
        raise TileWeaveError(
            f"explain: world_size={dict(world_size)!r}; expected a tw.plan on two axes, nodes and "
            "ranks of a node, or a number of ranks"
        )
    nodes, ranks = world_size.values()
    return nodes, ranks
