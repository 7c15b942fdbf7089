"""Random problems of tests/gpu/soak.py: operators and programs of tests/corpus with exact results.

All ranks draw the same problems and generate the inputs of all ranks, so that each computes its
reference alone. Inputs are small integers. Every sum of them is exact in every type.
"""

from __future__ import annotations

import math
import random
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import numpy as np
import torch

import tileweave as tw
from tests.corpus import PROGRAMS
from tests.on_gpus import GPU, transports_here
from tileweave import ops
from tileweave.ops.autotune.store import Measurement, table_for, tuning_key
from tileweave.ops.collectives.collective import checked_problem as checked_collective
from tileweave.ops.collectives.transport import OWN, SUMMED
from tileweave.ops.core.epilogue import Epilogue
from tileweave.ops.core.groups import group_of
from tileweave.ops.core.problem import checked_problem
from tileweave.ops.core.registry import OPERATORS, operators_of
from tileweave.ops.gemm.gemm_operator import GemmOperator
from tileweave.runtime.executor.recorded_calls import invalidate
from tileweave.runtime.kernel.configured import configured
from tileweave.runtime.plans.parameters import parameters_of, shapes_of

DEVICE = "cuda" if GPU else "cpu"
FP8 = torch.float8_e4m3fn
EXACT = 256
"""Largest absolute value up to which bf16 represents all integers."""
MOVED = (*SUMMED, torch.uint8, torch.int32, torch.float64)
COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast")
CHECKED = list[tuple[str, torch.Tensor, torch.Tensor, float]]
"""Tensors of one launch: name, result, reference, tolerance."""


class Data(ABC):
    """Inputs, outputs and references of several launches of one problem."""

    launches = 4

    @abstractmethod
    def fill(self, seed: int) -> None:
        """Write new inputs and references. A captured launch uses them at its next replay."""

    @abstractmethod
    def launch(self, slot: int) -> None:
        """Enqueue the launch with the inputs of ``slot``, after its result was overwritten."""

    @abstractmethod
    def results(self, slot: int) -> CHECKED:
        """Return what the launch with the inputs of ``slot`` must have written."""


class Draw(ABC):
    """A problem that all ranks draw from the same random numbers."""

    name: str
    capturable = True
    """Whether a CUDA graph may capture it: captured operators keep their memory."""

    @abstractmethod
    def data(self) -> Data:
        """Return memory for its launches. Collective."""

    def programs(self) -> list[Any]:
        """Return what its first launch compiles."""
        return []


def integers(seed: int, *shape: int, low: int = 0, high: int = 9) -> torch.Tensor:
    """Return the same random integers on each rank, in fp32."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return torch.randint(low, high, shape, generator=generator, device=DEVICE).float()


def sparse(seed: int, *shape: int) -> torch.Tensor:
    """Return -1 and 1 in an eighth of the elements, the same on each rank, in fp32."""
    values = integers(seed, *shape, high=16)
    return (values == 0).float() - (values == 1).float()


def unwritten(dtype: torch.dtype) -> float:
    """Return a value that no problem computes."""
    return math.nan if dtype.is_floating_point else torch.iinfo(dtype).max


def spread(rng: random.Random, least: int, most: int, multiple: int) -> int:
    """Return a random multiple; small and large ones are drawn equally often."""
    value = math.exp(rng.uniform(math.log(least), math.log(most)))
    return max(multiple, round(value / multiple) * multiple)


@cache
def _transports() -> list[str]:
    return transports_here(list(OWN))


@dataclass(frozen=True)
class Gemm(Draw):
    """A GEMM operator by one of its programs."""

    op: str
    share: int
    N: int
    K: int
    dtype: torch.dtype
    transposed: bool
    biased: bool
    pick: int
    """Random number that selects the program, the number of chunks and the tiles."""

    @staticmethod
    def draw(rng: random.Random) -> Gemm:
        op = rng.choice(sorted(operators_of(GemmOperator)))
        most = 1200 if GPU else 40
        dtype = rng.choice([torch.bfloat16, torch.float16, FP8] if GPU else [torch.float32])
        multiple = 16 if dtype == FP8 else 8
        N, K = (spread(rng, 8, 2 * most, multiple) for _ in "NK")
        transposed = dtype == FP8 or rng.random() < 0.5
        return Gemm(
            op, rng.randint(1, most), N, K, dtype, transposed, rng.random() < 0.3,
            rng.randrange(1 << 16),
        )  # fmt: skip

    @property
    def ranks(self) -> int:
        return group_of("").world_size

    @property
    def rows(self) -> int:
        """Rows of a rank's A. An all-reduce needs no multiple of the number of ranks."""
        gathers = OPERATORS[self.op].gathers
        if gathers or OPERATORS[self.op].scatters:
            return self.share if gathers else self.share * self.ranks
        return self.share

    @property
    def out_dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.dtype == FP8 else self.dtype

    def operands(self, seed: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return A and B of a rank, in fp32."""
        seed += 2 * rank
        return sparse(seed, self.rows, self.K), sparse(seed + 1, self.K, self.N)

    def stored_b(self, b: torch.Tensor) -> torch.Tensor:
        return b.t().contiguous().t() if self.transposed else b.contiguous()

    @cached_property
    def extra(self) -> dict[str, Any]:
        """Arguments besides A and B."""
        extra: dict[str, Any] = {}
        if self.biased:
            extra["bias"] = integers(self.pick, self.N).to(self.out_dtype)
        if self.dtype == FP8:
            one = torch.ones(1, dtype=torch.float32, device=DEVICE)
            extra |= {"scale_a": one, "scale_b": one / 2, "out_dtype": self.out_dtype}
        return extra

    @cached_property
    def problem(self) -> Any:
        a = torch.empty(self.rows, self.K, dtype=self.dtype, device=DEVICE)
        b = self.stored_b(torch.empty(self.K, self.N, device=DEVICE)).to(self.dtype)
        return checked_problem(self.op, a, b, self.ranks, None, Epilogue(**self.extra))

    @cached_property
    def choice(self) -> Any:
        """Program and tiles; None on a CPU. Each program is drawn equally often."""
        if not GPU:
            return None
        by_program: dict[tuple[str, int], list[Any]] = {}
        for choice in OPERATORS[self.op].candidates(self.problem):
            by_program.setdefault((choice.program, choice.tiles.num_chunks), []).append(choice)
        every = list(by_program.values())[self.pick % len(by_program)]
        return every[self.pick // len(by_program) % len(every)]

    @property
    def name(self) -> str:
        kind = f"{self.dtype} {'B transposed' if self.transposed else 'B as is'}"
        kind += " with bias" * self.biased
        return f"{self.op} share={self.share} N={self.N} K={self.K} {kind} by {self.choice}"

    @property
    def capturable(self) -> bool:
        return self.pick % 4 == 0

    def programs(self) -> list[Any]:
        return OPERATORS[self.op].compiled_programs(self.problem, self.choice)

    def data(self) -> Data:
        if self.choice is not None:
            table = table_for(group_of(""))
            table[tuning_key(self.problem)] = Measurement(self.choice, 0.0, 1.0)
            invalidate()
        return GemmData(self)


class GemmData(Data):
    """Operands of a GEMM."""

    def __init__(self, gemm: Gemm) -> None:
        self.gemm, self.rank = gemm, group_of("").rank
        self.slots: list[tuple[torch.Tensor, ...]] = []

    def fill(self, seed: int) -> None:
        gemm = self.gemm
        for slot in range(self.launches):
            every = [gemm.operands(seed + 1000 * slot, rank) for rank in range(gemm.ranks)]
            a, b = every[self.rank]
            kind = OPERATORS[gemm.op]
            if kind.gathers:
                right = torch.cat([a for a, _ in every]) @ b
            else:
                right = sum((a @ b for a, b in every), torch.zeros((), device=DEVICE))
                right = right.chunk(gemm.ranks)[self.rank] if kind.scatters else right
            right = right / 2 if gemm.dtype == FP8 else right
            right = right + gemm.extra["bias"].float() if gemm.biased else right
            if right.abs().max().item() > EXACT:
                raise ValueError(f"{gemm.name}: a sum above {EXACT}; expected smaller inputs")
            new = a.to(gemm.dtype), gemm.stored_b(b).to(gemm.dtype), right.to(gemm.out_dtype)
            if slot == len(self.slots):
                self.slots.append((*new, torch.empty_like(new[-1])))
            else:
                for old, value in zip(self.slots[slot], new, strict=False):
                    old.copy_(value)

    def launch(self, slot: int) -> None:
        a, b, _, out = self.slots[slot]
        out.fill_(math.nan)
        strategy = "fused" if GPU else "nccl"
        getattr(ops, self.gemm.op)(a, b, **self.gemm.extra, out=out, strategy=strategy)

    def results(self, slot: int) -> CHECKED:
        *_, right, out = self.slots[slot]
        return [("result", out, right, 0.0)]


@dataclass(frozen=True)
class Exchange(Draw):
    """A collective by one of its transports."""

    op: str
    axes: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    transport: str
    capturable: bool

    @staticmethod
    def draw(rng: random.Random) -> Exchange:
        """Draw until a transport can move the problem; threads can move every problem."""
        while True:
            one = Exchange._any(rng)
            x = torch.empty(one.shape, dtype=one.dtype, device="meta")
            problem = checked_collective(one.op, x, None, group_of("").world_size, one.axes)
            if not GPU or OPERATORS[one.op].obstacle(problem, one.transport) is None:
                return one

    @staticmethod
    def _any(rng: random.Random) -> Exchange:
        ranks, op = group_of("").world_size, rng.choice(COLLECTIVES)
        most = 2048 if GPU else 24
        shape = [spread(rng, 1, most, 1)]
        shape += [spread(rng, 1, 32, 1) for _ in range(rng.randint(0, 2))]
        axes: tuple[int, ...] = ()
        if op == "broadcast":
            axes = (rng.randrange(ranks),)
        if op == "all_to_all":
            axes = rng.randrange(len(shape)), rng.randrange(len(shape))
        if op in ("all_to_all", "reduce_scatter"):
            shape[axes[0] if axes else 0] *= ranks
        dtype = rng.choice(SUMMED if op in ("all_reduce", "reduce_scatter") else MOVED)
        transport = rng.choice(_transports()) if GPU else "nccl"
        return Exchange(op, axes, tuple(shape), dtype, transport, rng.random() < 0.25)

    @property
    def name(self) -> str:
        return f"{self.op} {self.axes} of {self.shape} {self.dtype} by {self.transport}"

    def programs(self) -> list[Any]:
        x = torch.empty(self.shape, dtype=self.dtype, device="meta")
        problem = checked_collective(self.op, x, None, group_of("").world_size, self.axes)
        return [OPERATORS[self.op].steps(problem, self.transport)]

    def right(self, x: list[torch.Tensor], rank: int) -> torch.Tensor:
        """Return this rank's result, given the inputs of all."""
        return OPERATORS[self.op].expected(torch.stack(x), rank, *self.axes)

    def data(self) -> Data:
        return ExchangeData(self)


class ExchangeData(Data):
    """Inputs of a collective."""

    def __init__(self, exchange: Exchange) -> None:
        self.exchange, self.group = exchange, group_of("")
        self.slots: list[tuple[torch.Tensor, ...]] = []

    def fill(self, seed: int) -> None:
        shape, dtype = self.exchange.shape, self.exchange.dtype
        for slot in range(self.launches):
            first = seed + 1000 * slot
            x = [integers(first + r, *shape).to(dtype) for r in range(self.group.world_size)]
            right = self.exchange.right(x, self.group.rank).contiguous()
            if slot == len(self.slots):
                mine = x[self.group.rank].clone()
                self.slots.append((mine, right.clone(), torch.empty_like(right)))
            else:
                self.slots[slot][0].copy_(x[self.group.rank])
                self.slots[slot][1].copy_(right)

    def launch(self, slot: int) -> None:
        x, _, out = self.slots[slot]
        out.fill_(unwritten(out.dtype))
        op, transport = self.exchange.op, self.exchange.transport
        getattr(ops, op)(x, *self.exchange.axes, out=out, transport=transport)

    def results(self, slot: int) -> CHECKED:
        _, right, out = self.slots[slot]
        return [("result", out, right, 0.0)]


@dataclass(frozen=True)
class Inferred(Draw):
    """A program of tests/corpus, which has no explicit synchronization."""

    program: str
    delays: int | None

    @staticmethod
    def draw(rng: random.Random) -> Inferred:
        ranks = group_of("").world_size
        names = [name for name, case in PROGRAMS.items() if ranks in case.ranks]
        seed = rng.randrange(4)
        return Inferred(rng.choice(names), seed if rng.random() < 0.3 else None)

    @property
    def name(self) -> str:
        return f"{self.program} with tileweave.delays={self.delays}"

    @property
    def capturable(self) -> bool:
        return not PROGRAMS[self.program].sizes  # a graph has one size

    @property
    def configs(self) -> dict[str, Any]:
        return {} if self.delays is None else {"tileweave.delays": self.delays}

    def programs(self) -> list[Any]:
        case = PROGRAMS[self.program]
        made = case.make(group_of("").world_size)
        return [] if case.sizes else [configured(self.program, made, self.configs)]

    @cached_property
    def compiled(self) -> tuple[Any, list[Any]]:
        """Kernel or plan, and its parameters. Collective."""
        program = PROGRAMS[self.program].make(tw.world_size())
        if isinstance(program, tw.Plan):
            return program.with_configs(self.configs), list(program.parameters)
        kernel = tw.compile(program, pass_configs=self.configs)
        return kernel, list(parameters_of(program))

    @cached_property
    def memory(self) -> dict[str, tw.SymmetricTensor]:
        """Symmetric memory by parameter, filled at the first data."""
        return {}

    def data(self) -> Data:
        return InferredData(self)


class InferredData(Data):
    """Arguments of a program of tests/corpus."""

    def __init__(self, drawn: Inferred) -> None:
        self.drawn, self.case = drawn, PROGRAMS[drawn.program]
        self.kernel, self.parameters = drawn.compiled
        self.slots: list[dict[str, torch.Tensor]] = [{} for _ in range(self.launches)]
        self.rights: list[dict[str, torch.Tensor]] = [{} for _ in range(self.launches)]
        self.symmetric = [p.name for p in self.parameters if p.symmetric]

    def fill(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        for slot in range(self.launches):
            inputs = self.case.inputs(rng, tw.world_size())
            mine = inputs[tw.rank()]
            shapes = shapes_of(self.parameters, {n: v.shape for n, v in mine.items()}, "inputs")
            for p in self.parameters:
                dtype = getattr(torch, p.dtype)
                if p.name in mine and not p.symmetric:
                    value = torch.from_numpy(mine[p.name]).to(DEVICE)
                else:
                    value = torch.empty(shapes[p.name], dtype=dtype, device=DEVICE)
                if p.symmetric:
                    self._allocate(p.name, shapes[p.name], dtype)
                _put(self.slots[slot], p.name, value)
            for name, value in self.case.expected(inputs)[tw.rank()].items():
                _put(self.rights[slot], name, torch.from_numpy(np.asarray(value)).to(DEVICE))

    def _allocate(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        """Allocate symmetric memory for the largest of the dynamic sizes. Collective."""
        if name not in self.drawn.memory:
            scale = max(self.case.sizes, default=1)
            self.drawn.memory[name] = tw.symmetric((scale * math.prod(shape),), dtype)

    def launch(self, slot: int) -> None:
        arguments = []
        for p in self.parameters:
            value = self.slots[slot][p.name]
            if p.name in self.rights[slot] and not p.symmetric:
                value.fill_(unwritten(value.dtype))
            if p.symmetric:
                flat = self.drawn.memory[p.name].all[:, : value.numel()]
                arguments.append(flat.view(tw.world_size(), *value.shape))
            else:
                arguments.append(value)
        self.kernel(*arguments)
        for p, argument in zip(self.parameters, arguments, strict=True):
            if p.symmetric:  # what a caller reads before the next launch
                self.slots[slot][p.name].copy_(argument[tw.rank()])

    def results(self, slot: int) -> CHECKED:
        rights = self.rights[slot].items()
        return [(name, self.slots[slot][name], v, self.case.tolerance) for name, v in rights]


def _put(tensors: dict[str, torch.Tensor], name: str, value: torch.Tensor) -> None:
    """Write ``value`` where a captured launch finds it, unless its shape has changed."""
    old = tensors.get(name)
    if old is not None and old.shape == value.shape:
        old.copy_(value)
    else:
        tensors[name] = value
