"""Kernels of a session that programs for several sizes share."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tilelang.jit import JITKernel
from tvm import tirx
from tvm.ir import structural_hash

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
    instances: dict[tuple[int, ...], SizedProgram] = field(default_factory=dict)
    """Programs of this form that have been compiled or added, by their integers."""
    kernels: list[tuple[SharedProgram, SharedKernel]] = field(default_factory=list)

    def find(self, instance: SizedProgram) -> tuple[SharedKernel, tuple[int, ...]] | None:
        for program, kernel in self.kernels:
            if (arguments := program.arguments(instance)) is not None:
                return kernel, arguments
        return None


class SharedKernels:
    """Kernels by the form of their programs.

    Programs with one name in ``Options.share`` and one form share a kernel. It has arguments for
    the integers in which the programs differ that were known when it was compiled. A program that
    differs in other integers needs another kernel. All ranks of the group add the same programs in
    the same order, so they have the same kernels.
    """

    def __init__(self) -> None:
        self._forms: dict[Hashable, _Form] = {}
        self._alone: dict[Hashable, SharedKernel] = {}
        """Kernels that programs do not share."""

    def add(self, program: tirx.PrimFunc, options: Mapping[str, Any]) -> None:
        """Let the next kernel for programs of this form fit ``program``, too.

        Args:
            program: a program for a group.
            options: options of ``tilelang.compile``.
        """
        if _may_share(program):
            instance = SizedProgram(program)
            self._form(instance, options).instances[instance.integers] = instance

    def has(self, program: tirx.PrimFunc, options: Mapping[str, Any]) -> bool:
        """Return whether a kernel is compiled that computes ``program``."""
        kernel, _ = self._find(program, options) or (None, ())
        return kernel is not None and (kernel.is_cached or kernel.kernel is not None)

    def find(
        self, program: tirx.PrimFunc, options: Mapping[str, Any]
    ) -> tuple[SharedKernel, tuple[int, ...]]:
        """Return the kernel of ``program``, which may have to be compiled, and its arguments for
        this program."""
        if (found := self._find(program, options)) is not None:
            return found
        if not _may_share(program):
            return self.alone(program, options), ()
        instance = SizedProgram(program)
        form = self._form(instance, options)
        form.instances = {instance.integers: instance, **form.instances}
        shared = SharedProgram([*form.instances.values()])
        kernel, arguments = SharedKernel(shared.program), shared.arguments(instance)
        assert arguments is not None
        form.kernels.append((shared, kernel))
        return kernel, arguments

    def alone(self, program: tirx.PrimFunc, options: Mapping[str, Any]) -> SharedKernel:
        """Return a kernel that only ``program`` uses."""
        return self._alone.setdefault(_key(program, options), SharedKernel(program))

    def drop(self, kernel: SharedKernel) -> None:
        """Forget a shared kernel that does not compile, and the programs that it was to fit."""
        for form in self._forms.values():
            if any(other is kernel for _, other in form.kernels):
                form.kernels = [(p, other) for p, other in form.kernels if other is not kernel]
                form.instances.clear()

    def _find(
        self, program: tirx.PrimFunc, options: Mapping[str, Any]
    ) -> tuple[SharedKernel, tuple[int, ...]] | None:
        if (kernel := self._alone.get(_key(program, options))) is not None:
            return kernel, ()
        if not _may_share(program):
            return None
        instance = SizedProgram(program)
        return self._form(instance, options).find(instance)

    def _form(self, instance: SizedProgram, options: Mapping[str, Any]) -> _Form:
        return self._forms.setdefault((instance.form, _text(options)), _Form())


def _may_share(program: tirx.PrimFunc) -> bool:
    return bool(options_of(program).share)


def _key(program: tirx.PrimFunc, options: Mapping[str, Any]) -> Hashable:
    return structural_hash(program, map_free_vars=True), program.script(), _text(options)


def _text(options: Mapping[str, Any]) -> str:
    return str(sorted((name, str(value)) for name, value in options.items() if value))
