"""The words of the language: PTX's own, never synonyms.

Each alias is a ``Literal``: what a builtin accepts is what its signature says. A word travels
through the IR as a string and leaves as an enumerator of the same name in
``codegen/include/tileweave/words.cuh``.
"""

from __future__ import annotations

from typing import Literal

Scope = Literal["cta", "gpu", "sys"]
"""Who must observe the order: the block, the GPU, or every GPU and the host."""

AtomSem = Literal["relaxed", "acquire", "release", "acq_rel"]
"""What ``atom`` may be (PTX ISA, atom)."""

RedSem = Literal["relaxed", "release"]
"""What ``red`` may be: it returns nothing, so it cannot acquire (PTX ISA, red)."""

LoadSem = Literal["relaxed", "acquire", "volatile"]
"""What ``ld`` may be (PTX ISA, ld)."""

StoreSem = Literal["relaxed", "release"]
"""What ``st`` may be (PTX ISA, st)."""

FenceSem = Literal["acq_rel", "sc"]
"""What ``fence`` may be (PTX ISA, membar/fence)."""

SignalOp = Literal["add", "set"]
"""How a signal changes its flag."""

SignalSem = Literal["relaxed", "release"]
"""How a signal publishes what was written before it."""

WaitSem = Literal["relaxed", "acquire"]
"""What a successful wait makes visible."""

BulkReduceOp = Literal["add", "min", "max", "and", "or", "xor"]
"""What ``cp.reduce.async.bulk`` may do (PTX ISA, cp.reduce.async.bulk)."""

MultimemOp = Literal["add", "min", "max", "and", "or", "xor"]
"""What ``multimem.ld_reduce`` and ``multimem.red`` may do (PTX ISA, multimem)."""

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
"""Words that C++ keeps for itself; their enumerators end in an underscore."""
