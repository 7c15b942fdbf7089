"""The list of passes: its stages, its folders, and who may import the file of a pass."""

import pytest
from tvm import tirx

from tests.project.test_layers import MODULES, graph
from tileweave.passes.pipeline import PIPELINE, STAGES

FOLDERS = {"sync": "sync", "verify": "sync"}
"""Folders of the stages whose folders have other names."""


def file_of(entry) -> str:
    """Return the module with the file of a pass, such as ``passes.tile.elect_leader``."""
    return entry.run.__module__.removeprefix("tileweave.")


PASSES = {file_of(p) for p in PIPELINE}


def test_stages_have_their_order():
    order = [list(STAGES).index(p.stage) for p in PIPELINE]
    assert order == sorted(order) and {p.stage for p in PIPELINE} == {*STAGES}


@pytest.mark.parametrize("entry", PIPELINE, ids=lambda p: f"{p.stage}-{p.name}")
def test_fields(entry):
    assert entry.scope in ("all", "builtins", "module") and entry.reason
    assert file_of(entry).rsplit(".", 1)[1] == entry.name
    function = entry.run.__code__
    assert function.co_varnames[1 : function.co_argcount] == entry.needs
    assert not entry.until or entry.until == "open" or entry.until.startswith("0.")


def test_device_passes_see_no_functions_of_the_host():
    func = tirx.PrimFunc([], tirx.Evaluate(0)).with_attr("calling_conv", 1)
    device = [p for p in PIPELINE if p.stage == "device" and p.scope == "all"]
    assert device and not any(p.applies_to(func) for p in device)
    assert all(p.applies_to(func.with_attr("calling_conv", 2)) for p in device)


def test_folders_follow_the_stages():
    for entry in PIPELINE:
        assert file_of(entry).split(".")[1] == FOLDERS.get(entry.stage, entry.stage)


def test_only_the_pipeline_imports_passes():
    """What passes share is in ``passes/ir``."""
    imported = {
        f"{module} imports {other}"
        for module, others in graph().items()
        for other in others & PASSES
        if module != "passes.pipeline"
    }
    assert imported == set()


def test_lit_tests_follow_the_folders():
    lit = MODULES["passes.pipeline"].parents[1] / "lit_tests/passes"
    names = {p.name: file_of(p).split(".")[1] for p in PIPELINE}
    tests = [(f.stem.split("-")[0], f.parent.name) for f in lit.rglob("*.py")]
    assert len(tests) > 40
    assert [(n, folder) for n, folder in tests if names.get(n, folder) != folder] == []


def test_each_file_in_the_folder_of_a_stage_has_a_pass():
    folders = {FOLDERS.get(stage, stage) for stage in STAGES} - {"sync"}
    others = [
        module
        for module in MODULES
        if module.count(".") == 2 and module.split(".")[1] in folders
        if module.startswith("passes.") and module not in PASSES
    ]
    assert others == ["passes.group.specialize_sizes"]  # runs before a group is known


def test_the_documentation_has_the_stages():
    text = (MODULES["passes.pipeline"].parents[1] / "docs/how-it-works.md").read_text()
    rows = "".join(f"| `{stage}` | {what} |\n" for stage, what in STAGES.items())
    assert rows in text
