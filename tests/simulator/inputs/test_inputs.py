"""Inputs that ``tileweave simulate`` generates: integers stay in the range that the program
implies."""

import json

import tilelang.language as T

import tileweave as tw
from tileweave import language as W
from tileweave.cli.main import main
from tileweave.simulator import Executable, described_inputs
from tileweave.simulator.inputs.index_ranges import index_ranges

M = T.dynamic("M")
SHAPES = {"A": (64, 32), "out": (64, 32)}


@T.prim_func
def gather(
    A: T.Tensor((M, 32), "float32"), rows: T.Tensor((4,), "int32"), counts: T.Tensor((4,), "int32"),
    lengths: T.Tensor((4,), "int64"), owners: T.Tensor((4,), "int32"),
    keys: T.Tensor((4,), "int32"),
    state: T.Tensor((4,), "int32"),
    out: T.Tensor((M, 32), "float32"),
):  # fmt: skip
    with T.Kernel(4, threads=32) as b:
        tile = T.alloc_shared((8, 32), "float32")
        row = rows[b]
        T.copy(A[row * 8, 0], tile)
        for i in T.serial(counts[b]):
            out[b * 4 + i, 0] = A[i, 0]
        for i in T.serial(16):
            if i < lengths[b]:
                out[i, 1] = T.cast(keys[b], "float32")
        if owners[b] == W.rank():
            state[b] = 1


def test_ranges_of_indices_counts_and_bounds():
    assert index_ranges(gather, 4, SHAPES | {n: (4,) for n in
                        ("rows", "counts", "lengths", "owners", "keys", "state")}) == {
        "rows": (0, 7),  # eight rows of 64 each
        "counts": (0, 52),  # i + 12 is a row of out
        "lengths": (0, 16),
        "owners": (0, 3),
    }  # fmt: skip


def test_inputs_are_in_their_ranges():
    inputs, made = described_inputs(Executable(gather, 2), 0, {"M": 64})
    assert made == {
        "A": "random numbers",
        "rows": "random integers 0 to 7",
        "counts": "random integers 0 to 52",
        "lengths": "random integers 0 to 16",
        "owners": "random integers 0 to 1",
        "keys": "zeros",
        "state": "zeros at first",
    }
    rows = [row for values in inputs for row in values["rows"].tolist()]
    assert set(rows) <= set(range(8)) and len(set(rows)) > 1
    assert not any(values["keys"].any() for values in inputs)


@T.prim_func
def scale(A: T.Tensor((8,), "float32"), index: T.Tensor((4,), "int32"),
          B: T.Tensor((8,), "float32")):  # fmt: skip
    with T.Kernel(1, threads=32):
        for i in T.serial(4):
            B[i] = A[index[i]]


@tw.plan
def halves(p, A: T.Tensor((8,), "float32"), picked: T.Tensor((4,), "int32"),
           B: T.Tensor((8,), "float32")):  # fmt: skip
    p.launch(scale, A, picked, B)


def test_kernels_of_a_plan_show_ranges_of_its_parameters():
    _, made = described_inputs(Executable(halves, 1), 0, {})
    assert made == {"A": "random numbers", "picked": "random integers 0 to 7"}


PROGRAM = """
import tilelang.language as T

@T.prim_func
def pick(A: T.Tensor((8,), "float32"), index: T.Tensor((4,), "int32"), n: T.Tensor((1,), "int32"),
         B: T.Tensor((8,), "float32")):
    with T.Kernel(1, threads=32):
        for i in T.serial(4):
            B[i] = A[index[i]] * n[0]
"""
MADE = {"A": "random numbers", "index": "random integers 0 to 7", "n": "zeros"}


def test_command_describes_inputs(tmp_path, capsys):
    path = tmp_path / "pick.py"
    path.write_text(PROGRAM)
    assert main(["simulate", str(path), "--ranks", "1"]) == 0
    said = capsys.readouterr()
    assert said.out == "pick: 20 schedules of 1 ranks, no fault\n"
    assert said.err == (
        "simulate: pick: inputs: random numbers in A; random integers 0 to 7 in index; zeros in n\n"
    )
    assert main(["simulate", str(path), "--ranks", "1", "--json"]) == 0
    said = capsys.readouterr()
    assert said.err == "" and json.loads(said.out)["inputs"] == MADE


@tw.plan
def pulls(p, X: T.Tensor((8,), "float32"), S: W.Symmetric((8,), "float32"),
          Y: T.Tensor((2, 8), "float32")):  # fmt: skip
    p.copy(S[p.rank], X)
    for peer in p.peers():
        p.copy(Y[peer], S[peer], stream="pull")


def test_kernels_that_synchronize_a_plan_need_no_inputs():
    _, made = described_inputs(Executable(pulls, 2), 0, {})
    assert made == {"X": "random numbers"}
