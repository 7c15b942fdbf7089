"""Functions that run on each rank, in its own process: on a CPU by tests/integrations, on GPUs by
tests/gpu/integrations.py."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor, nn
from torch._inductor import config
from torch.distributed import _symmetric_memory as symm_mem
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._attention import context_parallel_unshard
from torch.distributed.tensor.experimental._context_parallel import _attention as cp
from torch.distributed.tensor.experimental._context_parallel._load_balancer import (
    _HeadTailLoadBalancer,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn import functional
from torch.utils._pytree import tree_leaves

from tileweave import ops
from tileweave.integrations.torch import enable, explain, parallel_styles, set_fsdp_communication
from tileweave.ops.norm.all_reduce_rms_norm import AllReduceRmsNorm

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HIDDEN, INNER = (1024, 2048) if DEVICE == "cuda" else (16, 32)


class Mlp(nn.Module):
    """Gated MLP, as in Llama."""

    def __init__(self, biased: bool = False) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(HIDDEN, INNER, bias=biased) for _ in range(2))
        self.down = nn.Linear(INNER, HIDDEN, bias=biased)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(functional.silu(self.gate(x)) * self.up(x))


@contextlib.contextmanager
def compiler() -> Iterator[None]:
    """Let Inductor compile without its cache, whose graphs no pass sees, and on a CPU without C++.
    ``tests/ops/test_llama_layers.py`` runs its C++."""
    options = {"force_disable_caches": True}
    if DEVICE == "cpu" and hasattr(config, "fallback_by_default"):
        options["fallback_by_default"] = True
    torch._dynamo.reset()
    with config.patch(options):
        yield


def mlp(axis: int | None, *shape: int, biased: bool = False) -> dict[str, Any]:
    """Compare a compiled MLP with one process: forward without gradients, then training.

    Args:
        axis: axis of the activations that is sharded; None for tensor parallelism without it.
        shape: shape of the activations of all ranks, without the last axis.
    """
    torch.manual_seed(0)
    single = Mlp(biased)
    mesh = init_device_mesh(DEVICE, (dist.get_world_size(),))
    layout = Replicate() if axis is None else Shard(axis)
    plan = {
        "gate": ColwiseParallel(input_layouts=layout), "up": ColwiseParallel(input_layouts=layout),
        "down": RowwiseParallel(output_layouts=layout),
    }  # fmt: skip
    model = parallelize_module(copy.deepcopy(single), mesh, plan)
    x = torch.randn(*shape, HIDDEN)
    with compiler(), enable():
        step = torch.compile(model, fullgraph=True)
        with torch.no_grad():
            error = error_of([(step(shard(x, axis)), shard(single(x), axis))])
        error = max(error, error_of_training(step, single, axis, x))
        explanation = explain()
    return {
        "error": error,
        "fused": [[text.split()[0] for text in graph.fused] for graph in explanation.graphs],
        "unfused": [graph.unfused for graph in explanation.graphs],
        "calls": {str(kind) for kind in explanation.calls},
        "strategies": {kind.strategy and kind.strategy.name for kind in explanation.calls},
    }


def eager_mlp(
    axis: int | None, *shape: int, biased: bool = True, is_dtensor: bool = False
) -> dict[str, Any]:
    """Compare an eager MLP, with the styles of the integration, with one process.

    Args:
        axis, shape: see ``mlp``.
        is_dtensor: whether the layers pass DTensors to each other.
    """
    torch.manual_seed(0)
    single = Mlp(biased)
    mesh = init_device_mesh(DEVICE, (dist.get_world_size(),))
    layout = Replicate() if axis is None else Shard(axis)
    styles = parallel_styles()
    colwise = partial(styles.ColwiseParallel, input_layouts=layout)
    plan = {
        "gate": colwise(use_local_output=not is_dtensor),
        "up": colwise(use_local_output=not is_dtensor),
        "down": styles.RowwiseParallel(output_layouts=layout),
    }
    model = parallelize_module(copy.deepcopy(single), mesh, plan)
    names = ("all_gather_matmul", "matmul_all_reduce", "matmul_reduce_scatter")
    with contextlib.ExitStack() as stack:
        counted = {
            name: stack.enter_context(mock.patch.object(ops, name, wraps=getattr(ops, name)))
            for name in names
        }
        error = error_of_training(model, single, axis, torch.randn(*shape, HIDDEN))
        calls = {name: mocked.call_count for name, mocked in counted.items()}
    return {"error": error, "calls": calls}


def shard(whole: Tensor, axis: int | None) -> Tensor:
    """Return this rank's part of activations."""
    if axis is None:
        return whole.clone()
    return whole.chunk(dist.get_world_size(), axis)[dist.get_rank()].contiguous()


def layers_of_torch() -> list[bool]:
    """Return whether layers that the styles leave to torch give the results of one process."""
    torch.manual_seed(0)
    styles, rank, count = parallel_styles(), dist.get_rank(), dist.get_world_size()
    mesh, results = init_device_mesh(DEVICE, (count,)), []
    for layer, x in (
        (nn.Linear(HIDDEN, 5), torch.randn(4 * count, HIDDEN)),
        (nn.Embedding(8, HIDDEN), torch.arange(2 * count)),
    ):
        style = styles.ColwiseParallel(input_layouts=Shard(0))
        parallel = parallelize_module(copy.deepcopy(layer), mesh, style)
        pair = parallel(shard(x, 0)), layer(x).chunk(count, -1)[rank]
        results.append(error_of([pair]) < (1e-5 if DEVICE == "cpu" else 1e-2))
    return results


class Doubled(nn.Linear):
    """Linear layer with a ``forward`` of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def copies_and_subclasses() -> list[bool]:
    """Return whether a deep copy uses its own weights, whether a subclass keeps its ``forward``,
    and whether a layer accepts an activation of one axis."""
    torch.manual_seed(0)
    styles, rank, count = parallel_styles(), dist.get_rank(), dist.get_world_size()
    mesh, x = init_device_mesh(DEVICE, (count,)), torch.randn(4 * count, HIDDEN)
    style = styles.ColwiseParallel(input_layouts=Shard(0))
    copied = copy.deepcopy(parallelize_module(nn.Linear(HIDDEN, INNER), mesh, style))
    layer, row = Doubled(HIDDEN, INNER), nn.Linear(HIDDEN, INNER)
    doubled = parallelize_module(copy.deepcopy(layer), mesh, style)
    rowwise = parallelize_module(copy.deepcopy(row), mesh, styles.RowwiseParallel())
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.zero_()
        return [
            not copied(shard(x, 0)).any(),
            torch.allclose(doubled(shard(x, 0)), layer(x).chunk(count, -1)[rank], atol=1e-6),
            torch.allclose(rowwise(shard(x[0], 0)), row(x[0]), atol=1e-6),
        ]


def gather_of_columns() -> None:
    """Refuse activations whose last axis is sharded."""
    mesh = init_device_mesh(DEVICE, (dist.get_world_size(),))
    style = parallel_styles().ColwiseParallel(input_layouts=Shard(1))
    parallelize_module(nn.Linear(HIDDEN, INNER), mesh, style)(torch.randn(4, HIDDEN))


def error_of(pairs: Iterable[tuple[Tensor, Tensor]]) -> float:
    """Return the largest relative error of results; each pair has a result and the expected one."""
    wide = [(a.float(), b.float()) for a, b in pairs]
    return max(((a - b).norm() / b.norm().clamp(min=1e-9)).item() for a, b in wide)


def error_of_training(model: nn.Module, single: nn.Module, axis: int | None, x: Tensor) -> float:
    """Return the error of a result and of all gradients, against one process."""
    mine, whole = shard(x, axis).requires_grad_(), x.clone().requires_grad_()
    result, expected = model(mine), single(whole)
    for y in (result, expected):
        y.square().sum().backward()
    pairs = [(result, shard(expected, axis)), (mine.grad, shard(whole.grad, axis))]
    for of_ranks, own in zip(model.parameters(), single.parameters(), strict=True):
        assert isinstance(of_ranks.grad, DTensor)
        pairs.append((of_ranks.grad.full_tensor(), own.grad))
    return error_of(pairs)


def eager_mlp_of_dtensors() -> dict[str, Any]:
    """Return the result of ``eager_mlp`` without biases, whose layers pass DTensors."""
    return eager_mlp(1, 3, 8, biased=False, is_dtensor=True)


class Attend(nn.Module):
    def forward(self, *qkv: Tensor, **options: Any) -> Tensor:
        return functional.scaled_dot_product_attention(*qkv, **options)


class Attention(nn.Module):
    """Attention of more heads of queries than of keys."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.attend, self.options = Attend(), options

    def forward(self, *qkv: Tensor) -> Tensor:
        qkv = [x.transpose(1, 2) for x in qkv]
        return self.attend(*qkv, enable_gqa=True, **self.options).transpose(1, 2)


def attention(
    causal: bool, by_module: bool = False, is_balanced: bool = True, mask: Tensor | None = None
) -> dict[str, Any]:
    """Compare attention of a sharded sequence, forward and backward, with one process.

    Args:
        by_module: whether torch wraps the module, as torchtitan asks for, or replaces the function.
        is_balanced: whether a rank has a chunk from the front and its mirror from the back; always
            without ``by_module``.
    """
    rows, *width = (1024, 128) if DEVICE == "cuda" else (16, 8)
    torch.manual_seed(0)
    wholes = [torch.randn(2, rows, heads, *width) for heads in (4, 2, 2, 4)]
    world = dist.get_world_size()
    mesh = init_device_mesh(DEVICE, (world,))
    balancer = _HeadTailLoadBalancer(rows, world, torch.device(DEVICE)) if is_balanced else None

    def train(model: nn.Module, *tensors: Tensor) -> list[Tensor]:
        *qkv, gradient = tensors
        qkv = [x.clone().requires_grad_() for x in qkv]
        out = model(*qkv)
        out.backward(gradient)
        return [out.detach(), *(x.grad for x in qkv)]

    expected = train(Attention(is_causal=causal), *wholes)
    with enable(), contextlib.ExitStack() as stack:
        model = Attention(is_causal=causal, attn_mask=mask)
        parts = [x.clone() for x in wholes]
        if by_module:
            style = cp._ContextParallel(2, cp._ContextParallel.AttentionType.SDPA)
            model = parallelize_module(model, mesh, {"attend": style})
            parts = cp._context_parallel_shard(mesh, parts, [1] * 4, balancer)
            cp._enable_context_parallel_dispatcher()
            stack.callback(cp._disable_context_parallel_dispatcher)
        else:
            sharded = {"buffers": parts, "buffer_seq_dims": [1] * 4}
            stack.enter_context(context_parallel(mesh, **sharded, no_restore_buffers=set(parts)))
        results = context_parallel_unshard(mesh, train(model, *parts), [1] * 4)
        error = error_of(zip(results, expected, strict=True))
        calls = [(kind.name, kind.count, kind.obstacle) for kind in explain().calls]
    return {"error": error, "calls": calls}


def nothing_to_fuse() -> tuple[bool, str]:
    """Return whether a compiled model without collectives gives the same result as without the
    integration, and what it explains."""
    model, x = Mlp(), torch.randn(4, HIDDEN)
    with compiler(), torch.no_grad():
        expected = torch.compile(model)(x)
        torch._dynamo.reset()
        with enable():
            return torch.equal(torch.compile(model)(x), expected), str(explain())


def hugging_face_norm(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
    return weight * wide.to(x.dtype)


def torch_norm(x: Tensor, weight: Tensor) -> Tensor:
    return functional.rms_norm(x, weight.shape, weight, 1e-5)


def norm(
    rows: int, dtype: torch.dtype = torch.bfloat16, function: str = "torch_norm",
    variant: str = "",
) -> dict[str, Any]:  # fmt: skip
    """Compare an all-reduce with a residual and a norm with eager torch.

    Args:
        function: ``torch_norm`` or ``hugging_face_norm``.
        variant: what differs from the pattern of the pass.
    """
    torch.manual_seed(0)
    group, normalize = dist.group.WORLD, globals()[function]
    residual, weight = torch.randn(2, rows, HIDDEN).to(dtype), torch.randn(HIDDEN).to(dtype)
    residual = residual[0] + dist.get_rank()  # each rank gets the sum with its own residual
    x = torch.randn(rows, HIDDEN).to(dtype) + dist.get_rank()

    def model(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        total = residual + funcol.all_reduce(x, "avg" if variant == "avg" else "sum", group)
        if variant == "other axis":
            return total, total * torch.rsqrt(total.pow(2).mean(0, keepdim=True) + 1e-5) * weight
        if variant == "columns":
            return total, total * torch.rsqrt(total.pow(2).mean(-1) + 1e-5) * weight
        weight = 1 + weight if variant == "other weight" else weight
        return total, normalize(total, weight)

    args = x, residual, weight
    expected = model(*args)
    program = AllReduceRmsNorm.fastest if variant != "two_shot" else lambda _: "two_shot"
    with (
        mock.patch.object(AllReduceRmsNorm, "fastest", program), compiler(), enable(),
        torch.set_grad_enabled(variant == "gradient"),
    ):  # fmt: skip
        args = x.requires_grad_(variant == "gradient"), residual, weight
        results = torch.compile(model, fullgraph=True)(*args)
        (graph,) = explain().graphs
    error = error_of(zip(results, expected, strict=True))
    fused = [text.split()[0] for text in graph.fused]
    return {"error": error, "fused": fused, "unfused": graph.unfused}


def without_shapes() -> dict[str, Any]:
    """Compare collectives that read what Inductor's pass inserts, without a node between them."""
    torch.manual_seed(0)
    group = dist.group.WORLD

    def gather(x: Tensor) -> Tensor:
        return funcol.all_gather_tensor(x, 0, group)

    def scatter(x: Tensor) -> Tensor:
        return funcol.reduce_scatter_tensor(x, "sum", 0, group)

    def model(x: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        y = gather(x) @ b
        return funcol.all_reduce(y @ b, "sum", group), gather(scatter(x @ b)) + 1

    args = torch.randn(8, HIDDEN), torch.randn(HIDDEN, HIDDEN)
    expected = model(*args)
    with compiler(), torch.no_grad(), enable():
        results = torch.compile(model, fullgraph=True)(*args)
        (graph,) = explain().graphs
    return {
        "error": error_of(zip(results, expected, strict=True)),
        "fused": sorted(text.split()[0] for text in graph.fused),
        "unfused": graph.unfused,
    }


def unfused() -> list[str]:
    """Return why each collective of a model is not fused that Inductor cannot fuse."""
    group = dist.group.WORLD

    def gather(x: Tensor, axis: int) -> Tensor:
        return funcol.all_gather_tensor(x, axis, group)

    def model(x: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        product = x @ b
        return (
            gather(x, 0) + 1,
            gather(2 * x, 1) @ torch.cat([b, b]),
            b @ gather(3 * x, 0)[:HIDDEN],
            funcol.reduce_scatter_tensor(x + 1, "sum", 0, group),
            funcol.reduce_scatter_tensor(product, "sum", 0, group) + product[:4],
            funcol.all_reduce(x + 1, "sum", group),
            funcol.all_reduce(3 * x @ b, "avg", group),
            funcol.all_reduce(x.t() @ x, "sum", group),
            funcol.all_reduce(product, "sum", group),
            *funcol.all_reduce_coalesced([x, 4 * x], "sum", group),
            funcol.all_to_all_single(x, None, None, group),
        )

    with compiler(), torch.no_grad(), enable():
        torch.compile(model, fullgraph=True)(torch.randn(8, HIDDEN), torch.randn(HIDDEN, HIDDEN))
        (graph,) = explain().graphs
    assert graph.fused == []
    return graph.unfused


def operator(name: str, *args: Any, **options: Any) -> dict[str, Any]:
    """Compare an operator of ``torch.ops.symm_mem`` with torch's own implementation.

    Args:
        args: arguments without the group; a tuple is the shape of a tensor, a list of them several
            tensors. The memory of a shape that begins with -1 is transposed.
    """
    generator = torch.Generator(DEVICE).manual_seed(dist.get_rank())

    def tensors(argument: Any) -> Any:
        if isinstance(argument, list):
            return [tensors(a) for a in argument]
        if not isinstance(argument, tuple):
            return argument
        if argument[0] == -1:
            return tensors(argument[:0:-1]).t()
        return torch.randn(argument, generator=generator)

    arguments = *map(tensors, args), dist.group.WORLD.group_name
    expected = getattr(symm_mem, f"_{name}_fallback")(*arguments, **options)
    return compare(name, expected, *arguments, **options)


def gather(
    shape: tuple[int, ...], weights: list[tuple[int, ...]], axis: int, keeps_rows: bool
) -> dict[str, Any]:
    """Return the result of ``operator`` for a gather."""
    return operator("fused_all_gather_matmul", shape, weights, axis, return_A=keeps_rows)


def scaled_gather(shape: tuple[int, ...], axis: int) -> dict[str, Any]:
    """Compare the gather for fp8 with products of what gloo gathers as bytes, on two weights."""
    a, bs = fp8(*shape), [fp8(n, shape[-1]).t() for n in (32, 16)]
    scale_a, scale_b = scales()
    name, count = "fused_all_gather_scaled_matmul", dist.get_world_size()
    parts = [torch.empty(shape, dtype=torch.uint8) for _ in range(count)]
    dist.all_gather(parts, a.view(torch.uint8))
    rows = torch.cat(parts, axis).view(a.dtype)
    products = [
        torch._scaled_mm(rows.flatten(0, -2), b, scale_a, scale_b, out_dtype=torch.bfloat16)
        for b in bs
    ]
    expected = rows, [c.unflatten(0, rows.shape[:-1]) for c in products]
    args = gather_arguments(a, bs, scale_a, scale_b, axis)
    result = compare(name, expected, *args)
    del result["same strides"]  # those of products of 3-D activations are torch's
    return result


def rowwise_gather(shape: tuple[int, ...]) -> str | None:
    """Return the obstacle of a gather with a scale for each row. gloo then refuses fp8."""
    rows, one = scales()
    args = gather_arguments(
        fp8(*shape), [fp8(32, shape[-1]).t()], rows.expand(*shape[:-1], 1), one, 0
    )
    with enable(), contextlib.suppress(RuntimeError):
        torch.ops.symm_mem.fused_all_gather_scaled_matmul(*args)
    return explain().calls[0].obstacle


def gather_arguments(
    a: Tensor, bs: list[Tensor], scale_a: Tensor, scale_b: Tensor, axis: int
) -> tuple[Any, ...]:
    n, group = len(bs), dist.group.WORLD.group_name
    return (
        a, bs, scale_a, [scale_b] * n, axis, group, [None] * n, [None] * n, [torch.bfloat16] * n,
        [False] * n,
    )  # fmt: skip


def scaled_scatter(shape: tuple[int, ...], axis: int, biased: bool = False) -> dict[str, Any]:
    """Compare the scatter for fp8 with torch's own implementation."""
    a, b, name = fp8(*shape), fp8(32, shape[-1]).t(), "fused_scaled_matmul_reduce_scatter"
    bias = torch.ones(32, dtype=torch.bfloat16) if biased else None
    args = (
        a.flatten(0, -2), b, *scales(), "sum", axis, 0,
        dist.group.WORLD.group_name, [*shape[:-1], 32], bias, None, torch.bfloat16,
    )  # fmt: skip
    return compare(name, getattr(symm_mem, f"_{name}_fallback")(*args), *args)


def scales() -> tuple[Tensor, Tensor]:
    """Return two scales of fp8 tensors."""
    return tuple(torch.full((), scale, dtype=torch.float32, device=DEVICE) for scale in (0.5, 0.25))


def fp8(*extents: int) -> Tensor:
    generator = torch.Generator(DEVICE).manual_seed(dist.get_rank())
    return torch.randn(extents, generator=generator).to(torch.float8_e4m3fn)


def compare(name: str, expected: Any, *args: Any, **options: Any) -> dict[str, Any]:
    """Compare the results of an operator of ``torch.ops.symm_mem`` with the expected ones."""
    with enable():
        results = getattr(torch.ops.symm_mem, name)(*args, **options)
        (kind,) = explain().calls
    pairs = list(zip(*map(tree_leaves, (results, expected)), strict=True))
    tensors = [(a, b) for a, b in pairs if b is not None]
    assert all(a is None for a, b in pairs if b is None)
    return {
        "same strides": all(a.stride() == b.stride() for a, b in tensors),
        "error": error_of(tensors),
        "obstacle": kind.obstacle,
    }


def train_fsdp(policy: MixedPrecisionPolicy) -> dict[str, Any]:
    """Train a model of FSDP2 for three steps, without and with the integration, and count calls.

    Returns:
        The error of the losses and gradients, and the number of calls of each collective.
    """
    names = "all_gather", "reduce_scatter"
    results = []
    for is_ours in (False, True):
        torch.manual_seed(0)
        model = Mlp(biased=True).to(DEVICE)
        for layer in (model.gate, model.up, model.down):
            fully_shard(layer, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
        if is_ours:
            set_fsdp_communication(model)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        values = []
        with mock.patch.multiple(ops, **{n: mock.Mock(wraps=getattr(ops, n)) for n in names}):
            for step in range(3):
                torch.manual_seed(10 * dist.get_rank() + step)
                loss = model(torch.randn(5, HIDDEN, device=DEVICE)).square().mean()
                loss.backward()
                values += [loss, *(p.grad.full_tensor() for p in model.parameters())]
                optimizer.step()
                optimizer.zero_grad()
            calls = {n: getattr(ops, n).call_count for n in names}
        results.append(values)
    return {"error": error_of(zip(*results, strict=True)), **calls}
