"""The cookbook: every pattern is simulated, explained and compiled, and the page quotes it."""

import re
from dataclasses import replace
from types import ModuleType

import numpy as np
import pytest

import tileweave as tw
from tileweave import passes
from tileweave.runtime import Plan

from .programs import EXAMPLES, example

FOLDER = EXAMPLES / "patterns"
PAGE = EXAMPLES.parent / "docs" / "guides" / "patterns.md"
NAMES = sorted(file.stem for file in FOLDER.glob("*.py"))
SCHEDULES = 3
MUTATED = ("one_shot_all_reduce", "cross_entropy")
"""Patterns whose inferred operations are dropped one at a time."""
EXPLICIT = ("pull_rows",)
"""Patterns with explicit barriers."""


def load(name: str, ranks: int | None = None) -> ModuleType:
    """Run the file of a pattern, with ``ranks`` in place of its number of ranks."""
    module = example(f"patterns/{name}.py", ranks)
    assert ranks in (None, module.RANKS)
    return module


def has_variable_ranks(name: str) -> bool:
    return re.search(r"^RANKS\b.*?= \d+", (FOLDER / f"{name}.py").read_text(), re.M) is not None


def examples_of(module: ModuleType) -> dict:
    return getattr(module, "examples", None) or {"example": module.example}


def sizes_of(module: ModuleType) -> list[dict[str, int]]:
    """Return the sets of dynamic sizes with which a pattern is run."""
    return getattr(module, "SIZES", [{}])


def inputs_of(module: ModuleType, seed: int, sizes: dict[str, int] | None = None) -> list[dict]:
    return module.inputs(module.RANKS, np.random.default_rng(seed), **(sizes or {}))


def kernels_of(program, ranks: int, sizes: dict[str, int]) -> list:
    """Return the kernels of a program or of the launches of a plan, once each."""
    if not isinstance(program, Plan):
        return [program]
    shapes = {p.name: p.extents for p in program.parameters if p.shape is not None}
    assert not sizes, "plans with dynamic sizes need their shapes here"
    launched = [step.program for step in program.launches(ranks, shapes, {})]
    return list({id(kernel): kernel for kernel in launched}.values())


def assert_near(output: np.ndarray, expected: np.ndarray) -> None:
    assert output.shape == expected.shape
    if np.issubdtype(expected.dtype, np.integer):
        assert (output == expected).all()
        return
    error = np.abs(output.astype(np.float64) - expected)
    assert np.linalg.norm(error) <= 2e-2 * np.linalg.norm(expected)
    assert error.max() <= 5e-2 * np.abs(expected).max()


def run(module: ModuleType, sizes: dict[str, int]) -> None:
    for program in examples_of(module).values():
        inputs = inputs_of(module, 1, sizes)
        assert len(inputs) == module.RANKS
        expected = module.reference(inputs)
        outputs = tw.simulate(program, module.RANKS, inputs, SCHEDULES)
        assert any(expected)
        for rank in range(module.RANKS):
            for tensor, value in expected[rank].items():
                assert_near(outputs[rank][tensor], value)


@pytest.mark.parametrize("name", NAMES)
def test_every_rank_has_the_result_of_numpy(name):
    module = load(name)
    for sizes in sizes_of(module):
        run(module, sizes)


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in NAMES if has_variable_ranks(name)])
def test_two_ranks_have_the_result_of_numpy(name):
    module = load(name, ranks=2)
    run(module, sizes_of(module)[0])


@pytest.mark.parametrize("name", NAMES)
def test_main_prints_a_line_for_each_example(name, monkeypatch, capsys):
    module, simulate = load(name), tw.simulate
    monkeypatch.setattr(tw, "simulate", lambda *a, **k: simulate(*a, **{**k, "schedules": 1}))
    module.main()
    out = capsys.readouterr().out
    assert len(out.splitlines()) == len(examples_of(module))


@pytest.mark.parametrize("name", NAMES)
def test_commands_find_the_programs(name):
    module = load(name)
    for program in examples_of(module).values():
        assert any(value is program for value in vars(module).values())
    assert module.__doc__.count(f"python examples/patterns/{name}.py") == 1


def blocks(section: str, kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```$", section, re.M | re.S)


def lines_of(text: str) -> list[str]:
    """Return the lines without indentation, empty lines and the padding of tables."""
    return [" ".join(line.split()) for line in text.splitlines() if line.strip()]


def section_of(name: str) -> str:
    """Return the section to which the table's row of a file links."""
    page = PAGE.read_text()
    file = re.escape(f"../../examples/patterns/{name}.py")
    ((title, link),) = re.findall(
        rf"^\| \[([^\]]+)\]\(#([^)]+)\) .*\({file}\) \|$",
        page,
        re.M,
    )
    (section,) = [
        section
        for section in re.split(r"^## ", page, flags=re.M)[1:]
        if re.sub(r"[^\w\- ]", "", section.split("\n")[0].lower()).replace(" ", "-") == link
    ]
    assert section.split("\n")[0].lower() == title.lower()
    return section


def explained(name: str) -> list[tw.Explanation]:
    """Return the explanations of the examples of a file, as ``tileweave explain`` prints them."""
    module = load(name)
    sizes = sizes_of(module)[0]
    return [
        replace(tw.explain(program, module.RANKS, sizes=sizes), name=example)
        for example, program in examples_of(module).items()
    ]


SYMMETRIC = re.compile(r"^\s*(\w+)(?:: W\.Symmetric| = W\.alloc_symmetric)\(", re.M)


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_explain_names_each_symmetric_tensor(name):
    tables = explained(name)
    symmetric = SYMMETRIC.findall((FOLDER / f"{name}.py").read_text())
    assert symmetric and not any(table.unverified for table in tables)
    if name in EXPLICIT:
        assert all(table.explicit for table in tables)
        return
    assert set(symmetric) <= {op.tensor for table in tables for op in table.ops}
    assert not any(table.explicit for table in tables)


@pytest.mark.long
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("name", NAMES)
def test_compiles(name, arch, nvcc):
    module = load(name)
    sizes = sizes_of(module)[0]
    for program in examples_of(module).values():
        for kernel in kernels_of(program, module.RANKS, sizes):
            ptx = tw.emit(kernel, "ptx", arch, module.RANKS, sizes=sizes)
            assert f".target {arch}" in ptx and ".entry" in ptx


@pytest.mark.parametrize("name", EXPLICIT)
def test_faults_without_one_of_its_barriers(name):
    module = load(name, ranks=2)
    for program in examples_of(module).values():
        mutants = tw.mutate(program, 2, inputs_of(module, 0), SCHEDULES)
        dropped = [m.why.split(":")[0] for m in mutants if m.name == "barrier_blocks drop"]
        assert dropped == ["race", "reuse"]


@pytest.mark.parametrize("name", sorted({*NAMES} - {*EXPLICIT}))
def test_faults_without_inferred_synchronization(name):
    module = load(name)
    sizes = sizes_of(module)[0]
    for program in examples_of(module).values():
        if not isinstance(program, Plan):
            program = passes.with_sizes(program, sizes)
        with pytest.raises(tw.SimulationError) as fault:
            tw.simulate(
                program,
                module.RANKS,
                inputs_of(module, 0, sizes),
                SCHEDULES,
                pass_configs={"tileweave.verify": "off"},
            )
        assert fault.value.kind in ("race", "reuse", "poison")


@pytest.mark.parametrize("name", MUTATED)
def test_faults_without_any_one_signal_or_wait(name):
    module = load(name, ranks=2)
    for program in examples_of(module).values():
        mutants = tw.mutate(program, 2, inputs_of(module, 0), SCHEDULES)
        dropped = [m for m in mutants if m.name in ("signal drop", "wait_reached drop")]
        assert {m.op for m in dropped} == {"signal", "wait_reached"}
        assert [(m.line, m.name, m.why) for m in dropped if m.verdict != "killed"] == []


def test_page_has_one_section_for_each_file():
    page = PAGE.read_text()
    titles = [section_of(name).split("\n")[0] for name in NAMES]
    assert len(set(titles)) == len(NAMES) == len(re.findall(r"^## ", page, re.M))
    assert len(re.findall(r"\.\./examples/patterns/", page)) == len(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_page_quotes_the_file(name):
    source = lines_of((FOLDER / f"{name}.py").read_text())
    shown = [lines_of(block) for block in blocks(section_of(name), "python")]
    assert 5 <= sum(map(len, shown)) <= 30
    (console,) = blocks(section_of(name), "console")
    explained_file = re.match(r"\$ tileweave explain ([^ :\n]+)", console)[1]
    assert explained_file == f"examples/patterns/{name}.py"
    assert len(lines_of(console)) >= 5
    for block in shown:
        assert any(source[i : i + len(block)] == block for i in range(len(source))), block
