"""Rename variables of device code whose names CUDA C++ or the headers reserve."""

from __future__ import annotations

from tilelang import tvm
from tvm import IRModule, tirx
from tvm.script.ir_builder import IRBuilder

from .headers import is_device
from .names import names_in

_KEYWORDS = """
alignas alignof and and_eq asm auto bitand bitor bool break case catch char char8_t char16_t
char32_t class compl concept const consteval constexpr constinit const_cast continue co_await
co_return co_yield decltype default delete do double dynamic_cast else enum explicit export extern
false float for friend goto if inline int long mutable namespace new noexcept not not_eq nullptr
operator or or_eq private protected public register reinterpret_cast requires restrict return short
signed sizeof static static_assert static_cast struct switch template this thread_local throw true
try typedef typeid typename union unsigned using virtual void volatile wchar_t while xor xor_eq
"""
_CUDA = """
threadIdx blockIdx blockDim gridDim warpSize dim3 half half2 half_t bfloat16_t nv_bfloat16
int8_t int16_t int32_t int64_t uint8_t uint16_t uint32_t uint64_t size_t uchar ushort uint ulong
CUtensorMap cudaStream_t NULL
"""
_NAMESPACES = "std tl tw cute cutlass cooperative_groups"
_FUNCTIONS = """
abs acos asin assert atan atan2 atomicAdd atomicCAS atomicExch atomicMax atomicMin ceil clock64 cos
cosh erf exp exp2 exp10 fabs floor fma fmax fmaxf fmin fminf fmod hexp hlog hmax hmin ldexp log
log10 log1p log2 lround make_float2 make_float4 make_int2 make_int4 make_uint2 make_uint4 max memcpy
memset min nearbyint pow printf rint round rsqrt rsqrtf sin sinh sqrt sqrtf tan tanh trap trunc
uchar2 uchar4 uint1 uint2 uint3 uint4 int1 int2 int3 int4 float1 float2 float3 float4 double2
Barrier AtomicAdd AtomicAddRet AtomicAddx2 AtomicAddx4 AtomicLoad AtomicMax AtomicMin AtomicStore
"""
RESERVED = frozenset(f"{_KEYWORDS} {_CUDA} {_NAMESPACES} {_FUNCTIONS}".split())
"""Keywords of C++20, and names in the headers of CUDA, TileLang and TileWeave that generated code
uses."""


def rename_reserved(mod: IRModule) -> IRModule:
    """Append an underscore to the reserved names of variables and buffers of device functions.

    The program and the host code keep their names: a launch passes arguments by position.

    Before: ``float* __restrict__ new, ... new[threadIdx.x]``
    After:  ``float* __restrict__ new_, ... new_[threadIdx.x]``
    """
    functions = {}
    for name, func in mod.functions.items():
        if isinstance(func, tirx.PrimFunc) and is_device(func) and _reserved_in(func):
            func = tvm.ir.load_json(tvm.ir.save_json(func))  # a copy with its own variables
            for variable, reserved in _reserved_in(func).items():
                IRBuilder.name(f"{reserved}_", variable)
        functions[name] = func
    return IRModule(functions, attrs=mod.attrs)


def _reserved_in(func: tirx.PrimFunc) -> dict[tirx.Var | tirx.Buffer, str]:
    names = names_in(func) | {p: p.name for p in func.params}
    return {variable: name for variable, name in names.items() if name in RESERVED}
