"""Steps of a plan, as data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from tvm import tirx

from .regions import Region, Rows


@dataclass(frozen=True)
class Step:
    """One operation of a stream, ordered after the earlier operations of the stream.

    Attributes:
        stream: name of a side stream; None is the caller's stream.
        loc: ``file:line`` of the plan that appends it.
        number: number of the step in its plan, from 1; 0 for the fork and join of its streams.
    """

    op: ClassVar[str]
    stream: str | None
    loc: str
    number: int

    @property
    def title(self) -> str:
        """The operation and its object, if it has a name: ``p.launch of gemm``."""
        return self.op

    @property
    def where(self) -> str:
        """``the caller's stream`` or ``stream 'copies'``."""
        return name_of_stream(self.stream)


@dataclass(frozen=True)
class Copy(Step):
    """Copy ``src`` to ``dst`` with a copy engine."""

    op = "p.copy"
    dst: Region
    src: Region
    rows: Rows


@dataclass(frozen=True)
class WriteValue(Step):
    """Write ``value`` to the word ``dst``, a release of the earlier operations of the stream."""

    op = "p.write_value"
    dst: Region
    value: int


@dataclass(frozen=True)
class CopyValue(Step):
    """Copy the words ``src`` to the words ``dst``, each a release as by ``WriteValue``."""

    op = "p.copy_value"
    dst: Region
    src: Region


@dataclass(frozen=True)
class WaitValue(Step):
    """Let the stream wait until the word ``flag`` has reached ``value``."""

    op = "p.wait_value"
    flag: Region
    value: int


@dataclass(frozen=True)
class Launch(Step):
    """Launch a kernel.

    Attributes:
        kernel: argument of ``p.launch``: a ``T.prim_func`` or a result of ``tw.compile``.
        program: the ``T.prim_func`` that runs: with the plan's options, specialized for the sizes
            of this call if its synchronization depends on them, and with the plan's copies.
    """

    op = "p.launch"
    kernel: Any
    program: tirx.PrimFunc
    arguments: dict[str, Any]
    """Name of a parameter of the kernel -> region or number."""
    sizes: dict[str, int] = field(default_factory=dict)
    """Name of a dynamic extent -> size."""

    @property
    def name(self) -> str:
        return str(self.program.attrs["global_symbol"])

    @property
    def title(self) -> str:
        return f"{self.op} of {self.name}"


@dataclass(frozen=True)
class WaitStream(Step):
    """Let the stream wait for all operations that the host has enqueued in ``other``."""

    op = "p.wait_stream"
    other: str | None


def name_of_stream(stream: str | None) -> str:
    return "the caller's stream" if stream is None else f"stream {stream!r}"
