"""Refusals, copies and caches of operators before anything is launched."""

from __future__ import annotations

import re
import types
import warnings
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

import tileweave as tw
from tests.groups import on_nodes, one_rank
from tileweave import ops
from tileweave.ops.attention.backward import sp_attention_backward
from tileweave.ops.autotune.trial import Trial, problem_of
from tileweave.ops.collectives import collective as exchange
from tileweave.ops.collectives import transport
from tileweave.ops.core import checks, groups
from tileweave.ops.core import compiled as op_cache
from tileweave.ops.core.compiled import OpCache
from tileweave.ops.core.epilogue import Epilogue
from tileweave.ops.core.problem import Problem, checked_problem
from tileweave.ops.core.registry import OPERATORS
from tileweave.ops.core.tiles import LARGE, Choice
from tileweave.ops.gemm import gemm_operator
from tileweave.ops.gemm.all_gather_matmul import AllGatherMatmul
from tileweave.ops.gemm.matmul_all_reduce import MatmulAllReduce
from tileweave.ops.gemm.matmul_reduce_scatter import MatmulReduceScatter
from tileweave.runtime.host.group import Group
from tileweave.runtime.host.heap import HeapExhausted

BF16 = torch.bfloat16
WAY = Choice("stores", LARGE)


def ones(*shape, dtype=torch.float32, device="cpu"):
    return torch.ones(shape, dtype=dtype, device=device)


FP8 = torch.float8_e4m3fn
HALVES = ones(16, 32).to(FP8), ones(48, 32).to(FP8).t()
"""Operands of fp8, with what they need below."""
SCALES = {"scale_a": ones(1), "scale_b": ones(1)}
QKV = [ones(1, 4, 2, 8) for _ in "qkv"]
GATHER, SCATTER, REDUCE = ops.all_gather_matmul, ops.matmul_reduce_scatter, ops.matmul_all_reduce
REFUSED = [
    (GATHER, (ones(4), ones(4, 4)), {}, "a_shard has shape (4,); expected two positive extents"),
    (GATHER, (ones(4, 0), ones(0, 4)), {}, "a_shard has shape (4, 0); expected two positive"),
    (SCATTER, (ones(4, 8), ones(4, 8)), {},
     "b has shape (4, 8); expected (8, N) for a of shape (4, 8)"),
    (SCATTER, (ones(4, 8), ones(8, 8, dtype=BF16)), {},
     "b is of torch.bfloat16; expected torch.float32 as a"),
    (GATHER, (ones(4, 8, dtype=torch.int32), ones(8, 8, dtype=torch.int32)), {},
     "a_shard is of torch.int32; expected a floating-point type"),
    (GATHER, (ones(4, 8), ones(8, 8, device="meta")), {},
     "b is on meta; expected cpu as a_shard"),
    (GATHER, (ones(4, 8), ones(8, 8)), {"out": ones(4, 6)},
     "out has shape (4, 6); expected (4, 8)"),
    (SCATTER, (ones(4, 8), ones(8, 8)), {"out": ones(4, 8, dtype=BF16)},
     "out is of torch.bfloat16; expected torch.float32 as a"),
    (GATHER, (ones(4, 8), ones(8, 6)), {"bias": ones(1, 6)},
     "bias has shape (1, 6); expected (6,)"),
    (SCATTER, (ones(4, 8), ones(8, 6)), {"bias": ones(6, dtype=BF16)},
     "bias is of torch.bfloat16; expected torch.float32 as a"),
    (REDUCE, (ones(4, 8), ones(8, 6)), {"bias": ones(6, device="meta")},
     "bias is on meta; expected cpu as a"),
    (SCATTER, (ones(4, 8), ones(8, 6)), {"out": ones(4, 6), "bias": ones(6).requires_grad_()},
     "out is given and an argument requires a gradient"),
    (SCATTER, (ones(4, 8), ones(8, 6)), {"out": ones(6, 4).t()},
     "out has strides (1, 4) and begins at"),
    (GATHER, (ones(4, 8), ones(8, 8)), {"strategy": "fast"},
     "strategy='fast'; expected 'auto', 'fused', 'nccl'"),
    (GATHER, (ones(4, 8), ones(8, 8)), {"strategy": "fused"},
     "strategy='fused', but the tensors are on cpu; expected cuda"),
    (REDUCE, (ones(4, 8), ones(4, 8)), {},
     "b has shape (4, 8); expected (8, N) for a of shape (4, 8)"),
    (REDUCE, (ones(4, 8), ones(8, 6)), {"out": ones(4, 8)},
     "out has shape (4, 8); expected (4, 6)"),
    (REDUCE, (ones(4, 8), ones(8, 8)), {"strategy": "fused"},
     "strategy='fused', but the tensors are on cpu; expected cuda"),
    (REDUCE, (ones(4, 8), ones(8, 8)), {"strategy": "two_shot"},
     "strategy='two_shot'; expected 'auto', 'fused', 'nccl'"),
    (REDUCE, (ones(4, 8).requires_grad_(), ones(8, 8)), {"out": ones(4, 8)},
     "out is given and an argument requires a gradient"),
    (GATHER, HALVES, {"scale_a": ones(1)},
     "scale_b is None; expected one float32 for a_shard of torch.float8_e4m3fn"),
    (SCATTER, HALVES, SCALES | {"scale_a": ones(16)}, "scale_a has shape (16,); expected one elem"),
    (REDUCE, HALVES, SCALES | {"scale_b": ones(1, dtype=torch.float64)},
     "scale_b is of torch.float64; expected torch.float32"),
    (GATHER, HALVES, SCALES | {"scale_a": ones(1, device="meta")},
     "scale_a is on meta; expected cpu as a_shard"),
    (SCATTER, (ones(4, 8), ones(8, 8)), SCALES, "scale_a is given; expected none for a of torch.f"),
    (SCATTER, (HALVES[0], ones(32, 48).to(FP8)), SCALES,
     "b is of torch.float8_e4m3fn and (K, N) in memory; expected the transpose of a row-major (N,"),
    (GATHER, (HALVES[0][:, :24].contiguous(), ones(48, 24).to(FP8).t()), SCALES,
     "K=24; expected a multiple of 16 for torch.float8_e4m3fn"),
    (REDUCE, (HALVES[0], ones(40, 32).to(FP8).t()), SCALES,
     "N=40; expected a multiple of 16 for torch.float8_e4m3fn"),
    (SCATTER, HALVES, SCALES | {"out_dtype": torch.float32},
     "out_dtype=torch.float32; expected torch.bfloat16 or torch.float16 for a of torch.float8_e4m"),
    (GATHER, (ones(4, 8), ones(8, 8)), {"out_dtype": BF16},
     "out_dtype=torch.bfloat16; expected torch.float32 as a_shard"),
    (SCATTER, HALVES, SCALES | {"bias": ones(48, dtype=torch.float16)},
     "bias is of torch.float16; expected torch.bfloat16"),
    (SCATTER, HALVES, SCALES | {"out": ones(16, 48, dtype=torch.float16)},
     "out is of torch.float16; expected torch.bfloat16"),
    (GATHER, tuple(x.to(torch.float8_e5m2) for x in HALVES), SCALES,
     "a_shard is of torch.float8_e5m2; expected torch.float8_e4m3fn, or a type of 16 bits or more"),
    (REDUCE, HALVES, SCALES | {"bias": ones(48, dtype=BF16).requires_grad_()},
     "the operands are of torch.float8_e4m3fn and an argument requires a gradient; expected one"),
    (GATHER, (ones(4, 8), ones(8, 8)), {"group": 3}, "group=3; expected None, a ProcessGroup"),
    (GATHER, (ones(4, 8), ones(8, 8)), {"group": "tp"}, "group='tp': "),
    (GATHER, (ones(4, 8).requires_grad_(), ones(8, 8)), {"out": ones(4, 8)},
     "out is given and an argument requires a gradient"),
]  # fmt: skip


EXCHANGES_REFUSED = [
    (ops.all_gather, (ones(),), {}, "x has shape (); expected at least 1 positive extents"),
    (ops.all_reduce, (ones(4, 0),), {}, "x has shape (4, 0); expected positive extents"),
    (ops.all_gather, (ones(4, 8),), {"out": ones(4, 6)}, "out has shape (4, 6); expected (4, 8)"),
    (ops.all_to_all, (ones(4, 8),), {"out": ones(4, 8, dtype=BF16)},
     "out is of torch.bfloat16; expected torch.float32 as x"),
    (ops.all_to_all, (ones(4, 8), 2, 0), {},
     "scatter_dim=2; expected an axis of x of shape (4, 8)"),
    (ops.all_to_all, (ones(4, 8), 0, -3), {},
     "gather_dim=-3; expected an axis of x of shape (4, 8)"),
    (ops.all_reduce, (ones(4, 8),), {"transport": "fast"},
     "transport='fast'; expected 'auto', 'copy_engine', 'ldst', 'll', 'nccl'"),
    (ops.reduce_scatter, (ones(4, 8),), {"transport": "ldst"},
     "transport='ldst', but the tensors are on cpu; expected cuda"),
    (ops.reduce_scatter, (ones(4, 8).requires_grad_(),), {"out": ones(4, 8)},
     "out is given and an argument requires a gradient"),
]  # fmt: skip


@pytest.mark.parametrize(("operator", "args", "options", "message"), [*REFUSED, *EXCHANGES_REFUSED])
def test_refused(operator, args, options, message):
    with pytest.raises(tw.TileWeaveError) as error:
        operator(*args, **options)
    assert message in str(error.value)
    if "group" not in options:
        assert str(error.value).startswith(operator.__name__)


def test_rows_that_ranks_cannot_share():
    with pytest.raises(tw.TileWeaveError, match=re.escape(
        "a has shape (10, 8); expected a multiple of 4 rows for 4 ranks"
    )):  # fmt: skip
        checked_problem("matmul_reduce_scatter", ones(10, 8), ones(8, 8), 4)


def test_axes_that_ranks_cannot_share():
    with pytest.raises(tw.TileWeaveError, match=re.escape(
        "all_to_all: x has shape (8, 6); expected a multiple of 4 along axis 1 for 4 ranks"
    )):  # fmt: skip
        exchange.checked_problem("all_to_all", ones(8, 6), None, 4, (-1, 0))


@pytest.mark.parametrize(
    ("op", "shape", "dtype", "asked", "name", "reason"),
    [
        ("all_gather", (3,), torch.int32, "auto", "ll", "the fastest"),
        ("all_to_all", (1 << 26,), BF16, "auto", "ldst", "the fastest"),
        ("all_to_all", (1 << 28,), BF16, "auto", "ldst", "the fastest"),
        ("all_gather", (1 << 26,), BF16, "auto", "ldst", "the fastest"),
        ("all_gather", (1 << 27,), BF16, "auto", "copy_engine", "the fastest"),
        ("all_reduce", ((1 << 27) + 2,), BF16, "auto", "ldst", "the fastest"),
        ("all_to_all", (4,), torch.int32, "copy_engine", None,
         "but all_to_all has no program by copy engines; expected 'ldst', 'll', 'nccl'"),
        ("reduce_scatter", (8,), torch.int32, "auto", "nccl", "x is of torch.int32; expected torc"),
        ("reduce_scatter", (8,), torch.int32, "ldst", None, "but x is of torch.int32; expected"),
        ("all_reduce", (6,), BF16, "copy_engine", None,
         "but x has 6 elements; expected a multiple of 4"),
        ("all_reduce", (6,), BF16, "auto", "ll", "the fastest"),
    ],
)  # fmt: skip
def test_transports(monkeypatch, op, shape, dtype, asked, name, reason):
    monkeypatch.setattr(transport, "obstacle_of_ranks", lambda *_: None)
    group = Group(0, 4, 0, torch.device("cpu"), None, None)
    x, axes = torch.empty(shape, dtype=dtype, device="meta"), (0, 0) if op == "all_to_all" else ()
    problem = exchange.checked_problem(op, x, None, 4, axes)

    def found():
        return transport.choose_transport(
            asked, problem, torch.device("cuda", 0), group, OPERATORS[op]
        )

    if name:
        assert (found().name, found().reason[: len(reason)]) == (name, reason)
    else:
        with pytest.raises(tw.TileWeaveError, match=re.escape(reason)):
            found()


@pytest.mark.parametrize("gpus", ["abcd", "abab", ""])
def test_no_copies_behind_a_kernel_of_the_same_gpu(monkeypatch, gpus):
    cpu = torch.device("cpu")
    group = Group(0, 4, 0, cpu, None, None, tuple(gpus))
    monkeypatch.setattr(transport, "obstacle_of_ranks", lambda *_: None)
    x = torch.empty(1 << 27, dtype=BF16, device="meta")
    problem = exchange.checked_problem("all_gather", x, None, 4, ())
    made = OPERATORS["all_gather"]
    taken = transport.choose_transport("auto", problem, cpu, group, made).name
    assert taken == ("ldst" if gpus == "abab" else "copy_engine")
    if gpus == "abab":
        with pytest.raises(tw.TileWeaveError, match=r"ranks share a GPU, .*; expected a GPU for e"):
            transport.choose_transport("copy_engine", problem, cpu, group, made)


@pytest.mark.parametrize(("dtype", "taken"), [(BF16, "ldst"), (torch.float64, "nccl")])
def test_what_is_gathered_of_any_type_has_a_gradient(monkeypatch, dtype, taken):
    """The gradient is a sum, which the fused collectives support for some types only."""
    requests = []
    monkeypatch.setattr(
        torch.ops.tileweave, "reduce_scatter", lambda *given: requests.append(given)
    )
    grad = ones(4, dtype=dtype)
    OPERATORS["all_gather"].gradient(grad, "", "ldst")
    assert requests == [(grad, "", taken)]


def test_transport_of():
    transport_name = ops.transport_of(ops.all_to_all, ones(4, 8), 1, 0)
    assert str(transport_name) == "nccl: the tensors are on cpu; expected cuda"
    assert ops.transport_of("all_to_all", ones(4, 8)) == transport_name


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (lambda: ops.transport_of(ops.matmul_all_reduce, ones(4, 8)),
         "transport_of: op=matmul_all_reduce; expected all_gather or"),
        (lambda: ops.strategy_of(ops.all_gather, ones(4, 8), ones(8, 4)),
         "strategy_of: op=all_gather; expected all_gather_matmul or"),
        (lambda: ops.all_reduce(1.0), "all_reduce: x=1.0; expected a dense torch.Tensor"),
        (lambda: ops.all_gather(torch.eye(3).to_sparse()),
         "all_gather: x has layout torch.sparse_coo; expected a dense torch.Tensor"),
        (lambda: ops.all_gather([0] * 10**6), "x=[0, 0, 0, 0, 0, 0, ...]; expected a dense torch"),
        (lambda: ops.all_reduce(ones(4), out=[4]), "all_reduce: out=[4]; expected a dense torch."),
        (lambda: GATHER(None, ones(8, 4)), "a_shard=None; expected a dense torch.Tensor"),
        (lambda: GATHER(ones(4, 8), [1], return_gathered=True), "b=[1]; expected a dense torch."),
        (lambda: SCATTER(ones(4, 8).to_sparse(), ones(8, 4)), "expected a dense torch.Tensor"),
        (lambda: REDUCE(ones(4, 8), ones(8, 4), bias=1.0), "bias=1.0; expected a dense torch.Te"),
        (lambda: REDUCE(ones(4, 8), ones(8, 4), scale_a=2), "scale_a=2; expected a dense torch.T"),
        (lambda: REDUCE(ones(4, 8), ones(8, 4), out=3), "out=3; expected a dense torch.Tensor"),
        (lambda: ops.strategy_of(REDUCE, ones(4, 8), None), "b=None; expected a dense torch.Tens"),
        (lambda: ops.transport_of(ops.all_gather, None), "x=None; expected a dense torch.Tensor"),
        (lambda: ops.transport_of(ops.all_to_all, ones(4, 8), 1),
         "all_to_all: options=(1,); expected (scatter_dim, gather_dim)"),
        (lambda: ops.transport_of(ops.all_gather, ones(4, 8), 1), "options=(1,); expected none"),
        (lambda: ops.all_to_all(ones(4, 8), "rows"), "scatter_dim='rows'; expected an axis of x"),
        (lambda: ops.all_to_all(ones(4, 8), 0, 0.5), "gather_dim=0.5; expected an axis of x of s"),
        (lambda: ops.sp_attention(*QKV[:2], None, causal=True), "v=None; expected a dense torch."),
        (lambda: ops.sp_attention(*QKV, causal=True, cu_seqlens_q=[0, 4], cu_seqlens_k=[0, 4]),
         "cu_seqlens_q=[0, 4]; expected a dense torch.Tensor"),
        (lambda: ops.ulysses_attention(None, *QKV[1:], causal=True), "q=None; expected a dense t"),
        (lambda: ops.SequenceParallelAttention(causal=True, reference=True)(0, *QKV[1:]),
         "sp_attention: q=0; expected a dense torch.Tensor"),
        (lambda: sp_attention_backward(*QKV, *QKV[:2], None, causal=True), "lse=None; expected a"),
    ],
)  # fmt: skip
def test_what_is_no_operator_or_no_tensor(asked, said):
    with pytest.raises(tw.TileWeaveError, match=re.escape(said)):
        asked()


@pytest.mark.parametrize("operator", [GATHER, SCATTER, REDUCE])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_out_is_memory_of_its_own(operator, place):
    """Otherwise a part of the result would be used as an operand."""
    a, b, bias = given = ones(8, 8), ones(8, 8), ones(8, 8)[2]
    out = (a, b, bias.as_strided((8, 8), (8, 1), 0))[place]
    name = ("a_shard" if operator is GATHER else "a", "b", "bias")[place]
    said = f"^{operator.__name__}: out shares memory with {name}; expected memory of its own"
    with pytest.raises(tw.TileWeaveError, match=said):
        operator(a, b, bias=bias, out=out)
    assert all(torch.equal(x, torch.ones_like(x)) for x in given)
    beside = ones(3, 8, 8)
    right = operator(beside[0], beside[2].t(), bias=bias)
    assert torch.equal(operator(beside[0], beside[2].t(), bias=bias, out=beside[1]), right)


def test_parts_change_their_places_between_two_tensors():
    """Also if an equal call was right before."""
    x = ones(4, 8)
    for out in (ones(4, 8), x[:]):
        overlaps = out.data_ptr() == x.data_ptr()
        with pytest.raises(tw.TileWeaveError) if overlaps else nullcontext() as said:
            assert torch.equal(ops.all_to_all(x, out=out), x)
    assert "all_to_all: out shares memory with x; expected memory of its own" in str(said.value)
    assert ops.all_gather(x, out=x) is x


def test_any_rows_are_reduced():
    assert checked_problem("matmul_all_reduce", ones(10, 8), ones(8, 6), 4).shape == (10, 6)


def test_processes_that_have_not_met(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(tw.TileWeaveError, match=r"group=None: the processes have not met; expec"):
        GATHER(ones(4, 8), ones(8, 8))


@pytest.mark.parametrize(
    ("a", "b", "names"),
    [
        (ones(8, 4).t(), ones(8, 6), ["a"]),
        (ones(4, 8), ones(8, 12)[:, ::2], ["b"]),
        (ones(33)[1:].view(4, 8), ones(49)[1:].view(6, 8).t(), ["a", "b"]),
        (ones(4, 8), ones(8, 6), []),
        (ones(4, 8), ones(6, 8).t(), []),
    ],
)
@pytest.mark.parametrize("bias", [None, ones(6), ones(12)[::2]])
def test_gaps_are_copied_with_one_warning(a, b, bias, names, monkeypatch):
    names = names + ["bias"] * (bias is not None and not bias.is_contiguous())
    monkeypatch.setattr(checks, "_warned", set())
    for expected in (names, []):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            c = SCATTER(a, b, bias=bias)
        assert torch.equal(c, a @ b if bias is None else a @ b + bias)
        said = [str(w.message) for w in caught if "is copied" in str(w.message)]
        assert [re.match(r"matmul_reduce_scatter: (\w+) of shape", s)[1] for s in said] == expected


def test_memory_order_of_b():
    def transposed(b):
        return checked_problem("all_gather_matmul", ones(4, 8), b, 2).transposed

    assert not transposed(ones(8, 6))
    assert transposed(ones(6, 8).t())
    assert not transposed(ones(8, 12)[:, ::2])


def obstacle(monkeypatch, N=8, K=8, ranks=4, dtype=BF16, capability=(9, 0), group=None):
    """Return why a problem on a GPU is not fused."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    joined = Group(0, ranks, 0, torch.device("cuda", 0), None, None)
    problem = Problem("matmul_reduce_scatter", 7, N, K, ranks, dtype, dtype == FP8)
    gpu = torch.device("cuda", 0)
    unfused = gemm_operator.unfused_gemm_strategy("auto", problem, gpu, group or joined)
    return unfused or gemm_operator.preferred_strategy("auto", problem, None)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"N": 12}, "N=12; expected a multiple of 8"),
        ({"K": 100}, "K=100; expected a multiple of 8"),
        ({"dtype": FP8, "K": 24}, "N=8; expected a multiple of 16 for torch.float8_e4m3fn"),
        ({"ranks": 16}, "there are 16 ranks; expected at most 8"),
        ({"dtype": torch.float32}, "the tensors are of torch.float32; expected torch.bfloat16 or"),
        ({"capability": (8, 0)}, "cuda:0 is sm_80; expected sm_90"),
        ({"capability": (10, 0)}, "cuda:0 is sm_100; expected sm_90"),
        ({"group": on_nodes("rome", "oslo", "rome")},
         "its ranks are on the nodes rome, oslo; expected ranks of one node"),
    ],
)  # fmt: skip
def test_what_is_left_to_nccl(monkeypatch, options, reason):
    obstacle_found = obstacle(monkeypatch, **options)
    assert obstacle_found.name == "nccl" and obstacle_found.reason.startswith(reason)
    assert str(obstacle_found) == f"nccl: {obstacle_found.reason}"


def test_the_gpu_of_another_rank():
    group = Group(0, 2, 0, torch.device("cuda", 0), None, None)
    problem = Problem("matmul_reduce_scatter", 8, 8, 8, 2, BF16, False)
    with pytest.raises(tw.TileWeaveError, match="the tensors are on cuda:1; expected cuda:0, whic"):
        gemm_operator.unfused_gemm_strategy("auto", problem, torch.device("cuda", 1), group)


@pytest.mark.parametrize("dtype", [BF16, FP8])
def test_what_is_fused(monkeypatch, dtype):
    assert obstacle(monkeypatch, N=16, K=16, dtype=dtype).name == "fused"


def test_strategy_that_was_asked_for():
    assert ops.strategy_of(SCATTER, ones(4, 8), ones(8, 8), strategy="nccl") == (
        "nccl", "asked for",
    )  # fmt: skip


class Memory:
    """Operator that needs bytes of a heap of ten."""

    def __init__(self, free, nbytes):
        if nbytes > free[0]:
            raise HeapExhausted(
                f"symmetric: {nbytes} bytes; expected a larger TILEWEAVE_HEAP_BYTES"
            )
        self.heap, self.nbytes = free, nbytes
        free[0] -= nbytes

    def free(self):
        self.heap[0] += self.nbytes


def sized(nbytes):
    return Problem("all_gather_matmul", nbytes, 8, 8, 2, BF16, False)


@pytest.fixture
def heap(monkeypatch):
    """Return a function that prepares the operator for a problem of these bytes, in a
    heap of ten."""
    free, cache = [10], OpCache(types.SimpleNamespace(group=one_rank()))

    def take(nbytes, captured=False):
        monkeypatch.setattr(op_cache, "capturing", lambda: captured)
        return cache.operator(sized(nbytes), WAY, lambda p, *_: Memory(free, p.rows_per_rank))

    take.kept = lambda: [p.rows_per_rank for p, _ in cache.operators]
    take.free = cache.free
    return take


def test_operators_are_made_once(heap):
    assert heap(4) is heap(4) is not heap(5)


def test_those_not_used_for_longest_make_room(heap):
    for nbytes in (4, 5, 4, 2):
        heap(nbytes)
    assert heap.kept() == [4, 2]
    heap(9)
    assert heap.kept() == [9]


def test_those_in_a_graph_stay(heap):
    heap(6)
    heap(6, captured=True)
    with pytest.raises(HeapExhausted) as error:
        heap(5)
    assert str(error.value) == (
        "all_gather_matmul of (5, 8) x (8, 8) bfloat16: symmetric: 5 bytes; expected a larger "
        "TILEWEAVE_HEAP_BYTES"
    )
    assert heap.kept() == [6]


def test_all_but_those_in_a_graph_are_freed(heap):
    heap(3)
    heap(3, captured=True)
    heap(7)
    heap.free()
    assert heap.kept() == [3]
    assert heap(7).nbytes == 7


def test_a_graph_knows_only_what_was_called_before(heap):
    with pytest.raises(
        tw.TileWeaveError, match=r"not compiled yet; expected one call before it is"
    ):
        heap(4, captured=True)
    assert heap.kept() == []


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
def test_what_the_kernels_get_fits_their_declaration(transposed, biased):
    """Shapes of tensors, in the order of the parameters; kernels and plans check the rest."""
    ranks, share, N, K = 2, 16, 24, 8
    seen = []
    b = ones(N, K, dtype=BF16).t() if transposed else ones(K, N, dtype=BF16)
    parts, rows_of_all = (ones(ranks, ranks, share, n, dtype=BF16) for n in (N, K))
    identity = ones(64, 64, dtype=BF16)
    for op, make, rows, out, memory, given in (
        ("matmul_reduce_scatter", MatmulReduceScatter, share * ranks, share, [parts] * 2, identity),
        ("all_gather_matmul", AllGatherMatmul, share, share * ranks, [rows_of_all], None),
        ("matmul_all_reduce", MatmulAllReduce, share, share, [], None),
    ):
        problem = Problem(op, rows, N, K, ranks, BF16, transposed, biased)
        operator = object.__new__(make)
        operator.problem, operator.choice = problem, Choice("copy_engines", LARGE)
        operator.run = lambda *args: seen.append([tuple(x.shape) for x in args])
        operator.memory, operator.fixed_inputs = memory, () if given is None else (given,)
        bias = [ones(N, dtype=BF16)] * biased
        operator(ones(rows, K, dtype=BF16), b, *bias, ones(out, N, dtype=BF16))
    B = [(N, K) if transposed else (K, N), *[(N,)] * biased]
    assert seen == [
        [(ranks * share, K), *B, *[(ranks, ranks, share, N)] * 2, (64, 64), (share, N)],
        [(share, K), *B, (ranks, ranks, share, K), (ranks, share, N)],
        [(share, K), *B, (share, N)],
    ]


def test_name_of_groups():
    assert groups.name_of(None) == ""
    assert groups.name_of("tp") == "tp"


@pytest.mark.parametrize(
    "name",
    [
        "all_gather_matmul",
        "all_gather_matmul_rows",
        "matmul_reduce_scatter",
        "matmul_all_reduce",
    ],
)
@pytest.mark.parametrize("out", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_registered_as_torch_wants_it(name, out, biased):
    bias = torch.randn(4, requires_grad=not out) if biased else None
    options = "", "auto", bias, None, None, None
    tensors = [torch.randn(6, 8), torch.randn(8, 4)]
    if out:
        op, args = f"{name}_out", (*tensors, torch.empty(6, 4), *options)
    else:
        op, args = name, (*(t.requires_grad_() for t in tensors), *options)
    actual = torch.library.opcheck(getattr(torch.ops.tileweave, op).default, args)
    assert set(actual.values()) == {"SUCCESS"}


@pytest.mark.parametrize(
    "name", ["all_gather_matmul", "all_gather_matmul_rows", "matmul_reduce_scatter"]
)
def test_fp8_is_registered_as_torch_wants_it(name):
    args = *HALVES, "", "auto", ones(48, dtype=BF16), *SCALES.values(), None
    actual = torch.library.opcheck(
        getattr(torch.ops.tileweave, name).default, args,
        test_utils=("test_faketensor", "test_aot_dispatch_dynamic"),  # others multiply fp8 on CPUs
    )  # fmt: skip
    assert set(actual.values()) == {"SUCCESS"}


@pytest.mark.parametrize("op", ["all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"])
def test_fp8_is_measured_with_scales(op):
    group = groups.group_of("")
    trial = Trial(problem_of(op, 64, 48, 32, 1, FP8), group)
    a, b = trial.inputs()
    OPERATORS[op].unfused(a, b, trial.c, group, trial.epilogue)
    assert a.dtype == b.dtype == FP8 and trial.c.dtype == BF16
    assert 0 < trial.error_of(a, b, trial.c) < 1e-2


def test_what_ranks_compare_of_a_problem():
    request = checked_problem("matmul_reduce_scatter", *HALVES, 2, None, Epilogue(
        ones(48, dtype=torch.float16), *SCALES.values(), torch.float16
    ))  # fmt: skip
    assert str(request) == (
        "matmul_reduce_scatter of (16, 32) x transposed (32, 48) float8_e4m3fn to float16 with bias"
    )


@pytest.mark.parametrize(
    ("name", "axes"),
    [("all_gather", ()), ("reduce_scatter", ()), ("all_reduce", ()), ("all_to_all", (1, 0))],
)
@pytest.mark.parametrize("out", [False, True])
def test_collectives_registered_as_torch_wants_it(name, axes, out):
    x = torch.randn(6, 8, requires_grad=not out)
    op, given = (f"{name}_out", (x, torch.empty(6, 8))) if out else (name, (x,))
    op = getattr(torch.ops.tileweave, op).default
    assert set(torch.library.opcheck(op, (*given, *axes, "", "auto")).values()) == {"SUCCESS"}


def test_module_of_the_page():
    page = (Path(__file__).resolve().parents[3] / "docs" / "guides" / "ops.md").read_text()
    text, *_ = re.findall(r"```python\n(.*?)```", page, re.S)
    names: dict = {}
    exec(text, names)
    mlp, x = names["MLP"](8, 6), torch.randn(4, 8)
    expected = torch.nn.functional.silu(x @ mlp.up.t()) @ mlp.down.t()
    assert torch.allclose(mlp(x), expected)


@pytest.mark.parametrize(
    "call",
    [
        lambda x, out: ops.all_gather(x, out=out),
        lambda x, out: ops.all_reduce(x, out=out),
        lambda x, out: ops.matmul_reduce_scatter(x, torch.eye(4), out=out),
        lambda x, out: ops.matmul_all_reduce(x, torch.eye(4), out=out),
        lambda x, out: ops.all_gather_matmul(x, torch.eye(4), out=out),
    ],
)
def test_out_of_a_gradient(call):
    """Calls that record a gradient refuse ``out``; a user of its values notices."""
    x, weight = torch.randn(4, 4), torch.randn(4, 4, requires_grad=True)
    with pytest.raises(tw.TileWeaveError, match="out requires a gradient; expected one that does"):
        call(x, weight * 3)
    with torch.no_grad():
        assert torch.equal(call(x, weight), x)
    out = call(x, torch.empty(4, 4))
    product = out * weight
    call(-x, out)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()
