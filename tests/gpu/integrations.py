"""tileweave.integrations.torch between real GPUs: operators, compiled models, styles.

    torchrun --nproc-per-node=2 tests/gpu/integrations.py [CHECK ...]

The functions that tests/integrations runs on CPUs run here on larger shapes, in bf16.
"""

import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.integrations import torch_on_ranks as on_ranks
from tests.on_gpus import GPU, Verdicts, main, parser_of, say

HIDDEN = on_ranks.HIDDEN
ERROR = 2e-2
"""Largest relative error of results and gradients in bf16."""
ROWS = (1, 64, 256)
"""Rows of norms. Those of the operator are not the fastest from about 256 rows on."""


def fault_of(result: dict[str, Any], **expected: Any) -> str:
    """Return the first entry of a result that differs from the expected one."""
    if not result["error"] < ERROR:
        return f"error {result['error']:.1e}; expected less than {ERROR}"
    for name, value in expected.items():
        if result[name] != value:
            return f"{name}: {result[name]}; expected {value}"
    return ""


def check_operators() -> str:
    weight, transposed = (HIDDEN, 768), (-1, HIDDEN, 512)
    gathers = [
        ((512, HIDDEN), [weight], 0),
        ((2, 256, HIDDEN), [weight, transposed], 1),
        ((2, 3, 128, HIDDEN), [weight], 2),
    ]
    scatters = [
        ((512, HIDDEN), weight, "sum", 0),
        ((2, 512, HIDDEN), transposed, "avg", 1),
        ((2, 512, HIDDEN), transposed, "sum", 2),
    ]
    results = [on_ranks.gather(*args, keeps) for args in gathers for keeps in (True, False)]
    results += [on_ranks.operator("fused_matmul_reduce_scatter", *args) for args in scatters]
    faults = (fault_of(r, obstacle=None, **{"same strides": True}) for r in results)
    return next(filter(None, faults), "")


def check_fp8() -> str:
    results = [
        function(shape, axis)
        for function in (on_ranks.scaled_gather, on_ranks.scaled_scatter)
        for shape, axis in (((512, HIDDEN), 0), ((2, 512, HIDDEN), 1))
    ]
    return next(filter(None, (fault_of(r, obstacle=None) for r in results)), "")


def check_compiled() -> str:
    gather, scatter = "symm_mem::fused_all_gather_matmul", "symm_mem::fused_matmul_reduce_scatter"
    fused = [[gather, scatter], [gather, scatter], [gather, scatter, scatter]]
    for axis, shape in ((0, (2048,)), (1, (2, 1024)), (1, (1, 2048))):
        result = on_ranks.mlp(axis, *shape)
        if fault := fault_of(result, fused=fused, unfused=[[]] * 3, strategies={"fused"}):
            return f"axis {axis} of {shape}: {fault}"
    reduced = "tileweave::matmul_all_reduce"
    return fault_of(on_ranks.mlp(None, 2048), fused=[[reduced], [reduced], [reduced] * 2])


def check_attention() -> str:
    for causal, by_module in ((True, False), (True, True), (False, False)):
        result = on_ranks.attention(causal, by_module)
        calls = result["calls"]
        if any(obstacle for _, _, obstacle in calls) or len(calls) != 2:
            return f"causal={causal}: {calls}; expected two accepted calls"
        if fault := fault_of(result):
            return f"causal={causal}: {fault}"
    return ""


def check_norms() -> str:
    for rows in ROWS:
        for function in ("torch_norm", "hugging_face_norm"):
            result = on_ranks.norm(rows, torch.bfloat16, function)
            say(f"{rows} rows, {function}: error {result['error']:.1e}, {result['fused']}")
            expected = ["tileweave::all_reduce_rms_norm"] if rows < max(ROWS) else result["fused"]
            if fault := fault_of(result, fused=expected):
                return f"{rows} rows, {function}: {fault}"
    return ""


def check_styles() -> str:
    for axis, counts in ((0, (2, 0, 1)), (1, (2, 0, 1)), (None, (0, 1, 0))):
        names = "all_gather_matmul", "matmul_all_reduce", "matmul_reduce_scatter"
        result = on_ranks.eager_mlp(axis, *((2, 1024) if axis == 1 else (2048,)))
        if fault := fault_of(result, calls=dict(zip(names, counts, strict=True))):
            return f"axis {axis}: {fault}"
    return "" if all(on_ranks.layers_of_torch()) else "a layer of torch is wrong"


CHECKS = {
    "operators": check_operators,
    "fp8": check_fp8,
    "compiled": check_compiled,
    "norms": check_norms,
    "styles": check_styles,
    "attention": check_attention,
}


def verdicts(options: Any) -> Verdicts:
    for name in options.checks or CHECKS:
        yield name, CHECKS[name]()


if __name__ == "__main__":
    if not GPU:
        sys.exit("integrations: no GPU is visible; tests/integrations runs on CPUs")
    torch.set_default_device("cuda")
    torch.set_default_dtype(torch.bfloat16)
    sys.exit(main(verdicts, parser_of(__doc__, CHECKS), heap_bytes=2 << 30))
