"""TileLang's atomic operations on symmetric tensors become PTX at system scope."""

import re
import subprocess
from pathlib import Path

import pytest
import tilelang.language as T

import tileweave as tw
from tileweave import language as W
from tileweave.codegen.headers import INCLUDE_DIR

pytestmark = pytest.mark.long

PRELUDE = """#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <tileweave/tileweave.cuh>
"""
CXX = {
    "u32": "uint32_t", "s32": "int32_t", "u64": "uint64_t", "s64": "int64_t", "f32": "float",
    "f64": "double", "f16": "__half", "bf16": "__nv_bfloat16",
}  # fmt: skip
VECTORS = {("f16", 2): "uint1", ("bf16", 2): "uint1", ("f32", 2): "float2",
           ("f16", 4): "uint2", ("bf16", 4): "uint2", ("f32", 4): "float4"}  # fmt: skip
ORDERS = {0: "relaxed", 2: "acquire", 3: "release", 4: "acq_rel", 5: "seq_cst"}


def forms():
    """Yield (name of the kernel, parameters, statement) of each form."""
    for order in ORDERS:
        for ptx, cxx in CXX.items():
            what = f"<tw::Type::{ptx}, {order}>"
            kinds = ["add", "max", "min", *(["or"] if ptx[0] in "us" else [])]
            for kind in kinds:
                call = f"tw::system::atomic_{kind}{what}(ref, value)"
                yield f"{kind}_{ptx}_{order}", f"{cxx} *ref, {cxx} value", call
                if kind != "or":
                    back = call.replace(f"atomic_{kind}", f"atomic_{kind}_ret")
                    yield f"{kind}_ret_{ptx}_{order}", f"{cxx} *ref, {cxx} value", f"*ref = {back}"
            load = f"tw::system::atomic_load{what}(ref)"
            yield f"load_{ptx}_{order}", f"const {cxx} *ref, {cxx} *out", f"*out = {load}"
            store = f"tw::system::atomic_store{what}(ref, value)"
            yield f"store_{ptx}_{order}", f"{cxx} *ref, {cxx} value", store
        for (ptx, lanes), vector in VECTORS.items():
            add = f"tw::system::atomic_addx{lanes}<tw::Type::{ptx}, {order}>(ref, value)"
            name = f"addx{lanes}_{ptx}_{order}"
            yield name, f"{CXX[ptx]} *ref, {vector} value", add
            yield f"{name}_of", f"{CXX[ptx]} *ref, const {CXX[ptx]} *value", add
            if ptx != "f32":
                yield f"{name}_wide", f"{CXX[ptx]} *ref, float{lanes} value", add


def expected(name: str, sm: int) -> str:
    """Return the expected PTX of a form; "" if it is a loop."""
    kind, ptx = re.match(r"(\w+?(?:_ret)?)_([a-z]+\d+)_\d", name).groups()
    base, bits = kind.removesuffix("_ret"), re.search(r"\d+", ptx)[0]
    if base in ("load", "store"):
        return f"{'ld' if base == 'load' else 'st'}.relaxed.sys.global.b{bits}"
    returns = kind != base or (base in ("max", "min", "add") and ptx.endswith("16"))
    start = f"{'atom' if returns else 'red'}.relaxed.sys.global"
    if base == "or":
        return f"{start}.or.b{bits}"
    if base in ("max", "min"):
        loops = ptx in ("f16", "bf16", "f32", "f64")
        return "atom.relaxed.sys.global.cas" if loops else f".relaxed.sys.global.{base}.{ptx}"
    if base == "add":
        if ptx.endswith("16"):
            return f"{start}.add.noftz.{ptx}" if ptx == "f16" or sm >= 90 else ".cas.b16"
        return f"{start}.add.{'u64' if ptx == 's64' else ptx}"
    if ptx == "f32":
        return "red.relaxed.sys.global.add" + (f".v{base[-1]}.f32" if sm >= 90 else ".f32")
    return f"red.relaxed.sys.global.add.noftz.{ptx}x2" if ptx == "f16" or sm >= 90 else ".cas.b16"


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_every_form_assembles(nvcc: str, arch: str, tmp_path: Path):
    source, sm = tmp_path / "forms.cu", int(re.search(r"\d+", arch)[0])
    every = list(forms())
    kernels = [f'extern "C" __global__ void row_{n}({p}) {{ {s}; }}\n' for n, p, s in every]
    source.write_text(PRELUDE + "".join(kernels))
    command = [nvcc, "-cubin", f"-arch={arch}", "-std=c++17", f"-I{INCLUDE_DIR}", "-Werror"]
    command += ["all-warnings", "--keep", f"--keep-dir={tmp_path}", "-o", f"{tmp_path}/forms.cubin"]
    done = subprocess.run([*command, str(source)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[:4000]
    parts = re.split(r"\.entry row_(\w+)\(", (tmp_path / "forms.ptx").read_text())
    for name, body in zip(parts[1::2], parts[2::2], strict=True):
        assert expected(name, sm) in body, (name, expected(name, sm), body)
        order = ORDERS[int(re.search(r"_(\d)(_of|_wide)?$", name)[1])]
        fences = re.findall(r"fence\.(\w+)\.sys", body)
        before = {"release": ["acq_rel"], "acq_rel": ["acq_rel"], "seq_cst": ["sc"]}.get(order, [])
        after = ["acq_rel"] if order in ("acquire", "acq_rel", "seq_cst") else []
        if name.startswith("load"):
            before = before if order == "seq_cst" else []
        if name.startswith("store"):
            after = []
        assert fences == before + after, (name, fences)
    assert len(parts) == 2 * len(every) + 1


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_what_tilelang_emits_compiles(nvcc: str, dtype: str, arch: str):
    @T.prim_func
    def program(
        S: W.Symmetric((128, 64), dtype), A: T.Tensor((128, 64), dtype), B: T.Tensor((128,), dtype)
    ):
        with T.Kernel(2, threads=128) as _:
            peer, tx = 1 - W.rank(), T.get_thread_binding()
            tile = T.alloc_shared((128, 64), dtype)
            sums = T.alloc_fragment((128, 64), "float32")
            T.copy(A, tile)
            T.copy(A, sums)
            W.sync_ranks()
            T.atomic_add(S[peer, 0, 0], tile)
            T.atomic_add(S[peer, 0, 0], sums)
            T.atomic_max(S[peer, 0, 0], tile)
            T.atomic_addx2(S[peer, tx, 0], A[tx, 0])
            T.atomic_addx4(S[peer, tx, 0], A[tx, 0])
            B[tx] = T.atomic_add(S[peer, tx, 0], 1, memory_order="acq_rel", return_prev=True)
            T.atomic_store(S[peer, tx, 0], B[tx])
            B[tx] = T.atomic_load(S[peer, tx, 0]) + A[tx, 1]
            for i, j in T.Parallel(128, 64):
                T.atomic_add(S[peer, i, j], A[i, j], memory_order="release")
            W.sync_ranks()

    off = {"tileweave.verify": "off"}
    ptx = tw.emit(program, stage="ptx", arch=arch, world_size=2, pass_configs=off)
    atomics = re.findall(r"\b(?:atom|red)\.[\w.:]+", ptx)
    assert atomics and all(".sys" in a for a in atomics), sorted(set(atomics))
