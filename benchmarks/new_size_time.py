"""Measure the CPU time that operators need for a number of rows that they have not had yet.

    python benchmarks/new_size_time.py [--ranks 4 8] [--rows 16 777 ...] [--only NAME] [--profile]

An operator is compiled for similar numbers of rows first, so most of its kernels exist: TileLang is
replaced by a function that compiles nothing, and no GPU is needed. Then one call chooses the
program by the cost model and prepares it for the new number. The table has the CPU time of each
stage in ms; the last column says how many kernels the number needed in spite of that.
"""

import argparse
import cProfile
import pstats
import sys
import time
import types
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial, wraps

import torch

import tileweave  # noqa: F401
from tileweave.builtins.errors import TileWeaveError
from tileweave.ops.collectives.collective import checked_problem
from tileweave.ops.core.problem import Problem
from tileweave.ops.core.registry import OPERATORS
from tileweave.ops.decode.problem import DecodeProblem
from tileweave.ops.gemm import cost_model
from tileweave.ops.gemm.gemm_operator import predicted_strategy
from tileweave.ops.moe.routing import default_capacity
from tileweave.ops.moe.row_problem import RowProblem
from tileweave.ops.norm.problem import NormProblem
from tileweave.passes.sync.infer import inference
from tileweave.runtime.executor import compile_ahead
from tileweave.runtime.host import session as sessions
from tileweave.runtime.kernel import for_group, kernel
from tileweave.runtime.kernel.shared_kernels import SharedKernels
from tileweave.runtime.plans import traced_plan

BF16, N, K = torch.bfloat16, 7168, 8192
GEMMS = "all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"
COLLECTIVES = "all_gather", "reduce_scatter", "all_reduce", "all_to_all"
STAGES = "choice", "trace", "inference", "residency", "kernels", "other"


class Clock:
    """CPU time of stages, each without the stages inside it."""

    def __init__(self) -> None:
        self.ms: Counter[str] = Counter()
        self._stack: list[str] = []
        self._last = 0.0

    def _switch(self) -> None:
        now = time.process_time()
        if self._stack:
            self.ms[self._stack[-1]] += (now - self._last) * 1000
        self._last = now

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        self._switch()
        self._stack.append(name)
        yield
        self._switch()
        self._stack.pop()

    def patch(self, owner, name: str, stage: str) -> None:
        """Count the time of a function."""
        function = getattr(owner, name)

        @wraps(function)
        def timed(*args, **kwargs):
            with self.stage(stage):
                return function(*args, **kwargs)

        setattr(owner, name, timed)


class Memory:
    """Symmetric memory that is not allocated."""

    is_live = False

    def free(self) -> None:
        pass


def open_session(ranks: int):
    """Open a session without a GPU, whose kernels are never compiled."""
    group = types.SimpleNamespace(
        rank=0, world_size=ranks, local_rank=0, device=torch.device("cpu"), process_group=None,
        exchange=lambda topic, value, timeout_s=0: [value], meet=lambda *_, **__: None,
    )  # fmt: skip
    heap = types.SimpleNamespace(stride=1 << 38, allocate=lambda shape, dtype: Memory())
    session = types.SimpleNamespace(
        name="", group=group, heap=heap, kernels=SharedKernels(), label="",
        watchdog=types.SimpleNamespace(raise_if_deadlocked=lambda: None),
    )  # fmt: skip
    sessions._sessions[""] = session
    return session


def replace_compiler(compiled: list) -> None:
    """Let the runtime compile nothing, and note what it would compile."""

    def compile_nothing(func, **options):
        compiled.append(func)
        return types.SimpleNamespace(prim_func=func)

    for module in (kernel, compile_ahead):
        module.compile_by_tilelang = compile_nothing
    compile_ahead._IN_THREADS = sys.maxsize
    compile_ahead.require_private_cache = lambda: None
    kernel.compile_once = lambda group, function, *_: function()
    kernel.warm = lambda *_: True


def gemm_cases(ranks: int, name: str) -> Iterator[tuple]:
    """Yield the programs of a GEMM as ``cases`` does, ``auto`` first."""
    operator = OPERATORS[name]

    def problem_of(M: int) -> Problem:
        shard = -(-M // ranks)
        rows = shard if operator.gathers else shard * ranks if operator.scatters else M
        return Problem(name, rows, N, K, ranks, BF16, True)

    def choose(M: int, program: str | None):
        problem = problem_of(M)
        if program is None:
            predicted_strategy(problem)
            return operator.table(problem)
        options = {c: us for c, us in operator.options(problem).items() if c.program == program}
        return min(options, key=options.get) if options else None

    def run(session, M: int, choice) -> None:
        operator(problem_of(M), choice, session)

    for program in (None, *operator.programs):
        yield f"{name}, {program or 'auto'}", partial(choose, program=program), run


def collective_cases(ranks: int, name: str) -> Iterator[tuple]:
    operator = OPERATORS[name]
    for transport in operator.transports():

        def problem_of(M: int):
            x = torch.empty(-(-M // ranks) * ranks, N, dtype=BF16, device="meta")
            return checked_problem(name, x, None, ranks, (0,) * len(operator.options))

        def choose(M: int, transport=transport):
            return None if operator.obstacle(problem_of(M), transport) else transport

        def run(session, M: int, choice) -> None:
            operator(problem_of(M), choice, session)

        yield f"{name}, {transport}", choose, run


def other_cases(ranks: int) -> Iterator[tuple]:
    def norm(session, M, strategy):
        problem = NormProblem("all_reduce_rms_norm", M, N, ranks, BF16, 1e-6)
        OPERATORS["all_reduce_rms_norm"](problem, strategy, session)

    for strategy in ("one_shot", "two_shot"):
        yield f"all_reduce_rms_norm, {strategy}", lambda M, s=strategy: s, norm

    def decode(session, M, _):
        batch, pages = min(M, 256), M * 4
        problem = DecodeProblem(
            "decode_attention", batch, 64, 8, 128, 128, pages, 64, -(-M // 64) + 1, ranks, BF16,
            BF16, 0.1, "interleaved", False, False,
        )  # fmt: skip
        OPERATORS["decode_attention"](problem, "fused", session)

    yield "decode_attention", lambda M: "fused", decode

    def rows(session, M, name):
        capacity = default_capacity(M, ranks, 8, 128 // ranks)
        problem = RowProblem(name, M, 8, capacity, N, ranks, BF16)
        OPERATORS[name](problem, "ldst", session)

    for name in ("dispatch", "combine"):
        yield name, lambda M, name=name: name, rows


def cases(ranks: int) -> Iterator[tuple]:
    """Yield the name of each case, and its functions ``choose(M)``, which returns the choice or
    None, and ``run(session, M, choice)``, which makes the operator."""
    for name in GEMMS:
        yield from gemm_cases(ranks, name)
    for name in COLLECTIVES:
        yield from collective_cases(ranks, name)
    yield from other_cases(ranks)


def clear_estimates() -> None:
    """Forget the estimates of the cost model."""
    for function in vars(cost_model).values():
        if hasattr(function, "cache_clear"):
            function.cache_clear()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--rows", type=int, nargs="+", default=[16, 777, 2048, 5000, 8192, 16384])
    parser.add_argument("--only", default="", help="part of the names of the cases")
    parser.add_argument("--profile", choices=("cumtime", "tottime"), help="print functions by time")
    options = parser.parse_args()
    compiled: list = []
    replace_compiler(compiled)
    clock = Clock()
    clock.patch(inference, "verify_residency", "residency")
    clock.patch(for_group, "infer_and_explain", "inference")
    for name in ("has", "find", "add"):
        clock.patch(SharedKernels, name, "kernels")
    clock.patch(traced_plan.TracedPlan, "_traced", "trace")
    for name in OPERATORS:
        operator = OPERATORS[name]
        for function in ("program", "_shared_steps"):
            clock_trace(clock, operator, function)
    print(f"| case | ranks | M | {' | '.join(STAGES)} | all | new kernels |")
    print("|---|---|---|" + "---|" * (len(STAGES) + 2))
    for ranks in options.ranks:
        for name, choose, run in cases(ranks):
            if options.only not in name:
                continue
            for M in options.rows:
                clear_estimates()
                session = open_session(ranks)
                choice = choose(M)
                if choice is None:
                    continue
                for other in others(M, ranks):
                    try:
                        run(session, other, choice)
                    except TileWeaveError as error:  # the choice may not fit other numbers
                        print(f"{name}, M = {other}: {str(error)[:200]}", file=sys.stderr)
                clear_estimates()
                clock.ms.clear()
                compiled.clear()
                profile = cProfile.Profile()
                if options.profile:
                    profile.enable()
                with clock.stage("choice"):
                    choice = choose(M)
                with clock.stage("other"):
                    run(session, M, choice)
                if options.profile:
                    profile.disable()
                ms = [clock.ms[s] for s in STAGES]
                kernels = len({id(f) for f in compiled})
                row = " | ".join(f"{t:.0f}" for t in (*ms, sum(ms)))
                print(f"| {name} | {ranks} | {M} | {row} | {kernels} |", flush=True)
                if options.profile:
                    pstats.Stats(profile).sort_stats(options.profile).print_stats(90)
    return 0


def others(M: int, ranks: int) -> list[int]:
    """Return other numbers of rows, which fill whole tiles if M does."""
    if M % (128 * ranks) == 0:
        return [M + 37 * ranks, M + 1024 * ranks, M + 2048 * ranks]
    if M <= 16 * ranks:
        return [M + ranks, M - ranks]
    return [M + 37 * ranks, M + 1024 * ranks, M + 2048 * ranks]


def clock_trace(clock: Clock, operator, name: str) -> None:
    """Count the time of a function of an operator that traces a program."""
    function = vars(operator).get(name)
    if function is None:
        return
    plain = getattr(function, "__func__", function)

    @wraps(plain)
    def timed(*args, **kwargs):
        with clock.stage("trace"):
            return plain(*args, **kwargs)

    kind = type(function) if isinstance(function, (classmethod, staticmethod)) else lambda f: f
    setattr(operator, name, kind(timed))


if __name__ == "__main__":
    sys.exit(main())
