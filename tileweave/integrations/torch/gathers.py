"""``fused_all_gather_matmul`` and ``fused_all_gather_scaled_matmul`` by ``ops.all_gather_matmul``.

Both return the gathered activations and their product with each weight.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.distributed import _symmetric_memory as symm_mem

from ... import ops
from ...ops.core.checks import refused
from ...ops.core.epilogue import NO_EPILOGUE, Epilogue
from .calls import accepted
from .layout import flatten, require_fp8, torch_implementation, unflatten


def fused_all_gather_matmul(
    A: Tensor, Bs: Sequence[Tensor], gather_dim: int, group_name: str, *, return_A: bool = True
) -> tuple[Tensor | None, list[Tensor]]:
    name = "fused_all_gather_matmul"

    def strategy() -> ops.Strategy:
        return _strategy(name, A, Bs, gather_dim, group_name, epilogues)

    epilogues = [NO_EPILOGUE] * len(Bs)
    if not accepted(name, (A, *Bs), (), (gather_dim, group_name), strategy):
        own = torch_implementation(name, A, group_name)
        return own(A, Bs, gather_dim, group_name, return_A=return_A)
    return _gather(A, Bs, gather_dim, group_name, epilogues, return_A)


def fused_all_gather_scaled_matmul(
    A: Tensor, Bs: Sequence[Tensor], A_scale: Tensor, B_scales: Sequence[Tensor], gather_dim: int,
    group_name: str, biases: Sequence[Tensor | None], result_scales: Sequence[Tensor | None],
    out_dtypes: Sequence[Any], use_fast_accum: Sequence[bool],
) -> tuple[Tensor | None, list[Tensor]]:  # fmt: skip
    name = "fused_all_gather_scaled_matmul"

    def strategy() -> ops.Strategy:
        if A_scale.shape == (*A.shape[:-1], 1):
            raise refused(name, f"A_scale has shape {tuple(A_scale.shape)}", "one element")
        for epilogue, scale in zip(epilogues, result_scales, strict=True):
            require_fp8(name, A, epilogue, scale)
        return _strategy(name, A, Bs, gather_dim, group_name, epilogues)

    types = symm_mem._maybe_convert_scalar_types_to_dtypes(list(out_dtypes))
    epilogues = [
        Epilogue(bias, A_scale, scale, dtype)
        for bias, scale, dtype in zip(biases, B_scales, types, strict=True)
    ]
    others = A_scale, *B_scales, *biases, *result_scales
    if not accepted(name, (A, *Bs), others, (gather_dim, group_name, *types), strategy):
        return torch_implementation(name, A, group_name)(
            A, Bs, A_scale, B_scales, gather_dim, group_name, biases, result_scales, types,
            use_fast_accum,
        )  # fmt: skip
    return _gather(A, Bs, gather_dim, group_name, epilogues)


def _widest(Bs: Sequence[Tensor]) -> int:
    return max(range(len(Bs)), key=lambda n: Bs[n].shape[1])


def _strategy(
    name: str, A: Tensor, Bs: Sequence[Tensor], axis: int, group: str,
    epilogues: Sequence[Epilogue],
) -> ops.Strategy:  # fmt: skip
    """Return the strategy of the widest product.

    Raises:
        TileWeaveError: ``ops.all_gather_matmul`` does not accept the axis or one of the products.
    """
    if not 0 <= axis < A.ndim - 1:
        raise refused(
            name, f"gather_dim={axis} of {A.ndim} axes", "an axis of rows, not the inner dimension"
        )
    rows = flatten(A, axis)
    strategies = [
        ops.strategy_of(ops.all_gather_matmul, rows, b, group, **epilogue._asdict())
        for b, epilogue in zip(Bs, epilogues, strict=True)
    ]
    return strategies[_widest(Bs)]


def _gather(
    A: Tensor, Bs: Sequence[Tensor], axis: int, group: str, epilogues: Sequence[Epilogue],
    return_A: bool = True,
) -> tuple[Tensor | None, list[Tensor]]:  # fmt: skip
    """Return the gathered activations and all products.

    Only the widest product overlaps the transfer; the others read the gathered rows after it. A
    kernel that accepts several weights would overlap all of them, and would need neither the copy
    of the gathered rows nor further launches. To concatenate the weights would copy them each time.
    """
    first = _widest(Bs)
    needs_rows = return_A or len(Bs) > 1
    result = ops.all_gather_matmul(
        flatten(A, axis), Bs[first], group, return_gathered=needs_rows, **epilogues[first]._asdict()
    )
    if not needs_rows:
        return None, [unflatten(result, A, axis)]
    product, rows = result
    products = [
        product if n == first else epilogue.multiply(rows, b)
        for n, (b, epilogue) in enumerate(zip(Bs, epilogues, strict=True))
    ]
    gathered = unflatten(rows, A, axis) if return_A else None
    return gathered, [unflatten(product, A, axis) for product in products]


IMPLEMENTATIONS: dict[str, Callable[..., Any]] = {
    f.__name__: f for f in (fused_all_gather_matmul, fused_all_gather_scaled_matmul)
}
