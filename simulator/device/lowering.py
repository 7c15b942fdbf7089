"""Lower a tile program to the device functions that a GPU runs, and to their TMA descriptors."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from itertools import islice
from typing import Any

import tilelang
from tilelang import tvm
from tvm import tirx

from ... import passes
from ...builtins.errors import TileWeaveError
from ...codegen.names import names_kept
from ...passes.ir.host import bound_operators
from ...passes.ir.walk import calls_in, op_name
from ..frontend.program import lowered as tile_level
from ..frontend.workspaces import with_workspaces

HEAP_STRIDE = 1 << 30
"""Distance in bytes between the heaps of two ranks. TMA descriptors hold strides below 2^40."""
_TENSOR_MAP = "__tvm_tensormap_create_tiled"
_IM2COL_MAP = "__tvm_tensormap_create_im2col"
_SWIZZLES = (0, 32, 64, 128)
"""Bytes of the rows of a swizzle, by the number that cuTensorMapEncodeTiled uses."""


@dataclass(frozen=True)
class TensorMap:
    """A TMA descriptor; sizes of axes are listed from the innermost axis outwards.

    Attributes:
        tensor: name of the parameter at its address.
        shape: extents of the tensor in elements.
        strides: distances in bytes between neighbors along each axis but the innermost.
        box: extents of the box that one operation copies.
        swizzle: bytes of a row of swizzled shared memory; 0 for none.
    """

    tensor: str
    shape: tuple[Any, ...]
    strides: tuple[Any, ...]
    box: tuple[int, ...]
    swizzle: int


@dataclass(frozen=True)
class Im2colMap(TensorMap):
    """A TMA descriptor of windows of images; its box has channels and windows.

    Attributes:
        steps: distances between windows along width and height.
        lower, upper: corners of the first elements of all windows, relative to those of an image.
    """

    steps: tuple[int, ...]
    lower: tuple[int, ...]
    upper: tuple[int, ...]


@dataclass(frozen=True)
class DeviceFunctions:
    """Device functions of one program in the order of their launches, and their descriptors.

    Attributes:
        program: the program after the tile passes, which has the signature.
        descriptors: TMA descriptors, by the parameter of the device functions.
        bound: operators such as ``W.rank()`` whose value the host passes, by the parameter of the
            device functions.
    """

    program: tirx.PrimFunc
    kernels: list[tirx.PrimFunc]
    descriptors: dict[tirx.Var, TensorMap]
    bound: dict[tirx.Var, str]


def lowered(
    func: tirx.PrimFunc, world_size: int, arch: str, shared: tirx.PrimFunc | None = None,
    stock: bool = False,
) -> DeviceFunctions:  # fmt: skip
    """Lower ``func`` for a group of ``world_size`` ranks.

    Args:
        arch: ``sm_80``, ``sm_90a``.
        shared: program that is lowered instead; see ``SharedProgram``.
        stock: lower it as ``tilelang.jit`` does, instead of ``tw.compile``.

    Raises:
        TileWeaveError: ``func`` is not a ``T.prim_func``.
    """
    tiles = tile_level(func, world_size)
    func, configs = passes.split_options(with_workspaces(func), {})
    if shared is None and not stock:
        shared = passes.for_group(func, world_size, HEAP_STRIDE)
    program = func if shared is None else shared
    target = tvm.target.Target({"kind": "cuda", "arch": arch})
    context = tvm.transform.PassContext(config=dict(configs)) if configs else nullcontext()
    with target, context, names_kept(program):
        artifact = tilelang.lower(program, target=target)
    functions = {v.name_hint: f for v, f in artifact.device_mod.functions.items()}
    host = next(f for f in artifact.host_mod.functions.values() if isinstance(f, tirx.PrimFunc))
    kernels, arguments, tensor_maps = _packed_calls(host, functions)
    operators = bound_operators(host.body)
    return DeviceFunctions(
        tiles, kernels,
        descriptors={p: tensor_maps[a] for p, a in arguments.items() if a in tensor_maps},
        bound={p: operators[a] for p, a in arguments.items() if a in operators},
    )  # fmt: skip


def _packed_calls(
    host: tirx.PrimFunc, functions: dict[str, tirx.PrimFunc]
) -> tuple[list[tirx.PrimFunc], dict[tirx.Var, tirx.Var], dict[tirx.Var, TensorMap]]:
    """Return the launched functions in order, the variable of the host that each of their
    parameters is passed, and the descriptors by variable of the host."""
    launches: list[list[Any]] = []
    tensor_maps: dict[tirx.Var, TensorMap] = {}
    for call in calls_in(host.body, lambda c: op_name(c) == "tirx.tvm_call_packed"):
        name = call.args[0].value
        if name in functions:
            launches.append(list(call.args))
        elif name == _TENSOR_MAP:
            tensor_maps[call.args[1]] = _tensor_map(list(call.args[2:]))
        elif name == _IM2COL_MAP:
            tensor_maps[call.args[1]] = _im2col_map(list(call.args[2:]))
        elif name.startswith("__tvm_tensormap"):
            raise TileWeaveError(f"simulate: {name} is not simulated; expected {_TENSOR_MAP}")
    arguments = {
        param: argument
        for name, *passed in launches
        for param, argument in zip(functions[name.value].params, passed, strict=False)
        if isinstance(argument, tirx.Var)
    }
    return [functions[name.value] for name, *_ in launches], arguments, tensor_maps


def _im2col_map(args: list[Any]) -> Im2colMap:
    """Return the descriptor of the arguments of ``cuTensorMapEncodeIm2col``: type, rank, address,
    shape, strides, element strides, corners, windows, channels, interleave, swizzle, promotion,
    fill."""
    rank = int(args[1])
    parts = iter(args[3:])
    shape, strides, steps = (tuple(islice(parts, rank)) for _ in range(3))
    lower, upper = (tuple(map(int, islice(parts, rank - 2))) for _ in range(2))
    windows, channels, _, swizzle, *_ = map(int, parts)
    return Im2colMap(
        args[2].name, shape, strides[1:], (channels, windows), _SWIZZLES[swizzle],
        tuple(map(int, steps[1:-1])), lower, upper,
    )  # fmt: skip


def _tensor_map(args: list[Any]) -> TensorMap:
    """Return the descriptor of the arguments of ``cuTensorMapEncodeTiled``: type, rank, address,
    shape, strides, box, element strides, interleave, swizzle, promotion, fill."""
    rank = int(args[1])
    remaining = args[3:]
    shape, remaining = tuple(remaining[:rank]), remaining[rank:]
    strides, remaining = tuple(remaining[:rank]), remaining[rank:]
    box, remaining = tuple(map(int, remaining[:rank])), remaining[rank:]
    elements, remaining = tuple(map(int, remaining[:rank])), remaining[rank:]
    if set(elements) != {1} or int(remaining[0]) != 0:
        raise TileWeaveError(
            f"simulate: a TMA descriptor with element strides {elements} and interleave "
            f"{remaining[0]}; expected 1 and 0"
        )
    return TensorMap(args[2].name, shape, strides[1:], box, _SWIZZLES[int(remaining[1])])
