"""The protocol of a tensor: one source text with counters, or with words that hold a flag."""

import re

import ml_dtypes
import numpy as np
import pytest
import tilelang.language as T
from tilelang import tvm

import tileweave as tw
from tests.corpus import PROGRAMS
from tests.factory import factory
from tests.releases import RECORDS_LINES, needs_bulk_copies
from tests.sync.test_programs import run_with
from tileweave import language as W
from tileweave import passes
from tileweave.simulator import Executable

N = 32
NUMPY = {"bfloat16": ml_dtypes.bfloat16, "float8_e4m3fn": ml_dtypes.float8_e4m3fn}
MEMORY = {"shared": T.alloc_shared, "fragment": T.alloc_fragment}


def shift(dtype="float32", memory="shared", n=N, symmetric=False):
    """Return a program in which each rank writes rows to the right, and reads those from the
    left."""
    alloc = MEMORY[memory]

    if symmetric:

        @T.prim_func
        def program(
            X: T.Tensor((2, n), dtype), S: W.Symmetric((2, n), dtype), Y: T.Tensor((2, n), dtype)
        ):
            with T.Kernel(2, threads=32) as b:
                T.copy(X[b, 0], S[(W.rank() + 1) % W.world_size(), b, 0])
                T.copy(S[W.rank(), b, 0], Y[b, 0])

        return program

    @T.prim_func
    def program(X: T.Tensor((2, n), dtype), Y: T.Tensor((2, n), dtype)):
        with T.Kernel(2, threads=32) as b:
            S = W.alloc_symmetric((2, n), dtype)
            tile = alloc((n,), dtype)
            T.copy(X[b, 0], tile)
            T.copy(tile, S[(W.rank() + 1) % W.world_size(), b, 0])
            T.copy(S[W.rank(), b, 0], tile)
            T.copy(tile, Y[b, 0])

    return program


@T.prim_func
def elements(X: T.Tensor((2, N), "float16"), Y: T.Tensor((2, N), "float16")):
    with T.Kernel(2, threads=32) as b:
        S = W.alloc_symmetric((2, N), "float16")
        me = W.rank()
        for i in T.Parallel(N):
            S[(me + 1) % W.world_size(), b, i] = X[b, i]
        for i in T.Parallel(N):
            Y[b, i] = S[me, b, i] + S[me, b, N - 1 - i]


def protocol(name: str = "ll", tensor: str = "S") -> dict:
    return {"tileweave.protocol": {tensor: name}}


def inputs(dtype: str, ranks: int, n: int = N) -> list[dict]:
    values = (np.arange(2 * n).reshape(2, n) % 13 for _ in range(ranks))
    return [{"X": (v + r).astype(NUMPY.get(dtype, dtype))} for r, v in enumerate(values)]


@pytest.mark.parametrize("level", ["tile", pytest.param("device", marks=pytest.mark.long)])
@pytest.mark.parametrize(
    ("dtype", "memory", "elements_per_word"),
    [
        ("float32", "shared", 1),
        ("int32", "fragment", 1),
        ("float16", "shared", 2),
        ("bfloat16", "fragment", 1),
        pytest.param("float8_e4m3fn", "shared", 4, marks=pytest.mark.long),
    ],
)
def test_values(dtype, memory, elements_per_word, level):
    program = shift(dtype, memory)
    text = str(tw.explain(program, 3, pass_configs=protocol()))
    words = 2 * N // elements_per_word
    assert f"scratch memory: {words * 8} bytes" in text, text
    given = inputs(dtype, 3)
    out = tw.simulate(program, 3, given, schedules=3, epochs=3, pass_configs=protocol(),
                      level=level)  # fmt: skip
    for rank in range(3):
        assert out[rank]["Y"].tobytes() == given[rank - 1]["X"].tobytes()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_tiles_that_the_tma_stores(dtype):
    """TileLang permutes the elements of tiles that the TMA stores to a part of a matrix."""
    n = 128

    @T.prim_func
    def program(X: T.Tensor((2, n), dtype), Y: T.Tensor((2, 4, 2, n), dtype)):
        with T.Kernel(2, threads=128) as b:
            S = W.alloc_symmetric((2, 2, n), dtype)
            sent, received = T.alloc_shared((2, n), dtype), T.alloc_shared((2, n), dtype)
            T.copy(X, sent)
            T.copy(sent, S[1 - W.rank(), b, 0, 0])
            T.copy(S[W.rank(), b, 0, 0], received)
            T.copy(sent, Y[0:2, b, 0, 0:n])
            T.copy(received, Y[0:2, 2 + b, 1, 0:n])

    given = inputs(dtype, 2, n)
    for i in given:
        i["Y"] = np.zeros((2, 4, 2, n), NUMPY.get(dtype, dtype))
    out = tw.validate(program, 2, given, arch="sm_90a", epochs=3, pass_configs=protocol())
    for rank in range(2):
        for b in range(2):
            assert out[rank]["Y"][:, b, 0].tobytes() == given[rank]["X"].tobytes()
            assert out[rank]["Y"][:, 2 + b, 1].tobytes() == given[1 - rank]["X"].tobytes()


def test_elements():
    given = inputs("float16", 2)
    out = tw.simulate(elements, 2, given, schedules=5, pass_configs=protocol())
    for rank in range(2):
        X = given[1 - rank]["X"]
        np.testing.assert_array_equal(out[rank]["Y"], X + X[:, ::-1])


CORPUS = {"ring_all_reduce": "S", "own_in_place": "shared", "gemm_reduce_scatter": "parts",
          "dynamic_gather": "shared", "gemm_all_reduce": "parts", "all_gather_loads": "shared",
          "persistent_reduce_scatter": "parts", "ring_gemm_reduce_scatter": "S"}  # fmt: skip
LONG = [name for name in CORPUS if name != "all_gather_loads"]


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.long if n in LONG else ()) for n in CORPUS]
)
def test_programs_of_the_corpus(name):
    case, rng = PROGRAMS[name], np.random.default_rng(2)
    plan = case.called(2).with_configs(protocol(tensor=CORPUS[name]))
    sizes = {"size": case.sizes[-1]} if case.sizes else {}
    run_with(case, Executable(plan, 2), case.inputs(rng, 2, **sizes), range(2), 3)


def test_counters_stay_without_the_option():
    text = str(tw.explain(shift(), 2))
    assert "S_arrived" in text and "protocols" not in text
    text = str(tw.explain(shift(), 2, pass_configs=protocol("flag")))
    assert "S_arrived" in text and "protocols" not in text


@pytest.mark.parametrize(
    ("n", "text"),
    [
        (N, r"S  ll: a granule has 128 bytes, at most 32768"),
        (16384, r"S  flag: a granule has 65536 bytes, more than 32768"),
    ],
)
def test_auto_depends_on_the_granule(n, text):
    program = shift(n=n, memory="fragment")
    explanation = tw.explain(program, 2, pass_configs=protocol("auto"))
    assert re.search(text, str(explanation)), str(explanation)
    assert ("S_arrived" in explanation.flags) == ("flag" in text)
    assert {op.kind for op in explanation.ops if op.tensor == "S"} >= (
        {"signal", "wait"} if "flag" in text else {"ll_store", "ll_load"}
    )


def test_auto_does_not_poll_memory_of_other_ranks():
    program = PROGRAMS["all_gather_loads"].make(2)
    text = str(tw.explain(program, 2, pass_configs=protocol("auto", "shared")))
    assert "shared  flag: ranks read memory of other ranks, which they would poll" in text


def test_a_ring_has_credits():
    text = str(tw.explain(shift(), 3, pass_configs=protocol()))
    assert "writers wait for a credit: the readers' last launch has finished" in text


def test_polls_prove_nothing_about_other_tensors():
    """A poll is no acquire, so memory with counters is reused after a credit."""

    @T.prim_func
    def program(X: T.Tensor((N,), "float32"), Y: T.Tensor((N,), "float32")):
        with T.Kernel(1, threads=32) as _:
            P = W.alloc_symmetric((N,), "float32")
            S = W.alloc_symmetric((N,), "float32")
            me = W.rank()
            tile = T.alloc_shared((N,), "float32")
            T.copy(X, tile)
            if me == 0:
                T.copy(tile, P[1, 0])
                T.copy(S[0, 0], tile)
            else:
                T.copy(P[1, 0], tile)
                T.copy(tile, S[0, 0])
            T.copy(tile, Y)

    both = {"tileweave.protocol": {"S": "ll", "P": "ll"}}
    reuse = tw.explain(program, 2, pass_configs=both).reuse
    assert all("two buffers" in reason for reason in reuse.values()), reuse
    reuse = tw.explain(program, 2, pass_configs=protocol()).reuse
    assert "credit" in reuse["P"] and "two buffers" in reuse["S"], reuse
    given = [{"X": np.arange(N, dtype=np.float32) + r} for r in range(2)]
    for configs in (both, protocol()):
        out = tw.simulate(program, 2, given, schedules=20, pass_configs=configs)
        assert all((o["Y"] == given[0]["X"]).all() for o in out)


@factory
def added(faulty, X: T.Tensor((N,), "float32"), Y: T.Tensor((N,), "float32")):
    with T.Kernel(1, threads=32) as _:
        S = W.alloc_symmetric((N,), "float32")
        for i in T.Parallel(N):
            S[W.rank(), i] = 0
        for i in T.Parallel(N):
            T.atomic_add(S[1 - W.rank(), i], X[i])
        for i in T.Parallel(N):
            Y[i] = S[W.rank(), i]


@T.prim_func
def put(X: T.Tensor((N,), "float32"), Y: T.Tensor((N,), "float32")):
    with T.Kernel(1, threads=32) as _:
        S = W.alloc_symmetric((N,), "float32")
        W.put_block(X[0], S[1 - W.rank(), 0], N)
        for i in T.Parallel(N):
            Y[i] = S[W.rank(), i]


@T.prim_func
def condition(X: T.Tensor((N,), "float32"), Y: T.Tensor((N,), "float32")):
    with T.Kernel(1, threads=32) as _:
        S = W.alloc_symmetric((N,), "float32")
        for i in T.Parallel(N):
            S[1 - W.rank(), i] = X[i]
        for i in T.Parallel(N):
            if S[W.rank(), i] > 0:
                Y[i] = 1


@T.prim_func
def vector(X: T.Tensor((N,), "float32"), Y: T.Tensor((N,), "float32")):
    with T.Kernel(1, threads=32) as _:
        S = W.alloc_symmetric((N,), "float32")
        for i in T.Parallel(N):
            S[1 - W.rank(), i] = X[i]
        for i in T.Parallel(N // 4):
            Y[T.Ramp(4 * i, 1, 4)] = S[W.rank(), T.Ramp(4 * i, 1, 4)]


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        (shift(symmetric=True), "the caller accesses it; expected W.alloc_symmetric"),
        (shift("float64"), "its elements have type float64, which does not divide the 4 bytes"),
        (added(True), "words with flags cannot be added to"),
        (put, "W.put_block is not an access of single threads"),
        (condition, "a condition or the range of a loop reads it"),
        (vector, "the statement accesses a vector, not one element"),
    ],
)
def test_refused(program, reason):
    def grouped(name):
        func, _ = passes.split_options(program, protocol(name))
        return passes.run_group(tvm.IRModule({"program": func}), 2, 1 << 40)

    expected = "expected another tensor, or 'flag' or 'auto'"
    with pytest.raises(tw.LanguageError, match=re.escape(reason)) as error:
        grouped("ll")
    assert expected in str(error.value), str(error.value)
    assert "test_protocol.py" in str(error.value) or not RECORDS_LINES
    text = str(tw.explain(program, 2, pass_configs=protocol("auto")))
    assert f"S  flag: {reason.split(';')[0]}" in text


@needs_bulk_copies
def test_error_of_inserted_words():
    """An error names the access for which words are stored."""
    n, dtype = 64, "float16"

    @T.prim_func
    def program(B: T.Tensor((2, n, n), dtype), Y: T.Tensor((n, n), "float32")):
        with T.Kernel(1, threads=128):
            S = W.alloc_symmetric((n, n), dtype)
            own = T.alloc_shared((n, n), dtype)
            total = T.alloc_fragment((n, n), "float32")
            T.clear(total)
            for k in T.Pipelined(2, num_stages=2):
                T.copy(B[k, 0, 0], own)
                T.gemm(own, own, total, transpose_B=True)
            T.copy(own, S[1 - W.rank(), 0, 0])
            T.copy(S[W.rank(), 0, 0], total)
            T.copy(total, Y)

    access = "the store of words that the compiler inserts for the write of S"
    with pytest.raises(tw.LanguageError, match=f"^{access}: uses own, of which T.Pipelined"):
        tw.emit(program, world_size=2, pass_configs=protocol())


def test_unknown_tensor():
    with pytest.raises(tw.LanguageError, match="'R' is no tensor that ranks exchange"):
        tw.explain(shift(), 2, pass_configs=protocol(tensor="R"))


def test_unknown_protocol():
    with pytest.raises(tw.TileWeaveError, match="expected a dict, tensor name -> 'flag' or 'll'"):
        tw.explain(shift(), 2, pass_configs=protocol("simple"))


@pytest.mark.long
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("program", [shift(), elements], ids=["copies", "elements"])
def test_every_mutant_is_accounted_for(program, ranks):
    plan = tw.Plan.of_program(program).with_configs(protocol())
    given = inputs(str(program.buffer_map[program.params[0]].dtype), ranks)
    mutants = tw.mutate(plan, ranks, given, 5)
    assert {m.op for m in mutants if m.verdict == "killed"} >= {"ll_st", "ll_ld"}
    assert not [m for m in mutants if m.op in ("ll_st", "ll_ld") and m.verdict != "killed"]
    assert [(m.line, m.name, m.verdict, m.why) for m in mutants if not m.is_accounted_for] == []


@pytest.mark.parametrize(("stride", "is_vector"), [(68, True), (65, False)])
def test_rows_that_are_not_aligned_are_loaded_by_elements(stride, is_vector):
    @T.prim_func
    def program(
        X: T.StridedTensor((4, 64), (stride, 1), "float32"), Y: T.Tensor((4, 64), "float32")
    ):
        with T.Kernel(4, threads=32) as row:
            S = W.alloc_symmetric((4, 64), "float32")
            T.copy(X[row, 0:64], S[1 - W.rank(), row, 0:64])
            T.copy(S[W.rank(), row, 0:64], Y[row, 0:64])

    source = tw.emit(program, world_size=2, pass_configs={"tileweave.protocol": {"S": "ll"}})
    assert ("tw::bits(*(float2*)(X" in source) == is_vector
