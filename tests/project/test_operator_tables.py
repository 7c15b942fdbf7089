"""Tables of operators in the documentation match the registry."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.modules import load_module
from tileweave.ops.core.registry import OPERATORS

SCRIPT = Path(__file__).resolve().parents[2] / "docs" / "operators.py"


@pytest.fixture(scope="module")
def operators():
    return load_module(SCRIPT)


def test_tables_are_up_to_date(operators):
    pages = operators.pages()
    assert pages
    for page in pages:
        text = page.read_text()
        assert text == operators.updated(text), (
            f"{page.name}: run docs/operators.py, a part of `make docs`"
        )


def test_every_table_is_in_a_page(operators):
    text = "".join(page.read_text() for page in operators.pages())
    assert {match["name"] for match in operators.MARKED.finditer(text)} == set(operators.TABLES)


def test_every_operator_is_in_a_table_of_calls(operators):
    names = (
        "GEMM operators", "collectives", "attention", "operators of one GPU",
        "mixtures of experts", "decoding",
    )  # fmt: skip
    tables = "".join(map(operators.table, names))
    assert [name for name in OPERATORS if f"| `{name}(" not in tables] == []


def test_table_of_schemas_has_every_operator_and_its_variants(operators):
    schemas = operators.table("schemas of torch.ops.tileweave")
    assert [name for name in OPERATORS if f"| `{name}` | `{name}(" not in schemas] == []
    registered = torch._C._dispatch_get_all_op_names()
    names = {name.removeprefix("tileweave::") for name in registered if "tileweave::" in name}
    variants = {name for name in names if name.removesuffix("_out") in OPERATORS}
    assert len(variants) > len(OPERATORS)
    assert [name for name in sorted(variants) if f"`{name}(" not in schemas] == []
