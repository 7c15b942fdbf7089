"""Qualifiers of builtins, named as in PTX.

Each alias is a ``Literal``: a builtin accepts the values that its signature lists. In the IR a
qualifier is a string. The lowering emits the enumerator of the same name in
``codegen/include/tileweave/qualifiers.cuh``.
"""

from __future__ import annotations

from typing import Literal

Scope = Literal["cta", "gpu", "sys"]
"""Threads that observe the order: those of the block, of the GPU, or of all GPUs and the host."""

AtomSem = Literal["relaxed", "acquire", "release", "acq_rel"]
"""Memory semantics of ``atom`` (PTX ISA, atom)."""

RedSem = Literal["relaxed", "release"]
"""Memory semantics of ``red``, which cannot acquire because it returns nothing (PTX ISA, red)."""

LoadSem = Literal["relaxed", "acquire", "volatile"]
"""Memory semantics of ``ld`` (PTX ISA, ld)."""

StoreSem = Literal["relaxed", "release"]
"""Memory semantics of ``st`` (PTX ISA, st)."""

FenceSem = Literal["acq_rel", "sc"]
"""Memory semantics of ``fence`` (PTX ISA, membar/fence)."""

SignalOp = Literal["add", "set"]
"""Operation by which a signal changes its flag."""

SignalSem = Literal["relaxed", "release"]
"""Memory semantics of a signal; ``release`` publishes earlier writes."""

WaitSem = Literal["relaxed", "acquire"]
"""Memory semantics of a successful wait; ``acquire`` makes published writes visible."""

BulkReduceOp = Literal["add", "min", "max", "and", "or", "xor"]
"""Operations of ``cp.reduce.async.bulk`` (PTX ISA, cp.reduce.async.bulk)."""

MultimemOp = Literal["add", "min", "max", "and", "or", "xor"]
"""Operations of ``multimem.ld_reduce`` and ``multimem.red`` (PTX ISA, multimem)."""

PTX_TYPES = {
    "u32": ("uint32", 1),
    "s32": ("int32", 1),
    "u64": ("uint64", 1),
    "s64": ("int64", 1),
    "f32": ("float32", 1),
    "f64": ("float64", 1),
    "f16": ("float16", 1),
    "bf16": ("bfloat16", 1),
    "f16x2": ("float16", 2),
    "bf16x2": ("bfloat16", 2),
}
"""PTX type -> (element type, lanes) in TileLang."""

CXX_RESERVED = frozenset({"and", "or", "xor", "volatile"})
"""Qualifiers that C++ reserves; their enumerators end in an underscore."""
