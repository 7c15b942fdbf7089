"""Grouped GEMM of one GPU: rows that are sorted by expert, each times the weight of its expert.

The kernels are compiled for the extents and the memory order of the weights. The number of rows may
change in each call; tiles are lower for few rows of an expert. Blocks read the offsets on the GPU
and count the row tiles of all experts themselves, so that the host does not wait for the offsets.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ...builtins.errors import brief_errors
from ...runtime.executor.recorded_calls import recorded_calls
from ..core.autocast import lowers
from ..core.call import Recorded, allocator_of, signature
from ..core.checks import (
    ALIGNMENT,
    as_kernel_operand,
    require_bools,
    require_no_overlap,
    with_packed_strides,
)
from ..core.epilogue import FP8
from ..core.library import define, define_pair, refuse_gradients
from ..core.registry import RegisteredOp, TableRow
from . import reference as by_torch
from .call_sequence import NotRecordableError, Recorder
from .kernels.grouped_gemm import (
    GROUPED,
    MOST_EXPERTS,
    GroupedConfig,
    grouped_gemm,
    tiles_of,
)
from .kernels.grouped_wgrad import grouped_wgrad
from .local_kernels import compiled
from .problem import NAME, Options, check, check_out, is_transposed, require_tensors

WGRAD = "grouped_wgrad"
"""Name of the gradient of the weights in ``torch.ops.tileweave``."""
_DTYPES = {torch.bfloat16: "bfloat16", torch.float16: "float16", FP8: "float8_e4m3fn"}
"""Types of the kernels, as TileLang writes them."""
RESULT_BYTES = 2
"""Bytes of an element of the kernels' results."""
ONES = ALIGNMENT // RESULT_BYTES
"""Columns of ones in a sum over the rows of each expert: the fewest that the kernels accept."""


class GroupedMatmul(RegisteredOp, op=NAME):
    """Grouped GEMM of one GPU. No rank communicates."""

    arguments = ("x", "w", "offsets")
    row = TableRow(
        inputs="`x` (rows, K), sorted by expert; `w` (E, N, K); `offsets` (E,), int32: the end of "
        "the rows of each expert",
        result="the rows times the transposed weights of their experts, (rows, N), plus `bias`, "
        "with `epilogue='swiglu'` silu(gate) * up, (rows, N / 2), times `row_weights`",
        gradient="of `x`: `grouped_matmul` with the other memory order of `w`. Of `w` and `bias`: "
        "a grouped GEMM over the rows of each expert",
    )


def has_kernel(x: torch.Tensor, w: torch.Tensor, columns: int | None = None) -> bool:
    """Return whether the kernels accept the operands; otherwise plain torch computes.

    Args:
        columns: columns of the result; None for N.
    """
    return (
        x.is_cuda
        and x.dtype in _DTYPES
        and w.shape[0] <= MOST_EXPERTS
        and all(extent * x.itemsize % ALIGNMENT == 0 for extent in w.shape[1:])
        and (columns or w.shape[1]) * RESULT_BYTES % ALIGNMENT == 0
        and torch.cuda.get_device_capability(x.device) == (9, 0)
    )


def config_of(
    w: torch.Tensor, transposed: bool, device: torch.device, rows: int | None = None,
    scales: str = "", out_dtype: torch.dtype | None = None, epilogue: str | None = None,
    biased: bool = False, weighted: bool = False, clear_rest: bool = True,
) -> GroupedConfig:  # fmt: skip
    """Return the parameters of the kernels for (E, N, K) weights and a GPU.

    Args:
        rows: rows of x; None for the gradient of the weights, whose tiles do not depend on them.
    """
    tiles = GROUPED if rows is None else tiles_of(rows, len(w), scales)
    blocks = torch.cuda.get_device_properties(device).multi_processor_count
    return GroupedConfig(
        *w.shape, _DTYPES[w.dtype], transposed, tiles, blocks, scales,
        _DTYPES[out_dtype or w.dtype], epilogue or "", biased, weighted, clear_rest,
    )  # fmt: skip


class _Call(NamedTuple):
    """Kernel of calls with one signature, and the allocation of their results."""

    config: GroupedConfig
    launch: Callable[..., Any]
    empty: Callable[[], torch.Tensor]
    fast_path = None  # the launch needs tensors

    def __call__(self, x, w, offsets, options: Options, out) -> None:
        """Launch the kernel on operands that it can read."""
        stored = w if self.config.transposed else w.transpose(1, 2)
        with torch.cuda.device(x.device):
            if options.scale_w is options.bias is options.row_weights is None:
                self.launch(x, stored, offsets, out)
            else:
                self.launch(x, stored, offsets, *_dense_options(self.config, options), out)


def _dense_options(config: GroupedConfig, options: Options) -> list[torch.Tensor]:
    """Return the tensors of options as the kernel declares them."""
    tensors = options.tensors
    if config.scales == "tensor":
        assert options.scale_x is not None and options.scale_w is not None
        tensors["scale_x"] = options.scale_x.reshape(1)
        tensors["scale_w"] = options.scale_w.expand(config.experts).contiguous()
    return [as_kernel_operand(NAME, name, t) for name, t in tensors.items() if t is not None]


def _compute(x, w, offsets, options: Options, out) -> _Call | None:
    """Write the result to ``out``. Return the call if later ones can repeat it on other tensors."""
    if options.reference or not has_kernel(x, w, out.shape[1]):
        by_torch.grouped_matmul(NAME, x, w, offsets, options, out)
        return None
    if not len(x):
        return None
    config, launch = _launch_of(x, w, options, out)
    transposed = config.transposed
    call = _Call(config, launch, allocator_of(out))
    given = x, w if transposed else w.transpose(1, 2), offsets, out
    x, stored, offsets, out = (
        *(
            as_kernel_operand(NAME, name, t)
            for name, t in zip(("x", "w", "offsets"), given, strict=False)
        ),
        with_packed_strides(out),
    )
    call(x, stored if transposed else stored.transpose(1, 2), offsets, options, out)
    is_copied = any(a is not b for a, b in zip((x, stored, offsets, out), given, strict=True))
    return None if is_copied else call


def _launch_of(x, w, options: Options, out) -> tuple[GroupedConfig, Callable[..., Any]]:
    """Return the kernel of a call."""
    config = config_of(
        w, is_transposed(w), x.device, len(x), options.scales, out.dtype, options.epilogue,
        options.bias is not None, options.row_weights is not None, options.clear_rest,
    )  # fmt: skip
    with torch.cuda.device(x.device):
        return config, compiled(NAME, grouped_gemm, config)


def record_grouped_matmul(recorder: Recorder, x: str, w: str, out: str, options: Options) -> None:
    """Append the kernel that multiplies the rows up to ``offsets``, for options without tensors.

    Args:
        x, w, out: names of the operands and the result.

    Raises:
        NotRecordableError: torch computes the product.
    """
    rows, weights, result = recorder[x], recorder[w], recorder[out]
    if not has_kernel(rows, weights, result.shape[1]):
        raise NotRecordableError
    config, launch = _launch_of(rows, weights, options, result)
    stored = weights if config.transposed else weights.transpose(1, 2)
    offsets = "offsets", recorder["offsets"]
    recorder.kernel(launch, (x, rows), (w, stored), offsets, (out, result))


def _call(x, w, offsets, out, options: Options, recorded: Recorded | None):
    """Return the result, in ``out`` if given."""
    if recorded is None:
        key, _ = signature((NAME, *options[4:]), (x, w, offsets, *options[:4], out))
        call = recorded_calls().get(key)
    else:
        key, call = recorded
    if call is not None:
        if out is None:
            out = call.empty()
        else:
            require_no_overlap(NAME, out, x=x, w=w, offsets=offsets, **options.tensors)
        call(x, w, offsets, options, out)
        return out
    empty = _fake((x, w, offsets, *options[:4]), out, options[4:])
    out = empty if out is None else out
    call = _compute(x, w, offsets, options, out)
    if call is not None:
        recorded_calls().put(key, call)
    return out


def _computed(inputs, out, options, recorded=None):
    return _call(*inputs[:3], out, Options(*inputs[3:], *options), recorded)


def _fake(inputs, out, options):
    (x, w, offsets, *_), given = inputs, Options(*inputs[3:], *options)
    dtype = check(x, w, offsets, given)
    if out is None:
        return x.new_empty(x.shape[0], given.columns(w), dtype=dtype)
    return check_out(out, dtype, x, w, offsets, given)


def _check(inputs, out, options) -> None:
    x, w, _, *tensors = inputs
    refuse_gradients(NAME, out, x, w, *(t for t in tensors if t is not None))


def _save(ctx: Any, inputs: tuple, output: torch.Tensor) -> None:
    x, w, offsets, *rest = inputs
    options = Options(*rest)
    ctx.epilogue, ctx.reference = options.epilogue, options.reference
    ctx.save_for_backward(x, w, offsets, options.bias, options.row_weights)


def _gradients(ctx: Any, grad: torch.Tensor) -> tuple:
    x, w, offsets, bias, row_weights = ctx.saved_tensors
    needs_x, needs_w, _, _, _, needs_bias, needs_row_weights, *_ = ctx.needs_input_grad
    ops, plain = torch.ops.tileweave, Options(reference=ctx.reference)
    grad_x = grad_w = grad_bias = grad_row_weights = None
    if ctx.epilogue is not None or needs_row_weights:
        wide = torch.promote_types(x.dtype, torch.float32)
        products = ops.grouped_matmul(x, w, offsets, *plain).to(wide)
        grad, grad_row_weights = by_torch.through_epilogue(
            grad.to(wide), products, offsets, bias, row_weights, ctx.epilogue
        )
    elif row_weights is not None:
        grad = grad * row_weights.unsqueeze(-1)
    grad = grad.to(x.dtype).contiguous()
    if needs_x:
        grad_x = ops.grouped_matmul(grad, w.transpose(1, 2), offsets, *plain)
    if needs_w:
        grad_w = ops.grouped_wgrad(grad, x, offsets, is_transposed(w), ctx.reference)
    if needs_bias:
        ones = grad.new_ones(len(grad), ONES)
        grad_bias = ops.grouped_wgrad(grad, ones, offsets, True, ctx.reference)[..., 0]
    none = (None,) * 3
    return grad_x, grad_w, *none, grad_bias, grad_row_weights, *none, None


def _eager_wgrad(grad, x, offsets, transposed: bool, reference: bool):
    if not transposed:  # the gradient of (E, K, N) weights has exchanged operands
        return _eager_wgrad(x, grad, offsets, True, reference).transpose(1, 2)
    out = _fake_wgrad(grad, x, offsets, transposed, reference)
    if reference or not has_kernel(x, out):
        by_torch.grouped_wgrad(WGRAD, grad, x, offsets, out)
    elif len(x):
        grad, x, offsets = (
            as_kernel_operand(WGRAD, name, operand)
            for name, operand in (("grad", grad), ("x", x), ("offsets", offsets))
        )
        with torch.cuda.device(x.device):
            compiled(NAME, grouped_wgrad, config_of(out, True, x.device))(grad, x, offsets, out)
    else:
        out.zero_()
    return out


def _fake_wgrad(grad, x, offsets, transposed: bool, reference: bool):
    N, K = grad.shape[1], x.shape[1]
    if transposed:
        return x.new_empty(len(offsets), N, K)
    return x.new_empty(len(offsets), K, N).transpose(1, 2)


def _save_wgrad(ctx: Any, inputs: tuple, output: torch.Tensor) -> None:
    *tensors, ctx.transposed, ctx.reference = inputs
    ctx.save_for_backward(*tensors)


def _gradients_of_wgrad(ctx: Any, grad_w: torch.Tensor) -> tuple:
    """Return the second derivatives: ``grouped_wgrad`` is linear in both operands."""
    grad, x, offsets = ctx.saved_tensors
    ops, of_grad, of_x = torch.ops.tileweave, None, None
    if ctx.needs_input_grad[0]:
        of_grad = ops.grouped_matmul(x, grad_w, offsets, *Options(reference=ctx.reference))
    if ctx.needs_input_grad[1]:
        grad_w = grad_w.transpose(1, 2)
        of_x = ops.grouped_matmul(grad, grad_w, offsets, *Options(reference=ctx.reference))
    return of_grad, of_x, None, None, None


_into_new, _into_out = define_pair(
    NAME, "Tensor x, Tensor w, Tensor offsets",
    "Tensor? scale_x, Tensor? scale_w, Tensor? bias, Tensor? row_weights, str? epilogue, "
    "ScalarType? out_dtype, bool reference, bool clear_rest", _computed, _fake, _check,
    gradient=(_save, _gradients), casts=lowers("x", "w", "bias"),
)  # fmt: skip
define(
    f"{WGRAD}(Tensor grad, Tensor x, Tensor offsets, bool transposed, bool reference) -> Tensor",
    _eager_wgrad, _fake_wgrad, (_save_wgrad, _gradients_of_wgrad),
)  # fmt: skip


@brief_errors
def grouped_matmul(
    x: torch.Tensor,
    w: torch.Tensor,
    offsets: torch.Tensor,
    *,
    scale_x: torch.Tensor | None = None,
    scale_w: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    row_weights: torch.Tensor | None = None,
    epilogue: str | None = None,
    out_dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None,
    reference: bool = False,
    clear_rest: bool = True,
) -> torch.Tensor:
    """Multiply rows that are sorted by expert by the weights of their experts, on one GPU.

    Row i of expert e becomes ``x[i] @ w[e].t()``, plus ``bias[e]``, after the epilogue, times
    ``row_weights[i]``. One kernel computes it. The host does not wait for ``offsets``. The first
    call with new weight shapes compiles. It needs no ``tw.init()``.

    The kernels accept bf16 and fp16 on sm_90, with K and the columns of the result multiples of 8,
    and fp8 (e4m3), with N and K multiples of 16, of at most 351 experts. Otherwise plain torch
    computes; the host then waits for ``offsets``.

    Args:
        x: (rows, K). Rows of expert e are ``x[offsets[e - 1] : offsets[e]]``, from 0 for the first.
        w: (E, N, K), contiguous or the transpose of contiguous (E, K, N). Neither is copied. fp8
            weights are contiguous.
        offsets: (E,), int32, on the device of x: the end of the rows of each expert, as ``offs`` of
            ``torch.nn.functional.grouped_mm``. They ascend from 0 or more to at most ``rows``;
            equal neighbors are experts without rows. The kernels do not check the values: with
            others the result is undefined, but no memory outside of it is written.
        scale_x, scale_w: float32 factors of fp8 operands, either one for x, and one for w or one
            for each expert, (E,); or (rows, K / 128) and (E, N / 128, K / 128), rounded up: one for
            each 128 elements of a row, and for each 128 x 128 weights.
        bias: (E, N), in the type of the result, added to the rows of each expert.
        row_weights: (rows,) float32, factors of the rows of the result.
        epilogue: None, or ``swiglu``: the first N / 2 columns are gate, the others up, and the
            result is silu(gate) * up. N is then even; with scales of blocks a multiple of 256.
        out_dtype: type of the result of fp8 operands: bf16, the default, or fp16.
        out: receives the result; there is no gradient then.
        reference: compute in plain torch, also if the kernels accept the operands.
        clear_rest: set the rows from ``offsets[-1]`` to zero. Otherwise they are undefined, which
            saves the time to write them.

    Returns:
        (rows, N), with ``swiglu`` (rows, N / 2), in the type of x, or ``out_dtype``. All steps are
        computed in fp32, and the result is rounded once. It has a gradient with respect to x, w,
        bias and row_weights, but not for fp8. With an epilogue, the backward pass computes the
        products again.

    Raises:
        TileWeaveError: arguments are invalid. Nothing is launched.
    """
    require_bools(NAME, reference=reference, clear_rest=clear_rest)
    options = Options(
        scale_x, scale_w, bias, row_weights, epilogue, out_dtype, reference, clear_rest
    )
    require_tensors(x, w, offsets, options, out)
    if out is None:
        return _into_new(x, w, offsets, *options)
    _into_out(x, w, offsets, out, *options)
    return out
