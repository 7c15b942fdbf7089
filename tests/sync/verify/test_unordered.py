"""``W.unordered``: accesses that it excludes from the inference."""

import pytest
import tilelang.language as T
from tilelang import tvm

import tileweave as tw
from tests.factory import factory
from tests.releases import names_line
from tileweave import language as W
from tileweave import passes
from tileweave.passes.sync.infer.inference import infer_and_explain

RANKS, STRIDE = 2, 1 << 40
N = 32


def explanation(func):
    mod = passes.run_group(tvm.IRModule({"p": func}), RANKS, STRIDE, ["group"])
    (func,) = mod.functions.values()
    return infer_and_explain(func, RANKS, STRIDE)


def let(region):
    return W.unordered(region, reason="read between launches only")


def test_it_is_listed_with_line_tensor_and_reason():
    @T.prim_func
    def program(S: W.Symmetric((N,), "float32"), Y: T.Tensor((N,), "float32")):
        with T.Kernel(1, threads=N):
            T.copy(let(S[(W.rank() + 1) % 2, 0]), Y)

    func, actual = explanation(program)
    (one,) = actual.ops
    assert (one.kind, one.tensor, one.reason) == ("unordered", "S", "read between launches only")
    assert names_line(one.line, "test_unordered.py:")
    assert len(func.params) == 2


def test_only_the_marked_access_is_left_out():
    @T.prim_func
    def program(S: W.Symmetric((2, N), "float32"), Y: T.Tensor((N,), "float32")):
        with T.Kernel(1, threads=N):
            me = W.rank()
            tile = T.alloc_shared((N,), "float32")
            T.copy(tile, S[1 - me, 0, 0])
            T.copy(let(S[1 - me, 1, 0]), S[me, 1, 0])
            T.copy(S[me, 0, 0], Y)

    _, actual = explanation(program)
    kinds = [op.kind for op in actual.ops]
    assert kinds.count("unordered") == 1 and "signal" in kinds and "wait" in kinds


@pytest.mark.parametrize("whole", [True, False])
def test_it_may_mark_a_whole_tensor_and_the_operand_of_a_builtin(whole):
    @T.prim_func
    def program(S: W.Symmetric((N,), "float32"), Y: T.Tensor((2, N), "float32")):
        with T.Kernel(1, threads=N):
            W.get_block(let(S if whole else S[0, 0]), Y[0, 0], N, (W.rank() + 1) % 2)

    assert [op.kind for op in explanation(program)[1].ops] == ["unordered"]


def test_a_program_with_signals_of_its_own_may_use_it():
    @factory
    def program(
        marked,
        S: W.Symmetric((N,), "float32"),
        flags: W.Symmetric((1,), "uint32"),
        Y: T.Tensor((N,), "float32"),
        epoch: T.int32,
    ):
        with T.Kernel(1, threads=N):
            me = W.rank()
            T.copy(Y, let(S[1 - me, 0]) if marked else S[1 - me, 0])
            W.signal(flags[1 - me, 0])
            W.wait_reached(flags[me, 0], epoch + 1)
            T.copy(S[me, 0], Y)

    assert "signal" in tw.emit(program(True), stage="tile", world_size=2)
    with pytest.raises(tw.LanguageError, match="may still be reading"):
        tw.emit(program(False), stage="tile", world_size=2)


@pytest.mark.parametrize(
    ("mark", "message"),
    [
        (lambda S, tile: W.unordered(S[0, 0], reason=" "), "reason=' '; expected a text"),
        (lambda S, tile: W.unordered(tile[0], reason="why"), "tile is in shared.dyn memory"),
        (lambda S, tile: W.unordered(3, reason="why"), "region=3; expected a tensor, or a part"),
    ],
)
def test_refused(mark, message):
    with pytest.raises(tw.LanguageError, match=r"test_unordered.py:\d+") as error:

        @T.prim_func
        def program(S: W.Symmetric((N,), "float32")):
            with T.Kernel(1, threads=N):
                tile = T.alloc_shared((N,), "float32")
                mark(S, tile)

    assert message in str(error.value)


def test_the_simulator_runs_it():
    @T.prim_func
    def program(S: W.Symmetric((N,), "float32"), Y: T.Tensor((N,), "float32")):
        with T.Kernel(1, threads=N):
            T.copy(let(S[W.rank(), 0]), Y)

    import numpy as np

    given = [{"S": np.arange(N, dtype=np.float32)} for _ in range(2)]
    for out in tw.simulate(program, 2, given):
        np.testing.assert_array_equal(out["Y"], given[0]["S"])
