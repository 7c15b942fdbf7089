"""Builder that a plan's function receives: each method appends a step."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from functools import partial
from typing import Any

from tvm import tirx

from ...builtins.errors import TileWeaveError
from ..kernel.dynamic import DynamicKernel
from ..kernel.kernel import Kernel
from .parameters import (
    Parameter,
    parameters_of,
    shapes_of,
    shown_sizes,
)
from .regions import Region, Rows, at_loc, loc
from .steps import Copy, CopyValue, Launch, Step, WaitStream, WaitValue, WriteValue

_WORDS = ("int32", "uint32")
"""Types of a flag that a stream can write."""


class PlanBuilder:
    """What the function of a plan gets as its first argument: says the steps of this rank.

    Every step takes ``stream``: the name of a side stream, or None for the caller's. Side streams
    start after what the caller's stream did before the call, and the caller's stream goes on after
    all of them have ended.

    Attributes:
        rank, world_size: of the group, as numbers.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        self.steps: list[Step] = []

    def peers(self) -> Iterator[int]:
        """The other ranks, each rank's right neighbour first, so that no two ranks write to the
        same one at the same time."""
        return ((self.rank + i) % self.world_size for i in range(1, self.world_size))

    def copy(self, dst: Region, src: Region, *, stream: str | None = None) -> None:
        """Copy ``src`` to ``dst``, own or a peer's, by a copy engine.

        Between GPUs it takes no SM. Within one GPU it does: put no such copy behind a kernel that
        waits for it.

        Args:
            dst, src: regions of the same shape and type; of a symmetric tensor, in one rank's
                part. Both are rows at a constant distance, the last axes without gaps.
        """
        for side, region in (("dst", dst), ("src", src)):
            self._require_region("copy", side, region)
            if region.parameter.symmetric and 0 in region.axes:
                raise self._refused(
                    "copy", f"{side}={region} is in several ranks' memory", "an index of one rank"
                )
        for what in ("shape", "dtype"):
            if getattr(dst, what) != getattr(src, what):
                raise self._refused(
                    "copy",
                    f"src={src} has {what} {getattr(src, what)}",
                    f"{getattr(dst, what)} of dst={dst}",
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
        """Write a word, own or a peer's: a release at sys scope of all that the stream did before.

        ``value`` is a constant in a CUDA graph; ``copy_value`` is not.

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
        ``write_value``, of a value that a CUDA graph finds anew at each replay.

        Args:
            dst: one element of an int32 or uint32 tensor.
            src: the same of a tensor in own memory; what writes it comes before in the stream.

        Source: the copy starts after what is before it in the stream has ended, and moves an
        aligned word at once. NCCL's copy-engine collectives signal in this way, to streams that
        wait; CUDA promises nothing to a kernel that polls the word.
        """
        self._require_word("copy_value", "dst", dst)
        self._require_own_word("copy_value", "src", src)
        if dst.dtype != src.dtype:
            raise self._refused("copy_value", f"src={src} has dtype {src.dtype}", dst.dtype)
        self._add(CopyValue, stream, dst=dst, src=src)

    def wait_value(self, flag: Region, value: int, *, stream: str | None = None) -> None:
        """What follows in the stream comes after a word in own memory has reached ``value``: an
        acquire at sys scope of what a kernel, also one that goes on, or a peer has released.

        It takes no SM. Say what signals the word before it, in another stream. ``write_value``
        behind the wait resets the word, for the next call or replay of a CUDA graph.

        Args:
            flag: one element of an int32 or uint32 tensor.
            value: an integer, taken modulo 2**32. The word has reached it while it is at most
                2**31 - 1 above, across wrap-around.

        Source: CUDA driver API, cuStreamBatchMemOp, as cuStreamWaitValue32 with
        CU_STREAM_WAIT_VALUE_GEQ; CUDA itself does not know of this order, so the host enqueues what
        signals before what waits.
        """
        self._require_own_word("wait_value", "flag", flag)
        value = self._integer("wait_value", value)
        self._add(WaitValue, stream, flag=flag, value=value)

    def launch(self, kernel: Any, *args: Any, stream: str | None = None) -> None:
        """Launch a kernel on whole tensors of the plan.

        A kernel whose synchronisation is inferred is compiled for each set of dynamic sizes; its
        arguments show them.

        Args:
            kernel: a ``@T.prim_func``, compiled once for the group; or what ``tw.compile`` made of
                it, for GPUs only.
            args: its arguments in order: parameters of the plan and numbers. None is left out.
        """
        args = tuple(value for value in args if value is not None)
        compiled = isinstance(kernel, (Kernel, DynamicKernel))
        program = kernel.program if compiled else kernel
        if not isinstance(program, tirx.PrimFunc):
            raise self._refused("launch", f"kernel={kernel!r}", "a T.prim_func or a tw.compile()d")
        name = str(program.attrs["global_symbol"])
        parameters = parameters_of(program)
        if len(args) != len(parameters):
            raise self._refused(
                f"launch of {name}",
                f"{len(args)} arguments",
                f"{len(parameters)}: {', '.join(p.name for p in parameters)}",
            )
        args = tuple(map(partial(self._argument, f"launch of {name}"), parameters, args))
        taken: dict[str, str] = {}
        for p, value in zip(parameters, args, strict=True):
            if not p.symmetric:
                continue
            if taken.setdefault(value.parameter.name, p.name) != p.name:
                both = f"{taken[value.parameter.name]} and {p.name}"
                raise self._refused(
                    f"launch of {name}", f"{both} are both {value.parameter.name}",
                    "a tensor for each, since each is synchronised by itself",
                )  # fmt: skip
        given = {
            p.name: value.shape[1:] if p.symmetric else value.shape
            for p, value in zip(parameters, args, strict=True)
            if p.shape is not None
        }
        for p_name, shape in shapes_of(parameters, given, f"launch of {name}").items():
            if given[p_name] != shape:
                raise self._refused(
                    f"launch of {name}", f"{p_name} has shape {given[p_name]}", str(shape)
                )
        arguments = dict(zip((p.name for p in parameters), args, strict=True))
        sizes = shown_sizes(parameters, given)
        self._add(
            Launch, stream, kernel=kernel, program=program, arguments=arguments, sizes=sizes
        )  # fmt: skip

    def wait_stream(self, other: str | None, *, stream: str | None = None) -> None:
        """``stream`` goes on after all that was enqueued in ``other`` so far.

        Args:
            other: a stream that has steps; None is the caller's.
        """
        if other is not None and other not in [s.stream for s in self.steps]:
            raise self._refused("wait_stream", f"other={other!r} has no steps", "one that has")
        self._add(WaitStream, stream, other=other)

    def _add(self, kind: type[Step], stream: str | None, **what: Any) -> None:
        if not (stream is None or (isinstance(stream, str) and stream)):
            raise self._refused(kind.op[2:], f"stream={stream!r}", "a name, or None")
        self.steps.append(kind(stream, loc(), len(self.steps) + 1, **what))

    def _require_region(self, op: str, side: str, region: Any) -> None:
        if not isinstance(region, Region):
            raise self._refused(op, f"{side}={region!r}", "a tensor of the plan, or a part of it")

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

    def _argument(self, op: str, p: Parameter, value: Any) -> Any:
        if p.shape is None:
            try:
                return p.number(value)
            except ValueError as error:
                raise self._refused(op, f"{p.name}={value!r}", str(error)) from None
        self._require_region(op, p.name, value)
        if not value.is_whole:
            raise self._refused(op, f"{p.name}={value}", "a whole tensor of the plan")
        if value.parameter.symmetric != p.symmetric:
            raise self._refused(
                op, f"{p.name}={value.parameter.name}",
                f"a {'W.Symmetric' if p.symmetric else 'T.Tensor'} parameter",
            )  # fmt: skip
        if value.dtype != p.dtype:
            raise self._refused(op, f"{p.name}={value} of {value.dtype}", p.dtype)
        return value

    def _refused(self, op: str, what: str, expected: str) -> TileWeaveError:
        return TileWeaveError(f"{op}: {what}; expected {expected}{at_loc()}")
