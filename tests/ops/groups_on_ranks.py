"""Functions that tests/ops/test_groups.py runs on each of four ranks, as a 2 x 2 mesh."""

from __future__ import annotations

import runpy
from pathlib import Path

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tests.gpu import groups

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "mesh_block.py"


def _mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))


def interleaved() -> str:
    """Return what is wrong with operators of both axes in turns."""
    return groups.one_stream(groups.Layer(_mesh()))


def block() -> tuple[float, float]:
    """Return the largest error of the example, and its tolerance."""
    example = runpy.run_path(str(EXAMPLE))
    return max(example["errors"](_mesh()).values()), example["TOLERANCE"]
