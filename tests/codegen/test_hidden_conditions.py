"""Conditions that TileLang's pass for barriers does not see."""

from dataclasses import replace

import pytest
import tilelang.language as T
import torch
from tilelang import tvm
from tvm import IRModule, tirx

from tileweave.codegen.hidden_conditions import HiddenConditions
from tileweave.emit import lowered
from tileweave.ops.core.problem import Problem
from tileweave.ops.core.tiles import Choice, Tiles
from tileweave.ops.gemm.gemm_operator import similar_rows
from tileweave.ops.gemm.matmul_all_reduce import MatmulAllReduce
from tileweave.passes import for_group
from tileweave.passes.ir.walk import nodes_in, op_name
from tileweave.runtime.kernel.shared_kernels import SharedKernels

BARRIERS = type("Info", (), {"name": "tl.ThreadSync"})
HEAP_STRIDE = 1 << 30


@T.prim_func
def branches(A: T.Tensor((64,), "float32"), n: T.int32):
    for b in T.thread_binding(8, thread="blockIdx.x"):
        for t in T.thread_binding(64, thread="threadIdx.x"):
            if b // n % 2 == 1:
                A[0] = 1.0
            if t // n == 1:
                A[1] = 1.0
            if b // 2 == 1:
                A[2] = 1.0
            if b // n == T.Cast("int32", A[3]):
                A[4] = 1.0


@pytest.fixture
def module():
    func = branches
    threads = [loop for loop in nodes_in(func.body, tirx.For)]
    body = nodes_in(func.body, tirx.SeqStmt)[-1]
    for loop in reversed(threads):
        axis = tirx.IterVar(None, loop.loop_var, 1, loop.thread_binding.thread_tag)
        body = tirx.AttrStmt(axis, "thread_extent", loop.extent, body)
    return IRModule({"branches": func.with_body(body)})


def test_quotients_by_variables_are_hidden_if_threads_do_not_decide(module):
    before = module["branches"]
    HiddenConditions().run_before_pass(module, BARRIERS)
    hidden = [
        op_name(branch.condition) == "tileweave.hidden"
        for branch in nodes_in(module["branches"].body, tirx.IfThenElse)
    ]
    assert hidden == [True, False, False, False]
    HiddenConditions().run_after_pass(module, BARRIERS)
    assert tvm.ir.structural_equal(module["branches"], before)


@pytest.mark.long
def test_a_shared_kernel_of_persistent_blocks_compiles():
    """Its branches compare the rank with an owner, a quotient by a size."""
    tiles = Tiles(128, 224, 64, 4, 256, group_m=4)
    problem = Problem("matmul_all_reduce", 2048, 7168, 8192, 2, torch.bfloat16, True)
    kernels, choice = SharedKernels(), Choice("copy_engines", tiles)

    def program(rows):
        plan = MatmulAllReduce.program(replace(problem, rows=rows), choice)
        (func,) = (f for f in plan.kernels(2) if "persistent" in str(f.attrs["global_symbol"]))
        return for_group(func, 2, HEAP_STRIDE), {}

    for rows in (problem.rows, *similar_rows(problem.rows, tiles.M, 1024)):
        kernels.add(*program(rows))
    shared, arguments = kernels.find(*program(problem.rows))
    assert len(arguments) > 10
    assert "gemm_ar_persistent" in lowered(shared.program, "sm_90a", {}).kernel_source
