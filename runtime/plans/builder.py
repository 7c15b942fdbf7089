"""Builder that a plan's function receives: each method appends a step."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

from tvm import tirx

from ..kernel.dynamic import DynamicKernel
from ..kernel.kernel import Kernel
from .collectives import COLLECTIVES, SUMMED_TYPES
from .parameters import parameters_of
from .regions import Region, Rows
from .step_list import StepList
from .steps import Collective, Copy, CopyValue, Launch, WaitValue, WriteValue

_WORDS = ("int32", "uint32")
"""Types of a flag that a stream can write."""


class PlanBuilder(StepList):
    """First argument of a plan's function: each method appends a step of this rank.

    Each method accepts ``stream``: the name of a side stream, or None for the caller's stream. Side
    streams start after the operations that the caller enqueued before the call, and the caller's
    stream continues after all side streams have ended.

    Attributes:
        rank, world_size: rank and size of the group, as integers.
        node, nodes: index of this rank's node, and number of nodes: 0 and 1 unless the plan is on
            a mesh of nodes.
    """

    def __init__(self, rank: int, world_size: int, node: int = 0, nodes: int = 1) -> None:
        super().__init__(rank, world_size)
        self.node, self.nodes = node, nodes

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

    def collective(
        self, name: str, dst: Region, src: Region, *, across: str = "nodes",
        stream: str | None = None,
    ) -> None:  # fmt: skip
        """Run a collective of ``torch.distributed``: by NCCL, or by gloo if the group uses it.

        It starts after the earlier steps of the stream, and later steps of the stream observe
        ``dst``. The host waits only for gloo. All ranks that take part make the same collectives in
        the same order. NCCL's kernels need SMs: append it before a kernel that waits for peers.

        Args:
            name: ``all_gather``: ``dst[i]`` becomes the ``src`` of rank ``i`` of the axis;
                ``reduce_scatter``: ``dst`` becomes the sum of the ranks' ``src[i]``, where ``i``
                is this rank; ``all_reduce``: ``dst`` becomes the sum of the ranks' ``src``.
            dst, src: own memory of the same type, contiguous. They do not overlap; in an all-reduce
                they may be the same region.
            across: ``nodes``: the ranks with this rank's index in their nodes; ``ranks``: the ranks
                of this node.
        """
        op, sizes = "collective", {"nodes": self.nodes, "ranks": self.world_size}
        for what, value, legal in (("name", name, COLLECTIVES), ("across", across, sizes)):
            if value not in tuple(legal):
                raise self._refused(op, f"{what}={value!r}", " or ".join(map(repr, legal)))
        for side, region in (("dst", dst), ("src", src)):
            self._require_own_memory(op, side, region)
        if dst.dtype != src.dtype:
            raise self._refused(op, f"src={src} has dtype {src.dtype}", f"{dst.dtype} of dst={dst}")
        kind, members = COLLECTIVES[name], sizes[across]
        if kind.sums and src.dtype not in SUMMED_TYPES:
            raise self._refused(op, f"{name} of {src.dtype}", ", ".join(SUMMED_TYPES))
        side, region = ("src", src) if kind.scatters else ("dst", dst)
        shape = kind.shape(dst.shape, src.shape, members)
        if region.shape != shape:
            what = f"{side}={region} of {name} across {members} {across} has shape {region.shape}"
            raise self._refused(op, what, str(shape))
        if dst.overlaps(src) and dst != src:
            raise self._refused(op, f"src={src} overlaps dst={dst}", "regions apart")
        self._add(
            Collective, stream, kind=kind, dst=dst, src=src, across=across, members=members
        )  # fmt: skip

    def _require_own_memory(self, op: str, side: str, region: Any) -> None:
        self._require_region(op, side, region)
        if region.parameter.symmetric and (0 in region.axes or region.rank != self.rank):
            raise self._refused(op, f"{side}={region}", f"own memory, of rank {self.rank}")
        if not region.is_contiguous:
            raise self._refused(op, f"{side}={region}", "a region that is contiguous in memory")

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
