"""Programs that are compiled for each set of sizes with which they are called."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

from tvm import tirx

from ...builtins.errors import TileWeaveError
from ...passes import dynamic_sizes, specialize_sizes, with_sizes
from ...passes.ir.sizes import in_numbers, named, sizes_of
from ..host.session import current
from ..plans.parameters import Shape, parameters_of, shapes_of, shown_sizes
from .barrier import barrier
from .kernel import Kernel, capturing, compiled, tensors_of


class DynamicKernel:
    """A program with dynamic extents on which its inferred synchronisation depends.

    Call it as a TileLang kernel. What orders its memory is proven for the sizes that run: the first
    call with a set of sizes compiles, collectively, and the kernel is kept. ``at`` does so ahead.
    Each set has counters and ``W.alloc_symmetric`` memory of its own. A ``W.Symmetric`` argument
    may share memory with those of other sizes: between calls of different sizes is a rank barrier
    on the stream.

    Every rank makes the same calls with the same sizes, in the same order.

    Attributes:
        program: the ``T.prim_func`` it is made of.
        kernels: the kernels compiled so far, by their sizes in the order of ``dynamic_sizes``.
    """

    def __init__(self, program: tirx.PrimFunc, options: Mapping[str, Any]) -> None:
        self.program = program
        self.kernels: dict[tuple[int, ...], Kernel] = {}
        self._options = options
        self._parameters = parameters_of(program)
        outputs = _outputs(options["out_idx"])
        self._inputs = [p for i, p in enumerate(self._parameters) if i not in outputs]
        self._shown: dict[Hashable, Kernel] = {}
        """The kernels by the shapes of all arguments."""
        self._turns = Turns()

    def at(self, **sizes: int) -> Kernel:
        """The kernel for these sizes, compiled if it is not yet. Collective then.

        Args:
            sizes: of every dynamic extent, by name: ``kernel.at(M=4096)``.

        Raises:
            LanguageError: accesses cannot be ordered for these sizes.
            TileWeaveError: a size that is missing or that there is not, ranks with different sizes,
                or a CUDA graph is being captured.
        """
        program = with_sizes(self.program, sizes)
        key = tuple(sizes[name] for name in dynamic_sizes(self.program))
        if key not in self.kernels:
            self.kernels[key] = self._compiled(program)
        return self.kernels[key]

    def runs(self, program: tirx.PrimFunc) -> bool:
        """Whether ``program`` is its own for some sizes."""
        sizes = sizes_of(program)
        return bool(sizes) and program.same_as(specialize_sizes(self.program, sizes))

    def _compiled(self, program: tirx.PrimFunc) -> Kernel:
        if capturing():
            raise TileWeaveError(
                f"{named(program)}: not compiled yet; expected a call or .at(...) with these sizes "
                "before a CUDA graph is captured"
            )
        session = current()
        said = session.group.exchange("sizes", named(program))
        if len(set(said)) > 1:
            raise TileWeaveError(
                f"{named(program)}: the ranks compile for different sizes, {said}; expected the "
                "same sizes on every rank"
            )
        return compiled(program, dict(self._options), session)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        positional, named_ones = tensors_of(args, kwargs)
        shapes = tuple(_shape(a) for a in positional)
        key = (shapes, *((name, _shape(a)) for name, a in named_ones.items()))
        kernel = self._shown.get(key)
        if kernel is None:
            kernel = self._shown[key] = self._found(positional, named_ones)
        if any(p.symmetric for p in self._inputs):
            self._turns.take(kernel)
        return kernel(*positional, **named_ones)

    def _found(self, positional: list[Any], named_ones: dict[str, Any]) -> Kernel:
        """The kernel for the sizes that the arguments show."""
        name = self.program.attrs["global_symbol"]
        given = {p.name: a for p, a in zip(self._inputs, positional, strict=False)} | named_ones
        shapes: dict[str, Shape] = {}
        for p in self._inputs:
            if p.shape is not None and (shape := _shape(given.get(p.name))) is not None:
                world_size = current().group.world_size
                if p.symmetric and (len(shape) == 0 or shape[0] != world_size):
                    raise TileWeaveError(
                        f"{name}: {p.name} has shape {shape}; expected a tw.symmetric tensor"
                    )
                shapes[p.name] = shape[1:] if p.symmetric else shape
        sizes = shown_sizes(self._parameters, shapes)
        for tensor, expected in shapes_of(self._parameters, shapes, str(name)).items():
            if shapes.get(tensor, expected) != expected:
                raise TileWeaveError(
                    f"{name}: {tensor} has shape {shapes[tensor]}; expected {expected} for "
                    f"{in_numbers(sizes)}"
                )
        return self.at(**sizes)

    def free(self) -> None:
        """Give the hidden memory of all sizes back; no launch may follow. Collective, in the same
        order everywhere."""
        for kernel in self.kernels.values():
            kernel.free()
        self.kernels, self._shown = {}, {}

    def __repr__(self) -> str:
        name, sizes = self.program.attrs["global_symbol"], ", ".join(dynamic_sizes(self.program))
        return f"kernel {name} for each {sizes}, compiled for {len(self.kernels)} so far"


class Turns:
    """Keeps calls apart that may use the same symmetric memory and know nothing of each other:
    those of kernels for different sizes, each with counters of its own."""

    def __init__(self) -> None:
        self._last: Hashable = None
        self._replayed = False
        """Whether some call is in a CUDA graph, which may be replayed at any time."""

    def take(self, kernel: Hashable) -> None:
        """Let torch's current stream wait for all ranks, unless the last call was the same."""
        self._replayed |= capturing()
        if self._replayed or self._last not in (None, kernel):
            barrier()
        self._last = kernel


def _shape(argument: Any) -> Shape | None:
    shape = getattr(argument, "shape", None)
    return None if shape is None else tuple(shape)


def _outputs(out_idx: Any) -> set[int]:
    if out_idx is None:
        return set()
    return {out_idx} if isinstance(out_idx, int) else set(out_idx)
