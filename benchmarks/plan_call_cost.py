"""Microseconds of host time that one call takes: of a plan, the all-gather + GEMM of ``tw.ops``,
and of the operators, with which come torch's dispatch and the checks of the arguments.

    torchrun --nproc-per-node=4 benchmarks/plan_call_cost.py [--calls 200] [--profile]
    python benchmarks/plan_call_cost.py [--ranks 4] [--only copy_engines]

The median over calls that find the GPU idle, so that no full queue holds the host up, of the
quickest of some rounds: other work makes some of them twice as long. Operators also in
``torch.inference_mode()``, where torch does not look for gradients; and the same with
TILEWEAVE_NATIVE=0, where Python enqueues.

Without a GPU the driver, torch's streams and events, and the kernels are stand-ins that do nothing,
for rank 0 of ``--ranks``: what is left is what torch, TVM-FFI and TileWeave do. It says which of
both it was. Ranks that share a GPU are refused: the driver takes ten times as long for them
(benchmarks/LOG.md, 2026-11-23).
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
from tileweave.ops.core import call, strategy
from tileweave.ops.core import compiled as made
from tileweave.ops.core.cache import prepared
from tileweave.ops.core.gemm_config import GemmConfig
from tileweave.ops.core.operator import OPERATORS as OPERATORS_BY_NAME
from tileweave.ops.core.operator import Choice
from tileweave.ops.core.session_cache import invalidate
from tileweave.ops.core.tiles import LARGE, SMALL
from tileweave.ops.gemm.all_gather_matmul import all_gather_matmul_plan
from tileweave.passes.ir.implicit import implicit_of
from tileweave.runtime.executor import calls as plan_streams
from tileweave.runtime.executor import enqueue
from tileweave.runtime.host import heap, memory, session
from tileweave.runtime.host.group import Group
from tileweave.runtime.kernel import kernel

OPERATORS = (ops.all_gather_matmul, ops.matmul_reduce_scatter, ops.matmul_all_reduce)
SHARE, N, K = 128, 256, 256
"""A small problem: the host does the same for a large one."""
_PAUSE_S = 0.2
"""Between rounds."""


class Nothing:
    """Stands in for a module, a function or a value: takes everything, does nothing."""

    cuda_stream = cuda_event = 0
    device = torch.device("cuda", 0)

    def __getattr__(self, name: str) -> Any:
        return _nothing

    def __enter__(self) -> None: ...

    def __exit__(self, *_: Any) -> None: ...


def _nothing(*_: Any, **__: Any) -> None:
    return None


class StandInDriver(types.ModuleType):
    """``cuda.bindings.driver`` whose functions succeed and do nothing."""

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
"""The driver as the native part finds it, and a kernel as TileLang compiles it."""


def make_up_a_session(ranks: int) -> None:
    """A session of rank 0 of ``ranks``, on the CPU."""
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
    torch.cuda.set_stream = plan_streams.current_stream = _nothing

    group = Group(0, ranks, 0, torch.device("cpu"), None, None)
    block = 1 << 22
    storage = torch.zeros(ranks * block, dtype=torch.uint8)
    memory_ = memory.Memory(storage.data_ptr(), block, block, storage)
    watchdog = types.SimpleNamespace(raise_if_deadlocked=_nothing)
    session._session = types.SimpleNamespace(
        group=group, heap=heap.Heap(group, memory_, 1024), watchdog=watchdog
    )
    plan_streams.compile = compile_nothing
    made.compile_program = compile_nothing
    strategy.obstacle = transport.obstacle = _nothing
    plan_streams.has_driver = lambda device: True


class StandInKernel(kernel.Kernel):
    """Has the hidden memory of its program, and does nothing."""

    launch: Any


def compile_nothing(program: Any, **options: Any) -> kernel.Kernel:
    """A stand-in for ``program``."""
    up = session.current()
    mod = tvm.IRModule({str(program.attrs["global_symbol"]): program})
    mod = passes.run_group(mod, up.group.world_size, up.heap.stride)
    (prepared,) = mod.functions.values()
    implicit = {h.name: kernel._memory(h, up) for h in implicit_of(prepared)}
    return StandInKernel(None, program, implicit)


def plan_call() -> Callable[[], None]:
    """One call of the plan, with the same arguments each time."""
    up = session.current()
    ranks, device = up.group.world_size, up.group.device
    config = GemmConfig(ranks * SHARE, N, K, ranks, "bfloat16", False, SMALL)
    plan = all_gather_matmul_plan(config)
    bf16 = {"dtype": torch.bfloat16, "device": device}
    a, b = torch.zeros(SHARE, K, **bf16), torch.zeros(K, N, **bf16)
    c = torch.zeros(ranks, SHARE, N, **bf16)
    gathered = tw.symmetric((ranks, SHARE, K), torch.bfloat16)
    return lambda: plan(a, b, gathered, c)


def calls(only: str) -> Iterator[tuple[str, Callable[[], Any]]]:
    """What is measured, by name: the plan, operators by each of their programs, a collective; each
    of nothing that was called before.

    Args:
        only: what the names of programs hold.
    """
    group = session.current().group
    kept = prepared(group).operators
    while kept:
        kept.popitem()[1].free()
    yield "plan", plan_call()
    bf16 = {"dtype": torch.bfloat16, "device": group.device}
    shard, b = torch.zeros(SHARE, K, **bf16), torch.zeros(K, N, **bf16)
    a = torch.zeros(group.world_size * SHARE, K, **bf16)
    for op, x in zip(OPERATORS, (shard, a, a), strict=True):
        for program in (p for p in OPERATORS_BY_NAME[op.__name__].programs if only in p):
            way = Choice(program, LARGE if program == "copy_engines" else SMALL)
            call.choice_of = lambda *_, way=way: way
            invalidate()
            yield f"{op.__name__} by {program}", partial(op, x, b, strategy="fused")
    for by in ("ldst", "copy_engine"):
        yield f"all_gather by {by}", partial(ops.all_gather, shard, transport=by)


def microseconds(call: Callable[[], None], calls: int, drain: Callable[[], None]) -> list[float]:
    """Of each call."""
    found = []
    for _ in range(calls):
        begin = time.perf_counter_ns()
        call()
        found.append((time.perf_counter_ns() - begin) / 1e3)
        drain()
    return found


def report(
    name: str, how: str, call: Callable[[], Any], drain: Callable[[], None],
    options: argparse.Namespace,
) -> None:  # fmt: skip
    """Measure ``call`` and say what was found."""
    call()  # compiles
    drain()
    microseconds(call, 20, drain)
    found = []
    for _ in range(options.rounds):
        found.append(statistics.median(microseconds(call, options.calls, drain)))
        time.sleep(_PAUSE_S)
    print(
        f"rank {tw.rank()} of {tw.world_size()}, {name}, by {how}: {min(found):.1f} us a call "
        f"(medians of {options.calls}: {', '.join(f'{us:.1f}' for us in found)})",
        flush=True,
    )
    if options.profile:
        profile = cProfile.Profile()
        profile.runcall(microseconds, call, options.calls, drain)
        if tw.rank() == 0:
            pstats.Stats(profile).sort_stats("tottime").print_stats(15)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--calls", type=int, default=200, help="of a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--profile", action="store_true", help="where the time goes, by function")
    parser.add_argument("--ranks", type=int, default=4, help="of the group, without a GPU")
    parser.add_argument("--only", default="", help="operators by programs of this name")
    options = parser.parse_args()
    real = torch.cuda.is_available()
    if real:
        tw.init()
        if session.current().group.shares_gpus:
            print("plan_call_cost: ranks share a GPU; expected a GPU for each rank")
            return 1
    else:
        make_up_a_session(options.ranks)
        print("no GPU: the driver, torch's streams and the kernels are stand-ins that do nothing")
    drain = torch.cuda.synchronize if real else _nothing
    for by, value in (("C++", "1"), ("Python", "0")):
        os.environ["TILEWEAVE_NATIVE"] = value
        for name, one in calls(options.only):
            report(name, by, one, drain, options)
            if name != "plan":
                with torch.inference_mode():
                    report(name, f"{by}, inference mode", one, drain, options)
    if real:
        tw.finalize()
    return 0


if __name__ == "__main__":
    sys.exit(main())
