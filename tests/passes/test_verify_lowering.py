"""Copies and loops over parts of tiles: what is accepted is right on the device."""

import numpy as np
import pytest
import tilelang.language as T

import tileweave as tw
from tests.releases import since
from tileweave import language as W
from tileweave.builtins.errors import LanguageError
from tileweave.simulator.memory.values import numpy_dtype

needs_strides = since("0.1.13", "does not copy strided tensors by the TMA")
ARCHITECTURES = ("sm_90a", "sm_80")


def inputs_of(program):
    """Return random inputs for two ranks, small integers of the types of the tensors."""
    rng = np.random.default_rng(0)
    return [
        {
            b.name: rng.integers(-9, 10, [int(n) for n in b.shape]).astype(numpy_dtype(b.dtype))
            for b in program.buffer_map.values()
        }
        for _ in range(2)
    ]


def verdict(program, arch):
    """Return ``right``, or ``refused``; another result at the device level is an error."""
    try:
        tw.emit(program, arch=arch, world_size=2)
    except LanguageError as error:
        assert "TileLang" in str(error), error
        return "refused"
    tw.validate(program, 2, inputs_of(program), schedules=1, epochs=1, arch=arch)
    return "right"


def stored(dtype, shape, rows, columns):
    """Store a part of a tile in the other rank's memory."""
    (top, bottom), (left, right) = rows, columns
    height, width = bottom - top, right - left

    @T.prim_func
    def program(X: T.Tensor(shape, dtype), Y: T.Tensor((height, width), dtype)):
        with T.Kernel(1, threads=128):
            S = W.alloc_symmetric((height, width), dtype)
            tile = T.alloc_shared(shape, dtype)
            me = W.rank()
            for i, j in T.Parallel(*shape):
                tile[i, j] = X[i, j]
            T.copy(tile[top:bottom, left:right], S[(me + 1) % 2, 0, 0])
            for i, j in T.Parallel(height, width):
                Y[i, j] = S[me, i, j]

    return program


@needs_strides
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize(
    ("dtype", "shape", "rows", "columns"),
    [
        ("float32", (32, 80), (0, 32), (0, 64)),
        ("float32", (32, 64), (0, 32), (32, 64)),
        ("bfloat16", (32, 64), (8, 24), (0, 32)),
        ("float8_e4m3fn", (32, 256), (0, 32), (128, 256)),
        ("bfloat16", (32, 64), (16, 32), (0, 64)),
    ],
)
def test_stored_parts(dtype, shape, rows, columns, arch):
    assert verdict(stored(dtype, shape, rows, columns), arch) == "right"


@needs_strides
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_parts_of_planes(dtype):
    """TileLang alone fails with an internal error."""

    @T.prim_func
    def program(X: T.Tensor((2, 16, 64), dtype), Y: T.Tensor((2, 16, 64), dtype)):
        with T.Kernel(1, threads=128):
            W.fence("gpu")
            tile = T.alloc_shared((2, 16, 64), dtype)
            T.copy(X, tile)
            T.copy(tile[:, 0:8, :], Y[:, 8:16, :])
            T.copy(tile[:, 8:16, 0:32], Y[:, 0:8, 32:64])

    assert verdict(program, "sm_90a") == "right"


@needs_strides
@pytest.mark.parametrize(("columns", "first"), [(80, 0), (80, 16), (128, 64)])
def test_loaded_parts(columns, first):
    """A producer warp loads columns of a tile."""

    @T.prim_func
    def program(X: T.Tensor((4, 32, 64), "float32"), Y: T.Tensor((4, 32, 64), "float32")):
        with T.Kernel(1, threads=128):
            W.fence("gpu")
            tile = T.alloc_shared((32, columns), "float32")
            for k in T.Pipelined(4, num_stages=2):
                T.copy(X[k, 0:32, 0:64], tile[:, first : first + 64])
                for i, j in T.Parallel(32, 64):
                    Y[k, i, j] = tile[i, first + j]

    assert verdict(program, "sm_90a") == "right"


def test_program_without_builtins():
    """A program that is compiled for a group is also checked if it does not communicate."""

    @T.prim_func
    def program(X: T.Tensor((32, 136), "bfloat16"), Y: T.Tensor((32, 128), "bfloat16")):
        with T.Kernel(1, threads=128):
            tile = T.alloc_shared((32, 136), "bfloat16")
            T.copy(X, tile)
            T.copy(tile[:, 0:128], Y)

    assert verdict(program, "sm_90a") == "right"


def in_fragment(access, dtype="float32"):
    """Access a part of a fragment by ``access(fragment, rank)``."""

    @T.prim_func
    def program(X: T.Tensor((32, 64), dtype), Y: T.Tensor((32, 64), dtype)):
        with T.Kernel(1, threads=128):
            x = T.alloc_fragment((32, 64), dtype)
            T.copy(X, x)
            access(x, W.rank())
            T.copy(x, Y)

    return program


@T.macro
def rows_from_5(x, rank):
    for i, j in T.Parallel(10, 64):
        x[5 + i, j] = 7


@T.macro
def rows_from_rank(x, rank):
    for i, j in T.Parallel(10, 64):
        x[5 * rank + i, j] += 1


@T.macro
def rows_from_8(x, rank):
    for i, j in T.Parallel(16, 64):
        x[8 + i, j] = 7


@T.macro
def rows_by_condition(x, rank):
    for i, j in T.Parallel(32, 64):
        if i >= 5 and i < 15:
            x[i, j] = 7


@T.macro
def axes_swapped(x, rank):
    for j, i in T.Parallel(64, 32):
        x[i, j] += 1


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize(
    ("access", "expected"),
    [
        (rows_from_5, "refused"),
        (rows_from_rank, "refused"),
        (rows_from_8, "right"),
        (rows_by_condition, "right"),
        (axes_swapped, "right"),
    ],
)
def test_parts_of_fragments(access, expected, arch):
    assert verdict(in_fragment(access), arch) == expected


@T.macro
def sum_of_columns(x, rank):
    total = T.alloc_fragment((32,), "float32")
    T.reduce_sum(x[:, 16:32], total, dim=1)
    for i, j in T.Parallel(32, 64):
        x[i, j] = total[i]


@since("0.1.15", "reduces no parts")
def test_reduced_part():
    assert verdict(in_fragment(sum_of_columns), "sm_90a") == "refused"
