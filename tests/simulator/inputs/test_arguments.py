"""``tw.simulate`` refuses illegal arguments by name, before anything is allocated."""

import numpy as np
import pytest
import tilelang
import tilelang.language as T
import torch
from tilelang.autotuner import autotune

import tileweave as tw
from tileweave import language as W
from tileweave.passes.sync.infer.inference import MAX_INFERRED_RANKS
from tileweave.runtime.plans.parameters import Parameter
from tileweave.simulator.inputs.arguments import check_blocks, check_tensors

M = T.dynamic("M")


@T.prim_func
def program(S: W.Symmetric((4,), "float32"), X: T.Tensor((4,), "float32"), n: T.int32):
    with T.Kernel(1, threads=32):
        X[0] = T.cast(n, "float32")


@T.prim_func
def shift(S: W.Symmetric((M, 32), "float32"), X: T.Tensor((M, 32), "float32")):
    with T.Kernel(T.ceildiv(M, 8), threads=32) as row:
        tile = T.alloc_shared((8, 32), "float32")
        T.copy(X[row * 8, 0], tile)
        T.copy(tile, S[(W.rank() + 1) % W.world_size(), row * 8, 0])
        T.copy(S[W.rank(), row * 8, 0], tile)
        T.copy(tile, X[row * 8, 0])


def refused(call) -> str:
    with pytest.raises(tw.TileWeaveError) as error:
        call()
    return str(error.value)


def simulate(world_size=2, inputs=None, **arguments):
    given = [{"n": 0} for _ in range(2)] if inputs is None else inputs
    return tw.simulate(program, world_size, given, **arguments)


def fail(epoch):
    raise RuntimeError("not today")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"seed": "x"}, "simulate: seed='x'; expected an integer"),
        ({"seed": None}, "simulate: seed=None; expected an integer"),
        ({"seed": 1.5}, "simulate: seed=1.5; expected an integer"),
        ({"seed": True}, "simulate: seed=True; expected an integer"),
        ({"world_size": True}, "simulate: world_size=True; expected an integer from 1 to"),
        ({"world_size": 1025}, "simulate: world_size=1025; expected an integer from 1 to"),
        ({"schedules": True}, "simulate: schedules=True; expected an integer from 1 to"),
        ({"schedules": 1 << 40}, "expected an integer from 1 to 2147483647"),
        ({"epochs": 1 << 20}, "simulate: epochs=1048576 on 2 ranks; expected at most 524288"),
        ({"inputs": 3}, "simulate: inputs=3; expected a list with one dict a rank"),
        (
            {"inputs": {"A": list(range(100))}},
            "simulate: inputs=an object of type dict; expected a list with one dict a rank",
        ),
        ({"inputs": True}, "simulate: inputs=True; expected a list with one dict a rank"),
        ({"timeline": 3}, "simulate: timeline=3; expected a file name"),
        ({"timeline": b"a.svg"}, "simulate: timeline=b'a.svg'; expected a file name"),
    ],
)
def test_arguments(arguments, message):
    assert message in refused(lambda: simulate(**arguments))


@tilelang.jit
def jitted(size):
    @T.prim_func
    def program(B: T.Tensor((size,), "int32")):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(size):
                B[i] = i

    return program


def test_a_function_of_tilelang_jit_has_a_program():
    message = refused(lambda: tw.simulate(jitted, 1))
    assert message.startswith("simulate: jitted: missing a required argument: 'size'; expected siz")
    assert "\n" not in message
    assert tw.simulate(jitted, 1, sizes={"size": 32})[0]["B"].tolist() == list(range(32))
    assert tw.validate(jitted, 1, sizes={"size": 32})[0]["B"].tolist() == list(range(32))
    with tw.interpret():
        kernel = jitted(16)
    assert tw.simulate(kernel, 1)[0]["B"].tolist() == list(range(16))
    code = tw.emit(kernel, "cuda", world_size=1)
    assert code == tw.emit(jitted, "cuda", world_size=1, sizes={"size": 16})
    message = refused(lambda: tw.emit(jitted, sizes={"extent": 32}))
    assert message.startswith("emit: jitted: missing a required argument: 'size'")
    message = refused(lambda: tw.simulate(jitted.get_tir(32), 1, sizes={"size": 32}))
    assert message.startswith("simulate: sizes={'size': 32}; expected them with a function of")


def test_what_is_no_program_is_refused_in_one_line():
    tuned = autotune(configs=[{"size": 32}])(jitted)
    for call in (tw.simulate, tw.validate):
        for configs in (None, {"tileweave.verify": "off"}):
            message = refused(lambda call=call, c=configs: call(tuned, 1, pass_configs=c))
            assert "AutoTuneImpl" in message
            assert len(message) < 200 and "\n" not in message


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([[1, 2], [3]], "X of rank 0 is a ragged list; expected an array of float32 with 1 axes"),
        (None, "X of rank 0 is None; expected an array of float32"),
        ("S", "X='S'; expected an array: no multimem operation accesses X"),
        (torch.zeros(4).to_sparse(), "X of rank 0 is tensor(indices="),
        (torch.empty(4, device="meta"), "X of rank 0 is tensor(..., device='meta'"),
    ],
)
def test_tensors(value, message):
    inputs = [{"n": 0, "X": value}] * 2
    assert message in refused(lambda: simulate(inputs=inputs))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (1.5, "simulate: n=1.5; expected an integer (int32)"),
        (lambda: 3, "simulate: n of launch 0: TypeError: "),
        (fail, "n of launch 0: RuntimeError: not today; expected a function that takes the number"),
        (lambda epoch: "x", "simulate: n='x' in launch 0; expected an integer (int32)"),
    ],
)
def test_scalars(value, message):
    said = refused(lambda: simulate(inputs=[{"n": value}] * 2))
    assert message in said and ".py" not in said


def test_inputs_may_be_any_iterable_of_dicts():
    outputs = simulate(inputs=({"n": rank, "X": torch.zeros(4)} for rank in range(2)), epochs=1)
    assert [o["X"][0] for o in outputs] == [0, 1]


@pytest.mark.parametrize("make", [W.Symmetric, W.alloc_symmetric])
@pytest.mark.parametrize("shape", [(0,), (-1,), (4, 0), (2.5,), ("x",), (None,), (True,)])
def test_shapes_of_symmetric_tensors(make, shape):
    said = refused(lambda: make(shape, "float32"))
    assert f"shape={shape}; expected positive" in said


@pytest.mark.parametrize("make", [W.Symmetric, W.alloc_symmetric])
def test_types_of_symmetric_tensors(make):
    said = refused(lambda: make((4,), "real"))
    assert "dtype='real'; expected a type of TileLang, such as 'bfloat16'" in said


def test_shapes_that_numpy_computed():
    assert list(W.Symmetric((np.int64(4),), "float32").shape)[1:] == [4]


def test_tensors_that_do_not_fit():
    said = refused(lambda: tw.simulate(shift, 4, [{"M": (1 << 31) - 1}] * 4))
    assert said.startswith(
        "simulate: tensors such as S (2147483647 x 32) on 4 ranks take 14 TiB of memory; expected "
        "at most the "
    )


def test_tensors_must_fit_into_free_memory():
    parameters = [Parameter("S", "float32", (1024,), True)]
    need = 2 * 1024 * (4 + 25)
    shapes = [{"S": (1024,)}] * 2
    check_tensors(parameters, shapes, free=need)
    assert "S (1024) on 2 ranks take 58 KiB" in refused(
        lambda: check_tensors(parameters, shapes, free=need - 1)
    )
    check_blocks(1 << 10, 2, 3, 8, free=1 << 30)
    assert "simulate: 1073741824 blocks on 8 ranks take " in refused(
        lambda: check_blocks(1 << 30, 2, 3, 8, free=1 << 30)
    )


def test_ranks_that_inference_cannot_count():
    most = MAX_INFERRED_RANKS
    assert "def shift(" in tw.emit(shift, "tile", world_size=most, sizes={"M": 16})
    assert f"infer_sync: {most + 1} ranks; expected at most {most}" in refused(
        lambda: tw.emit(shift, "tile", world_size=most + 1, sizes={"M": 16})
    )
