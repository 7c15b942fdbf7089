"""What an operator is asked to multiply, checked."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias
from weakref import WeakKeyDictionary

import torch

from ...builtins.errors import TileWeaveError
from ...builtins.symmetric import packed_strides
from ...runtime.host.group import Group
from .epilogue import FP8, NOTHING, Epilogue
from .groups import TwoLevels

if TYPE_CHECKING:
    from ..attention.problem import AttentionProblem
    from .collective_problem import CollectiveProblem

    Agreed: TypeAlias = "Problem | CollectiveProblem | AttentionProblem"

ALIGNMENT = 16
"""Bytes to which the TMA wants the start of memory and every row of it."""
ARGUMENTS = {
    "all_gather_matmul": ("a_shard", "b"),
    "matmul_reduce_scatter": ("a", "b"),
    "matmul_all_reduce": ("a", "b"),
}
"""How each operator calls its operands."""
_FP8_RESULTS = (torch.bfloat16, torch.float16)
"""What products of fp8 operands may be rounded to; the first is the default."""
_warned: set[tuple[str, str]] = set()
_agreed: WeakKeyDictionary[Group | TwoLevels, set[tuple[Agreed, str]]] = WeakKeyDictionary()
_calls: WeakKeyDictionary[Group, tuple[int, str, str]] = WeakKeyDictionary()
"""The latest call of each group: its number, the operator and the text."""


@dataclass(frozen=True)
class Problem:
    """One product of ``ranks`` ranks; for each a kernel and memory are kept.

    Attributes:
        op: the operator, one of ``ARGUMENTS``.
        rows: of the rank's first operand.
        N, K: columns of the rank's result and its inner dimension.
        transposed: whether b lies in memory as (N, K), else as (K, N).
        biased: whether a bias is added.
        result: the type of the result, if not that of the operands.
    """

    op: str
    rows: int
    N: int
    K: int
    ranks: int
    dtype: torch.dtype
    transposed: bool
    biased: bool = False
    result: torch.dtype | None = None

    @property
    def gathers(self) -> bool:
        """Whether the rows of all ranks are multiplied."""
        return self.op == "all_gather_matmul"

    @property
    def scatters(self) -> bool:
        """Whether the rows of the result are shared out among the ranks."""
        return self.op == "matmul_reduce_scatter"

    @property
    def M(self) -> int:
        """Rows of the product."""
        return self.rows * self.ranks if self.gathers else self.rows

    @property
    def rows_per_rank(self) -> int:
        """Rows that each rank owns of what is gathered or scattered."""
        return self.M // self.ranks

    @property
    def itemsize(self) -> int:
        """Bytes of an operand's element."""
        return self.dtype.itemsize

    @property
    def shards(self) -> tuple[int, int, int]:
        """Rows and columns of a part of the product whose rows no tile crosses, and how many."""
        if self.gathers or self.scatters:
            return self.rows_per_rank, self.N, self.ranks
        return self.M, self.N, 1

    @property
    def shape(self) -> tuple[int, int]:
        """Of the result."""
        return (self.rows_per_rank if self.scatters else self.M), self.N

    @property
    def tile_dtype(self) -> str:
        """TileLang's name of the operands' type."""
        return str(self.dtype).removeprefix("torch.")

    @property
    def scaled(self) -> bool:
        """Whether operands are fp8, with scales."""
        return self.dtype == FP8

    @property
    def out_dtype(self) -> torch.dtype:
        """Of the result, the bias and what ranks send of their sums."""
        return self.result or self.dtype

    @property
    def moved_bytes(self) -> int:
        """What each rank must get from the others."""
        others = self.ranks - 1
        if self.gathers:
            return others * self.rows_per_rank * self.K * self.itemsize
        each = others * self.M * self.N * self.out_dtype.itemsize // self.ranks
        return each if self.scatters else 2 * each

    @property
    def tile_out_dtype(self) -> str:
        """TileLang's name of it."""
        return str(self.out_dtype).removeprefix("torch.")

    def stored(self, b: torch.Tensor) -> torch.Tensor:
        """b as it lies in memory, (N, K) or (K, N); the same twice gives b again."""
        return b.t() if self.transposed else b

    def __str__(self) -> str:
        order = "transposed " if self.transposed else ""
        return (
            f"{self.op} of ({self.rows}, {self.K}) x {order}({self.K}, {self.N}) {self.tile_dtype}"
            f"{f' to {self.tile_out_dtype}' if self.result else ''}{' with bias' * self.biased}"
        )


def operator_name(asks: str, op: Any, known: Iterable[str]) -> str:
    """The name of an operator, which may be given instead of it.

    Args:
        asks: who wants to know.

    Raises:
        TileWeaveError: it is none of ``known``.
    """
    name = op if isinstance(op, str) else getattr(op, "__name__", repr(op))
    if name not in known:
        raise TileWeaveError(f"{asks}: op={name}; expected {' or '.join(known)}")
    return name


def checked(
    op: str, a: torch.Tensor, b: torch.Tensor, ranks: int, out: torch.Tensor | None = None,
    epilogue: Epilogue = NOTHING,
) -> Problem:  # fmt: skip
    """The problem of a call.

    Raises:
        TileWeaveError: shapes, types or devices that do not fit.
    """
    first, second = ARGUMENTS[op]
    for name, tensor in ((first, a), (second, b)):
        if tensor.ndim != 2 or 0 in tensor.shape:
            raise refused(op, f"{name} has shape {_shape(tensor)}", "two positive extents")
        if not tensor.is_floating_point():
            raise refused(op, f"{name} is of {tensor.dtype}", "a floating-point type")
    (rows, K), N = a.shape, b.shape[1]
    if b.shape[0] != K:
        raise refused(
            op, f"{second} has shape {_shape(b)}", f"({K}, N) for {first} of shape {_shape(a)}"
        )
    require_like(op, second, b, first, a)
    transposed = not b.is_contiguous() and b.t().is_contiguous()
    result = result_of(op, a.dtype, epilogue.out_dtype)
    biased = epilogue.bias is not None
    problem = Problem(op, rows, N, K, ranks, a.dtype, transposed, biased, result)
    _check_scales(problem, a, epilogue)
    if problem.scaled and (obstacle := fp8_obstacle(problem)):
        raise TileWeaveError(f"{op}: {obstacle}")
    if problem.scatters and rows % ranks:
        raise refused(
            op, f"{first} has shape {_shape(a)}", f"a multiple of {ranks} rows for {ranks} ranks"
        )
    for name, tensor, shape in (("bias", epilogue.bias, (N,)), ("out", out, problem.shape)):
        if tensor is not None:
            if _shape(tensor) != shape:
                raise refused(op, f"{name} has shape {_shape(tensor)}", f"{shape}")
            require_like(op, name, tensor, first, a, problem.out_dtype)
    return problem


def result_of(
    op: str, dtype: torch.dtype, out_dtype: torch.dtype | None = None
) -> torch.dtype | None:
    """``Problem.result`` for operands of ``dtype``, if ``out_dtype`` is asked for.

    Raises:
        TileWeaveError: there is no such product.
    """
    first = ARGUMENTS[op][0]
    if dtype == FP8:
        if out_dtype not in (None, *_FP8_RESULTS):
            legal = " or ".join(map(str, _FP8_RESULTS))
            raise refused(op, f"out_dtype={out_dtype}", f"{legal} for {first} of {dtype}")
        return out_dtype or _FP8_RESULTS[0]
    if dtype.itemsize == 1:
        raise refused(op, f"{first} is of {dtype}", f"{FP8}, or a type of 16 bits or more")
    if out_dtype not in (None, dtype):
        raise refused(op, f"out_dtype={out_dtype}", f"{dtype} as {first}")
    return None


def _check_scales(problem: Problem, a: torch.Tensor, epilogue: Epilogue) -> None:
    """Refuse scales without fp8 operands, and the other way round."""
    op, first = problem.op, ARGUMENTS[problem.op][0]
    for name, scale in (("scale_a", epilogue.scale_a), ("scale_b", epilogue.scale_b)):
        if not problem.scaled:
            if scale is not None:
                raise refused(op, f"{name} is given", f"none for {first} of {problem.dtype}")
        elif scale is None:
            raise refused(op, f"{name} is None", f"one float32 for {first} of {problem.dtype}")
        elif scale.numel() != 1:
            raise refused(op, f"{name} has shape {_shape(scale)}", "one element")
        else:
            require_like(op, name, scale, first, a, torch.float32)


def fp8_obstacle(problem: Problem) -> str | None:
    """Why tensor cores do not take fp8 operands, and what they take, as ``torch._scaled_mm``."""
    second = ARGUMENTS[problem.op][1]
    if not problem.transposed:
        return (
            f"{second} is of {problem.dtype} and (K, N) in memory; expected the transpose of a "
            "row-major (N, K)"
        )
    for name, extent in (("N", problem.N), ("K", problem.K)):
        if extent % ALIGNMENT:
            return f"{name}={extent}; expected a multiple of {ALIGNMENT} for {problem.dtype}"
    return None


def require_like(
    op: str, name: str, tensor: torch.Tensor, first: str, a: torch.Tensor,
    dtype: torch.dtype | None = None,
) -> None:  # fmt: skip
    """Refuse a tensor of another type or device than that of ``a``, which users call ``first``.

    Args:
        dtype: the type, if not that of ``a``.
    """
    wanted = dtype or a.dtype
    if tensor.dtype != wanted:
        legal = f"{wanted} as {first}" if wanted == a.dtype else f"{wanted}"
        raise refused(op, f"{name} is of {tensor.dtype}", legal)
    if tensor.device != a.device:
        raise refused(op, f"{name} is on {tensor.device}", f"{a.device} as {first}")


def is_dense(given: Any) -> bool:
    """Whether it is a tensor whose numbers lie in memory."""
    return isinstance(given, torch.Tensor) and given.layout is torch.strided


def require_dense(op: str, **given: Any) -> None:
    """Refuse what is not ``is_dense``, by the names of arguments."""
    for name, tensor in given.items():
        if not is_dense(tensor):
            raise refused(op, f"{name}={tensor!r}", "a dense torch.Tensor")


def require_dense_or_none(op: str, **given: Any) -> None:
    """``require_dense`` of arguments that may be left out."""
    for name, tensor in given.items():
        if tensor is not None:
            require_dense(op, **{name: tensor})


def require_operands(op: str, a: Any, b: Any, out: Any, epilogue: Epilogue) -> None:
    """``require_dense`` of all arguments of a product."""
    bias, scale_a, scale_b, _ = epilogue
    if is_dense(a) and is_dense(b) and bias is scale_a is scale_b is out is None:
        return  # names take longer
    first, second = ARGUMENTS[op]
    require_dense(op, **{first: a, second: b})
    require_dense_or_none(op, bias=bias, scale_a=scale_a, scale_b=scale_b, out=out)


def check_layout(op: str, out: torch.Tensor) -> None:
    """Refuse an ``out`` that kernels cannot write."""
    if not is_laid_out(out):
        raise refused(
            op, f"out has strides {out.stride()} and begins at {out.data_ptr():#x}",
            f"a contiguous tensor that begins at a multiple of {ALIGNMENT} bytes",
        )  # fmt: skip


def require_apart(op: str, out: torch.Tensor, **given: torch.Tensor | None) -> None:
    """Refuse an ``out`` that lies where an argument is read while it is written."""
    begin, end = out.data_ptr(), out.data_ptr() + out.nbytes
    for name, x in given.items():
        if x is not None and x.data_ptr() < end and begin < x.data_ptr() + x.nbytes:
            raise refused(op, f"out shares memory with {name}", "memory of its own")


def require_apart_from_operands(
    op: str, out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, epilogue: Epilogue
) -> None:
    """``require_apart`` from what a product reads."""
    first, second = ARGUMENTS[op]
    require_apart(op, out, **{first: a, second: b, "bias": epilogue.bias})


def laid_out(
    problem: Problem, a: torch.Tensor, b: torch.Tensor, epilogue: Epilogue
) -> tuple[torch.Tensor, torch.Tensor, Epilogue]:
    """The operands as kernels can read them: copies, with one warning for each argument of an
    operator, where these have gaps or begin at odd places."""
    first, second = ARGUMENTS[problem.op]
    a = dense(problem.op, first, a)
    b = problem.stored(dense(problem.op, second, problem.stored(b)))
    bias, scale_a, scale_b, _ = epilogue
    if bias is not None:
        bias = dense(problem.op, "bias", bias)
    if scale_a is not None:
        scale_a, scale_b = scale_a.reshape(1), scale_b.reshape(1)
    return a, b, Epilogue(bias, scale_a, scale_b, problem.out_dtype)


def dense(op: str, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """An argument as kernels can read it."""
    if is_laid_out(tensor):
        return packed(tensor)
    if (op, name) not in _warned:
        _warned.add((op, name))
        warnings.warn(
            f"{op}: {name} of shape {_shape(tensor)} has strides {tensor.stride()} and begins at "
            f"{tensor.data_ptr():#x}; it is copied in each call, as it is not contiguous from a "
            f"multiple of {ALIGNMENT} bytes on",
            stacklevel=2,
        )
    return tensor.clone(memory_format=torch.contiguous_format)


def agree(group: Group | TwoLevels, problem: Agreed, strategy: str) -> None:
    """Make sure that all ranks do the same. Collective for each new problem.

    A rank for which the problem is not new does not wait for the others here. Ranks of a CPU then
    find out from ``require_same_call`` when they wait; on a GPU, waits of kernels time out.

    Args:
        strategy: its name, or that of a transport.

    Raises:
        TileWeaveError: they do not; it names what each of them was asked.
    """
    what = f"{problem}, {strategy}"
    _publish(group, problem.op, what)
    known = _agreed.setdefault(group, set())
    if (problem, strategy) in known:
        return
    if isinstance(group, Group):
        said = group.exchange("operators", what, look=lambda: require_same_call(group))
    else:
        said = group.exchange("operators", what)
    if len(set(said)) > 1:
        raise _disagreement(problem.op, dict(enumerate(said)))
    known.add((problem, strategy))


def _publish(group: Group | TwoLevels, op: str, what: str) -> None:
    """Write the number and the text of this rank's call into the store, on a CPU."""
    if isinstance(group, Group) and group.store is not None and group.device.type == "cpu":
        number = _calls.get(group, (0, "", ""))[0] + 1
        _calls[group] = number, op, what
        group.store.set(_call_key(group.rank), f"{number} {what}")


def require_same_call(group: Group) -> None:
    """Compare the call of this rank with those of the ranks that make their call of this number.

    A rank that is late has a smaller number and is no error.

    Raises:
        TileWeaveError: they differ; it names what each of these ranks was asked.
    """
    if group not in _calls or group.store is None:
        return
    number, op, what = _calls[group]
    said = {group.rank: what}
    for rank in range(group.world_size):
        if rank != group.rank and group.store.check([_call_key(rank)]):
            theirs, _, text = group.store.get(_call_key(rank)).decode().partition(" ")
            if int(theirs) == number:
                said[rank] = text
    if len(set(said.values())) > 1:
        raise _disagreement(op, said)


def _call_key(rank: int) -> str:
    return f"call of rank {rank}"


def _disagreement(op: str, said: dict[int, str]) -> TileWeaveError:
    each = "; ".join(f"rank {rank}: {what}" for rank, what in sorted(said.items()))
    return TileWeaveError(
        f"{op}: the ranks disagree ({each}); expected the same shapes, types, memory order and "
        "strategy on every rank"
    )


def is_laid_out(tensor: torch.Tensor) -> bool:
    """Whether kernels can read and write it."""
    return tensor.is_contiguous() and tensor.data_ptr() % ALIGNMENT == 0


def packed(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor with strides that say so, also along extents of 1, where any would do."""
    if 1 not in tensor.shape:
        return tensor
    return tensor.as_strided(tensor.shape, packed_strides(tuple(tensor.shape)))


def _shape(tensor: torch.Tensor) -> tuple[int, ...]:
    return tuple(tensor.shape)


def refused(op: str, what: str, expected: str) -> TileWeaveError:
    """The error of an operator."""
    return TileWeaveError(f"{op}: {what}; expected {expected}")
