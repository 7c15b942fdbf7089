"""Kernels of a session that programs for several sizes share."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Hashable, Iterable, Mapping
from concurrent.futures import Future, as_completed
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import starmap
from typing import Any

from tilelang.jit import JITKernel
from tqdm import tqdm
from tvm import tirx

from ...passes.sync.infer.options import options_of
from ..host.group import Group
from . import stored_programs
from .shared_program import SharedProgram, SizedProgram


@dataclass(eq=False)
class SharedKernel:
    """A kernel and its program.

    Attributes:
        shared: what is compiled.
        key: identity of its form on disk; "" if no later process shall find it.
        kernel: None until it is loaded.
        is_cached: whether TileLang's cache has it.
        is_compiling: whether a rank of each node compiles it for the cache.
        work: done when this rank has compiled it; None if another rank does.
    """

    shared: SharedProgram
    key: str = ""
    kernel: JITKernel | None = None
    is_cached: bool = False
    is_compiling: bool = False
    work: Future[None] | None = None

    @property
    def program(self) -> tirx.PrimFunc:
        return self.shared.program

    @property
    def is_found(self) -> bool:
        """True if it is compiled, or is being compiled."""
        return self.kernel is not None or self.is_cached or self.is_compiling

    def save(self) -> None:
        """Let later processes find the kernel, which is compiled. One rank of a node calls it."""
        if self.key:
            stored_programs.save(self.key, self.shared)


@dataclass(eq=False)
class _Form:
    """Programs of one form and their kernels.

    Attributes:
        key: see ``SharedKernel``.
        instances: programs that have been compiled or added, by their integers.
        is_shared: whether the compiler accepts arguments for the integers that differ.
        is_loaded: whether it has the kernels of earlier processes.
    """

    key: str
    instances: dict[tuple[int, ...], SizedProgram] = field(default_factory=dict)
    kernels: list[SharedKernel] = field(default_factory=list)
    is_shared: bool = True
    is_loaded: bool = False

    def find(self, instance: SizedProgram) -> tuple[SharedKernel, tuple[int, ...]] | None:
        for kernel in self.kernels:
            if (arguments := kernel.shared.arguments(instance)) is not None:
                return kernel, arguments
        return None

    def has(self, instance: SizedProgram) -> bool:
        kernel, _ = self.find(instance) or (None, ())
        return kernel is not None and kernel.is_found

    def new(self, instance: SizedProgram) -> tuple[SharedKernel, tuple[int, ...]]:
        """Return a new kernel, which fits all instances, and its arguments for this one."""
        self.instances = {instance.integers: instance, **self.instances}
        instances = [*self.instances.values()] if self.is_shared else [instance]
        self.kernels.append(SharedKernel(SharedProgram.of(instances), self.key))
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

    def __init__(self, is_stored: bool = False) -> None:
        """
        Args:
            is_stored: whether it has the kernels of earlier processes, and later ones have its
                kernels.
        """
        self._is_stored = is_stored
        self._forms: dict[Hashable, _Form] = {}

    def add(self, program: tirx.PrimFunc, options: Mapping[str, Any]) -> None:
        """Let the next kernel for programs of this form fit ``program``, too.

        Args:
            program: a program for a group.
            options: options of ``tilelang.compile``.
        """
        form, instance = self._form(program, options)
        form.instances[instance.integers] = instance

    def has(
        self, programs: Iterable[tuple[tirx.PrimFunc, Mapping[str, Any]]], group: Group | None
    ) -> bool:
        """Return whether kernels are compiled, or are being compiled, that compute all
        ``programs``, by this session or an earlier process.

        Collective, with the same programs on all ranks, unless this session has all kernels. A
        kernel that only some ranks find on disk does not count. If TileLang's cache has lost one,
        its first call compiles it.

        Args:
            programs: programs for a group, with the options of ``tilelang.compile``.
            group: ranks of the session; None for a process that is no rank.
        """
        instances = [self._form(*program) for program in programs]
        if not all(form.has(instance) for form, instance in instances):
            self._load(dict.fromkeys(form for form, _ in instances), group)
        return all(form.has(instance) for form, instance in instances)

    def _load(self, forms: Iterable[_Form], group: Group | None) -> None:
        """Add the kernels of earlier processes to forms that do not have them. Collective."""
        new = [form for form in forms if form.key and not form.is_loaded]
        if not new:
            return
        stored = stored_programs.load(form.key for form in new)
        names = [name for of_form in stored.values() for name in of_form]
        agreed = {*names}
        if group is not None:
            on_ranks = group.exchange("stored kernels", json.dumps(names))
            agreed = set.intersection(*(set(json.loads(names)) for names in on_ranks))
        for form in new:
            form.is_loaded = True
            form.kernels += [
                SharedKernel(program, form.key, is_cached=True)
                for name, program in stored[form.key].items()
                if name in agreed
            ]

    def find(
        self, program: tirx.PrimFunc, options: Mapping[str, Any]
    ) -> tuple[SharedKernel, tuple[int, ...]]:
        """Return the kernel of ``program``, which may have to be compiled, and its arguments for
        this program."""
        form, instance = self._form(program, options)
        return form.find(instance) or form.new(instance)

    def finish(
        self, programs: Iterable[tuple[tirx.PrimFunc, Mapping[str, Any]]], group: Group
    ) -> None:
        """Wait until TileLang's cache has the kernels of ``programs`` that are being compiled.

        Collective, with the same programs on all ranks, if there are any. Rank 0 shows the progress
        of its part. A kernel that could not be compiled is compiled by its first call, which raises
        the error.
        """
        found = {id(kernel): kernel for kernel, _ in starmap(self.find, programs)}
        compiling = [kernel for kernel in found.values() if kernel.is_compiling]
        if not compiling:
            return
        work = [kernel.work for kernel in compiling if kernel.work is not None]
        progress = tqdm(
            as_completed(work), "compiling kernels", len(work), leave=False,
            disable=None if group.rank == 0 else True,  # None: in a terminal only
        )  # fmt: skip
        deque(progress, maxlen=0)
        group.meet("compiled ahead", timeout_s=3600.0)
        for kernel in compiling:
            kernel.is_cached, kernel.is_compiling, kernel.work = True, False, None

    def alone(self, program: tirx.PrimFunc, options: Mapping[str, Any]) -> SharedKernel:
        """Return a kernel of constants for ``program``, in the place of those of its form with
        arguments: the compiler needs some of these as constants."""
        form, instance = self._form(program, options)
        form.is_shared = False
        form.kernels = [kernel for kernel in form.kernels if kernel.kernel is not None]
        kernel, _ = form.new(instance)
        return kernel

    def _form(
        self, program: tirx.PrimFunc, options: Mapping[str, Any]
    ) -> tuple[_Form, SizedProgram]:
        instance = _sized(program)
        # A program without a name shares its kernel with equal ones only.
        form = instance.form if options_of(program).share else program.script()
        chosen = str(sorted((name, str(value)) for name, value in options.items() if value))
        identity = form, chosen
        if identity not in self._forms:
            key = stored_programs.key_of(identity) if self._is_stored else ""
            self._forms[identity] = _Form(key)
        return self._forms[identity], instance


@lru_cache(maxsize=256)
def _sized(program: tirx.PrimFunc) -> SizedProgram:
    return SizedProgram(program)
