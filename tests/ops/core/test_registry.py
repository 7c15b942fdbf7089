"""Operators are known by their registered classes, and no other file names one."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from pkgutil import walk_packages

import pytest
import torch

import tileweave
from tileweave import ops
from tileweave.ops.collectives.broadcast import Broadcast
from tileweave.ops.collectives.collective import Collective
from tileweave.ops.core.registry import OPERATORS, RegisteredOp, operators_of
from tileweave.ops.gemm.gemm_operator import GemmOperator

ROOT = Path(tileweave.ops.__file__).resolve().parents[1]
PRODUCT = ("builtins", "codegen", "ops", "passes", "runtime", "simulator", "tileweave")
HOMES = {name: Path(inspect.getfile(operator)) for name, operator in OPERATORS.items()}
"""File with the class of each operator."""
WORDS = re.compile("|".join(rf"(?<!\w){name}(?!\w)" for name in OPERATORS if "_" in name))
"""Names that are no English words, also inside a text."""


def _docstrings(tree: ast.Module) -> Iterator[ast.AST]:
    """Yield strings that are statements, which only document."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            yield node.value


def _rows(tree: ast.Module) -> Iterator[ast.AST]:
    """Yield the texts of tables in the documentation."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "TableRow":
            yield from ast.walk(node)


def _constants(tree: ast.Module) -> Iterator[ast.AST]:
    """Yield the values of constants of the module, such as ``NAME = "all_gather"``."""
    yield from (node.value for node in tree.body if isinstance(node, ast.Assign))


def names_in(source: str, path: Path) -> Iterator[tuple[int, str]]:
    """Yield the line and text of each string that names an operator whose file is another one.

    A constant of a module beside the class may have the name, because the modules of attention
    share it.
    """
    tree = ast.parse(source)
    skipped = {*_docstrings(tree), *_rows(tree)}
    constants = set(_constants(tree))
    for node in ast.walk(tree):
        if not isinstance(node, ast.Constant) or not isinstance(node.value, str):
            continue
        if node in skipped:
            continue
        named = {node.value} & OPERATORS.keys() | set(WORDS.findall(node.value))
        for name in named:
            beside = node in constants and path.parent == HOMES[name].parent
            if path != HOMES[name] and not beside:
                yield node.lineno, node.value


def _is_export(path: Path, text: str) -> bool:
    return path == ROOT / "ops" / "__init__.py" and text in ops.__all__


@pytest.mark.parametrize("folder", PRODUCT)
def test_no_other_file_names_an_operator(folder):
    files = sorted((ROOT / folder).rglob("*.py"))
    assert files
    named = [
        f"{file.relative_to(ROOT)}:{line}: {text!r}"
        for file in files
        for line, text in names_in(file.read_text(), file)
        if not _is_export(file, text)
    ]
    assert not named, "read a declaration of ops/core/registry.py instead:\n" + "\n".join(named)


@pytest.mark.parametrize(
    "source",
    [
        'if problem.op == "broadcast": pass',
        'TIMES = {"all_gather": 1, "all_reduce": 2}',
        'add("--sizes", help="of a collective, such as all_gather")',
        'raise Missing(f"there is none for {kind}, as for matmul_all_reduce")',
        'NAME = "all_gather"',
    ],
)
def test_a_name_is_found(source):
    assert list(names_in(source, ROOT / "tileweave" / "bench" / "case.py"))


@pytest.mark.parametrize(
    "source",
    [
        '"""Time ``all_gather``."""',
        "operator = torch.ops.tileweave.all_gather",
        'row = TableRow("rows", "the gradient of `all_gather`")',
        'gather = getattr(dist, "all_gather_single")',
    ],
)
def test_another_string_is_not_taken_for_a_name(source):
    assert not list(names_in(source, ROOT / "tileweave" / "bench" / "case.py"))


def _classes(base: type) -> Iterator[type]:
    """Yield the classes of the product that extend ``base``."""
    for cls in base.__subclasses__():
        if cls.__module__.startswith(f"{ops.__name__}."):
            yield cls
            yield from _classes(cls)


def gaps(operator: type) -> Iterator[str]:
    """Yield what the class of an operator, or the file with the public functions, lacks."""
    file = Path(inspect.getfile(operator)).relative_to(ROOT)
    name, declared = operator.__name__, operator.__dict__
    if "op" not in declared:
        yield f"{file}: class {name} has no argument op=NAME, which registers it"
    elif not hasattr(ops, declared["op"]):
        yield f"ops/__init__.py: {declared['op']} of {file} is not imported"
    elif declared["op"] not in ops.__all__:
        yield f"ops/__init__.py: __all__ lacks {declared['op']}"
    if missing := sorted(getattr(operator, "__abstractmethods__", ())):
        yield f"{file}: class {name} lacks {', '.join(missing)}"
    if not hasattr(operator, "row"):
        yield f"{file}: class {name} lacks row, its row in the tables of the documentation"


def test_every_class_is_registered_and_complete():
    """Also one whose file no other file imports."""
    for module in walk_packages(ops.__path__, f"{ops.__name__}."):
        import_module(module.name)
    operators = [cls for cls in _classes(RegisteredOp) if not any(_classes(cls))]
    assert len(operators) >= len(OPERATORS) > 10
    lacking = [gap for operator in operators for gap in gaps(operator)]
    assert not lacking, "\n".join(lacking)


def test_gaps_are_named():
    class Unregistered(Collective):
        pass

    class Unexported(Broadcast, op="unexported"):
        pass

    del OPERATORS["unexported"]
    lacks = [gap.partition(": ")[2] for cls in (Unregistered, Unexported) for gap in gaps(cls)]
    assert lacks == [
        "class Unregistered has no argument op=NAME, which registers it",
        "class Unregistered lacks expected, gradient, reference, result, steps, symmetric_inputs",
        "class Unregistered lacks row, its row in the tables of the documentation",
        "unexported of tests/ops/core/test_registry.py is not imported",
    ]


@pytest.mark.parametrize("name", OPERATORS)
def test_every_operator_is_complete(name):
    operator = OPERATORS[name]
    assert operator.op == name and operator.row.inputs and operator.row.result
    function = getattr(ops, name)
    assert function.__name__ == name
    assert list(inspect.signature(function).parameters)[: len(operator.arguments)] == list(
        operator.arguments
    )
    assert hasattr(torch.ops.tileweave, name)


@pytest.mark.parametrize("name", [*operators_of(GemmOperator), *operators_of(Collective)])
def test_out_has_an_overload_and_documentation_has_all_columns(name):
    assert hasattr(torch.ops.tileweave, f"{name}_out")
    row = OPERATORS[name].row
    assert row.gradient and row.memory
    assert bool(row.sent) == issubclass(OPERATORS[name], Collective)


@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize("name", operators_of(Collective))
def test_documented_bytes_are_those_of_the_bandwidth(name, ranks):
    collective, nbytes = OPERATORS[name], 840 << 10
    formula = collective.row.sent.replace("x", "*")
    assert collective.sent_bytes(nbytes, ranks) == eval(formula, {"W": ranks, "S": nbytes})
