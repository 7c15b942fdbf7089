"""Measure the host time of one call: of a plan, and of each operator by each of its programs.

    torchrun --nproc-per-node=4 benchmarks/plan_call_cost.py [--calls 200] [--profile]
    python benchmarks/plan_call_cost.py [--ranks 4] [--only copy_engines]

The figure is the median over the calls of a round, of the quickest round: other work on the machine
makes some rounds twice as long. Each call finds the GPU idle, so no full queue delays the host.

The plan is the all-gather + GEMM of ``tw.ops``. A grouped GEMM belongs to no plan. ``dispatch``
contains an all-gather of ``topk_ids`` and the routing kernel; ``expert_mlp`` contains it, two
grouped GEMMs and ``combine``. An operator adds the checks of its arguments and torch's part.
Operators are also measured in ``torch.inference_mode()``, where torch looks for no gradients. All
is measured twice: C++ enqueues the operations, then Python, by ``TILEWEAVE_NATIVE=0``.

Without a GPU, stand-ins that do nothing replace the driver, torch's streams and events, and the
kernels, for rank 0 of ``--ranks``. What remains is the time of torch, TVM-FFI and TileWeave. The
output says whether a GPU was used. Ranks that share a GPU are refused: the driver then takes ten
times as long (benchmarks/LOG.md, 2026-11-23).
"""

import argparse
import cProfile
import os
import pstats
import statistics
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import tvm_ffi
from tilelang import tvm

import tileweave as tw
from tileweave import ops, passes
from tileweave.ops.collectives import transport
from tileweave.ops.core import call
from tileweave.ops.core import compiled as compiled_ops
from tileweave.ops.core.compiled import op_cache_of
from tileweave.ops.core.gemm_config import GemmConfig
from tileweave.ops.core.registry import OPERATORS as OPERATORS_BY_NAME
from tileweave.ops.core.tiles import LARGE, SMALL, Choice
from tileweave.ops.decode import decode_attention
from tileweave.ops.gemm import gemm_operator
from tileweave.ops.gemm.all_gather_matmul import all_gather_matmul_plan
from tileweave.ops.moe import grouped_matmul, routing, row_exchange
from tileweave.ops.moe.kernels.grouped_gemm import GroupedConfig
from tileweave.passes.ir.implicit import implicit_of
from tileweave.runtime.executor import calls as plan_streams
from tileweave.runtime.executor import enqueue, recorded_calls
from tileweave.runtime.host import heap, memory, session
from tileweave.runtime.host.group import Group
from tileweave.runtime.kernel import kernel

OPERATORS = (ops.all_gather_matmul, ops.matmul_reduce_scatter, ops.matmul_all_reduce)
ROWS, N, K = 128, 256, 256
"""Rows per rank, N and K of a small problem; the host does the same work for a large one."""
EXPERTS_PER_RANK, TOP_K = 2, 2
"""Experts of a small mixture, and the choices of a token."""
BATCH, HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE = 4, 8, 2, 64, 16
"""Extents of a small decode step."""
_PAUSE_S = 0.2
"""Pause between rounds, in seconds."""


class Nothing:
    """Stand-in for a stream, an event or a structure: it accepts all calls and does nothing."""

    cuda_stream = cuda_event = stream_id = 0
    device = torch.device("cuda", 0)

    def __getattr__(self, name: str) -> Any:
        return _nothing

    def __enter__(self) -> None: ...

    def __exit__(self, *_: Any) -> None: ...


def _nothing(*_: Any, **__: Any) -> None:
    return None


class StandInDriver(types.ModuleType):
    """Stand-in for ``cuda.bindings.driver``: its functions succeed and do nothing."""

    class CUresult:
        CUDA_SUCCESS = 0

    CUstreamBatchMemOpParams = CUDA_MEMCPY2D = Nothing

    def __getattr__(self, name: str) -> Any:
        return lambda *_: (0,)


C_STAND_INS = """
int cuMemcpyDtoDAsync_v2() { return 0; }
int cuMemcpy2DAsync_v2() { return 0; }
int cuStreamBatchMemOp_v2() { return 0; }
int cuEventRecord() { return 0; }
int cuStreamWaitEvent() { return 0; }
int __tvm_ffi_kernel(void* self, const void* args, int count, void* result) { return 0; }
"""
"""Stand-ins for the driver that the native part loads, and for a kernel that TileLang compiles."""


def enter_stand_in_session(ranks: int) -> None:
    """Enter a session of rank 0 of ``ranks``, in which stand-ins replace the GPU."""
    library = Path(tempfile.mkdtemp()) / "stand_ins.so"
    command = ["cc", "-x", "c", "-shared", "-fPIC", "-", "-o", str(library)]
    subprocess.run(command, input=C_STAND_INS, text=True, check=True)
    enqueue.DRIVER = str(library)
    StandInKernel.launch = tvm_ffi.load_module(str(library))["kernel"]
    bindings = types.ModuleType("cuda.bindings")
    bindings.driver = StandInDriver("cuda.bindings.driver")
    sys.modules |= {
        "cuda": types.ModuleType("cuda"),
        "cuda.bindings": bindings,
        "cuda.bindings.driver": bindings.driver,
    }
    for name in ("current_stream", "Stream", "stream", "Event"):
        setattr(torch.cuda, name, lambda *_, **__: Nothing())
    torch.cuda.set_stream = torch._C._cuda_getCurrentStream = _nothing
    torch.cuda.is_current_stream_capturing = lambda: False

    group = Group(0, ranks, 0, torch.device("cpu"), None, None)
    block = 1 << 23
    storage = torch.zeros(ranks * block, dtype=torch.uint8)
    memory_ = memory.Memory(storage.data_ptr(), block, block, storage)
    watchdog = types.SimpleNamespace(raise_if_deadlocked=_nothing)
    stand_in = types.SimpleNamespace(
        group=group, heap=heap.Heap(group, memory_, 1024), watchdog=watchdog, name=""
    )
    session.enter(stand_in)
    plan_streams.compile = compile_nothing
    compiled_ops.compile_program = compile_nothing
    compiled_ops.compile_ahead = _nothing
    gemm_operator.obstacle = transport.obstacle = _nothing
    torch.cuda.device = lambda _: Nothing()
    for module in (row_exchange, decode_attention):
        module.obstacle_of_ranks = _nothing
    for module in (grouped_matmul, routing):
        module.has_kernel = lambda *_: True
        module.compiled = lambda *_: StandInKernel.launch
    grouped_matmul.config_of = lambda w, *_: GroupedConfig(*w.shape, "bfloat16", w.is_contiguous())
    for module in (plan_streams, call):
        module.has_driver = lambda device: True


class StandInKernel(kernel.Kernel):
    """Kernel that has the implicit memory of its program, and does nothing."""

    launch: Any


def compile_nothing(program: Any, **options: Any) -> kernel.Kernel:
    """Return the stand-in for the kernel of ``program``."""
    current = session.current()
    mod = tvm.IRModule({str(program.attrs["global_symbol"]): program})
    mod = passes.run_group(mod, current.group.world_size, current.heap.stride)
    (for_group,) = mod.functions.values()
    implicit = {p.name: kernel._allocate(p, current) for p in implicit_of(for_group)}
    return StandInKernel(None, program, implicit)


def plan_call() -> Callable[[], None]:
    """Return a function that calls the plan, each time with the same arguments."""
    group = session.current().group
    ranks, device = group.world_size, group.device
    config = GemmConfig(ranks * ROWS, N, K, ranks, "bfloat16", False, SMALL)
    plan = all_gather_matmul_plan(config)
    bf16 = {"dtype": torch.bfloat16, "device": device}
    a, b = torch.zeros(ROWS, K, **bf16), torch.zeros(K, N, **bf16)
    c = torch.zeros(ranks, ROWS, N, **bf16)
    gathered = tw.symmetric((ranks, ROWS, K), torch.bfloat16)
    return lambda: plan(a, b, gathered, c)


def calls(name_filter: str) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield names and calls to measure: the plan, each GEMM operator by each of its programs, a
    collective, and operators for mixtures and decode steps. Nothing that an earlier use compiled
    remains.

    Args:
        name_filter: text that the names of the measured programs contain.
    """
    group = session.current().group
    operators = op_cache_of(group).operators
    while operators:
        operators.popitem()[1].free()
    yield "plan", plan_call()
    bf16 = {"dtype": torch.bfloat16, "device": group.device}
    shard, b = torch.zeros(ROWS, K, **bf16), torch.zeros(K, N, **bf16)
    a = torch.zeros(group.world_size * ROWS, K, **bf16)
    for op, x in zip(OPERATORS, (shard, a, a), strict=True):
        for program in (p for p in OPERATORS_BY_NAME[op.__name__].programs if name_filter in p):
            choice = Choice(program, LARGE if program == "copy_engines" else SMALL)
            gemm_operator.choice_of = lambda *_, choice=choice: choice
            recorded_calls.invalidate()
            yield f"{op.__name__} by {program}", partial(op, x, b, strategy="fused")
    for name in ("ldst", "copy_engine"):
        yield f"all_gather by {name}", partial(ops.all_gather, shard, transport=name)
    weights = torch.zeros(8, N, K, **bf16)
    offsets = torch.zeros(8, dtype=torch.int32, device=group.device)
    for order, w in (("(E, N, K)", weights), ("(E, K, N)", weights.transpose(1, 2))):
        yield f"grouped_matmul {order}", partial(ops.grouped_matmul, shard, w, offsets)
    yield from mixture_calls(shard)
    yield "decode_attention", decode_call(group)


def mixture_calls(x: torch.Tensor) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield names and calls of the exchanges of a mixture of experts."""
    experts = EXPERTS_PER_RANK * tw.world_size()
    ids = torch.arange(TOP_K, dtype=torch.int32, device=x.device).expand(len(x), -1).contiguous()
    weights = torch.ones(ids.shape, device=x.device)
    send = partial(ops.dispatch, x, ids, weights, num_experts=experts, transport="ldst")
    yield "dispatch", send
    rows, _, handle = send()
    yield "combine", partial(ops.combine, rows, handle)
    zeros = partial(torch.zeros, dtype=x.dtype, device=x.device)
    w_gate_up, w_down = zeros(EXPERTS_PER_RANK, 2 * N, K), zeros(EXPERTS_PER_RANK, K, N)
    layer = partial(ops.expert_mlp, x, ids, weights, w_gate_up, w_down, transport="ldst")
    yield "expert_mlp", layer


def decode_call(group: Group) -> Callable[[], torch.Tensor]:
    """Return a call of decode attention to one page of each sequence."""
    bf16 = {"dtype": torch.bfloat16, "device": group.device}
    q = torch.zeros(BATCH, HEADS, HEAD_DIM, **bf16)
    k_cache, v_cache = torch.zeros(2, BATCH, PAGE_SIZE, KV_HEADS, HEAD_DIM, **bf16)
    table = torch.arange(BATCH, dtype=torch.int32, device=group.device).view(-1, 1)
    lengths = torch.full((BATCH,), PAGE_SIZE, dtype=torch.int32, device=group.device)
    return partial(
        ops.decode_attention, q, k_cache, v_cache, block_table=table, seq_lens=lengths,
        strategy="fused",
    )  # fmt: skip


def microseconds(call: Callable[[], None], calls: int, drain: Callable[[], None]) -> list[float]:
    """Return the time of each call; ``drain`` waits for the GPU after it."""
    times = []
    for _ in range(calls):
        begin = time.perf_counter_ns()
        call()
        times.append((time.perf_counter_ns() - begin) / 1e3)
        drain()
    return times


def report(
    name: str, enqueuer: str, call: Callable[[], Any], drain: Callable[[], None],
    options: argparse.Namespace,
) -> None:  # fmt: skip
    """Measure ``call`` and print its time."""
    call()  # compiles
    drain()
    microseconds(call, 20, drain)
    rounds = []
    for _ in range(options.rounds):
        rounds.append(statistics.median(microseconds(call, options.calls, drain)))
        time.sleep(_PAUSE_S)
    print(
        f"rank {tw.rank()} of {tw.world_size()}, {name}, by {enqueuer}: {min(rounds):.1f} us a "
        f"call (medians of {options.calls}: {', '.join(f'{us:.1f}' for us in rounds)})",
        flush=True,
    )
    if options.profile:
        profile = cProfile.Profile()
        profile.runcall(microseconds, call, options.calls, drain)
        if tw.rank() == 0:
            pstats.Stats(profile).sort_stats("tottime").print_stats(15)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--calls", type=int, default=200, help="calls of a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--profile", action="store_true", help="print the time of each function")
    parser.add_argument("--ranks", type=int, default=4, help="size of the group without a GPU")
    parser.add_argument("--only", default="", help="measure programs whose names contain this")
    options = parser.parse_args()
    real = torch.cuda.is_available()
    if real:
        tw.init()
        if session.current().group.shares_gpus:
            print("plan_call_cost: ranks share a GPU; expected a GPU for each rank")
            return 1
    else:
        enter_stand_in_session(options.ranks)
        print("no GPU: the driver, torch's streams and the kernels are stand-ins that do nothing")
    drain = torch.cuda.synchronize if real else _nothing
    for enqueuer, value in (("C++", "1"), ("Python", "0")):
        os.environ["TILEWEAVE_NATIVE"] = value
        for name, measured in calls(options.only):
            report(name, enqueuer, measured, drain, options)
            if name != "plan":
                with torch.inference_mode():
                    report(name, f"{enqueuer}, inference mode", measured, drain, options)
    if real:
        tw.finalize()
    return 0


if __name__ == "__main__":
    sys.exit(main())
