"""Every example and every inferred program compiles for each architecture, or is refused."""

import inspect
from pathlib import Path

import pytest

import tileweave as tw
from tests.corpus import PROGRAMS
from tileweave import passes
from tileweave.cli import main as cli

pytestmark = pytest.mark.long

EXAMPLES = Path(__file__).parents[2] / "examples"
EXAMPLE_PROGRAMS = sorted(
    file.stem for file in EXAMPLES.glob("*.py") if "\n@T.prim_func" in file.read_text()
)
ARCHES = ("sm_80", "sm_90a")
_NO_TMA = "atomic_add with use_tma=True: compiled for sm_80, which has no TMA; expected sm_90"
REFUSED = {
    "bulk_copy": "bulk_store: compiled for sm_80; expected sm_90 or later",
    "gemm_reduce_add": _NO_TMA,
    "reduce_scatter_tails": _NO_TMA,
    "reduce_scatter_bulk": "bulk_reduce: compiled for sm_80; expected sm_90 or later",
    "bulk_transfers": "bulk_store: compiled for sm_80; expected sm_90 or later",
}
"""Programs that sm_80 lacks an instruction for, with the message."""
DELAYS = {"tileweave.delays": 3}
SIZE = 20


def compiled(kernel, case, arch, **more):
    """Return the code of one kernel for two ranks."""
    sizes = dict.fromkeys(passes.dynamic_sizes(kernel), SIZE) if case.sizes else {}
    return tw.emit(kernel, arch=arch, world_size=2, sizes=sizes, **more)


def kernels_of(case):
    """Return the kernels that two ranks launch."""
    program = case.make(2)
    if not isinstance(program, tw.Plan):
        return [program]
    shapes = {
        p.name: tuple(e if isinstance(e, int) else SIZE for e in p.extents)
        for p in program.parameters
        if p.shape is not None
    }
    return [step.program for step in program.launches(2, shapes, {})]


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("name", PROGRAMS)
def test_inferred_program(name, arch):
    case = PROGRAMS[name]
    if arch == "sm_80" and name in REFUSED:
        with pytest.raises(tw.LanguageError) as refused:
            [compiled(kernel, case, arch) for kernel in kernels_of(case)]
        file = Path(inspect.getsourcefile(case.make)).name
        message = str(refused.value)
        assert message.startswith(REFUSED[name]) and f"{file}:" in message
        return
    for kernel in kernels_of(case):
        assert "__global__" in compiled(kernel, case, arch)


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("name", EXAMPLE_PROGRAMS)
def test_example(name, arch, capsys):
    status = cli.main(["emit", str(EXAMPLES / f"{name}.py"), "--arch", arch])
    out, err = capsys.readouterr()
    if arch == "sm_80" and name in REFUSED:
        assert status != 0 and REFUSED[name] in err and f"{name}.py:" in err
    else:
        assert status == 0 and "__global__" in out, err


PIPELINED = [
    name for name, case in PROGRAMS.items() if "T.Pipelined" in inspect.getsource(case.make)
]


@pytest.mark.parametrize("configs", [{"tl.disable_warp_specialized": True}, DELAYS])
@pytest.mark.parametrize("name", [n for n in PIPELINED if n not in REFUSED])
def test_pipelined_without_warp_specialization(name, configs):
    """Delays put branches of several statements before the loads, which TileLang splits."""
    arch = "sm_80" if configs is DELAYS else "sm_90a"
    for kernel in kernels_of(PROGRAMS[name]):
        assert "__global__" in compiled(kernel, PROGRAMS[name], arch, pass_configs=configs)


@pytest.mark.parametrize("name", ["gemm_reduce_scatter", "gather_k"])
def test_assembles_for_sm_80(name, ptxas):
    for kernel in kernels_of(PROGRAMS[name]):
        ptxas(compiled(kernel, PROGRAMS[name], "sm_80", stage="ptx"))
