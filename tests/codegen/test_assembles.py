"""nvcc and ptxas accept every builtin in every form that its declaration allows."""

from __future__ import annotations

import itertools
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tileweave.builtins.declaration.operands import WORD_DATA_BITS
from tileweave.builtins.declaration.qualifiers import CXX_RESERVED, PTX_TYPES
from tileweave.builtins.ll import WORD
from tileweave.builtins.memory import SCALAR_BITS, VECTOR_BITS
from tileweave.builtins.ranks import HOST_VALUES
from tileweave.builtins.spec import (
    BUILTINS,
    Builtin,
    ConstantBool,
    ConstantInt,
    DataOf,
    ElementOf,
    Pointer,
    Scalar,
)
from tileweave.codegen.headers import INCLUDE_DIR

pytestmark = pytest.mark.long

ARCHES = ("sm_80", "sm_90a", "sm_100a")

CXX = {
    "uint8": "uint8_t",
    "uint32": "uint32_t",
    "int32": "int32_t",
    "uint64": "uint64_t",
    "int64": "int64_t",
    "float32": "float",
    "float64": "double",
    "float16": "half_t",
    "bfloat16": "bfloat16_t",
}
BY_SIZE = ("uint8", "bfloat16", "float32", "float64")
"""One type of each size, for what does not depend on the type."""
VECTOR_CXX = {32: "uint1", 64: "uint2", 128: "uint4"}
"""Types TileLang prints for vectors, one a size."""
HIDDEN_CXX = {
    "context": "int64_t",
    "launch": "int32_t",
    "loc": "int32_t",
    "row_size": "int32_t",
    "rows": "int32_t",
    "thread": "int32_t",
    "threads": "int32_t",
    "tile": "int32_t",
    "total": "uint32_t *",
}
OWN_TYPES = {
    ("announce", "ref"): "uint32_t",
    ("check_row", "words"): "uint64_t",
    ("check_row", "written"): "uint32_t",
    ("check_amount", "written"): "uint32_t",
    ("check_amount", "total"): "uint32_t",
}
"""Types of pointers that do not depend on the element type, by builtin and operand."""
PRELUDE = """#include <tileweave/tileweave.cuh>
struct half_t { uint16_t bits; };
struct bfloat16_t { uint16_t bits; };
"""


@dataclass(frozen=True)
class Data:
    """Type of a builtin's pointers and values: ``lanes`` elements of ``dtype`` in one access."""

    dtype: str
    lanes: int = 1
    ptx: str = ""
    vector_tensor: bool = False

    @property
    def bits(self) -> int:
        return int(re.search(r"\d+$", self.dtype)[0]) * self.lanes

    @property
    def vector(self) -> str:
        return VECTOR_CXX[self.bits] if self.lanes > 1 else ""

    @property
    def pointee(self) -> str:
        return self.vector if self.vector_tensor else CXX[self.dtype]


@dataclass(frozen=True)
class Row:
    """One form of one builtin."""

    spec: Builtin
    data: Data
    words: dict[str, str]
    constants: dict[str, int | bool] = field(default_factory=dict)

    def __str__(self) -> str:
        forms = [self.data.ptx or self.data.dtype, *self.words.values(), *self.constants.values()]
        return f"{self.spec.name}({', '.join(map(str, forms))}, lanes={self.data.lanes})"

    @property
    def sm(self) -> int:
        return self.spec.type_sm.get(self.data.ptx, self.spec.sm)

    def kernel(self, name: str) -> str:
        """Return a kernel with this call as TileLang would print it."""
        parameters, arguments, body = ["Out *out"], [], []
        for operand, kind in self.spec.operands:
            cxx = self.data.pointee if not self.spec.flagged else CXX[WORD]
            cxx = OWN_TYPES.get((self.spec.name, operand), cxx)
            if isinstance(kind, (ConstantInt, ConstantBool)):
                continue
            if isinstance(kind, Pointer) and kind.space == "barrier":
                body.append(f"__shared__ uint64_t {operand};")
                arguments.append(f"&{operand}")
                continue
            if isinstance(kind, Pointer) and kind.space == "shared":
                body.append(f"__shared__ __align__(128) {cxx} {operand}[256];")
            elif isinstance(kind, Pointer):
                parameters.append(f"{'const ' if kind.access == 'r' else ''}{cxx} *{operand}")
            elif isinstance(kind, (DataOf, ElementOf)):
                parameters.append(f"{self.data.vector or self.data.pointee} {operand}")
                if self.data.vector:
                    operand = f"tw::bits({operand})"
            else:
                assert isinstance(kind, Scalar), f"{self.spec.name}: operand kind {kind}"
                parameters.append(f"{CXX[kind.dtype]} {operand}")
            arguments.append(operand)
        for implicit in self.spec.implicit:
            parameters.append(f"{HIDDEN_CXX[implicit]} {implicit}")
            arguments.append(implicit)
        template = [f"tw::Type::{self.data.ptx}"] if self.spec.types else []
        for parameter, word in self.words.items():
            enumerator = word + "_" * (word in CXX_RESERVED)
            template.append(f"tw::{parameter.capitalize()}::{enumerator}")
        template += [str(c).lower() for c in self.constants.values()]
        call = f"tw::{self.spec.name}" + (f"<{', '.join(template)}>" if template else "")
        call += f"({', '.join(arguments)})"
        out = "int"
        if isinstance(self.spec.result, (DataOf, ElementOf)):
            out = self.data.vector or self.data.pointee
            if self.data.vector:
                call = f"tl::load_global_{self.data.bits}(tw::bits({call}))"
            call = f"*out = {call}"
        signature = ", ".join(parameters).replace("Out", out)
        return f'extern "C" __global__ void {name}({signature}) {{ {" ".join(body)} {call}; }}\n'


def data_of(spec: Builtin, op: str | None) -> Iterator[Data]:
    """Yield the element types and lanes that the declaration allows."""
    if spec.types:
        for ptx in spec.types_of(op):
            dtype, width = PTX_TYPES[ptx]
            for lanes in spec.lanes_of(ptx):
                yield Data(dtype, lanes, ptx)
            if width > 1:
                yield Data(dtype, width, ptx, vector_tensor=True)
    elif spec.flagged:
        for dtype, lanes in itertools.product((*BY_SIZE, "uint32"), (1, 2, 4, 8)):
            if Data(dtype, lanes).bits in (WORD_DATA_BITS, 2 * WORD_DATA_BITS):
                yield Data(dtype, lanes)
    elif any(isinstance(kind, ElementOf) for _, kind in [*spec.operands, ("", spec.result)]):
        for dtype, lanes in itertools.product(BY_SIZE, (1, 2, 4, 8, 16)):
            data = Data(dtype, lanes)
            if data.bits in (SCALAR_BITS if lanes == 1 else VECTOR_BITS):
                yield data
    elif any(isinstance(kind, Pointer) for _, kind in spec.operands):
        for dtype in BY_SIZE:
            yield Data(dtype)
    else:
        yield Data("int32")


def rows_of(spec: Builtin) -> Iterator[Row]:
    """Yield every form of a builtin."""
    for words in itertools.product(*(legal for _, legal in spec.qualifiers)):
        named = dict(zip((n for n, _ in spec.qualifiers), words, strict=True))
        for data in data_of(spec, named.get("op")):
            choices = []
            for operand, kind in spec.operands:
                if isinstance(kind, ConstantInt) and spec.flagged:
                    choices.append([(operand, data.bits // WORD_DATA_BITS)])
                elif isinstance(kind, ConstantInt):
                    lanes = 1 if data.vector_tensor else data.lanes
                    choices.append([(operand, lanes if operand == "lanes" else 3)])
                elif isinstance(kind, ConstantBool):
                    choices.append([(operand, False), (operand, True)])
            for constants in itertools.product(*choices):
                yield Row(spec, data, named, dict(constants))


_SINGLE = {"", "add", "min", "max", "and", "or", "xor", "cas"}
"""Atomic changes that PTX has an instruction for; others are loops."""


def instruction(row: Row) -> str | None:
    """Return the expected PTX of a row, independent of the headers; None if it is a sequence."""
    name, ptx, bits = row.spec.name, row.data.ptx, row.data.bits
    words = row.words
    order = f".{words.get('sem')}.{words.get('scope')}"
    width = f".b{bits}"

    def arithmetic(op: str) -> str:
        if op in ("and", "or", "xor", "exch", "cas"):
            return f".{op}{width}"
        return f".{op}.{'u64' if (op, ptx) == ('add', 's64') else ptx}"

    family, _, op = name.partition("_")
    if row.spec.combines not in _SINGLE:
        return None
    if family in ("atom", "red"):
        text = f"{family}{order}.global{arithmetic(op)}"
        return text.replace(".add.", ".add.noftz.") if ptx.endswith("x2") else text
    if name in ("ld", "st"):
        order = ".volatile" if words["sem"] == "volatile" else order
        return f"{name}{order}.global{width}"
    if row.spec.flagged:
        vector = ".v2" * (bits == 2 * WORD_DATA_BITS)
        return f"{op}.relaxed.{words['scope']}.global{vector}.b64"
    if name == "fence":
        return f"fence{order};"
    if name == "globaltimer":
        return "%globaltimer;"
    if name == "record":
        return "atom.relaxed.gpu.global.add.u64"
    if name == "fence_proxy_async":
        return "fence.proxy.async;"
    if name == "signal":
        change = f".add.u{bits}" if words["op"] == "add" else width
        return f"{'red' if words['op'] == 'add' else 'st'}{order}.global{change}"
    if family == "wait":
        return f"ld{order}.global{width}"
    if family == "multimem":
        vector = "" if row.data.lanes == PTX_TYPES[ptx][1] else f".v{bits // 32}"
        if name == "multimem_st":
            kind = width if ptx[0] in "us" else f".{ptx}"
            return f"multimem.st{order}.global{vector}{kind}"
        text = f"multimem.{op}{order}.global{arithmetic(words['op'])}"
        before, _, kind = text.rpartition(".")
        if (op, words["op"]) == ("ld_reduce", "add") and ptx.endswith("x2"):
            before += ".acc::f32"
        return f"{before}{vector}.{kind}"
    return None


ROWS = [
    row for spec in BUILTINS.values() if spec.op_name not in HOST_VALUES for row in rows_of(spec)
]


def assemble(nvcc: str, arch: str, rows: list[Row], folder: Path) -> list[str]:
    """Return the PTX of each row's kernel, after ptxas has assembled all of it."""
    source = folder / "rows.cu"
    source.write_text(PRELUDE + "".join(r.kernel(f"row_{i}") for i, r in enumerate(rows)))
    command = [nvcc, "-cubin", f"-arch={arch}", "-std=c++17", f"-I{INCLUDE_DIR}", "-Werror"]
    command += ["all-warnings", "--keep", f"--keep-dir={folder}", "-o", str(folder / "rows.cubin")]
    done = subprocess.run([*command, str(source)], capture_output=True, text=True, check=False)
    named = re.sub(r"\brow_(\d+)\b", lambda m: f"{m[0]} = {rows[int(m[1])]}", done.stderr)
    assert done.returncode == 0, named[:4000]
    bodies = re.split(r"\.entry row_(\d+)\(", (folder / "rows.ptx").read_text())
    by_row = dict(zip(map(int, bodies[1::2]), bodies[2::2], strict=True))
    return [by_row[i] for i in range(len(rows))]


@pytest.mark.parametrize("arch", ARCHES)
def test_every_form_assembles(nvcc: str, arch: str, tmp_path: Path) -> None:
    sm = int(re.search(r"\d+", arch)[0])
    rows = [row for row in ROWS if row.sm <= sm]
    ptx = assemble(nvcc, arch, rows, tmp_path)
    wrong = [
        f"{row}: no {text!r}"
        for row, body in zip(rows, ptx, strict=True)
        if (text := instruction(row)) is not None and text not in body
    ]
    assert not wrong, "\n".join(wrong[:20])


def test_no_builtin_is_left_out() -> None:
    covered = {row.spec.op_name for row in ROWS}
    assert covered == set(BUILTINS) - set(HOST_VALUES)
    single = {row.spec.name for row in ROWS if instruction(row) is not None}
    families = ("atom_", "red_", "wait_", "multimem_", "ll_")
    expected = {
        s.name for s in BUILTINS.values() if s.name.startswith(families) and s.combines in _SINGLE
    }
    others = {"ld", "st", "fence", "fence_proxy_async", "globaltimer", "record", "signal"}
    assert single == expected | others
