"""Kernels of a session that programs for several sizes share."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from tilelang.jit import JITKernel
from tvm import tirx

from ...passes.sync.infer.options import options_of
from .shared_program import SharedProgram, SizedProgram


@dataclass(eq=False)
class SharedKernel:
    """A kernel and its program.

    Attributes:
        program: what is compiled.
        kernel: None until it is loaded.
        is_cached: whether TileLang's cache has it.
    """

    program: tirx.PrimFunc
    kernel: JITKernel | None = None
    is_cached: bool = False


@dataclass(eq=False)
class _Form:
    """Programs of one form and their kernels.

    Attributes:
        instances: programs that have been compiled or added, by their integers.
        is_shared: whether the compiler accepts arguments for the integers that differ.
    """

    instances: dict[tuple[int, ...], SizedProgram] = field(default_factory=dict)
    kernels: list[tuple[SharedProgram, SharedKernel]] = field(default_factory=list)
    is_shared: bool = True

    def find(self, instance: SizedProgram) -> tuple[SharedKernel, tuple[int, ...]] | None:
        for program, kernel in self.kernels:
            if (arguments := program.arguments(instance)) is not None:
                return kernel, arguments
        return None

    def new(self, instance: SizedProgram) -> tuple[SharedKernel, tuple[int, ...]]:
        """Return a new kernel, which fits all instances, and its arguments for this one."""
        self.instances = {instance.integers: instance, **self.instances}
        program = SharedProgram([*self.instances.values()] if self.is_shared else [instance])
        self.kernels.append((program, SharedKernel(program.program)))
        found = self.find(instance)
        assert found is not None
        return found


class SharedKernels:
    """Kernels by the form of their programs.

    Programs with one name in ``Options.share`` and one form share a kernel. It has arguments for
    the integers in which the programs differ that were known when it was compiled. A program that
    differs in other integers needs another kernel. All ranks of the group add the same programs in
    the same order, so they have the same kernels.
    """

    def __init__(self) -> None:
        self._forms: dict[Hashable, _Form] = {}

    def add(self, program: tirx.PrimFunc, options: Mapping[str, Any]) -> None:
        """Let the next kernel for programs of this form fit ``program``, too.

        Args:
            program: a program for a group.
            options: options of ``tilelang.compile``.
        """
        form, instance = self._form(program, options)
        form.instances[instance.integers] = instance

    def has(self, program: tirx.PrimFunc, options: Mapping[str, Any]) -> bool:
        """Return whether a kernel is compiled that computes ``program``."""
        form, instance = self._form(program, options)
        kernel, _ = form.find(instance) or (None, ())
        return kernel is not None and (kernel.is_cached or kernel.kernel is not None)

    def find(
        self, program: tirx.PrimFunc, options: Mapping[str, Any]
    ) -> tuple[SharedKernel, tuple[int, ...]]:
        """Return the kernel of ``program``, which may have to be compiled, and its arguments for
        this program."""
        form, instance = self._form(program, options)
        return form.find(instance) or form.new(instance)

    def alone(self, program: tirx.PrimFunc, options: Mapping[str, Any]) -> SharedKernel:
        """Return a kernel of constants for ``program``, in the place of those of its form with
        arguments: the compiler needs some of these as constants."""
        form, instance = self._form(program, options)
        form.is_shared = False
        form.kernels = [(p, kernel) for p, kernel in form.kernels if kernel.kernel is not None]
        kernel, _ = form.new(instance)
        return kernel

    def _form(
        self, program: tirx.PrimFunc, options: Mapping[str, Any]
    ) -> tuple[_Form, SizedProgram]:
        instance = _sized(program)
        # A program without a name shares its kernel with equal ones only.
        form = instance.form if options_of(program).share else program.script()
        chosen = str(sorted((name, str(value)) for name, value in options.items() if value))
        return self._forms.setdefault((form, chosen), _Form()), instance


@lru_cache(maxsize=64)
def _sized(program: tirx.PrimFunc) -> SizedProgram:
    return SizedProgram(program)
