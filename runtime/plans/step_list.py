"""Steps that the function of a plan appends, and checks of their arguments."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from ...builtins.errors import TileWeaveError
from .parameters import Parameter, Shape, shapes_of, shown_sizes
from .regions import Region, at_loc, loc
from .steps import Step, WaitStream


class StepList:
    """Steps that the function of a plan appends, and checks of their arguments.

    Attributes:
        rank, world_size: rank and size of the group, as integers.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        self.steps: list[Step] = []

    def wait_stream(self, other: str | None, *, stream: str | None = None) -> None:
        """Let ``stream`` wait for the operations enqueued in ``other`` so far.

        Args:
            other: a stream that has steps; None is the caller's stream.
        """
        if other is not None and other not in [s.stream for s in self.steps]:
            raise self._refused("wait_stream", f"other={other!r} has no steps", "one that has")
        self._add(WaitStream, stream, other=other)

    def _part_shape(self, region: Region) -> Shape:
        """Return the shape of a whole tensor, of one rank's part if it is symmetric."""
        return region.shape[1:] if region.parameter.symmetric else region.shape

    def _arguments(
        self, op: str, parameters: Sequence[Parameter], args: Iterable[Any]
    ) -> dict[str, Any]:
        """Return the arguments of a kernel or a plan by the name of its parameter."""
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
        shapes = {
            p.name: self._part_shape(arguments[p.name]) for p in parameters if p.shape is not None
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
