"""Builder that a plan's function receives: each method appends a step."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from tvm import tirx

from ...builtins.errors import TileWeaveError
from ..kernel.dynamic import DynamicKernel
from ..kernel.kernel import Kernel
from .parameters import Parameter, parameters_of, shapes_of, shown_sizes
from .regions import Region, Rows, at_loc, loc
from .steps import Copy, CopyValue, Launch, Step, WaitStream, WaitValue, WriteValue

_WORDS = ("int32", "uint32")
"""Types of a flag that a stream can write."""


class PlanBuilder:
    """First argument of a plan's function: each method appends a step of this rank.

    Each method accepts ``stream``: the name of a side stream, or None for the caller's stream. Side
    streams start after the operations that the caller enqueued before the call, and the caller's
    stream continues after all side streams have ended.

    Attributes:
        rank, world_size: rank and size of the group, as integers.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        self.steps: list[Step] = []

    def peers(self) -> Iterator[int]:
        """Iterate over the other ranks, each rank's right neighbor first, so that no two ranks
        write to the same rank at the same time."""
        return ((self.rank + i) % self.world_size for i in range(1, self.world_size))

    def copy(self, dst: Region, src: Region, *, stream: str | None = None) -> None:
        """Copy ``src`` to ``dst`` with a copy engine; each is own memory or a peer's.

        A copy between GPUs uses no SM. A copy within one GPU does: do not put it after a kernel
        that waits for it.

        Args:
            dst, src: regions of the same shape and type; of a symmetric tensor, in the part of one
                rank. Both are rows at a constant distance, contiguous along the last axes.
        """
        for side, region in (("dst", dst), ("src", src)):
            self._require_region("copy", side, region)
            if region.parameter.symmetric and 0 in region.axes:
                raise self._refused(
                    "copy", f"{side}={region} is in several ranks' memory", "an index of one rank"
                )
        for attribute in ("shape", "dtype"):
            if getattr(dst, attribute) != getattr(src, attribute):
                raise self._refused(
                    "copy",
                    f"src={src} has {attribute} {getattr(src, attribute)}",
                    f"{getattr(dst, attribute)} of dst={dst}",
                )
        if dst.overlaps(src):
            raise self._refused("copy", f"src={src} overlaps dst={dst}", "regions apart")
        rows = Rows.of(dst, src)
        if rows is None:
            raise self._refused(
                "copy", f"dst={dst}, src={src}", "rows at one distance in each, without gaps inside"
            )
        self._add(Copy, stream, dst=dst, src=src, rows=rows)

    def write_value(self, dst: Region, value: int, *, stream: str | None = None) -> None:
        """Write a word, own or a peer's: a release at sys scope of the earlier operations of the
        stream.

        A CUDA graph records ``value`` as a constant; ``copy_value`` reads a new value at each
        replay.

        Args:
            dst: one element of an int32 or uint32 tensor.
            value: an integer, taken modulo 2**32.

        Source: CUDA driver API, cuStreamBatchMemOp, as cuStreamWriteValue32: a fence as by
        __threadfence_system(), scoped to the stream, comes before the write.
        """
        self._require_word("write_value", "dst", dst)
        value = self._integer("write_value", value)
        self._add(WriteValue, stream, dst=dst, value=value)

    def copy_value(self, dst: Region, src: Region, *, stream: str | None = None) -> None:
        """Copy a word from own memory to a flag, own or a peer's: a release at sys scope, as
        ``write_value``. A CUDA graph reads the value again at each replay.

        Args:
            dst: one element of an int32 or uint32 tensor.
            src: one element of a tensor of the same type in own memory; its writer comes before the
                copy in the stream.

        Source: the copy starts after the earlier operations of the stream have ended, and moves an
        aligned word atomically. NCCL's copy-engine collectives signal to waiting streams in this
        way; CUDA guarantees nothing to a kernel that polls the word.
        """
        self._require_word("copy_value", "dst", dst)
        self._require_own_word("copy_value", "src", src)
        if dst.dtype != src.dtype:
            raise self._refused("copy_value", f"src={src} has dtype {src.dtype}", dst.dtype)
        self._add(CopyValue, stream, dst=dst, src=src)

    def wait_value(self, flag: Region, value: int, *, stream: str | None = None) -> None:
        """Let the stream wait until a word in own memory has reached ``value``: an acquire at sys
        scope of what a peer or a kernel, possibly one that still runs, has released.

        The wait uses no SM. Append the signal of the word before the wait, in another stream.
        ``write_value`` after the wait resets the word for the next call or the next replay of a
        CUDA graph.

        Args:
            flag: one element of an int32 or uint32 tensor.
            value: an integer, taken modulo 2**32. The wait ends when the word exceeds
                it by 0 to 2**31 - 1, modulo 2**32.

        Source: CUDA driver API, cuStreamBatchMemOp, as cuStreamWaitValue32 with
        CU_STREAM_WAIT_VALUE_GEQ; CUDA does not track this dependency, so the host enqueues the
        signal before the wait.
        """
        self._require_own_word("wait_value", "flag", flag)
        value = self._integer("wait_value", value)
        self._add(WaitValue, stream, flag=flag, value=value)

    def wait_stream(self, other: str | None, *, stream: str | None = None) -> None:
        """Let ``stream`` wait for the operations enqueued in ``other`` so far.

        Args:
            other: a stream that has steps; None is the caller's stream.
        """
        if other is not None and other not in [s.stream for s in self.steps]:
            raise self._refused("wait_stream", f"other={other!r} has no steps", "one that has")
        self._add(WaitStream, stream, other=other)

    def launch(self, kernel: Any, *args: Any, stream: str | None = None) -> None:
        """Launch a kernel on whole tensors of the plan.

        A kernel with inferred synchronization is compiled for each set of dynamic sizes, which are
        taken from the shapes of its arguments.

        Args:
            kernel: a ``@T.prim_func``, compiled once for the group; or a result of ``tw.compile``,
                which runs only on GPUs.
            args: its arguments in order: parameters of the plan and numbers. None is skipped.
        """
        compiled = isinstance(kernel, (Kernel, DynamicKernel))
        program = kernel.program if compiled else kernel
        if not isinstance(program, tirx.PrimFunc):
            raise self._refused("launch", f"kernel={kernel!r}", "a T.prim_func or a tw.compile()d")
        op = f"launch of {program.attrs['global_symbol']}"
        parameters = parameters_of(program)
        arguments = self._arguments(op, parameters, args)
        sizes = self._sizes(op, parameters, arguments)
        self._add(
            Launch, stream, kernel=kernel, program=program, arguments=arguments, sizes=sizes
        )  # fmt: skip

    def _arguments(
        self, op: str, parameters: Sequence[Parameter], args: Iterable[Any]
    ) -> dict[str, Any]:
        """Return the arguments of a kernel by the name of its parameter."""
        args = tuple(value for value in args if value is not None)
        if len(args) != len(parameters):
            names = ", ".join(p.name for p in parameters)
            raise self._refused(op, f"{len(args)} arguments", f"{len(parameters)}: {names}")
        args = tuple(map(partial(self._argument, op), parameters, args))
        arguments = dict(zip((p.name for p in parameters), args, strict=True))
        self._require_distinct(op, parameters, arguments)
        return arguments

    def _require_distinct(
        self, op: str, parameters: Iterable[Parameter], arguments: Mapping[str, Any]
    ) -> None:
        """Refuse a symmetric tensor that is the argument of two parameters of a kernel."""
        names: dict[str, str] = {}
        """Name of a symmetric tensor of the plan -> name of the kernel's parameter."""
        for p in parameters:
            if not p.symmetric:
                continue
            tensor = arguments[p.name].parameter.name
            if names.setdefault(tensor, p.name) != p.name:
                raise self._refused(
                    op, f"{names[tensor]} and {p.name} are both {tensor}",
                    "a tensor for each, because each is synchronized by itself",
                )  # fmt: skip

    def _sizes(
        self, op: str, parameters: Sequence[Parameter], arguments: Mapping[str, Any]
    ) -> dict[str, int]:
        """Return the dynamic extents of a kernel; refuse shapes that are not the declared ones."""
        tensors = {p.name: arguments[p.name] for p in parameters if p.shape is not None}
        shapes = {
            name: t.shape[1:] if t.parameter.symmetric else t.shape for name, t in tensors.items()
        }
        for name, expected in shapes_of(parameters, shapes, op).items():
            if shapes[name] != expected:
                raise self._refused(op, f"{name} has shape {shapes[name]}", str(expected))
        return shown_sizes(parameters, shapes)

    def _add(self, kind: type[Step], stream: str | None, /, **fields: Any) -> None:
        if not (stream is None or (isinstance(stream, str) and stream)):
            raise self._refused(kind.op[2:], f"stream={stream!r}", "a name, or None")
        self.steps.append(kind(stream, loc(), len(self.steps) + 1, **fields))

    def _require_region(self, op: str, side: str, region: Any) -> None:
        if not isinstance(region, Region):
            raise self._refused(op, f"{side}={region!r}", "a tensor of the plan, or a part of it")

    def _argument(self, op: str, p: Parameter, value: Any) -> Any:
        if p.shape is None:
            try:
                return p.number(value)
            except ValueError as error:
                raise self._refused(op, f"argument {p.name} is {value!r}", str(error)) from None
        self._require_region(op, p.name, value)
        if not value.is_whole:
            raise self._refused(op, f"argument {p.name} is {value}", "a whole tensor of the plan")
        if value.parameter.symmetric != p.symmetric:
            kinds = ("T.Tensor", "W.Symmetric")
            raise self._refused(
                op,
                f"argument {p.name} is {value.parameter.name}, a {kinds[not p.symmetric]} of the "
                "plan",
                f"a {kinds[p.symmetric]}, as the kernel declares {p.name}",
            )
        if value.dtype != p.dtype:
            what = f"argument {p.name} is {value} of type {value.dtype}"
            raise self._refused(op, what, f"{p.dtype}, as the kernel declares {p.name}")
        return value

    def _refused(self, op: str, what: str, expected: str) -> TileWeaveError:
        return TileWeaveError(f"{op}: {what}; expected {expected}{at_loc()}")

    def _require_word(self, op: str, side: str, region: Any) -> None:
        self._require_region(op, side, region)
        if region.axes or region.dtype not in _WORDS:
            raise self._refused(
                op, f"{side}={region} of {region.dtype}", f"one element of {' or '.join(_WORDS)}"
            )

    def _require_own_word(self, op: str, side: str, region: Any) -> None:
        self._require_word(op, side, region)
        if region.rank not in (None, self.rank):
            raise self._refused(op, f"{side}={region}", f"own memory, of rank {self.rank}")

    def _integer(self, op: str, value: Any) -> int:
        try:
            return operator.index(value)
        except TypeError:
            raise self._refused(op, f"value={value!r}", "an integer") from None
