"""Messages of the command line about files without programs and programs that do not compile."""

import sys
import traceback

import pytest

from tileweave.builtins.errors import LanguageError
from tileweave.cli.main import main

TOO_SMALL = """
import tilelang.language as T

@T.prim_func
def small(A: T.Tensor((24, 24), "float16"), C: T.Tensor((24, 24), "float32")):
    with T.Kernel(1, threads=128):
        a = T.alloc_shared((24, 24), "float16")
        c = T.alloc_fragment((24, 24), "float32")
        T.copy(A, a)
        T.clear(c)
        T.gemm(a, a, c)
        T.copy(c, C)
"""
SIX_AXES = """
import tilelang.language as T

@T.prim_func
def axes(A: T.Tensor((2, 2, 2, 2, 2, 32), "float16"), B: T.Tensor((2, 2, 2, 2, 2, 32), "float16")):
    with T.Kernel(1, threads=128):
        a = T.alloc_shared((2, 2, 2, 2, 2, 16), "float16")
        T.copy(A[0:2, 0:2, 0:2, 0:2, 0:2, 0:16], a)
        T.copy(a, B[0:2, 0:2, 0:2, 0:2, 0:2, 0:16])
"""
WRONG_ARGUMENT = """
import tilelang.language as T

@T.prim_func
def wrong(A: T.Tensor((24, 24), "float16")):
    with T.Kernel(1, threads=128):
        a = T.alloc_shared((24, 24), "float16")
        T.gemm(a, a, 3)
"""
BUILDERS = """
import tilelang.language as T
import tileweave as tw

def matmul(n):
    @T.prim_func
    def program(X: T.Tensor((n,), "float32")):
        with T.Kernel(1, threads=32):
            X[0] = 1.0
    return program

def operator(n):
    @tw.plan
    def plan(p, X: T.Tensor((n,), "float32")):
        p.launch(matmul(n), X)
    return plan

def helper(n):
    return n
"""


@pytest.fixture
def file(tmp_path):
    def write(text: str) -> str:
        path = tmp_path / "program.py"
        path.write_text(text)
        return str(path)

    return write


def said(capsys, *arguments: str) -> str:
    assert main([*arguments]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err


@pytest.mark.parametrize(
    ("text", "error", "places"),
    [
        (TOO_SMALL, "T.gemm: the inner extent of a is 24; expected", [" --> {}:11"]),
        (SIX_AXES, "T.copy: TileLang ", [" --> {}:9"]),
        (WRONG_ARGUMENT, "emit: ValueError: Unsupported argument type", [" --> {}:8"]),
        ("import nosuch\n", "emit: ModuleNotFoundError: No module named 'nosuch'", [" --> {}:1"]),
        ("\ndef f(:\n", "emit: SyntaxError: invalid syntax", [" --> {}:2"]),
    ],
)  # fmt: skip
def test_an_error_of_the_compiler_in_a_few_lines(file, capsys, text, error, places):
    path = file(text)
    first, *where = said(capsys, "emit", path).splitlines()
    assert first.startswith(f"tileweave: {error}")
    for line, place in zip(where, places, strict=False):
        assert line.strip().startswith(place.format(path).strip())
    assert len(where) >= len(places)


def test_an_error_of_nvcc_is_its_errors_only(file, capsys, monkeypatch):
    source = "\n".join(f"line {n} of a kernel" for n in range(200))
    message = f"{source}\nCompilation error:\n/tmp/x/tvm_kernels.cu(17): error: expected a )\n"

    def fails(*_):
        raise RuntimeError(message)

    monkeypatch.setattr(sys.modules["tileweave.emit"], "_require_nvcc", lambda: None)
    monkeypatch.setattr("tilelang.contrib.nvcc.get_ptx_from_source", fails)
    path = file(BUILDERS + "\nexample = matmul(4)\n")
    shown = said(capsys, "emit", path, "--stage", "ptx").splitlines()
    assert shown[0] == (
        "tileweave: emit: example: RuntimeError: line 17 of the CUDA source (--stage cuda): error: "
        "expected a )"
    )
    assert shown[1] == f" --> {path}:7" and len(shown) == 3


def test_the_environment_variable_shows_the_rest(file, monkeypatch):
    monkeypatch.setenv("TILEWEAVE_TRACEBACK", "1")
    text = TOO_SMALL.replace("T.clear(c)", 'T.clear(c); W.fence("gpu")')
    with pytest.raises(LanguageError, match="expected a multiple of 16") as refusal:
        main(["emit", file("from tileweave import language as W\n" + text)])
    frames = traceback.extract_tb(refusal.value.__traceback__)
    assert any("verify_operators" in frame.filename for frame in frames)


@pytest.mark.parametrize(
    ("command", "name", "message"),
    [
        ("emit", "", "has no T.prim_func; expected one at module level, so that a builder must be "
         "called there: example = matmul(...) or example = operator(...)\n"),
        ("simulate", "", "has no tw.plan or T.prim_func; expected one at module level, so that"),
        ("emit", ":matmul", "has no T.prim_func matmul; expected the result of this function at "
         "module level: example = matmul(...)\n"),
        ("emit", ":helper", "has no T.prim_func helper; expected one at module level, so that"),
    ],
)  # fmt: skip
def test_builders_are_named(file, capsys, command, name, message):
    assert message in said(capsys, command, file(BUILDERS) + name)


def test_a_scalar_without_a_value_says_how_to_give_one(file, capsys):
    path = file(
        "import tilelang.language as T\n\n@T.prim_func\n"
        "def f(X: T.Tensor((4,), 'int32'), epoch: T.int32):\n"
        "    with T.Kernel(1, threads=32):\n        X[0] = epoch\n"
    )
    shown = said(capsys, "simulate", path)
    assert "simulate: no value for epoch; expected a number" in shown
    assert "--set epoch=epoch" in shown


@pytest.mark.parametrize("option", ["--ranks", "--world-size"])
@pytest.mark.parametrize("command", ["emit", "explain", "simulate", "mutate"])
def test_all_commands_count_ranks_with_the_same_word(file, capsys, command, option):
    path = file(BUILDERS + "\nexample = matmul(4)\n")
    assert main([command, path, option, "2"]) == 0
    capsys.readouterr()
    assert f"{command}: --ranks 0; expected at least 1" in said(capsys, command, path, option, "0")
