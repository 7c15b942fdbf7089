"""Parameters of programs and plans: tensors and scalars, with name, type and shape."""

from __future__ import annotations

import inspect
import numbers
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import tilelang.language as T
from tilelang import tvm
from tvm import tirx
from tvm.tirx.stmt_functor import substitute

from ...builtins.errors import TileWeaveError
from ...builtins.symmetric import is_symmetric
from ...passes.ir.walk import variables_in

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Parameter:
    """Parameter of a program or a plan.

    Attributes:
        dtype: type of an element, or of the scalar, named as in TileLang.
        shape: extents, each an integer or an expression; of one rank's part if ``symmetric``;
            None for a scalar.
    """

    name: str
    dtype: str
    shape: tuple | None = None
    symmetric: bool = False

    @staticmethod
    def of(name: str, annotation: Any) -> Parameter | None:
        """Return the parameter that an annotation of a ``T.prim_func`` declares; None if the
        annotation declares none."""
        if isinstance(annotation, tirx.Buffer):
            symmetric = is_symmetric(annotation)
            shape = tuple(int(e) if isinstance(e, tirx.IntImm) else e for e in annotation.shape)
            return Parameter(
                name, str(annotation.dtype), shape[1:] if symmetric else shape, symmetric
            )
        if isinstance(annotation, T.dtype):
            return Parameter(name, str(annotation))
        return None

    @property
    def extents(self) -> tuple:
        """Extents of the shape; none for a scalar."""
        return self.shape or ()

    def number(self, value: Any) -> int | float:
        """Return ``value`` as a Python number.

        Raises:
            ValueError: ``value`` is not legal for this scalar's type; the message is what is legal.
        """
        kind, expected = numbers.Real, "a number"
        if "int" in self.dtype:
            kind, expected = numbers.Integral, "an integer"
        if not issubclass(type(value), kind):
            raise ValueError(f"{expected} ({self.dtype})")
        if kind is numbers.Real:
            return int(value) if self.dtype == "bool" else float(value)
        count = 1 << tvm.DataType(self.dtype).bits
        low = 0 if self.dtype.startswith("uint") else -count // 2
        if not low <= value < low + count:
            raise ValueError(f"{low} to {low + count - 1} ({self.dtype})")
        return int(value)

    def across(self, shape: Shape, world_size: int) -> Shape:
        """Return the shape that a program sees: ``shape`` of one rank's part, with the rank axis
        in front if the tensor is symmetric."""
        return (world_size, *shape) if self.symmetric else shape


def key_of(number: Any) -> Hashable:
    """Return a key that distinguishes scalars which compare equal: 0.0 and -0.0, or 1 and 1.0."""
    return type(number), repr(number)


@lru_cache(maxsize=256)
def parameters_of(func: tirx.PrimFunc) -> tuple[Parameter, ...]:
    """Return the parameters of a ``T.prim_func`` that is not yet compiled for a group."""
    parameters = []
    for param in func.params:
        buffer = func.buffer_map.get(param)
        if buffer is None:
            parameters.append(Parameter(param.name, str(param.dtype)))
        else:
            parameters.append(Parameter.of(buffer.name, buffer))
    return tuple(parameters)


def dynamic_extents(parameters: Iterable[Parameter]) -> dict[str, tirx.Var]:
    """Return the extents that are known only when the program runs, by name."""
    return {e.name: e for p in parameters for e in p.extents if isinstance(e, tirx.Var)}


def bound(
    caller: str, parameters: Iterable[Parameter], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Any, ...]:
    """Return the arguments of a call in the order of ``parameters``.

    Raises:
        TileWeaveError: an argument is missing or unknown.
    """
    kind, names = inspect.Parameter.POSITIONAL_OR_KEYWORD, [p.name for p in parameters]
    try:
        signature = inspect.Signature([inspect.Parameter(name, kind) for name in names])
        arguments = signature.bind(*args, **kwargs).arguments
    except TypeError as error:
        raise TileWeaveError(f"{caller}: {error}; expected ({', '.join(names)})") from None
    return tuple(arguments.values())


def shapes_of(
    parameters: Iterable[Parameter], shapes: Mapping[str, Shape], caller: str,
    extents: Mapping[str, int] | None = None,
) -> dict[str, Shape]:  # fmt: skip
    """Return the declared shape of each tensor, with dynamic extents taken from the shapes of the
    tensors in ``shapes``.

    Args:
        shapes: name of a tensor -> shape.
        extents: name of a dynamic extent -> size, for those that the caller specifies.

    Raises:
        TileWeaveError: the size of an extent is unknown, or a tensor has another number of axes.
    """
    tensors = [p for p in parameters if p.shape is not None]
    sizes = shown_sizes(tensors, shapes, extents)
    for p in tensors:
        shape = shapes.get(p.name, p.extents)
        # Checked first: otherwise the error would say that a size is missing.
        if len(shape) != len(p.extents) and dynamic_extents([p]):
            raise TileWeaveError(
                f"{caller}: {p.name} has shape {shape}; expected {len(p.extents)} axes"
            )
    return {p.name: tuple(_size(e, sizes, p, caller) for e in p.extents) for p in tensors}


def shown_sizes(
    parameters: Iterable[Parameter], shapes: Mapping[str, Shape],
    extents: Mapping[str, int] | None = None,
) -> dict[str, int]:  # fmt: skip
    """Return the dynamic extents by name: ``extents``, and those that ``shapes`` show."""
    sizes = dict(extents or {})
    for p in parameters:
        if p.shape is not None and len(shapes.get(p.name, ())) == len(p.shape):
            for extent, size in zip(p.shape, shapes[p.name], strict=True):
                if isinstance(extent, tirx.Var):
                    sizes.setdefault(extent.name, int(size))
    return sizes


def _size(extent: Any, sizes: Mapping[str, int], p: Parameter, caller: str) -> int:
    if isinstance(extent, int):
        return extent
    variables = {variable.name: variable for variable in variables_in(extent)}
    missing = [name for name in variables if name not in sizes]
    if missing:
        raise TileWeaveError(
            f"{caller}: {extent} of {p.name} is dynamic; expected an input that shows its size, or "
            f"its size: {', '.join(f'{n}=...' for n in missing)} "
            f"({' '.join(f'--set {n}=...' for n in missing)} on the command line)"
        )
    constants = {v: tirx.IntImm(v.dtype, sizes[name]) for name, v in variables.items()}
    return int(tvm.arith.Analyzer().simplify(substitute(extent, constants)))
