"""Kernels that are compiled for each set of sizes with which they are called."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from typing import Any

from tvm import tirx
from tvm.ir import structural_hash

from ...builtins.errors import TileWeaveError, brief_errors
from ...passes import dynamic_sizes, specialize_sizes, with_options, with_sizes
from ...passes.ir.sizes import format_sizes, named, sizes_of
from ...passes.sync.infer.options import options_of
from ..host.session import Session
from ..plans.parameters import Shape, parameters_of, shapes_of, shown_sizes
from .barrier import barrier_in
from .kernel import Kernel, capturing, compile_kernel, tensors_of

_SMALL = 1 << 10
"""Largest size for which similar programs are larger: the inference of large ones takes longer."""


class DynamicKernel:
    """A program whose inferred synchronization depends on its dynamic extents.

    Call it like a TileLang kernel. Its synchronization is proven for each set of sizes that runs,
    at the first call with it. Sets whose programs differ only in integers share one compiled
    kernel, see ``SharedKernels``. ``at`` compiles ahead of the call. Each set has its own counters
    and ``W.alloc_symmetric`` memory. ``W.Symmetric`` arguments of different sizes may share memory,
    so a rank barrier separates calls with different sizes.

    All ranks make the same calls with the same sizes, in the same order.

    Attributes:
        program: the ``T.prim_func`` that it compiles.
        kernels: sizes in the order of ``dynamic_sizes`` -> kernel compiled for them.
    """

    def __init__(
        self, program: tirx.PrimFunc, options: Mapping[str, Any], session: Session
    ) -> None:
        self.program, self._session = program, session
        self.kernels: dict[tuple[int, ...], Kernel] = {}
        self._options = options
        self._parameters = parameters_of(program)
        outputs = _outputs(options["out_idx"])
        self._inputs = [p for i, p in enumerate(self._parameters) if i not in outputs]
        self._by_shapes: dict[Hashable, Kernel] = {}
        """Shapes of all arguments -> kernel."""
        self._order = CallOrder(session)

    def at(self, **sizes: int) -> Kernel:
        """Return the kernel for these sizes; compile it, collectively, if it is not yet.

        Args:
            sizes: name of each dynamic extent -> size: ``kernel.at(M=4096)``.

        Raises:
            LanguageError: accesses cannot be ordered for these sizes.
            TileWeaveError: a size is missing or unknown, the ranks have different sizes, or a CUDA
                graph is being captured.
        """
        program = with_sizes(self.program, sizes)
        key = tuple(sizes[name] for name in dynamic_sizes(self.program))
        if key not in self.kernels:
            self.kernels[key] = self._compile(program)
        return self.kernels[key]

    def runs(self, program: tirx.PrimFunc) -> bool:
        """Return whether ``program`` is this program specialized for some sizes."""
        sizes = sizes_of(program)
        return bool(sizes) and program.same_as(specialize_sizes(self.program, sizes))

    def _compile(self, program: tirx.PrimFunc) -> Kernel:
        if capturing():
            raise TileWeaveError(
                f"{named(program)}: not compiled yet; expected a call or .at(...) with these sizes "
                "before a CUDA graph is captured"
            )
        session = self._session
        programs = session.group.exchange("sizes", named(program))
        if len(set(programs)) > 1:
            raise TileWeaveError(
                f"{named(program)}: the ranks compile for different sizes, {programs}; expected "
                "the same sizes on every rank"
            )
        return compile_kernel(
            self._shared(program), dict(self._options), session,
            lambda: map(self._shared, self._similar(sizes_of(program))),
        )  # fmt: skip

    def _shared(self, program: tirx.PrimFunc) -> tirx.PrimFunc:
        """Let ``program``, this one for some sizes, share kernels with it for other sizes."""
        if options_of(program).share:
            return program
        number = structural_hash(self.program, map_free_vars=True)
        return with_options(program, {"tileweave.share": f"{named(self.program)} {number}"})

    def _similar(self, sizes: Mapping[str, int]) -> Iterator[tirx.PrimFunc]:
        """Yield this program for other sizes, which are multiples of the same powers of two."""
        divisor = 1 if max(sizes.values()) <= _SMALL else 8
        for factor in (3, 5):
            others = {name: max(1, size * factor // divisor) for name, size in sizes.items()}
            yield specialize_sizes(self.program, others)

    @brief_errors
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        positional, keywords = tensors_of(args, kwargs)
        shapes = tuple(_shape(a) for a in positional)
        key = (shapes, *((name, _shape(a)) for name, a in keywords.items()))
        kernel = self._by_shapes.get(key)
        if kernel is None:
            kernel = self._by_shapes[key] = self._kernel_for(positional, keywords)
        if any(p.symmetric for p in self._inputs):
            self._order.enter(kernel)
        return kernel(*positional, **keywords)

    def _kernel_for(self, positional: list[Any], keywords: dict[str, Any]) -> Kernel:
        """Return the kernel for the sizes that the shapes of the arguments imply."""
        name = self.program.attrs["global_symbol"]
        arguments = {p.name: a for p, a in zip(self._inputs, positional, strict=False)} | keywords
        shapes: dict[str, Shape] = {}
        for p in self._inputs:
            if p.shape is not None and (shape := _shape(arguments.get(p.name))) is not None:
                world_size = self._session.group.world_size
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
                    f"{format_sizes(sizes)}"
                )
        return self.at(**sizes)

    def free(self) -> None:
        """Free the implicit memory of all sizes; no launch may follow. Collective, in the same
        order on all ranks."""
        for kernel in self.kernels.values():
            kernel.free()
        self.kernels, self._by_shapes = {}, {}

    def __repr__(self) -> str:
        name, sizes = self.program.attrs["global_symbol"], ", ".join(dynamic_sizes(self.program))
        return f"kernel {name} for each {sizes}, compiled for {len(self.kernels)} so far"


class CallOrder:
    """Order of calls of kernels for different sizes, which may use the same symmetric memory.

    Each kernel has its own counters, so nothing else orders these calls.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._last: Hashable = None
        self._replayed = False
        """True if a CUDA graph has captured a call; it may be replayed at any time."""

    def enter(self, kernel: Hashable) -> None:
        """Let torch's current stream wait for all ranks, unless the last call used this kernel."""
        self._replayed |= capturing()
        if self._replayed or self._last not in (None, kernel):
            barrier_in(self._session)
        self._last = kernel


def _shape(argument: Any) -> Shape | None:
    shape = getattr(argument, "shape", None)
    return None if shape is None else tuple(shape)


def _outputs(out_idx: Any) -> set[int]:
    if out_idx is None:
        return set()
    return {out_idx} if isinstance(out_idx, int) else set(out_idx)
