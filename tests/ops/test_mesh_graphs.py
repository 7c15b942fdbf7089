"""Operators on a mesh while a CUDA graph is captured: gloo is refused before anything begins.

What NCCL captures is checked on GPUs, by ``tests/gpu/two_levels.py graph``.
"""

from __future__ import annotations

import pytest

from tests.ops import calls_on_mesh
from tests.ops.calls_on_mesh import EVERY, MASKS, ROWS
from tests.ops.meshes import NODES


@pytest.mark.parametrize("name", [*EVERY, ROWS])
def test_gloo_between_nodes_is_refused(four, name):
    op = "sp_attention" if name in MASKS else name.partition(" ")[0]
    outcomes = four.run(calls_on_mesh.while_capturing, name, NODES["2 x 2"], True)
    for rank, (said, begun) in enumerate(outcomes):
        assert said == (
            f"{op}: gloo connects the global ranks {rank % 2}, {rank % 2 + 2}, while a CUDA graph "
            "is captured; expected NCCL between them, or no capture"
        )
        assert begun == 0


@pytest.mark.parametrize("name", [*EVERY, ROWS])
def test_nccl_is_allowed(four, name):
    """The groups are gloo's and pass for NCCL's."""
    for said, begun in four.run(calls_on_mesh.while_capturing, name, NODES["2 x 2"], False):
        assert said == "" and begun > 0
