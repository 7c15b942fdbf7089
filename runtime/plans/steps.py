"""Steps of a plan, as data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tvm import tirx

from .regions import Region, Rows


@dataclass(frozen=True)
class Step:
    """One operation, after all that is before it in its stream.

    Attributes:
        stream: None is the caller's.
        site: ``file:line`` of the plan that says it.
        number: of the step in its plan, from 1; 0 for what every plan does: fork and join.
    """

    stream: str | None
    loc: str
    number: int

    @property
    def where(self) -> str:
        """``the caller's stream`` or ``stream 'copies'``."""
        return name_of_stream(self.stream)


@dataclass(frozen=True)
class Copy(Step):
    """``dst`` becomes ``src``, by the copy engine."""

    op = "p.copy"
    dst: Region
    src: Region
    rows: Rows


@dataclass(frozen=True)
class WriteValue(Step):
    """The word ``dst`` becomes ``value``; who acquires it sees what the stream did before."""

    op = "p.write_value"
    dst: Region
    value: int


@dataclass(frozen=True)
class CopyValue(Step):
    """The words ``dst`` become the words ``src``, each with the order of ``WriteValue``."""

    op = "p.copy_value"
    dst: Region
    src: Region


@dataclass(frozen=True)
class WaitValue(Step):
    """What follows in the stream comes after the word ``flag`` has reached ``value``."""

    op = "p.wait_value"
    flag: Region
    value: int


@dataclass(frozen=True)
class Launch(Step):
    """A kernel.

    Attributes:
        kernel: what the plan says: a ``T.prim_func``, or what ``tw.compile`` made of it.
        program: what runs: the ``T.prim_func`` with the plan's options, for the sizes of this call
            where its synchronisation depends on them, and with what orders it.
    """

    op = "p.launch"
    kernel: Any
    program: tirx.PrimFunc
    arguments: dict[str, Any]
    """Region or number by name of the kernel's parameter."""
    sizes: dict[str, int] = field(default_factory=dict)
    """Of its dynamic extents, by name."""

    @property
    def name(self) -> str:
        return str(self.program.attrs["global_symbol"])


@dataclass(frozen=True)
class WaitStream(Step):
    """What follows in the stream comes after all that the host has enqueued in ``other``."""

    op = "p.wait_stream"
    other: str | None


def name_of_stream(stream: str | None) -> str:
    return "the caller's stream" if stream is None else f"stream {stream!r}"
