"""Each published bug of the zoo is refused or reported with its line; its twin is clean."""

import inspect
import re
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import tileweave as tw
from tests.corpus.zoo import ZOO, Specimen
from tests.releases import (
    RECORDS_DEVICE_LINES,
    needs_bulk_copies,
    needs_device_lines,
    needs_lines,
)
from tileweave.simulator.device.program import DeviceProgram
from tileweave.simulator.machine.executable import Executable

EPOCHS = 3
PAGE = Path(__file__).parents[3] / "docs/guides/zoo.md"


def of_levels(*levels, marks=None):
    """Parametrize over the specimens of levels; ``marks`` has marks of some, by name."""
    chosen = [
        pytest.param(case, id=name, marks=(marks or {}).get(name, ()))
        for name, case in ZOO.items()
        if case.level in levels
    ]
    return pytest.mark.parametrize("case", chosen)


def simulate(case: Specimen, faulty: bool, level: str) -> list[dict[str, np.ndarray]]:
    program = case.make(faulty)
    inputs, simulated = case.inputs(program), program
    if level == "device" and faulty and case.change is not None:
        make = partial(DeviceProgram, arch="sm_90a", change=case.change)
        simulated, level = Executable(program, case.ranks, make), "tile"
    return tw.simulate(simulated, case.ranks, inputs, schedules=5, epochs=EPOCHS, level=level)


def compile_tiles(case: Specimen, faulty: bool) -> None:
    tw.emit(case.make(faulty), stage="tile", world_size=case.ranks)


def assert_reported(case: Specimen, report: str) -> None:
    assert re.search(case.report, report), report
    if case.level == "device" and not RECORDS_DEVICE_LINES:
        return
    assert case.lines and case.lines <= case.lines_in(report), (case.lines, report)


def assert_expected(case: Specimen, outputs: list[dict[str, np.ndarray]]) -> None:
    for rank in range(case.ranks):
        for name, expected in case.expected(EPOCHS - 1, rank, case.ranks).items():
            np.testing.assert_array_equal(outputs[rank][name], expected, f"{name} of rank {rank}")


@of_levels("refused")
def test_the_compiler_refuses(case):
    with pytest.raises(tw.LanguageError) as error:
        compile_tiles(case, faulty=True)
    assert_reported(case, str(error.value))


@of_levels("refused")
def test_the_tile_level_reports_what_the_compiler_refuses(case):
    if not case.kinds:
        with pytest.raises(tw.LanguageError):
            simulate(case, faulty=True, level="tile")
        return
    with pytest.raises(tw.SimulationError) as error:
        simulate(case, faulty=True, level="tile")
    assert error.value.kind in case.kinds, error.value.report


@of_levels("tile")
def test_the_tile_level_reports(case):
    compile_tiles(case, faulty=True)
    with pytest.raises(tw.SimulationError) as error:
        simulate(case, faulty=True, level="tile")
    assert error.value.kind in case.kinds, error.value.report
    assert_reported(case, error.value.report)


@of_levels("device", marks={"thunderkittens_194": needs_bulk_copies})
def test_only_the_device_level_reports(case):
    compile_tiles(case, faulty=True)
    simulate(case, faulty=True, level="tile")
    with pytest.raises(tw.SimulationError) as error:
        simulate(case, faulty=True, level="device")
    assert error.value.kind in case.kinds, error.value.report
    assert_reported(case, error.value.report)


@of_levels("missed")
def test_missed(case):
    """A limit of all levels, which the page names. A level that finds it must change the page."""
    compile_tiles(case, faulty=True)
    for level in ("tile", "device"):
        assert_expected(case, simulate(case, faulty=True, level=level))


@of_levels("refused", "tile", "device", "missed")
def test_twin_is_clean(case):
    compile_tiles(case, faulty=False)
    assert_expected(case, simulate(case, faulty=False, level="tile"))
    if case.level in ("device", "missed"):
        assert_expected(case, simulate(case, faulty=False, level="device"))


def test_size_of_the_zoo():
    assert len({case.bug for case in ZOO.values()}) >= 15
    assert sum(case.level == "missed" for case in ZOO.values()) <= 2


def test_the_page_lists_every_specimen():
    rows = re.findall(r"^\| (\S+/\S+#\d+) \| ([^|]+) \|.*\| (\w+) \| [^|]+ \|$", page(), re.M)
    assert sorted(rows) == sorted((case.bug, case.what, case.level) for case in ZOO.values())


def page() -> str:
    return PAGE.read_text()


def shown_program(case: Specimen) -> str:
    """Return the source of a factory, without its decorator."""
    source = inspect.getsource(case.make)
    return source[source.index("def ") :].strip()


def shown_report(case: Specimen) -> str:
    with pytest.raises((tw.LanguageError, tw.SimulationError)) as error:
        if case.level == "refused":
            compile_tiles(case, faulty=True)
        simulate(case, faulty=True, level=case.level)
    fault = error.value
    text = f"{fault.kind}: {fault.report}" if case.level != "refused" else str(fault)
    file = str(Path(inspect.getsourcefile(case.make)))
    return text.replace(file, Path(file).name).strip()


@needs_lines
@pytest.mark.parametrize(
    "name",
    [
        "tokenspeed_351",
        "flashinfer_3053",
        pytest.param("flashkda_24", marks=needs_device_lines),
    ],
)
def test_the_page_shows_real_reports(name):
    case = ZOO[name]
    _, section = page().split(f"\n## {case.bug}\n")
    program, report = re.findall(r"^```(?:python|text)\n(.*?)\n```$", section, re.M | re.S)[:2]
    assert program == shown_program(case)
    assert report == shown_report(case)
