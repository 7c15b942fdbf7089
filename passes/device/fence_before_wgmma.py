"""Make tiles that threads load visible to wgmma."""

from __future__ import annotations

from tilelang import tvm
from tvm import tirx
from tvm.tirx.stmt_functor import ir_transform

from ..ir.walk import ASYNC_COPY, calls_in, flatten, nodes_in, op_name
from ..ir.warp_roles import roles_of

_BEGIN = "tl.warpgroup_arrive"
"""First operation of each product by wgmma."""


def fence_before_wgmma(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Insert one ``fence.proxy.async`` before each product of a kernel whose threads load tiles.

    ``cp.async`` and stores write shared memory by the generic proxy, and wgmma reads it by the
    async proxy. Pipelined loops without warp specialization copy by ``cp.async`` on sm_90, and
    producer warps store what the TMA cannot load. TileLang fences tiles that threads store, but not
    all tiles that ``cp.async`` has completed since the last fence. In producer warps its fence
    follows the arrival at the barrier on which the consumers wait.

    Before: ``T.ptx_wait_group(0); T.tvm_storage_sync("shared.dyn"); T.warpgroup_arrive(); ...``
    After:  the same, with ``T.fence_proxy_async()`` before ``T.warpgroup_arrive()``
    """
    if not calls_in(func.body, lambda call: op_name(call) == ASYNC_COPY) and not _has_stores(func):
        return func
    fence = tirx.Evaluate(tirx.call_intrin("handle", tvm.ir.Op.get("tl.fence_proxy_async")))

    def change(stmt: tirx.Evaluate) -> tirx.Stmt | None:
        return flatten([fence, stmt]) if op_name(stmt.value) == _BEGIN else None

    return func.with_body(ir_transform(func.body, None, change, ["tirx.Evaluate"]))


def _has_stores(func: tirx.PrimFunc) -> bool:
    """Return whether producer warps store to shared memory."""
    roles = roles_of(func)
    if roles is None:
        return False
    producers = [split.then_case for split in roles.splits_in(func.body)]
    stores = [store for part in producers for store in nodes_in(part, tirx.BufferStore)]
    return any(store.buffer.scope().startswith("shared") for store in stores)
