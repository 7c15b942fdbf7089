"""A program may use names that C++, CUDA or the headers reserve."""

import pytest
import tilelang.language as T

import tileweave as tw
from tileweave import language as W
from tileweave.codegen.headers import INCLUDE_DIR
from tileweave.codegen.reserved_names import RESERVED

UNORDERED = {"tileweave.verify": "off"}
F32 = "float32"


@T.prim_func
def keywords(
    new: T.Tensor((64,), F32), delete: W.Symmetric((64,), F32), this: W.Symmetric((2,), "uint32")
):
    with T.Kernel(2, threads=64) as template:
        tw_tile = T.alloc_shared((64,), F32)
        namespace = T.alloc_fragment((64,), F32)
        auto = T.alloc_var("int32")
        auto = W.rank()
        for signed in T.serial(auto + 1):
            virtual = new[template] * signed
            T.copy(new, tw_tile)
            T.copy(tw_tile, namespace)
            for int in T.Parallel(64):  # noqa: A001
                namespace[int] += virtual
            T.copy(namespace, delete[auto, 0])
        W.signal(this[auto, template])


@T.prim_func
def headers(threadIdx: T.Tensor((64,), F32), tw: W.Symmetric((64,), F32)):
    with T.Kernel(1, threads=64):
        tl = T.alloc_shared((64,), F32)
        max = T.alloc_fragment((64,), F32)  # noqa: A001
        T.copy(threadIdx, tl)
        T.copy(tl, max)
        for half_t in T.Parallel(64):
            max[half_t] = T.max(max[half_t], 0)
        T.copy(max, tw[W.rank(), 0])


@pytest.mark.parametrize("program", [keywords, headers], ids=["keywords", "headers"])
def test_nvcc_compiles_a_program_that_uses_reserved_names(program):
    before = program.script()
    assert ".visible .entry" in tw.emit(program, stage="ptx", pass_configs=UNORDERED)
    assert program.script() == before


def test_a_renamed_variable_stays_distinct_from_another_one_with_its_new_name():
    @T.prim_func
    def program(new: T.Tensor((64,), F32), new_: W.Symmetric((64,), F32)):
        with T.Kernel(1, threads=64):
            for i in T.Parallel(64):
                new_[W.rank(), i] = new[i]

    assert ".visible .entry" in tw.emit(program, stage="ptx", pass_configs=UNORDERED)


def test_kernels_that_use_the_same_reserved_name_all_remain():
    @T.prim_func
    def program(new: T.Tensor((64,), F32), S: W.Symmetric((64,), F32), R: W.Symmetric((64,), F32)):
        with T.Kernel(1, threads=64):
            for i in T.Parallel(64):
                S[W.rank(), i] = new[i]
        with T.Kernel(1, threads=64):
            for i in T.Parallel(64):
                R[W.rank(), i] = new[i]

    cuda = tw.emit(program, pass_configs=UNORDERED)
    assert cuda.count("__global__ void __launch_bounds__") == 2


def test_other_names_stay():
    @T.prim_func
    def program(news: T.Tensor((64,), F32), S: W.Symmetric((64,), F32)):
        with T.Kernel(1, threads=64):
            for i in T.Parallel(64):
                S[W.rank(), i] = news[i]

    assert "__restrict__ news," in tw.emit(program, pass_configs=UNORDERED)


def test_the_namespaces_of_our_headers_are_reserved():
    text = "".join(p.read_text() for p in INCLUDE_DIR.rglob("*.cuh"))
    declared = {line.split()[1] for line in text.splitlines() if line.startswith("namespace ")}
    assert {"tw", "tl"} <= declared & RESERVED
