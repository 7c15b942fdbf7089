"""``tw.explain`` of plans with collectives of ``torch.distributed``."""

import inspect
import json

import pytest
import tilelang.language as T

import tileweave as tw

NODES, N = 3, 32
MESH = {"node": NODES, "local": 2}


@T.prim_func
def double(x: T.Tensor((N,), "float32"), out: T.Tensor((N,), "float32")):
    with T.Kernel(1, threads=N) as _:
        for i in T.Parallel(N):
            out[i] = 2 * x[i]


def gather(p: tw.PlanBuilder, x, pieces, out):
    for _ in range(p.nodes):
        p.collective("all_gather", pieces, x, stream="nodes")
    if p.node == 1:
        p.collective("all_reduce", out, x, across="ranks")
    p.launch(double, x, out)


@tw.plan
def plan(
    p: tw.PlanBuilder,
    x: T.Tensor((N,), "float32"),
    pieces: T.Tensor((NODES, N), "float32"),
    out: T.Tensor((N,), "float32"),
):
    gather(p, x, pieces, out)


def line_of(text: str) -> int:
    lines, first = inspect.getsourcelines(gather)
    return first + next(n for n, line in enumerate(lines) if text in line)


@pytest.mark.parametrize("on_nodes", [False, True])
def test_rows_of_collectives(on_nodes):
    """The nodes are those of the mesh, or those of the plan."""
    explanation = tw.explain(plan.on_node(0, NODES), 2) if on_nodes else tw.explain(plan, MESH)
    nodes, ranks = explanation.ops
    assert [o.kind for o in explanation.ops] == ["collective"] * 2
    assert (nodes.tensor, nodes.line, nodes.per_block) == ("pieces", line_of("all_gather"), 3)
    assert nodes.file == __file__ and nodes.kernel == "plan"
    assert nodes.reason == "all_gather of x across 3 nodes; stream 'nodes' waits for it"
    assert ranks.reason == "all_reduce of x across 2 ranks; the caller's stream waits for it"
    assert (ranks.tensor, ranks.line) == ("out", line_of("all_reduce"))
    text = str(explanation)
    assert text.startswith("plan, 2 ranks on each of 3 nodes\n")
    assert f"test_collectives.py:{nodes.line}  collective  pieces" in text
    assert json.loads(explanation.as_json())["nodes"] == 3
    assert '<b class="collective">' in explanation.html()


@pytest.mark.parametrize(
    ("program", "mesh", "message"),
    [
        (double, MESH, "expected a tw.plan on two axes, nodes and ranks of a node"),
        (plan, {"node": 3}, "world_size={'node': 3}; expected a tw.plan on two axes"),
        (plan, {"node": 0, "local": 2}, "explain: axis 'node' of size 0; expected a name, and"),
        (plan, {"node": 3, "local": 9999}, "world_size=9999; expected at least 1, and at most"),
    ],
)
def test_refused_meshes(program, mesh, message):
    with pytest.raises(tw.TileWeaveError) as error:
        tw.explain(program, mesh)
    assert message in str(error.value)
