"""Write the tables of operators between the markers of the pages, from the registry. ``make docs``
runs it."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path

import torch

from tileweave import ops
from tileweave.ops.attention.sp_attention import SpAttention
from tileweave.ops.attention.ulysses import Ulysses
from tileweave.ops.collectives.collective import Collective
from tileweave.ops.core.registry import RegisteredOp, operators_of
from tileweave.ops.decode.decode_attention import DecodeAttention
from tileweave.ops.gemm.gemm_operator import GemmOperator
from tileweave.ops.moe.expert_mlp import ExpertMlp
from tileweave.ops.moe.grouped_matmul import GroupedMatmul
from tileweave.ops.moe.row_exchange import RowExchange
from tileweave.ops.norm.all_reduce_rms_norm import AllReduceRmsNorm

DOCS = Path(__file__).resolve().parent
MARKED = re.compile(
    r"(?P<begin><!-- table: (?P<name>[^;]*); written by docs/operators\.py -->\n\n).*?"
    r"(?P<end>\n<!-- end of table -->)",
    re.S,
)


def call_of(operator: type[RegisteredOp]) -> str:
    """Return the signature of the function in ``tileweave.ops``, without annotations."""
    signature = inspect.signature(getattr(ops, operator.op))
    bare = signature.replace(
        parameters=[p.replace(annotation=p.empty) for p in signature.parameters.values()],
        return_annotation=signature.empty,
    )
    text = str(bare).replace("'", '"')
    return f"`{operator.op}{text}`"


def name_of(operator: type[RegisteredOp]) -> str:
    return f"`{operator.op}`"


def schemas_of(operator: type[RegisteredOp]) -> str:
    """Return the schemas of an operator and of its variants in ``torch.ops.tileweave``."""
    gathered = ("_rows", "_rows_out") if issubclass(operator, GemmOperator) else ()
    names = (operator.op + variant for variant in ("", "_out", *gathered))
    functions = (getattr(torch.ops.tileweave, name, None) for name in names)
    schemas = (str(f.default._schema) for f in functions if f is not None)
    return "<br>".join(f"`{schema.replace('tileweave::', '')}`" for schema in schemas)


Column = tuple[str, Callable[[type[RegisteredOp]], str]]
CALLS: list[Column] = [
    ("operator", call_of),
    ("arguments", lambda operator: operator.row.inputs),
    ("result on each rank", lambda operator: operator.row.result),
]
GRADIENTS: list[Column] = [
    ("operator", name_of),
    ("gradient", lambda operator: operator.row.gradient),
]
LOCAL_CALLS: list[Column] = [*CALLS[:2], ("result", CALLS[2][1]), *GRADIENTS[1:]]
MEMORY: list[Column] = [
    ("operator", name_of),
    ("symmetric memory", lambda operator: operator.row.memory),
]
SENT: list[Column] = [
    ("operator", name_of),
    ("bytes that each rank sends", lambda operator: operator.row.sent),
]
SCHEMAS: list[Column] = [("operator", name_of), ("schemas", schemas_of)]
TABLES: dict[str, tuple[tuple[type[RegisteredOp], ...], list[Column]]] = {
    "GEMM operators": ((GemmOperator,), CALLS),
    "gradients of GEMM operators": ((GemmOperator,), GRADIENTS),
    "memory of GEMM operators": ((GemmOperator,), MEMORY),
    "mixtures of experts": ((RowExchange, ExpertMlp), CALLS),
    "gradients of mixtures of experts": ((RowExchange, ExpertMlp), GRADIENTS),
    "memory of mixtures of experts": ((RowExchange, ExpertMlp), MEMORY),
    "collectives": ((Collective,), CALLS),
    "gradients of collectives": ((Collective,), GRADIENTS),
    "memory of collectives": ((Collective,), MEMORY),
    "bytes of collectives": ((Collective,), SENT),
    "attention": ((SpAttention, Ulysses), CALLS),
    "decoding": ((AllReduceRmsNorm, DecodeAttention), CALLS),
    "memory of decoding": ((AllReduceRmsNorm, DecodeAttention), MEMORY),
    "operators of one GPU": ((GroupedMatmul,), LOCAL_CALLS),
    "schemas of torch.ops.tileweave": (
        (
            GemmOperator, Collective, SpAttention, Ulysses, AllReduceRmsNorm, DecodeAttention,
            RowExchange, ExpertMlp, GroupedMatmul,
        ),
        SCHEMAS,
    ),
}  # fmt: skip
"""Base classes and columns of each table by the name in its marker."""


def table(name: str) -> str:
    """Return a table as Markdown. It omits operators that leave a column empty."""
    bases, columns = TABLES[name]
    operators = [operator for base in bases for operator in operators_of(base).values()]
    rows = [[value(operator) for _, value in columns] for operator in operators]
    head = [title for title, _ in columns]
    lines = [head, ["---"] * len(head), *(row for row in rows if all(row))]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def updated(page: str) -> str:
    """Return a page with the current tables."""
    return MARKED.sub(lambda match: match["begin"] + table(match["name"]) + match["end"], page)


def pages() -> list[Path]:
    """Return the pages that have such tables."""
    return [page for page in sorted(DOCS.rglob("*.md")) if MARKED.search(page.read_text())]


if __name__ == "__main__":
    for page in pages():
        text = page.read_text()
        if text != updated(text):
            page.write_text(updated(text))
            print(f"{page.relative_to(DOCS.parent)} written")
