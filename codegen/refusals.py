"""Refuse programs that TileLang fails to compile: name the statement and what to write instead."""

from __future__ import annotations

import math
import re
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version

from tvm import IRModule, tirx
from tvm.target import Target

from ..builtins.errors import LanguageError
from ..builtins.versions import SUPPORTED_TILELANG, installed_tilelang, numbers_of
from ..passes.ir.accesses import accesses_of, name_of, touches_in
from ..passes.ir.origin import ORIGIN
from ..passes.ir.pipelined_loops import is_pipelined, loop_name
from ..passes.ir.tma import may_have_producer
from ..passes.ir.walk import arrows, format_expr, headers_of, line_of, nodes_in, op_name
from .culprits import Culprit, culprit_of
from .stderr import quiet

Lower = Callable[[IRModule], IRModule]

_PRODUCERS = 128
"""Threads that warp specialization adds to a block."""


def explain_failure(error: Exception, mod: IRModule, lower: Lower, target: Target) -> LanguageError:
    """Return the error that names the statement for which ``lower(mod)`` has raised ``error``."""
    kind = _kind(error)

    def fails(part: IRModule) -> bool:
        try:
            lower(part)
        except Exception as other:
            return _kind(other) == kind
        return False

    with quiet():
        culprit = culprit_of(mod, fails)
    if culprit is None:
        names = ", ".join(str(variable.name_hint) for variable in mod.functions)
        what, legal = _unknown_failure(str(error))
        return LanguageError(f"{names}: {what}; expected {legal}")
    failure = _Failure(error, culprit, may_have_producer(target))
    what, legal = failure.explanation()
    places = [(_name(s), line_of(s)) for s in failure.stmts]
    return LanguageError(f"{_name(failure.stmt)}: {what}; expected {legal}{arrows(places)}")


def _kind(error: Exception) -> tuple[str, str]:
    """Return the type of an error and the start of its message, without numbers."""
    return type(error).__name__, re.sub(r"\b\d+\b", "", str(error).strip())[:60]


@dataclass(frozen=True)
class _Failure:
    """An error of TileLang and its cause."""

    error: Exception
    culprit: Culprit
    has_producers: bool

    def explanation(self) -> tuple[str, str]:
        """Return what is wrong, and what is legal."""
        message = str(self.error).strip()
        for pattern, explain in _KINDS.items():
            match = re.search(pattern, message)
            text = explain(self, match) if match else None
            if text is not None:
                return text
        return _unknown_failure(message)

    @cached_property
    def stmts(self) -> list[tirx.Stmt]:
        """The statements of the program among those that are responsible."""
        own = [s for s in self.culprit.stmts if not any(ORIGIN in c.annotations for c in _calls(s))]
        return own or self.culprit.stmts

    @cached_property
    def stmt(self) -> tirx.Stmt:
        """The statement that TileLang was lowering, or that needs a layout, or the last one."""
        frames = [frame.name for frame in traceback.extract_tb(self.error.__traceback__)]
        lowered = [match[1].lower() for f in frames if (match := _LOWERING.search(f))]
        for stmt in reversed(self.stmts):
            op = op_name(getattr(stmt, "value", None)).removeprefix("tl.tileop.")
            if op and lowered and lowered[-1].startswith(op):
                return stmt
        if re.search(_PART_OF_WARP, str(self.error)):
            stores = [s for s in self.stmts if isinstance(s, tirx.BufferStore)]
            return (stores or self.stmts)[-1]
        if re.search(_LAYOUT, str(self.error)):
            reductions = [s for s in self.stmts if _is_reduction(s)]
            return (reductions or [s for s in self.stmts if _fragments(s)] or self.stmts)[-1]
        return self.stmts[-1]

    @property
    def threads(self) -> int:
        """Number of threads of a block, as the program has them."""
        blocks = nodes_in(self.culprit.kernel.body, tirx.SBlock)
        counts = [b.annotations["tl.launch_threads"] for b in blocks if _LAUNCH in b.annotations]
        return math.prod(map(int, counts[0])) if counts else 1

    @property
    def is_specialized(self) -> bool:
        """Return whether TileLang may add producer warps."""
        loops = nodes_in(self.culprit.kernel.body, tirx.For)
        return self.has_producers and any(map(is_pipelined, loops))


_LAUNCH = "tl.launch_threads"
_LOWERING = re.compile(r"::(\w+)Node::(?:Lower|InferLayout)\b")
"""C++ function that lowers or lays out a tile operation, such as ``tvm::tl::CopyNode::Lower``."""
_LAYOUT = (
    "no available layout|has errors: |[Ll]ayout (?:may|infer) conflict|not injective|"
    "Inconsistent layouts|power of two|Get different layout"
)
_PART_OF_WARP = "participating threads are not warp-uniform"
Explanation = tuple[str, str]


def _explain_layout(failure: _Failure, _: re.Match) -> Explanation | None:
    fragments = list(dict.fromkeys(b for s in failure.stmts for b in _fragments(s)))
    uneven = [b for b in fragments if not all(map(_is_power_of_two, map(int, b.shape)))]
    threads, names = failure.threads, " and ".join(map(_with_shape, fragments[:2]))
    if not fragments:
        return _explain_fill(failure)
    if uneven or not _is_power_of_two(threads):
        names = " and ".join(map(_with_shape, (uneven or fragments)[:2]))
        padding = ", with added elements that do not change the result"
        return (
            f"TileLang does not divide {names} evenly among {threads} threads",
            "extents and a number of threads that are powers of two"
            f"{padding if uneven and _is_reduction(failure.stmt) else ''}",
        )
    if failure.is_specialized and not _is_power_of_two(threads + _PRODUCERS):
        return (
            f"TileLang does not divide {names} evenly among {threads + _PRODUCERS} threads, "
            "which a block has with the producer warps of T.Pipelined",
            "threads=128, or T.serial",
        )
    return (
        f"TileLang finds no layout of {names} in registers that suits all statements",
        "a copy through a tile in shared memory between two of them",
    )


def _explain_fill(failure: _Failure) -> Explanation | None:
    if op_name(getattr(failure.stmt, "value", None)) != "tl.tileop.fill":
        return None
    region, tile, _ = touches_in(failure.stmt)[0]
    extents = [e for e in region.args[2:] if isinstance(e, tirx.IntImm)]
    return (
        f"TileLang does not divide {' x '.join(map(str, extents))} elements of {tile.name} evenly "
        f"among {failure.threads} threads",
        "an assignment in T.Parallel, in which some threads may have fewer elements",
    )


def _explain_unused(failure: _Failure, match: re.Match) -> Explanation:
    return (
        f"TileLang finds no layout of {match[1]} in registers, because no other statement uses its "
        "elements",
        f"a statement that reads {match[1]}, or none that writes it",
    )


def _explain_constant_index(failure: _Failure, match: re.Match) -> Explanation:
    return (
        f"the index {match[1]} selects elements of a fragment, which only their threads can access",
        "a copy in shared memory, which all threads can access at any index",
    )


def _explain_two_indices(_: _Failure, match: re.Match) -> Explanation:
    name, first, second = match.groups()
    return (
        f"indexes the fragment {name} by {first} and {second}, which are of different threads",
        f"one index of {name} in a loop, or a copy of {name} in shared memory for the other one",
    )


def _explain_scan(failure: _Failure, _: re.Match) -> Explanation:
    name = next((b.name for b in accesses_of(failure.stmt).writes.values()), "")
    return (
        f"reads a tile in shared memory and writes the fragment {name}",
        f"another tile in shared memory, and T.copy from there to {name}",
    )


def _explain_wgmma(failure: _Failure, _: re.Match) -> Explanation | None:
    operands = accesses_of(failure.stmt).reads.values()
    short = [b for b in operands if b.scope().startswith("shared") and int(b.shape[-1]) % 16]
    if not short:
        return None
    return (
        f"TileLang has no wgmma layout of {_with_shape(short[0])}, whose rows are not along k",
        "rows of a multiple of 16 elements, or the transposed operand (transpose_A, transpose_B)",
    )


def _explain_warps(failure: _Failure, match: re.Match) -> Explanation:
    needs = match[2].replace("Each warp must own", "such that each warp has")
    return match[1], f"a number of threads or a shape of tiles {needs}"


def _explain_shapes(failure: _Failure, _: re.Match) -> Explanation | None:
    sides = [(region.args[2:], buffer.name) for region, buffer, _ in touches_in(failure.stmt)]
    if len(sides) != 2 or not op_name(failure.stmt.value).endswith("copy"):
        return None
    return unequal_copy(sides)


def unequal_copy(sides: Iterable[tuple[Sequence[tirx.PrimExpr], str]]) -> Explanation:
    """Return what is wrong with a copy between different extents.

    Args:
        sides: extents and name of the source, and of the destination.
    """
    source, target = (
        f"{' x '.join(map(format_expr, extents))} elements of {name}" for extents, name in sides
    )
    return f"copies {source} to {target}", "equal extents on both sides"


def _explain_condition(failure: _Failure, _: re.Match) -> Explanation:
    return (
        "needs a barrier under a condition that only a part of a warp fulfills",
        "a condition that whole warps of 32 threads fulfill, or the accesses of other threads' "
        "elements outside of it",
    )


def _explain_divisor(_: _Failure, match: re.Match) -> Explanation:
    return f"{match[1]} is {match[3]}", f"a multiple of {match[2]}"


_KINDS: dict[str, Callable[[_Failure, re.Match], Explanation | None]] = {
    _LAYOUT: _explain_layout,
    r"layout for fragment (\w+) can not be inferred": _explain_unused,
    r"Fragment buffer access with non-zero index \[(.*?)\]": _explain_constant_index,
    r"second\.indices, indices.*false: (\w+): (\(.*?\)) and (\(.*\))": _explain_two_indices,
    r"IsSharedBuffer\(op\.dst\)": _explain_scan,
    "loop range is smaller than original": _explain_shapes,
    _PART_OF_WARP: _explain_condition,
    r"([MNK]) must be divisible by (\d+), but got (\d+)": _explain_divisor,
    r"canonical GMMA|WGMMA operand layout": _explain_wgmma,
    r"(M=\d+, N=\d+ cannot be .*?)\. (Each warp must own [^;]*)": _explain_warps,
}
"""Messages of TileLang, and the functions that explain them."""


def _unknown_failure(message: str) -> Explanation:
    newest = SUPPORTED_TILELANG[-1]
    hint = f", or tilelang=={newest}" if installed_tilelang() < numbers_of(newest) else ""
    return (
        f"TileLang {version('tilelang')} fails: {_sentence(message)}",
        f"another form of this statement{hint}",
    )


def _sentence(message: str) -> str:
    """Return the first sentence of a message of TileLang, or the condition that does not hold."""
    lines = (line.strip() for line in message.splitlines())
    line = next((line for line in lines if re.search("[a-zA-Z]{3}", line)), "no message")
    match = re.match(r"Check failed: (.*?)(?: is false)? ?: (.*)|Check failed: (.*)", line + " ")
    if match:
        line = (match[2] or "").strip() or f"{match[1] or match[3]} does not hold"
    return re.split(r"\. |; ", line)[0][:200].rstrip(" .:")


def _calls(stmt: tirx.Stmt) -> list[tirx.Call]:
    return nodes_in(stmt, tirx.Call)


def _is_reduction(stmt: tirx.Stmt) -> bool:
    return op_name(getattr(stmt, "value", None)) == "tl.tileop.reduce"


def _fragments(stmt: tirx.Stmt) -> list[tirx.Buffer]:
    """Return the fragments that ``stmt`` accesses."""
    accesses = accesses_of(stmt)
    buffers = {**accesses.reads, **accesses.writes}.values()
    return [b for b in buffers if b.scope() == "local.fragment"]


def _with_shape(buffer: tirx.Buffer) -> str:
    return f"{buffer.name} of shape {tuple(map(int, buffer.shape))}"


def _is_power_of_two(number: int) -> bool:
    return number & (number - 1) == 0


def _name(stmt: tirx.Stmt) -> str:
    """Return the name of a statement, a loop or a branch for messages."""
    if isinstance(stmt, tirx.For) and stmt.kind == tirx.ForKind.SERIAL:
        return loop_name(stmt)
    if headers_of(stmt) and not isinstance(stmt, tirx.For):
        return "if" if isinstance(stmt, tirx.IfThenElse) else "while"
    return name_of(stmt)
