"""Options of the inferred synchronization: ``pass_configs`` of ``tw.compile``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from tvm import tirx
from tvm.ir.transform import PassContext

from ....builtins.errors import TileWeaveError

PREFIX = "tileweave."
OPTIONS = "tileweave.options"
"""Attribute of a program that holds its compile options as JSON."""
STOCK_OPTIONS = "tileweave.tilelang_options"
"""Attribute of a program that holds options of TileLang as JSON."""
REUSE = ("auto", "double_buffer", "barrier", "credit")
PROTOCOLS = ("flag", "ll", "auto")
VERIFY = ("error", "warn", "off")


@dataclass(frozen=True)
class Options:
    """Options of a program. The key of each in ``pass_configs`` is ``tileweave.`` and its name.

    Attributes:
        reuse: when the next launch may reuse memory: ``double_buffer`` (proven, for
            ``W.alloc_symmetric``), ``credit`` (a reader signals that it has finished), ``barrier``
            (a reader signals that it has started the next launch), or ``auto``, the first of these
            that is possible.
        granule: tensor name -> size in elements of the box that one counter covers.
        protocol: tensor name -> ``flag`` (counters, signals and waits), ``ll`` (words of data and a
            flag), or ``auto``: ``ll`` for small granules where it is possible.
        verify: ``error`` or ``warn`` if a program cannot be proven right. ``off`` leaves every
            program unchanged, for programs that are ordered outside the kernel.
        resident_blocks: number of blocks of a launch that run on a GPU at the same time.
        version_bytes: maximum memory on a rank for the versions of one tensor.
        delays: seed of random sleeps before signals and after waits, for tests.
        trace: whether the kernel records events; ``tw.trace`` sets it.
        check_rows: whether the kernel checks the rows of ragged tensors, for tests.
        share: name of programs that share a kernel if they differ only in integers, such as
            programs for several numbers of rows; "" for none.
    """

    reuse: str = "auto"
    granule: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    protocol: Mapping[str, str] = field(default_factory=dict)
    verify: str = "error"
    resident_blocks: int = 132
    version_bytes: int = 1 << 28
    delays: int | None = None
    trace: bool = False
    check_rows: bool = False
    share: str = ""


def with_options(func: tirx.PrimFunc, configs: Mapping[str, Any]) -> tirx.PrimFunc:
    """Attach all ``pass_configs`` to ``func``; ``split_options`` returns those of TileLang again.

    Raises:
        TileWeaveError: an option is unknown, or has an illegal value.
    """
    func, others = split_options(func, configs)
    if not others:
        return func
    try:
        return func.with_attr(STOCK_OPTIONS, tirx.StringImm(json.dumps(others, sort_keys=True)))
    except TypeError:
        name, value = next((n, v) for n, v in others.items() if not _is_json(v))
        raise TileWeaveError(
            f"pass_configs: {name}={value!r}; expected a bool, a number, a string, or lists and "
            "dicts of these"
        ) from None


def split_options(
    func: tirx.PrimFunc, configs: Mapping[str, Any]
) -> tuple[tirx.PrimFunc, dict[str, Any]]:
    """Attach TileWeave's options to ``func``, beside those that it has. Return the other
    ``pass_configs``, with those that ``with_options`` has attached.

    Raises:
        TileWeaveError: an option is unknown, or has an illegal value.
    """
    own_configs = own_options(configs)
    others = {n: v for n, v in configs.items() if not n.startswith(PREFIX)}
    if func.attrs and STOCK_OPTIONS in func.attrs:
        others = {**json.loads(func.attrs[STOCK_OPTIONS].value), **others}
        func = func.without_attr(STOCK_OPTIONS)
    return _with_own_options(func, own_configs) if own_configs else func, others


def _with_own_options(func: tirx.PrimFunc, options: Mapping[str, Any]) -> tirx.PrimFunc:
    """Return ``func`` with these options, by names without prefix, beside those that it has."""
    text = func.attrs[OPTIONS].value if func.attrs and OPTIONS in func.attrs else "{}"
    fields = json.dumps({**json.loads(text), **options}, sort_keys=True)
    if fields == text:
        return func
    return func.with_attr(OPTIONS, tirx.StringImm(fields))


def _is_json(value: Any) -> bool:
    try:
        json.dumps(value)
    except TypeError:
        return False
    return True


def with_trace(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Return ``func`` with the option ``trace``, beside the options that it has."""
    return _with_own_options(func, {"trace": True})


def own_options(configs: Mapping[str, Any]) -> dict[str, Any]:
    """Return TileWeave's options in ``pass_configs``, with names that have no prefix.

    Raises:
        TileWeaveError: an option is unknown, or has an illegal value.
    """
    if not isinstance(configs, Mapping) or not all(isinstance(n, str) for n in configs):
        raise TileWeaveError(f"pass_configs={configs!r}; expected a dict, option -> value")
    own_configs = {n[len(PREFIX) :]: v for n, v in configs.items() if n.startswith(PREFIX)}
    for name, value in configs.items():
        if not name.startswith(PREFIX):
            _require_stock(name, value)
    for name, value in own_configs.items():
        legal = _LEGAL.get(name)
        if legal is None:
            names = ", ".join(PREFIX + n for n in _LEGAL)
            raise TileWeaveError(f"pass_configs: {PREFIX}{name}; expected {names}")
        if not legal[0](value):
            raise TileWeaveError(f"pass_configs: {PREFIX}{name}={value!r}; expected {legal[1]}")
    return own_configs


def _require_stock(name: str, value: Any) -> None:
    """Refuse an option that TileLang does not accept, with a clearer message than TileLang's."""
    try:
        PassContext(config={name: value})
    except (AttributeError, OverflowError, TypeError, ValueError) as error:
        stock = PassContext.list_configs()
        if name in stock:
            reason = str(error).splitlines()[-1]
            raise TileWeaveError(f"pass_configs: {name}={value!r}; {reason}") from None
        matches = get_close_matches(name, stock, n=1, cutoff=0)
        raise TileWeaveError(
            f"pass_configs: {name}; expected an option of TileLang, such as {matches[0]}"
        ) from None


def options_of(func: tirx.PrimFunc) -> Options:
    """Return the options of ``func``."""
    if not func.attrs or OPTIONS not in func.attrs:
        return Options()
    fields = json.loads(func.attrs[OPTIONS].value)
    granule = {name: tuple(size) for name, size in fields.pop("granule", {}).items()}
    return Options(**fields, granule=granule)


def is_chosen(func: tirx.PrimFunc, name: str) -> bool:
    """Return whether ``pass_configs`` set the option."""
    options = func.attrs[OPTIONS].value if func.attrs and OPTIONS in func.attrs else "{}"
    return name in json.loads(options)


def _is_granules(value: Any) -> bool:
    return isinstance(value, Mapping) and all(
        isinstance(name, str)
        and isinstance(size, (tuple, list))
        and all(isinstance(n, int) and n > 0 for n in size)
        for name, size in value.items()
    )


def _is_protocols(value: Any) -> bool:
    return isinstance(value, Mapping) and all(
        isinstance(name, str) and protocol in PROTOCOLS for name, protocol in value.items()
    )


def _one_of(names: tuple[str, ...]) -> tuple:
    return (lambda value: value in names), " or ".join(map(repr, names))


_LEGAL: dict[str, tuple] = {
    "reuse": _one_of(REUSE),
    "granule": (_is_granules, "a dict, tensor name -> elements along each axis, such as (64, 64)"),
    "protocol": (_is_protocols, "a dict, tensor name -> 'flag' or 'll' or 'auto'"),
    "verify": _one_of(VERIFY),
    "resident_blocks": (lambda value: type(value) is int and value > 0, "a positive integer"),
    "version_bytes": (lambda value: type(value) is int and value >= 0, "bytes, 0 or more"),
    "delays": (lambda value: type(value) is int and value >= 0, "an integer, 0 or more"),
    "trace": (lambda value: type(value) is bool, "True or False"),
    "check_rows": (lambda value: type(value) is bool, "True or False"),
    "share": (lambda value: isinstance(value, str) and bool(value), "a name"),
}
