"""tileweave.integrations.torch: operators and compiled models on processes with gloo."""

from __future__ import annotations

import re
from functools import partial

import pytest
import torch
from torch._inductor import config, custom_graph_pass
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel

from tests.integrations import torch_on_ranks as on_ranks
from tileweave.builtins.errors import TileWeaveError
from tileweave.integrations.torch import (
    disable,
    enable,
    explain,
    fsdp,
    hooks,
    parallel_styles,
    set_fsdp_communication,
    styles,
)
from tileweave.integrations.torch.gather_forms import merge_gathers
from tileweave.integrations.torch.passes import Passes

GATHER, SCATTER = "symm_mem::fused_all_gather_matmul", "symm_mem::fused_matmul_reduce_scatter"

ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"
ALL_REDUCE = "tileweave::matmul_all_reduce"


def of_ranks(results: list):
    """Return the result that all ranks have."""
    for result in results:
        if isinstance(result, Exception):
            raise result
    assert results[0] == results[1]
    return results[0]


@pytest.mark.parametrize("keeps_rows", [True, False])
@pytest.mark.parametrize(
    ("shape", "weights", "axis"),
    [
        ((4, 6), [(6, 8)], 0),
        ((4, 6), [(-1, 6, 8), (6, 10)], 0),
        ((3, 4, 6), [(6, 8)], 0),
        ((3, 4, 6), [(6, 8), (-1, 6, 4)], 1),
        ((2, 3, 4, 6), [(6, 8)], 2),
    ],
)
def test_gather(two, shape, weights, axis, keeps_rows):
    for result in two.run(on_ranks.gather, shape, weights, axis, keeps_rows):
        assert result == {"same strides": True, "error": 0, "obstacle": None}


@pytest.mark.parametrize("reduce_op", ["sum", "avg"])
@pytest.mark.parametrize(
    ("shape", "weight", "axis"),
    [
        ((4, 6), (6, 8), 0),
        ((4, 3, 6), (-1, 6, 8), 0),
        ((3, 4, 6), (6, 8), 1),
        ((2, 3, 4, 6), (6, 8), 2),
        ((3, 4, 6), (-1, 6, 8), 2),
    ],
)
def test_scatter(two, shape, weight, axis, reduce_op):
    for result in two.run(
        on_ranks.operator, "fused_matmul_reduce_scatter", shape, weight, reduce_op, axis
    ):
        assert result["error"] < 1e-5
        assert result["same strides"] and result["obstacle"] is None


@pytest.mark.parametrize(
    ("name", "args", "obstacle"),
    [
        (
            "fused_all_gather_matmul", ((3, 4, 6), [(12, 8)], 2),
            "gather_dim=2 of 3 axes; expected an axis of rows",
        ),
        (
            "fused_matmul_reduce_scatter", ((4, 6), (6, 8), "sum", 1),
            "columns of a row-major B are scattered; expected a transposed B",
        ),
    ],
)  # fmt: skip
def test_torch_computes_what_is_not_accepted(two, name, args, obstacle):
    for result in two.run(on_ranks.operator, name, *args):
        assert result["error"] == 0 and obstacle in result["obstacle"]


@pytest.mark.parametrize(("shape", "axis"), [((16, 32), 0), ((2, 16, 32), 1)])
def test_fp8(two, shape, axis):
    for function in (on_ranks.scaled_gather, on_ranks.scaled_scatter):
        for result in two.run(function, shape, axis):
            assert result["error"] == 0 and result["obstacle"] is None
            assert result.get("same strides", True)


def test_torch_computes_other_fp8_products(two):
    rowwise = of_ranks(two.run(on_ranks.rowwise_gather, (16, 32)))
    assert rowwise == (
        "fused_all_gather_scaled_matmul: A_scale has shape (16, 1); expected one element"
    )
    biased = of_ranks(two.run(on_ranks.scaled_scatter, (16, 32), 0, True))
    assert biased["error"] == 0 and "a bias is given; expected none" in biased["obstacle"]


@pytest.mark.parametrize(
    ("axis", "shape", "rows"), [(0, (8,), (4, 16)), (1, (3, 8), (3, 4, 16)), (1, (1, 8), (4, 16))]
)
@pytest.mark.parametrize("biased", [False, True])
def test_sequence_parallel_mlp(two, axis, shape, rows, biased):
    for result in two.run(partial(on_ranks.mlp, biased=biased), axis, *shape):
        assert result["error"] < 1e-5
        assert result["fused"] == [[GATHER, SCATTER], [GATHER, SCATTER], [GATHER, SCATTER, SCATTER]]
        assert result["unfused"] == [[]] * 3
        count, nccl = (
            "2 x fused_all_gather_matmul of",
            "nccl: the tensors are on cpu; expected cuda",
        )
        shapes = f"{rows} x (16, 16) x (16, 16) in float32"
        assert f"{count} {shapes}: {nccl}" in result["calls"]


@pytest.mark.parametrize("shape", [(8,), (3, 8)])
@pytest.mark.parametrize("biased", [False, True])
def test_tensor_parallel_mlp(two, shape, biased):
    """Gate and up read the same input; DTensor adds up the gradients of each over ranks."""
    for result in two.run(partial(on_ranks.mlp, biased=biased), None, *shape):
        assert result["error"] < 1e-5
        assert result["fused"] == [[ALL_REDUCE], [ALL_REDUCE], [ALL_REDUCE] * 2]
        assert result["unfused"] == [[]] * 3 and not result["calls"]


@pytest.mark.parametrize(
    ("function", "dtype", "most"),
    [
        ("torch_norm", torch.bfloat16, 0),
        ("torch_norm", torch.float16, 0),
        ("hugging_face_norm", torch.bfloat16, 2**-6),  # it rounds before the weight
    ],
)
def test_rms_norm(two, function, dtype, most):
    for result in two.run(on_ranks.norm, 4, dtype, function):
        assert result["error"] <= most
        assert result["fused"] == ["tileweave::all_reduce_rms_norm"]


@pytest.mark.parametrize(
    ("rows", "dtype", "variant", "reason"),
    [
        (257, torch.bfloat16, "", "257 rows; expected at most 256"),
        (4, torch.float32, "", "x is of torch.float32; expected "),
        (4, torch.bfloat16, "avg", "reduce_op='avg'; expected 'sum'"),
        (4, torch.bfloat16, "other weight", "the weight is computed in the graph"),
        (4, torch.bfloat16, "two_shot", "4 rows, for which another program is faster"),
        (4, torch.bfloat16, "other axis", None),
        (on_ranks.HIDDEN, torch.bfloat16, "columns", None),
        (4, torch.bfloat16, "gradient", None),
    ],
)
def test_other_norms_are_not_changed(two, rows, dtype, variant, reason):
    for result in two.run(on_ranks.norm, rows, dtype, "torch_norm", variant):
        assert result["error"] == 0 and result["fused"] == []
        (text,) = result["unfused"]
        assert text.count("; with the norm after it: ") == (reason is not None)
        assert (reason or "") in text


def test_nothing_to_fuse(two):
    text = "graph 0, inference: no collectives, nothing to fuse"
    assert of_ranks(two.run(on_ranks.nothing_to_fuse)) == (True, text)


def test_reasons(two):
    reasons = [text.partition(": ")[2] for text in of_ranks(two.run(on_ranks.unfused))]
    left = "no product has the gathered tensor on its left; its users: "
    assert reasons == [
        f"{left}aten::add",
        "it gathers 16 columns of each rank; expected 1024 or more",
        f"{left}aten::mm",
        "its input is no product of matrices: aten::add",
        "the product has another user: _c10d_functional::reduce_scatter_tensor, aten::slice, "
        "_c10d_functional::all_reduce",
        "its input is no product of two matrices: aten.add.Tensor",
        "reduce_op='avg'; expected 'sum'",
        "an operand of the product would have to be copied",
        "the product has another user",
        "TileWeave does not fuse it",
        "TileWeave does not fuse it",
    ]


def test_what_reads_nodes_without_shapes(two):
    for result in two.run(on_ranks.without_shapes):
        assert result["error"] < 1e-4
        assert result["fused"] == [GATHER, SCATTER, ALL_REDUCE]
        (reason,) = result["unfused"]
        assert "all_gather_into_tensor: no product has the gathered tensor on its left" in reason


def assert_calls(result, gathers, all_reduces, scatters):
    counts = {
        "all_gather_matmul": gathers,
        "matmul_all_reduce": all_reduces,
        "matmul_reduce_scatter": scatters,
    }
    assert result["error"] < 1e-5 and result["calls"] == counts


@pytest.mark.parametrize(("axis", "shape"), [(0, (8,)), (1, (3, 8))])
def test_eager_mlp(two, axis, shape):
    for result in two.run(on_ranks.eager_mlp, axis, *shape):
        assert_calls(result, gathers=2, all_reduces=0, scatters=1)
    for result in two.run(on_ranks.eager_mlp, None, *shape):
        assert_calls(result, gathers=0, all_reduces=1, scatters=0)


def test_eager_mlp_of_dtensors(two):
    for result in two.run(on_ranks.eager_mlp_of_dtensors):
        assert_calls(result, gathers=2, all_reduces=0, scatters=1)


@pytest.mark.parametrize(("by_module", "is_balanced"), [(False, True), (True, True), (True, False)])
@pytest.mark.parametrize("causal", [True, False])
def test_context_parallel(two, causal, by_module, is_balanced):
    for result in two.run(on_ranks.attention, causal, by_module, is_balanced):
        assert result["error"] < 1e-5
        assert result["calls"] == [(name, 1, None) for name in (ATTENTION, f"{ATTENTION}_backward")]


def test_attention_with_a_mask_is_refused_on_a_cpu(two):
    for error in two.run(on_ranks.attention, False, False, True, torch.ones(1, 1, 8, 16).bool()):
        assert isinstance(error, TileWeaveError)
        assert "torch has no context parallelism on a CPU" in str(error)


def test_other_layers_are_left_to_torch(two):
    assert of_ranks(two.run(on_ranks.layers_of_torch)) == [True, True]


def test_copies_and_subclasses_of_layers(two):
    assert of_ranks(two.run(on_ranks.copies_and_subclasses)) == [True] * 3


def test_the_last_axis_is_no_axis_of_rows(two):
    message = r"ColwiseParallel: Shard\(1\) of 2 axes; expected an axis of rows, before the last"
    with pytest.raises(TileWeaveError, match=message):
        of_ranks(two.run(on_ranks.gather_of_columns))


SETTINGS = "post_grad_custom_pre_pass", "post_grad_custom_post_pass"


def state() -> list:
    """Return the settings of Inductor, and the kernels of torch's operators."""
    dumps = [torch._C._dispatch_dump(f"symm_mem::{name}") for name in hooks._IMPLEMENTATIONS]
    return [*[getattr(config, name) for name in SETTINGS], *dumps]


def test_disable_restores_everything():
    before = state()
    enable()
    assert all(a != b for a, b in zip(before, state(), strict=True))
    disable()
    assert state() == before
    with enable():
        with enable():
            pass
        assert state() != before  # the inner one has enabled nothing
    assert state() == before


class Noted(CustomGraphPass):
    def __init__(self, calls: list) -> None:
        self.calls = calls

    def __call__(self, graph) -> None:
        self.calls.append(("user", graph))

    def uuid(self) -> str:
        return "user"


class NotedInference(getattr(custom_graph_pass, "CustomInferenceAwareGraphPass", object)):
    """Pass that torch 2.11 does not have."""

    __init__, uuid = Noted.__init__, Noted.uuid

    def __call__(self, graph, is_inference) -> None:
        self.calls.append(("inference user", graph, is_inference))


def test_passes_of_the_user_are_kept():
    calls: list = []
    passes = Passes(Noted(calls), lambda graph: calls.append(("own", graph)))
    passes("graph")
    assert calls == [("user", "graph"), ("own", "graph")]
    assert "user" in passes.uuid()
    assert Passes(print, print).uuid() is None  # not cached, as without TileWeave


@pytest.mark.skipif(NotedInference.__base__ is object, reason="torch has one pass, without list")
def test_a_list_of_passes_is_kept():
    calls: list = []
    users = [Noted(calls), NotedInference(calls)]
    Passes(users, lambda graph: calls.append(("own", graph)))("graph", is_inference=True)
    assert calls == [("user", "graph"), ("inference user", "graph", True), ("own", "graph")]


@pytest.mark.parametrize("has_view", [False, True])
@pytest.mark.parametrize(("results", "count"), [(0, 1), (1, 1), (2, 2)])
def test_results_of_the_user_are_not_merged(results, count, has_view):
    """The user may write to one of two results; other outputs are kept for the gradients."""
    graph, functions = torch.fx.Graph(), torch.ops._c10d_functional
    x = graph.placeholder("x")
    waits = [
        graph.call_function(
            functions.wait_tensor.default,
            (graph.call_function(functions.all_gather_into_tensor.default, (x, 2, "0")),),
        )
        for _ in range(2)
    ]
    if has_view:
        waits[1] = graph.call_function(torch.ops.aten.view.default, (waits[1], [-1]))
    graph.output(tuple(waits)).meta["user_visible_output_idxs"] = list(range(results))
    merge_gathers(graph)
    targets = [str(node.target) for node in graph.nodes]
    assert targets.count("_c10d_functional.all_gather_into_tensor.default") == 1
    assert targets.count("_c10d_functional.wait_tensor.default") == count
    assert len(set(graph.output_node().args[0])) == (2 if has_view else count)


def test_replaced_passes_are_explained():
    with enable():
        assert explain().remark == ""
        with config.patch(post_grad_custom_pre_pass=Noted([])):
            assert str(explain()).startswith("passes that were set after enable() replace")
    assert str(explain()).startswith("the integration is not enabled")


@pytest.mark.parametrize("param_dtype", [None, torch.bfloat16])
def test_fsdp(two, param_dtype):
    policy = MixedPrecisionPolicy(param_dtype, torch.float32)
    result = of_ranks(two.run(on_ranks.train_fsdp, policy))
    # Each of three steps gathers three layers, forward and backward, and scatters their gradients.
    assert result == {"error": 0, "all_gather": 18, "reduce_scatter": 9}


def test_fsdp_is_refused(monkeypatch):
    with pytest.raises(TileWeaveError, match="no module is fully sharded; expected a model after"):
        set_fsdp_communication(torch.nn.Linear(2, 2))
    monkeypatch.setattr(fsdp, "_HOOKS", ("custom_all_gather", "gone"))
    with pytest.raises(TileWeaveError, match=r"torch 2.* lacks FSDPModule.set_gone$"):
        set_fsdp_communication(torch.nn.Linear(2, 2))


def arguments_differ(A, Bs):
    """Stand-in for an implementation that fits another release."""


def test_styles_of_an_unsupported_torch_are_its_own(monkeypatch):
    monkeypatch.setattr(styles, "unsupported_torch", lambda _: "torch 9 is too new")
    with pytest.warns(RuntimeWarning, match="torch's own styles are returned: torch 9 is too new"):
        own = parallel_styles()
    assert own == (ColwiseParallel, RowwiseParallel, SequenceParallel)


@pytest.mark.parametrize(
    ("name", "value", "obstacle"),
    [
        ("_HOOKS", ("torch._inductor.config:gone", "torch.gone:x"), "gone, torch.gone.x"),
        (
            "_IMPLEMENTATIONS", {"gone": arguments_differ},
            "torch.ops.symm_mem.gone",
        ),
        (
            "_IMPLEMENTATIONS", {"fused_all_gather_matmul": arguments_differ},
            "the arguments A, Bs of torch.ops.symm_mem.fused_all_gather_matmul",
        ),
        ("unsupported_torch", lambda _: "torch 9 is too new", "torch 9 is too new"),
    ],
)  # fmt: skip
def test_a_wrong_hook_is_one_warning(name, value, obstacle, monkeypatch):
    monkeypatch.setattr(hooks, name, value)
    before = [getattr(config, name) for name in SETTINGS]
    message = f"tileweave.integrations.torch is not enabled: .*{re.escape(obstacle)}$"
    with pytest.warns(RuntimeWarning, match=message) as caught, enable():
        assert [getattr(config, name) for name in SETTINGS] == before
    assert len(caught) == 1 and caught[0].filename == __file__
