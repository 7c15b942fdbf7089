"""Quantization of rows to e4m3 by a kernel, against plain torch."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch

import tileweave as tw
from tests.ops.moe.simulated_kernels import as_numpy, simulate_kernels
from tileweave.ops.moe import local_kernels
from tileweave.ops.moe.kernels.quantize import quantize_program
from tileweave.ops.moe.quant import MIN_ABSMAX, has_kernel, quantized, quantized_rows

ROWS, USED = 9, 7
OFFSETS = torch.tensor([2, 2, USED], dtype=torch.int32)


def rows_of(columns, dtype):
    """Return rows of many sizes, also zeros and numbers whose scale would be subnormal."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS, columns, generator=generator)
    x = (x * torch.tensor([1, 20, 0, 1e-38, 1e4, 0.1, 3, 1, 1])[:, None]).to(dtype)
    return x


@pytest.mark.parametrize(
    ("columns", "dtype"),
    [
        (384, torch.bfloat16),
        pytest.param(128, torch.float16, marks=pytest.mark.long),
        pytest.param(1408, torch.bfloat16, marks=pytest.mark.long),
    ],
)
def test_kernel(columns, dtype):
    x, shape = rows_of(columns, dtype), (ROWS, columns // 128, 128)
    name = str(dtype).removeprefix("torch.")
    inputs = {
        "x": as_numpy(x).reshape(shape),
        "offsets": OFFSETS.numpy(),
        "values": np.full(shape, -3, ml_dtypes.float8_e4m3fn),
        "scales": np.full(shape[:2], -7, np.float32),
    }
    (outputs,) = tw.validate(quantize_program(columns, 3, name, MIN_ABSMAX, 2), 1, [inputs])
    values, scales = quantized(x)
    actual = outputs["values"].astype(np.float32).reshape(ROWS, -1)
    np.testing.assert_array_equal(actual[:USED], values[:USED].float())
    np.testing.assert_array_equal(outputs["scales"][:USED], scales[:USED])
    assert (actual[USED:] == -3).all() and (outputs["scales"][USED:] == -7).all()


def test_calls(monkeypatch):
    """NaN stays NaN, other elements of its row do not change."""
    x = rows_of(256, torch.bfloat16)
    assert not has_kernel(x)  # on a CPU
    right, right_scales = quantized_rows(x, OFFSETS)
    simulate_kernels(monkeypatch)
    x[1, 7] = torch.nan
    values, scales = quantized_rows(x, OFFSETS)
    assert len(local_kernels._KERNELS) == 1 and values[1, 7].isnan()
    assert torch.equal(values[2:USED].float(), right[2:USED].float())
    assert torch.equal(values[1, 128:].float(), right[1, 128:].float())
    assert torch.equal(scales[2:USED], right_scales[2:USED])
    assert [t.shape for t in quantized_rows(x[:0], OFFSETS)] == [(0, 256), (0, 2)]


@pytest.mark.long
def test_opcheck():
    torch.library.opcheck(
        torch.ops.tileweave.quantize_rows, (rows_of(256, torch.bfloat16), OFFSETS)
    )


@pytest.mark.long
def test_kernel_spills_no_registers(ptxas):
    program = quantize_program(7168, 32, "bfloat16", MIN_ABSMAX, 1056)
    report = ptxas(tw.emit(program, "ptx", world_size=1))
    assert "0 bytes spill stores, 0 bytes spill loads" in report
