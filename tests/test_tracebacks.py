"""Errors of public functions show the frames of the program and the message only."""

import inspect
import logging
import traceback

import numpy as np
import pytest
import tilelang.language as T

import tileweave as tw
from tileweave import language as W
from tileweave import ops
from tileweave.builtins.errors import SHOW_FRAMES, brief_errors


@T.prim_func
def part_of_a_fragment(X: T.Tensor((256,), "float32")):
    with T.Kernel(1, threads=64):
        f = T.alloc_fragment((256,), "float32")
        W.fence("gpu")
        for i in T.Parallel(64):
            f[i] = X[i]
        T.copy(f, X)


@T.prim_func
def uneven(X: T.Tensor((32, 64), "float32")):
    with T.Kernel(1, threads=384):
        f = T.alloc_fragment((32, 64), "float32")
        W.fence("gpu")
        T.copy(X, f)
        for i, j in T.Parallel(32, 64):
            f[i, j] += X[i, j]
        T.copy(f, X)


@T.prim_func
def divergent(F: W.Symmetric((8,), "uint32")):
    with T.Kernel(1, threads=64):
        count = T.alloc_var("int32", 0)
        if T.get_thread_binding() < 7:
            count = 1
        if count == 1:
            W.signal(F[0, 0])


@tw.jit
def jitted(n: int):
    raise tw.TileWeaveError("jitted: 1; expected 2")


CALLS = {
    "arguments": lambda: tw.emit(uneven, world_size=0),
    "tile": lambda: tw.emit(divergent, world_size=2),
    "inside_tvm": lambda: tw.emit(part_of_a_fragment, world_size=2),
    "tilelang": lambda: tw.emit(uneven, world_size=2),
    "compile": lambda: tw.compile(3),
    "simulate": lambda: tw.simulate(divergent, 0),
    "fault": lambda: tw.simulate(uneven, 1, [{"X": np.zeros(3)}]),
    "validate": lambda: tw.validate(divergent, 2),
    "mutate": lambda: tw.mutate(divergent, 0),
    "explain": lambda: tw.explain(3, 2),
    "plan": lambda: tw.plan(3),
    "jit": lambda: tw.jit(3),
    "jitted": lambda: jitted(1),
    "operator": lambda: ops.all_reduce(3),
    "program": lambda: trace(),
    "tune": lambda: tw.tune("nothing", [(1, 2, 3)]),
}


def frames_of(call) -> tuple[list[str], BaseException]:
    with pytest.raises(tw.TileWeaveError) as refusal:
        call()
    error = refusal.value
    return [frame.filename for frame in traceback.extract_tb(error.__traceback__)], error


@pytest.mark.parametrize("name", CALLS)
def test_only_the_frames_of_the_program(name):
    files, error = frames_of(CALLS[name])
    *program, own = files
    assert set(program) == {__file__} and own == inspect.getfile(brief_errors)
    text = "".join(traceback.format_exception(error))
    assert text.count("Traceback") == 1 and text.strip().endswith(str(error).strip())


@pytest.mark.parametrize("name", ["tile", "inside_tvm", "tilelang"])
def test_all_frames_on_request(monkeypatch, name):
    monkeypatch.setenv(SHOW_FRAMES, "1")
    files, error = frames_of(CALLS[name])
    assert any("tilelang" in file or "passes" in file for file in files)
    assert (error.__cause__ is not None) == (name == "tilelang")


def trace() -> None:
    """Trace a program with an illegal operand."""

    @T.prim_func
    def program(F: W.Symmetric((8,), "uint32")):
        with T.Kernel(1, threads=32):
            W.signal(F[1, 0], scope="block")


@pytest.mark.parametrize("shown", ["0", "1"])
def test_the_python_code_of_a_refused_program_is_logged_on_request(monkeypatch, shown):
    monkeypatch.setenv(SHOW_FRAMES, shown)
    records: list[logging.LogRecord] = []
    logger = logging.getLogger("tilelang.language.eager.builder")
    handler = logging.Handler()
    handler.emit = records.append
    monkeypatch.setattr(logger, "disabled", False)
    logger.addHandler(handler)
    try:
        with pytest.raises(tw.LanguageError, match="scope='block'"):
            trace()
    finally:
        logger.removeHandler(handler)
    assert len(records) == int(shown)
