"""tw.jit takes programs in both of TileLang's styles."""

import pytest
import tilelang.language as T
import torch

import tileweave as tw
from tileweave import language as W


@tw.jit
def eager(X, Y):
    N = T.const("N")
    X: T.Tensor[[N], T.float32]
    Y: W.Symmetric[[N], T.float32]
    with T.Kernel(1, threads=128):
        for i in T.Parallel(N):
            Y[W.rank(), i] = X[i]


@tw.jit(out_idx=[-1])
def lazy(n):
    @T.prim_func
    def program(X: W.Symmetric((n,), "float32"), Y: T.Tensor((n,), "float32")):
        with T.Kernel(1, threads=128):
            for i in T.Parallel(n):
                Y[i] = X[W.rank(), i]

    return program


def test_eager_style_takes_symmetric_tensors():
    tensors = torch.zeros(64), torch.zeros(4, 64)
    eager.initialize_jit_mode(*tensors)
    program = eager.get_tir(*tensors)
    assert eager.mode == "eager"
    assert [str(b.shape) for b in program.buffer_map.values()] == ["(64,)", "(world_size, 64)"]


def test_lazy_style_keeps_its_options():
    program = lazy.get_tir(32)
    assert (lazy.mode, lazy.out_idx) == ("lazy", [-1])
    assert str(next(iter(program.buffer_map.values())).shape) == "(world_size, 32)"


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_calling_without_a_gpu_says_so():
    with pytest.raises(tw.TileWeaveError, match="sees no CUDA device"):
        lazy(32)


def test_backends_without_host_code_are_refused():
    program = lazy.get_tir(32)
    with pytest.raises(tw.TileWeaveError, match=r"execution_backend='cython' .* expected 'auto'"):
        tw.compile(program, execution_backend="cython")


def test_symmetric_tensors_are_passed_as_the_tensors_of_all_ranks():
    from tileweave.runtime.kernel import tensors_of

    tensor = object.__new__(tw.SymmetricTensor)
    tensor.all = torch.zeros(4, 8)
    positional, named = tensors_of((tensor, 3), {"x": tensor, "y": 2})
    assert positional[0] is tensor.all and named["x"] is tensor.all
    assert (positional[1], named["y"]) == (3, 2)
