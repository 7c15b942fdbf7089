"""Programs for which nothing can be inferred: the access, its line and what is legal."""

import re

import pytest
import tilelang.language as T
from tilelang import tvm

import tileweave as tw
from tests.corpus.refused import F32, REFUSED, N
from tests.corpus.refused.indices import tiles
from tests.corpus.refused.versions import hundred_versions
from tests.corpus.refused.writers import readers_first
from tileweave import language as W
from tileweave import passes
from tileweave.passes.sync.infer.inference import infer_and_explain


def grouped(func, ranks=2, configs=None):
    func, _ = passes.split_options(func, configs or {})
    return passes.run_group(tvm.IRModule({"program": func}), ranks, 1 << 40)


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED)
def test_refused(case):
    with pytest.raises(tw.LanguageError) as error:
        grouped(case.make(), case.ranks, case.configs)
    assert case.message in str(error.value)
    assert case.lines == case.lines_in(str(error.value)), str(error.value)


def test_enough_memory_for_hundred_versions():
    grouped(hundred_versions(), configs={"tileweave.version_bytes": 3200})


@pytest.mark.parametrize("pieces", [1, 2])
def test_enough_resident_blocks(pieces):
    grouped(readers_first(pieces), configs={"tileweave.resident_blocks": 9})


@pytest.mark.parametrize(
    ("granule", "message"),
    [
        ({"S": (4,)}, "tileweave.granule=(4,) of S has 1 axes; expected 2"),
        ({"R": (4, 8)}, "tileweave.granule: 'R' is no tensor that ranks exchange; expected 'S'"),
    ],
)
def test_granules_that_fit_nothing(granule, message):
    with pytest.raises(tw.LanguageError, match=re.escape(message)):
        grouped(tiles(), configs={"tileweave.granule": granule})


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("reus", "auto", "tileweave.reus; expected tileweave.reuse, tileweave.granule"),
        ("reuse", "fast", "tileweave.reuse='fast'; expected 'auto' or 'double_buffer'"),
        ("verify", "no", "tileweave.verify='no'; expected 'error' or 'warn' or 'off'"),
        ("resident_blocks", 0, "tileweave.resident_blocks=0; expected a positive integer"),
        ("granule", [1], "tileweave.granule=[1]; expected a dict, tensor name -> elements"),
        ("granule", {"S": (0,)}, "tileweave.granule={'S': (0,)}; expected a dict, tensor name"),
        ("version_bytes", -1, "tileweave.version_bytes=-1; expected bytes, 0 or more"),
        ("delays", -1, "tileweave.delays=-1; expected an integer, 0 or more"),
    ],
)
def test_options(name, value, message):
    with pytest.raises(tw.TileWeaveError, match=re.escape(f"pass_configs: {message}")):
        grouped(tiles(), configs={f"tileweave.{name}": value})


@pytest.mark.parametrize("shape", [(0,), (-3, N), ("n",)])
def test_scratch_without_positive_extents(shape):
    with pytest.raises(tw.LanguageError, match=r"alloc_symmetric: shape=.*expected positive const"):

        @T.prim_func
        def program(Y: T.Tensor((N,), F32)):
            with T.Kernel(1, threads=32):
                S = W.alloc_symmetric(shape, F32)
                T.copy(Y, S[W.rank(), 0])


def test_a_rank_s_own_tensor_may_have_the_stride_of_the_heap():
    """Every rank writes its own ``Y``, which is not symmetric despite its stride."""
    rows, stride = 4, 1 << 10

    @T.prim_func
    def program(X: T.Tensor((N,), F32), S: W.Symmetric((N,), F32), Y: T.Tensor((rows, 256), F32)):
        with T.Kernel(1, threads=32):
            T.copy(X, S[1 - W.rank(), 0])
            for row in T.serial(rows):
                T.copy(S[W.rank(), 0], Y[row, 0:N])

    mod = passes.run_group(tvm.IRModule({"p": program}), 2, stride, ["group"])
    _, explanation = infer_and_explain(mod["p"], 2, stride)
    kinds = {(op.kind, op.tensor) for op in explanation.ops}
    assert kinds == {("signal", "S"), ("wait", "S"), ("signal", "started")}
