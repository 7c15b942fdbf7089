"""Plans: operators as lists of steps in streams, beside each other and beside the peers'.

The function under ``@tw.plan`` is a trace: it says what is to be done, in the
order in which the host enqueues it. The same list runs on CUDA streams and in the simulator.
"""

from __future__ import annotations

import inspect
import operator
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import product
from typing import TYPE_CHECKING, Any

from tvm import tirx

from ...builtins.errors import TileWeaveError
from ...passes import needs_sizes, specialize_sizes
from ...passes.sync.infer.options import own_options, split_options
from ..kernel.dynamic import DynamicKernel
from ..kernel.kernel import Kernel
from .parameters import (
    Parameter,
    Shape,
    dynamic_extents,
    key_of,
    parameters_of,
    shapes_of,
    shown_sizes,
)
from .regions import Region, RegionError, Rows, at_site, site

if TYPE_CHECKING:
    from ..executor.recorded_call import ReadyCall
    from .sync_pull import PullSync
    from .sync_push import PlanSync

_WORDS = ("int32", "uint32")
"""Types of a flag that a stream can write."""
_BY_NAME = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
_STARS = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
_LATER = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
_TRACES = 256
"""Ranks' calls whose steps a plan remembers."""
_tracing = threading.RLock()
"""Held while steps are made and remembered: threads may call one plan, and all are to launch the
very same programs. What a plan says may ask for the steps of another."""


@dataclass(frozen=True)
class Step:
    """One operation, after all that is before it in its stream.

    Attributes:
        stream: None is the caller's.
        site: ``file:line`` of the plan that says it.
        number: of the step in its plan, from 1; 0 for what every plan does: fork and join.
    """

    stream: str | None
    site: str
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


class Steps:
    """What the function of a plan gets as its first argument: says the steps of this rank.

    Every step takes ``stream``: the name of a side stream, or None for the caller's. Side streams
    start after what the caller's stream did before the call, and the caller's stream goes on after
    all of them have ended.

    Attributes:
        rank, world_size: of the group, as numbers.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        self.steps: list[Step] = []

    def peers(self) -> Iterator[int]:
        """The other ranks, each rank's right neighbour first, so that no two ranks write to the
        same one at the same time."""
        return ((self.rank + i) % self.world_size for i in range(1, self.world_size))

    def copy(self, dst: Region, src: Region, *, stream: str | None = None) -> None:
        """Copy ``src`` to ``dst``, own or a peer's, by a copy engine.

        Between GPUs it takes no SM. Within one GPU it does: put no such copy behind a kernel that
        waits for it.

        Args:
            dst, src: regions of the same shape and type; of a symmetric tensor, in one rank's
                part. Both are rows at a constant distance, the last axes without gaps.
        """
        for side, region in (("dst", dst), ("src", src)):
            self._require_region("copy", side, region)
            if region.parameter.symmetric and 0 in region.axes:
                raise self._refused(
                    "copy", f"{side}={region} is in several ranks' memory", "an index of one rank"
                )
        for what in ("shape", "dtype"):
            if getattr(dst, what) != getattr(src, what):
                raise self._refused(
                    "copy",
                    f"src={src} has {what} {getattr(src, what)}",
                    f"{getattr(dst, what)} of dst={dst}",
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
        """Write a word, own or a peer's: a release at sys scope of all that the stream did before.

        ``value`` is a constant in a CUDA graph; ``copy_value`` is not.

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
        ``write_value``, of a value that a CUDA graph finds anew at each replay.

        Args:
            dst: one element of an int32 or uint32 tensor.
            src: the same of a tensor in own memory; what writes it comes before in the stream.

        Source: the copy starts after what is before it in the stream has ended, and moves an
        aligned word at once. NCCL's copy-engine collectives signal in this way, to streams that
        wait; CUDA promises nothing to a kernel that polls the word.
        """
        self._require_word("copy_value", "dst", dst)
        self._require_own_word("copy_value", "src", src)
        if dst.dtype != src.dtype:
            raise self._refused("copy_value", f"src={src} has dtype {src.dtype}", dst.dtype)
        self._add(CopyValue, stream, dst=dst, src=src)

    def wait_value(self, flag: Region, value: int, *, stream: str | None = None) -> None:
        """What follows in the stream comes after a word in own memory has reached ``value``: an
        acquire at sys scope of what a kernel, also one that goes on, or a peer has released.

        It takes no SM. Say what signals the word before it, in another stream. ``write_value``
        behind the wait resets the word, for the next call or replay of a CUDA graph.

        Args:
            flag: one element of an int32 or uint32 tensor.
            value: an integer, taken modulo 2**32. The word has reached it while it is at most
                2**31 - 1 above, across wrap-around.

        Source: CUDA driver API, cuStreamBatchMemOp, as cuStreamWaitValue32 with
        CU_STREAM_WAIT_VALUE_GEQ; CUDA itself does not know of this order, so the host enqueues what
        signals before what waits.
        """
        self._require_own_word("wait_value", "flag", flag)
        value = self._integer("wait_value", value)
        self._add(WaitValue, stream, flag=flag, value=value)

    def launch(self, kernel: Any, *args: Any, stream: str | None = None) -> None:
        """Launch a kernel on whole tensors of the plan.

        A kernel whose synchronisation is inferred is compiled for each set of dynamic sizes; its
        arguments show them.

        Args:
            kernel: a ``@T.prim_func``, compiled once for the group; or what ``tw.compile`` made of
                it, for GPUs only.
            args: its arguments in order: parameters of the plan and numbers. None is left out.
        """
        args = tuple(value for value in args if value is not None)
        compiled = isinstance(kernel, (Kernel, DynamicKernel))
        program = kernel.program if compiled else kernel
        if not isinstance(program, tirx.PrimFunc):
            raise self._refused("launch", f"kernel={kernel!r}", "a T.prim_func or a tw.compile()d")
        name = str(program.attrs["global_symbol"])
        parameters = parameters_of(program)
        if len(args) != len(parameters):
            raise self._refused(
                f"launch of {name}",
                f"{len(args)} arguments",
                f"{len(parameters)}: {', '.join(p.name for p in parameters)}",
            )
        args = tuple(map(partial(self._argument, f"launch of {name}"), parameters, args))
        taken: dict[str, str] = {}
        for p, value in zip(parameters, args, strict=True):
            if not p.symmetric:
                continue
            if taken.setdefault(value.parameter.name, p.name) != p.name:
                both = f"{taken[value.parameter.name]} and {p.name}"
                raise self._refused(
                    f"launch of {name}", f"{both} are both {value.parameter.name}",
                    "a tensor for each, since each is synchronised by itself",
                )  # fmt: skip
        given = {
            p.name: value.shape[1:] if p.symmetric else value.shape
            for p, value in zip(parameters, args, strict=True)
            if p.shape is not None
        }
        for p_name, shape in shapes_of(parameters, given, f"launch of {name}").items():
            if given[p_name] != shape:
                raise self._refused(
                    f"launch of {name}", f"{p_name} has shape {given[p_name]}", str(shape)
                )
        arguments = dict(zip((p.name for p in parameters), args, strict=True))
        sizes = shown_sizes(parameters, given)
        self._add(
            Launch, stream, kernel=kernel, program=program, arguments=arguments, sizes=sizes
        )  # fmt: skip

    def wait_stream(self, other: str | None, *, stream: str | None = None) -> None:
        """``stream`` goes on after all that was enqueued in ``other`` so far.

        Args:
            other: a stream that has steps; None is the caller's.
        """
        if other is not None and other not in [s.stream for s in self.steps]:
            raise self._refused("wait_stream", f"other={other!r} has no steps", "one that has")
        self._add(WaitStream, stream, other=other)

    def _add(self, kind: type[Step], stream: str | None, **what: Any) -> None:
        if not (stream is None or (isinstance(stream, str) and stream)):
            raise self._refused(kind.op[2:], f"stream={stream!r}", "a name, or None")
        self.steps.append(kind(stream, site(), len(self.steps) + 1, **what))

    def _require_region(self, op: str, side: str, region: Any) -> None:
        if not isinstance(region, Region):
            raise self._refused(op, f"{side}={region!r}", "a tensor of the plan, or a part of it")

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

    def _argument(self, op: str, p: Parameter, value: Any) -> Any:
        if p.shape is None:
            try:
                return p.number(value)
            except ValueError as error:
                raise self._refused(op, f"{p.name}={value!r}", str(error)) from None
        self._require_region(op, p.name, value)
        if not value.is_whole:
            raise self._refused(op, f"{p.name}={value}", "a whole tensor of the plan")
        if value.parameter.symmetric != p.symmetric:
            raise self._refused(
                op, f"{p.name}={value.parameter.name}",
                f"a {'W.Symmetric' if p.symmetric else 'T.Tensor'} parameter",
            )  # fmt: skip
        if value.dtype != p.dtype:
            raise self._refused(op, f"{p.name}={value} of {value.dtype}", p.dtype)
        return value

    def _refused(self, op: str, what: str, expected: str) -> TileWeaveError:
        return TileWeaveError(f"{op}: {what}; expected {expected}{at_site()}")


class Plan:
    """An operator: a function that says the steps of each call. Made by ``tw.plan``.

    Attributes:
        name: of the function.
        parameters: what a call takes.
        body: says the steps of one call.
        pass_configs: with which its kernels are compiled.
    """

    def __init__(
        self, name: str, parameters: list[Parameter], body: Callable[..., None], site: str,
        pass_configs: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        self.name, self.parameters, self.site = name, parameters, site
        own_options(pass_configs or {})
        self.body, self.pass_configs = body, dict(pass_configs or {})
        self._programs: dict[int, tuple[tirx.PrimFunc, tirx.PrimFunc]] = {}
        self._syncs: dict[tuple, PlanSync | PullSync] = {}
        self._last: tuple[tuple, bool] = (), False
        """The call looked at last, and whether it needs an order."""
        self._traces: dict[tuple, list[Step]] = {}

    @staticmethod
    def of_program(func: tirx.PrimFunc | Kernel) -> Plan:
        """The plan that launches ``func``, and nothing else."""
        program = func.program if isinstance(func, Kernel) else func
        name = str(program.attrs["global_symbol"])

        def body(p: Steps, *args: Any) -> None:
            p.launch(func, *args)
            p.steps = [replace(step, site=name) for step in p.steps]

        return Plan(name, list(parameters_of(program)), body, name)

    def with_configs(self, pass_configs: Mapping[str, Any]) -> Plan:
        """The same operator, whose kernels are compiled with these ``pass_configs``, too.

        Raises:
            TileWeaveError: an option that there is not, or a value that it cannot have.
        """
        own_options(pass_configs)
        configs = {**self.pass_configs, **pass_configs}
        return Plan(self.name, self.parameters, self.body, self.site, configs)

    def trace(
        self, rank: int, world_size: int, shapes: Mapping[str, Shape], scalars: Mapping[str, Any],
        *, recorded: bool = False,
    ) -> list[Step]:  # fmt: skip
        """The steps of one call on one rank, in the order in which the host enqueues them: side
        streams forked first, joined last. What orders its copies and kernels is among them, where
        the plan leaves that out.

        Args:
            shapes: of every tensor, of one rank's part if symmetric.
            scalars: the values of the others.
            recorded: whether a CUDA graph records them.
        """
        key = rank, world_size, tuple(shapes.items()), _keys(scalars), recorded
        with _tracing:
            steps = self._traces.pop(key, None)
            if steps is None:
                sync = self._sync_of(world_size, shapes, scalars)
                steps = self._traced(rank, world_size, shapes, scalars)
                if sync is not None:
                    steps = sync.apply(rank, world_size, steps, self._with_options, recorded)
            self._traces[key] = steps
            if len(self._traces) > _TRACES:
                del self._traces[next(iter(self._traces))]
        return steps

    def launches(
        self, world_size: int, shapes: Mapping[str, Shape], scalars: Mapping[str, Any]
    ) -> list[Launch]:
        """A launch of each program that one call launches on some rank, or that a CUDA graph
        records for it, in the same order whichever rank asks: all compile them, so that hidden
        memory is at one place on all.

        Args:
            shapes, scalars: as for ``trace``.
        """
        found: dict[int, Launch] = {}
        for rank, recorded in product(range(world_size), (False, True)):
            for step in self.trace(rank, world_size, shapes, scalars, recorded=recorded):
                if isinstance(step, Launch):
                    found.setdefault(id(step.program), step)
        return list(found.values())

    def _sync_of(
        self, world_size: int, shapes: Mapping[str, Shape], scalars: Mapping[str, Any]
    ) -> PlanSync | PullSync | None:
        """What orders a call: the same for the same shapes, in all calls that need it."""
        key = world_size, tuple(shapes.items())
        call = key, _keys(scalars)
        if self._last[0] != call:
            from .sync_pull import pulls_of
            from .sync_push import refuse_beside_itself, refuse_pushes, sync_of

            ranks = range(world_size)
            try:
                traces = [self._traced(r, world_size, shapes, scalars) for r in ranks]
            except RegionError:
                return None  # the rank whose region it is says so
            refuse_beside_itself(traces)
            found = pulls_of(traces) or sync_of(traces)
            if found is not None:
                self._syncs.setdefault(key, found)
            elif key in self._syncs:
                refuse_pushes(traces)
            self._last = call, found is not None
        return self._syncs[key] if self._last[1] else None

    def _traced(
        self, rank: int, world_size: int, shapes: Mapping[str, Shape], scalars: Mapping[str, Any]
    ) -> list[Step]:
        """The steps as the plan says them."""
        p = Steps(rank, world_size)
        arguments = [
            scalars[a.name]
            if a.shape is None
            else Region.of(a, a.across(shapes[a.name], world_size))
            for a in self.parameters
        ]
        self.body(p, *arguments)
        sides = list(dict.fromkeys(s.stream for s in p.steps if s.stream is not None))
        fork: list[Step] = [WaitStream(s, self.site, 0, other=None) for s in sides]
        join: list[Step] = [WaitStream(None, self.site, 0, other=s) for s in sides]
        return [*fork, *map(self._prepared, p.steps), *join]

    def _prepared(self, step: Step) -> Step:
        """``step`` with the plan's options and for the sizes of its arguments, if it launches a
        program: the same for the same ones."""
        if not isinstance(step, Launch) or isinstance(step.kernel, Kernel):
            return step
        program = step.program
        if not isinstance(step.kernel, DynamicKernel):
            program = self._with_options(program)
        if needs_sizes(program):
            program = specialize_sizes(program, step.sizes)
        return replace(step, program=program)

    def _with_options(self, program: tirx.PrimFunc) -> tirx.PrimFunc:
        known = self._programs.get(id(program))
        if known is None:
            configured, _ = split_options(program, self.pass_configs)
            known = self._programs[id(program)] = program, configured
        return known[1]

    def kernels(self, world_size: int) -> list[tirx.PrimFunc]:
        """The programs that a call launches on any rank, with what orders them, as it compiles
        them.

        Raises:
            TileWeaveError: an extent is dynamic, or there are scalars: the call decides.
        """
        return [step.program for step in self.launches_of_any_call(world_size)]

    def launches_of_any_call(self, world_size: int) -> list[Launch]:
        """``launches`` of a plan whose calls launch all the same.

        Raises:
            TileWeaveError: an extent is dynamic, or there are scalars: the call decides.
        """
        shapes = shapes_of(self.parameters, {}, self.name)
        scalars = [p.name for p in self.parameters if p.shape is None]
        if scalars:
            raise TileWeaveError(
                f"{self.name}: what it launches may depend on {', '.join(scalars)}; expected a "
                "plan without scalars"
            )
        return self.launches(world_size, shapes, {})

    def is_synchronised(self, world_size: int) -> bool:
        """Whether some call for ``world_size`` ranks was given what orders it."""
        return any(s is not None for (ranks, _), s in self._syncs.items() if ranks == world_size)

    @cached_property
    def _calls(self) -> Any:
        from ..executor.calls import Calls

        return Calls(self)

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """Enqueue the steps on torch's current stream and on side streams; the host does not wait.

        Collective the first time, when it compiles its kernels; call it once before capturing it
        in a CUDA graph.

        Raises:
            TileWeaveError: an argument that does not fit the declaration. Nothing is enqueued then.
        """
        self._calls(*args, **kwargs)

    def compile(self) -> None:
        """Compile its kernels, and take the hidden memory that they need, ahead of the first call.
        Collective.

        Raises:
            HeapExhausted: there is not enough symmetric memory; nothing is taken then.
            TileWeaveError: an extent is dynamic, or there are scalars: the call decides what it
                launches; or what ``tw.compile`` raises.
        """
        self._calls.compile()

    def ready(self, *args: Any) -> tuple[ReadyCall, list[int]]:
        """What a call does, checked, and where its tensors lie; the first time also compiled,
        collectively. Called with other addresses it is a call with such tensors that lie elsewhere,
        from the same thread in the same stream, as long as it is valid; a CUDA graph records it if
        one is being captured now.

        Raises:
            TileWeaveError: an argument that does not fit the declaration, or dynamic extents, which
                keep calls apart.
        """
        if dynamic := dynamic_extents(self.parameters):
            names = ", ".join(map(str, dynamic))
            raise TileWeaveError(f"{self.name}: {names} dynamic; expected numbers as extents")
        ready, _, addresses = self._calls.ready(args, {})
        return ready, addresses

    def free(self) -> None:
        """Give the hidden memory of the kernels that it compiled back. Collective, in the same
        order everywhere; a later call compiles anew."""
        self._calls.free()

    def __repr__(self) -> str:
        return f"tw.plan {self.name}({', '.join(p.name for p in self.parameters)})"


def _keys(scalars: Mapping[str, Any]) -> tuple:
    return tuple((name, key_of(value)) for name, value in scalars.items())


def plan(
    function: Callable[..., None] | None = None, *, pass_configs: Mapping[str, Any] | None = None
) -> Any:
    """Decorator, ``@tw.plan`` or ``@tw.plan(pass_configs={...})``: a function that says the steps
    of an operator becomes that operator, a ``tw.Plan``.

    The first parameter gets the ``tw.Steps`` to say them to; the others are annotated as those of a
    ``@T.prim_func``. The function gets numbers for scalars and regions for tensors, and may branch
    on ``p.rank``, ``p.world_size``, scalars and shapes; the last steps it said for equal ones serve
    again. A parameter annotated None is left out of calls, as of those of a ``@T.prim_func``; the
    function gets None for it.

    Args:
        pass_configs: as for ``tw.compile``, of each kernel that the plan compiles.

    Raises:
        TileWeaveError: a parameter without such an annotation, or an option that there is not.
    """
    if function is None:
        return partial(plan, pass_configs=pass_configs)
    if not (inspect.isfunction(function) or inspect.ismethod(function)):
        raise TileWeaveError(f"plan: {function!r}; expected a function")
    first, *others = inspect.signature(function).parameters.values() or [None]
    code = function.__code__
    site = f"{code.co_filename}:{code.co_firstlineno}"
    parameters = []
    absent = {given.name: None for given in others if given.annotation is None}
    for given in others:
        if given.name in absent:
            continue
        parameter = Parameter.of(given.name, given.annotation)
        if parameter is None or given.default is not given.empty or given.kind not in _BY_NAME:
            shown = "" if given.annotation is given.empty else f": {given.annotation!r}"
            if isinstance(given.annotation, str):
                shown += " (from __future__ import annotations makes it a string)"
            raise TileWeaveError(
                f"plan {function.__name__}: parameter {_STARS.get(given.kind, '')}{given.name}"
                f"{shown}; expected T.Tensor(...), W.Symmetric(...) or a scalar type such as "
                f"T.int32, without a default, and a name to call it by\n --> {site}"
            )
        parameters.append(parameter)
    refused = None
    if first is None:
        refused = "no parameters; expected one for the steps"
    elif first.kind is first.KEYWORD_ONLY or Parameter.of(first.name, first.annotation):
        refused = f"parameter {first.name} comes first; expected one for the steps before it"
    elif code.co_flags & _LATER:
        refused = "says its steps when somebody iterates or awaits; expected a plain function"
    if refused is not None:
        raise TileWeaveError(f"plan {function.__name__}: {refused}\n --> {site}")

    def body(p: Steps, *args: Any) -> None:
        function(p, **absent, **{a.name: arg for a, arg in zip(parameters, args, strict=True)})

    return Plan(function.__name__, parameters, body, site, pass_configs)
