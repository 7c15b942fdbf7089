"""NumPy interpreter of the text of a tile program: what a generated program must compute.

It shares nothing with TileWeave: it reads the Python source. Ranks and blocks run in lockstep,
statement by statement, which is right for programs whose reads follow the writes in the text. All
numbers are float64, and a store checks that its type represents them exactly, so the order of
additions has no influence.
"""

from __future__ import annotations

import ast
import itertools
import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

_NARROW = {
    "bfloat16": ml_dtypes.bfloat16,
    "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
    "float8_e5m2": ml_dtypes.float8_e5m2,
}
_LANE = "$lane"
_JUMPS = ("$break", "$continue")
"""Variables of a loop: the lanes that have left it, and those that have left its iteration."""
_BINARY: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod,
    ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge,
    ast.Eq: operator.eq, ast.NotEq: operator.ne,
}  # fmt: skip
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "max": np.maximum, "min": np.minimum, "abs": np.abs, "if_then_else": np.where,
    "cast": lambda value, dtype: value,
}  # fmt: skip
_REDUCTIONS: dict[str, Callable[..., np.ndarray]] = {
    "reduce_sum": np.sum, "reduce_max": np.max, "reduce_min": np.min,
    "reduce_abssum": lambda x, axis: np.abs(x).sum(axis),
    "reduce_absmax": lambda x, axis: np.abs(x).max(axis),
}  # fmt: skip
_COMBINE = {"sum": np.add, "max": np.maximum, "min": np.minimum}

Env = dict[str, Any]
"""Variables of one block: numbers, arrays with a number for each thread or iteration, tiles."""


class Unsuitable(Exception):
    """The program has no exact result: it reads uninitialized memory, rounds, or races."""


def numpy_type(name: str) -> np.dtype:
    return np.dtype(_NARROW.get(name, name))


class Tile:
    """Tensor or tile: an array of float64, NaN where nothing is written yet."""

    def __init__(self, shape: Sequence[int], dtype: str) -> None:
        self.data = np.full(tuple(shape), np.nan)
        self.dtype = numpy_type(dtype)

    def exact(self, values: Any) -> np.ndarray:
        """Return ``values``, which the type must represent."""
        values = np.asarray(values, np.float64)
        if np.isnan(values).any():
            raise Unsuitable("a value is not a number")
        if self.dtype.kind in "iu":
            info = np.iinfo(self.dtype)
            if (values < info.min).any() or (values > info.max).any():
                raise Unsuitable(f"{self.dtype} overflows")
        elif (values.astype(self.dtype).astype(np.float64) != values).any():
            raise Unsuitable(f"{self.dtype} rounds")
        return values


@dataclass(frozen=True)
class Region:
    """Box of a tile: start and extent of each axis.

    Attributes:
        scalar: the axes that have an index instead of a range.
    """

    tile: Tile
    start: tuple[int, ...]
    extent: tuple[int, ...]
    scalar: tuple[bool, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(n for n in self.extent if n != 1)

    def with_extents(self, other: Region) -> Region:
        """Return the box, with the extents of ``other`` if it has only its first element."""
        if not self.scalar or not all(self.scalar):
            return self
        trailing = other.extent[-len(self.extent) :]
        return Region(
            self.tile, self.start, (1,) * (len(self.extent) - len(trailing)) + trailing, ()
        )

    def inside(self) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
        """Return the part within the tile, as indices of the tile and of the box."""
        of_tile, of_box = [], []
        for start, extent, size in zip(self.start, self.extent, self.tile.data.shape, strict=True):
            first, last = max(start, 0), max(min(start + extent, size), max(start, 0))
            of_tile.append(slice(first, last))
            of_box.append(slice(first - start, last - start))
        return tuple(of_tile), tuple(of_box)

    def load(self) -> np.ndarray:
        box, (of_tile, of_box) = np.zeros(self.extent), self.inside()
        box[of_box] = self.tile.data[of_tile]
        return box

    def store(self, values: np.ndarray) -> None:
        of_tile, of_box = self.inside()
        self.tile.data[of_tile] = self.tile.exact(values.reshape(self.extent)[of_box])


class Accesses:
    """Accesses of the lanes of one statement to elements of tiles."""

    def __init__(self) -> None:
        self.of_tile: dict[int, list[tuple[np.ndarray, np.ndarray, bool]]] = {}

    def add(self, tile: Tile, lanes: np.ndarray, places: np.ndarray, is_write: bool) -> None:
        places = np.broadcast_to(places, np.shape(lanes))
        self.of_tile.setdefault(id(tile), []).append((lanes, places, is_write))

    def check(self) -> None:
        """Refuse an element that one lane writes and another one accesses."""
        for accesses in self.of_tile.values():
            written = [p for _, p, is_write in accesses if is_write]
            if not written:
                continue
            lanes = np.concatenate([lane for lane, _, _ in accesses])
            places = np.concatenate([p for _, p, _ in accesses])
            _, element = np.unique(places, return_inverse=True)
            first = np.full(element.max(initial=0) + 1, np.iinfo(np.int64).max)
            last = np.full(len(first), -1)
            np.minimum.at(first, element, lanes)
            np.maximum.at(last, element, lanes)
            shared = (first != last)[element]
            if np.isin(places[shared], np.concatenate(written)).any():
                raise Unsuitable("lanes of one statement race")


class Reference:
    """One launch of the program of ``text`` on all ranks.

    Args:
        inputs: one dict per rank, name of a parameter -> array.
    """

    def __init__(self, text: str, ranks: int, inputs: Sequence[dict[str, np.ndarray]]) -> None:
        function = program_of(text)
        self.ranks, self.symmetric = ranks, dict[str, Tile]()
        self.accesses: Accesses | None = None
        self.tensors = []
        for values in inputs:
            tensors = {name: Tile(shape, dtype) for name, shape, dtype in parameters_of(text)}
            for name, array in values.items():
                tensors[name].data[...] = array.astype(np.float64)
            self.tensors.append(tensors)
        for statement in function.body:
            if isinstance(statement, ast.With):
                self._kernel(statement)

    def _kernel(self, statement: ast.With) -> None:
        item = statement.items[0]
        assert isinstance(item.context_expr, ast.Call)
        grid = [ast.literal_eval(n) for n in item.context_expr.args]
        threads = next(
            ast.literal_eval(k.value) for k in item.context_expr.keywords if k.arg == "threads"
        )
        axes, envs = _names(item.optional_vars), []
        for rank in range(self.ranks):
            for block in itertools.product(*map(range, grid)):
                env: Env = dict(self.tensors[rank])
                env |= zip(axes, block, strict=True)
                env["$rank"], env["$threads"] = rank, threads
                envs.append(env)
        self._block(statement.body, envs)

    def _block(self, body: Sequence[ast.stmt], envs: list[Env]) -> None:
        for statement in body:
            envs = _remaining(envs)
            if envs:
                getattr(self, f"_{type(statement).__name__.lower()}")(statement, envs)

    def _pass(self, statement: ast.Pass, envs: list[Env]) -> None:
        pass

    def _break(self, statement: ast.Break | ast.Continue, envs: list[Env]) -> None:
        for env in envs:
            env[f"${type(statement).__name__.lower()}"].update(_lanes_of(env))

    _continue = _break

    def _if(self, statement: ast.If, envs: list[Env]) -> None:
        sides: tuple[list[Env], list[Env]] = [], []
        for env in envs:
            condition = self._value(statement.test, env)
            for side, holds in zip(sides, (condition, np.logical_not(condition)), strict=True):
                if np.ndim(holds) == 0:
                    if holds:
                        side.append(env)
                elif holds.any():
                    side.append(_selected(env, holds))
        self._block(statement.body, sides[0])
        self._block(statement.orelse, sides[1])

    def _for(self, statement: ast.For, envs: list[Env]) -> None:
        call = statement.iter
        assert isinstance(call, ast.Call)
        kind = call.func.attr if isinstance(call.func, ast.Attribute) else "serial"
        if kind == "Parallel":
            for env in envs:
                self._parallel(statement, env, [int(self._value(a, env)) for a in call.args])
            return
        variables = _names(statement.target)
        extents = [int(self._value(call.args[0], env)) for env in envs]
        envs = [env | {name: set() for name in _JUMPS} for env in envs]
        for i in range(max(extents)):
            running = [env for env, extent in zip(envs, extents, strict=True) if i < extent]
            for env in running:
                env["$continue"].clear()
            self._block(statement.body, [env | dict.fromkeys(variables, i) for env in running])

    def _parallel(self, statement: ast.For, env: Env, extents: list[int]) -> None:
        _require_whole(env)
        inner = {n: v for n, v in env.items() if not isinstance(v, np.ndarray)}
        inner |= {name: set() for name in _JUMPS}
        inner |= zip(
            _names(statement.target), np.indices(extents).reshape(len(extents), -1), strict=True
        )
        inner[_LANE] = np.arange(int(np.prod(extents)))
        with self._lanes():
            self._block(statement.body, [inner])

    @contextmanager
    def _lanes(self) -> Iterator[None]:
        """Check the accesses of a parallel loop, or of a statement of single threads."""
        if self.accesses is not None:  # the loop around the statement checks them
            yield
            return
        self.accesses = Accesses()
        yield
        self.accesses.check()
        self.accesses = None

    def _assign(self, statement: ast.Assign, envs: list[Env]) -> None:
        (target,) = statement.targets
        if isinstance(target, ast.Name):
            for env in envs:
                env[target.id] = self._definition(target.id, statement.value, env)
        else:
            self._store(target, envs, lambda env: self._value(statement.value, env))

    def _augassign(self, statement: ast.AugAssign, envs: list[Env]) -> None:
        combine, target = _BINARY[type(statement.op)], statement.target
        read = ast.copy_location(ast.parse(ast.unparse(target), mode="eval").body, target)
        self._store(
            target, envs,
            lambda env: combine(self._value(read, env), self._value(statement.value, env)),
        )  # fmt: skip

    def _definition(self, name: str, value: ast.expr, env: Env) -> Any:
        function = _attribute(value)
        if function == "rank":
            return env["$rank"]
        if function == "get_thread_binding":
            env[_LANE] = np.arange(env["$threads"])
            return np.arange(env["$threads"])
        if function is None or not function.startswith("alloc"):
            return self._value(value, env)
        assert isinstance(value, ast.Call)
        shape, dtype = (ast.literal_eval(a) for a in value.args[:2])
        if function != "alloc_symmetric":
            return Tile(shape, dtype)
        return self.symmetric.setdefault(name, Tile((self.ranks, *shape), dtype))

    def _store(self, target: ast.expr, envs: list[Env], value: Callable[[Env], Any]) -> None:
        assert isinstance(target, ast.Subscript)
        for env in envs:
            with self._lanes():
                v = value(env)
                tile, index = self._element(target, env)
                self._access(tile, index, env, True)
            tile.data[index] = tile.exact(v)

    def _access(self, tile: Tile, index: tuple, env: Env, is_write: bool) -> None:
        lanes = _lanes_of(env)
        places = np.ravel_multi_index(index, tile.data.shape)
        if self.accesses is not None:
            self.accesses.add(tile, lanes, np.asarray(places), is_write)

    def _element(self, node: ast.Subscript, env: Env) -> tuple[Tile, tuple]:
        tile = self._value(node.value, env)
        index = [self._value(n, env) for n in _indices(node)]
        for value, size in zip(index, tile.data.shape, strict=True):
            if np.min(value) < 0 or np.max(value) >= size:
                raise Unsuitable("an index is out of range")
        return tile, tuple(np.broadcast_arrays(*index))

    def _value(self, node: ast.expr, env: Env) -> Any:
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.Name):
            if node.id not in env:
                raise Unsuitable(f"{node.id} is not defined")
            return env[node.id]
        if isinstance(node, ast.UnaryOp):
            return -self._value(node.operand, env)
        if isinstance(node, ast.BinOp):
            return _BINARY[type(node.op)](self._value(node.left, env), self._value(node.right, env))
        if isinstance(node, ast.Compare):
            values = [self._value(n, env) for n in (node.left, *node.comparators)]
            pairs = zip(node.ops, itertools.pairwise(values), strict=True)
            tests = [_BINARY[type(o)](*pair) for o, pair in pairs]
            return np.logical_and.reduce(np.broadcast_arrays(*tests))
        if isinstance(node, ast.BoolOp):
            combine = np.logical_and if isinstance(node.op, ast.And) else np.logical_or
            values = [self._value(n, env) for n in node.values]
            return combine.reduce(np.broadcast_arrays(*values))
        if isinstance(node, ast.Subscript):
            tile, index = self._element(node, env)
            self._access(tile, index, env, False)
            values = tile.data[index]
            if np.isnan(values).any():
                raise Unsuitable("uninitialized memory is read")
            return values
        assert isinstance(node, ast.Call), ast.dump(node)
        function = _attribute(node)
        assert function is not None
        return _FUNCTIONS[function](*(self._value(a, env) for a in node.args))

    def _expr(self, statement: ast.Expr, envs: list[Env]) -> None:
        if isinstance(statement.value, ast.Constant):
            return
        call, function = statement.value, _attribute(statement.value)
        assert isinstance(call, ast.Call) and function is not None
        options = {k.arg: k.value for k in call.keywords}
        arguments = [*call.args, *(options.pop(n) for n in ("src", "dst") if n in options)]
        for env in envs:
            _require_whole(env)
            regions = list(self._regions(arguments, env))
            literals = {n: ast.literal_eval(v) for n, v in options.items() if n != "policy"}
            self._operation(function, regions, [*arguments], literals, env)

    def _regions(self, arguments: Sequence[ast.expr], env: Env) -> Iterator[Region]:
        for node in arguments:
            if isinstance(node, ast.Name) and isinstance(tile := self._value(node, env), Tile):
                shape = tile.data.shape
                yield Region(tile, (0,) * len(shape), shape, ())
            elif isinstance(node, ast.Subscript):
                yield self._region(node, env)

    def _region(self, node: ast.Subscript, env: Env) -> Region:
        tile = self._value(node.value, env)
        start, extent, scalar = [], [], []
        for index, size in zip(_indices(node), tile.data.shape, strict=True):
            scalar.append(not isinstance(index, ast.Slice))
            if isinstance(index, ast.Slice):
                first = 0 if index.lower is None else self._value(index.lower, env)
                last = size if index.upper is None else self._value(index.upper, env)
                start.append(int(first))
                extent.append(int(last - first))
            else:
                start.append(int(self._value(index, env)))
                extent.append(1)
        return Region(tile, tuple(start), tuple(extent), tuple(scalar))

    def _operation(
        self, function: str, regions: list[Region], arguments: list[ast.expr],
        options: dict[Any, Any], env: Env,
    ) -> None:  # fmt: skip
        if function == "copy":
            source, target = regions
            source, target = source.with_extents(target), target.with_extents(source)
            if source.shape != target.shape:
                raise Unsuitable(f"a copy of {source.shape} to {target.shape}")
            values = source.load()
            if np.isnan(values).any():
                raise Unsuitable("uninitialized memory is copied")
            target.store(values)
        elif function in ("clear", "fill"):
            value = self._value(arguments[1], env) if function == "fill" else 0
            regions[0].store(np.full(regions[0].extent, value, float))
        elif function == "gemm":
            self._product(regions, options)
        elif function in _REDUCTIONS:
            source, target = regions
            values = _REDUCTIONS[function](source.load(), axis=options.get("dim", -1))
            if not options.get("clear", True):
                values = _COMBINE[function[-3:]](target.load(), values.reshape(target.extent))
            target.store(values)
        elif function == "cumsum":
            regions[-1].store(np.cumsum(regions[0].load(), axis=options.get("dim", 0)))
        elif function not in ("sync_threads", "annotate_layout"):
            raise Unsuitable(f"T.{function}")

    def _product(self, regions: list[Region], options: dict[Any, Any]) -> None:
        a, b, c = regions
        x, y = (r.load().reshape(r.shape) for r in (a, b))
        x = x.T if options.get("transpose_A") else x
        y = y.T if options.get("transpose_B") else y
        total = x @ y
        if not options.get("clear_accum"):
            total = total + c.load().reshape(c.shape)
        c.store(total)


def _lanes_of(env: Env) -> np.ndarray:
    return env.get(_LANE, np.zeros(1, int))


def _selected(env: Env, lanes: np.ndarray) -> Env:
    return {n: v[lanes] if isinstance(v, np.ndarray) else v for n, v in env.items()}


def _remaining(envs: list[Env]) -> list[Env]:
    """Return the lanes that have not left the iteration of their loop."""
    remaining = []
    for env in envs:
        left = set().union(*(env.get(name, ()) for name in _JUMPS))
        remain = ~np.isin(_lanes_of(env), list(left))
        if remain.any():
            remaining.append(env if remain.all() else _selected(env, remain))
    return remaining


def _require_whole(env: Env) -> None:
    """Refuse a statement of all threads that some threads do not reach."""
    if _LANE in env and len(env[_LANE]) < env["$threads"]:
        raise Unsuitable("a tile statement of some threads")


def program_of(text: str) -> ast.FunctionDef:
    return next(n for n in ast.parse(text).body if isinstance(n, ast.FunctionDef))


def parameters_of(text: str) -> list[tuple[str, tuple[int, ...], str]]:
    """Return name, shape and type of each parameter."""
    parameters = []
    for argument in program_of(text).args.args:
        assert isinstance(argument.annotation, ast.Call)
        shape, dtype = (ast.literal_eval(a) for a in argument.annotation.args)
        parameters.append((argument.arg, shape, dtype))
    return parameters


def is_output(name: str) -> bool:
    return name.startswith("O")


def inputs_of(text: str, ranks: int, seed: int = 0) -> list[dict[str, np.ndarray]]:
    """Return small integers, which few operations take to values that a type rounds.

    A parameter whose name begins with ``O`` is an output, and 0; with ``n``, a count from 0 to 3.
    """
    rng = np.random.default_rng(seed)
    inputs = []
    for _ in range(ranks):
        values = {}
        for name, shape, dtype in parameters_of(text):
            kind = numpy_type(dtype)
            low, high = (0, 1) if is_output(name) else (0, 4) if name[0] == "n" else (-2, 3)
            low = max(low, 0) if kind.kind == "u" else low
            values[name] = rng.integers(low, high, shape).astype(kind)
        inputs.append(values)
    return inputs


def results_of(
    text: str, ranks: int, inputs: Sequence[dict[str, np.ndarray]]
) -> list[dict[str, np.ndarray]]:
    """Return the outputs of each rank.

    Raises:
        Unsuitable: there are none, or they are not exact or not defined.
    """
    if not any(is_output(name) for name, _, _ in parameters_of(text)):
        raise Unsuitable("no result")
    tensors = Reference(text, ranks, inputs).tensors
    return [
        {n: t.data.astype(t.dtype) for n, t in of_rank.items() if is_output(n)}
        for of_rank in tensors
    ]


def _attribute(node: ast.expr) -> str | None:
    """Return ``name`` of a call ``T.name(...)`` or ``W.name(...)``."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return node.func.attr
    return None


def _names(target: ast.expr | None) -> list[str]:
    names = target.elts if isinstance(target, ast.Tuple) else [target]
    return [name.id for name in names if isinstance(name, ast.Name)]


def _indices(node: ast.Subscript) -> list[ast.expr]:
    return node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
