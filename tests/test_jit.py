"""tw.jit takes programs in both of TileLang's styles."""

import copy
import functools
import sys
import types

import pytest
import tilelang.language as T
import torch

import tileweave as tw
from tests.groups import open_sessions
from tileweave import language as W
from tileweave.runtime import compiler
from tileweave.runtime.kernel import kernel

tw_jit = sys.modules["tileweave.jit"]


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
    from tileweave.runtime.kernel.kernel import tensors_of

    tensor = object.__new__(tw.SymmetricTensor)
    tensor.all = torch.zeros(4, 8)
    positional, named = tensors_of((tensor, 3), {"x": tensor, "y": 2})
    assert positional[0] is tensor.all and named["x"] is tensor.all
    assert (positional[1], named["y"]) == (3, 2)


@T.prim_func
def taken(X: W.Symmetric((8,), "float32"), n: T.int32, Y: T.Tensor((8,), "float32")):
    with T.Kernel(1, threads=32):
        Y[n] = X[W.rank(), 0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"out_idx": [5]}, r"compile: out_idx=\[5\]; expected -1, 2: each call allocates a"),
        ({"out_idx": -4}, "compile: out_idx=-4; expected -1, 2"),
        ({"out_idx": 0}, "compile: out_idx=0; expected -1, 2"),  # symmetric
        ({"out_idx": (1, 2)}, r"compile: out_idx=\(1, 2\); expected -1, 2"),  # a scalar
        ({"out_idx": True}, "compile: out_idx=True; expected -1, 2"),
        ({"out_idx": "Y"}, "compile: out_idx='Y'; expected -1, 2"),
        ({"pass_configs": 3}, "pass_configs=3; expected a dict"),
        ({"pass_configs": ["tl.x"]}, r"pass_configs=\['tl.x'\]; expected a dict"),
        ({"pass_configs": {3: 1}}, r"pass_configs=\{3: 1\}; expected a dict"),
        (
            {"pass_configs": {"tl.config_index_bitwidth": 1 << 99}},
            "pass_configs: tl.config_index_bitwidth=.* too large",
        ),
        ({"out_indices": 2}, "compile: out_indices=2; expected out_idx, execution_backend, target"),
    ],
)
def test_options_that_are_refused(options, message, monkeypatch):
    monkeypatch.setattr(compiler, "init", lambda group: None)
    with pytest.raises(tw.TileWeaveError, match=message):
        tw.compile(taken, **options)


def up(monkeypatch):
    """A session with the attributes that calls of kernels use."""
    watchdog = types.SimpleNamespace(raise_if_deadlocked=lambda: None)
    session = types.SimpleNamespace(watchdog=watchdog, name="")
    open_sessions(monkeypatch, session)
    monkeypatch.setattr(kernel, "current_call_stream", lambda session: None)
    return session


def made(result_idx=(), implicit=(), session=None):
    """Return a kernel of ``taken`` that returns the arguments for TileLang's kernel."""
    adapter = types.SimpleNamespace(result_idx=list(result_idx))
    actual = kernel.Kernel(types.SimpleNamespace(adapter=adapter), taken, dict(implicit), session)
    actual.__dict__["launch"] = lambda *args: args
    return actual


def test_kernels_take_arguments_by_name(monkeypatch):
    """TileLang's kernel takes them in order only, and implicit memory comes last."""
    up(monkeypatch)
    X, Y, counter = (torch.zeros(n) for n in (8, 8, 1))
    both = (X, 3, Y)
    for call in (lambda f: f(X, 3, Y), lambda f: f(Y=Y, X=X, n=3), lambda f: f(X, Y=Y, n=3)):
        assert call(made()) == both
        assert call(made(implicit={"counter": counter})) == (*both, counter)
    assert made([2])(n=3, X=X) == (X, 3)
    for call in (lambda f: f(X, 3), lambda f: f(X, 3, Y, 4), lambda f: f(X, 3, Z=Y)):
        with pytest.raises(tw.TileWeaveError, match=r"^taken: .*; expected \(X, n, Y\)$"):
            call(made(implicit={"counter": counter}))


@T.prim_func
def local(X: T.Tensor((8,), "float32")):
    with T.Kernel(1, threads=32):
        X[0] = 0.0


@T.prim_func
def shares(X: W.Symmetric((8,), "float32")):
    with T.Kernel(1, threads=32):
        X[0, 0] = 0.0


@T.prim_func
def waits(X: T.Tensor((8,), "uint32")):
    with T.Kernel(1, threads=32):
        W.wait_eq(X[0], 1)


@T.prim_func
def meets(X: T.Tensor((8,), "float32")):
    with T.Kernel(1, threads=32):
        W.sync_grid()


@pytest.mark.parametrize(
    ("program", "implicit", "communicates"),
    [
        (local, (), False),
        (local, {"counter": torch.zeros(1)}, True),
        (shares, (), True),
        (waits, (), False),
        (meets, (), True),
    ],
)
def test_kernels_that_communicate_are_ordered(monkeypatch, program, implicit, communicates):
    """Others may overlap, and wait for each other by tensors of the caller."""
    session, log = up(monkeypatch), []
    monkeypatch.setattr(kernel, "current_call_stream", lambda session: "stream")
    monkeypatch.setattr(kernel, "begin_call", lambda _, stream: log.append(stream) or stream)
    monkeypatch.setattr(kernel, "end_call", lambda stream: log.append("end"))
    stock = types.SimpleNamespace(adapter=types.SimpleNamespace(result_idx=[]))
    called = kernel.Kernel(stock, program, dict(implicit), session)
    called.__dict__["launch"] = lambda *args: log.append("launch")
    called(torch.zeros(8))
    assert log == (["stream", "launch", "end"] if communicates else [None, "launch"])


def test_kernels_of_an_earlier_session_are_not_launched(monkeypatch):
    """Their symmetric memory is unmapped."""
    session, X = up(monkeypatch), torch.zeros(8)
    assert made(session=session)(X, 3, X) == (X, 3, X)
    with pytest.raises(tw.TileWeaveError, match=r"^taken: compiled before tw\.finalize; expected "):
        made(session=types.SimpleNamespace(name=""))(X, 3, X)


def test_a_new_session_compiles_again(monkeypatch):
    sessions, compiled = [None, object()], []

    @tw.jit
    def make(n):
        return taken

    def compiles(func, **options):
        compiled.append(func)
        sessions[0] = sessions[0] or object()
        return object()

    monkeypatch.setattr(tw_jit, "compile", compiles)
    monkeypatch.setattr(tw_jit, "joined", lambda: sessions[0])
    first = make(1)  # opens a session
    assert make(1) is first and len(compiled) == 1
    sessions.reverse()
    second = make(1)
    assert second is not first and make(1) is second and len(compiled) == 2
    assert len(make.par_compile([(1,), {"n": 2}])) == 2 and len(compiled) == 4


def test_a_folder_for_debugging_is_refused():
    with pytest.raises(tw.TileWeaveError, match="jit: debug_root_path='here'; expected none"):
        tw.jit(debug_root_path="here")


def test_kernels_are_copied_and_looked_at_without_end():
    """Missing attributes are looked up in TileLang's kernel, which a copy has not at first."""
    actual = made()
    assert copy.copy(actual).kernel is actual.kernel
    assert not hasattr(actual, "nothing_of_the_kind")


class Holder:
    def made(self, jit):
        @jit
        def lazy(n):
            """A text that
            begins in the first column."""
            return taken

        return lazy


def test_decorated_functions_may_have_texts_in_the_first_column():
    assert Holder().made(tw.jit).get_tir(4).same_as(taken)


@pytest.mark.parametrize("function", [3, taken, functools.partial(up)])
def test_what_is_no_function_is_refused(function):
    with pytest.raises(tw.TileWeaveError, match=r"(?s)^jit: .*; expected a function"):
        tw.jit(function)
