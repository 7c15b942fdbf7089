"""Pages of docs/ match the code: generated text, pictures, snippets, outputs and messages."""

from __future__ import annotations

import ast
import inspect
import json
import re
import shlex
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
import torch

import tileweave as tw
from tests.modules import load_module
from tests.project.commands import commands_of
from tileweave.cli.main import main

CHECKOUT = Path(__file__).resolve().parents[2]
README = CHECKOUT / "README.md"
SIMULATOR = CHECKOUT / "docs" / "guides" / "simulator.md"
HOST_API = CHECKOUT / "docs" / "reference" / "host-api.md"


def test_language_page_is_up_to_date():
    generate = load_module(CHECKOUT / "docs" / "generate.py")
    assert generate.PAGE.read_text() == generate.page(), "run `make docs`"


def test_command_line_page_is_up_to_date():
    command_line = load_module(CHECKOUT / "docs" / "command_line.py")
    assert command_line.PAGE.read_text() == command_line.page(), "run `make docs`"


def test_command_line_page_explains_every_argument():
    page = (CHECKOUT / "docs" / "reference" / "command-line.md").read_text()
    assert re.findall(r"^\| [^|]*\| *(?:None)? *\|$", page, re.M) == []
    assert "%(" not in page


def test_examples_of_the_command_line_page_are_legal():
    command_line = load_module(CHECKOUT / "docs" / "command_line.py")
    parsers = command_line.parsers()
    assert set(command_line.EXAMPLES) == set(command_line.GUIDES) == set(parsers)
    for name, (parser, _) in parsers.items():
        command = command_line.EXAMPLES[name].partition(f"tileweave {name}")[2]
        options = parser.parse_args(shlex.split(command))
        assert (CHECKOUT / getattr(options, "program", "README.md")).exists()


@pytest.fixture
def load_drawing(monkeypatch):
    """Return a function that loads a program of ``docs`` that draws a picture."""
    monkeypatch.syspath_prepend(CHECKOUT / "docs")
    return lambda name: load_module(CHECKOUT / "docs" / name)


def test_picture_of_sequences_is_up_to_date(load_drawing):
    sequence = load_drawing("sequence.py")
    assert sequence.PICTURE.read_text() == sequence.drawing(), "run `make docs`"
    assert sequence.PICTURE.name in (CHECKOUT / "docs" / "guides" / "ops.md").read_text()


def test_bar_chart_of_the_readme_is_up_to_date(load_drawing):
    speedup = load_drawing("speedup.py")
    assert speedup.PICTURE.read_text() == speedup.drawing(), "run `make docs`"
    assert f"docs/images/{speedup.PICTURE.name}" in README.read_text()


def test_bar_chart_of_the_readme_shows_measured_ratios(load_drawing):
    speedup = load_drawing("speedup.py")
    log = (CHECKOUT / "benchmarks" / "LOG.md").read_text()
    (entry,) = re.findall(rf"^## {speedup.LOG_ENTRY}.*?(?=^## )", log, re.M | re.S)
    for operator, ratios in speedup.RATIOS.items():
        for rows, ratio in zip(speedup.ROWS, ratios, strict=True):
            row = rf"^\| {operator} \| {rows} \|.* {ratio:.2f} \|$"
            assert re.search(row, entry, re.M), (operator, rows)


def _readme_blocks() -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", README.read_text(), re.M | re.S)


@pytest.fixture
def readme_program(tmp_path):
    """Return a file with the first block of the README."""
    file = tmp_path / "readme.py"
    file.write_text(_readme_blocks()[0])
    return file


def test_readme_is_a_landing_page():
    assert len(README.read_text().splitlines()) <= 160
    for page in ("tutorial/index", "reference/language", "guides/ops", "how-it-works"):
        assert f"(docs/{page}.md" in README.read_text()


def test_readme_program_compiles_and_has_no_synchronization(readme_program):
    text = readme_program.read_text()
    assert not re.search(r"signal|wait|fence|barrier|epoch|W\.sync", text)
    cuda = tw.emit(load_module(readme_program).example)
    assert "tl::tma_store" in cuda and "tw::complete_bulk_stores" in cuda
    assert "tw::signal<" in cuda and "tw::wait_reached<" in cuda


def test_snippets_of_the_readme_run_as_printed(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    file = tmp_path / "readme.py"
    file.write_text("\n\n".join(_readme_blocks()))
    readme = load_module(file)
    C = np.concatenate([output["C"] for output in readme.outputs]).astype("float32")
    exact = sum(
        a.astype("float32") @ b.astype("float32").T for a, b in zip(readme.A, readme.B, strict=True)
    )
    assert np.linalg.norm(C - exact) < 1e-2 * np.linalg.norm(exact)
    assert readme.c.shape == (1024, 256)


VARIABLE = re.compile(r"\bTILEWEAVE_[A-Z_]*[A-Z]\b")


def test_host_api_page_has_every_environment_variable():
    sources = [
        p
        for d in ("runtime", "simulator", "ops", "tileweave", "codegen", "tests")
        for p in (CHECKOUT / d).rglob("*.py")
    ]
    used = {name for p in sources for name in VARIABLE.findall(p.read_text())}
    assert used and [name for name in sorted(used) if f"`{name}`" not in HOST_API.read_text()] == []


def test_host_api_page_has_every_public_name():
    names = set(tw.__all__) - {"language"}
    page = HOST_API.read_text()
    assert [name for name in sorted(names) if f"tw.{name}" not in page] == []


def test_host_api_page_has_the_signatures():
    rows = re.findall(r"^\| `(tw\.\w+\(.*?\))`", HOST_API.read_text(), re.M)
    assert len(rows) > 8
    for row in rows:
        function = getattr(tw, row[3 : row.index("(")])
        parameters = inspect.signature(function).parameters.values()
        written = inspect.signature(eval(f"lambda {row[row.index('(') + 1 : -1]}: 0"))
        assert [(p.name, p.kind, p.default) for p in written.parameters.values()] == [
            (p.name, p.kind, p.default) for p in parameters
        ], row


FOLDERS = [
    folder
    for folder in CHECKOUT.iterdir()
    if folder.is_dir() and folder.name != "build" and not folder.name.startswith(".")
]
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s#]*)(?:#([^)\s]*))?\)")


def _anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)", page.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def _broken_links(page: Path) -> list[str]:
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S)
    broken = []
    for path, anchor in LINK.findall(text):
        if path.startswith("http"):
            continue
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in _anchors(target)):
            broken.append(f"{path}#{anchor}")
    return broken


def test_links_between_pages_have_targets():
    pages = [*CHECKOUT.glob("*.md"), *(p for folder in FOLDERS for p in folder.rglob("*.md"))]
    assert len(pages) > 20
    broken = {str(page.relative_to(CHECKOUT)): _broken_links(page) for page in pages}
    assert {page: links for page, links in broken.items() if links} == {}


def test_pages_that_code_names_exist():
    """In docstrings, comments and messages."""
    sources = [p for folder in FOLDERS for p in folder.rglob("*.py")]
    named = {page for p in sources for page in re.findall(r"\bdocs/[\w/-]+\.md", p.read_text())}
    assert "docs/guides/ops.md" in named
    assert [page for page in sorted(named) if not (CHECKOUT / page).exists()] == []


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("Mutation testing", "6 explained, 33 killed"),
        pytest.param(
            "Mutants of device functions", "2 explained, 23 killed", marks=pytest.mark.long
        ),
    ],
)
def test_sidecar_files_of_the_simulator_page_explain_the_survivors(
    name, counts, tmp_path, monkeypatch, capsys
):
    (command,) = [c for c in commands_of(SIMULATOR) if c.block.heading == name]
    (tmp_path / "ring.py").write_text(command.program)
    page = SIMULATOR.read_text()
    tile, device = map(json.loads, re.findall(r"```json\n(.*?)```", page, re.S))
    (tmp_path / "ring.equivalent.json").write_text(json.dumps(tile | device))
    monkeypatch.chdir(tmp_path)
    assert main(shlex.split(command.text)[1:]) == 0
    assert counts in capsys.readouterr().out.splitlines()[-1]


def test_simulator_page_is_about_every_kind():
    from tileweave.simulator.report.errors import KINDS

    page = SIMULATOR.read_text()
    headings = {command.block.heading for command in commands_of(SIMULATOR)}
    # Only a faulty compiler pass shows it: tests/simulator/device/test_validate.py.
    assert "### `translation`" in page and "\ntranslation: Out of rank 0" in page
    assert {*KINDS} - {"translation"} <= headings


def test_timeline_of_the_simulator_page():
    picture = CHECKOUT / "docs" / "images" / "timeline.svg"
    assert picture.stat().st_size < 100_000
    texts = [e.text for e in ElementTree.parse(picture).iter() if e.tag.endswith("text")]
    assert any(re.match(r"ring: 3 ranks, seed \d+, reuse fault", t) for t in texts)
    assert not any("--> /" in t for t in texts)  # of the machine that drew it


def test_plan_of_the_page_about_plans(tmp_path, capsys):
    page = (CHECKOUT / "docs" / "guides" / "plans.md").read_text()
    program = re.findall(r"```python\n(.*?)```", page, re.DOTALL)[0]
    file = tmp_path / "page.py"
    file.write_text(program)
    command = re.search(r"`tileweave (simulate FILE.*?)`", page)[1].replace("FILE", str(file))
    assert main([*shlex.split(command), "--schedules", "10"]) == 0
    assert capsys.readouterr().out == "sums_of_all: 10 schedules of 4 ranks, no fault\n"
    assert "tw::wait_reached<" in tw.emit(load_module(file).add_up)
    steps = {name for name in dir(tw.PlanBuilder) if not name.startswith("_")} - {"peers"}
    assert steps == set(re.findall(r"^\| `p\.(\w+)\(", page, re.MULTILINE))


SYNCHRONIZATION = CHECKOUT / "docs" / "guides" / "synchronization.md"


def test_synchronization_page_explains_lines_of_the_readme(readme_program):
    page = SYNCHRONIZATION.read_text()
    source = readme_program.read_text().splitlines()
    explained = [int(line) for line in re.findall(r"^\| (\d+) \|", page, re.M)]
    assert [line for line in explained if "parts[" in source[line - 1]] == explained[1:]
    shown = re.search(r"```python\n(.*?)```", page, re.S)[1]
    assert shown in readme_program.read_text()


def test_dynamic_program_of_the_synchronization_page(readme_program, tmp_path):
    imports = readme_program.read_text().split("\n\n\n", 1)[0]
    *_, shown = re.findall(r"```python\n(.*?)```", SYNCHRONIZATION.read_text(), re.S)
    file = tmp_path / "dynamic.py"
    file.write_text(f"{imports}\n{shown}")
    explanation = tw.explain(load_module(file).shift, 4, sizes={"M": 20})
    assert {"signal", "wait"} <= {op.kind for op in explanation.ops if op.tensor == "S"}


TEXT = (ast.Constant, ast.JoinedStr)


def _text_of(node: ast.AST) -> str:
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(v.value if isinstance(v, ast.Constant) else "\u2026" for v in node.values)
    return "\u2026"


def _refusals(file: Path) -> list[str]:
    """Return the messages with which a file refuses programs, with an ellipsis for each value."""
    results = []
    for node in ast.walk(ast.parse(file.read_text())):
        name = getattr(getattr(node, "func", None), "id", "")
        if name in ("LanguageError", "TileWeaveError"):
            results.append(_text_of(node.args[0]))
        elif name == "_refused":
            results.append(f"which {_text_of(node.args[1])}; expected {_text_of(node.args[2])}")
    return results


TROUBLESHOOTING = CHECKOUT / "docs" / "guides" / "troubleshooting.md"
PRODUCT = ("builtins", "codegen", "ops", "passes", "runtime", "simulator", "tileweave")


@pytest.mark.parametrize("name, least", [("troubleshooting", 10), ("cluster", 10)])
def test_messages_in_tables_are_in_the_code(name, least):
    """Each part of a message between values, and between its colons, is a text of the code."""
    trees = [ast.parse(p.read_text()) for d in PRODUCT for p in (CHECKOUT / d).rglob("*.py")]
    texts = {_text_of(n) for t in trees for n in ast.walk(t) if isinstance(n, TEXT)}
    page = (CHECKOUT / "docs" / "guides" / f"{name}.md").read_text()
    tables = re.findall(
        r"^ *\| (?:message|warning|`doctor` says) \|.*\n.*\n((?: *\|.*\n)+)", page, re.M
    )
    messages = re.findall(r"^ *\| `(.*?)` \|", "".join(tables), re.M)
    assert len(messages) >= least
    parts = [p.strip(" ;:,.()") for message in messages for p in re.split("\u2026|: ", message)]
    assert [p for p in parts if len(p) > 3 and not any(p in text for text in texts)] == []


def test_deadlock_of_the_troubleshooting_page_is_that_of_the_readme():
    (deadlock,) = re.findall(r"^deadlock:.*?(?=```)", TROUBLESHOOTING.read_text(), re.M | re.S)
    assert deadlock in README.read_text()


def test_synchronization_page_has_every_refusal():
    regions = ("accesses", "footprints", "granules", "tensor_accesses")
    inferred = ("counters", "residency", "reuse", "version_copies", "versions", "waits")
    names = (
        *(f"passes/sync/regions/{name}" for name in regions),
        *(f"passes/sync/infer/{name}" for name in inferred),
        *("passes/group/lift_symmetric", "passes/group/specialize_sizes"),
        *("runtime/kernel/dynamic", "runtime/plans/sync_push", "runtime/plans/sync_pull"),
    )
    files = [CHECKOUT / f"{name}.py" for name in names]
    every = [text for file in files for text in _refusals(file)]
    assert len(every) > 15
    rows = "\n".join(re.findall(r"^\| `(.*?)` \|", SYNCHRONIZATION.read_text(), re.M))
    for text in every:
        # A value may be words of several kinds: what stands between values is said somewhere.
        parts = [p.strip(" ;:,.") for p in text.split("\u2026")]
        missing = [p for p in parts if len(p) > 3 and p not in rows]
        assert not missing, (text, missing)


def test_synchronization_page_quotes_the_memory_of_versions():
    source = (CHECKOUT / "passes" / "sync" / "infer" / "version_copies.py").read_text()
    (quoted,) = re.findall(r"^  S  3 (.*), \d+ bytes$", SYNCHRONIZATION.read_text(), re.M)
    assert f"{{count}} {quoted}, {{size}} bytes" in source


def test_synchronization_page_has_every_option_and_kind():
    from tileweave.passes.sync.infer.options import _LEGAL

    page = SYNCHRONIZATION.read_text()
    rows = set(re.findall(r"^\| `tileweave\.(\w+)` \|", page, re.M))
    assert rows == set(_LEGAL)
    picture = CHECKOUT / "docs" / "images" / "synchronization.svg"
    words = " ".join(e.text or "" for e in ElementTree.parse(picture).iter())
    assert "signal" in words and "wait" in words and picture.name in page


def test_pages_name_files_that_exist():
    page = (CHECKOUT / "docs" / "how-it-works.md").read_text()
    named = re.findall(r"`((?:regions|infer|tile|device)/\w+\.py)`", page)
    folders = (CHECKOUT / "passes", CHECKOUT / "passes" / "sync")
    assert len(named) > 20
    assert [file for file in named if not any((f / file).exists() for f in folders)] == []
