"""Problem of a GEMM operator, checked."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias
from weakref import WeakKeyDictionary

import torch

from ...builtins.errors import TileWeaveError
from ...builtins.symmetric import packed_strides
from ...runtime.host.group import Group
from .caller import CALLER, warn_caller
from .epilogue import FP8, NO_EPILOGUE, Epilogue
from .groups import TwoLevels
from .registry import OPERATORS

if TYPE_CHECKING:
    from ..attention.problem import AttentionProblem
    from ..moe.row_problem import RowProblem
    from ..norm.problem import NormProblem
    from .collective_problem import CollectiveProblem

    AnyProblem: TypeAlias = (
        "Problem | CollectiveProblem | AttentionProblem | RowProblem | NormProblem"
    )

ALIGNMENT = 16
"""Alignment in bytes that the TMA requires of the base address and of each row."""
_FP8_RESULTS = (torch.bfloat16, torch.float16)
"""Result types of fp8 products; the first is the default."""
_BOOLS = (bool, torch.SymBool)
"""Types of options that are on or off. ``torch.compile`` passes symbols for dynamic extents."""
_warned: set[tuple[str, str, str]] = set()
_agreed: WeakKeyDictionary[Group | TwoLevels, set[tuple[AnyProblem, str]]] = WeakKeyDictionary()
_calls: WeakKeyDictionary[Group, tuple[int, str, str, bool]] = WeakKeyDictionary()
"""Latest call of each group: its number, the operator, the text, and whether it is new."""


@dataclass(frozen=True)
class Problem:
    """GEMM of ``ranks`` ranks. Its kernel and memory are cached per problem.

    Attributes:
        op: name of the operator.
        rows: rows of the rank's first operand.
        N, K: columns of the rank's result and its inner dimension.
        transposed: whether b is stored as (N, K), else as (K, N).
        biased: whether a bias is added.
        result: type of the result; None for that of the operands.
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
        """True if the operator multiplies the rows of all ranks."""
        return OPERATORS[self.op].gathers

    @property
    def scatters(self) -> bool:
        """True if each rank receives some rows of the result."""
        return OPERATORS[self.op].scatters

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
        """Rows and columns of a shard of the product, and the number of shards. No tile crosses the
        rows of a shard."""
        if self.gathers or self.scatters:
            return self.rows_per_rank, self.N, self.ranks
        return self.M, self.N, 1

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of a rank's result."""
        return (self.rows_per_rank if self.scatters else self.M), self.N

    @property
    def tile_dtype(self) -> str:
        """Type of the operands in TileLang's spelling."""
        return str(self.dtype).removeprefix("torch.")

    @property
    def scaled(self) -> bool:
        """True if operands are fp8, which have scales."""
        return self.dtype == FP8

    @property
    def out_dtype(self) -> torch.dtype:
        """Type of the result, of the bias, and of the partial sums that ranks send."""
        return self.result or self.dtype

    @property
    def moved_bytes(self) -> int:
        """Bytes that each rank must receive from the others."""
        if self.gathers:
            nbytes = self.rows * self.K * self.itemsize
        else:
            nbytes = self.M * self.N * self.out_dtype.itemsize
        return OPERATORS[self.op].collective.sent_bytes(nbytes, self.ranks)

    @property
    def tile_out_dtype(self) -> str:
        """Type of the result in TileLang's spelling."""
        return str(self.out_dtype).removeprefix("torch.")

    def stored(self, b: torch.Tensor) -> torch.Tensor:
        """Return b as it is stored in memory, (N, K) or (K, N). It is its own inverse."""
        return b.t() if self.transposed else b

    def __str__(self) -> str:
        order = "transposed " if self.transposed else ""
        return (
            f"{self.op} of ({self.rows}, {self.K}) x {order}({self.K}, {self.N}) {self.tile_dtype}"
            f"{f' to {self.tile_out_dtype}' if self.result else ''}{' with bias' * self.biased}"
        )


def operator_name(caller: str, op: Any, names: Iterable[str]) -> str:
    """Return the name of an operator, which may be passed instead of the operator.

    Args:
        caller: function that needs the name, for the error.

    Raises:
        TileWeaveError: the operator is not in ``names``.
    """
    name = op if isinstance(op, str) else getattr(op, "__name__", repr(op))
    if name not in names:
        raise TileWeaveError(f"{caller}: op={name}; expected {' or '.join(names)}")
    return name


def checked_problem(
    op: str, a: torch.Tensor, b: torch.Tensor, ranks: int, out: torch.Tensor | None = None,
    epilogue: Epilogue = NO_EPILOGUE,
) -> Problem:  # fmt: skip
    """Return the problem of a call.

    Raises:
        TileWeaveError: shapes, types or devices do not fit.
    """
    first, second = OPERATORS[op].arguments
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
    """Return ``Problem.result`` for operands of ``dtype`` if the caller asks for ``out_dtype``.

    Raises:
        TileWeaveError: no GEMM has these types.
    """
    first = OPERATORS[op].arguments[0]
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
    """Refuse scales without fp8 operands, and fp8 operands without scales."""
    op, first = problem.op, OPERATORS[problem.op].arguments[0]
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
    """Return why tensor cores cannot multiply these fp8 operands, with what is expected, as for
    ``torch._scaled_mm``; else None."""
    second = OPERATORS[problem.op].arguments[1]
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
    """Refuse a tensor of another type or device than ``a``, which users call ``first``.

    Args:
        dtype: expected type; None for that of ``a``.
    """
    expected = dtype or a.dtype
    if tensor.dtype != expected:
        legal = f"{expected} as {first}" if expected == a.dtype else f"{expected}"
        raise refused(op, f"{name} is of {tensor.dtype}", legal)
    if tensor.device != a.device:
        raise refused(op, f"{name} is on {tensor.device}", f"{a.device} as {first}")


def is_dense(value: Any) -> bool:
    """Return whether the value is a dense tensor."""
    return isinstance(value, torch.Tensor) and value.layout is torch.strided


def require_dense(op: str, **tensors: Any) -> None:
    """Refuse arguments that are not ``is_dense``; keywords are their names."""
    for name, tensor in tensors.items():
        if not is_dense(tensor):
            is_tensor = isinstance(tensor, torch.Tensor)
            what = f" has layout {tensor.layout}" if is_tensor else f"={reprlib.repr(tensor)}"
            raise refused(op, f"{name}{what}", "a dense torch.Tensor")


def require_dense_or_none(op: str, **tensors: Any) -> None:
    """Apply ``require_dense`` to the arguments that are not None."""
    for name, tensor in tensors.items():
        if tensor is not None:
            require_dense(op, **{name: tensor})


def require_bools(op: str, **flags: Any) -> None:
    """Refuse options that are not bool; keywords are their names. Python would take "no" as
    true."""
    for name, value in flags.items():
        if not isinstance(value, _BOOLS):
            raise refused(op, f"{name}={reprlib.repr(value)}", "True or False")


def require_operands(op: str, a: Any, b: Any, out: Any, epilogue: Epilogue) -> None:
    """Apply ``require_dense`` to all arguments of a GEMM."""
    bias, scale_a, scale_b, _ = epilogue
    if is_dense(a) and is_dense(b) and bias is scale_a is scale_b is out is None:
        return  # naming the arguments costs more than the check
    first, second = OPERATORS[op].arguments
    require_dense(op, **{first: a, second: b})
    require_dense_or_none(op, bias=bias, scale_a=scale_a, scale_b=scale_b, out=out)


def check_layout(op: str, out: torch.Tensor, name: str = "out") -> None:
    """Refuse a result that kernels cannot write."""
    if not is_contiguous_and_aligned(out):
        raise refused(
            op, f"{name} has strides {out.stride()} and begins at {out.data_ptr():#x}",
            f"a contiguous tensor that begins at a multiple of {ALIGNMENT} bytes",
        )  # fmt: skip


def require_no_overlap(
    op: str, out: torch.Tensor, /, result: str = "out", **tensors: torch.Tensor | None
) -> None:
    """Refuse a result that overlaps an argument in memory: it is written while the argument is
    read."""
    for name, x in tensors.items():
        if x is not None and shares_memory(out, x):
            raise refused(op, f"{result} shares memory with {name}", "memory of its own")


def shares_memory(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Return whether two contiguous tensors overlap in memory."""
    return y.data_ptr() < x.data_ptr() + x.nbytes and x.data_ptr() < y.data_ptr() + y.nbytes


def require_no_overlap_with_operands(
    op: str, out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, epilogue: Epilogue
) -> None:
    """Apply ``require_no_overlap`` to the inputs of a GEMM."""
    first, second = OPERATORS[op].arguments
    require_no_overlap(op, out, **{first: a, second: b, "bias": epilogue.bias})


def as_kernel_operands(
    problem: Problem, a: torch.Tensor, b: torch.Tensor, epilogue: Epilogue
) -> tuple[torch.Tensor, torch.Tensor, Epilogue]:
    """Return the operands as kernels can read them.

    An operand with gaps or without alignment is copied, with one warning for each argument of an
    operator.
    """
    first, second = OPERATORS[problem.op].arguments
    a = as_kernel_operand(problem.op, first, a)
    b = problem.stored(as_kernel_operand(problem.op, second, problem.stored(b)))
    bias, scale_a, scale_b, _ = epilogue
    if bias is not None:
        bias = as_kernel_operand(problem.op, "bias", bias)
    if scale_a is not None:
        scale_a, scale_b = scale_a.reshape(1), scale_b.reshape(1)
    return a, b, Epilogue(bias, scale_a, scale_b, problem.out_dtype)


def as_kernel_operand(op: str, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return an argument, or a copy if kernels cannot read it; warn of the first copy."""
    if is_contiguous_and_aligned(tensor):
        return with_packed_strides(tensor)
    caller = CALLER.get() or op
    if (caller, op, name) not in _warned:
        _warned.add((caller, op, name))
        argument = name if caller == op else f"{name} of {op}"
        warn_caller(
            f"{caller}: {argument} of shape {_shape(tensor)} has strides {tensor.stride()} and "
            f"begins at {tensor.data_ptr():#x}; it is copied in each call, as it is not contiguous "
            f"from a multiple of {ALIGNMENT} bytes on"
        )
    return tensor.clone(memory_format=torch.contiguous_format)


def agree(group: Group | TwoLevels, problem: AnyProblem, strategy: str) -> None:
    """Check that all ranks make the same call. Collective for each new problem.

    A rank for which the problem is not new does not wait for the others here. On a CPU,
    ``require_same_call`` finds the difference while ranks wait; on a GPU, the waits of kernels time
    out.

    Args:
        strategy: name of the strategy or the transport.

    Raises:
        TileWeaveError: the calls differ; the message shows the call of each rank. Or the ranks of
            the group are at different calls since an earlier error.
    """
    for part in (group,) if isinstance(group, Group) else (group.nodes, group.node):
        part.require_in_step(problem.op)
    call = f"{problem}, {strategy}"
    agreed = _agreed.setdefault(group, set())
    is_new = (problem, strategy) not in agreed
    _publish(group, problem.op, call, is_new)
    if not is_new:
        return
    if isinstance(group, Group):
        calls = group.exchange("operators", call, check=lambda: require_same_call(group))
    else:
        calls = group.exchange("operators", call)
    if len(set(calls)) > 1:
        raise _disagreement(problem.op, dict(enumerate(calls)))
    agreed.add((problem, strategy))


def _publish(group: Group | TwoLevels, op: str, call: str, is_new: bool) -> None:
    """Write the number and the text of this rank's call into the store, on a CPU.

    Args:
        is_new: whether an exchange compares the call with those of the other ranks.
    """
    if isinstance(group, Group) and group.store is not None and group.device.type == "cpu":
        number = _calls[group][0] + 1 if group in _calls else 1
        _calls[group] = number, op, call, is_new
        group.store.set(_call_key(group.rank), f"{number} {is_new:d} {call}")


def require_same_call(group: Group) -> None:
    """Compare the call of this rank with the calls of the same number on other ranks.

    A rank that is late has a smaller number and is no error. Calls that are new on both ranks are
    compared by their exchange. After another difference the group has failed: one of the ranks may
    be in a collective, and the other is not.

    Raises:
        TileWeaveError: the calls differ; the message shows the call of each of these ranks.
    """
    if group not in _calls or group.store is None:
        return
    number, op, call, is_new = _calls[group]
    calls = {group.rank: call}
    for rank in range(group.world_size):
        if rank != group.rank and group.store.check([_call_key(rank)]):
            peer_number, is_new_there, text = (
                group.store.get(_call_key(rank)).decode().split(" ", maxsplit=2)
            )
            if int(peer_number) == number and not (is_new and int(is_new_there)):
                calls[rank] = text
    if len(set(calls.values())) > 1:
        error = _disagreement(op, calls)
        group.fail(str(error))
        raise error
    group.raise_if_failed(op)


def _call_key(rank: int) -> str:
    return f"call of rank {rank}"


def _disagreement(op: str, calls: dict[int, str]) -> TileWeaveError:
    details = "; ".join(f"rank {rank}: {call}" for rank, call in sorted(calls.items()))
    return TileWeaveError(
        f"{op}: the ranks disagree ({details}); expected the same shapes, types, memory order and "
        "strategy on every rank"
    )


def is_contiguous_and_aligned(tensor: torch.Tensor) -> bool:
    """Return whether kernels can read and write the tensor as it is."""
    return tensor.is_contiguous() and tensor.data_ptr() % ALIGNMENT == 0


def with_packed_strides(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor with packed strides, also along axes of extent 1, where torch
    allows any stride."""
    if 1 not in tensor.shape:
        return tensor
    return tensor.as_strided(tensor.shape, packed_strides(tuple(tensor.shape)))


def _shape(tensor: torch.Tensor) -> tuple[int, ...]:
    return tuple(tensor.shape)


def refused(op: str, what: str, expected: str) -> TileWeaveError:
    """Return the error for an illegal argument.

    Args:
        what: its name and value.
        expected: what is legal.
    """
    return TileWeaveError(f"{op}: {what}; expected {expected}")
