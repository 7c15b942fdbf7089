"""The language reference says what the declarations say; the README's program is one."""

from __future__ import annotations

import ast
import importlib.util
import re
import shlex
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest

import tileweave as tw
from tileweave.cli.main import main

CHECKOUT = Path(__file__).resolve().parents[2]


def _load(file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(file.stem, file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_language_page_is_up_to_date():
    generate = _load(CHECKOUT / "docs" / "generate.py")
    assert generate.PAGE.read_text() == generate.page(), "run `make docs`"


def test_picture_of_sequences_is_up_to_date():
    sequence = _load(CHECKOUT / "docs" / "sequence.py")
    assert sequence.PICTURE.read_text() == sequence.svg(sequence.drawing()), "run `make docs`"
    assert sequence.PICTURE.name in (CHECKOUT / "docs" / "ops.md").read_text()


@pytest.fixture
def readme_program(tmp_path):
    """The README's first two blocks, which are one file."""
    readme = (CHECKOUT / "README.md").read_text()
    imports, program = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)[:2]
    file = tmp_path / "readme.py"
    file.write_text(f"{imports}\n{program}\nexample = gemm_reduce_scatter(1024, 512, 256, 4)\n")
    return file


def test_readme_program_compiles_and_says_nothing_of_synchronisation(readme_program):
    text = readme_program.read_text()
    assert not re.search(r"signal|wait|fence|barrier|epoch|W\.sync", text)
    cuda = tw.emit(_load(readme_program).example)
    assert "tl::tma_store" in cuda and "tw::complete_bulk_stores" in cuda
    assert "tw::signal<" in cuda and "tw::wait_reached<" in cuda


def test_readme_names_every_environment_variable():
    sources = [
        p
        for d in ("runtime", "simulator", "ops", "tileweave", "codegen")
        for p in (CHECKOUT / d).rglob("*.py")
    ]
    words = " ".join(p.read_text() for p in sources).replace('"', " ").replace("`", " ").split()
    used = {w.strip(".,;:()'") for w in words if w.startswith("TILEWEAVE_")}
    readme = (CHECKOUT / "README.md").read_text()
    assert used and [name for name in sorted(used) if f"`{name}`" not in readme] == []


def _simulator_cases() -> dict[str, tuple[str, str]]:
    """By heading of docs/simulator.md: its program, and what is said of it after its command."""
    page = (CHECKOUT / "docs" / "simulator.md").read_text()
    blocks = re.findall(r"^#+ ([^\n]*)|^```(python|diff|console)\n(.*?)^```$", page, re.M | re.S)
    ring = changed = heading = ""
    cases = {}
    for title, kind, text in blocks:
        if title:
            heading, changed = title.strip("`"), ring
        elif kind == "python":
            ring = changed = ring or text
        elif kind == "diff":
            lines = [(line[0], line[1:] + "\n") for line in text.splitlines()]
            before, after = ("".join(t for sign, t in lines if sign == s) for s in "-+")
            assert ring.count(before) == 1, before
            changed = ring.replace(before, after)
        else:
            name = heading if heading not in cases else f"{heading} again"
            cases[name] = changed, text
    return cases


SIMULATOR_CASES = _simulator_cases()


@pytest.mark.parametrize("name", SIMULATOR_CASES)
def test_simulator_page(name, tmp_path, monkeypatch, capsys):
    """The commands say it: the same first line, but for numbers, and the same lines of source."""
    program, text = SIMULATOR_CASES[name]
    (tmp_path / "ring.py").write_text(program)
    monkeypatch.chdir(tmp_path)
    command, *lines = text.splitlines()
    try:
        assert main(shlex.split(command)[2:]) == 0
        status = 0
    except SystemExit as end:
        status = end.code
    out = capsys.readouterr().out.replace(f"{tmp_path}/", "").splitlines()
    assert status == (not out[0].endswith("no fault"))
    assert re.sub(r"\d+", "#", out[0]) == re.sub(r"\d+", "#", lines[0])
    for loc in re.findall(r"ring\.py:\d+", text):
        assert any(loc in line for line in out), (loc, out)


def test_sidecar_file_of_the_simulator_page_explains_the_survivors(tmp_path, monkeypatch, capsys):
    program, text = SIMULATOR_CASES["Mutation testing"]
    (tmp_path / "ring.py").write_text(program)
    page = (CHECKOUT / "docs" / "simulator.md").read_text()
    (sidecar,) = re.findall(r"```json\n(.*?)```", page, re.S)
    (tmp_path / "ring.equivalent.json").write_text(sidecar)
    monkeypatch.chdir(tmp_path)
    command, *_ = text.splitlines()
    assert main(shlex.split(command)[2:]) == 0
    assert "6 explained, 33 killed" in capsys.readouterr().out.splitlines()[-1]


def test_simulator_page_is_about_every_kind():
    from tileweave.simulator.report.errors import KINDS

    assert set(KINDS) <= set(SIMULATOR_CASES)


def test_timeline_of_the_simulator_page():
    picture = CHECKOUT / "docs" / "timeline.svg"
    assert picture.stat().st_size < 100_000
    texts = [e.text for e in ElementTree.parse(picture).iter() if e.tag.endswith("text")]
    assert any(re.match(r"ring: 3 ranks, seed \d+, reuse fault", t) for t in texts)
    assert not any("--> /" in t for t in texts)  # of the machine that drew it


def test_plan_of_the_page_about_plans(tmp_path, capsys):
    page = (CHECKOUT / "docs" / "plans.md").read_text()
    program, _ = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    file = tmp_path / "page.py"
    file.write_text(program)
    command = re.search(r"`tileweave (simulate FILE.*?)`", page)[1].replace("FILE", str(file))
    assert main([*shlex.split(command), "--schedules", "10"]) == 0
    assert capsys.readouterr().out == "sums_of_all: 10 schedules of 4 ranks, no fault\n"
    assert "tw::wait_reached<" in tw.emit(_load(file).add_up)
    steps = {name for name in vars(tw.PlanBuilder) if not name.startswith("_")} - {"peers"}
    assert steps == set(re.findall(r"^\| `p\.(\w+)\(", page, re.MULTILINE))


SYNCHRONISATION = CHECKOUT / "docs" / "synchronisation.md"


def test_synchronisation_page_shows_what_the_command_prints(readme_program, monkeypatch, capsys):
    monkeypatch.chdir(readme_program.parent)
    page = SYNCHRONISATION.read_text()
    ((command, said),) = re.findall(r"```console\n\$ tileweave ([^\n]*)\n(.*?)```", page, re.S)
    assert main(shlex.split(command)) == 0
    assert capsys.readouterr().out == said
    source = readme_program.read_text().splitlines()
    for line in (35, 39):
        assert f"- Line {line}: " in page and "parts[" in source[line - 1]
    shown = re.search(r"```python\n(.*?)```", page, re.S)[1]
    assert shown in readme_program.read_text()


def test_dynamic_program_of_the_synchronisation_page(readme_program, tmp_path):
    imports = readme_program.read_text().split("\n\n", 1)[0]
    *_, shown = re.findall(r"```python\n(.*?)```", SYNCHRONISATION.read_text(), re.S)
    file = tmp_path / "dynamic.py"
    file.write_text(f"{imports}\n{shown}")
    found = tw.explain(_load(file).shift, 4, sizes={"M": 20})
    assert {"signal", "wait"} <= {op.kind for op in found.ops if op.tensor == "S"}


def _text_of(node: ast.AST) -> str:
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(v.value if isinstance(v, ast.Constant) else "\u2026" for v in node.values)
    return "\u2026"


def _refusals(file: Path) -> list[str]:
    """The messages with which a file refuses programs, with an ellipsis for each value."""
    found = []
    for node in ast.walk(ast.parse(file.read_text())):
        name = getattr(getattr(node, "func", None), "id", "")
        if name in ("LanguageError", "TileWeaveError"):
            found.append(_text_of(node.args[0]))
        elif name == "_refused":
            found.append(f"which {_text_of(node.args[1])}; expected {_text_of(node.args[2])}")
    return found


def test_synchronisation_page_has_every_refusal():
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
    rows = "\n".join(re.findall(r"^\| `(.*?)` \|", SYNCHRONISATION.read_text(), re.M))
    for text in every:
        # A value may be words of several kinds: what stands between values is said somewhere.
        parts = [p.strip(" ;:,.") for p in text.split("\u2026")]
        missing = [p for p in parts if len(p) > 3 and p not in rows]
        assert not missing, (text, missing)


def test_synchronisation_page_has_every_option_and_kind():
    from tileweave.passes.sync.infer.options import _LEGAL

    page = SYNCHRONISATION.read_text()
    rows = set(re.findall(r"^\| `tileweave\.(\w+)` \|", page, re.M))
    assert rows == set(_LEGAL)
    picture = CHECKOUT / "docs" / "synchronisation.svg"
    words = " ".join(e.text or "" for e in ElementTree.parse(picture).iter())
    assert "signal" in words and "wait" in words and picture.name in page
